"""Keep all cleaning threads of a process below a rate of bytes read and written.

Kafka: org.apache.kafka.storage.internals.utils.Throttler, and its use in LogCleaner (rule C135).
Unlike Kafka's, it never sleeps while holding a lock, and a wait can be aborted.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kafkalog.cleaner.state.stats import CleanerStats

_CHECK_INTERVAL_S = 0.3
_LONGEST_NAP_S = 0.1


class Throttler:
    """Count bytes; every 300 ms, make the counting threads wait until the rate is kept."""

    def __init__(
        self,
        bytes_per_second: float,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        self._rate = bytes_per_second
        self._clock = clock
        self._sleep = sleep
        self._lock = threading.Lock()
        self._period_start = clock()
        self._observed = 0.0
        self._resume_at = self._period_start

    @property
    def bytes_per_second(self) -> float:
        """The rate; a change resets the count."""
        return self._rate

    @bytes_per_second.setter
    def bytes_per_second(self, rate: float) -> None:
        with self._lock:
            self._rate = rate
            self._observed = 0.0
            self._resume_at = self._period_start = self._clock()

    def wait(self, check_abort: Callable[[], None]) -> None:
        """Wait, like all threads, as long as the rate demands, or until `check_abort` raises."""
        while (left := self._resume_at - self._clock()) > 0:
            check_abort()
            self._sleep(min(left, _LONGEST_NAP_S))

    def count(self, size: int) -> None:
        """Count bytes that were read or written."""
        with self._lock:
            self._observed += size
            now = self._clock()
            elapsed = now - self._period_start
            if elapsed <= _CHECK_INTERVAL_S or self._observed == 0:
                return
            nap = max(0.0, self._observed / self._rate - elapsed)
            # A period ends with its wait; bytes counted until then belong to the next period.
            self._resume_at = self._period_start = now + nap
            self._observed = 0.0


def bytes_moved(stats: CleanerStats) -> int:
    """Return how many bytes a cleaning has moved so far, in both passes and in its spill."""
    log_bytes = stats.map_bytes_read + stats.bytes_read + stats.bytes_written
    return log_bytes + stats.spill_bytes_moved
