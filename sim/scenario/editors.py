"""The vocabulary as a JSON Schema, from which editors complete and check."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

from sim.scenario.schema import STRATEGY_FIELDS, ScenarioFile


def json_schema() -> dict[str, Any]:
    """A JSON Schema of scenario files, for editors. Strategies accept the same sections with nothing required."""
    schema = ScenarioFile.model_json_schema()
    schema.pop("required", None)  # a file that extends another may leave everything to it
    definitions = schema["$defs"]
    partial = {f"Partial{name}": _partial(definition) for name, definition in definitions.items()}
    overrides = {name: _partial(schema["properties"][name]) for name in STRATEGY_FIELDS}
    definitions["StrategySection"]["properties"] = overrides
    definitions.update({name: definition for name, definition in partial.items() if "Strategy" not in name})
    return schema


def _partial(schema: dict[str, Any]) -> dict[str, Any]:
    """The same schema with nothing required, referring to partial sections."""

    def walk(part: Any) -> Any:
        if isinstance(part, list):
            return [walk(item) for item in part]
        if not isinstance(part, dict):
            return part
        changed = {
            key: walk(value) for key, value in part.items() if not (key == "required" and isinstance(value, list))
        }
        if isinstance(changed.get("$ref"), str):
            changed["$ref"] = changed["$ref"].replace("#/$defs/", "#/$defs/Partial")
        return changed

    result: dict[str, Any] = walk(deepcopy(schema))
    return result
