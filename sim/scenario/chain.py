"""The toy of the textbook, from its section."""

from __future__ import annotations

from sim.model.config import ChainConfig
from sim.scenario.document import Document
from sim.scenario.schema import ChainSection, ModelSection


def resolve_chain(document: Document, section: ModelSection, chain: ChainSection) -> ChainConfig | None:
    """One entry per layer in every list; None, and problems noted, where a list has another length."""
    others = section.model_fields_set - {"chain", "preset", "config"}
    for name in sorted(others):
        document.problem(("model", name), "does not apply to a chain", show=False)
    lists: dict[str, tuple[int, ...]] = {}
    for name in ("entry", "activation", "forward", "backward", "recompute", "weight_gradient"):
        value = getattr(chain, name)
        if value is None:
            value = chain.forward if name == "recompute" else _halved(chain.backward)
        lists[name] = value if isinstance(value, tuple) else (value,) * chain.layers
        if len(lists[name]) != chain.layers:
            message = f"{len(lists[name])} entries, but the chain has {chain.layers} layers"
            document.problem(("model", "chain", name), message, show=False)
    if any(part > whole for part, whole in zip(lists["weight_gradient"], lists["backward"])):
        document.problem(("model", "chain", "weight_gradient"), "must be at most the backward, of which it is a part")
        return None
    if others or any(len(values) != chain.layers for values in lists.values()):
        return None
    return ChainConfig(
        name="chain",
        entry_bytes=lists["entry"],
        activation_bytes=lists["activation"],
        forward_ns=lists["forward"],
        backward_ns=lists["backward"],
        recompute_ns=lists["recompute"],
        weight_gradient_ns=lists["weight_gradient"],
        exposed_communication_ns=chain.exposed_communication,
        recompute_communication_ns=chain.recompute_communication,
        shares_entry=chain.shares_entry,
    )


def _halved(value: int | tuple[int, ...]) -> int | tuple[int, ...]:
    return tuple(entry // 2 for entry in value) if isinstance(value, tuple) else value // 2
