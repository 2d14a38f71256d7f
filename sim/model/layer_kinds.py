"""Layers that only Megatron's Llama-like models have here: without a gate in the MLP, with a window in attention."""

from __future__ import annotations

from typing import Any

from sim.model.faults import Fault

MEGATRONS_ACTIVATIONS = ("squared_relu",)


def needs_megatron(values: dict[str, Any]) -> bool:
    """Is it imitated in Megatron's code alone?"""
    return bool(megatrons_needs(values))


def megatrons_needs(values: dict[str, Any]) -> list[str]:
    """What is imitated in Megatron's code alone, as a message says it."""
    window = ["a window"] if values.get("window") else []
    if values.get("latent") is None and (values.get("experts") or {}).get("scores") == "sigmoid":
        window.append("experts chosen by sigmoids")
    return window + [name for name in MEGATRONS_ACTIVATIONS if name == values.get("activation")]


def check_kinds(given: dict[str, Any]) -> list[Fault]:
    """`given`: what the shapes and the user say. What does not go together."""
    faults = []
    if given.get("activation") == "squared_relu":
        without = {"swiglu_fusion": "is of gated MLPs", "experts": "are gated MLPs"}
        faults += [
            Fault(field, None if field == "experts" else given[field], f"{what}; squared_relu has no gate")
            for field, what in without.items()
            if given.get(field) is not None
        ]
    if given.get("fp8_swiglu_input") and (
        given.get("swiglu_fusion") is False or given.get("activation") == "squared_relu"
    ):
        faults.append(
            Fault("fp8_swiglu_input", True, "is of the fused SwiGLU: needs swiglu_fusion and activation: silu")
        )
    if given.get("mtp_layers") and given["family"] != "llama":
        faults.append(Fault("mtp_layers", given["mtp_layers"], f"the {given['family']} family has none"))
    window, every = given.get("window"), given.get("full_attention_every")
    if every and not window:
        faults.append(Fault("full_attention_every", every, "without a window every layer sees all keys: give window"))
    if every == 1:
        faults.append(Fault("full_attention_every", every, "no layer would have the window: at least 2 is expected"))
    if window and given.get("latent") is not None:
        faults.append(Fault("window", window, "latent attention has none"))
    if window and given["family"] != "llama":
        faults.append(Fault("window", window, f"the {given['family']} family has none"))
    return faults
