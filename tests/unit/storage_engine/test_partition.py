"""Rolling by size, time and offset span; indexes by position; the cut."""

from __future__ import annotations

import errno
import itertools
import os
import struct
from pathlib import Path

import pytest

from kafkalog.errors import StorageError
from kafkalog.storage_engine.directory.directory_log import DirectoryLog
from kafkalog.storage_engine.format import layout
from kafkalog.storage_engine.fs import files
from kafkalog.storage_engine.segment import partition_directory
from tests.builders.batch_builder import at_times
from tests.builders.log_builder import LogBuilder
from tests.builders.log_contents import index_entries, segment_bases, time_index_entries

NOW_MS = 1_700_000_000_000
OTHER_ID = "fHq_kc1HQBmiynnrtAlnIQ"


def test_a_segment_never_exceeds_segment_bytes(tmp_path: Path) -> None:
    LogBuilder(tmp_path).topic(segment_bytes=500).fill(20)
    sizes = [path.stat().st_size for path in (tmp_path / "t-0").glob("*.log")]
    assert len(sizes) > 3 and max(sizes) <= 500


def test_a_batch_larger_than_a_segment_gets_one_of_its_own(tmp_path: Path) -> None:
    engine = LogBuilder(tmp_path).topic(segment_bytes=100).fill(3, value="v" * 300).engine
    assert segment_bases(engine) == [0, 1, 2]


def test_record_time_drives_rolling_not_the_clock(tmp_path: Path) -> None:
    engine = (
        LogBuilder(tmp_path)
        .topic(segment_ms=1000)
        .fill(now_ms=NOW_MS)
        .fill(now_ms=NOW_MS + 1000)
        .engine
    )
    assert segment_bases(engine) == [0]
    LogBuilder(engine).fill(now_ms=NOW_MS + 1001)
    assert segment_bases(engine) == [0, 2]


def test_an_older_timestamp_does_not_roll(tmp_path: Path) -> None:
    engine = LogBuilder(tmp_path).topic(segment_ms=1000).fill(now_ms=NOW_MS).fill(now_ms=5).engine
    assert segment_bases(engine) == [0]


def test_max_compaction_lag_bounds_the_age_of_the_active_segment(tmp_path: Path) -> None:
    engine = (
        LogBuilder(tmp_path)
        .topic(segment_ms=100_000, max_compaction_lag_ms=1000)
        .fill(now_ms=NOW_MS)
        .fill(now_ms=NOW_MS + 1001)
        .engine
    )
    assert segment_bases(engine) == [0, 1]


def test_jitter_rolls_earlier_and_the_same_in_every_process(tmp_path: Path) -> None:
    engine = LogBuilder(tmp_path).topic(segment_ms=1_000_000, segment_jitter_ms=1_000_000).engine
    for n in range(40):
        LogBuilder(DirectoryLog(tmp_path)).fill(now_ms=NOW_MS + n * 100_000)
    assert len(segment_bases(engine)) > 4


def test_a_full_index_rolls(tmp_path: Path) -> None:
    engine = (
        LogBuilder(tmp_path).topic(index_interval_bytes=0, segment_index_bytes=36).fill(20).engine
    )
    assert len(segment_bases(engine)) > 3


def test_many_small_commits_get_the_index_of_one_large_one(tmp_path: Path) -> None:
    engine = LogBuilder(tmp_path).topic(index_interval_bytes=300).fill(50).engine
    entries = index_entries(engine)
    steps = [after[1] - before[1] for before, after in itertools.pairwise(entries)]
    size = (tmp_path / "t-0" / layout.segment_file(0, layout.LOG)).stat().st_size
    assert len(entries) >= size // 400
    assert all(300 < step < 300 + 2 * 120 for step in steps)


def test_an_index_entry_is_the_last_offset_and_the_start_of_its_batch(tmp_path: Path) -> None:
    engine = LogBuilder(tmp_path).topic(index_interval_bytes=100).fill(30).engine
    log = (tmp_path / "t-0" / layout.segment_file(0, layout.LOG)).read_bytes()
    assert index_entries(engine)
    for offset, position in index_entries(engine):
        assert struct.unpack_from(">q", log, position)[0] == offset


def test_the_time_index_holds_the_largest_timestamp_so_far(tmp_path: Path) -> None:
    engine = LogBuilder(tmp_path).topic(index_interval_bytes=100, segment_bytes=2000).engine
    for n in range(60):
        LogBuilder(engine).fill(now_ms=NOW_MS + (n % 7) * 10)
    for base_offset in segment_bases(engine)[:-1]:
        times = [timestamp for timestamp, _ in time_index_entries(engine, base_offset)]
        assert times == sorted(set(times))
        assert times[-1] == NOW_MS + 60


def test_a_roll_writes_the_last_time_index_entry(tmp_path: Path) -> None:
    engine = (
        LogBuilder(tmp_path)
        .topic(segment_bytes=400)
        .fill(1, now_ms=NOW_MS)
        .fill(1, now_ms=NOW_MS + 5)
        .fill(5, now_ms=NOW_MS)
        .engine
    )
    assert time_index_entries(engine) == [(NOW_MS + 5, 1)]


@pytest.mark.parametrize("garbage", [bytes(24), b"\xff" * 24, b"torn"])
def test_the_cut_drops_index_entries_that_are_none(tmp_path: Path, garbage: bytes) -> None:
    engine = LogBuilder(tmp_path).topic(index_interval_bytes=100).fill(10).engine
    before = index_entries(engine)
    for suffix in (layout.INDEX, layout.TIME_INDEX):
        path = tmp_path / "t-0" / layout.segment_file(0, suffix)
        path.write_bytes(path.read_bytes() + garbage)
    LogBuilder(engine).fill()
    assert index_entries(engine)[: len(before)] == before
    assert all(position > 0 for _, position in index_entries(engine))


def test_the_cut_removes_bytes_that_were_never_committed(tmp_path: Path) -> None:
    engine = LogBuilder(tmp_path).topic().fill().engine
    path = tmp_path / "t-0" / layout.segment_file(0, layout.LOG)
    path.write_bytes(path.read_bytes() + b"uncommitted")
    assert sum(b.num_rows for b in engine.read("t", 0)) == 1
    LogBuilder(engine).fill()
    assert sum(b.num_rows for b in engine.read("t", 0)) == 2


def test_the_segment_that_a_failed_sync_closes_is_cut_and_synced_before_the_next_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = LogBuilder(tmp_path).topic().fill().engine
    path = tmp_path / "t-0" / layout.segment_file(0, layout.LOG)
    written = b""

    def fail(fd: int) -> None:
        nonlocal written
        written = path.read_bytes()
        raise OSError(errno.EIO, "lost")

    with monkeypatch.context() as patch, pytest.raises(StorageError, match="lost"):
        patch.setattr(files, "sync_file", fail)
        LogBuilder(engine).fill()
    path.write_bytes(written)  # the cut was not synced: a power cut has undone it
    synced: list[str] = []
    sync = files.sync_file

    def note(fd: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{fd}"))
        sync(fd)

    monkeypatch.setattr(files, "sync_file", note)
    LogBuilder(engine).fill(now_ms=NOW_MS + 1)
    assert str(path) in synced
    assert segment_bases(engine) == [0, 1]
    assert time_index_entries(engine) == [(NOW_MS, 0)]
    assert sum(b.num_rows for b in engine.read("t", 0)) == 2


def test_a_partition_may_be_finished_before_its_commit_is_published(tmp_path: Path) -> None:
    engine = LogBuilder(tmp_path).topic().engine
    with engine.transaction() as transaction:
        appender = transaction.appender("t", 0, NOW_MS)
        appender.append([(1, [at_times(0, (NOW_MS,)).data])])
        appender.finish()
        transaction.publish(NOW_MS, rows=1)
    assert time_index_entries(engine) == [(NOW_MS, 0)]
    assert sum(b.num_rows for b in engine.read("t", 0)) == 1


def test_opening_never_cuts(tmp_path: Path) -> None:
    LogBuilder(tmp_path).topic().fill()
    path = tmp_path / "t-0" / layout.segment_file(0, layout.LOG)
    path.write_bytes(path.read_bytes() + b"uncommitted")
    size = path.stat().st_size
    DirectoryLog(tmp_path).close()
    assert path.stat().st_size == size


@pytest.mark.parametrize(
    ("metadata", "found"),
    [
        (f"version: 0\ntopic_id: {OTHER_ID}", OTHER_ID),
        (None, "no id"),
        ("", "no id"),
        ("version: 0\ntopic_id: no id of 22", "no id"),
    ],
)
def test_nothing_is_written_to_a_directory_of_another_topic(
    tmp_path: Path, metadata: str | None, found: str
) -> None:
    engine = LogBuilder(tmp_path).topic().fill().engine
    ours = engine.describe("t").topic_id
    path = tmp_path / "t-0" / layout.PARTITION_METADATA
    own = path.read_bytes()
    path.unlink()
    if metadata is not None:
        path.write_text(metadata)
    # What only a cut would take away.
    log = tmp_path / "t-0" / layout.segment_file(0, layout.LOG)
    log.write_bytes(log.read_bytes() + b"of the other topic")
    before = {file: file.read_bytes() for file in (tmp_path / "t-0").iterdir()}
    with pytest.raises(StorageError, match=f"expected the topic id {ours}, found {found}: .*put"):
        LogBuilder(engine).fill()
    assert {file: file.read_bytes() for file in (tmp_path / "t-0").iterdir()} == before
    path.write_bytes(own)
    LogBuilder(engine).fill()
    assert sum(b.num_rows for b in engine.read("t", 0)) == 2


def test_a_directory_that_was_announced_the_topics_new_id_gets_it(tmp_path: Path) -> None:
    """A release gives ids: it may die when the journal has the new one, and the files do not."""
    engine = LogBuilder(tmp_path).topic().fill().engine
    directory = tmp_path / "t-0"
    path = directory / layout.PARTITION_METADATA
    partition_directory.announce_topic_id(directory, OTHER_ID)
    LogBuilder(engine).fill()
    own = path.read_bytes()
    assert OTHER_ID.encode() not in own
    path.write_text("version: 0\ntopic_id: " + "A" * 21 + "Q")
    with pytest.raises(StorageError, match="expected the topic id"):
        LogBuilder(engine).fill()
    path.write_bytes(own)
    with engine.transaction() as transaction:
        transaction._change.topic("t", OTHER_ID, 1, {})
        transaction.publish(NOW_MS)
    LogBuilder(engine).fill()
    assert path.read_bytes() == own.replace(own[-22:], OTHER_ID.encode())


def test_a_forced_roll_begins_a_segment_at_the_log_end(tmp_path: Path) -> None:
    engine = LogBuilder(tmp_path).topic().fill(3).engine
    for _ in range(2):
        LogBuilder(engine).roll()
    assert segment_bases(engine) == [0, 3]
    LogBuilder(engine).fill(1)
    assert sum(b.num_rows for b in engine.read("t", 0)) == 4
