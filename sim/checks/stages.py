"""What a published row says of its pipeline: schedule, stages per rank, layers per stage."""

from __future__ import annotations

import re
from typing import Any

from sim.checks.facts import Facts, arguments
from sim.checks.recipes import recipe_of
from sim.checks.software import software_of


def pipeline_of(facts: Facts) -> dict[str, Any]:
    """Fields of parallel.pipeline."""
    chunks = _chunks(facts)
    virtual = {"virtual": chunks} if chunks > 1 else {}
    sync = {} if software_of(facts).p2p_sync else {"p2p_sync": False}
    return {"degree": facts.pp, "schedule": _schedule(facts), **virtual, **_placement(facts), **sync}


def _schedule(facts: Facts) -> str:
    """1F1B unless the notes name another ("schedule=ZB-1p"); interleaved where the row prints chunks, or that word."""
    named = re.search(r"schedule[= ]+([^;,]*)", facts.text.get("notes", ""), re.IGNORECASE)
    for pattern, name in SCHEDULES:
        if named and re.search(pattern, named[1], re.IGNORECASE):
            return name
    return "interleaved" if _chunks(facts) > 1 or facts.says("vpp", "interleaved") else "1f1b"


def _placement(facts: Facts) -> dict[str, Any]:
    """With two stages more than layers, embedding and head have stages of their own; the first and the last stage have as
    many layers as an argument list says, the others share the rest."""
    stages = facts.pp * _chunks(facts)
    layout = recipe_of(facts).layouts.get(stages)
    if layout is not None:
        return {"placement": list(layout)}
    if facts.layers is None or software_of(facts).gpt != "megatron":
        return {}
    if stages == facts.layers + 2:
        return {"placement": [0, *[1] * facts.layers, 0]}
    given = arguments(facts)
    ends = [given.get(f"decoder-{end}-pipeline-num-layers") for end in ("first", "last")]
    between = stages - sum(end is not None for end in ends)
    if between == stages or stages > facts.pp:
        return {}
    rest = facts.layers - sum(int(end) for end in ends if end is not None)
    if between < 1 or rest % between:
        return {}
    first, last = ([int(end)] if end is not None else [] for end in ends)
    return {"placement": [*first, *[rest // between] * between, *last]}


SCHEDULES = (
    ("zb-?v", "zb-v"),
    ("zb-?(h2|2p)", "zb-h2"),
    ("zb-?(h1|1p)|zero-?bubble", "zb-h1"),
    ("gpipe", "gpipe"),
    ("1f1b-i|interleaved", "interleaved"),
)
"""Words of the notes and the schema's names of schedules, in the order in which they are looked for."""


def _chunks(facts: Facts) -> int:
    """Stages per rank: vpp, one per layer where the row says "max", its recipe's where it says nothing."""
    if facts.says("vpp", "^max") and facts.layers is not None:
        return -(-facts.layers // facts.pp)
    return facts.vpp if facts.text.get("vpp") or facts.pp == 1 else recipe_of(facts).virtual
