"""Bytes that a parameter costs before any activation, by name: the 8, 12 or 16 B/param that people quote."""

from __future__ import annotations

from sim.model.config import ChainConfig
from sim.program.kernels import ITEM_BYTES
from sim.runtime.optimizers import BLOCK_8_BIT
from sim.scenario.setup import Optimizer, Setup


def bytes_per_parameter(setup: Setup) -> dict[str, float]:
    """Per trained parameter of the whole network (FSDP shares them); empty for the chain and without an optimizer.

    A frozen one costs its own bytes and nothing more. Weight copies of autocast or FSDP's gathered parameters come on
    top while layers run.
    """
    optimizer = setup.optimizer
    if isinstance(setup.model, ChainConfig):
        return {}
    stored, what = setup.precision.parameters, "parameters"
    if setup.model.lora is not None:
        stored, what = setup.model.lora.dtype or stored, "adapters"
    item = ITEM_BYTES[stored]
    costs: dict[str, float] = {f"{what} {stored}": item}
    if optimizer is None or setup.mode != "train":
        return costs
    if setup.data is not None:
        return costs | _of_megatron(setup)
    masters = optimizer.master_weights or (setup.zero is not None and stored != "fp32")
    stepped = "fp32" if masters else stored
    gradients = stored if setup.zero is not None or optimizer.fp32_gradients else stepped
    if optimizer.fp32_gradients:
        costs[f"main gradients {stepped}"] = ITEM_BYTES[stepped]
    if not optimizer.in_backward:
        costs[f"gradients {gradients}"] = ITEM_BYTES[gradients]
    if setup.ddp is not None and not setup.ddp.gradient_as_bucket_view:
        costs[f"DDP's buckets {stepped}"] = ITEM_BYTES[stepped]
    if masters:
        costs["master weights fp32"] = ITEM_BYTES[stepped]
    states = _states(optimizer, ITEM_BYTES[stepped])
    if states:
        costs[STATE_NAMES[optimizer.name]] = states
    return costs


def _of_megatron(setup: Setup) -> dict[str, float]:
    """Main gradients, and main parameters in fp32 and moments, split over the replicas by a distributed optimizer. Of
    experts that are spread over ranks there are fewer replicas (mesh dimension edp)."""
    data, mesh, reduce = setup.data, setup.mesh, setup.precision.reduce
    assert data is not None
    instances = data.optimizer_instances
    shares = mesh.degree("dp") * mesh.degree("cp") // instances if data.distributed_optimizer else 1
    state = ITEM_BYTES["fp32"] + 2 * ITEM_BYTES[data.moments]
    states = (
        "main parameters and moments fp32"
        if data.moments == "fp32"
        else f"main parameters fp32, moments {data.moments}"
    )
    of_experts = state * instances / mesh.degree("edp")
    if setup.expert.degree > 1 and data.distributed_optimizer:
        states += f" (of experts {of_experts:.3g})"
    return {f"main gradients {reduce}": ITEM_BYTES[reduce], states: state / shares}


STATE_NAMES = {"adamw": "AdamW's moments", "adamw-8bit": "8-bit moments and their scales", "sgd": "momentum"}


def _states(optimizer: Optimizer, item: int) -> float:
    if optimizer.name == "adamw":
        return 2 * item
    if optimizer.name == "adamw-8bit":
        return 2 * (1 + 4 / BLOCK_8_BIT)
    return item if optimizer.momentum else 0
