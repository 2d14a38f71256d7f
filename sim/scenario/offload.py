"""The section `offload`: its fields, whether they fit, and the `Offload` that they mean."""

from __future__ import annotations

from typing import Literal

from sim.model.config import ChainConfig, ModelConfig
from sim.scenario.document import Document
from sim.scenario.kinds import Bytes, Count, CountOrZero, OffloadedLayers, Share
from sim.scenario.parallel import SPLITS_BACKWARD
from sim.scenario.section import Section
from sim.scenario.setup import Offload

KEPT_BELOW_BYTES, KEPT_OF_STAGES_BELOW_BYTES = 1024, 1 << 20
"""Smaller tensors are not worth a copy: torchtune's min_offload_size, and Megatron-Kwai's for what stages save."""


class OffloadSection(Section):
    """Saved tensors wait for backward in host memory. `offload: null`: none (the default)."""

    what: Literal["saved_tensors", "checkpoint_inputs", "activations", "stage_activations"]
    """saved_tensors: torch's save_on_cpu, every saved tensor, weights and duplicates too; checkpoint_inputs: what
    checkpointed layers keep; activations: what layers save other than parameters and buffers, on side streams;
    stage_activations: what a pipeline stage saves for a micro-batch, which leaves and comes back between micro-batches."""
    share: Share | None = None
    """Of stage_activations: the part of their bytes that leaves, e.g. 0.4. Default: 1, all."""
    layers: OffloadedLayers | None = None
    """Which layers: all, all_but_last, ratio 0.5 (the first half), or a list of numbers from 0. Default: all_but_last
    for activations, all for checkpoint_inputs; for saved_tensors the whole forward, embedding and loss too."""
    pinned: bool = True
    """Page-locked host memory; without it copies are several times slower and hold up the host. Default: true."""
    pinned_pool: bool = True
    """Pinned memory is kept and used again, as PyTorch does; false: every tensor is pinned anew (about 3 ms each).
    Default: true."""
    streams: Literal["compute", "side"] | None = None
    """compute: copies run in the compute stream, and the host waits for those that leave, as save_on_cpu's; side: on
    streams of their own. Default: side for activations, compute for the others."""
    look_ahead: CountOrZero | None = None
    """With side streams: layers fetched before backward reaches them; 0: each tensor when it is asked for.
    Default: 1."""
    in_flight: Count | None = None
    """With side streams: tensors that may leave at a time; a further one makes compute wait for the oldest.
    Default: 5."""
    release: Literal["events", "record_stream"] | None = None
    """With side streams: how bytes that have left are freed. events: once compute has waited for the copy, so that
    `in_flight` bounds what is on its way; record_stream: at once, and the allocator gives them away when it has seen the
    copy end, without a bound. Default: events."""
    above: Bytes | None = None
    """With side streams: smaller tensors stay on the device, e.g. 1 MiB. Default: 1 KiB; 1 MiB for stage_activations."""


SIDE = ("activations", "stage_activations")
"""What leaves on side streams only."""


def check_offload(
    document: Document, offload: OffloadSection, checkpointed: bool, model: ModelConfig | ChainConfig,
    schedule: str | None,
) -> None:  # fmt: skip
    """What leaves must exist, and what is said about side streams needs them. `schedule`: of the pipeline, if any."""
    if isinstance(model, ChainConfig):
        document.problem(("offload",), "a chain has no tensors to offload", show=False)
        return
    if offload.what == "checkpoint_inputs" and not checkpointed:
        document.problem(("offload", "what"), "nothing is checkpointed: add checkpoint: {}, or offload activations")
    if isinstance(offload.layers, tuple) and (beyond := [n for n in offload.layers if n >= model.layers]):
        document.problem(("offload", "layers", offload.layers.index(beyond[0])), f"layers are 0 to {model.layers - 1}")
    _check_offload_streams(document, offload)
    _check_stages(document, offload, model, schedule)


def _check_stages(document: Document, offload: OffloadSection, model: ModelConfig, schedule: str | None) -> None:
    """Bundles of stages need stages, as Megatron has them, and know neither single layers nor an order of their own."""
    if offload.what != "stage_activations":
        if offload.share is not None:
            document.problem(("offload", "share"), "is of stage_activations: for activations say layers: ratio 0.4")
        return
    if schedule is None:
        document.problem(("offload", "what"), "there are no stages: add parallel.pipeline, or offload activations")
    elif schedule in SPLITS_BACKWARD:
        document.problem(("offload", "what"), f"is not modelled with backwards that are split, as {schedule}'s")
    if model.implementation != "megatron":
        document.problem(("offload", "what"), f"is written for Megatron's stages, not for {model.implementation}'s")
    for name in ("layers", "look_ahead", "in_flight", "release"):
        if getattr(offload, name) is not None:
            document.problem(("offload", name), "bundles of stages leave and come back by the pipeline's order")


def _check_offload_streams(document: Document, offload: OffloadSection) -> None:
    side = offload_streams(offload) == "side"
    if offload.what == "saved_tensors" and side:
        document.problem(("offload", "streams"), "save_on_cpu copies in the compute stream: use what: activations")
    if offload.what in SIDE and not side:
        document.problem(("offload", "streams"), f"{offload.what} leave on side streams: use what: saved_tensors")
    if side and not offload.pinned:
        document.problem(("offload", "pinned"), "pageable copies hold up the host: side streams need pinned memory")
    if not offload.pinned and offload.pinned_pool and "pinned_pool" in offload.model_fields_set:
        document.problem(("offload", "pinned_pool"), "there is no pinned memory to keep: pinned is false")
    for name in ("look_ahead", "in_flight", "above", "release"):
        if getattr(offload, name) is not None and not side:
            document.problem(("offload", name), "needs streams: side")
    if offload.release == "record_stream" and offload.in_flight is not None:
        document.problem(("offload", "in_flight"), "nothing waits for copies with release: record_stream")


def offload_streams(offload: OffloadSection) -> Literal["compute", "side"]:
    """Where copies run, if the section does not say."""
    return offload.streams or ("side" if offload.what in SIDE else "compute")


def resolve_offload(section: OffloadSection | None, layers: int) -> Offload | None:
    """Layers by number; None where the whole forward is meant."""
    if section is None:
        return None
    chosen = section.layers or {"activations": "all_but_last", "checkpoint_inputs": "all"}.get(section.what)
    if isinstance(chosen, str):
        share = chosen.removeprefix("ratio ")
        count = {"all": layers, "all_but_last": layers - 1}.get(chosen)
        chosen = tuple(range(round(float(share) * layers) if count is None else count))
    kept_below = KEPT_OF_STAGES_BELOW_BYTES if section.what == "stage_activations" else KEPT_BELOW_BYTES
    return Offload(
        what=section.what,
        layers=chosen,
        pinned=section.pinned,
        pinned_pool=section.pinned_pool,
        streams=offload_streams(section),
        look_ahead=1 if section.look_ahead is None else section.look_ahead,
        in_flight=section.in_flight or 5,
        release=section.release or "events",
        above_bytes=section.above if section.above is not None else kept_below,
        share=section.share or 1.0,
    )
