"""The clock, and its only reader: in the storage engine and the cleaner, time is an argument."""

from __future__ import annotations

import time


def now_ms() -> int:
    """Return epoch milliseconds."""
    return time.time_ns() // 1_000_000
