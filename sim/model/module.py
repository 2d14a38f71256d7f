"""Modules and parameters, shaped like torch.nn's: names, order of parameters, and hooks around forward."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

from sim.model.calls import Shape, Tensor, active


class Parameter:
    """A parameter slot: this rank's shape, and the tensor that forward sees now (sharding replaces it).

    `partial`: the ranks of a tensor-parallel group hold it whole, each with the gradient of its own tokens only.
    `of_expert`: an expert's, which the ranks of an expert-parallel group do not have in common.
    `dtype`: its own, where it is stored in another than the rest. `in_fp8`: products read it in 8 bit.
    """

    __slots__ = ("dtype", "in_fp8", "of_expert", "partial", "requires_grad", "shape", "tensor")

    def __init__(self, *shape: int) -> None:
        self.shape: Shape = shape
        self.dtype: str | None = None
        self.requires_grad = True
        self.partial = False
        self.of_expert = False
        self.in_fp8 = False
        self.tensor: Tensor | None = None

    @property
    def elements(self) -> int:
        count = 1
        for size in self.shape:
            count *= size
        return count


class Buffer:
    """A tensor that moves with the module but is not trained, e.g. rotary frequencies; it keeps its dtype."""

    __slots__ = ("dtype", "shape", "tensor")

    def __init__(self, dtype: str, *shape: int) -> None:
        self.dtype = dtype
        self.shape: Shape = shape
        self.tensor: Tensor | None = None


class Hooks(Protocol):
    """What wraps a module's forward from outside (fully_shard)."""

    def pre_forward(self, module: Module, arguments: tuple[Any, ...]) -> tuple[Any, ...]: ...

    def post_forward(self, module: Module, output: Any) -> Any: ...


class Module:
    """Base of all modules: children and parameters are found in the order of assignment, as torch.nn does."""

    hooks: Hooks | None = None
    path: str = ""
    repeat: object | None = None
    """Set by the interpreter's side for layers that are alike."""

    def __call__(self, *arguments: Any) -> Tensor:
        # `given` lives until the module returns, as PyTorch's call frame does, even where a hook replaced arguments
        given = arguments
        interpreter = active()
        token = interpreter.enter(self.path)
        try:
            if self.hooks is not None:
                arguments = self.hooks.pre_forward(self, arguments)
            output: Tensor = (
                self.forward(*arguments) if self.repeat is None else interpreter.run_repeated(self, arguments)
            )
            if self.hooks is not None:
                output = self.hooks.post_forward(self, output)
        finally:
            interpreter.leave(token)
        del given
        return output

    def forward(self, *arguments: Any) -> Any:
        raise NotImplementedError

    def children(self) -> Iterator[tuple[str, Module]]:
        for name, value in vars(self).items():
            if isinstance(value, Module):
                yield name, value

    def own_parameters(self) -> Iterator[tuple[str, Parameter]]:
        for name, value in vars(self).items():
            if isinstance(value, Parameter):
                yield name, value

    def external_parameters(self) -> tuple[Parameter, ...]:
        """Those of its parts that its own forward reads (DeepSpeed's term)."""
        return ()

    def named_parameters(self) -> Iterator[tuple[str, Parameter]]:
        """Own parameters first, then the children's; a shared parameter appears once, where it is first."""
        seen: set[int] = set()
        for name, parameter in self._walk_parameters(""):
            if id(parameter) not in seen:
                seen.add(id(parameter))
                yield name, parameter

    def _walk_parameters(self, prefix: str) -> Iterator[tuple[str, Parameter]]:
        for name, parameter in self.own_parameters():
            yield prefix + name, parameter
        for name, child in self.children():
            yield from child._walk_parameters(f"{prefix}{name}.")

    def named_tensors(self) -> Iterator[tuple[str, Parameter | Buffer]]:
        """Parameters and buffers in the order of module.to(device): children, own parameters, own buffers."""
        seen: set[int] = set()
        for name, tensor in self._walk_tensors(""):
            if id(tensor) not in seen:
                seen.add(id(tensor))
                yield name, tensor

    def _walk_tensors(self, prefix: str) -> Iterator[tuple[str, Parameter | Buffer]]:
        for name, child in self.children():
            yield from child._walk_tensors(f"{prefix}{name}.")
        for kind in (Parameter, Buffer):
            for name, value in vars(self).items():
                if isinstance(value, kind):
                    yield prefix + name, value

    def parameters(self) -> list[Parameter]:
        return [parameter for _, parameter in self.named_parameters()]

    def managed_parameters(self) -> list[Parameter]:
        """In the order in which fully_shard finds them: a module's children before its own (_fsdp_init.py)."""
        return [tensor for _, tensor in self.named_tensors() if isinstance(tensor, Parameter)]

    def name_paths(self, prefix: str = "") -> None:
        """Give every module its dotted path, e.g. "layers.7.attention.wq"."""
        self.path = prefix
        for name, child in self.children():
            child.name_paths(f"{prefix}.{name}" if prefix else name)


class ModuleList(Module):
    """Modules by number; a part of a longer list counts from `first`."""

    def __init__(self, modules: list[Module], first: int = 0) -> None:
        self.items = modules
        self.first = first

    def children(self) -> Iterator[tuple[str, Module]]:
        for number, module in enumerate(self.items, self.first):
            yield str(number), module

    def __iter__(self) -> Iterator[Module]:
        return iter(self.items)

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, number: int) -> Module:
        return self.items[number]

    def __setitem__(self, number: int, module: Module) -> None:
        self.items[number] = module
