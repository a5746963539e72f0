from __future__ import annotations

import itertools
import random
from pathlib import Path

import pytest

import kafkalog
from kafkalog.cleaner.dedup.latest_records import build_offset_map
from kafkalog.cleaner.dedup.offset_map import OffsetMap
from kafkalog.cleaner.dedup.transactions import mapped_batches
from kafkalog.cleaner.key_index.latest_view import latest
from kafkalog.cleaner.schedule.manager import clean
from kafkalog.cleaner.state.stats import CleanerStats
from kafkalog.errors import InvalidInputError, OffsetOutOfRangeError
from kafkalog.schema import changelog_schema
from kafkalog.storage_engine.directory.directory_log import DirectoryLog
from tests.builders.log_builder import LogBuilder
from tests.builders.log_contents import latest_column
from tests.unit.cleaner.naive import Batch, batch, dump, foreign_log, latest_values, records_of
from tests.unit.cleaner.transactional_log import CONTROL, Log, is_aborted


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


@pytest.mark.parametrize("blocks", [0, 1 << 40])
@pytest.mark.parametrize("seed", range(4))
def test_chosen_keys_have_the_records_that_they_have_among_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int, blocks: int
) -> None:
    """Whether each is looked for in an index, or the index is read whole."""
    monkeypatch.setattr("kafkalog.cleaner.key_index.key_index._BLOCKS_PER_KEY", blocks)
    rng = random.Random(seed)
    with kafkalog.open(tmp_path) as log:
        log.create_topic("t", 1, {"segment.bytes": "3000"})
        for i in range(20):
            rows = [
                (f"k{rng.randrange(90)}", None if rng.random() < 0.2 else f"{i}-{j}")
                for j in range(30)
            ]
            log.append("t", rows, now_ms=1000)
            if i in (8, 16):
                log.clean("t", force=True, now_ms=1000)
    with DirectoryLog(tmp_path, read_only=True) as engine:
        cleaned_to = engine.describe("t").partitions[0].cleaned_to
        for end, with_tombstones in itertools.product(
            (cleaned_to, cleaned_to + 25, 600), (False, True)
        ):
            everything = latest_column(engine, end=end, with_tombstones=with_tombstones)
            for count in (1, 2, 30):
                keys = [b"k%d" % number for number in rng.sample(range(95), count)]
                given = [*keys, keys[0]]
                found = latest_column(engine, end=end, keys=given, with_tombstones=with_tombstones)
                assert found == {key: at for key, at in everything.items() if key in keys}
                assert list(found.values()) == sorted(found.values())


@pytest.mark.parametrize("slots", [5, 13, 40, 10_000])
@pytest.mark.parametrize("codec", ["producer", "zstd"])
def test_the_latest_records_are_exact_at_any_number_of_keys(
    tmp_path: Path, slots: int, codec: str
) -> None:
    rng = random.Random(slots)
    engine = DirectoryLog(tmp_path)
    engine.create_topic("t", 1, {"segment.bytes": "1500", "compression.type": codec})
    for i in range(20):
        rows = [
            (f"k{rng.randrange(90)}", None if rng.random() < 0.2 else f"{i}-{j}") for j in range(20)
        ]
        engine.append("t", rows, now_ms=1000)
    records = records_of(dump(engine))
    for end in (0, 1, 137, 400):
        found = latest_values(r for r in records if r.offset < end)
        every = {key: offset for key, (offset, _) in found.items()}
        some = {key: offset for key, (offset, value) in found.items() if value is not None}
        budget = 24 * slots
        assert latest_column(engine, end=end, budget_bytes=budget) == some
        assert latest_column(engine, end=end, budget_bytes=budget, with_tombstones=True) == every


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


def test_a_clean_log_is_read_once_and_a_dirty_one_twice(tmp_path: Path) -> None:
    log = LogBuilder(tmp_path).topic(segment_bytes=100)
    log.append(("a", "1"), ("b", "2"), ("a", "3"), ("c", None)).roll()
    clean(log.engine, force=True, now_ms=1)
    assert view(log.engine) == ([(b"b", b"2", 1), (b"a", b"3", 2)], 4)
    assert view(log.engine, with_tombstones=True)[0][-1] == (b"c", None, 3)
    log.append(("b", "4"))
    assert view(log.engine) == ([(b"a", b"3", 2), (b"b", b"4", 4)], 2 * 5)


def test_a_broker_is_not_believed_that_its_log_is_clean(tmp_path: Path) -> None:
    """Its checkpoint may be older than a truncation of the log."""
    segments = {0: singles(0, "a", "b", "a"), 3: []}
    engine = foreign_log(tmp_path, segments, first_dirty=3)
    assert view(engine) == ([(b"b", b"v1", 1), (b"a", b"v2", 2)], 2 * 3)


def test_records_without_a_key_are_no_latest_records(tmp_path: Path) -> None:
    engine = foreign_log(tmp_path, {0: [batch(0, [("", "x"), ("a", "y")])]})
    assert latest_column(engine) == {b"a": 1}


def test_a_view_older_than_the_cleaning_is_refused_with_both_offsets(tmp_path: Path) -> None:
    engine = foreign_log(tmp_path, {0: singles(0, "a", "a", "a"), 3: []}, first_dirty=2)
    with pytest.raises(InvalidInputError, match=r"offset 1 .* offset 2"):
        latest_column(engine, end=1)
    assert latest_column(engine, end=2) == {b"a": 1}
    with pytest.raises(OffsetOutOfRangeError):
        latest_column(engine, end=4)


def test_aborted_records_are_not_the_latest_and_hide_none(tmp_path: Path) -> None:
    log = Log.create(tmp_path)
    log.data(1, 2)
    log.transact(1, 1)
    log.transact(2, 2)
    log.abort(1)
    log.commit(2)
    assert latest_column(log.engine) == {b"1": 0, b"2": 3}


def test_nothing_above_the_last_stable_offset_is_among_the_latest(tmp_path: Path) -> None:
    log = Log.create(tmp_path)
    log.data(1, 2)
    log.transact(1, 1)
    log.data(2)
    assert latest_column(log.engine) == {b"1": 0, b"2": 1}
    log.commit(1)
    assert latest_column(log.engine) == {b"1": 2, b"2": 3}


def test_an_older_end_asks_a_later_marker(tmp_path: Path) -> None:
    log = Log.create(tmp_path)
    log.data(1)
    log.transact(1, 1)
    log.roll()
    log.abort(1)
    assert latest_column(log.engine, end=2) == {b"1": 0}


@pytest.mark.parametrize("slots", [5, 100])
@pytest.mark.parametrize("seed", range(10))
def test_the_latest_committed_records_are_exact(tmp_path: Path, seed: int, slots: int) -> None:
    rng = random.Random(seed)
    log = Log.create(tmp_path, segment_bytes="400")
    for _ in range(60):
        keys = [rng.randrange(20) for _ in range(rng.randrange(1, 4))]
        producer = rng.randrange(1, 4)
        if rng.random() < 0.3:
            log.data(*keys, tombstones=rng.random() < 0.4)
        elif producer in log.running and rng.random() < 0.4:
            log.mark(producer, rng.randrange(2))
        else:
            log.transact(producer, *keys)
    for producer in sorted(log.running):
        log.mark(producer, rng.randrange(2))
    committed = [
        record
        for batch in dump(log.engine)
        if not batch.attributes & CONTROL and not is_aborted(batch, log.aborted)
        for record in batch.records
    ]
    for end in (log.end // 2, log.end):
        below = latest_values(r for r in committed if r.offset < end)
        expected = {key: offset for key, (offset, value) in below.items() if value is not None}
        assert latest_column(log.engine, end=end, budget_bytes=24 * slots) == expected
