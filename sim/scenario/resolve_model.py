"""The model section: a preset, a config.json or a chain, with what the scenario changes of it."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from sim.model.catalogue import Fields, build_model, overridable_fields, preset_shapes
from sim.model.config import ChainConfig, ModelConfig
from sim.model.faults import ModelError
from sim.model.huggingface import HuggingFaceConfig, read_huggingface_config
from sim.scenario.chain import resolve_chain
from sim.scenario.document import MISSING, Document
from sim.scenario.load import beside
from sim.scenario.problems import shown
from sim.scenario.schema import BatchSection, ModelSection
from sim.scenario.section import Section
from sim.scenario.sections import Sections


def resolve_model(document: Document, sections: Sections) -> ModelConfig | ChainConfig | None:
    """The model of the section, or None with problems noted on the document."""
    section: ModelSection | None = sections.get("model")
    if section is None:
        return None
    given = [name for name in ("preset", "config", "chain") if getattr(section, name) is not None]
    if len(given) != 1:
        if sections.whole("model"):
            message = f"exactly one of preset, config and chain is expected, not {' and '.join(given) or 'none'}"
            document.problem(("model",), message, show=False)
        return None
    if section.chain is not None:
        return resolve_chain(document, section, section.chain)
    read: HuggingFaceConfig | None = None
    try:
        if section.config is not None:
            file = beside(document.origin(("model", "config")), section.config)
            name = file.parent.name if file.name == "config.json" else file.stem
            read = read_huggingface_config(file)
            shapes = read.shapes
        else:
            name = str(section.preset)
            shapes = preset_shapes(name)
    except ModelError as error:
        _note_faults(document, error)
        return None
    overrides = {field: value for field in overridable_fields() if (value := _override(section, field)) is not None}
    try:
        model = build_model(name, shapes, section.implementation, overrides)
    except ModelError as error:
        _note_faults(document, error)
        return _build_without(error, name, shapes, section.implementation, overrides)
    batch: BatchSection | None = sections.get("batch")
    for message in read.not_modelled(model, batch.seq_len if batch else None) if read else ():
        document.warning(("model", "config"), message)
    return model


def _override(section: ModelSection, field: str) -> Any:
    """A field's value, or what is given of a nested section."""
    value = getattr(section, field)
    return value.model_dump(exclude_none=True) if isinstance(value, Section) else value


def _note_faults(document: Document, error: ModelError) -> None:
    """Blames the field; where nobody has written it, its value (a preset's, a config.json's) is told all the same."""
    for fault in error.faults:
        path = ("model", *fault.field.split("."))
        written = document.value(path) is not MISSING or fault.value is None
        message = fault.message if written else f"{shown(fault.value)}: {fault.message}"
        document.problem(path, message, allowed=fault.allowed)


def _build_without(
    error: ModelError, name: str, shapes: Fields, implementation: str | None, overrides: Fields
) -> ModelConfig | None:
    """The model without its faulty fields, for the checks that remain."""
    faulty = {fault.field.partition(".")[0] for fault in error.faults}
    good = {field: value for field, value in overrides.items() if field not in faulty}
    with suppress(ModelError):
        return build_model(name, shapes, None if "implementation" in faulty else implementation, good)
    return None
