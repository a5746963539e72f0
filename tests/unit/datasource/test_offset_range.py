"""The numbers are those of Spark's KafkaOffsetRangeCalculatorSuite."""

import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kafkalog.datasource.offset_range import OffsetRange, split_ranges
from kafkalog.datasource.offsets import EARLIEST, LATEST, TopicPartition


def ranges(*bounds: tuple[int, int]) -> list[OffsetRange]:
    return [OffsetRange(TopicPartition("t", p), *pair) for p, pair in enumerate(bounds)]


def bounds(pieces: list[OffsetRange]) -> dict[int, list[int]]:
    """The cuts of each partition, its start and end included; pieces must join."""
    found: dict[int, list[int]] = {}
    for piece in pieces:
        cuts = found.setdefault(piece.partition.partition, [piece.start])
        assert cuts[-1] == piece.start
        cuts.append(piece.end)
    return found


def test_without_a_minimum_every_partition_is_one_task() -> None:
    assert split_ranges(ranges((1, 5), (1, 1), (1, 21))) == ranges((1, 5), (1, 1), (1, 21))[::2]


@pytest.mark.parametrize(
    ("given_ranges", "min_partitions", "expected"),
    [
        pytest.param([(1, 2), (1, 2), (1, 2)], 3, {0: [1, 2], 1: [1, 2], 2: [1, 2]}, id="N to N"),
        pytest.param([(1, 5)], 4, {0: [1, 2, 3, 4, 5]}, id="one to N"),
        pytest.param([(1, 5), (1, 21)], 4, {0: [1, 5], 1: [1, 7, 14, 21]}, id="skewed"),
        pytest.param([(1, 21)], 4, {0: [1, 6, 11, 16, 21]}, id="even"),
        pytest.param([(1, 1), (1, 21)], 4, {1: [1, 6, 11, 16, 21]}, id="empty ignored"),
        pytest.param([(1, 2), (1, 1001)], 4, {0: [1, 2], 1: [1, 334, 667, 1001]}, id="very skewed"),
        pytest.param([(1, 5), (1, 5)], 1, {0: [1, 5], 1: [1, 5]}, id="fewer than partitions"),
        pytest.param([(1, 11)], 3, {0: [1, 4, 7, 11]}, id="inexact"),
        pytest.param(
            [(0, 10), (0, 10), (0, 1)],
            6,
            {0: [0, 3, 6, 10], 1: [0, 3, 6, 10], 2: [0, 1]},
            id="never drop offsets",
        ),
        pytest.param(
            [(0, 10_000), (0, 15_000), (0, 20_000)],
            9,
            {
                0: [0, 5000, 10_000],
                1: [0, 5000, 10_000, 15_000],
                2: [0, 5000, 10_000, 15_000, 20_000],
            },
            id="proportional",
        ),
        pytest.param(
            [(0, 500), (0, 12_000), (0, 15_001)],
            6,
            {0: [0, 500], 1: [0, 6000, 12_000], 2: [0, 5000, 10_000, 15_001]},
            id="one small range",
        ),
        pytest.param(
            [(0, 1), (0, 1), (0, 10_000)],
            6,
            {0: [0, 1], 1: [0, 1], 2: [0, 2500, 5000, 7500, 10_000]},
            id="two small ranges",
        ),
    ],
)
def test_a_minimum_splits_large_ranges(
    given_ranges: list[tuple[int, int]], min_partitions: int, expected: dict[int, list[int]]
) -> None:
    assert bounds(split_ranges(ranges(*given_ranges), min_partitions)) == expected


@pytest.mark.parametrize(
    ("given_ranges", "most", "min_partitions", "expected"),
    [
        pytest.param([(1, 5)], 4, None, {0: [1, 5]}, id="fits"),
        pytest.param([(1, 6)], 4, None, {0: [1, 3, 6]}, id="one to two"),
        pytest.param(
            [(1, 40), (1, 50), (1, 60)],
            20,
            None,
            {0: [1, 20, 40], 1: [1, 17, 33, 50], 2: [1, 20, 40, 60]},
            id="N to M",
        ),
        pytest.param([(1, 40)], 20, 1, {0: [1, 20, 40]}, id="with a low minimum"),
        pytest.param([(1, 40)], 20, 4, {0: [1, 10, 20, 30, 40]}, id="with a high minimum"),
    ],
)
def test_a_largest_count_of_records_cuts_before_the_minimum_does(
    given_ranges: list[tuple[int, int]],
    most: int,
    min_partitions: int | None,
    expected: dict[int, list[int]],
) -> None:
    assert bounds(split_ranges(ranges(*given_ranges), min_partitions, most)) == expected


def test_a_piece_too_small_to_be_split_keeps_the_others_of_its_partition_whole() -> None:
    pieces = [
        OffsetRange(TopicPartition("t", 0), 0, 100),
        OffsetRange(TopicPartition("t", 0), 100, 101),
    ]

    assert split_ranges(pieces, 4) == pieces


def test_pieces_remember_that_they_start_at_the_earliest_offset() -> None:
    whole = OffsetRange(TopicPartition("t", 0), 0, 9, from_earliest=True)

    assert all(piece.from_earliest for piece in split_ranges([whole], 3, 2))


def test_open_ends_stay_open_at_the_edges_and_are_split_by_where_they_were() -> None:
    whole = OffsetRange(TopicPartition("t", 0), EARLIEST, LATEST, planned=(4, 13))

    pieces = split_ranges([whole], 3)

    assert [(piece.start, piece.end) for piece in pieces] == [(-2, 7), (7, 10), (10, -1)]
    assert [piece.bounds for piece in pieces] == [(4, 7), (7, 10), (10, 13)]


@given(st.integers(0, 50), st.integers(1, 60), st.lists(st.integers(-5, 70), max_size=8))
def test_cuts_keep_every_offset_once_and_in_order(start: int, size: int, cuts: list[int]) -> None:
    whole = OffsetRange(TopicPartition("t", 0), start, start + size)

    pieces = whole.split_at(cuts)

    assert [n for p in pieces for n in range(p.start, p.end)] == list(range(start, start + size))
    assert {p.end for p in pieces} == {start + size, *[c for c in cuts if start < c < start + size]}


@given(
    st.lists(st.tuples(st.integers(0, 1000), st.integers(0, 1000)), max_size=6),
    st.none() | st.integers(1, 40),
    st.none() | st.integers(1, 40),
)
def test_no_offset_is_dropped(
    pairs: list[tuple[int, int]], min_partitions: int | None, most: int | None
) -> None:
    given_ranges = ranges(*[(start, start + size) for start, size in pairs])

    pieces = split_ranges(given_ranges, min_partitions, most)

    filled = {r.partition.partition: (r.start, r.end) for r in given_ranges if r.size}
    assert {p: (cut[0], cut[-1]) for p, cut in bounds(pieces).items()} == filled
    assert most is None or all(piece.size <= most for piece in pieces)


def test_many_more_parts_than_offsets_cost_nothing() -> None:
    (whole,) = ranges((0, 10))
    tracemalloc.start()
    try:
        pieces = split_ranges([whole], 1_000_000)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert [(piece.start, piece.end) for piece in pieces] == [(n, n + 1) for n in range(10)]
    assert peak < 1 << 20
