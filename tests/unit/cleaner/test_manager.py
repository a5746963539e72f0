from __future__ import annotations

import errno
import fcntl
import os
import re
import struct
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

import pytest

import kafkalog
from kafkalog.cleaner import CleanerConfig, CleanerThread
from kafkalog.cleaner.directory import swap
from kafkalog.cleaner.report.status import status
from kafkalog.cleaner.schedule.manager import clean, retain, sweep
from kafkalog.cleaner.shelves import moment_of
from kafkalog.errors import InvalidInputError, LockedByBrokerError
from kafkalog.storage_engine.directory.directory_log import DirectoryLog
from kafkalog.storage_engine.format import layout
from kafkalog.storage_engine.fs import file_system, files, locks
from kafkalog.storage_engine.fs.file_system import Data, FileSystem
from kafkalog.storage_engine.ownership.adopt import adopt
from kafkalog.storage_engine.ownership.release import release
from tests.builders.log_builder import LogBuilder
from tests.other_platform import needs_linux
from tests.unit.cleaner.naive import batch, dump, offsets, records_of
from tests.unit.rules.acts import eventually
from tests.unit.storage_engine.faults import LyingPages

MINUTE = 60_000


def filled(root: Path, *topics: str, partitions: int = 1, **config: str) -> DirectoryLog:
    """Topics of several closed segments in which one key is written again and again."""
    log = LogBuilder(root, now_ms=1000)
    for topic in topics:
        log.topic(topic, partitions, segment_bytes=100, **config).rounds(5, "ab")
    return log.engine


def corrupt(engine: DirectoryLog, topic: str) -> Callable[[], None]:
    """Flip a byte of a record's value; returns what flips it back."""
    path = sorted(engine.partition_directory(topic, 0).glob("*.log"))[1]

    def flip() -> None:
        data = bytearray(path.read_bytes())
        data[-2] ^= 1
        path.write_bytes(data)

    flip()
    return flip


# --- faults --------------------------------------------------------------------------------------


@pytest.mark.parametrize("act", ["write_at", "create", "sync_path"])
def test_an_error_while_writing_leaves_the_log_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, act: str
) -> None:
    engine = filled(tmp_path, "t")
    engine.alter_topic("t", {"segment.bytes": "10000"})  # one group: groups are swapped singly
    before = dump(engine)
    original = getattr(files, act)

    def failing(target: object, *arguments: object) -> None:
        # The descriptor of a `.cleaned` file, or its path.
        name = (
            str(target)
            if isinstance(target, Path)
            else str(Path(f"/proc/self/fd/{target}").readlink())
        )
        if name.endswith(".cleaned"):
            raise OSError(28, "No space left on device")
        original(target, *arguments)

    monkeypatch.setattr(files, act, failing)
    (stats,) = clean(engine, now_ms=1_000)
    assert stats.error is not None and "No space left" in stats.error
    assert not list((tmp_path / "t-0").glob("*.cleaned"))
    assert dump(engine) == before
    assert engine.describe("t").partitions[0].cleaned_to == 0
    assert [s.state for s in status(moment_of(engine, 1))] == ["uncleanable"]
    monkeypatch.undo()
    assert clean(engine, now_ms=1_000 + MINUTE)[0].error is None


def test_files_of_a_dead_cleaner_are_removed_first(tmp_path: Path) -> None:
    engine = filled(tmp_path, "t")
    left = tmp_path / "t-0" / layout.segment_file(4, layout.LOG, layout.CLEANED)
    left.write_bytes(batch(4, [("a", "half")]).data[:70])
    assert clean(engine, now_ms=1)[0].error is None
    assert not left.exists()


def test_staged_files_that_nobody_can_name_any_more_are_removed(tmp_path: Path) -> None:
    engine = filled(tmp_path, "t")

    def stage(days_ago: int) -> Path:
        path = tmp_path / f"{layout.OURS}left-{days_ago}{layout.STAGED}"
        path.write_bytes(b"x")
        time_ns = (100 - days_ago) * 86_400 * 10**9
        os.utime(path, ns=(time_ns, time_ns))
        return path

    now_ms = 100 * 86_400_000
    old, young = stage(8), stage(6)
    sweep(engine, now_ms=now_ms)
    assert (old.exists(), young.exists()) == (False, True)
    old = stage(8)
    thread = CleanerThread(engine, CleanerConfig(backoff_ms=10), clock=lambda: now_ms)
    thread.start()
    eventually(lambda: not old.exists())
    thread.stop()
    assert young.exists()


@needs_linux
def test_a_broker_that_comes_between_two_swaps_ends_the_cleaning(tmp_path: Path) -> None:
    engine = filled(tmp_path, "t")
    directory = tmp_path / "t-0"
    lock = tmp_path / layout.ROOT_LOCK
    brokers: list[BinaryIO] = []
    before: list[Path] = []

    def come() -> None:
        if not brokers and list(directory.glob("*.deleted")):
            lock.unlink()  # as a broker that shuts down does; then another one starts
            brokers.append(lock.open("wb"))
            whole_file = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
            fcntl.fcntl(brokers[0], fcntl.F_OFD_SETLK, whole_file)
            before.extend(sorted(directory.glob("*.log")))

    with pytest.raises(LockedByBrokerError):
        clean(engine, now_ms=1, check_abort=come)
    assert sorted(directory.glob("*.log")) == before != []
    brokers[0].close()
    assert clean(engine, now_ms=1)[0].error is None
    assert offsets(dump(engine)) == [6, 7, 8, 9]


def test_where_a_broker_holds_the_directory_no_cleaner_begins(tmp_path: Path) -> None:
    filled(tmp_path, "t").close()
    with kafkalog.open(tmp_path) as log, locks.RootLock(tmp_path).exclusive():
        with pytest.raises(LockedByBrokerError):
            log.clean()
        with pytest.raises(LockedByBrokerError):
            kafkalog.open(tmp_path, cleaner=True)


# --- settings ------------------------------------------------------------------------------------


def test_the_settings_are_checked(tmp_path: Path) -> None:
    for wrong in ({"dedupe_buffer_size": 1}, {"io_buffer_load_factor": 0.0}, {"backoff_ms": -1}):
        with pytest.raises(InvalidInputError):
            CleanerConfig(**wrong)


def test_deletions_of_a_log_that_somebody_else_has_cleaned_go(tmp_path: Path) -> None:
    config = {"delete.retention.ms": "1000", "min.cleanable.dirty.ratio": "0"}
    engine = DirectoryLog(tmp_path)
    engine.create_topic("t", 1, config)
    engine.append("t", [("a", "1"), ("b", "1"), ("a", None)], now_ms=1)
    clean(engine, force=True, now_ms=1)
    assert clean(engine, now_ms=500) == []
    engine.close()
    release(tmp_path, now_ms=500)
    adopt(tmp_path, config={"t": {"cleanup.policy": "compact", **config}}, now_ms=500)
    engine = DirectoryLog(tmp_path)
    assert status(moment_of(engine, 500))[0].state == "dirty"
    assert [stats.error for stats in clean(engine, now_ms=500)] == [None]
    assert clean(engine, now_ms=600) == []
    assert [stats.error for stats in clean(engine, now_ms=5000)] == [None]
    assert [record.key for record in records_of(dump(engine))] == [b"b"]


def test_a_full_disk_is_emptied_by_retention_though_cleaning_fails(tmp_path: Path) -> None:
    engine = DirectoryLog(tmp_path)
    config = {"cleanup.policy": "compact,delete", "retention.ms": "1000", "segment.bytes": "200"}
    engine.create_topic("t", 1, config)
    for i in range(10):
        engine.append("t", [("k", f"{i}")], now_ms=1)

    class Full(FileSystem):
        def pwrite(self, fd: int, data: Data, position: int) -> int:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with file_system.replaced(Full()):
        (stats,) = clean(engine, force=False, now_ms=2)
    # The key index was given up, and the journal is the next file that is written.
    assert re.match(rf"{tmp_path}/[^ ]+: .*No space left on device", str(stats.error))
    assert not list(engine.partition_directory("t", 0).glob("*.cleaned"))
    assert sum(found.segments for found in retain(engine, now_ms=10_000)) > 0


def test_outputs_that_could_not_be_swapped_in_make_room_at_once(tmp_path: Path) -> None:
    engine = DirectoryLog(tmp_path)
    engine.create_topic("t", 1, {"segment.bytes": "200", "min.cleanable.dirty.ratio": "0"})
    for i in range(10):
        engine.append("t", [("k", f"{i}")], now_ms=1)
    before = dump(engine)
    with pytest.MonkeyPatch.context() as patch:
        full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        patch.setattr(swap, "list_sections", lambda *_, **__: (_ for _ in ()).throw(full))
        (stats,) = clean(engine, now_ms=2)
    assert stats.error is not None
    assert not list(engine.partition_directory("t", 0).glob("*.cleaned"))
    assert dump(engine) == before
    assert [stats.error for stats in clean(engine, force=True, now_ms=3)] == [None]


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
@pytest.mark.parametrize("suffix", [layout.LOG, layout.INDEX])
def test_after_a_failed_sync_a_cleaning_writes_its_segments_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, suffix: str
) -> None:
    """Were it the sync alone that is done again, it would succeed, with nothing on the disk."""
    refused = suffix + layout.CLEANED
    disk = LyingPages(monkeypatch, code, lambda name: name.endswith(refused))
    engine = filled(tmp_path, "t")
    engine.alter_topic("t", {"index.interval.bytes": "0"})
    (stats,) = clean(engine, now_ms=1_000)
    assert len(disk.failures) == 1
    assert stats.error is not None and os.strerror(code) in stats.error
    assert disk.failures[0] in stats.error
    (stats,) = clean(engine, force=True, now_ms=2_000)
    assert stats.error is None and stats.records_removed
    for path in (tmp_path / "t-0").glob(f"*{suffix}"):
        assert disk.kept(path) == path.read_bytes()
