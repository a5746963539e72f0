from __future__ import annotations

import os
import struct
from pathlib import Path

import pytest

from kafkalog.cleaner import CleanerConfig
from kafkalog.cleaner.schedule.manager import clean
from kafkalog.cleaner.state.stats import CleanerStats
from kafkalog.storage_engine.directory.directory_log import DirectoryLog
from kafkalog.storage_engine.fs import files
from tests.unit.cleaner.naive import (
    Batch,
    batch,
    foreign_log,
    records_of,
    singles,
)
from tests.unit.cleaner.transactional_log import Log


def kafkas(slots: int = 5_000) -> CleanerConfig:
    """What makes batches and rounds Kafka's own."""
    return CleanerConfig(dedupe_buffer_size=24 * slots, merge_batches=False, spill=False)


def cleaned(engine: DirectoryLog, now_ms: int = 10_000, slots: int = 5_000) -> CleanerStats:
    config = kafkas(slots)
    (stats,) = clean(engine, "t", force=True, now_ms=now_ms, config=config)
    assert stats.error is None
    return stats


def keys(batches: list[Batch]) -> list[bytes | None]:
    return [record.key for record in records_of(batches)]


# --- batches of any size -------------------------------------------------------------------------


def test_a_cleaned_segment_takes_no_more_room_than_it_needs(tmp_path: Path) -> None:
    engine = DirectoryLog(tmp_path)
    engine.create_topic("t", 1, {"preallocate": "true", "segment.bytes": "100000"})
    for i in range(9):
        engine.append("t", [(f"k{i % 2}", f"v{i}")], now_ms=1)
    cleaned(engine)
    first, active = listed(tmp_path / "t-0")
    assert first.log.stat().st_size == first.size < 200
    assert first.log.stat().st_blocks * 512 < 100_000
    assert active.base_offset == 9


# --- batches of which no record stays ------------------------------------------------------------


def listed(directory: Path):
    from kafkalog.storage_engine.segment.segments import list_segments

    return list_segments(directory)


# --- output files --------------------------------------------------------------------------------


def test_a_cleaned_segment_has_the_time_of_its_last_source(tmp_path: Path) -> None:
    segments = {0: [batch(0, [("a", "1")])], 1: [batch(1, [("a", "2")])], 2: []}
    engine = foreign_log(tmp_path, segments)
    for base in (0, 1):
        os.utime(tmp_path / "t-0" / f"{base:020d}.log", ns=(10**18 + base, 10**18 + base))
    cleaned(engine)
    assert (tmp_path / "t-0" / f"{0:020d}.log").stat().st_mtime_ns == 10**18 + 1
    assert (tmp_path / "t-0" / f"{0:020d}.index").stat().st_mtime_ns == 10**18 + 1
    assert (tmp_path / "t-0" / f"{0:020d}.timeindex").stat().st_mtime_ns == 10**18 + 1


def test_a_cleaned_segment_is_synced_before_it_is_put_in_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = Log.create(tmp_path)
    log.transact(1, 1, 2)
    log.transact(2, 1, 2, time=5)
    log.abort(1)
    log.commit(2)
    log.roll()
    source = log.directory / f"{0:020d}.log"
    os.utime(source, ns=(10**18, 10**18))
    done: list[tuple[str, str]] = []
    sync_file, sync_path, rename = files.sync_file, files.sync_path, files.rename

    def synced(fd: int) -> None:
        done.append(("sync", Path(os.readlink(f"/proc/self/fd/{fd}")).name))
        sync_file(fd)

    def synced_path(path: Path) -> None:
        done.append(("sync", path.name))
        sync_path(path)

    def renamed(old: Path, new: Path) -> None:
        done.append(("rename", old.name))
        rename(old, new)

    monkeypatch.setattr(files, "sync_file", synced)
    monkeypatch.setattr(files, "sync_path", synced_path)
    monkeypatch.setattr(files, "rename", renamed)
    log.clean()
    for suffix in ("log", "index", "timeindex", "txnindex"):
        name = f"{0:020d}.{suffix}.cleaned"
        assert done.index(("sync", name)) < done.index(("rename", name))
    for suffix in ("log", "index", "timeindex"):
        assert source.with_suffix(f".{suffix}").stat().st_mtime_ns == 10**18
    assert source.with_suffix(".txnindex").stat().st_mtime_ns > 10**18  # as in Kafka its own
    entries = source.with_suffix(".timeindex").read_bytes()
    assert struct.unpack(">qi", entries[-12:])[0] == 5  # the largest time of what is in it


def test_kafkas_checkpoint_says_how_far_the_log_is_clean(tmp_path: Path) -> None:
    engine = foreign_log(tmp_path, {0: [batch(0, [("a", "1"), ("a", "2")])], 2: []})
    cleaned(engine)
    assert (tmp_path / "cleaner-offset-checkpoint").read_text() == "0\n1\nt 0 2\n"


def test_a_clean_segment_keeps_its_file(tmp_path: Path) -> None:
    engine = foreign_log(tmp_path, {0: singles(0, "a", "b", "c"), 3: []})
    log = tmp_path / "t-0" / f"{0:020d}.log"
    inode = log.stat().st_ino
    cleaned(engine)
    assert log.stat().st_ino == inode
    assert not list((tmp_path / "t-0").glob("*.cleaned"))
