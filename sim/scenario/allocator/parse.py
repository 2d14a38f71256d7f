"""Reading PYTORCH_CUDA_ALLOC_CONF: every problem is collected, each with key, value, what is allowed, nearest name."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from sim.scenario.allocator.rules import Rules, rules_of
from sim.scenario.allocator.settings import MIB, ROUNDUP_ENTRIES

ITEM = re.compile(r"([^:,\[\]]*)(?::(\[[^\]]*\]|[^,\[\]]*))?(?:,|$)")

WITHOUT_EFFECT = (
    "release_lock_on_cudamalloc",
    "release_lock_on_hipmalloc",
    "pinned_use_cuda_host_register",
    "pinned_use_hip_host_register",
    "pinned_num_register_threads",
    "pinned_reserve_segment_size_mb",
    "pinned_use_background_threads",
    "pinned_max_round_threshold_mb",
    "pinned_max_cached_size_mb",
    "pinned_free_catch_all",
    "graph_capture_record_stream_reuse",
)
"""Options that change neither addresses nor statistics of device memory."""


@dataclass(frozen=True, slots=True)
class SettingsProblem:
    """One thing wrong in a settings text."""

    key: str
    value: str
    allowed: str
    nearest: str | None = None

    def __str__(self) -> str:
        hint = f" (did you mean {self.nearest}?)" if self.nearest else ""
        return f"{self.key}: {self.value or 'no value'}: {self.allowed}{hint}"


class SettingsError(ValueError):
    """A text for PYTORCH_CUDA_ALLOC_CONF has problems; `problems` lists all of them."""

    def __init__(self, text: str, problems: list[SettingsProblem]) -> None:
        self.text = text
        self.problems = tuple(problems)
        super().__init__("\n".join(str(problem) for problem in problems))


def parse_settings(text: str, version: str) -> dict[str, Any]:
    """Field values of AllocatorSettings that a text sets. Raises SettingsError."""
    reader = Reader(rules_of(version), version)
    for key, value in items("".join(text.split())):
        reader.read(key, value)
    reader.check_together()
    if reader.problems:
        raise SettingsError(text, reader.problems)
    return reader.fields


def items(text: str) -> list[tuple[str, str]]:
    """(key, value) pairs of "key:value,key:[a:1,b:2]"; empty items are dropped as PyTorch does."""
    found = []
    at = 0
    while at < len(text):
        match = ITEM.match(text, at)
        if match is None or match.end() == at:
            found.append((text[at:], ""))
            break
        if match[0].rstrip(","):
            found.append((match[1], match[2] or ""))
        at = match.end()
    return found


class Reader:
    """Collects field values and problems while a text is read."""

    def __init__(self, rules: Rules, version: str) -> None:
        self.rules = rules
        self.version = version
        self.fields: dict[str, Any] = {}
        self.values: dict[str, str] = {}
        self.problems: list[SettingsProblem] = []
        self.known: dict[str, Callable[[str, str], None]] = {
            "backend": self._backend,
            "expandable_segments": self._expandable,
            "max_split_size_mb": self._megabytes("max_split_bytes"),
            "max_non_split_rounding_mb": self._megabytes("max_non_split_rounding_bytes"),
            "garbage_collection_threshold": self._threshold,
            "roundup_power2_divisions": self._divisions,
        }
        if rules.large_segment_option:
            self.known["large_segment_size_mb"] = self._megabytes("large_segment_bytes")
        if rules.fraction_option:
            self.known["per_process_memory_fraction"] = self._fraction
            self.known["throw_on_cudamalloc_oom"] = self._ignore
        self.known.update(dict.fromkeys(WITHOUT_EFFECT, self._ignore))

    def read(self, key: str, value: str) -> None:
        self.values[key] = value
        reader = self.known.get(key)
        if reader is not None:
            reader(key, value)
            return
        near = get_close_matches(key, self.known, n=1)
        allowed = f"PyTorch {self.version} has no such option"
        self.problems.append(SettingsProblem(key, value, allowed, near[0] if near else None))

    def check_together(self) -> None:
        """Sizes that must not be smaller than a large segment."""
        segment = self.fields.get("large_segment_bytes", 20 * MIB)
        if segment <= 10 * MIB:
            self._wrong("large_segment_size_mb", "more than 10 is expected")
        large_mb = segment // MIB
        for key, name in (
            ("max_split_size_mb", "max_split_bytes"),
            ("max_non_split_rounding_mb", "max_non_split_rounding_bytes"),
        ):
            size = self.fields.get(name)
            if size is None:
                continue
            if size < segment:
                self._wrong(key, f"at least {large_mb} is expected, the size of a large segment")
            elif size == segment and not self.rules.oversize_includes_large_segment:
                self._wrong(key, f"more than {large_mb} is expected, the size of a large segment")

    def _wrong(self, key: str, allowed: str, nearest: str | None = None) -> None:
        self.problems.append(SettingsProblem(key, self.values[key], allowed, nearest))

    def _ignore(self, key: str, value: str) -> None:
        """An option without effect on device memory takes any value."""

    def _backend(self, key: str, value: str) -> None:
        if value != "native":
            near = get_close_matches(value, ["native"], n=1)
            self._wrong(key, "only native is simulated", near[0] if near else None)

    def _expandable(self, key: str, value: str) -> None:
        if value in ("True", "False"):
            self.fields["expandable_segments"] = value == "True"
        else:
            near = value.capitalize()
            self._wrong(key, "True or False is expected", near if near in ("True", "False") else None)

    def _megabytes(self, name: str) -> Callable[[str, str], None]:
        def read(key: str, value: str) -> None:
            if value.isascii() and value.isdigit():
                self.fields[name] = int(value) * MIB
            else:
                self._wrong(key, "a whole number of MiB is expected, e.g. 128")

        return read

    def _threshold(self, key: str, value: str) -> None:
        share = number(value)
        if share is not None and 0 < share < 1:
            self.fields["gc_threshold"] = share
        else:
            self._wrong(key, "a number between 0 and 1 is expected, e.g. 0.8")

    def _fraction(self, key: str, value: str) -> None:
        share = number(value)
        if share is not None and 0 <= share <= 1:
            self.fields["memory_fraction"] = share
        else:
            self._wrong(key, "a number from 0 to 1 is expected, e.g. 0.9")

    def _divisions(self, key: str, value: str) -> None:
        if not value.startswith("["):
            divisions = power_of_two(value)
            if divisions:
                self.fields["roundup_divisions"] = (divisions,) * ROUNDUP_ENTRIES
            else:
                self._wrong(key, "a power of two or a list such as [256:1,512:2,>:4] is expected")
            return
        table = [0] * ROUNDUP_ENTRIES
        last = -1
        for item in value.strip("[]").split(","):
            last = self._interval(key, item, table, last)
        self.fields["roundup_divisions"] = tuple(table)

    def _interval(self, key: str, item: str, table: list[int], last: int) -> int:
        """Enter "megabytes:divisions" into the table; returns the entry that was named last (-1: none)."""
        size_text, _, divisions_text = item.partition(":")
        divisions = 0 if divisions_text == "0" else power_of_two(divisions_text)
        size = power_of_two(size_text)
        if divisions is None or (size is None and size_text != ">"):
            allowed = f"{item!r}: MiB:divisions is expected, both powers of two (divisions may be 0, MiB may be >)"
            self._wrong(key, allowed)
            return last
        if size is None:
            first = max(last, 0) if self.rules.open_interval_overwrites else last + 1
            table[first:] = [divisions] * (ROUNDUP_ENTRIES - first)
            return last
        entry = min(size.bit_length() - 1, ROUNDUP_ENTRIES - 1)
        if last < 0:
            table[: entry + 1] = [divisions] * (entry + 1)
        table[entry] = divisions
        return entry


def number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def power_of_two(text: str) -> int | None:
    """A power of two (1, 2, 4 ...), or None."""
    if not (text.isascii() and text.isdigit()):
        return None
    value = int(text)
    return value if value > 0 and value & (value - 1) == 0 else None
