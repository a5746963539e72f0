"""The part of a long list of cases that runs today: each case has its turn within some days.

KAFKALOG_DAY, a number, repeats the choice of a day. A target of make runs the whole of each list.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Final, TypeVar

__all__ = ["DAY", "todays"]

DAY: Final = int(os.environ.setdefault("KAFKALOG_DAY", str(datetime.now(UTC).toordinal())))
"""Processes that this one starts inherit it, so midnight changes no run."""
Case = TypeVar("Case")


def todays(cases: Iterable[Case], days: int, day: int = DAY) -> list[Case]:
    """Return every `days`-th case, from another one each day."""
    return list(cases)[day % days :: days]
