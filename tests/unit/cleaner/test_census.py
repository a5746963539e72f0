from __future__ import annotations

import random
from pathlib import Path

import pytest

from kafkalog.cleaner.dedup.census import census
from kafkalog.cleaner.schedule.manager import clean
from kafkalog.storage_engine.directory.directory_log import DirectoryLog
from tests.builders.log_builder import LogBuilder
from tests.unit.cleaner.transactional_log import Log

NOW = 1_700_000_000_000


def expected(engine: DirectoryLog) -> dict[int, tuple[int, int, int]]:
    """Return, by base offset, how many records there are, tombstones, and replaced ones."""
    rows = [row for batch in engine.read("t", 0) for row in batch.to_pylist()]
    latest = {row["key"]: row["offset"] for row in rows}
    bases = sorted(int(path.stem) for path in (engine.root / "t-0").glob("*.log"))
    found = {}
    for place, base in enumerate(bases):
        end = bases[place + 1] if place + 1 < len(bases) else 1 << 62
        mine = [row for row in rows if base <= row["offset"] < end]
        found[base] = (
            len(mine),
            sum(row["value"] is None for row in mine),
            sum(latest[row["key"]] != row["offset"] for row in mine),
        )
    return found


def counted(engine: DirectoryLog, budget_bytes: int = 1 << 20) -> dict[int, tuple[int, int, int]]:
    with engine.snapshot("t", 0, whole=True) as snapshot:
        found = census(snapshot, budget_bytes=budget_bytes)
    return {one.base_offset: (one.records, one.tombstones, one.obsolete_records) for one in found}


@pytest.mark.parametrize("budget_bytes", [1 << 20, 24 * 40], ids=["one part", "many parts"])
@pytest.mark.parametrize("codec", ["uncompressed", "zstd"])
def test_what_a_newer_record_replaces_is_dead(
    tmp_path: Path, codec: str, budget_bytes: int
) -> None:
    draw = random.Random(1)
    engine = LogBuilder(tmp_path).topic(segment_bytes=2000, compression_type=codec).engine
    for _ in range(40):
        rows = [
            (f"k{draw.randrange(90)}", None if draw.random() < 0.2 else f"v{draw.random()}")
            for _ in range(draw.randrange(1, 30))
        ]
        engine.append("t", rows, now_ms=NOW)
    found = counted(engine, budget_bytes)
    assert len(found) > 3
    assert found == expected(engine)


def test_a_batch_is_dead_in_the_share_of_its_obsolete_records(tmp_path: Path) -> None:
    engine = LogBuilder(tmp_path).topic(segment_bytes=2000).engine
    engine.append("t", [("a", "1"), ("b", "1"), ("c", "1"), ("d", "1")], now_ms=NOW)
    size = (tmp_path / "t-0" / f"{0:020}.log").stat().st_size
    engine.append("t", [("a", "2")], now_ms=NOW)
    with engine.snapshot("t", 0, whole=True) as snapshot:
        (found,) = census(snapshot, budget_bytes=1 << 20)
    assert (found.records, found.obsolete_records, found.obsolete_bytes) == (5, 1, round(size / 4))


def test_nothing_is_dead_after_a_cleaning_of_everything(tmp_path: Path) -> None:
    engine = LogBuilder(tmp_path).topic(segment_bytes=2000).engine
    for value in range(5):
        engine.append("t", [(f"k{key}", f"{value}") for key in range(20)], now_ms=NOW)
    assert sum(dead for _, _, dead in counted(engine).values()) == 80
    clean(engine, force=True, now_ms=NOW)
    assert [dead for _, _, dead in counted(engine).values() if dead] == []


def test_what_was_aborted_is_dead_and_markers_count_as_nothing(tmp_path: Path) -> None:
    made = Log.create(tmp_path)
    made.data(1, 2)
    made.transact(7, 1, 3)
    made.abort(7)
    made.transact(8, 2)
    made.commit(8)
    assert counted(made.engine) == {0: (5, 0, 3)}


def test_an_empty_partition_has_nothing_to_count(tmp_path: Path) -> None:
    assert counted(LogBuilder(tmp_path).topic(segment_bytes=2000).engine) == {0: (0, 0, 0)}
