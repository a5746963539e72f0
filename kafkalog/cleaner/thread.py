"""The background cleaner of a driver: one daemon thread that cleans whatever is due.

It wakes up every `backoff_ms`, cleans the filthiest partition, and again until nothing is left.
After each cleaning it deletes what the retention of compacted topics does not keep; that of the
others comes at its own interval, which in Kafka is another thread's.
Its kernels let go of the interpreter, so the driver's own threads run on.

Kafka: LogCleaner.CleanerThread.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from kafkalog.cleaner.clean import CleaningAborted
from kafkalog.cleaner.config import CleanerConfig
from kafkalog.cleaner.manager import clean_filthiest, retain, sweep
from kafkalog.errors import KafkaLogError
from kafkalog.storage_engine.clock import now_ms

if TYPE_CHECKING:
    from kafkalog.storage_engine.engine import Engine

__all__ = ["CleanerThread"]

_log = logging.getLogger(__name__)


class CleanerThread:
    """Starts and stops the thread; any number of processes may run one on the same log.

    It can be started again after it was stopped. `clock` gives epoch milliseconds.
    """

    def __init__(
        self,
        engine: Engine,
        config: CleanerConfig | None = None,
        clock: Callable[[], int] = now_ms,
    ) -> None:
        self.cleanings = 0
        """Rounds that succeeded."""
        self.records_removed = 0
        self.bytes_removed = 0
        """What those rounds took out of `.log` files."""
        self.segments_deleted = 0
        """Segments that went by retention."""
        self.failures = 0
        """Rounds, retentions, or looks around for work, that did not."""
        self._engine = engine
        self._config = CleanerConfig() if config is None else config
        self._clock = clock
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._failed: tuple[str, int] | None = None
        self._all_retained_ms: int | None = None

    @property
    def is_alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread is not None and self._thread.is_alive()

    def start(self) -> None:
        """Start the thread; does nothing when it runs."""
        if self.is_alive:
            return
        self._stop = threading.Event()
        self._thread = threading.Thread(
            target=self._run, args=(self._stop,), name="kafkalog-cleaner", daemon=True
        )
        self._thread.start()

    def stop(self) -> None:
        """Stop the thread and wait for it; a round ends within a chunk, or after its swap."""
        self._stop.set()
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()
        self._thread = None

    def _run(self, stop: threading.Event) -> None:
        while not stop.is_set():
            if not self._clean_once(stop):
                stop.wait(self._config.backoff_ms / 1e3)

    def _clean_once(self, stop: threading.Event) -> bool:
        """Clean one round; returns whether to look for more at once."""

        def check_abort() -> None:
            if stop.is_set():
                raise CleaningAborted("the cleaner is stopped")

        try:
            now_ms = self._clock()
            stats = clean_filthiest(
                self._engine, now_ms=now_ms, config=self._config, check_abort=check_abort
            )
            self._retain(now_ms)
            if stats is None:
                sweep(self._engine, now_ms=now_ms)
                return False
        except (KafkaLogError, OSError) as fault:
            self.failures += 1
            _log.warning("the cleaner goes on after an error: %s", fault)
            return False
        except Exception:  # nothing that is raised here may end the thread
            self.failures += 1
            _log.exception("the cleaner goes on after an error")
            return False
        if stats.error is None:
            self.cleanings += 1
            self.records_removed += stats.records_read - stats.records_kept
            self.bytes_removed += stats.bytes_read - stats.bytes_written
            self._failed = None
            return True
        self.failures += 1
        # A partition that failed is marked, so the next look finds another one; unless the disk
        # did not take the mark.
        is_marked = self._failed != (stats.topic, stats.partition)
        self._failed = (stats.topic, stats.partition)
        return is_marked

    def _retain(self, now_ms: int) -> None:
        """Apply retention: to compacted topics at every call, to the others at their interval."""
        last_ms, interval_ms = self._all_retained_ms, self._config.retention_check_interval_ms
        is_due = last_ms is None or not 0 <= now_ms - last_ms < interval_ms
        if is_due:
            self._all_retained_ms = now_ms
        for stats in retain(
            self._engine,
            now_ms=now_ms,
            is_skipped=lambda config: not (is_due or config.is_compacted),
        ):
            self.segments_deleted += stats.segments
            self.failures += stats.error is not None
