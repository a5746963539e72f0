"""`preallocate=true`: room on the disk for the active segment, which nobody ever reads."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from kafkalog.errors import StorageError
from kafkalog.storage_engine.directory.directory_log import DirectoryLog
from kafkalog.storage_engine.format import layout
from kafkalog.storage_engine.fs import files
from tests.builders.log_builder import LogBuilder
from tests.builders.log_contents import offsets, segment_sizes
from tests.unit.storage_engine.faults import Died, each_act

SIZE = 600


def test_the_active_segment_has_its_full_size_and_closed_ones_are_trimmed(tmp_path: Path) -> None:
    engine = LogBuilder(tmp_path).topic(segment_bytes=SIZE, preallocate=True).engine
    LogBuilder(engine, now_ms=1).fill(20)
    found = segment_sizes(engine)
    assert len(found) > 3 and found[-1] == SIZE
    assert all(0 < size < SIZE for size in found[:-1])
    assert len(offsets(engine)) == 20


def test_the_room_is_real(tmp_path: Path) -> None:
    engine = LogBuilder(tmp_path).topic(preallocate=True, segment_bytes=1_000_000).engine
    LogBuilder(engine, now_ms=1).fill()
    path = tmp_path / "t-0" / layout.segment_file(0, layout.LOG)
    assert path.stat().st_blocks * 512 >= 1_000_000


def test_a_commit_that_dies_leaves_the_log_as_it_was(tmp_path: Path) -> None:
    engine = LogBuilder(tmp_path / "0").topic(segment_bytes=SIZE, preallocate=True).engine
    LogBuilder(engine, now_ms=1).fill(4)
    n, is_cut_short = 0, True
    while is_cut_short:
        n += 1
        root = tmp_path / str(n)
        shutil.copytree(tmp_path / "0", root)
        dying = DirectoryLog(root)
        is_cut_short = each_act(lambda e=dying: LogBuilder(e, now_ms=1).fill(3), n, Died())
        engine = DirectoryLog(root)
        count = len(offsets(engine))
        assert 4 <= count <= 7
        LogBuilder(engine, now_ms=1).fill(9)
        assert len(offsets(engine)) == count + 9
        assert segment_sizes(engine)[-1] == SIZE
    assert n > 10


def test_room_that_was_written_into_is_made_anew(tmp_path: Path) -> None:
    engine = LogBuilder(tmp_path).topic(segment_bytes=SIZE, preallocate=True).engine
    LogBuilder(engine, now_ms=1).fill()
    path = tmp_path / "t-0" / layout.segment_file(0, layout.LOG)
    size = engine.describe("t").partitions[0].active_size
    with path.open("r+b") as file:
        file.seek(size)
        file.write(b"\x01" * (SIZE - size))
    LogBuilder(engine, now_ms=1).fill()
    data = path.read_bytes()
    assert len(data) == SIZE
    assert not any(data[engine.describe("t").partitions[0].active_size :])


def test_room_that_is_left_alone_is_not_made_again(tmp_path: Path) -> None:
    engine = LogBuilder(tmp_path).topic(segment_bytes=SIZE, preallocate=True).engine
    LogBuilder(engine, now_ms=1).fill()
    with pytest.MonkeyPatch.context() as patch:
        calls: list[int] = []
        patch.setattr(files, "preallocate", lambda fd, size: calls.append(size))
        patch.setattr(files, "truncate", lambda fd, size: calls.append(size))
        LogBuilder(engine, now_ms=1).fill(2)
    assert calls == []


def test_without_it_the_room_goes_with_the_next_append(tmp_path: Path) -> None:
    engine = LogBuilder(tmp_path).topic(segment_bytes=SIZE, preallocate=True).engine
    LogBuilder(engine, now_ms=1).fill()
    engine.alter_topic("t", {"preallocate": "false"})
    LogBuilder(engine, now_ms=1).fill()
    assert segment_sizes(engine) == [engine.describe("t").partitions[0].active_size]
    engine.alter_topic("t", {"preallocate": "true"})
    LogBuilder(engine, now_ms=1).fill()
    assert segment_sizes(engine) == [SIZE]
    assert len(offsets(engine)) == 3


def test_cleaning_and_retention_do_not_count_the_room(tmp_path: Path) -> None:
    from kafkalog.cleaner.schedule.manager import clean

    engine = (
        LogBuilder(tmp_path)
        .topic(segment_bytes=SIZE, preallocate=True, policy="compact,delete", retention_bytes=500)
        .engine
    )
    LogBuilder(engine, now_ms=1).fill(3)
    assert engine.apply_retention(now_ms=2) == []
    assert [stats.error for stats in clean(engine, force=True, now_ms=2)] == [None]
    assert len(offsets(engine)) == 1
    assert os.listdir(tmp_path / "t-0")


def test_a_full_disk_is_an_error_and_nothing_is_lost(tmp_path: Path) -> None:
    engine = LogBuilder(tmp_path).topic(segment_bytes=SIZE, preallocate=True).engine
    LogBuilder(engine, now_ms=1).fill()
    engine.alter_topic("t", {"segment.bytes": str(2**31 - 1)})

    def full(fd: int, size: int) -> None:
        raise OSError(28, "No space left on device")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "preallocate", full)
        with pytest.raises(StorageError, match="No space left"):
            LogBuilder(engine, now_ms=1).fill()
    assert len(offsets(engine)) == 1
