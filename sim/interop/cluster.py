"""What a file runs on: nodes and GPUs that it says, and those that options must add."""

from __future__ import annotations

from sim.hardware.catalogue import UnknownGpu, find_gpu, gpu_names
from sim.interop.draft import Draft
from sim.scenario.problems import nearest_name


def put_cluster(draft: Draft, nodes: str | None, gpus_per_node: str | None, written: int | None = None) -> int:
    """Write the section `cluster`; the number of GPUs (1 where problems are noted).

    `nodes`, `gpus_per_node`: the tool's fields that say them; `written`: GPUs per node, where they are written already.
    """
    gpu = draft.override("cluster.gpu")
    usual: int | None = None
    if gpu is None:
        draft.problem("--gpu", "is missing: what it runs on, e.g. --gpu h100-sxm-80gb")
    else:
        try:
            usual = find_gpu(str(gpu)).node.gpus
        except UnknownGpu:
            near = nearest_name(str(gpu), gpu_names())
            hint = f" (did you mean {near}?)" if near else ""
            draft.problem("--gpu", f"{gpu}: no such GPU{hint}; `python -m sim gpus` lists them")
    count = _count(draft, "cluster.nodes", nodes, 1, "--nodes")
    if written is not None:
        return count * written
    return count * _count(draft, "cluster.gpus_per_node", gpus_per_node, usual, "--gpus-per-node")


def _count(draft: Draft, path: str, name: str | None, default: int | None, option: str) -> int:
    said = draft.override(path)
    if said is not None:
        if name is not None:
            draft.use(name, f"not used: {option} says it")
        return said if type(said) is int and said > 0 else 1
    if name is not None and draft.has(name):
        count = draft.get(name)
        if type(count) is int and count > 0:
            draft.put(path, count, name)
            return count
        if count is not None:
            draft.problem(name, f"{count}: a number above 0 is expected")
        return 1
    if default is None:
        return 1
    usual = "usual for this GPU" if path == "cluster.gpus_per_node" else "one machine"
    draft.put(path, default, note=f"the file does not say: {usual} ({option})")
    return default
