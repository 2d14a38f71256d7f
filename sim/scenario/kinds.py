"""Kinds of values in a scenario, each with the message that a wrong one gets."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, WithJsonSchema

from sim.model.catalogue import MOST, MOST_LAYERS
from sim.units import UnitError, parse_bandwidth, parse_bytes, parse_duration

QUANTITY_PATTERN = r"^\s*[0-9.]+\s*\S+\s*$"

MOST_RANKS = 1_000_000
MOST_MICRO_BATCHES = 10_000
"""As MOST and MOST_LAYERS."""


def _count(what: str, example: int, least: int, most: int = MOST) -> BeforeValidator:
    def check(value: Any) -> int:
        if type(value) is float and value.is_integer():
            value = int(value)  # 1e3 is a float in YAML
        if type(value) is not int:
            quoted = isinstance(value, str) and re.fullmatch(r"\s*[0-9][0-9_,.]*\s*", value)
            raise ValueError(f"{what} is expected, e.g. {example}{'; in quotes it is text' if quoted else ''}")
        if value < least:
            raise ValueError(f"{what} of at least {least} is expected")
        if value > most:
            raise ValueError(f"{what} of at most {most:,} is expected")
        return value

    return BeforeValidator(check)


def _schema(**keywords: Any) -> WithJsonSchema:
    return WithJsonSchema(keywords)


COUNT = _schema(type="integer", minimum=1)
Count = Annotated[int, _count("a whole number", 1, 1), COUNT]
CountOrZero = Annotated[int, _count("a whole number", 1, 0), _schema(type="integer", minimum=0)]
Layers = Annotated[int, _count("a number of layers", 32, 1, MOST_LAYERS), COUNT]
Tokens = Annotated[int, _count("a number of tokens", 8192, 1), COUNT]
Sequences = Annotated[int, _count("a number of sequences", 1, 1), COUNT]
Stage = Annotated[Literal[1, 2, 3], BeforeValidator(lambda value: value if type(value) is int else str(value))]
"""For Python true is 1."""
MicroBatches = Annotated[int, _count("a number of micro-batches", 1, 1, MOST_MICRO_BATCHES), COUNT]
Ranks = Annotated[int, _count("a number of ranks", 8, 1, MOST_RANKS), COUNT]
Gpus = Annotated[int, _count("a number of GPUs", 8, 1, MOST_RANKS), COUNT]
Nodes = Annotated[int, _count("a number of nodes", 1, 1, MOST_RANKS), COUNT]


def _counts(value: Any) -> tuple[int, ...]:
    if not isinstance(value, list) or any(type(entry) is not int or not 1 <= entry <= MOST_LAYERS for entry in value):
        raise ValueError(f"a list of whole numbers from 1 to {MOST_LAYERS:,} is expected, e.g. [2, 2]")
    return tuple(value)


Counts = Annotated[tuple[int, ...], BeforeValidator(_counts), _schema(type="array", items={"type": "integer"})]


def _names(value: Any) -> tuple[str, ...]:
    """One name, or a list of names."""
    names = [value] if isinstance(value, str) else value
    if not isinstance(names, list) or any(not isinstance(name, str) for name in names):
        raise ValueError("a name or a list of names is expected, e.g. [attention, mlp]")
    return tuple(names)


LIGER = ("rope", "rms_norm", "swiglu", "fused_linear_cross_entropy")


def _kernels_of_liger(value: Any) -> tuple[str, ...]:
    names = LIGER if value == "all" else _names(value)
    if unknown := [name for name in names if name not in LIGER]:
        raise ValueError(f"{unknown[0]} is none of {', '.join(LIGER)} (or all)")
    return tuple(name for name in LIGER if name in names)


LigerKernels = Annotated[
    tuple[str, ...],
    BeforeValidator(_kernels_of_liger),
    _schema(anyOf=[{"const": "all"}, {"type": "array", "items": {"enum": list(LIGER)}}]),
]


Names = Annotated[
    tuple[str, ...],
    BeforeValidator(_names),
    _schema(anyOf=[{"type": "string"}, {"type": "array", "items": {"type": "string"}}]),
]


def _quantity(parse: Callable[[object], int], example: str) -> tuple[BeforeValidator, WithJsonSchema]:
    return BeforeValidator(parse), _schema(type="string", pattern=QUANTITY_PATTERN, examples=[example])


def _above_zero(parse: Callable[[object], int]) -> Callable[[object], int]:
    def check(value: object) -> int:
        if (size := parse(value)) == 0:
            raise ValueError("more than nothing is expected")
        return size

    return check


Bytes = Annotated[int, *_quantity(parse_bytes, "80 GiB")]
Memory = Annotated[int, *_quantity(_above_zero(parse_bytes), "80 GiB")]
Bandwidth = Annotated[int, *_quantity(_above_zero(parse_bandwidth), "400 Gb/s")]
Duration = Annotated[int, *_quantity(parse_duration, "12 us")]


REPEATED = r"(.*\S)\s+x\s+(\d{1,5})\s*"


def _per_layer(parse: Callable[[object], int], example: str) -> tuple[BeforeValidator, WithJsonSchema]:
    """One quantity for all layers, or a list with one entry per layer, where "16 MiB x 20" stands for 20 entries."""

    def entries(entry: Any) -> tuple[int, ...]:
        repeated = re.fullmatch(REPEATED, entry) if isinstance(entry, str) else None
        if repeated is None:
            return (parse(entry),)
        return (parse(repeated[1]),) * min(int(repeated[2]), MOST_LAYERS)

    def check(value: Any) -> int | tuple[int, ...]:
        if not isinstance(value, list):
            return parse(value)
        try:
            return tuple(size for entry in value for size in entries(entry))
        except UnitError as error:
            raise UnitError(f"in every entry of the list, {error}") from None

    one = {"type": "string", "pattern": QUANTITY_PATTERN, "examples": [example]}
    item = {"type": "string", "pattern": QUANTITY_PATTERN[:-1] + r"(x\s+[0-9]+\s*)?$", "examples": [f"{example} x 20"]}
    return BeforeValidator(check), _schema(anyOf=[one, {"type": "array", "items": item}])


BytesPerLayer = Annotated[int | tuple[int, ...], *_per_layer(parse_bytes, "16 MiB")]
DurationPerLayer = Annotated[int | tuple[int, ...], *_per_layer(parse_duration, "20 us")]


def _placement(value: Any) -> str | tuple[int, ...]:
    if value == "balanced":
        return "balanced"
    if isinstance(value, list) and value and all(type(count) is int and count >= 0 for count in value):
        if all(value[1:-1]) and any(value):
            return tuple(value)
        raise ValueError("only the first and the last stage can be without layers")
    raise ValueError("balanced, or a list of layers per stage, e.g. [7, 9, 9, 7], is expected")


Placement = Annotated[
    str | tuple[int, ...],
    BeforeValidator(_placement),
    _schema(
        anyOf=[{"const": "balanced"}, {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}]
    ),
]


def _reshard(value: Any) -> str | int:
    if value == "torchtitan" or isinstance(value, bool) or (type(value) is int and value > 1):
        return value  # type: ignore[no-any-return]
    raise ValueError("torchtitan, true, false or a number of ranks above 1 is expected")


def _reshard_root(value: Any) -> int:
    if isinstance(value, bool) or (type(value) is int and value > 1):
        return value
    raise ValueError("true, false or a number of ranks above 1 is expected")


Reshard = Annotated[
    str | bool | int,
    BeforeValidator(_reshard),
    _schema(anyOf=[{"const": "torchtitan"}, {"type": "boolean"}, {"type": "integer", "minimum": 2}]),
]
ReshardRoot = Annotated[
    bool | int,
    BeforeValidator(_reshard_root),
    _schema(anyOf=[{"type": "boolean"}, {"type": "integer", "minimum": 2}]),
]


def _number(what: str, accept: Callable[[float], bool]) -> BeforeValidator:
    def check(value: Any) -> float:
        if type(value) not in (int, float) or not math.isfinite(value) or not accept(value):
            raise ValueError(f"{what} is expected")
        return float(value)

    return BeforeValidator(check)


RATIO = r"ratio (0?\.\d+|1(\.0*)?|0)"


def _offloaded_layers(value: Any) -> Any:
    if value in ("all", "all_but_last") or (isinstance(value, str) and re.fullmatch(RATIO, value)):
        return value
    if isinstance(value, list) and value and all(type(layer) is int and layer >= 0 for layer in value):
        return tuple(value)
    raise ValueError("all, all_but_last, a share such as ratio 0.5, or a list of layers such as [0, 1, 2] is expected")


OffloadedLayers = Annotated[
    str | tuple[int, ...],
    BeforeValidator(_offloaded_layers),
    _schema(
        anyOf=[
            {"enum": ["all", "all_but_last"]},
            {"type": "string", "pattern": f"^{RATIO}$", "examples": ["ratio 0.5"]},
            {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1},
        ]
    ),
]


Probability = Annotated[
    float,
    _number("a probability from 0 to below 1", lambda value: 0 <= value < 1),
    _schema(type="number", minimum=0, exclusiveMaximum=1),
]
Share = Annotated[
    float,
    _number("a share above 0 and at most 1, e.g. 0.7,", lambda value: 0 < value <= 1),
    _schema(type="number", exclusiveMinimum=0, maximum=1),
]
Momentum = Annotated[
    float,
    _number("a number from 0 to below 1", lambda value: 0 <= value < 1),
    _schema(type="number", minimum=0, exclusiveMaximum=1),
]
PositiveNumber = Annotated[
    float, _number("a number above 0", lambda value: value > 0), _schema(type="number", exclusiveMinimum=0)
]


def _version(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError('a version in quotes is expected, e.g. "2.14" (without quotes 2.10 is the number 2.1)')
    if not re.fullmatch(r"\d+\.\d+(\.\d+)?", value):
        raise ValueError('a version is expected, e.g. "2.14"')
    return value


Version = Annotated[str, BeforeValidator(_version), _schema(type="string", pattern=r"^\d+\.\d+(\.\d+)?$")]
