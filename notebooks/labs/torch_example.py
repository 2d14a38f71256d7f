"""Checkpointing in PyTorch: the same outputs, loss and gradients; and the mistakes that break that, each shown.

    python notebooks/labs/torch_example.py

Runs on a CPU in a few seconds. Prints PASS if everything is as said.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


class Block(nn.Module):
    """Norm, a wide layer, dropout, a narrow layer, around a residual."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.drop = nn.LayerNorm(width), nn.Dropout(0.1)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.down(torch.relu(self.up(self.norm(x)))))


def trained(checkpointed: bool) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Output, loss and gradients of a small network; parameters, input and seed are always the same."""
    torch.manual_seed(0)
    blocks = nn.ModuleList(Block(32) for _ in range(4))
    x, target = torch.randn(8, 32), torch.randn(8, 32)
    torch.manual_seed(1)  # of dropout
    h = x
    for block in blocks:
        h = checkpoint(block, h, use_reentrant=False) if checkpointed else block(h)
    loss = nn.functional.mse_loss(h, target)
    loss.backward()
    return h.detach(), loss.detach(), [p.grad for p in blocks.parameters() if p.grad is not None]


def same_results() -> bool:
    """Outputs, loss and gradients of plain and checkpointed are equal to the bit, dropout and all."""
    (a, loss_a, grads_a), (b, loss_b, grads_b) = trained(False), trained(True)
    return torch.equal(a, b) and torch.equal(loss_a, loss_b) and all(map(torch.equal, grads_a, grads_b))


class Masked(torch.autograd.Function):
    """y = 2 x mask, with a backward that draws the mask anew unless it was kept: dropout's mistake by hand."""

    masks: Iterator[list[float]]

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: Tensor, keep: bool) -> Tensor:
        mask = torch.tensor(next(Masked.masks))
        ctx.mask = mask if keep else None  # type: ignore[attr-defined]
        return 2 * x * mask

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, *gradients: Tensor) -> tuple[Tensor, None]:
        mask = ctx.mask  # type: ignore[attr-defined]
        if mask is None:
            mask = torch.tensor(next(Masked.masks))
        return 2 * gradients[0] * mask, None


def mask_drawn_again() -> bool:
    """x = [2, 4], mask [1, 0], dy = [1, 1]: dx is [2, 0]; with the mask drawn again, [0, 2]."""

    def gradient(keep: bool) -> list[float]:
        Masked.masks = iter([[1.0, 0.0], [0.0, 1.0]])
        x = torch.tensor([2.0, 4.0], requires_grad=True)
        y = Masked.apply(x, keep)
        assert y.tolist() == [4.0, 0.0]
        y.backward(torch.tensor([1.0, 1.0]))
        assert x.grad is not None
        return x.grad.tolist()

    return gradient(keep=True) == [2.0, 0.0] and gradient(keep=False) == [0.0, 2.0]


def generator_not_restored() -> bool:
    """preserve_rng_state=False draws dropout's mask again: gradients where nothing was passed on."""

    def gradient(preserve: bool) -> tuple[Tensor, Tensor]:
        torch.manual_seed(3)
        x = torch.ones(64, requires_grad=True)
        y = checkpoint(
            nn.functional.dropout,
            x * 1,
            0.5,
            use_reentrant=False,
            preserve_rng_state=preserve,
            determinism_check="none",
        )
        (y * torch.ones(64)).sum().backward()
        assert x.grad is not None
        return y.detach(), x.grad

    kept, right = gradient(True)
    drawn, wrong = gradient(False)
    return torch.equal(kept, right) and not torch.equal(drawn, wrong)


def differs(function: Callable[[Tensor], Tensor]) -> bool:
    """The function's gradient under a checkpoint is not the one without."""

    def gradient(wrapped: bool) -> Tensor:
        random.seed(0)
        np.random.seed(0)
        x = torch.full((4,), 2.0, requires_grad=True)
        y = checkpoint(function, x * 1, use_reentrant=False) if wrapped else function(x * 1)
        y.sum().backward()
        assert x.grad is not None
        return x.grad

    return not torch.equal(gradient(False), gradient(True))


def counter_inside() -> bool:
    """A counter that the region changes is another one when it runs again."""
    calls = {"count": 0}

    def scaled(x: Tensor) -> Tensor:
        calls["count"] += 1
        return x * x * torch.tensor(float(calls["count"]))

    def plain_then_wrapped() -> tuple[Tensor, Tensor]:
        found = []
        for wrapped in (False, True):
            calls["count"] = 0
            x = torch.full((4,), 2.0, requires_grad=True)
            y = checkpoint(scaled, x * 1, use_reentrant=False) if wrapped else scaled(x * 1)
            y.sum().backward()
            assert x.grad is not None
            found.append(x.grad)
        return found[0], found[1]

    return not torch.equal(*plain_then_wrapped())


def input_in_place() -> bool:
    """A region that writes into a tensor from outside finds it changed when it runs again."""

    def gradient(wrapped: bool) -> Tensor:
        scale = torch.ones(4)

        def doubling(x: Tensor) -> Tensor:
            scale.mul_(2)
            return x * x * scale.clone()

        x = torch.full((4,), 2.0, requires_grad=True)
        y = checkpoint(doubling, x * 1, use_reentrant=False) if wrapped else doubling(x * 1)
        y.sum().backward()
        assert x.grad is not None
        return x.grad

    return not torch.equal(gradient(False), gradient(True))


def python_and_numpy_random() -> bool:
    """Generators other than PyTorch's are not restored."""
    by_python = differs(lambda x: x * x * torch.tensor(random.random()))
    by_numpy = differs(lambda x: x * x * torch.tensor(np.random.rand()))
    return by_python and by_numpy


def reentrant_loses_gradients() -> bool:
    """The reentrant form gives parameters no gradient where no input requires one."""
    layer = nn.Linear(4, 4)
    x = torch.ones(2, 4)
    y = checkpoint(layer, x, use_reentrant=True)
    lost = not y.requires_grad
    checkpoint(layer, x, use_reentrant=False).sum().backward()
    return lost and layer.weight.grad is not None


def evaluation_saves_nothing() -> bool:
    """Under no_grad nothing is saved, so nothing is recomputed: the block runs once."""
    runs = []

    def counted(x: Tensor) -> Tensor:
        runs.append(1)
        return x * x

    with torch.no_grad():
        y = checkpoint(counted, torch.ones(4), use_reentrant=False)
    model = nn.Dropout(0.5).eval()  # eval() alone still builds a graph
    x = torch.ones(4, requires_grad=True)
    return len(runs) == 1 and not y.requires_grad and bool(model(x * 1).requires_grad)


LESSONS = (
    same_results, mask_drawn_again, generator_not_restored, counter_inside, input_in_place, python_and_numpy_random,
    reentrant_loses_gradients, evaluation_saves_nothing,
)  # fmt: skip


def main() -> int:
    """Every lesson; 0 if all are as said."""
    import warnings

    warnings.filterwarnings("ignore", "None of the inputs have requires_grad")
    passed = True
    for lesson in LESSONS:
        holds = lesson()
        passed = passed and holds
        print(f"{'ok  ' if holds else 'FAIL'} {lesson.__name__}: {(lesson.__doc__ or '').strip()}")
    print("PASS" if passed else "FAIL")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
