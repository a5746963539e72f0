"""Segments that a round leaves alone are those that it would have written again as they were."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from kafkalog.cleaner import CleanerConfig
from kafkalog.cleaner.dedup.offset_map import Uint64s
from kafkalog.cleaner.key_index.key_index import KeyIndex
from kafkalog.cleaner.schedule.manager import clean
from kafkalog.cleaner.schedule.partition_cleaner import PartitionCleaner
from kafkalog.cleaner.shelf import CleaningAborted
from kafkalog.cleaner.shelves import shelf_of
from kafkalog.cleaner.state.stats import CleanerStats
from kafkalog.inspection.verify import verify
from kafkalog.storage_engine.directory.directory_log import DirectoryLog
from kafkalog.storage_engine.format import layout
from tests.builders.log_builder import LogBuilder

NEVER = 1 << 60
CONFIG = {"segment_bytes": 6_000, "delete_retention_ms": 500, "file_delete_delay_ms": 0}


def cleaned(engine: DirectoryLog, now_ms: int, **config: object) -> CleanerStats:
    (stats,) = clean(
        engine,
        "t",
        force=True,
        now_ms=now_ms,
        config=CleanerConfig(**config),  # type: ignore[arg-type]
    )
    assert stats.error is None
    return stats


def filled(root: Path, count: int = 2_000) -> DirectoryLog:
    """A clean log of many segments with a key for each record."""
    log = LogBuilder(root, now_ms=1_000).topic(**CONFIG)
    for start in range(0, count, 100):
        log.append(*((f"key-{n:05}", f"value-{n}") for n in range(start, start + 100)))
    return log.clean().engine


def logs(engine: DirectoryLog) -> dict[str, bytes]:
    directory = engine.partition_directory("t", 0)
    suffixes = layout.SEGMENT_SUFFIXES
    return {p.name: p.read_bytes() for p in directory.iterdir() if p.suffix in suffixes}


def inodes(engine: DirectoryLog) -> dict[str, int]:
    directory = engine.partition_directory("t", 0)
    return {path.name: path.stat().st_ino for path in directory.glob("*.log")}


def indexes(engine: DirectoryLog) -> list[Path]:
    return sorted(engine.partition_directory("t", 0).glob("kl-*.keys"))


def test_the_indexes_of_a_partition_are_made_under_one_secret(tmp_path: Path) -> None:
    with filled(tmp_path) as engine:
        engine.append("t", [("key-00003", "new")], now_ms=2_000)
        cleaned(engine, 2_000)
        assert len(indexes(engine)) > 8
        assert len({_header(path)[5] for path in indexes(engine)}) == 1


def test_a_cleaning_is_broken_off_while_it_asks_the_indexes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with filled(tmp_path) as engine:
        engine.append("t", [("key-00003", "new")], now_ms=2_000)
        asked: list[bool] = []
        positions_of = KeyIndex.positions_of

        def asking(self: KeyIndex, hashes: Uint64s) -> object:
            asked.append(True)
            return positions_of(self, hashes)

        def check_abort() -> None:
            if asked:
                raise CleaningAborted("enough")

        monkeypatch.setattr(KeyIndex, "positions_of", asking)
        cleaner = PartitionCleaner(shelf=shelf_of(engine), now_ms=2_000, check_abort=check_abort)
        assert cleaner.clean("t", 0, force=True) is None
        assert len(asked) == 1


def test_a_damaged_index_is_not_believed(tmp_path: Path) -> None:
    with filled(tmp_path) as engine:
        for path in indexes(engine):
            data = bytearray(path.read_bytes())
            data[layout.KEYS_BLOCK + 20] ^= 1
            path.write_bytes(data)
        engine.append("t", [(f"key-{n:05}", "new") for n in range(0, 2_000, 400)], now_ms=2_000)
        assert cleaned(engine, 2_000).records_removed == 5
        assert sum(batch.num_rows for batch in engine.read("t", 0)) == 2_000


@pytest.mark.parametrize("times", [b"", bytes(12), bytes(7) + b"\x01" + bytes(4), None])
def test_a_segment_that_is_left_alone_gets_a_whole_time_index_again(
    tmp_path: Path, times: bytes | None
) -> None:
    with filled(tmp_path) as engine:
        before = inodes(engine)
        path = sorted(engine.partition_directory("t", 0).glob("*.timeindex"))[2]
        sound = path.read_bytes()
        path.unlink() if times is None else path.write_bytes(times)
        engine.append("t", [("key-01900", "new")], now_ms=2_000)
        assert [found.path for found in verify(tmp_path)] == [path]
        cleaned(engine, 2_000)
        assert (path.read_bytes(), list(verify(tmp_path))) == (sound, [])
        assert len(before.items() - inodes(engine).items()) <= 3  # that one, and where the key is


def test_keys_with_the_same_hash_stay_different_keys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with filled(tmp_path) as engine:
        before = inodes(engine)
        everywhere = KeyIndex.positions_of

        def all_of_them(self: KeyIndex, hashes: object) -> object:
            first = self._blocks(0, 256)
            assert first is not None
            return everywhere(self, np.unique(first & ~np.uint64((1 << 31) - 1)))

        monkeypatch.setattr(KeyIndex, "positions_of", all_of_them)
        engine.append("t", [("of nobody", "new")], now_ms=2_000)
        cleaned(engine, 2_000)
        same = [name for name, inode in inodes(engine).items() if before.get(name) == inode]
        assert len(same) >= len(before) - 2


def _header(path: Path) -> tuple[object, ...]:
    fields: tuple[object, ...] = layout.KEYS_HEADER.unpack_from(path.read_bytes())
    return fields
