"""The metrics, read as a scraper reads them."""

from __future__ import annotations

import socket
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

import prometheus_client
import pytest
from prometheus_client.parser import text_string_to_metric_families

from kafkalog.cleaner import CleanerConfig, CleanerThread
from kafkalog.cleaner.metrics import CleanerMetrics, served
from kafkalog.cleaner.objects import upkeep
from kafkalog.cleaner.state.notes import DirectoryNotes
from kafkalog.cleaner.state.uncleanable import mark_uncleanable
from kafkalog.errors import InvalidInputError, KafkaLogError
from kafkalog.storage_engine.directory.directory_log import DirectoryLog
from kafkalog.storage_engine.object_store.object_log import ObjectLog
from tests.builders.log_builder import LogBuilder
from tests.unit.rules.acts import eventually
from tests.unit.storage_engine.store_log import memory_address

NOW = 1_700_000_000_000
KAFKAS = {
    *(
        f"kafka_log_logcleaner_{name}"
        for name in (
            "max_buffer_utilization_percent",
            "cleaner_recopy_percent",
            "max_clean_time_secs",
            "max_compaction_delay_secs",
            "deadthreadcount",
        )
    ),
    *(
        f"kafka_log_logcleanermanager_{name}"
        for name in (
            "uncleanable_partitions_count",
            "uncleanable_bytes",
            "max_dirty_percent",
            "time_since_last_run_ms",
        )
    ),
}
Labels = tuple[tuple[str, str], ...]


def log(root: Path) -> DirectoryLog:
    log = LogBuilder(root, now_ms=NOW).topic(segment_bytes=100)
    return log.commits([("a", f"{i}"), ("b", None)] for i in range(5)).engine


def read(port: int) -> dict[tuple[str, Labels], float]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=120) as answer:
        text = answer.read().decode()
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def value(port: int, name: str, **labels: str) -> float:
    return read(port)[name, tuple(sorted(labels.items()))]


def cleaned(engine: DirectoryLog, clock: Callable[[], int] = lambda: NOW) -> CleanerThread:
    thread = CleanerThread(engine, CleanerConfig(backoff_ms=20), clock)
    thread.start()
    eventually(lambda: thread.cleanings > 0)
    return thread


def test_kafkas_metrics_bear_the_names_of_its_exporter(tmp_path: Path) -> None:
    engine = log(tmp_path)
    with served(engine, CleanerThread(engine), 0) as port:
        names = {name for name, _ in read(port) if name.startswith("kafka_")}
    assert names == KAFKAS


def test_without_a_cleaning_kafkas_metrics_are_zero(tmp_path: Path) -> None:
    engine = log(tmp_path)
    with served(engine, CleanerThread(engine), 0) as port:
        found = {name: value for (name, _), value in read(port).items() if name in KAFKAS}
    found.pop("kafka_log_logcleanermanager_time_since_last_run_ms")
    assert set(found.values()) == {0.0}


def test_the_last_cleaning_of_a_thread_is_measured(tmp_path: Path) -> None:
    engine = log(tmp_path)
    thread = cleaned(engine)
    try:
        with served(engine, thread, 0) as port:
            (stats,) = thread.last_stats
            percent = value(port, "kafka_log_logcleaner_cleaner_recopy_percent")
            assert percent == pytest.approx(100 * stats.bytes_written / stats.bytes_read)
            used = value(port, "kafka_log_logcleaner_max_buffer_utilization_percent")
            assert used == pytest.approx(100 * stats.buffer_utilization)
            seconds = value(port, "kafka_log_logcleaner_max_clean_time_secs")
            assert seconds == pytest.approx(stats.elapsed_ms / 1e3)
            assert value(port, "kafkalog_cleaner_cleanings_total") == thread.cleanings
            assert value(port, "kafkalog_cleaner_records_removed_total") == thread.records_removed
            assert value(port, "kafkalog_cleaner_failures_total") == 0
    finally:
        thread.stop()


def test_the_dirty_percentage_is_that_of_the_last_look(tmp_path: Path) -> None:
    engine = log(tmp_path)
    engine.alter_topic("t", {"min.cleanable.dirty.ratio": "1.0"})
    thread = CleanerThread(engine, CleanerConfig(backoff_ms=60_000), lambda: NOW)
    thread.start()
    eventually(lambda: thread.last_look_ms is not None)
    try:
        with served(engine, thread, 0) as port:
            assert value(port, "kafka_log_logcleanermanager_max_dirty_percent") == 100.0
    finally:
        thread.stop()


def test_time_since_the_last_run_goes_on(tmp_path: Path) -> None:
    engine = log(tmp_path)
    now = NOW
    thread = CleanerThread(engine, clock=lambda: now)
    metrics = CleanerMetrics(engine, thread, clock=lambda: now)

    def since() -> float:
        registry = prometheus_client.CollectorRegistry()
        metrics.register(registry)
        name = "kafka_log_logcleanermanager_time_since_last_run_ms"
        found = registry.get_sample_value(name)
        metrics.unregister(registry)
        assert found is not None
        return found

    now = NOW + 500
    assert since() == 500
    thread.last_look_ms = NOW + 400
    assert since() == 100


def test_uncleanable_partitions_are_counted_with_their_dirty_bytes(tmp_path: Path) -> None:
    engine = log(tmp_path)
    mark_uncleanable(DirectoryNotes(tmp_path / "t-0"), KafkaLogError("damage"), {}, now_ms=NOW)
    dirty = sum(path.stat().st_size for path in sorted((tmp_path / "t-0").glob("*.log"))[:-1])
    with served(engine, CleanerThread(engine), 0) as port:
        root = str(tmp_path)
        name = "kafka_log_logcleanermanager_uncleanable_"
        assert value(port, f"{name}partitions_count", logDirectory=root) == 1
        assert value(port, f"{name}bytes", logDirectory=root) == dirty


def test_partitions_are_gauged_where_they_are_compacted(tmp_path: Path) -> None:
    engine = log(tmp_path)
    engine.create_topic("u", 1, {"cleanup.policy": "delete"})
    with served(engine, CleanerThread(engine), 0) as port:
        ratio = value(port, "kafkalog_partition_dirty_ratio", topic="t", partition="0")
        assert ratio == 1.0
        labels = {dict(found).get("topic") for name, found in read(port) if "partition" in name}
        assert "u" not in labels


def test_tombstones_are_gauged_once_they_are_counted(tmp_path: Path) -> None:
    engine = log(tmp_path)
    name = "kafkalog_partition_tombstones_waiting"
    with served(engine, CleanerThread(engine), 0) as port:
        assert name not in {found for found, _ in read(port)}
        thread = cleaned(engine)
        eventually(lambda: name in {found for found, _ in read(port)})
        assert value(port, name, topic="t", partition="0") == 1.0
        thread.stop()


def test_metrics_are_gone_when_they_are_no_longer_served(tmp_path: Path) -> None:
    engine = log(tmp_path)
    registry = prometheus_client.CollectorRegistry()
    metrics = CleanerMetrics(engine, CleanerThread(engine))
    metrics.register(registry)
    assert b"kafka_log_logcleaner" in prometheus_client.generate_latest(registry)
    metrics.unregister(registry)
    assert prometheus_client.generate_latest(registry) == b""
    with served(engine, CleanerThread(engine), 0) as port:
        read(port)
    with pytest.raises(urllib.error.URLError):
        read(port)


def test_metrics_go_on_when_the_cleaner_gets_other_settings(tmp_path: Path) -> None:
    engine = log(tmp_path)
    thread = cleaned(engine)
    try:
        with served(engine, thread, 0) as port:
            before = value(port, "kafkalog_cleaner_cleanings_total")
            thread.reconfigure(CleanerConfig(backoff_ms=20, threads=2))
            assert {name for name, _ in read(port) if name.startswith("kafka_")} == KAFKAS
            assert value(port, "kafkalog_cleaner_cleanings_total") >= before > 0
            assert value(port, "kafka_log_logcleaner_deadthreadcount") == 0
    finally:
        thread.stop()


def test_a_port_that_is_taken_is_one_line(tmp_path: Path) -> None:
    engine = log(tmp_path)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        message = rf"metrics at 127\.0\.0\.1:{port}: Address already in use"
        with (
            pytest.raises(InvalidInputError, match=message),
            served(engine, CleanerThread(engine), port),
        ):
            pass


def test_a_log_in_an_object_store_has_metrics_of_its_objects_and_requests() -> None:
    log = ObjectLog(memory_address())
    log.create_topic("t")
    log.append("t", [(b"k", b"v")])
    upkeep.roll_active(log, now_ms=0)
    with served(log, CleanerThread(log), 0) as port:
        assert value(port, "kafkalog_store_fresh_objects") == 1
        assert value(port, "kafkalog_store_dropped_objects") == 0
        assert value(port, "kafkalog_partition_dirty_ratio", topic="t", partition="0") == 1
        assert value(port, "kafkalog_store_requests_total", kind="PUT") > 1
        assert value(port, "kafkalog_store_dollars_total") > 0
