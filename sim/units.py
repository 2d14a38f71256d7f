"""Quantities with units: text in a scenario becomes whole bytes, nanoseconds, bytes/s and FLOP/s, and back for people.

The parser is closed: a number, a space if you like, and one of the units below, nothing else. `GB` is 1e9 bytes and
`GiB` 2**30; `b` is a bit and `B` a byte. A bare number is an error where a unit is needed: 80 of what?
"""

from __future__ import annotations

import re
from decimal import ROUND_HALF_EVEN, Decimal, localcontext

DECIMAL_PREFIXES = {"": 1, "k": 10**3, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "P": 10**15}
BINARY_PREFIXES = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}
PREFIXES = DECIMAL_PREFIXES | BINARY_PREFIXES

BYTE_UNITS = {f"{prefix}B": Decimal(factor) for prefix, factor in PREFIXES.items()}
BIT_UNITS = {f"{prefix}b": Decimal(factor) / 8 for prefix, factor in PREFIXES.items()}
SIZE_UNITS = BYTE_UNITS | BIT_UNITS
TIME_UNITS = {"ns": Decimal(1), "us": Decimal(10**3), "µs": Decimal(10**3), "ms": Decimal(10**6), "s": Decimal(10**9)}
BANDWIDTH_UNITS = {f"{unit}/s": factor for unit, factor in SIZE_UNITS.items()}
COMPUTE_UNITS = {f"{prefix}FLOP/s": Decimal(factor) for prefix, factor in DECIMAL_PREFIXES.items()}

LARGEST = 2**62
"""Quantities live in 64-bit columns."""

QUANTITY = re.compile(r"\s*([0-9]+(?:\.[0-9]*)?|\.[0-9]+)(e[+-]?[0-9]{1,2})?\s*([^\s0-9.].*?)?\s*", re.IGNORECASE)


class UnitError(ValueError):
    """Text that is no quantity of the wanted kind; its message says what is expected."""


def parse_bytes(value: object) -> int:
    """Bytes in "80 GiB", "16 MiB", "1.5 GB"; rounded to whole bytes. Raises UnitError."""
    return _parse(value, SIZE_UNITS, "a size", "80 GiB")


def parse_duration(value: object) -> int:
    """Nanoseconds in "12 us", "1.5 ms", "0 s"; rounded to whole nanoseconds. Raises UnitError."""
    return _parse(value, TIME_UNITS, "a duration", "12 us")


def parse_bandwidth(value: object) -> int:
    """Bytes per second in "400 Gb/s", "3.35 TB/s". Raises UnitError."""
    return _parse(value, BANDWIDTH_UNITS, "a bandwidth", "400 Gb/s")


def parse_compute(value: object) -> int:
    """FLOP per second in "989 TFLOP/s". Raises UnitError."""
    return _parse(value, COMPUTE_UNITS, "a rate of computation", "989 TFLOP/s")


def format_bytes(count: int) -> str:
    """Bytes for people, in GiB from 1 GiB on: 84943405711 -> "79.1 GiB"."""
    return _format(count, {"GiB": 2**30, "MiB": 2**20, "KiB": 2**10, "B": 1}, smallest="B")


def format_duration(count_ns: float) -> str:
    """Nanoseconds for people: 12300 -> "12.3 us"."""
    return _format(count_ns, {"s": 10**9, "ms": 10**6, "us": 10**3, "ns": 1}, smallest="ns")


def format_bandwidth(bytes_per_s: float) -> str:
    """Bytes per second for people: 50 * 10**9 -> "50.0 GB/s"."""
    return _format(bytes_per_s, {"TB/s": 10**12, "GB/s": 10**9, "MB/s": 10**6, "kB/s": 10**3, "B/s": 1}, "B/s")


def format_compute(flops_per_s: float) -> str:
    """FLOP per second for people: 989.4e12 -> "989 TFLOP/s"."""
    units = {"PFLOP/s": 10**15, "TFLOP/s": 10**12, "GFLOP/s": 10**9, "MFLOP/s": 10**6, "FLOP/s": 1}
    return _format(flops_per_s, units, "FLOP/s")


def _parse(value: object, units: dict[str, Decimal], what: str, example: str) -> int:
    expected = f"{what} with a unit is expected, e.g. {example}"
    match = QUANTITY.fullmatch(value) if isinstance(value, str) else None
    if match is None or match[3] is None:
        raise UnitError(expected)
    number, exponent, unit = match[1], match[2] or "", match[3]
    if unit not in units:
        raise UnitError(f"unit {unit} is not one of {', '.join(units)}; {expected}")
    with localcontext(prec=60):
        quantity = (Decimal(number + exponent) * units[unit]).to_integral_value(ROUND_HALF_EVEN)
    if quantity > LARGEST:
        raise UnitError(f"larger than anything that can be simulated; {expected}")
    return int(quantity)


def _format(value: float, units: dict[str, int], smallest: str) -> str:
    """Three significant digits in the largest unit that leaves at least 1; whole numbers in the smallest unit."""
    sign, size = ("-", -value) if value < 0 else ("", value)
    for unit, factor in units.items():
        scaled = size / factor
        if scaled >= 0.9995 or unit == smallest:
            break
    if unit == smallest and scaled == int(scaled):
        return f"{sign}{int(scaled):,} {unit}"
    digits = 2 if scaled < 9.995 else 1 if scaled < 99.95 else 0
    return f"{sign}{scaled:,.{digits}f} {unit}"
