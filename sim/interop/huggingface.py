"""A Hugging Face config.json as a scenario: the file stays where it is, the scenario names it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from sim.interop.cluster import put_cluster
from sim.interop.draft import Draft, Entry, Imported
from sim.interop.files import read_json
from sim.interop.given import Raw
from sim.interop.options import Options
from sim.interop.script import needs, put_script
from sim.interop.table import load_table
from sim.model.huggingface import read_huggingface_config
from sim.scenario.problems import shown


def import_huggingface(path: Path, text: str, options: Options) -> Imported:
    """A scenario that trains the model of a config.json, by FSDP on all GPUs. Raises ImportProblems."""
    data = read_json(text, str(path))
    raws = [Raw(key, _plain(value), data.lines.get(key)) for key, value in data.items()]
    draft = Draft(path, load_table("huggingface"), options, raws)
    needs(draft, "seq_len")
    draft.put("model.config", str(path.absolute()), "model_type")
    put_script(draft)
    gpus = put_cluster(draft, None, None)
    if gpus > 1:
        draft.put("parallel.fsdp.degree", gpus, note="FSDP2 on all GPUs is assumed")
    draft.put("batch.micro_batch", 1, note="the training script's: give --micro-batch")
    for name, source in draft.given.items():
        to = source.field.to
        draft.use(name, f"{to}: {source.text}" if to else source.text)
    imported = draft.finish(path.parent.name if path.name == "config.json" and path.parent.name else path.stem)
    _tell_what_is_not_modelled(imported, path, draft)
    return imported


def _tell_what_is_not_modelled(imported: Imported, path: Path, draft: Draft) -> None:
    """What the reader of the file says of this model and sequence length; those keys count as used no longer."""
    setup = imported.scenario.strategies[0]
    messages: list[str] = read_huggingface_config(path).not_modelled(setup.model, setup.batch.seq_len)  # type: ignore[arg-type]
    account = imported.account
    for message in messages:
        key = re.split(r"[ :]", message, maxsplit=1)[0]
        line = draft.given[key].line if key in draft.given else None
        account.used[:] = [entry for entry in account.used if entry.name != key]
        account.not_expressible.append(Entry(key, line, message.removeprefix(key).lstrip(": ")))


def _plain(value: Any) -> Any:
    return shown(value) if isinstance(value, dict) else value
