"""Plans of single compiled blocks, for comparison with PyTorch's."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from sim.model.adapters import is_trained
from sim.model.build import build_model
from sim.model.calls import interpret
from sim.model.catalogue import build_model as configure
from sim.model.config import Lora
from sim.runtime.compiled.region import Plan, make_plan
from sim.runtime.recorder import Recorder
from sim.runtime.regions import layers_of
from sim.runtime.selective import policy
from sim.runtime.tape import DeviceFacts, Tape


def plan_of(
    code: str,
    shape: dict[str, int],
    checkpoint: str,
    dtype: str = "bf16",
    float8: str | None = None,
    lora: Lora | None = None,
    **choices: Any,
) -> Plan:
    """`shape`: hidden, heads, kv_heads, ffn_hidden, micro_batch, seq_len; `checkpoint`: none, full or selective."""
    rows, length = shape["micro_batch"], shape["seq_len"]
    h, d = shape["hidden"], shape["hidden"] // shape["heads"]
    family: Any = "gpt" if code == "nanogpt" else "llama"
    shapes = {name: shape[name] for name in ("hidden", "heads", "kv_heads", "ffn_hidden")}
    shapes |= {"layers": 1, "vocab": 512, "max_positions": length}
    tape = Tape(Recorder(), DeviceFacts())
    with interpret(tape):
        config = replace(configure("block", shapes | {"family": family}, code, choices), lora=lora)
        block = next(iter(layers_of(build_model(config))))
        slots = block.parameters()
        for name, slot in block.named_parameters():
            slot.tensor = tensor = tape.empty(slot.shape, dtype)
            tensor.requires_grad = is_trained(config, name)
        x = tape.empty((rows, length, h), dtype)
        x.requires_grad = True
        rotation = {
            "torchtitan": lambda: [tape.empty((length, d // 2), "complex64")],
            "transformers": lambda: [
                *(tape.empty((1, length, d), dtype) for _ in range(2)),
                tape.empty((1, length), "int64"),
            ],
            "nanogpt": list,
        }[code]()
        selective = policy(("attention", "every_second_matmul"))() if checkpoint == "selective" else None
        tensors: Any = [x, *rotation, *(slot.tensor for slot in slots)]
        return make_plan(block.forward, tensors, slots, None, True, checkpoint != "none", selective, float8)
