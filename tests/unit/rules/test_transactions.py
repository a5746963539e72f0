"""Transactions and producers under the cleaner; the examples and their numbers are Kafka's."""

from __future__ import annotations

import struct

import pytest
from crc32c import crc32c

from tests.builders.batch_builder import CONTROL, TRANSACTIONAL, Record, end_marker
from tests.unit.cleaner.naive import Batch
from tests.unit.rules.acts import Written
from tests.unit.rules.places import DAY_MS as DAY
from tests.unit.rules.places import Place

# --- whose data goes -----------------------------------------------------------------------------


def test_aborted_data_goes_and_older_committed_records_of_its_keys_stay(place: Place) -> None:
    """Kafka: testBasicTransactionAwareCleaning."""
    log = Written.create(place)
    log.transact(1, 1, 2)
    log.transact(2, 2, 3)
    log.transact(1, 3, 4)
    log.abort(1)
    log.commit(2)
    log.transact(1, 2)
    log.commit(1)
    log.roll()
    log.clean()
    assert (log.keys(), log.offsets()) == ([3, 2], [3, 6, 7, 8, 9])
    assert log.indexed() == [(1, 0, 6)]


def test_transactions_that_span_segments_are_told_apart(place: Place) -> None:
    """Kafka: testCleanWithTransactionsSpanningSegments."""
    log = Written.create(place)
    log.transact(1, 1, 2)
    log.transact(3, 2, 3)
    log.transact(2, 3, 4)
    log.roll()
    log.transact(2, 5, 6)
    log.transact(3, 6, 7)
    log.transact(1, 7, 8)
    log.abort(2)
    log.transact(3, 8, 9)
    log.commit(3)
    log.transact(1, 9, 10)
    log.abort(1)
    log.clean()  # the first segment alone
    assert log.keys() == [2, 3, 5, 6, 6, 7, 7, 8, 8, 9, 9, 10]
    log.roll()
    log.transact(2, 11)
    log.transact(1, 12)
    log.clean()
    assert log.keys() == [2, 3, 6, 7, 8, 9, 11, 12]


def test_keys_that_look_like_a_markers_do_not_meet_it(place: Place) -> None:
    """Kafka: testCleaningWithKeysConflictingWithTxnMarkerKeys."""
    log = Written.create(place)
    log.transact(1, 1)
    log.commit(1)
    marker = log.batches()[1].records[0].key
    log.data(2)
    place.append((marker, "x"), now_ms=0)
    log.roll()
    log.clean()
    assert (log.offsets(), log.last_offsets()) == ([0, 1, 2, 3], [0, 1, 2, 3])


def test_nothing_at_or_above_the_last_stable_offset_is_touched(place: Place) -> None:
    log = Written.create(place)
    log.data(1)
    log.roll()
    log.transact(1, 1)
    log.roll()
    log.data(1)
    log.roll()
    log.data(1)
    log.clean()
    assert log.first_dirty_offset == 1
    assert log.keys() == [1, 1, 1, 1]
    log.commit(1)
    log.clean()
    assert (log.first_dirty_offset, log.offsets()) == (3, [2, 3, 4])


# --- markers -------------------------------------------------------------------------------------


def test_a_commit_marker_goes_in_two_stages_once_its_data_is_gone(place: Place) -> None:
    """Kafka: testCommitMarkerRemoval."""
    log = Written.create(place)
    log.transact(1, 1)
    log.transact(1, 2, 3)
    log.commit(1)
    log.transact(1, 2)
    log.commit(1)
    log.roll()
    log.clean()
    assert (log.keys(), log.offsets()) == ([1, 3, 2], [0, 2, 3, 4, 5])
    log.transact(1, 1, 3)
    log.commit(1)
    log.roll()
    log.clean()  # its data was still there
    assert [batch.horizon for batch in log.batches()] == [None] * 5
    assert (log.keys(), log.offsets()) == ([2, 1, 3], [3, 4, 5, 6, 7, 8])
    for _ in range(2):
        log.clean()
        assert [batch.horizon for batch in log.batches()] == [DAY, None, None, None, None]
        assert log.offsets() == [3, 4, 5, 6, 7, 8]
    log.clean(DAY - 1)
    assert log.offsets() == [3, 4, 5, 6, 7, 8]
    log.clean(DAY)
    assert (log.keys(), log.offsets()) == ([2, 1, 3], [4, 5, 6, 7, 8])


def test_an_abort_marker_goes_in_two_stages_after_its_data(place: Place) -> None:
    """Kafka: testAbortMarkerRemoval."""
    log = Written.create(place)
    log.transact(1, 1)
    log.transact(1, 2, 3)
    log.abort(1)
    log.transact(1, 3)
    log.commit(1)
    log.roll()
    log.clean()
    assert (log.keys(), log.offsets()) == ([3], [3, 4, 5])
    assert log.indexed() == [(1, 0, 3)]
    log.clean()
    assert [batch.horizon for batch in log.batches()] == [DAY, None, None]
    assert log.indexed() == []
    log.clean(DAY)
    assert (log.keys(), log.offsets()) == ([3], [4, 5])


def test_batches_that_go_whole_are_not_looked_into(place: Place) -> None:
    """Kafka: testDeletedBatchesWithNoMessagesRead."""
    log = Written.create(place, max_message_bytes="100")
    log.transact(1, 1)
    log.abort(1)
    log.transact(1, 2)
    log.transact(1, 2)
    log.commit(1)
    log.roll()
    size = place.sizes()[0]
    stats = log.clean()
    assert (log.keys(), log.offsets()) == ([2], [1, 3, 4])
    assert (stats.records_read, stats.records_kept) == (4, 3)
    assert stats.bytes_read == size  # with those of the batch whose records were not
    log.clean_twice(from_offset=0)
    assert (log.keys(), log.offsets()) == ([2], [3, 4])


def test_batches_that_go_whole_are_not_decoded(place: Place) -> None:
    """What does not decode, but has the right checksum, tells whether anybody has tried."""
    log = Written.create(place)
    batch = Batch(0, 2, (Record(0, 0, b"1", b"0"),), producer=1, attributes=TRANSACTIONAL)
    header = bytearray(batch.data)
    struct.pack_into(">i", header, 57, 3)  # three records, of which there is one
    struct.pack_into(">I", header, 17, crc32c(bytes(header[21:])))
    place.append_bytes(bytes(header), now_ms=0)
    log.end, log.running[1] = 3, 0
    log.abort(1)
    log.data(1)
    log.roll()
    stats = log.clean()
    assert (stats.records_read, stats.records_kept) == (2, 2)  # the marker and the last one
    assert log.offsets() == [3, 4]


@pytest.mark.parametrize("end", ["commit", "abort"])
def test_a_marker_stays_while_data_of_an_earlier_segment_does(place: Place, end: str) -> None:
    """Kafka: testCommittedTransactionSpanningSegments, testAbortedTransactionSpanningSegments."""
    log = Written.create(place, segment_bytes="75")
    log.transact(1, 1, time=2 * DAY)
    log.roll()
    getattr(log, end)(1, time=2 * DAY)
    log.roll()
    for _ in range(2):
        log.clean_twice()
        assert log.offsets() == ([0, 1] if end == "commit" else [1])
        assert log.last_offsets() == [0, 1]  # the producer's last batch stays, if need be empty


def test_a_marker_without_any_data_leaves_an_empty_batch_of_its_producer(place: Place) -> None:
    """Kafka: testCleanEmptyControlBatch."""
    log = Written.create(place)
    log.commit(1, time=DAY)
    log.data(2)
    log.data(3)
    log.roll()
    log.clean_twice()
    for _ in range(2):
        assert (log.keys(), log.offsets(), log.last_offsets()) == ([2, 3], [1, 2], [0, 1, 2])
        (empty, *_) = log.batches()
        assert (empty.attributes, empty.horizon) == (TRANSACTIONAL | CONTROL, None)
        log.clean(DAY + 5)


def test_an_empty_batch_keeps_the_commit_marker(place: Place) -> None:
    """Kafka: testCommitMarkerRetentionWithEmptyBatch."""
    log = Written.create(place)
    log.transact(1, 2, 3, time=DAY)
    log.roll()
    log.transact(2, 2, 3, time=DAY)
    log.commit(2, time=DAY)
    log.roll()
    log.data(2)
    log.data(3)
    log.commit(1, time=DAY)
    log.roll()
    for _ in range(3):
        log.clean()
        assert (log.keys(), log.offsets()) == ([2, 3], [4, 5, 6, 7])
        assert log.last_offsets() == [1, 3, 4, 5, 6, 7]
    log.transact(2, 1, time=DAY)
    log.commit(2, time=DAY)
    log.roll()
    log.clean()
    assert (log.keys(), log.offsets()) == ([2, 3, 1], [4, 5, 6, 7, 8, 9])
    assert log.last_offsets() == [1, 4, 5, 6, 7, 8, 9]
    log.clean_twice()
    assert (log.keys(), log.offsets()) == ([2, 3, 1], [5, 6, 7, 8, 9])
    assert log.last_offsets() == [1, 5, 6, 7, 8, 9]


def test_an_empty_batch_keeps_the_abort_marker_and_its_index_entry(place: Place) -> None:
    """Kafka: testAbortMarkerRetentionWithEmptyBatch."""
    log = Written.create(place)
    log.transact(1, 2, 3, time=DAY)
    log.abort(1, time=DAY)
    log.roll()
    assert log.indexed() == [(1, 0, 2)]
    for _ in range(3):
        log.clean_twice()
        assert (log.keys(), log.offsets(), log.last_offsets()) == ([], [2], [1, 2])
        assert log.indexed() == [(1, 0, 2)]
    log.transact(1, 1, time=DAY)
    log.commit(1, time=DAY)
    log.roll()
    log.clean()
    assert (log.keys(), log.offsets(), log.last_offsets()) == ([1], [2, 3, 4], [2, 3, 4])
    assert log.indexed() == [(1, 0, 2)]  # the empty batch was met in this round
    log.clean_twice()
    assert (log.keys(), log.offsets(), log.last_offsets()) == ([1], [3, 4], [3, 4])
    assert log.indexed() == []


def test_rounds_that_end_within_transactions_keep_what_the_next_ones_need(place: Place) -> None:
    """Kafka: testMultiPassSegmentCleaningWithAbortedTransactions."""
    log = Written.create(place)
    log.transact(1, 1, 2)
    log.transact(2, 2, 3)
    log.transact(1, 3, 4)
    log.commit(1)
    log.commit(2)
    log.transact(1, 2, 3)
    log.abort(1)
    log.transact(2, 4, 5)
    log.transact(1, 5, 6)
    log.commit(1)
    log.abort(2)
    log.transact(2, 6, 7)
    log.commit(2)
    log.roll()
    entries = [(1, 8, 10), (2, 11, 16)]
    assert log.indexed() == entries
    three = {"dedupe_buffer_size": 24 * 4}  # keys
    assert log.clean(**three).end_offset == 4
    assert [batch.base for batch in log.batches()] == [0, 2, 4, 6, 7, 10, 13, 15, 16, 17, 19]
    assert log.offsets() == [0, 2, 3, 4, 5, 6, 7, 10, 13, 14, 15, 16, 17, 18, 19]
    assert log.indexed() == entries
    assert log.clean(**three).end_offset == 14
    assert [batch.base for batch in log.batches()] == [0, 2, 4, 6, 7, 10, 13, 15, 16, 17, 19]
    assert log.offsets() == [0, 2, 4, 5, 6, 7, 10, 13, 14, 15, 16, 17, 18, 19]
    assert log.indexed() == []
    assert log.clean(DAY, **three).end_offset == 20
    assert [batch.base for batch in log.batches()] == [0, 2, 4, 6, 7, 13, 15, 17, 19]
    assert log.offsets() == [0, 2, 4, 5, 6, 7, 13, 15, 17, 18, 19]
    assert log.indexed() == []


def test_markers_of_the_quorum_and_of_a_later_kafka_stay(place: Place) -> None:
    log = Written.create(place)
    log.data(1)
    for kind in (2, 3, 77):
        leader_change = Batch(
            log.end, log.end, (Record(log.end, 0, *end_marker(kind)),), attributes=CONTROL
        )
        log._append(leader_change)
    log.roll()
    log.clean_twice(from_offset=0)
    assert [(b.base, b.horizon) for b in log.batches()] == [(i, None) for i in range(4)]


# --- the last batches of producers ---------------------------------------------------------------


def test_a_producers_last_batch_keeps_its_sequence(place: Place) -> None:
    """Kafka: testLogCleanerRetainsProducerLastSequence."""
    log = Written.create(place)
    log.data(0)
    log.data(0, producer=1)
    log.data(0, producer=2)
    log.data(0, producer=3)
    log.data(1, producer=2)
    log.roll()
    log.clean()
    assert (log.offsets(), log.last_offsets()) == ([3, 4], [1, 3, 4])
    assert {b.producer: b.sequence for b in log.batches()} == {1: 0, 2: 1, 3: 0}


def test_a_producers_last_batch_stays_empty_also_if_it_was_aborted(place: Place) -> None:
    """Kafka: testLogCleanerRetainsLastSequenceEvenIfTransactionAborted."""
    log = Written.create(place)
    for _ in range(3):
        log.transact(1, 1, time=DAY)
    log.abort(1, time=DAY)
    log.roll()
    log.clean()
    assert (log.offsets(), log.last_offsets()) == ([3], [2, 3])
    assert log.batches()[0].sequence == 2
    log.transact(1, 2, time=DAY)
    log.commit(1, time=DAY)
    log.roll()
    log.clean()
    log.clean_twice()
    assert (log.keys(), log.last_offsets()) == ([2], [4, 5])


def test_producer_sequences_survive_repeated_cleanings(place: Place) -> None:
    """Kafka: testDuplicateCheckAfterCleaning."""
    log = Written.create(place)
    log.data(1, 2, 3, producer=1)
    log.data(3, 1, 4, producer=2)
    log.data(1, 4, producer=3)
    log.roll()
    log.clean()
    assert (log.keys(), log.offsets()) == ([2, 3, 1, 4], [1, 3, 6, 7])
    assert log.last_offsets() == [2, 5, 7]
    log.data(2, producer=4)
    log.roll()
    log.clean()
    assert (log.keys(), log.offsets()) == ([3, 1, 4, 2], [3, 6, 7, 8])
    # Producer 1's batch is empty, and says its last sequence number still.
    assert [(b.producer, b.sequence + b.last - b.base) for b in log.batches()] == [
        (1, 2),
        (2, 2),
        (3, 1),
        (4, 0),
    ]


def test_the_last_batch_below_an_empty_active_segment_stays_empty(place: Place) -> None:
    """Kafka: testCleanSegmentsRetainingLastEmptyBatch, testCleanSegmentsNotRetainingLastEmptyBatch.

    The newer rule: only where the batch ends at the high watermark, not at the end of the round.
    """
    log = Written.create(place)
    for _ in range(4):
        log.transact(1, 1)
        log.roll()
    log.abort(1)
    log.roll()
    log.clean_twice(DAY)  # and the producer has expired
    log.clean(3 * DAY + 2)
    (left,) = log.batches()
    assert (left.base, left.last, left.records) == (4, 4, ())
    log.data(2)
    log.clean(3 * DAY + 3)
    assert log.last_offsets() == [5]


def test_old_empty_batches_go_though_sequences_begin_anew(place: Place) -> None:
    """Kafka: testEmptyBatchRemovalWithSequenceReuse."""
    log = Written.create(place)
    for key in (1, 2):
        log.sequences.clear()
        log.transact(1, key, time=DAY)
        log.commit(1, time=DAY)
    log.data(1)
    log.data(2)
    log.roll()
    log.clean()
    assert (log.offsets(), log.last_offsets()) == ([1, 3, 4, 5], [1, 2, 3, 4, 5])
    log.clean_twice(from_offset=0)
    assert (log.offsets(), log.last_offsets()) == ([3, 4, 5], [2, 3, 4, 5])


def test_an_expired_producer_keeps_no_batch(place: Place) -> None:
    log = Written.create(place)
    log.data(1, producer=1, time=1_000)
    log.data(1)
    log.roll()
    log.clean(1_000 + DAY - 1)
    assert log.last_offsets() == [0, 1]
    log.clean(1_000 + DAY)
    assert log.last_offsets() == [1]


# --- batches -------------------------------------------------------------------------------------


def test_a_batch_that_ends_below_the_high_watermark_goes_without_its_records(
    place: Place,
) -> None:
    log = Written.create(place)
    log.data(1)
    log.data(1, 2)
    log.roll()
    log.clean()
    assert [(b.base, b.last) for b in log.batches()] == [(1, 2)]


def test_a_marker_past_the_range_of_horizons_stays(place: Place) -> None:
    log = Written.create(place)
    log.transact(1, 1)
    log.commit(1)
    log.data(1)
    log.roll()
    for _ in range(3):
        log.clean(2**63 - 1 - DAY + 1, from_offset=0)
    assert [(b.base, b.horizon) for b in log.batches()] == [(1, None), (2, None)]


def test_the_earliest_horizon_is_that_of_a_marker_too(place: Place) -> None:
    log = Written.create(place)
    log.transact(1, 1)
    log.commit(1)
    log.data(1)
    log.roll()
    log.clean(2 * DAY)
    assert place.status(0).earliest_delete_horizon_ms is None  # its data was met in this round
    log.clean(2 * DAY + 1)
    assert place.status(0).earliest_delete_horizon_ms == 3 * DAY + 1
    log.clean(2 * DAY + 7)
    assert place.status(0).earliest_delete_horizon_ms == 3 * DAY + 1
    log.clean(3 * DAY + 1)
    assert place.status(0).earliest_delete_horizon_ms is None
    assert log.offsets() == [2]


@pytest.mark.parametrize("compression", ["uncompressed", "zstd"])
def test_a_record_in_a_transaction_is_obsolete_and_supersedes_like_any_other(
    place: Place, compression: str
) -> None:
    log = Written.create(place, compression_type=compression)
    log.data(1, 2)
    log.transact(1, 1, 3)
    log.commit(1)
    log.data(3)
    log.roll()
    log.clean()
    assert log.keys() == [2, 1, 3]


def test_a_tombstone_in_a_transaction_goes_in_two_stages(place: Place) -> None:
    log = Written.create(place)
    log.data(1, 2)
    log._append(
        Batch(2, 2, (Record(2, 0, b"1", None),), producer=1, sequence=0, attributes=TRANSACTIONAL)
    )
    log.commit(1)
    log.roll()
    log.clean()
    assert [(b.base, b.horizon) for b in log.batches()] == [(0, None), (2, DAY), (3, None)]
    log.clean(DAY)
    assert log.keys() == [2]


def test_a_batch_of_before_1970_is_taken_and_cleaned(place: Place) -> None:
    log = Written.create(place)
    for _ in range(2):
        log.data(1, time=-DAY)
    log.roll()
    log.clean()
    assert log.offsets() == [1]
