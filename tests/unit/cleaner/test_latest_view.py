from __future__ import annotations

from pathlib import Path

import pytest

from kafkalog.cleaner.dedup.latest_records import build_offset_map
from kafkalog.cleaner.dedup.offset_map import OffsetMap
from kafkalog.cleaner.dedup.transactions import mapped_batches
from kafkalog.cleaner.key_index.latest_view import latest
from kafkalog.cleaner.state.stats import CleanerStats
from kafkalog.schema import changelog_schema
from kafkalog.storage_engine.directory.directory_log import DirectoryLog
from tests.unit.cleaner.naive import Batch, batch, foreign_log


def singles(first: int, *names: str) -> list[Batch]:
    """One batch per record, as a producer without batching writes."""
    return [batch(first + i, [(name, f"v{first + i}")]) for i, name in enumerate(names)]


def built(
    engine: DirectoryLog, start: int, end: int, offset_map: OffsetMap
) -> tuple[int, CleanerStats]:
    stats = CleanerStats("t", 0)
    with engine.snapshot("t", 0, whole=True) as snapshot:
        is_mapped = mapped_batches(snapshot, is_strict=False)
        found = build_offset_map(snapshot, start, end, offset_map, is_mapped=is_mapped, stats=stats)
        return found, stats


# --- the first pass ------------------------------------------------------------------------------


def test_the_map_knows_exactly_the_keys_of_its_range(tmp_path: Path) -> None:
    names = [f"k{i}" for i in range(500)]
    segments = {base: singles(base, *names[base : base + 100]) for base in range(0, 500, 100)}
    engine = foreign_log(tmp_path, segments | {500: []})
    for start, end in [(0, 100), (100, 400), (200, 500)]:
        offset_map = OffsetMap(1000)
        found, stats = built(engine, start, end, offset_map)
        assert (found, offset_map.latest_offset + 1) == (end, end)
        assert (offset_map.size, stats.map_records_read) == (end - start, end - start)


def test_a_full_map_ends_the_round_after_the_last_record_it_took(tmp_path: Path) -> None:
    engine = foreign_log(tmp_path, {0: singles(0, "0", "1", "2", "3", "4"), 5: []})
    offset_map = OffsetMap(3, 0.75)
    assert built(engine, 2, 5, offset_map)[0] == 4
    assert offset_map.size == 2


def test_a_map_that_fills_within_a_batch_ends_within_it(tmp_path: Path) -> None:
    pairs = [("a", "1"), ("", "no key"), ("b", "2"), ("c", "3")]
    engine = foreign_log(tmp_path, {0: [batch(0, [("a", "0")]), batch(1, pairs)], 5: []})
    assert built(engine, 0, 5, OffsetMap(3, 0.75))[0] == 4
    # Full at the end of one batch, and the next batch only begins: the round ends between them.
    assert built(engine, 0, 5, OffsetMap(2, 0.75))[0] == 1


@pytest.mark.parametrize("active_base", [11, 15, 30])
def test_the_end_passes_gaps_between_segments(tmp_path: Path, active_base: int) -> None:
    names = [f"k{i}" for i in range(10)]
    engine = foreign_log(tmp_path, {0: singles(0, *names), active_base: []})
    assert built(engine, 0, active_base, OffsetMap(100))[0] == active_base


def test_a_map_that_fills_behind_a_gap_ends_at_the_next_segment(tmp_path: Path) -> None:
    segments = {0: singles(0, "a"), 20: singles(20, "b"), 30: []}
    engine = foreign_log(tmp_path, segments)
    assert built(engine, 0, 30, OffsetMap(2, 0.75))[0] == 20


def test_offsets_far_apart_are_mapped(tmp_path: Path) -> None:
    far = 7_206_178
    engine = foreign_log(tmp_path, {0: [*singles(0, "a"), *singles(far, "b")], far + 1: []})
    offset_map = OffsetMap(10)
    built(engine, 0, far + 1, offset_map)
    assert (offset_map.latest_offset, offset_map.size) == (far, 2)


# --- the latest records --------------------------------------------------------------------------


@pytest.mark.parametrize("slots", [10, 10_000])
def test_progress_counts_every_offset_twice_in_each_part_and_comes_to_its_end(
    tmp_path: Path, slots: int
) -> None:
    names = [f"k{i}" for i in range(100)]
    engine = foreign_log(tmp_path, {0: singles(0, *names), 100: []})
    told: list[tuple[int, int]] = []
    with engine.snapshot("t", 0, whole=True) as snapshot:
        rows = latest(
            snapshot,
            100,
            budget_bytes=24 * slots,
            schema=changelog_schema(),
            progress=lambda done, of: told.append((done, of)),
        )
        assert sum(batch.num_rows for batch in rows) == 100
    assert all(0 <= done <= of for done, of in told)
    done, of = told[-1]
    assert done == of
    parts = of // 200
    assert of == 200 * parts
    assert (parts > 1) == (slots == 10)


def view(
    engine: DirectoryLog, *, with_tombstones: bool = False
) -> tuple[list[tuple[object, ...]], int]:
    """The latest records up to the end, and how many offsets were passed for them."""
    passed = [0]
    with engine.snapshot("t", 0, whole=True) as snapshot:
        rows = latest(
            snapshot,
            snapshot.state.high_watermark,
            budget_bytes=24_000,
            schema=changelog_schema(),
            with_tombstones=with_tombstones,
            progress=lambda _, of: passed.append(of),
        )
        columns = ("key", "value", "offset")
        found = [
            row
            for part in rows
            for row in zip(*(part[c].to_pylist() for c in columns), strict=True)
        ]
    return found, passed[-1]


def test_a_broker_is_not_believed_that_its_log_is_clean(tmp_path: Path) -> None:
    """Its checkpoint may be older than a truncation of the log."""
    segments = {0: singles(0, "a", "b", "a"), 3: []}
    engine = foreign_log(tmp_path, segments, first_dirty=3)
    assert view(engine) == ([(b"b", b"v1", 1), (b"a", b"v2", 2)], 2 * 3)
