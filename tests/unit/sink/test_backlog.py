"""The warning that nobody cleans."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import kafkalog
from kafkalog.cleaner.schedule import manager
from kafkalog.sink import backlog
from kafkalog.sink.options import SinkOptions
from kafkalog.storage_engine.directory import neglect
from kafkalog.storage_engine.directory.directory_log import DirectoryLog
from kafkalog.storage_engine.directory.neglect import dirty_partitions
from kafkalog.storage_engine.format import layout
from kafkalog.storage_engine.fs.locks import FileLock
from kafkalog.storage_engine.metadata.state import PartitionState, TopicState

NOW_MS = 1_800_000_000_000
MINUTE_MS = 60_000


def partition(**fields: int) -> PartitionState:
    return PartitionState(high_watermark=110, **{"last_stable_offset": 110, **fields})


def topic(*partitions: PartitionState, policy: str = "compact") -> TopicState:
    return TopicState("t", "id", {"cleanup.policy": policy}, partitions)


def test_closed_segments_past_the_ratio_are_dirty() -> None:
    clean = partition(active_base=100, first_dirty_offset=60)
    dirty = partition(active_base=100, first_dirty_offset=40)
    active_only = partition(active_base=0)
    truncated = partition(active_base=100, log_start_offset=100)
    held_back = partition(active_base=100, first_dirty_offset=40, last_stable_offset=70)
    found = dirty_partitions(topic(clean, dirty, active_only, truncated, held_back))
    assert found == [1]
    assert dirty_partitions(topic(dirty, policy="delete")) == []


class Stream:
    """A query that commits one segment at a time; every call is another process's."""

    def __init__(self, root: Path, **config: str) -> None:
        self.engine = DirectoryLog(root)
        self.engine.create_topic("t", 1, {"segment.bytes": "200", **config})
        self.options = SinkOptions(root=root, topic="t")

    def commit(self, now_ms: int) -> None:
        """Commit, and look; the active segment was written to at `now_ms`."""
        self.engine.append("t", [(b"k", b"%0100d" % now_ms)], now_ms=now_ms)
        base = self.engine.state().topics["t"].partitions[0].active_base
        active = self.engine.partition_directory("t", 0) / layout.segment_file(base, layout.LOG)
        os.utime(active, ns=(now_ms * 1_000_000, now_ms * 1_000_000))
        self.look(now_ms)

    def look(self, now_ms: int, query_id: str = "q") -> None:
        backlog.warn_of_backlog(self.options, query_id, now_ms)


@pytest.fixture(autouse=True)
def a_new_process() -> None:
    backlog._warned.clear()
    neglect._dirty_since.clear()


@pytest.fixture
def stream(tmp_path: Path) -> Stream:
    return Stream(tmp_path / "log")


def test_segments_closed_for_less_than_a_minute_are_not_warned_of(
    stream: Stream, caplog: pytest.LogCaptureFixture
) -> None:
    for second in range(0, 60, 10):
        stream.commit(NOW_MS + second * 1000)
    assert caplog.text == ""


def test_the_warning_comes_once_per_query_when_they_are_older(
    stream: Stream, caplog: pytest.LogCaptureFixture
) -> None:
    for second in range(0, 120, 10):
        stream.commit(NOW_MS + second * 1000)
    assert caplog.text.count("no cleaner is at work") == 1
    assert "clean('t')" in caplog.text
    stream.look(NOW_MS + 2 * MINUTE_MS, query_id="other")
    assert caplog.text.count("no cleaner is at work") == 2


def test_it_comes_too_when_a_query_triggers_once_an_hour_in_a_new_process_each(
    stream: Stream, caplog: pytest.LogCaptureFixture
) -> None:
    for hour in range(3):
        backlog._warned.clear()
        stream.commit(NOW_MS + hour * 60 * MINUTE_MS)
    assert "no cleaner is at work" in caplog.text


def test_a_cleaning_ends_it(stream: Stream, caplog: pytest.LogCaptureFixture) -> None:
    with kafkalog.open(stream.engine.root) as log:
        for hour in range(4):
            stream.commit(NOW_MS + hour * 60 * MINUTE_MS)
            log.clean("t", now_ms=NOW_MS + hour * 60 * MINUTE_MS)
    assert caplog.text == ""


def test_what_no_cleaner_may_touch_yet_is_not_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    stream = Stream(tmp_path / "log", **{"min.compaction.lag.ms": str(60 * MINUTE_MS)})
    for minute in range(0, 60, 10):
        stream.commit(NOW_MS + minute * MINUTE_MS)
    assert caplog.text == ""
    stream.look(NOW_MS + 180 * MINUTE_MS)
    assert "no cleaner is at work" in caplog.text


def test_a_cleaner_at_work_silences_it(stream: Stream, caplog: pytest.LogCaptureFixture) -> None:
    lock = FileLock(stream.engine.partition_directory("t", 0) / layout.CLEANER_LOCK)
    with lock.exclusive():
        for minute in range(5):
            stream.commit(NOW_MS + minute * MINUTE_MS)
    assert caplog.text == ""
    stream.look(NOW_MS + 5 * MINUTE_MS)
    assert "no cleaner is at work" in caplog.text


def test_a_look_that_fails_does_not_fail_the_commit(
    stream: Stream, caplog: pytest.LogCaptureFixture
) -> None:
    for minute in range(2):
        stream.commit(NOW_MS + minute * MINUTE_MS)
    stream.engine.partition_directory("t", 0).rename(stream.engine.root / "elsewhere")
    stream.look(NOW_MS + 5 * MINUTE_MS)
    assert caplog.text == ""


def test_an_active_segment_counts_where_the_cleaner_closes_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    stream = Stream(tmp_path / "log")
    stream.engine.alter_topic("t", {"segment.bytes": None})
    stream.engine.append("t", [(b"k", bytes(1 << 19))] * 3, now_ms=NOW_MS)
    stream.look(NOW_MS)
    stream.look(NOW_MS + MINUTE_MS - 1)
    assert caplog.text == ""
    stream.look(NOW_MS + MINUTE_MS)
    assert "no segment.bytes set: the cleaner closes segments" in caplog.text


def test_a_cleaning_ends_the_time_in_which_an_active_segment_is_neglected(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    stream = Stream(tmp_path / "log")
    stream.engine.alter_topic("t", {"segment.bytes": None})
    for minute in range(5):
        stream.engine.append("t", [(b"k", bytes(1 << 19))] * 3, now_ms=NOW_MS)
        stream.look(NOW_MS + minute * MINUTE_MS)
        manager.clean(stream.engine, now_ms=NOW_MS + minute * MINUTE_MS)
    assert caplog.text == ""
