"""The cleaner's metrics for Prometheus.

Kafka's own metrics have the names of its JMX exporter, so dashboards for brokers fit. For example,
`kafka.log:type=LogCleaner,name=max-clean-time-secs` is `kafka_log_logcleaner_max_clean_time_secs`.
Our own metrics `kafkalog_...` are counters of the cleaner, and gauges per partition. All are
computed on each request. Needs the extra `metrics` (prometheus-client).

Kafka: LogCleaner, LogCleanerManager (rules C137, C138, and D9: percentages are exact).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, TypeAlias, cast

from kafkalog.cleaner.objects.object_moment import ObjectMoment
from kafkalog.cleaner.objects.regroup_plan import price_of
from kafkalog.cleaner.report.status import status
from kafkalog.cleaner.report.store_figures import store_figures
from kafkalog.cleaner.shelves import moment_of
from kafkalog.errors import InvalidInputError
from kafkalog.extras import install_command
from kafkalog.storage_engine.fs import clock as fs_clock
from kafkalog.storage_engine.log.log import Log

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry
    from prometheus_client.core import Metric
    from prometheus_client.registry import Collector

    from kafkalog.cleaner.report.status import PartitionStatus
    from kafkalog.cleaner.schedule.thread import CleanerThread
    from kafkalog.storage_engine.place import OpenedLog

_MANAGER = "kafka_log_logcleanermanager_"
_Figures: TypeAlias = Iterator[tuple[str, float, str]]
"""Name, value and text of metrics."""


class CleanerMetrics:
    """A collector of the cleaner's counters and the partitions' state, for a Prometheus registry.

    `register` adds it, `unregister` removes it. `clock` returns epoch
    milliseconds; None for the system's.
    """

    def __init__(
        self,
        log: Log | OpenedLog,
        cleaner: CleanerThread,
        clock: Callable[[], int] | None = None,
    ) -> None:
        self._log = log if isinstance(log, Log) else log._log
        self._cleaner = cleaner
        self._clock = fs_clock.now_ms if clock is None else clock
        self._since_ms = self._clock()

    def register(self, registry: CollectorRegistry) -> None:
        """Add the metrics to a registry."""
        registry.register(cast("Collector", self))

    def unregister(self, registry: CollectorRegistry) -> None:
        """Remove the metrics from a registry."""
        registry.unregister(cast("Collector", self))

    def describe(self) -> list[Metric]:
        """Announce no names, so that `register` does not read the log."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics, computed now."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        time_ms = self._clock()
        moment = moment_of(self._log, time_ms)
        partitions = status(moment)
        for name, value, text in self._of_cleaner():
            yield GaugeMetricFamily(f"kafka_log_logcleaner_{name}", text, value=value)
        root = [str(self._log.root)]
        for name, value, text in _of_uncleanable(partitions):
            gauge = GaugeMetricFamily(f"{_MANAGER}{name}", text, labels=["logDirectory"])
            gauge.add_metric(root, value)
            yield gauge
        for name, value, text in self._of_manager(time_ms):
            yield GaugeMetricFamily(f"{_MANAGER}{name}", text, value=value)
        for name, value, text in self._counters():
            yield CounterMetricFamily(f"kafkalog_cleaner_{name}", text, value=value)
        yield from _of_partitions(partitions)
        if isinstance(moment, ObjectMoment):
            yield from _of_store(moment)

    def _of_cleaner(self) -> _Figures:
        last = self._cleaner.last_stats
        written = sum(stats.bytes_written for stats in last)
        read = sum(stats.bytes_read for stats in last)
        yield (
            "max_buffer_utilization_percent",
            100 * max((stats.buffer_utilization for stats in last), default=0.0),
            "Largest share of its offset map that a thread's last cleaning took.",
        )
        yield (
            "cleaner_recopy_percent",
            100 * written / max(read, 1),
            "Share of what the threads' last cleanings read that they wrote again.",
        )
        yield (
            "max_clean_time_secs",
            max((stats.elapsed_ms for stats in last), default=0.0) / 1e3,
            "Longest of the threads' last cleanings.",
        )
        yield (
            "max_compaction_delay_secs",
            self._cleaner.max_compaction_delay_ms / 1e3,
            "How long max.compaction.lag.ms had demanded a cleaning at the last look for work.",
        )
        yield (
            "deadthreadcount",
            self._cleaner.dead_threads,
            "Threads of the cleaner that should run and do not.",
        )

    def _of_manager(self, time_ms: int) -> _Figures:
        yield (
            "max_dirty_percent",
            100 * self._cleaner.max_dirty_ratio,
            "Largest dirty ratio of all partitions, at the last look for work.",
        )
        yield (
            "time_since_last_run_ms",
            max(0, time_ms - (self._cleaner.last_look_ms or self._since_ms)),
            "Time since a thread last looked for work.",
        )

    def _counters(self) -> _Figures:
        cleaner = self._cleaner
        yield "cleanings", cleaner.cleanings, "Rounds of cleaning that succeeded."
        yield "aborts", cleaner.aborts, "Rounds that were broken off."
        yield "failures", cleaner.failures, "Rounds, retentions and looks for work that failed."
        yield "thread_deaths", cleaner.deaths, "Threads that died; each was replaced."
        yield "records_removed", cleaner.records_removed, "Records that cleaning took away."
        yield "bytes_removed", cleaner.bytes_removed, "Bytes that cleaning took away."
        yield "segments_deleted", cleaner.segments_deleted, "Segments that went by retention."


def _of_uncleanable(partitions: list[PartitionStatus]) -> _Figures:
    marked = [one for one in partitions if one.state == "uncleanable"]
    yield "uncleanable_partitions_count", len(marked), "Partitions that cannot be cleaned."
    yield (
        "uncleanable_bytes",
        sum(one.dirty_bytes for one in marked),
        "Bytes of them that a cleaning would treat as new.",
    )


def _of_partitions(partitions: list[PartitionStatus]) -> Iterator[Metric]:
    from prometheus_client.core import GaugeMetricFamily

    compacted = [one for one in partitions if one.state not in ("not compacted", "policy unknown")]
    for name, text in (
        ("clean_bytes", "Bytes that hold each key once."),
        ("dirty_bytes", "Bytes that a cleaning would treat as new."),
        ("uncleanable_bytes", "Bytes that no cleaning may touch yet."),
        ("dirty_ratio", "Share of dirty bytes in all that a cleaning would read."),
        ("tombstones_waiting", "Deletions that wait for their delete horizon, where known."),
    ):
        gauge = GaugeMetricFamily(f"kafkalog_partition_{name}", text, labels=["topic", "partition"])
        for one in compacted:
            value = getattr(one, name)
            if value is not None:
                gauge.add_metric([one.topic, str(one.partition)], value)
        yield gauge


def _of_store(moment: ObjectMoment) -> Iterator[Metric]:
    """Yield what a log in an object store also has: its objects, and this process's requests."""
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    found = store_figures(moment)
    for name, value, text in (
        ("fresh_objects", found.fresh_objects, "Objects that no regroup has replaced yet."),
        ("fresh_bytes", found.fresh_bytes, "Bytes of them."),
        ("dropped_objects", found.dropped_objects, "Dropped objects that are not deleted yet."),
        (
            "read_amplification",
            found.read_amplification,
            "GETs of one read, divided by the fewest.",
        ),
        ("regroup_due", float(found.regroup.is_due), "1 if the fresh objects are to be regrouped."),
    ):
        yield GaugeMetricFamily(f"kafkalog_store_{name}", text, value=value)
    counts = dict(moment.log.client.counts)
    requests = CounterMetricFamily(
        "kafkalog_store_requests", "Requests of this process to the store.", labels=["kind"]
    )
    for kind, count in sorted(counts.items()):
        requests.add_metric([kind], count)
    yield requests
    price = "What they cost at the prices of S3 Standard."
    yield CounterMetricFamily("kafkalog_store_dollars", price, value=price_of(counts))


@contextlib.contextmanager
def served(
    log: Log, cleaner: CleanerThread, port: int, *, address: str = "127.0.0.1"
) -> Iterator[int]:
    """Serve the metrics over HTTP at /metrics as long as the context lasts; yield the port.

    Port 0 takes a free one. Raises InvalidInputError if prometheus-client is missing, or the port
    is not available.
    """
    try:
        import prometheus_client
    except ImportError as fault:
        raise InvalidInputError(
            f"metrics need the package prometheus-client: {install_command('metrics')}"
        ) from fault
    registry = prometheus_client.CollectorRegistry()
    metrics = CleanerMetrics(log, cleaner)
    metrics.register(registry)
    for collector in (prometheus_client.ProcessCollector, prometheus_client.PlatformCollector):
        collector(registry=registry)
    try:
        server, thread = prometheus_client.start_http_server(port, address, registry)
    except (OSError, OverflowError) as fault:
        reason = getattr(fault, "strerror", None) or fault
        raise InvalidInputError(f"metrics at {address}:{port}: {reason}; try another") from fault
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
        metrics.unregister(registry)
