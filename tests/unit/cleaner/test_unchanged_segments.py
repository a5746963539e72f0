"""Segments that a round leaves alone are those that it would have written again as they were."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest

from kafkalog.cleaner import CleanerConfig
from kafkalog.cleaner.dedup.offset_map import Uint64s
from kafkalog.cleaner.key_index.key_index import KeyIndex
from kafkalog.cleaner.rewrite import unchanged_segments
from kafkalog.cleaner.schedule.manager import clean
from kafkalog.cleaner.schedule.partition_cleaner import PartitionCleaner
from kafkalog.cleaner.shelf import CleaningAborted
from kafkalog.cleaner.shelves import shelf_of
from kafkalog.cleaner.state.stats import CleanerStats
from kafkalog.inspection.verify import verify
from kafkalog.storage_engine.directory.directory_log import DirectoryLog
from kafkalog.storage_engine.format import layout
from tests.builders.log_builder import LogBuilder
from tests.builders.log_contents import pairs
from tests.unit.cleaner.naive import dump

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


@pytest.mark.parametrize("seed", range(6))
def test_a_log_is_the_same_whether_segments_are_left_alone_or_written_again(
    tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[tuple[dict[str, bytes], int]] = []
    for name, worthwhile in (("left", unchanged_segments.WORTHWHILE), ("again", NEVER)):
        monkeypatch.setattr(unchanged_segments, "WORTHWHILE", worthwhile)
        rng = random.Random(seed)
        read = 0
        with filled(tmp_path / name) as engine:
            for now in (2_000, 2_200, 2_600, 4_000, 5_000):
                hot = rng.choice([10, 10, 2_000])
                rows = [
                    (f"key-{rng.randrange(hot):05}", None if rng.random() < 0.1 else f"{now}-{n}")
                    for n in range(rng.randrange(1, 60))
                ]
                engine.append("t", rows, now_ms=now)
                read += cleaned(engine, now).bytes_read
            found.append((logs(engine), read))
    assert found[0][0] == found[1][0]
    assert found[0][1] < found[1][1]


def test_a_segment_of_which_no_key_occurs_again_is_not_read(tmp_path: Path) -> None:
    with filled(tmp_path) as engine:
        before = inodes(engine)
        assert len(before) > 8
        engine.append("t", [("key-00003", "new")], now_ms=2_000)
        size = sum(len(data) for name, data in logs(engine).items() if name.endswith(".log"))
        stats = cleaned(engine, 2_000)
        assert stats.bytes_read < size / 4
        assert stats.records_removed == 1
        same = [name for name, inode in inodes(engine).items() if before.get(name) == inode]
        # That of the key, and the last one, to which the dirty one is added.
        assert len(same) >= len(before) - 3
        assert dict(pairs(engine))[b"key-00003"] == b"new"


def test_what_is_left_alone_is_written_once_a_key_of_it_occurs_again(tmp_path: Path) -> None:
    with filled(tmp_path) as engine:
        for now, number in ((2_000, 3), (2_100, 700), (2_200, 3), (2_300, 1_999)):
            engine.append("t", [(f"key-{number:05}", str(now))], now_ms=now)
            assert cleaned(engine, now).records_removed == 1
        assert sum(batch.num_rows for batch in engine.read("t", 0)) == 2_000


def test_the_indexes_of_a_partition_are_made_under_one_secret(tmp_path: Path) -> None:
    with filled(tmp_path) as engine:
        engine.append("t", [("key-00003", "new")], now_ms=2_000)
        cleaned(engine, 2_000)
        assert len(indexes(engine)) > 8
        assert len({_header(path)[5] for path in indexes(engine)}) == 1


@pytest.mark.parametrize(
    "rows",
    [
        [("key-00001", None)],
        [(f"key-{number:05}", None) for number in range(300, 310)],
    ],
)
def test_a_segment_with_tombstones_is_looked_at_until_they_are_gone(
    tmp_path: Path, rows: list[tuple[str, None]]
) -> None:
    with filled(tmp_path) as engine:
        engine.append("t", rows, now_ms=2_000)
        assert cleaned(engine, 2_000).tombstones_kept == len(rows)
        engine.append("t", [("key-01500", "x")], now_ms=2_100)
        assert cleaned(engine, 2_100).tombstones_kept == len(rows)
        engine.append("t", [("key-01501", "x")], now_ms=9_000)
        assert cleaned(engine, 9_000).tombstones_kept == 0
        assert not {key.encode() for key, _ in rows} & set(dict(pairs(engine)))


def test_a_segment_whose_tombstones_are_gone_is_left_alone_again(tmp_path: Path) -> None:
    with filled(tmp_path) as engine:
        rows = [(f"key-{n:05}", "new" if n % 50 else None) for n in range(2_000)]
        engine.append("t", rows, now_ms=2_000)
        assert cleaned(engine, 2_000).tombstones_kept == 40
        engine.append("t", [("of nobody", "x")], now_ms=9_000)
        assert cleaned(engine, 9_000).tombstones_kept == 0
        assert any(batch.horizon is not None for batch in dump(engine))
        size = sum(len(data) for name, data in logs(engine).items() if name.endswith(".log"))
        engine.append("t", [("of nobody", "x")], now_ms=9_100)
        assert cleaned(engine, 9_100).bytes_read < size / 8


def test_damage_of_a_segment_that_is_left_alone_is_not_written_anew_and_verify_finds_it(
    tmp_path: Path,
) -> None:
    with filled(tmp_path) as engine:
        log = sorted(engine.partition_directory("t", 0).glob("*.log"))[0]
        data = bytearray(log.read_bytes())
        data[len(data) // 2] ^= 1
        log.write_bytes(data)
        engine.append("t", [("of nobody", "new")], now_ms=2_000)
        cleaned(engine, 2_000)
        assert log.read_bytes() == data
        assert any(str(log) in str(found) for found in verify(tmp_path))
        rows = [(f"key-{number:05}", "new") for number in range(100)]
        engine.append("t", rows, now_ms=3_000)
        (stats,) = clean(engine, "t", force=True, now_ms=3_000)
        assert stats.error is not None
        assert log.name in stats.error
        assert log.read_bytes() == data


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


def test_a_hash_in_common_is_no_key_in_common(
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


def test_keys_beyond_the_buffer_and_batches_left_apart_are_cleaned_as_ever(tmp_path: Path) -> None:
    with filled(tmp_path) as engine:
        rows = [(f"key-{n:05}", "new") for n in range(0, 500, 2)]
        engine.append("t", rows, now_ms=2_000)
        assert cleaned(engine, 2_000, dedupe_buffer_size=24 * 40).records_removed == 250
        engine.append("t", rows[:9], now_ms=2_100)
        assert cleaned(engine, 2_100, merge_batches=False).records_removed == 9
        engine.append("t", rows[:9], now_ms=2_200)
        assert cleaned(engine, 2_200, dedupe_buffer_size=24 * 4, spill=False).records_removed == 9
        assert len(dict(pairs(engine))) == 2_000


def test_so_many_dirty_keys_that_asking_for_them_is_in_vain_are_not_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unchanged_segments, "KEYS_MAX", 100)
    with filled(tmp_path) as engine:
        engine.append("t", [(f"key-{n:05}", "new") for n in range(300)], now_ms=2_000)
        assert cleaned(engine, 2_000).records_removed == 300
        assert len(dict(pairs(engine))) == 2_000


def _header(path: Path) -> tuple[object, ...]:
    fields: tuple[object, ...] = layout.KEYS_HEADER.unpack_from(path.read_bytes())
    return fields
