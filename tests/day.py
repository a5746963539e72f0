"""The part of a long list of cases that runs today: each case has its turn within some days.

KAFKALOG_DAY, a number, repeats the choice of a day; KAFKALOG_DAY=every runs the whole of each list,
as targets of make do with some lists.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Final, TypeVar

__all__ = ["DAY", "IS_EVERY", "TOLD", "acts_of_today", "todays"]

TOLD: Final = os.environ.setdefault("KAFKALOG_DAY", str(datetime.now(UTC).toordinal()))
"""Processes that this one starts inherit it, so midnight changes no run."""
IS_EVERY: Final = TOLD == "every"
DAY: Final = 0 if IS_EVERY else int(TOLD)
ACTS_MAX: Final = 10_000
"""More acts than anything has that dies at each of them."""
Case = TypeVar("Case")


def todays(cases: Iterable[Case], days: int, day: int | None = None) -> list[Case]:
    """Return every `days`-th case, from another one each day; all if that is asked for."""
    if day is None and IS_EVERY:
        return list(cases)
    return list(cases)[(DAY if day is None else day) % days :: days]


def acts_of_today(day: int | None = None) -> list[int]:
    """Return the numbers, from 1, of the acts at which something dies today: a third of them.

    They go far beyond the last act, where a test ends.
    """
    return todays(range(1, ACTS_MAX), 3, day)
