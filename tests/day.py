"""The part of a long list of cases that runs today: each case has its turn within some days.

KAFKALOG_DAY, a number, repeats the choice of a day. A target of make runs the whole of each list.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Final, TypeVar

__all__ = ["DAY", "DEATHS_DAYS", "acts_of_today", "todays"]

DAY: Final = int(os.environ.setdefault("KAFKALOG_DAY", str(datetime.now(UTC).toordinal())))
"""Processes that this one starts inherit it, so midnight changes no run."""
DEATHS_DAYS: Final = 1 if os.environ.get("KAFKALOG_STEPS") == "every" else 3
"""In so many days something dies once at each of its acts; `make kill-test` lets it in one run."""
ACTS_MAX: Final = 10_000
"""More acts than anything has that dies at each of them."""
Case = TypeVar("Case")


def todays(cases: Iterable[Case], days: int, day: int = DAY) -> list[Case]:
    """Return every `days`-th case, from another one each day."""
    return list(cases)[day % days :: days]


def acts_of_today(day: int = DAY) -> list[int]:
    """Return the numbers, from 1, of the acts at which something dies today.

    They go far beyond the last act, where a test ends.
    """
    return todays(range(1, ACTS_MAX), DEATHS_DAYS, day)
