"""The warning that nobody cleans."""

from __future__ import annotations

from pathlib import Path

import pytest

from kafkalog.sink import backlog
from kafkalog.sink.options import SinkOptions
from kafkalog.storage_engine import layout
from kafkalog.storage_engine.engine import Engine
from kafkalog.storage_engine.files import FileLock
from kafkalog.storage_engine.state import PartitionState, TopicState


def topic(*partitions: PartitionState, policy: str = "compact") -> TopicState:
    return TopicState("t", "id", {"cleanup.policy": policy}, partitions)


def test_closed_segments_past_the_ratio_are_dirty() -> None:
    clean = PartitionState(high_watermark=110, active_base=100, first_dirty_offset=60)
    dirty = PartitionState(high_watermark=110, active_base=100, first_dirty_offset=40)
    active_only = PartitionState(high_watermark=100, active_base=0)
    truncated = PartitionState(high_watermark=110, active_base=100, log_start_offset=100)
    assert backlog.dirty_partitions(topic(clean, dirty, active_only, truncated)) == [1]
    assert backlog.dirty_partitions(topic(dirty, policy="delete")) == []


@pytest.fixture
def options(tmp_path: Path) -> SinkOptions:
    """A log whose topic has closed, dirty segments."""
    backlog._dirty_since.clear()
    backlog._warned.clear()
    engine = Engine(tmp_path / "log")
    engine.create_topic("t", 1, {"segment.bytes": "200"})
    for number in range(5):
        engine.append("t", [(b"k", b"%0100d" % number)])
    return SinkOptions(root=tmp_path / "log", topic="t")


def test_the_warning_comes_once_after_a_minute(
    options: SinkOptions, caplog: pytest.LogCaptureFixture
) -> None:
    for now_ms in (0, 59_999):
        backlog.warn_of_backlog(options, "q", now_ms)
    assert caplog.text == ""
    for now_ms in (60_000, 60_001):
        backlog.warn_of_backlog(options, "q", now_ms)
    assert caplog.text.count("no cleaner is at work") == 1


def test_a_cleaner_at_work_silences_it(
    options: SinkOptions, caplog: pytest.LogCaptureFixture
) -> None:
    backlog.warn_of_backlog(options, "q", 0)
    with FileLock(options.root / "t-0" / layout.CLEANER_LOCK).exclusive():
        backlog.warn_of_backlog(options, "q", 100_000)
    assert caplog.text == ""
