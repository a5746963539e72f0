"""The state of producers as a broker's replay leaves it, against a model of the whole log.

The cases follow Kafka's ProducerStateManagerTest as far as they are about replaying.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kafkalog.errors import InvalidInputError
from kafkalog.storage_engine.format.batch import BatchHeader
from kafkalog.storage_engine.transactions.control_record import ControlRecord
from kafkalog.storage_engine.transactions.producer_snapshot import pack_snapshot, parse_snapshot
from kafkalog.storage_engine.transactions.producers import (
    EXPIRATION_MS,
    ProducerEntry,
    Producers,
    last_sequence,
)
from kafkalog.storage_engine.transactions.transaction_index import AbortedTransaction

P, Q, R = 1, 2, 3
ABORT, COMMIT = 0, 1
INT_MAX = 2**31 - 1


@dataclass(frozen=True)
class Item:
    """A batch as the model sees it: data, a marker, or a control batch without its record."""

    header: BatchHeader
    control: ControlRecord | None = None

    @property
    def is_rest(self) -> bool:
        return self.header.is_control and self.control is None


def data(
    producer_id: int,
    offset: int,
    *,
    epoch: int = 0,
    sequence: int = 0,
    count: int = 1,
    time: int = 0,
    transactional: bool = False,
    records: int | None = None,
) -> Item:
    """`count` offsets from `offset`; `records` of them are still there."""
    return Item(
        BatchHeader(
            base_offset=offset,
            batch_length=100,
            leader_epoch=0,
            magic=2,
            crc=0,
            attributes=0x10 if transactional else 0,
            last_offset_delta=count - 1,
            base_timestamp=time,
            max_timestamp=time,
            producer_id=producer_id,
            producer_epoch=epoch,
            base_sequence=sequence,
            records_count=count if records is None else records,
        )
    )


def marker(
    producer_id: int,
    offset: int,
    kind: int = COMMIT,
    *,
    epoch: int = 0,
    coordinator: int = 0,
    time: int = 0,
    empty: bool = False,
) -> Item:
    header = BatchHeader(
        base_offset=offset,
        batch_length=66,
        leader_epoch=0,
        magic=2,
        crc=0,
        attributes=0x30,
        last_offset_delta=0,
        base_timestamp=time,
        max_timestamp=time,
        producer_id=producer_id,
        producer_epoch=epoch,
        base_sequence=-1,
        records_count=0 if empty else 1,
    )
    return Item(header, None if empty else ControlRecord(kind, 0, coordinator, time))


def replay(
    items: Iterable[Item], producers: Producers | None = None
) -> tuple[Producers, list[AbortedTransaction]]:
    producers = Producers() if producers is None else producers
    found = [producers.append(item.header, item.control) for item in items]
    return producers, [aborted for aborted in found if aborted is not None]


def state(*items: Item) -> Producers:
    return replay(items)[0]


def reloaded(producers: Producers) -> Producers:
    """The state after its broker restarts: what a snapshot keeps of it."""
    entries = parse_snapshot(pack_snapshot(producers.entries.values()), "snapshot")
    return Producers(entries, producers.end_offset)


# --- batches of data -----------------------------------------------------------------------------


def test_a_producer_is_its_last_batch() -> None:
    producers = state(
        data(P, 0, epoch=3, sequence=0, count=5, time=10),
        data(P, 5, epoch=3, sequence=5, count=2, time=20),
    )
    assert producers.entries == {P: ProducerEntry(P, 3, 6, 6, 1, 20, -1, -1)}
    assert producers.end_offset == 7
    assert len(producers) == 1


def test_the_first_batch_seen_may_have_any_sequence() -> None:
    entry = state(data(P, 735, epoch=5, sequence=16)).entries[P]
    assert (entry.producer_epoch, entry.last_sequence, entry.last_offset) == (5, 16, 735)


def test_a_gap_in_the_sequence_is_accepted() -> None:
    assert state(data(P, 0, sequence=0), data(P, 1, sequence=3)).entries[P].last_sequence == 3


def test_a_duplicate_is_taken_as_it_comes() -> None:
    producers = state(data(P, 0, sequence=1), data(P, 1, sequence=1))
    assert (producers.entries[P].last_sequence, producers.entries[P].last_offset) == (1, 1)


@pytest.mark.parametrize("epoch", [4, 6])
def test_data_of_another_epoch_begins_anew_be_it_older_or_newer(epoch: int) -> None:
    producers = state(
        data(P, 0, epoch=5, sequence=40, count=3), data(P, 3, epoch=epoch, sequence=0)
    )
    assert producers.entries[P] == ProducerEntry(P, epoch, 0, 3, 0, 0, -1, -1)


def test_data_of_another_epoch_leaves_the_transaction_and_the_coordinator() -> None:
    producers = state(
        marker(P, 0, epoch=1, coordinator=9),
        data(P, 1, epoch=1, transactional=True),
        data(P, 2, epoch=2, transactional=True),
    )
    entry = producers.entries[P]
    assert (entry.coordinator_epoch, entry.current_txn_first_offset) == (9, 1)


def test_the_sequence_number_after_the_largest_is_zero() -> None:
    producers = state(data(P, 735, epoch=15, sequence=INT_MAX), data(P, 736, epoch=15, sequence=0))
    assert producers.entries[P].last_sequence == 0


def test_a_batch_may_cross_the_largest_sequence_number() -> None:
    producers = state(data(P, 2000, epoch=15, sequence=INT_MAX - 10, count=21))
    entry = producers.entries[P]
    assert (entry.last_sequence, entry.last_offset, entry.offset_delta) == (9, 2020, 20)


@pytest.mark.parametrize(
    ("sequence", "count", "last"),
    [
        (-1, 1, -1),
        (-1, 1000, -1),
        (0, 1, 0),
        (INT_MAX, 1, INT_MAX),
        (INT_MAX, 2, 0),
        (INT_MAX - 1, 3, 0),
        (INT_MAX, INT_MAX, INT_MAX - 2),
    ],
)
def test_last_sequence(sequence: int, count: int, last: int) -> None:
    assert last_sequence(data(P, 0, sequence=sequence, count=count).header) == last


def test_batches_without_a_sequence_are_batches_all_the_same() -> None:
    # As group coordinators write them: transactional, and never numbered.
    producers = state(
        data(P, 99, sequence=-1, transactional=True), data(P, 100, sequence=-1, transactional=True)
    )
    assert producers.entries[P] == ProducerEntry(P, 0, -1, 100, 0, 0, -1, 99)


def test_batches_without_a_producer_only_move_the_end() -> None:
    producers = state(data(-1, 0, epoch=-1, sequence=-1, count=5))
    assert (len(producers), producers.end_offset) == (0, 5)


def test_control_batches_without_a_producer_only_move_the_end() -> None:
    leader_change = marker(-1, 7, epoch=-1)
    producers = Producers()
    assert producers.append(leader_change.header, ControlRecord(2, 0)) is None
    assert producers.append(leader_change.header) is None
    assert (len(producers), producers.end_offset) == (0, 8)


def test_messages_v1_only_move_the_end() -> None:
    header = BatchHeader(0, 40, -1, 1, 0, 0, 9, 5, 5, -1, -1, -1, -1)
    assert state(Item(header)) == Producers(end_offset=10)


def test_a_batch_the_cleaner_has_emptied_still_is_the_last_one() -> None:
    producers = state(data(P, 0, sequence=0), data(P, 1, sequence=1, count=3, time=9, records=0))
    assert producers.entries[P] == ProducerEntry(P, 0, 3, 3, 2, 9, -1, -1)


def test_an_emptied_transactional_batch_opens_its_transaction() -> None:
    producers = state(data(P, 4, transactional=True, records=0))
    assert producers.first_unstable_offset() == 4


# --- markers -------------------------------------------------------------------------------------


def test_a_marker_makes_its_producer_known() -> None:
    producers, aborted = replay([marker(P, 27, COMMIT, epoch=2, coordinator=6, time=44)])
    assert producers.entries == {P: ProducerEntry(P, 2, -1, -1, 0, 44, 6, -1)}
    assert (producers.end_offset, aborted) == (28, [])
    assert state(marker(P, 27, epoch=2), data(P, 28, epoch=2, sequence=0)).entries[P] == (
        ProducerEntry(P, 2, 0, 28, 0, 0, 0, -1)
    )


def test_an_abort_marker_without_a_transaction_aborts_none() -> None:
    _, aborted = replay([data(P, 0), marker(P, 1, ABORT), marker(P, 2, ABORT)])
    assert aborted == []


def test_a_marker_of_the_same_epoch_keeps_the_last_batch() -> None:
    producers = state(
        data(P, 9, sequence=0),
        data(P, 16, sequence=1, count=5, transactional=True),
        data(P, 26, sequence=6, count=5, transactional=True),
        marker(P, 40, COMMIT, coordinator=15, time=3),
    )
    assert producers.entries[P] == ProducerEntry(P, 0, 10, 30, 4, 3, 15, -1)


@pytest.mark.parametrize("epoch", [0, 2])
def test_a_marker_of_another_epoch_makes_the_last_batch_be_forgotten(epoch: int) -> None:
    before = data(P, 0, epoch=1, sequence=5, count=3, transactional=True)
    producers, aborted = replay([before, marker(P, 3, ABORT, epoch=epoch)])
    assert producers.entries[P] == ProducerEntry(P, epoch, -1, -1, 0, 0, 0, -1)
    assert aborted == [AbortedTransaction(P, 0, 3, 4)]
    after, _ = replay([data(P, 4, epoch=epoch, sequence=0)], producers)
    assert after.entries[P].last_sequence == 0


def test_a_fenced_producer_does_not_expire_before_its_time() -> None:
    producers = state(
        data(P, 0, transactional=True, time=100), marker(P, 1, ABORT, epoch=1, time=100)
    )
    producers.expire(100 + EXPIRATION_MS - 1)
    assert producers.entries[P].producer_epoch == 1


def test_coordinator_epochs_are_taken_over_even_if_they_fall() -> None:
    epochs = [
        state(data(P, 0, transactional=True), *markers).entries[P].coordinator_epoch
        for markers in (
            [marker(P, 1, coordinator=1)],
            [marker(P, 1, coordinator=1), marker(P, 2, coordinator=1)],
            [marker(P, 1, coordinator=1), marker(P, 2, coordinator=2)],
            [marker(P, 1, coordinator=2), marker(P, 2, coordinator=1)],
        )
    ]
    assert epochs == [1, 1, 2, 1]


def test_a_log_with_falling_coordinator_epochs_loads() -> None:
    # LogLoaderTest.testRecoverAfterNonMonotonicCoordinatorEpochWrite
    items = [
        data(P, 0, epoch=5, transactional=True),
        marker(P, 1, ABORT, epoch=5, coordinator=1),
        data(P, 2, epoch=5, sequence=1, transactional=True),
        marker(P, 3, ABORT, epoch=5, coordinator=0),
    ]
    producers, aborted = replay(items)
    assert [(found.first_offset, found.last_offset) for found in aborted] == [(0, 1), (2, 3)]
    assert producers.entries[P].coordinator_epoch == 0
    assert replay(items[2:], reloaded(state(*items[:2])))[0] == producers


def test_the_time_of_a_marker_is_its_records_where_it_is_known() -> None:
    item = marker(P, 0, time=5)
    producers = Producers()
    producers.append(item.header, ControlRecord(COMMIT, 0, 0, timestamp=3))
    assert producers.entries[P].timestamp == 3
    producers.append(item.header, ControlRecord(COMMIT, 0, 0))
    assert producers.entries[P].timestamp == 5


def test_a_control_batch_without_records_ends_no_transaction() -> None:
    rest = marker(P, 15, empty=True)
    assert state(rest).entries == {P: ProducerEntry(P)}
    producers = state(data(P, 14, epoch=4, transactional=True, time=8), rest)
    assert producers.entries[P] == ProducerEntry(P, 4, 0, 14, 0, 8, -1, 14)
    assert (producers.first_unstable_offset(), producers.end_offset) == (14, 16)


def test_a_control_batch_with_a_record_needs_what_it_says() -> None:
    with pytest.raises(InvalidInputError, match="control batch at offset 6 has a record"):
        Producers().append(marker(P, 6).header)


@pytest.mark.parametrize("kind", [2, 6, 7, -1])
def test_a_control_record_other_than_a_marker_is_skipped(kind: int) -> None:
    producers = state(data(P, 0, transactional=True))
    assert producers.append(marker(P, 1).header, ControlRecord(kind, 0)) is None
    assert (producers.first_unstable_offset(), producers.end_offset) == (0, 2)


# --- what a broker cannot replay -----------------------------------------------------------------


def test_data_outside_the_open_transaction_is_refused_by_brokers_and_replayed_here() -> None:
    producers = state(data(P, 3, sequence=0, transactional=True))
    plain = data(P, 4, sequence=1)
    refusal = producers.refusal(plain.header)
    assert refusal is not None
    assert "offset 4" in refusal
    assert "producer 1" in refusal
    assert "since offset 3" in refusal
    producers.append(plain.header)
    assert producers.entries[P] == ProducerEntry(P, 0, 1, 4, 0, 0, -1, 3)


def test_a_producers_control_record_that_is_not_a_marker_is_refused_by_brokers() -> None:
    refusal = Producers().refusal(marker(P, 1).header, ControlRecord(2, 0))
    assert refusal is not None
    assert "type 2" in refusal


def test_whatever_a_broker_writes_it_can_replay() -> None:
    producers = state(data(P, 3, transactional=True))
    fine = [
        data(P, 4, sequence=7, transactional=True),
        data(P, 4, epoch=9, transactional=True),
        data(Q, 4),
        data(-1, 4, epoch=-1, sequence=-1),
        marker(P, 4, ABORT, epoch=3),
        marker(P, 4, empty=True),
        marker(Q, 4),
        Item(marker(-1, 4).header, ControlRecord(2, 0)),
    ]
    assert [producers.refusal(item.header, item.control) for item in fine] == [None] * len(fine)


# --- stable and unstable offsets -----------------------------------------------------------------


def test_the_first_unstable_offset_is_that_of_the_oldest_open_transaction() -> None:
    producers = Producers()
    seen = []
    for item in [
        data(P, 99, transactional=True),
        data(Q, 105, transactional=True),
        marker(P, 109, COMMIT),
        marker(Q, 112, ABORT),
    ]:
        producers.append(item.header, item.control)
        seen.append(producers.first_unstable_offset())
    assert seen == [99, 99, 105, None]


def test_a_transaction_begins_with_its_first_batch() -> None:
    producers = state(data(P, 992_342, transactional=True), data(P, 992_343, transactional=True))
    assert producers.first_unstable_offset() == 992_342


def test_the_last_stable_offset_is_between_log_start_and_high_watermark() -> None:
    assert Producers().last_stable_offset(50) == 50
    producers = state(data(P, 7, transactional=True), data(Q, 8))
    assert producers.last_stable_offset(9) == 7
    assert producers.last_stable_offset(5) == 5
    assert producers.last_stable_offset(9, log_start=8) == 8


def test_an_aborted_transaction_is_stable_up_to_the_oldest_one_still_open() -> None:
    # As in ProducerStateManagerTest.testLastStableOffsetCompletedTxn.
    _, aborted = replay(
        [
            data(P, 90, transactional=True),
            data(Q, 95, transactional=True),
            data(R, 100, transactional=True),
            marker(P, 105, ABORT),
            marker(R, 106, ABORT),
            marker(Q, 107, ABORT),
        ]
    )
    assert aborted == [
        AbortedTransaction(P, 90, 105, 95),
        AbortedTransaction(R, 100, 106, 95),
        AbortedTransaction(Q, 95, 107, 108),
    ]


def test_transactions_without_data_leave_no_trace() -> None:
    # ProducerStateManagerTest.testSkipEmptyTransactions, replayed.
    producers, aborted = replay(
        [
            data(P, 16, sequence=0, count=5, transactional=True),
            marker(P, 21, COMMIT),
            marker(P, 22, COMMIT),
            marker(P, 23, ABORT),
            data(P, 24, sequence=5, count=4, transactional=True),
            marker(P, 28, ABORT),
            marker(P, 29, ABORT),
            data(P, 30, sequence=9, count=2, transactional=True),
        ]
    )
    assert aborted == [AbortedTransaction(P, 24, 28, 29)]
    assert producers.first_unstable_offset() == 30


# --- expiry --------------------------------------------------------------------------------------


def test_who_was_silent_for_long_is_forgotten() -> None:
    producers = state(data(P, 1, time=1000), data(Q, 2, time=1001))
    producers.expire(1000 + EXPIRATION_MS)
    assert list(producers.entries) == [Q]
    assert producers.end_offset == 3
    producers.append(data(P, 3, sequence=1, time=EXPIRATION_MS).header)
    assert producers.entries[P].last_sequence == 1


def test_how_long_is_for_the_caller_to_say() -> None:
    producers = state(data(P, 0, time=1000))
    producers.expire(1009, 10)
    assert len(producers) == 1
    producers.expire(1010, 10)
    assert len(producers) == 0


def test_who_has_a_transaction_open_is_never_forgotten() -> None:
    producers = state(data(P, 99, transactional=True, time=0))
    producers.expire(10 * EXPIRATION_MS)
    assert producers.first_unstable_offset() == 99
    producers.append(marker(P, 100, time=0).header, ControlRecord(COMMIT, 0, 0, 0))
    producers.expire(10 * EXPIRATION_MS)
    assert len(producers) == 0


# --- the object ----------------------------------------------------------------------------------


def test_a_copy_goes_its_own_way() -> None:
    producers = state(data(P, 0, transactional=True))
    other = producers.copy()
    assert other == producers
    replay([data(P, 1, sequence=1, transactional=True), marker(P, 2, ABORT)], other)
    assert producers == state(data(P, 0, transactional=True))
    assert producers.first_unstable_offset() == 0
    assert other.first_unstable_offset() is None


def test_producers_are_equal_if_their_entries_and_their_ends_are() -> None:
    assert state(data(P, 0)) == state(data(P, 0))
    assert state(data(P, 0)) != state(data(P, 0, time=1))
    assert Producers(end_offset=1) != Producers(end_offset=2)
    assert Producers() != object()


# --- against the model ---------------------------------------------------------------------------


def model_entry(items: Sequence[Item], producer_id: int) -> ProducerEntry:
    """What the whole log says of a producer, looked up field by field."""
    mine = [item for item in items if item.header.producer_id == producer_id]
    acts = [item for item in mine if not item.is_rest]
    if not acts:
        return ProducerEntry(producer_id)
    markers = [at for at, item in enumerate(acts) if item.control is not None]
    in_transaction = acts[markers[-1] + 1 if markers else 0 :]
    opening = [item.header.base_offset for item in in_transaction if item.header.is_transactional]
    epoch = acts[-1].header.producer_epoch
    others = [at for at, item in enumerate(acts) if item.header.producer_epoch != epoch]
    of_epoch = acts[others[-1] + 1 if others else 0 :]
    last = next((item.header for item in reversed(of_epoch) if item.control is None), None)
    entry = ProducerEntry(producer_id, epoch, timestamp=acts[-1].header.max_timestamp)
    if last is not None:
        delta = last.last_offset_delta
        if last.base_sequence >= 0:
            entry.last_sequence = (last.base_sequence + delta) % 2**31
        entry.last_offset, entry.offset_delta = last.base_offset + delta, delta
    if markers:
        control = acts[markers[-1]].control
        assert control is not None
        entry.coordinator_epoch = control.coordinator_epoch
    if opening:
        entry.current_txn_first_offset = opening[0]
    return entry


def model_transactions(items: Sequence[Item]) -> list[tuple[int, int, int | None, bool]]:
    """(producer, first offset, offset of its marker or None, was it aborted) of each."""
    found: list[tuple[int, int, int | None, bool]] = []
    for at, item in enumerate(items):
        header = item.header
        if header.is_control or not header.is_transactional or header.producer_id < 0:
            continue
        before = [i for i in items[:at] if i.header.producer_id == header.producer_id]
        after = [i for i in items[at:] if i.header.producer_id == header.producer_id]
        since = max((n for n, i in enumerate(before) if i.control is not None), default=-1)
        if any(i.header.is_transactional and not i.is_rest for i in before[since + 1 :]):
            continue
        end = next((i for i in after if i.control is not None), None)
        if end is None or end.control is None:
            found.append((header.producer_id, header.base_offset, None, False))
        else:
            kind = end.control.type
            found.append(
                (header.producer_id, header.base_offset, end.header.base_offset, kind == ABORT)
            )
    return found


def model_aborted(items: Sequence[Item]) -> list[AbortedTransaction]:
    transactions = model_transactions(items)
    aborted = []
    for producer_id, first, end, is_aborted in transactions:
        if end is None or not is_aborted:
            continue
        open_then = [f for _, f, e, _ in transactions if f < end and (e is None or e > end)]
        stable = min(open_then, default=end + 1)
        aborted.append(AbortedTransaction(producer_id, first, end, stable))
    return sorted(aborted, key=lambda found: found.last_offset)


@st.composite
def logs(draw: st.DrawFn) -> list[Item]:
    items = []
    offset = draw(st.integers(0, 2**40))
    for _ in range(draw(st.integers(0, 25))):
        offset += draw(st.sampled_from([0, 0, 0, 1, 1000]))
        producer_id = draw(st.sampled_from([-1, P, Q, R, 2**63 - 1]))
        epoch = draw(st.sampled_from([0, 0, 0, 1, 32767]))
        time = draw(st.integers(-1, 2**60))
        if draw(st.booleans()):
            count = draw(st.integers(1, 5))
            sequence = draw(st.sampled_from([-1, 0, 7, INT_MAX - 2, INT_MAX]))
            items.append(
                data(
                    producer_id,
                    offset,
                    epoch=epoch,
                    sequence=sequence,
                    count=count,
                    time=time,
                    transactional=draw(st.booleans()),
                    records=draw(st.sampled_from([count, 0])),
                )
            )
        else:
            items.append(
                marker(
                    producer_id,
                    offset,
                    draw(st.sampled_from([ABORT, COMMIT])),
                    epoch=epoch,
                    coordinator=draw(st.integers(0, 9)),
                    time=time,
                    empty=draw(st.sampled_from([False, False, True])),
                )
            )
        offset = items[-1].header.next_offset
    return items


@given(logs())
@settings(max_examples=100, deadline=None)
def test_a_replay_finds_what_the_whole_log_says(items: list[Item]) -> None:
    producers, aborted = replay(items)
    known = {item.header.producer_id for item in items} - {-1}
    assert producers.entries == {number: model_entry(items, number) for number in known}
    assert aborted == model_aborted(items)
    undecided = [first for _, first, end, _ in model_transactions(items) if end is None]
    assert producers.first_unstable_offset() == min(undecided, default=None)
    assert producers.end_offset == (items[-1].header.next_offset if items else 0)


@given(logs(), st.integers(0, 25))
@settings(max_examples=60, deadline=None)
def test_a_replay_may_be_interrupted_by_a_snapshot_anywhere(items: list[Item], at: int) -> None:
    before, aborted_before = replay(items[:at])
    after, aborted_after = replay(items[at:], reloaded(before))
    whole, aborted = replay(items)
    assert after == whole
    assert aborted_before + aborted_after == aborted


def test_cleaning_away_all_but_the_last_batches_changes_no_producer() -> None:
    """C75, C81: what the cleaner keeps empty for a producer's sake is all its state hangs on."""
    rng = random.Random(81)
    items = []
    sequences = dict.fromkeys((P, Q, R), 0)
    offset = 0
    for _ in range(60):
        producer_id = rng.choice((P, Q, R))
        count = rng.randint(1, 4)
        items.append(
            data(producer_id, offset, sequence=sequences[producer_id], count=count, time=offset)
        )
        sequences[producer_id] += count
        offset += count
    last = {item.header.producer_id: item for item in items}
    cleaned = [
        data(
            item.header.producer_id,
            item.header.base_offset,
            sequence=item.header.base_sequence,
            count=item.header.last_offset_delta + 1,
            time=item.header.max_timestamp,
            records=0,
        )
        for item in items
        if item in last.values()
    ]
    assert len(cleaned) == 3
    assert state(*cleaned) == state(*items)
    assert {n: e.last_sequence for n, e in state(*cleaned).entries.items()} == {
        number: following - 1 for number, following in sequences.items()
    }
