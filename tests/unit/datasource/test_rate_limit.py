from hypothesis import given
from hypothesis import strategies as st

from kafkalog.datasource.micro_batch import limit_offsets
from kafkalog.datasource.offsets import TopicPartition


def limited(sizes: list[int], limit: int, begin: list[int] | None = None) -> list[int]:
    """The offsets that each partition of these sizes gets."""
    first = {TopicPartition("t", p): (begin or [0] * len(sizes))[p] for p in range(len(sizes))}
    end = {p: first[p] + sizes[p.partition] for p in first}
    return [offset - first[p] for p, offset in limit_offsets(first, end, limit).items()]


def test_small_partitions_are_not_starved() -> None:
    assert limited([101, 11, 1], 10) == [8, 1, 1]


def test_the_rest_is_shared_anew() -> None:
    assert limited([93, 10, 0], 10, begin=[8, 1, 1]) == [9, 1, 0]


def test_the_sum_may_stay_below_the_limit() -> None:
    assert limited([21, 11, 1], 20) == [12, 6, 1]


def test_nothing_waiting_keeps_the_end() -> None:
    assert limited([0, 0], 10) == [0, 0]


def test_a_limit_above_what_waits_takes_all() -> None:
    assert limited([5, 7], 1000) == [5, 7]


def test_the_largest_limit_does_not_overflow() -> None:
    assert limited([5, 7], 2**63 - 1, begin=[2**62, 3]) == [5, 7]


def test_an_end_below_its_begin_is_kept() -> None:
    assert limited([-3, 10], 4, begin=[5, 0]) == [-3, 4]


@given(st.lists(st.integers(0, 10**12), min_size=1, max_size=8), st.integers(1, 10**12))
def test_every_waiting_partition_moves_and_none_beyond_its_end(
    sizes: list[int], limit: int
) -> None:
    shares = limited(sizes, limit)

    assert all(
        (0 < share <= size) if size else share == 0
        for share, size in zip(shares, sizes, strict=True)
    )
    assert sum(shares) <= max(limit * (1 + 1e-9), 0) + len(sizes)
