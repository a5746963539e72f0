"""The order in which rows get each other's unique values."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kafkalog.sink.upsert.unique_moves import Arrangement, Claim, Rival, arrange

Values = list[tuple[int, int]]
"""Per row, its value in each of two unique indexes."""


def arranged(before: Values, after: Values) -> Arrangement:
    """Arrange rows 0 to n of a micro-batch; the table's rows from n on stay as they are."""
    count = len(after)
    claims, rivals = [], []
    for index in range(2):
        holders = {values[index]: row for row, values in enumerate(before)}
        for row, values in enumerate(after):
            holder = holders.get(values[index])
            if holder is not None and holder != row:
                claims.append(Claim(index, row, holder if holder < count else None))
            if sum(each[index] == values[index] for each in after) > 1:
                rivals.append(Rival(index, values[index], row))
    return arrange(claims, rivals, lambda row: False)


unique = st.lists(
    st.tuples(st.integers(0, 9), st.integers(0, 9)),
    max_size=8,
    unique_by=(lambda pair: pair[0], lambda pair: pair[1]),
)


@given(unique, st.data())
def test_each_value_is_free_when_a_row_gets_it(before: Values, data: st.DataObject) -> None:
    count = data.draw(st.integers(0, len(before)))
    pair = st.tuples(st.integers(0, 9), st.integers(0, 9))
    after = data.draw(st.lists(pair, min_size=count, max_size=count))
    found = arranged(before, after)
    rows: list[list[int | None]] = [list(each) for each in before]
    for row, index in found.parked:
        rows[row][index] = None
    others = [row for row in range(count) if row not in {*found.order, *found.refused}]
    for row in [*others, *found.order]:
        for index in range(2):
            assert all(each[index] != after[row][index] for n, each in enumerate(rows) if n != row)
        rows[row] = list(after[row])
    end = [*after, *before[count:]]
    is_valid = all(len({each[index] for each in end}) == len(end) for index in range(2))
    assert bool(found.refused) is not is_valid


def test_no_row_of_a_valid_end_state_is_refused() -> None:
    chain = arranged([(n, 9) for n in range(5)], [(n + 1, n) for n in range(5)])
    assert (chain.order, chain.parked, chain.refused) == ([4, 3, 2, 1, 0], [], [])


def test_one_row_of_each_circle_is_parked() -> None:
    found = arranged([(0, 0), (1, 1), (2, 2), (3, 3)], [(1, 0), (0, 1), (3, 2), (2, 3)])
    assert len(found.parked) == 2
    assert found.refused == []


def test_a_long_chain_takes_linear_time() -> None:
    count = 20_000
    found = arrange([Claim(0, n, n + 1) for n in range(count)], [], lambda row: False)
    assert found.order == list(range(count, -1, -1))
    refused = arrange(
        [Claim(0, n, n + 1 if n < count else None) for n in range(count + 1)],
        [],
        lambda row: False,
    )
    assert len(refused.refused) == count + 1


def test_of_two_rows_with_one_value_the_later_is_refused_unless_it_has_the_value() -> None:
    assert arranged([(0, 0), (1, 1)], [(5, 0), (5, 1)]).refused == [1]
    assert arranged([(0, 0), (1, 1)], [(1, 0), (1, 1)]).refused == [0]


def test_a_row_waits_for_the_earlier_record_of_a_refused_one() -> None:
    claims = [Claim(0, 0, 1), Claim(0, 1, None)]
    assert arrange(claims, [], lambda row: True).postponed == [0]
    assert arrange(claims, [], lambda row: False).refused == [1, 0]
