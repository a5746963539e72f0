"""Spans of time as Spark writes them, such as `15m` and `250ms` (JavaUtils.timeStringAs).

A number alone is in milliseconds.
"""

from __future__ import annotations

import re
from typing import Final

from kafkalog.errors import InvalidInputError
from kafkalog.storage_engine.format.layout import INT64_MAX

_MICROSECONDS: Final = {
    "us": 1,
    "ms": 1_000,
    "s": 1_000_000,
    "m": 60_000_000,
    "min": 60_000_000,
    "h": 3_600_000_000,
    "d": 86_400_000_000,
}
_SPAN: Final = re.compile(r"(-?[0-9]{1,19})([a-z]+)?")


def milliseconds(text: str, *, option: str) -> int:
    """Return a span's whole milliseconds, at most INT64_MAX; raises InvalidInputError."""
    match = _SPAN.fullmatch(text.strip().lower())
    unit = None if match is None else _MICROSECONDS.get(match[2] or "ms")
    if match is None or unit is None or not -INT64_MAX - 1 <= int(match[1]) <= INT64_MAX:
        raise InvalidInputError(
            f"{option}: Time must be specified as seconds (s), milliseconds (ms), microseconds "
            "(us), minutes (m or min), hour (h), or day (d). E.g. 50s, 100ms, or 250us. "
            f"Failed to parse time string: {text}"
        )
    span = int(match[1]) * unit
    whole = abs(span) // 1_000
    return min(whole, INT64_MAX) if span >= 0 else -min(whole, INT64_MAX)
