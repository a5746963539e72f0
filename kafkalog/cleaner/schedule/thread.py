"""The background cleaner of a process: daemon threads that clean what is due.

Every `backoff_ms` each thread cleans the filthiest partition that no other cleaner has, until
nothing is left. After each cleaning it applies the retention of compacted topics, and at intervals
that of the others. A thread that dies is counted and replaced. The kernels release the GIL, so the
driver's threads keep running.

Kafka: LogCleaner, LogCleaner.CleanerThread (rules C131 to C137).
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from kafkalog.cleaner.config import CleanerConfig
from kafkalog.cleaner.plan import Schedule
from kafkalog.cleaner.schedule.manager import clean_filthiest, retain, sweep
from kafkalog.cleaner.schedule.throttle import Throttler
from kafkalog.cleaner.shelf import CleaningAborted
from kafkalog.cleaner.shelves import shelf_of
from kafkalog.cleaner.state.stats import CleanerStats
from kafkalog.errors import InvalidInputError, KafkaLogError
from kafkalog.storage_engine.fs import clock as fs_clock

if TYPE_CHECKING:
    from kafkalog.storage_engine.log.log import Log

_log = logging.getLogger(__name__)


class CleanerThread:
    """Start and stop the threads; any number of processes may clean the same log.

    After a stop it can be started again; the counters continue. `clock` returns epoch milliseconds;
    None for the system's.
    """

    def __init__(
        self,
        log: Log,
        config: CleanerConfig | None = None,
        clock: Callable[[], int] | None = None,
    ) -> None:
        self.cleanings = 0
        """Rounds that succeeded."""
        self.aborts = 0
        """Rounds that were aborted by a stop, a pause, or the deletion of their topic."""
        self.records_removed = 0
        self.bytes_removed = 0
        """Removed from `.log` files, also by rounds that then failed or were aborted."""
        self.segments_deleted = 0
        """Segments deleted by retention."""
        self.failures = 0
        """Rounds, retentions and searches for work that failed."""
        self.deaths = 0
        """Threads that died of an error; each was replaced."""
        self.max_dirty_ratio = 0.0
        """The largest dirty ratio of a compacted partition at the last search for work (C39)."""
        self.max_compaction_delay_ms = 0
        """The largest delay behind max.compaction.lag.ms at the last search for work."""
        self.last_look_ms: int | None = None
        """When a thread last searched for work (epoch ms)."""
        self._log = log
        self._config = CleanerConfig() if config is None else config
        self._clock = fs_clock.now_ms if clock is None else clock
        self._throttler = Throttler(self._config.io_max_bytes_per_second)
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._threads: list[threading.Thread] = []
        self._last_stats: dict[int, CleanerStats] = {}
        self._all_retained_ms: int | None = None

    @property
    def config(self) -> CleanerConfig:
        """The current settings; see `reconfigure`."""
        return self._config

    @property
    def is_alive(self) -> bool:
        """Whether a thread runs."""
        return any(thread.is_alive() for thread in self._threads)

    @property
    def dead_threads(self) -> int:
        """Number of threads that should run and do not; Kafka: DeadThreadCount."""
        return sum(not thread.is_alive() for thread in self._threads)

    @property
    def last_stats(self) -> list[CleanerStats]:
        """The last successful cleaning of each running thread."""
        with self._lock:
            idents = [thread.ident for thread in self._threads]
            return [self._last_stats[one] for one in idents if one in self._last_stats]

    def start(self) -> None:
        """Start the threads, and replace dead ones; running threads continue."""
        with self._lock:
            if self._stop.is_set():
                self._stop = threading.Event()
            self._threads = [thread for thread in self._threads if thread.is_alive()]
            while len(self._threads) < self._thread_count():
                self._start_one(wait_s=0.0)

    def stop(self) -> None:
        """Stop the threads and wait for them; a round stops within a chunk, or after its swap."""
        with self._lock:
            self._stop.set()
            threads, self._threads = self._threads, []
            self._last_stats.clear()
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join()

    def reconfigure(self, config: CleanerConfig) -> None:
        """Restart the threads with other settings (C136).

        Rounds in progress are aborted, and repeated later. The counters stay. Raises
        InvalidInputError for a number of threads that is 0, or less than half or more than twice
        the current one.
        """
        now, then = self._config.threads, config.threads
        if then != now and not max(1, now // 2) <= then <= 2 * now:
            raise InvalidInputError(
                f"threads: expected {max(1, now // 2)} to {2 * now} in place of {now}, found {then}"
            )
        is_running = bool(self._threads)
        self.stop()
        self._config = config
        self._throttler.bytes_per_second = config.io_max_bytes_per_second
        if is_running:
            self.start()

    # --- the threads -----------------------------------------------------------------------------

    def _thread_count(self) -> int:
        return max(1, self._config.threads if self._config.enable else 1)

    def _start_one(self, *, wait_s: float) -> None:
        thread = threading.Thread(
            target=self._run, args=(self._stop, wait_s), name="kafkalog-cleaner", daemon=True
        )
        self._threads.append(thread)
        thread.start()

    def _run(self, stop: threading.Event, wait_s: float) -> None:
        try:
            stop.wait(wait_s)
            is_compacting = self._config.enable and self._config.threads > 0
            shelf = shelf_of(self._log)
            with shelf.announced() if is_compacting else contextlib.nullcontext():
                self._clean_until(stop)
        except BaseException:
            _log.critical("a cleaner thread has died; another one replaces it", exc_info=True)
        finally:
            self._replace(stop)

    def _replace(self, stop: threading.Event) -> None:
        """Start a replacement for this thread after a pause, unless all were stopped."""
        with self._lock:
            if stop.is_set():
                return
            self.deaths += 1
            self._threads.remove(threading.current_thread())
            self._last_stats.pop(threading.get_ident(), None)
            self._start_one(wait_s=self._config.backoff_ms / 1e3)

    def _clean_until(self, stop: threading.Event) -> None:
        config = self._config.of_one_thread()
        while not stop.is_set():
            if not self._clean_once(config, stop):
                stop.wait(config.backoff_ms / 1e3)

    def _clean_once(self, config: CleanerConfig, stop: threading.Event) -> bool:
        """Clean one round; return whether to look for more at once."""

        def check_abort() -> None:
            if stop.is_set():
                raise CleaningAborted("the cleaner is stopped")

        stats: CleanerStats | None = None
        try:
            now_ms = self._clock()
            if config.enable and self._config.threads > 0:
                stats = clean_filthiest(
                    self._log,
                    now_ms=now_ms,
                    config=config,
                    check_abort=check_abort,
                    throttler=self._throttler,
                    watch=self._watch,
                    on_failed=self._count,
                    on_aborted=self._count_aborted,
                )
            self._retain(now_ms, is_compacting=config.enable)
            if stats is None:
                sweep(self._log, now_ms=now_ms)
                return False
        except CleaningAborted:
            return False
        except (KafkaLogError, OSError) as fault:
            self._count_failure()
            _log.warning("the cleaner continues after an error: %s", fault)
            return False
        except Exception:  # no error may end the thread
            self._count_failure()
            _log.exception("the cleaner continues after an error")
            return False
        self._count(stats)
        return True

    def _watch(self, schedule: Schedule) -> None:
        now_ms = self._clock()
        with self._lock:
            self.last_look_ms = max(now_ms, self.last_look_ms or now_ms)
            self.max_dirty_ratio = schedule.max_dirty_ratio
            self.max_compaction_delay_ms = schedule.max_compaction_delay_ms

    def _count(self, stats: CleanerStats) -> None:
        with self._lock:
            self._count_removed(stats)
            if stats.error is not None:
                self.failures += 1
                return
            self.cleanings += 1
            self._last_stats[threading.get_ident()] = stats

    def _count_aborted(self, stats: CleanerStats) -> None:
        with self._lock:
            self.aborts += 1
            self._count_removed(stats)

    def _count_removed(self, stats: CleanerStats) -> None:
        self.records_removed += stats.records_removed
        self.bytes_removed += stats.bytes_removed

    def _count_failure(self) -> None:
        with self._lock:
            self.failures += 1

    def _retain(self, now_ms: int, *, is_compacting: bool) -> None:
        """Apply retention: to compacted topics if compaction runs (C141), to others when due."""
        with self._lock:
            last_ms, interval_ms = self._all_retained_ms, self._config.retention_check_interval_ms
            is_due = last_ms is None or not 0 <= now_ms - last_ms < interval_ms
            if is_due:
                self._all_retained_ms = now_ms
        for stats in retain(
            self._log,
            now_ms=now_ms,
            is_skipped=lambda config: not (is_compacting if config.is_compacted else is_due),
        ):
            with self._lock:
                self.segments_deleted += stats.segments
                self.failures += stats.error is not None
