"""The part of a long list of cases that runs today: each case has its turn within some days.

KAFKALOG_DAY, a number, repeats the choice of a day; KAFKALOG_DAY=every runs the whole of each list,
as targets of make do with some lists.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Final, TypeVar
from zlib import crc32

__all__ = ["DAY", "IS_EVERY", "TOLD", "has_day", "todays"]

TOLD: Final = os.environ.setdefault("KAFKALOG_DAY", str(datetime.now(UTC).toordinal()))
"""Processes that this one starts inherit it, so midnight changes no run."""
IS_EVERY: Final = TOLD == "every"
DAY: Final = 0 if IS_EVERY else int(TOLD)
Case = TypeVar("Case")


def has_day(name: str, days: int) -> bool:
    """Return whether a case, known by its name alone, has its turn: once in so many days."""
    return IS_EVERY or crc32(name.encode()) % days == DAY % days


def todays(cases: Iterable[Case], days: int, day: int | None = None) -> list[Case]:
    """Return every `days`-th case, from another one each day; all if that is asked for."""
    if day is None and IS_EVERY:
        return list(cases)
    return list(cases)[(DAY if day is None else day) % days :: days]
