"""The latest record of each key: which it is, as of which moment, and how often the log is read."""

from __future__ import annotations

import itertools
import random

import pytest

from kafkalog.cleaner.key_index.latest_view import latest
from kafkalog.errors import InvalidInputError, OffsetOutOfRangeError
from kafkalog.schema import chosen_columns
from tests.builders.log_contents import latest_column
from tests.unit.cleaner.naive import batch, dump, latest_values, records_of
from tests.unit.cleaner.transactional_log import CONTROL, is_aborted
from tests.unit.rules.acts import Written
from tests.unit.rules.places import Place


@pytest.mark.parametrize("blocks", [0, 1 << 40])
@pytest.mark.parametrize("seed", range(2))
def test_chosen_keys_have_the_records_that_they_have_among_all(
    place: Place, monkeypatch: pytest.MonkeyPatch, seed: int, blocks: int
) -> None:
    """Whether each is looked for in an index, or the index is read whole."""
    monkeypatch.setattr("kafkalog.cleaner.key_index.key_index._BLOCKS_PER_KEY", blocks)
    rng = random.Random(seed)
    place.topic(segment_bytes=3000)
    for i in range(20):
        rows = [
            (f"k{rng.randrange(90)}", None if rng.random() < 0.2 else f"{i}-{j}") for j in range(30)
        ]
        place.append(*rows, now_ms=1000)
        if i in (8, 16):
            place.log.clean("t", force=True, now_ms=1000)
    log = place.other(read_only=True)
    cleaned_to = place.state().cleaned_to
    for end, with_tombstones in itertools.product(
        (cleaned_to, cleaned_to + 25, 600), (False, True)
    ):
        everything = latest_column(log, end=end, with_tombstones=with_tombstones)
        for count in (1, 30):
            keys = [b"k%d" % number for number in rng.sample(range(95), count)]
            given = [*keys, keys[0]]
            found = latest_column(log, end=end, keys=given, with_tombstones=with_tombstones)
            assert found == {key: at for key, at in everything.items() if key in keys}
            assert list(found.values()) == sorted(found.values())


@pytest.mark.parametrize("slots", [8, 25, 10_000])
@pytest.mark.parametrize("codec", ["producer", "zstd"])
def test_the_latest_records_are_exact_at_any_number_of_keys(
    place: Place, slots: int, codec: str
) -> None:
    rng = random.Random(slots)
    place.topic(segment_bytes=1500, compression_type=codec)
    for i in range(8):
        rows = [
            (f"k{rng.randrange(50)}", None if rng.random() < 0.2 else f"{i}-{j}") for j in range(20)
        ]
        place.append(*rows, now_ms=1000)
    records = records_of(dump(place.engine))
    for end in (0, 1, 97, 160):
        found = latest_values(r for r in records if r.offset < end)
        every = {key: offset for key, (offset, _) in found.items()}
        some = {key: offset for key, (offset, value) in found.items() if value is not None}
        budget = 24 * slots
        assert latest_column(place.log, end=end, budget_bytes=budget) == some
        assert latest_column(place.log, end=end, budget_bytes=budget, with_tombstones=True) == every


def view(place: Place) -> tuple[list[tuple[object, ...]], int]:
    """The latest records up to the end, and how many offsets were passed for them."""
    passed = [0]
    rows = place.log.latest("t", budget_bytes=24_000, progress=lambda _, of: passed.append(of))
    found = [
        row
        for part in rows
        for row in zip(*(part[c].to_pylist() for c in ("key", "value", "offset")), strict=True)
    ]
    return found, passed[-1]


def test_a_clean_log_is_read_once_and_a_dirty_one_twice(place: Place) -> None:
    place.topic(segment_bytes=100)
    place.append(("a", "1"), ("b", "2"), ("a", "3"), ("c", None)).roll()
    place.log.clean(force=True, now_ms=1)
    assert view(place) == ([(b"b", b"2", 1), (b"a", b"3", 2)], 4)
    assert latest_column(place.log, with_tombstones=True)[b"c"] == 3
    place.append(("b", "4"))
    assert view(place) == ([(b"a", b"3", 2), (b"b", b"4", 4)], 2 * 5)


def test_a_reader_with_another_order_gets_obsolete_records_and_tombstones(place: Place) -> None:
    place.topic().append(("a", "1"), ("b", "2"), ("a", "3"), ("b", None)).append(("a", "4"))
    with place.engine.snapshot("t", 0, whole=True) as snapshot:
        batches = latest(
            snapshot,
            4,
            since=1,
            budget_bytes=1 << 20,
            schema=chosen_columns(["offset"]),
            with_obsolete=True,
        )
        assert [offset for each in batches for offset in each["offset"].to_pylist()] == [1, 2, 3]


def test_records_without_a_key_are_not_latest_records(place: Place) -> None:
    place.segments_of({0: [batch(0, [("", "x"), ("a", "y")])]})
    assert latest_column(place.log) == {b"a": 1}


def test_a_view_older_than_the_cleaning_is_refused_with_both_offsets(place: Place) -> None:
    place.topic().append(("a", "1"), ("a", "2")).clean().append(("a", "3"))
    with pytest.raises(InvalidInputError, match=r"offset 1 .* offset 2"):
        latest_column(place.log, end=1)
    assert latest_column(place.log, end=2) == {b"a": 1}
    with pytest.raises(OffsetOutOfRangeError):
        latest_column(place.log, end=4)


def test_aborted_records_are_not_the_latest_and_hide_none(place: Place) -> None:
    log = Written.create(place)
    log.data(1, 2)
    log.transact(1, 1)
    log.transact(2, 2)
    log.abort(1)
    log.commit(2)
    assert latest_column(place.log) == {b"1": 0, b"2": 3}


def test_nothing_above_the_last_stable_offset_is_among_the_latest(place: Place) -> None:
    log = Written.create(place)
    log.data(1, 2)
    log.transact(1, 1)
    log.data(2)
    assert latest_column(place.log) == {b"1": 0, b"2": 1}
    log.commit(1)
    assert latest_column(place.log) == {b"1": 2, b"2": 3}


def test_an_older_end_asks_a_later_marker(place: Place) -> None:
    log = Written.create(place)
    log.data(1)
    log.transact(1, 1)
    log.roll()
    log.abort(1)
    assert latest_column(place.log, end=2) == {b"1": 0}


@pytest.mark.parametrize("slots", [12, 100])
@pytest.mark.parametrize("seed", range(3))
def test_the_latest_committed_records_are_exact(place: Place, seed: int, slots: int) -> None:
    rng = random.Random(seed)
    log = Written.create(place, segment_bytes=400)
    for _ in range(40):
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
        for item in log.batches()
        if not item.attributes & CONTROL and not is_aborted(item, log.aborted)
        for record in item.records
    ]
    for end in (log.end // 2, log.end):
        below = latest_values(r for r in committed if r.offset < end)
        expected = {key: offset for key, (offset, value) in below.items() if value is not None}
        assert latest_column(place.log, end=end, budget_bytes=24 * slots) == expected


@pytest.mark.parametrize("slots", [10, 10_000])
def test_progress_counts_every_offset_twice_in_each_part_and_comes_to_its_end(
    place: Place, slots: int
) -> None:
    place.segments_of({0: [batch(i, [(f"k{i}", "v")]) for i in range(100)], 100: []})
    told: list[tuple[int, int]] = []
    rows = place.log.latest(
        "t", budget_bytes=24 * slots, progress=lambda done, of: told.append((done, of))
    )
    assert sum(part.num_rows for part in rows) == 100
    assert all(0 <= done <= of for done, of in told)
    done, of = told[-1]
    assert done == of
    parts = of // 200
    assert of == 200 * parts
    assert (parts > 1) == (slots == 10)
