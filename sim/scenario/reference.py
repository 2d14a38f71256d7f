"""The field reference: a page of Markdown made from the schema, so that it says what the schema says."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from sim.scenario.schema import STRATEGY_FIELDS, ScenarioFile

Json = dict[str, Any]

HEAD = """# Fields of a scenario

Made from the schema by `python -m sim fields --markdown`; `python -m sim fields SECTION` shows one section in the
terminal, `python -m sim schema` prints the JSON Schema for editors.

Every section and field may be left out unless it is marked *required*. A strategy may change the sections
{strategies}.
`--set path=value` changes one field for one run, e.g. `--set checkpoint.every=2`.
"""
TOP = "scenario"
"""Title of the table of what stands at the top of a file."""
NULL = "`null`"


def field_reference(section: str | None = None) -> str:
    """All sections as Markdown tables, or one of them, "checkpoint" or "parallel.fsdp", with those inside it.

    Raises KeyError for a section that does not exist; `section_names` lists them.
    """
    found = _sections()
    if section is None:
        head = HEAD.format(strategies=", ".join(f"`{name}`" for name in STRATEGY_FIELDS))
        return "\n".join([head, *(_table(path, found) for path in found)])
    if section not in found:
        raise KeyError(section)
    return "\n".join(_table(path, found) for path in found if path == section or path.startswith(f"{section}."))


def section_names() -> list[str]:
    """Dotted paths of all sections, in the schema's order."""
    return list(_sections())


def _sections() -> dict[str, Json]:
    schema = ScenarioFile.model_json_schema()
    definitions: Json = schema["$defs"]
    found: dict[str, Json] = {TOP: schema | {"description": ""}}

    def walk(section: Json, path: str) -> None:
        for name, field in section["properties"].items():
            for reference in dict.fromkeys(_references(field)):
                if reference == "StrategySection":
                    continue
                below = f"{path}.{name}".lstrip(".")
                found[below] = definitions[reference]
                walk(definitions[reference], below)

    walk(schema, "")
    return found


def _references(part: Any) -> Iterator[str]:
    """Names of the sections that a field's schema refers to."""
    if isinstance(part, dict):
        if "$ref" in part:
            yield part["$ref"].rpartition("/")[2]
        for value in part.values():
            yield from _references(value)
    elif isinstance(part, list):
        for value in part:
            yield from _references(value)


def _table(path: str, sections: dict[str, Json]) -> str:
    section = sections[path]
    lines = [f"## {path}", ""]
    if section.get("description"):
        lines += [_joined(section["description"]), ""]
    lines += ["| field | value | meaning |", "|---|---|---|"]
    required = section.get("required", ())
    for name, field in section["properties"].items():
        below = name if path == TOP else f"{path}.{name}"
        meaning = _meaning(field) or _joined(sections[below].get("description", ""))
        options = list(dict.fromkeys(_options(field)))
        if field.get("default") is None and "null" not in meaning:  # the same as leaving the field out
            options = [option for option in options if option != NULL]
        value = _listed(options) + (", *required*" if name in required else "")
        if below in sections:
            value = value.replace("section", f"[section](#{below.replace('.', '')})", 1)
        lines.append(f"| `{name}` | {_cell(value)} | {_cell(meaning)} |")
    return "\n".join([*lines, ""])


def _meaning(field: Json) -> str:
    text = _joined(field.get("description", ""))
    default = field.get("default")
    is_value = default is not None and not isinstance(default, dict) and default not in ("", [])
    if not is_value or "efault" in text or (isinstance(default, int) and default < field.get("minimum", default)):
        return text
    return f"{text} Default: {_shown(default)}."


def _listed(options: list[str]) -> str:
    """What a field takes, in words."""
    return ", ".join(options[:-1]) + (" or " if len(options) > 1 else "") + options[-1]


def _options(field: Json) -> Iterator[str]:
    if "anyOf" in field:
        for option in field["anyOf"]:
            yield from _options(option)
    elif "enum" in field or "const" in field:
        yield from (f"`{value}`" for value in field.get("enum", [field.get("const")]))
    elif "$ref" in field:
        yield "strategy" if "Strategy" in field["$ref"] else "section"
    elif field.get("type") == "array":
        yield f"list of {_listed(list(_options(field['items'])))}" if "items" in field else "list"
    elif field.get("type") == "object":
        yield f"{next(_options(field['additionalProperties']))} by name"
    elif "examples" in field:
        yield f"e.g. `{field['examples'][0]}`"
    else:
        yield {
            "null": NULL, "boolean": "`true`, `false`", "string": "text", "integer": "whole number", "number": "number",
        }[field["type"]] + _bounds(field)  # fmt: skip


def _bounds(field: Json) -> str:
    least, above, most, below = (
        field.get(key) for key in ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum")
    )
    parts = [f"from {least}"] if least is not None else [f"above {above}"] if above is not None else []
    parts += [f"to {most}"] if most is not None else [f"below {below}"] if below is not None else []
    return " " + " ".join(parts) if parts else ""


def _shown(value: Any) -> str:
    return f"{value}".lower() if isinstance(value, bool) else f"{value}"


def _joined(text: str) -> str:
    return " ".join(text.split())


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
