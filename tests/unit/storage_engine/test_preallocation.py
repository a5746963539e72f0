"""`preallocate=true`: room on the disk for the active segment, which nobody ever reads."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from kafkalog.errors import StorageError
from kafkalog.storage_engine.engine import Engine
from kafkalog.storage_engine.format import layout
from kafkalog.storage_engine.fs import files
from tests.unit.storage_engine.faults import Died, each_act

SIZE = 600


def log(root: Path, **config: str) -> Engine:
    engine = Engine(root)
    overrides = {name.replace("_", "."): text for name, text in config.items()}
    engine.create_topic("t", 1, {"segment.bytes": str(SIZE), "preallocate": "TRUE", **overrides})
    return engine


def append(engine: Engine, count: int = 1) -> None:
    for _ in range(count):
        engine.append("t", [("k", "v" * 20)], now_ms=1)


def sizes(engine: Engine) -> list[int]:
    return [path.stat().st_size for path in sorted((engine.root / "t-0").glob("*.log"))]


def rows(engine: Engine) -> int:
    return sum(batch.num_rows for batch in engine.read("t", 0))


def test_the_active_segment_has_its_full_size_and_closed_ones_are_trimmed(tmp_path: Path) -> None:
    engine = log(tmp_path)
    append(engine, 20)
    found = sizes(engine)
    assert len(found) > 3 and found[-1] == SIZE
    assert all(0 < size < SIZE for size in found[:-1])
    assert rows(engine) == 20


def test_the_room_is_real(tmp_path: Path) -> None:
    engine = log(tmp_path, segment_bytes="1000000")
    append(engine)
    path = tmp_path / "t-0" / layout.segment_file(0, layout.LOG)
    assert path.stat().st_blocks * 512 >= 1_000_000


def test_a_commit_that_dies_leaves_the_log_as_it_was(tmp_path: Path) -> None:
    engine = log(tmp_path / "0")
    append(engine, 4)
    n, is_cut_short = 0, True
    while is_cut_short:
        n += 1
        root = tmp_path / str(n)
        shutil.copytree(tmp_path / "0", root)
        dying = Engine(root)
        is_cut_short = each_act(lambda e=dying: append(e, 3), n, Died())
        engine = Engine(root)
        count = rows(engine)
        assert 4 <= count <= 7
        append(engine, 9)
        assert rows(engine) == count + 9
        assert sizes(engine)[-1] == SIZE
    assert n > 10


def test_room_that_was_written_into_is_made_anew(tmp_path: Path) -> None:
    engine = log(tmp_path)
    append(engine)
    path = tmp_path / "t-0" / layout.segment_file(0, layout.LOG)
    size = engine.describe("t").partitions[0].active_size
    with path.open("r+b") as file:
        file.seek(size)
        file.write(b"\x01" * (SIZE - size))
    append(engine)
    data = path.read_bytes()
    assert len(data) == SIZE
    assert not any(data[engine.describe("t").partitions[0].active_size :])


def test_room_that_is_left_alone_is_not_made_again(tmp_path: Path) -> None:
    engine = log(tmp_path)
    append(engine)
    with pytest.MonkeyPatch.context() as patch:
        calls: list[int] = []
        patch.setattr(files, "preallocate", lambda fd, size: calls.append(size))
        patch.setattr(files, "truncate", lambda fd, size: calls.append(size))
        append(engine, 2)
    assert calls == []


def test_without_it_the_room_goes_with_the_next_append(tmp_path: Path) -> None:
    engine = log(tmp_path)
    append(engine)
    engine.alter_topic("t", {"preallocate": "false"})
    append(engine)
    assert sizes(engine) == [engine.describe("t").partitions[0].active_size]
    engine.alter_topic("t", {"preallocate": "true"})
    append(engine)
    assert sizes(engine) == [SIZE]
    assert rows(engine) == 3


def test_cleaning_and_retention_do_not_count_the_room(tmp_path: Path) -> None:
    from kafkalog.cleaner.schedule.manager import clean

    engine = log(tmp_path, cleanup_policy="compact,delete", retention_bytes="500")
    append(engine, 3)
    assert engine.apply_retention(now_ms=2) == []
    assert [stats.error for stats in clean(engine, force=True, now_ms=2)] == [None]
    assert rows(engine) == 1
    assert os.listdir(tmp_path / "t-0")


def test_a_full_disk_is_an_error_and_nothing_is_lost(tmp_path: Path) -> None:
    engine = log(tmp_path)
    append(engine)
    engine.alter_topic("t", {"segment.bytes": str(2**31 - 1)})

    def full(fd: int, size: int) -> None:
        raise OSError(28, "No space left on device")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "preallocate", full)
        with pytest.raises(StorageError, match="No space left"):
            append(engine)
    assert rows(engine) == 1
