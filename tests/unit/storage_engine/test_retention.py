"""What retention takes: by log start, by size, by time; whole segments, and never too much."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from kafkalog.storage_engine.directory.directory_log import DirectoryLog
from kafkalog.storage_engine.directory.retention import count_expired
from kafkalog.storage_engine.directory.transaction import Transaction
from kafkalog.storage_engine.format import layout
from kafkalog.storage_engine.fs import locks
from kafkalog.storage_engine.metadata import checkpoints
from kafkalog.storage_engine.metadata.config import TopicConfig
from kafkalog.storage_engine.segment.segments import list_segments
from tests.builders.log_builder import LogBuilder
from tests.builders.log_contents import offsets, segment_bases
from tests.unit.storage_engine.faults import Died, each_act

START_MS = 1_700_000_000_000
HOUR = 3_600_000


def filled(root: Path, *, hours: int = 6, **config: str) -> DirectoryLog:
    """A topic with one record an hour, each in a segment of its own."""
    settings = {"cleanup_policy": "delete", "segment_bytes": 100, **config}
    engine = LogBuilder(root).topic(**settings).engine
    for hour in range(hours):
        append(engine, hour)
    return engine


def append(engine: DirectoryLog, hour: int) -> None:
    engine.append("t", [(f"k{hour}", f"{hour}".zfill(30))], now_ms=START_MS + hour * HOUR)


def at(hour: float) -> int:
    return START_MS + int(hour * HOUR)


def segment_size(engine: DirectoryLog) -> int:
    return (engine.root / "t-0" / layout.segment_file(0, layout.LOG)).stat().st_size


# --- by time -------------------------------------------------------------------------------------


@pytest.mark.parametrize("entry", [b"", (5).to_bytes(8, "big") + bytes(4), b"\x00" * 7 + b"\x01"])
def test_a_time_index_that_is_wrong_deletes_nothing_that_is_young(
    tmp_path: Path, entry: bytes
) -> None:
    engine = filled(tmp_path, retention_ms=str(3 * HOUR))
    for path in (tmp_path / "t-0").glob("*.timeindex"):
        path.write_bytes(entry)
    engine.apply_retention(now_ms=at(4.5))
    assert segment_bases(engine) == [2, 3, 4, 5]


# --- by size -------------------------------------------------------------------------------------


def test_bytes_that_were_never_committed_do_not_count(tmp_path: Path) -> None:
    engine = filled(tmp_path, retention_ms="-1")
    engine.alter_topic("t", {"retention.bytes": str(6 * segment_size(engine))})
    active = tmp_path / "t-0" / layout.segment_file(5, layout.LOG)
    active.write_bytes(active.read_bytes() + bytes(10**5))
    (tmp_path / "t-0" / layout.segment_file(9, layout.LOG)).write_bytes(bytes(10**5))
    assert engine.apply_retention(now_ms=at(6)) == []
    assert offsets(engine) == [0, 1, 2, 3, 4, 5]


# --- by log start, by policy, by high watermark --------------------------------------------------


def test_a_segment_that_ends_above_the_high_watermark_never_goes(tmp_path: Path) -> None:
    engine = filled(tmp_path, retention_ms="1", retention_bytes="0")
    state = engine.describe("t").partitions[0]
    segments = list_segments(tmp_path / "t-0")
    config = TopicConfig.parse(engine.describe("t").config)

    def count(high_watermark: int) -> int:
        from dataclasses import replace

        held = replace(state, high_watermark=high_watermark)
        return count_expired(segments, held, config, at(10**6))

    assert [count(n) for n in range(7)] == [0, 1, 2, 3, 4, 6, 6]


def test_a_fault_of_one_partition_is_not_one_of_the_others(tmp_path: Path) -> None:
    engine = filled(tmp_path, retention_ms="1")
    engine.create_topic("s", 1, {"cleanup.policy": "delete"})
    shutil.rmtree(tmp_path / "s-0")
    found = engine.apply_retention(now_ms=at(10**6))
    assert [(stats.topic, stats.error is None) for stats in found] == [("s", False), ("t", True)]


def test_a_disk_too_full_to_roll_takes_the_other_segments_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine = filled(tmp_path, retention_ms=str(HOUR))

    def roll(self: Transaction, topic: str, number: int, now_ms: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "5.log")

    with monkeypatch.context() as patch:
        patch.setattr(Transaction, "roll", roll)
        (stats,) = engine.apply_retention(now_ms=at(100))
        assert (stats.log_start_offset, stats.segments, stats.error) == (5, 5, None)
        caplog.clear()
        assert engine.apply_retention(now_ms=at(100)) == []
        assert "the active segment stays: 5.log: the disk refused (No space left" in caplog.text
    (stats,) = engine.apply_retention(now_ms=at(100))
    assert (stats.log_start_offset, stats.error) == (6, None)


# --- files ---------------------------------------------------------------------------------------


def test_retired_files_are_removed_after_file_delete_delay_ms(tmp_path: Path) -> None:
    import time

    engine = filled(tmp_path, retention_ms=str(3 * HOUR), file_delete_delay_ms="60000")
    engine.apply_retention(now_ms=at(4.5))
    retired = {path.name for path in (tmp_path / "t-0").glob("0*.deleted")}
    assert {name.split(".")[1] for name in retired} == {"log", "index", "timeindex"}
    now = time.time_ns() // 1_000_000
    engine.alter_topic("t", {"retention.ms": "-1"})
    engine.apply_retention(now_ms=now + 59_000)
    assert len(list((tmp_path / "t-0").glob("0*.deleted"))) == len(retired)
    engine.apply_retention(now_ms=now + 61_000)
    assert list((tmp_path / "t-0").glob("0*.deleted")) == []
    assert (tmp_path / "t-0" / layout.CANARY).exists()


def test_leader_epochs_and_producer_snapshots_below_go_with_the_segments(tmp_path: Path) -> None:
    engine = filled(tmp_path, retention_ms=str(3 * HOUR))
    directory = tmp_path / "t-0"
    checkpoints.write_leader_epochs(directory, [(0, 0), (3, 1), (5, 4)])
    for offset in (1, 2):
        (directory / layout.segment_file(offset, layout.SNAPSHOT)).write_bytes(b"")
    engine.apply_retention(now_ms=at(4.5))
    assert checkpoints.read_leader_epochs(directory) == [(3, 2), (5, 4)]
    assert [path.name for path in directory.glob("*.snapshot")] == [
        layout.segment_file(2, layout.SNAPSHOT)
    ]


def test_a_cleaner_and_retention_never_work_on_a_partition_at_once(tmp_path: Path) -> None:
    engine = filled(tmp_path, retention_ms="1")
    with locks.FileLock(tmp_path / "t-0" / layout.CLEANER_LOCK).exclusive():
        assert engine.apply_retention(now_ms=at(10**6)) == []
    assert len(engine.apply_retention(now_ms=at(10**6))) == 1


def test_a_raised_log_start_is_synced_also_where_commits_are_not(tmp_path: Path) -> None:
    engine = filled(tmp_path, retention_ms="1", flush_messages="1000")
    assert engine.state().unsynced
    engine.apply_retention(now_ms=at(10**6))
    assert not engine.state().unsynced


# --- dying and failing at every step -------------------------------------------------------------


def expire(root: Path, hour: float) -> Callable[[], None]:
    engine = DirectoryLog(root)

    def work() -> None:
        for stats in engine.apply_retention(now_ms=at(hour)):
            assert stats.error is None, stats.error

    return work


@pytest.mark.parametrize("hour", [4.5, 100], ids=["some", "all"])
def test_a_process_that_dies_at_any_act_of_a_retention_loses_nothing_that_stays(
    tmp_path: Path, hour: float
) -> None:
    filled(tmp_path / "start", retention_ms=str(3 * HOUR), file_delete_delay_ms="0")
    kept = [2, 3, 4, 5] if hour < 100 else []
    n = 0
    while True:
        n += 1
        root = tmp_path / "log"
        shutil.copytree(tmp_path / "start", root)
        if not each_act(expire(root, hour), n, Died(), after=True):
            break
        reader = DirectoryLog(root, read_only=True)
        assert offsets(reader) in ([0, 1, 2, 3, 4, 5], kept), n
        state = reader.describe("t").partitions[0]
        assert state.first_dirty_offset >= state.log_start_offset, n
        engine = DirectoryLog(root)
        append(engine, int(hour))  # whoever comes next may also be a writer
        expire(root, hour)()
        assert offsets(engine) == [*kept, 6], n
        assert engine.apply_retention(now_ms=at(hour)) == [], n
        left = {base for base in range(6) if list((root / "t-0").glob(f"{base:020d}.*[!d]"))}
        assert left == set(kept), n
        shutil.rmtree(root)
    assert n > 6


def test_any_act_of_a_retention_that_fails_once_is_done_by_the_next(tmp_path: Path) -> None:
    filled(tmp_path / "start", retention_ms=str(3 * HOUR))
    n = 0
    while True:
        n += 1
        root = tmp_path / "log"
        shutil.copytree(tmp_path / "start", root)
        engine = DirectoryLog(root)
        if not each_act(
            lambda e=engine: e.apply_retention(now_ms=at(4.5)), n, OSError(5, "failed")
        ):
            break
        append(engine, 6)
        engine.apply_retention(now_ms=at(4.5))
        assert offsets(DirectoryLog(root)) == [2, 3, 4, 5, 6], n
        assert segment_bases(engine) == [2, 3, 4, 5, 6], n
        shutil.rmtree(root)
    assert n > 6
