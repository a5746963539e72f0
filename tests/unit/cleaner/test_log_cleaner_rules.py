"""What Kafka's LogCleanerTest says, with its numbers: rounds, groups, deletions, faults.

Each test names in its docstring the one of Kafka's, or the rules, that it stands for. Kafka's tests
of transactions are in test_transactions.py, those of the offset map in test_log_cleaner_rules_map.
"""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from kafkalog.cleaner.directory.directory_moment import DirectoryMoment
from kafkalog.cleaner.schedule.manager import clean, retain
from kafkalog.storage_engine.directory.directory_log import DirectoryLog
from kafkalog.storage_engine.format import layout
from kafkalog.storage_engine.segment.segments import SegmentFiles, list_segments
from kafkalog.storage_engine.transactions.producer_replay import recorded_producers
from tests.builders.batch_builder import Record
from tests.builders.log_builder import LogBuilder
from tests.unit.cleaner.naive import Batch, batch, dump, foreign_log, offsets, records_of
from tests.unit.cleaner.transactional_log import DAY, Log, kafkas

MAX = 2**31 - 1
NOW = 10 * DAY


def segments(log: Log) -> list[SegmentFiles]:
    """All live segments, the active one last."""
    with log.engine.snapshot("t", 0, whole=True) as snapshot:
        return list(snapshot.segments)


def closed(log: Log) -> list[SegmentFiles]:
    return segments(log)[:-1]


def fill(log: Log, count: int, keys: int = 10**9) -> None:
    """Append records, each in a batch, until there are so many segments."""
    while len(segments(log)) < count:
        log.data(log.end % keys)


def opened(engine: DirectoryLog) -> Log:
    return Log(engine, engine.offsets("t")[0][1])


def values(log: Log) -> list[int]:
    """The keys of the records that have a value."""
    return [int(r.key or b"-1") for r in records_of(log.batches()) if r.value is not None]


# --- rounds --------------------------------------------------------------------------------------


def test_keys_that_occur_again_go_and_every_byte_is_read(tmp_path: Path) -> None:
    """testCleanSegments (C44, C48)"""
    log = Log.create(tmp_path, segment_bytes="1024")
    fill(log, 4)
    first_dirty = segments(log)[-1].base_offset
    end = log.end
    log.data(1, 3, 5, 7, 9, 0)
    log.roll()
    expected_bytes = sum(segment.size for segment in closed(log))
    stats = log.clean(from_offset=first_dirty)
    gone = {0, 1, 3, 5, 7, 9}
    assert log.keys() == [key for key in range(end) if key not in gone] + [1, 3, 5, 7, 9, 0]
    assert stats.bytes_read == expected_bytes
    # The first segment keeps its name, though its first record is gone.
    assert (segments(log)[0].base_offset, log.offsets()[0]) == (0, 2)


def test_a_segment_that_holds_an_uncleanable_offset_is_left_as_it_is(tmp_path: Path) -> None:
    """testCleaningWithUncleanableSection (C31)"""
    log = Log.create(tmp_path, segment_bytes="1024")
    fill(log, 3, keys=10)
    log.transact(1, log.end % 10)  # open, one offset past the third segment's base
    uncleanable = log.end - 1
    fill(log, 6, keys=10)
    before = {s.base_offset: s.log.read_bytes() for s in segments(log)}
    third = segments(log)[2].base_offset
    assert third < uncleanable < segments(log)[3].base_offset
    assert log.clean().end_offset == third
    after = {s.base_offset: s.log.read_bytes() for s in segments(log)}
    assert sum(len(after[base]) for base in after if base < third) < 1024
    assert {base: data for base, data in after.items() if base >= third} == {
        base: data for base, data in before.items() if base >= third
    }


def test_clean_and_cleanable_bytes_are_all_but_the_active_segment(tmp_path: Path) -> None:
    """testLogToClean (C32)"""
    log = Log.create(tmp_path, segment_bytes="100")
    for _ in range(6):
        log.data(1)
    assert len(segments(log)) == 6
    for first_dirty in (5, 3, 0):
        LogBuilder(log.engine).set_state(first_dirty_offset=first_dirty)
        found = DirectoryMoment(log.engine, 0).plan("t", 0)
        assert found.clean_bytes == sum(s.size for s in closed(log)[:first_dirty])
        assert found.clean_bytes + found.cleanable_bytes == sum(s.size for s in closed(log))


def test_the_dirty_ratio_is_that_of_segments_between_both_offsets(tmp_path: Path) -> None:
    """testLogToCleanWithUncleanableSection (C32)"""
    log = Log.create(tmp_path, segment_bytes="100")
    for _ in range(6):
        log.data(1)
    sizes = [s.size for s in segments(log)]
    LogBuilder(log.engine).set_state(first_dirty_offset=2, last_stable_offset=4)
    found = DirectoryMoment(log.engine, 0).plan("t", 0)
    assert (found.clean_bytes, found.cleanable_bytes) == (sum(sizes[:2]), sum(sizes[2:4]))
    assert found.uncleanable_bytes == sum(sizes[4:])
    assert found.dirty_ratio == pytest.approx(sum(sizes[2:4]) / sum(sizes[:4]))


@pytest.mark.parametrize("bases", [(0, 11), (0, 15, 30)])
def test_a_cleaning_goes_past_missing_offsets(tmp_path: Path, bases: tuple[int, ...]) -> None:
    """testCleaningBeyondMissingOffsets (C15)"""
    contents = {
        base: [batch(base + i, [(f"{base + i}", "v")]) for i in range(10)] for base in bases[:-1]
    }
    active = bases[-1]
    engine = foreign_log(tmp_path, contents | {active: [batch(active, [("1015", "v")])]})
    log = opened(engine)
    assert log.clean().end_offset == active
    assert log.first_dirty_offset == active
    assert len(log.offsets()) == 10 * len(bases[:-1]) + 1


def test_records_without_a_key_go_and_are_counted(tmp_path: Path) -> None:
    """testCleaningWithUnkeyedMessages (C19, C53)"""
    log = Log.create(tmp_path, segment_bytes="1024")
    while len(segments(log)) < 2:
        log.data(None)
    unkeyed, size = log.end, sum(s.size for s in segments(log))
    fill(log, 3)
    log.roll()
    expected = sum(s.size for s in segments(log)) - size
    assert log.clean().keyless_records == unkeyed
    assert sum(s.size for s in segments(log)) == expected
    assert log.offsets() == list(range(unkeyed, log.end))


def test_records_deleted_before_the_swap_stay_deleted_and_files_go_once(tmp_path: Path) -> None:
    """testCleanSegmentsWithConcurrentSegmentDeletion (C112): retention waits for the cleaner"""
    log = Log.create(tmp_path, cleanup_policy="compact,delete", segment_bytes="1024")
    for _ in range(2):
        log.data(0)
        log.roll()
    assert len(segments(log)) == 3
    other = DirectoryLog(tmp_path)
    retained: list[object] = []

    def delete() -> None:
        if log.engine.offsets("t")[0][0] == 0 and list(log.directory.glob("*.cleaned")):
            other.delete_records("t", 0, 2, now_ms=1)
            retained.append(retain(other, now_ms=1))

    (stats,) = clean(log.engine, force=True, now_ms=1, config=kafkas(), check_abort=delete)
    assert (stats.error, retained) == (None, [[]])
    assert [s.base_offset for s in list_segments(log.directory)] == [0, 2]
    assert (log.engine.offsets("t")[0], log.first_dirty_offset) == ((2, 2), 2)
    assert [stats.segments for stats in retain(other, now_ms=1)] == [1]
    assert [s.base_offset for s in list_segments(log.directory)] == [2]
    assert len(list(log.directory.glob(f"{0:020d}.log*"))) == 1
    log.data(7)
    assert log.offsets() == [2]


def test_producer_snapshots_go_with_the_bases_that_vanish(tmp_path: Path) -> None:
    """UnifiedLogTest.testCompactionDeletesProducerStateSnapshots (C113)"""
    log = Log.create(tmp_path)
    for producer in (1, 2, 3):
        log.data(1, producer=producer)
        log.roll()
    before = sorted(int(p.name[:20]) for p in log.directory.glob("*.snapshot"))
    assert before == [1, 2, 3]
    log.clean()
    assert [s.base_offset for s in segments(log)] == [0, 3]
    assert [p.name for p in log.directory.glob("*.snapshot")] == [f"{3:020d}.snapshot"]
    retired = sorted(int(p.name[:20]) for p in log.directory.glob("*.snapshot.deleted"))
    assert retired == [1, 2]


def test_who_reloads_a_cleaned_log_knows_the_same_producers(tmp_path: Path) -> None:
    """testDuplicateCheckAfterCleaning (C81): offsets of the batches that a duplicate would name"""
    log = Log.create(tmp_path)
    log.data(1, 2, 3, producer=1)
    log.data(3, 1, 4, producer=2)
    log.data(1, 4, producer=3)
    log.roll()
    for extra in (False, True):
        if extra:
            log.data(2, producer=4)
            log.roll()
        log.clean(from_offset=0)
        for path in log.directory.glob("*.snapshot"):
            path.unlink()
        state = log.engine.describe("t").partitions[0]
        found, _ = recorded_producers(log.directory, state, now_ms=0)
        spans = {
            e.producer_id: (e.last_offset - e.offset_delta, e.last_offset, e.last_sequence)
            for e in found.entries.values()
        }
        expected = {1: (0, 2, 2), 2: (3, 5, 2), 3: (6, 7, 1)}
        assert spans == (expected | {4: (8, 8, 0)} if extra else expected)


def test_the_empty_batch_of_an_aborted_transaction_goes_when_its_producer_goes_on(
    tmp_path: Path,
) -> None:
    """testLogCleanerRetainsLastSequenceEvenIfTransactionAborted (C76)"""
    log = Log.create(tmp_path)
    log.transact(1, 1)
    log.transact(1, 2, 3)
    log.abort(1)
    log.roll()
    log.clean()
    assert (log.offsets(), log.last_offsets()) == ([3], [2, 3])
    (empty, _) = log.batches()
    assert empty.sequence + empty.last - empty.base == 2
    log.transact(1, 1, 5)
    log.roll()
    log.clean(from_offset=0)
    assert (log.offsets(), log.last_offsets()) == ([3, 4, 5], [3, 5])
    assert log.batches()[-1].sequence + 1 == 4


def test_only_markers_in_a_log_stay_until_their_second_round(tmp_path: Path) -> None:
    """C65, C74: a marker of a transaction without data, of a producer that has expired"""
    log = Log.create(tmp_path)
    log.commit(1, time=0)
    log.data(1, time=0)
    log.roll()
    log.clean(NOW)
    assert [(b.base, b.horizon) for b in log.batches()] == [(0, NOW + DAY), (1, None)]
    log.clean(NOW + DAY - 1)
    assert log.last_offsets() == [0, 1]
    log.clean(NOW + DAY)
    assert log.last_offsets() == [1]


# --- groups --------------------------------------------------------------------------------------


def test_segments_that_became_empty_are_made_one_by_the_next_round(tmp_path: Path) -> None:
    """testSegmentGroupingWithSparseOffsetsAndEmptySegments (C46, C47)"""
    span = MAX + 1
    contents = {
        i * span: [batch(i * span, [("key", "v")]), batch((i + 1) * span - 1, [("key", "v")])]
        for i in range(3)
    }
    engine = foreign_log(tmp_path, contents | {3 * span: [batch(3 * span, [("key", "v")])]})
    log = opened(engine)
    log.clean()
    assert [s.size > 0 for s in segments(log)] == [False, False, True, True]
    log.clean(from_offset=0)
    assert [s.base_offset for s in segments(log)] == [0, 2 * span, 3 * span]
    assert log.offsets() == [3 * span - 1, 3 * span]


@pytest.mark.parametrize(("last", "count"), [(MAX, 1), (MAX + 1, 2)])
def test_segments_are_grouped_by_where_their_offsets_end_and_not_by_their_index(
    tmp_path: Path, last: int, count: int
) -> None:
    """testSegmentGroupingWithSparseOffsets, testSegmentGroupingFollowingLoadOfZeroIndex (C46)"""
    half = MAX // 2
    engine = foreign_log(
        tmp_path,
        {
            0: [batch(0, [("a", "v")]), batch(1, [("b", "v")])],
            half: [batch(half, [("c", "v")]), batch(last, [("d", "v")])],
            last + 1: [],
        },
        config={"index.interval.bytes": "400"},
    )
    log = opened(engine)
    log.clean()
    assert len(closed(log)) == count
    assert log.offsets() == [0, 1, half, last]


def test_a_group_with_more_offsets_than_a_segment_can_tell_becomes_two(tmp_path: Path) -> None:
    """testCleanedSegmentOffsetOverflow, and testSegmentWithOffsetOverflow before it (C118)"""
    bases = (0, 100, MAX + 1, MAX + 9)
    contents = [batch(base, [(f"k{i}", "v")]) for i, base in enumerate(bases)]
    contents.append(batch(MAX + 10, [("k0", "w"), ("k2", "w")]))
    engine = foreign_log(tmp_path, {0: contents, MAX + 12: []})
    log = opened(engine)
    stats = log.clean()
    assert stats.segments_after == 2
    assert log.offsets() == [100, MAX + 9, MAX + 10, MAX + 11]
    assert [s.base_offset for s in segments(log)] == [0, 101, MAX + 12]
    assert clean(engine, force=True, now_ms=1) == []


# --- deletions -----------------------------------------------------------------------------------


def test_no_value_of_a_deleted_key_is_left(tmp_path: Path) -> None:
    """testCleaningWithDeletes (C57)"""
    log = Log.create(tmp_path, segment_bytes="1024")
    fill(log, 2)
    end = log.end
    for key in range(0, end, 2):
        log.data(key, tombstones=True)
    fill(log, 4)
    log.clean(NOW)
    assert not set(range(0, end, 2)) & set(values(log))
    assert set(range(1, end, 2)) <= set(values(log))
    log.roll()
    log.clean(NOW + DAY)
    deleted = [int(r.key or b"") for r in records_of(log.batches()) if r.value is None]
    assert deleted == []


def test_a_tombstones_own_time_says_nothing_of_when_it_goes(tmp_path: Path) -> None:
    """testCleanTombstone (C55, C56)"""
    log = Log.create(tmp_path)
    log.data(0, time=NOW + DAY + 10_000)
    log.roll()
    log.clean(NOW, from_offset=0)
    log.data(0, tombstones=True, time=NOW - DAY - 10_000)
    log.roll()
    log.clean(NOW, from_offset=1)
    assert log.last_offsets()[0] == 1
    log.data(1, time=NOW)
    log.roll()
    log.clean(NOW, from_offset=2)
    assert log.last_offsets() == [1, 2]
    assert log.batches()[0].horizon == NOW + DAY


def test_a_tombstone_beyond_the_end_of_the_round_gets_its_horizon_early(tmp_path: Path) -> None:
    """C51, C60"""
    log = Log.create(tmp_path)
    log.data(1)
    log.data(2, tombstones=True)
    log.roll()
    assert log.clean(NOW, config=kafkas(2)).end_offset == 1
    assert [b.horizon for b in log.batches()] == [None, NOW + DAY]
    log.clean(NOW + 7)
    assert [b.horizon for b in log.batches()] == [None, NOW + DAY]
    log.clean(NOW + DAY)
    assert log.offsets() == [0]


def test_the_time_of_a_round_is_one_for_all_its_groups(tmp_path: Path) -> None:
    """C41"""
    log = Log.create(tmp_path, segment_bytes="75")
    for key in range(4):
        log.data(key, tombstones=True)
        log.roll()
    log.clean(NOW, check_abort=lambda: time.sleep(0.002))
    assert {b.horizon for b in log.batches()} == {NOW + DAY}


# --- damage --------------------------------------------------------------------------------------


def _large(root: Path) -> Log:
    """Records of a MiB, far above what the topic allows by now."""
    engine = foreign_log(
        root, {0: [batch(i, [(f"{i % 5}", "x" * 2**20)]) for i in range(10)], 10: []},
        config={"max.message.bytes": "1024"},
    )  # fmt: skip
    return opened(engine)


def _fails(log: Log) -> str:
    before = {path: path.read_bytes() for path in log.directory.glob("*.log")}
    (stats,) = clean(log.engine, force=True, now_ms=1, config=kafkas())
    assert {path: path.read_bytes() for path in log.directory.glob("*.log")} == before
    assert not list(log.directory.glob("*.cleaned"))
    assert (log.directory / layout.UNCLEANABLE).exists()
    assert stats.error is not None
    return stats.error


def test_a_large_batch_with_an_unknown_magic_is_not_cleaned_away(tmp_path: Path) -> None:
    """testMessageLargerThanMaxMessageSizeWithCorruptHeader (C104)"""
    log = _large(tmp_path)
    path = segments(log)[0].log
    data = bytearray(path.read_bytes())
    data[16] = 0xFF
    path.write_bytes(data)
    assert str(path) in _fails(log)


@pytest.mark.parametrize("size", [1024, 2**20 + 500])
def test_a_log_that_ends_within_a_batch_is_not_cleaned_away(tmp_path: Path, size: int) -> None:
    """testCorruptMessageSizeLargerThanBytesAvailable (C105)"""
    log = _large(tmp_path)
    path = segments(log)[0].log
    with path.open("r+b") as file:
        file.truncate(size)
    assert str(path) in _fails(log)


def test_records_whose_bytes_are_wrong_get_no_new_checksum(tmp_path: Path) -> None:
    """C100, where Kafka does not look"""
    damaged = bytearray(batch(0, [("a", "1"), ("b", "1")]).data)
    damaged[-2] ^= 1  # the last record's value: it decodes
    log = opened(foreign_log(tmp_path, {0: [batch(0, [("a", "1"), ("b", "1")])], 2: []}))
    segments(log)[0].log.write_bytes(damaged)
    assert "checksum" in _fails(log)


def test_a_zero_length_value_is_data(tmp_path: Path) -> None:
    """C63"""
    empty = Batch(0, 0, (Record(0, 0, b"a", b""),))
    log = opened(foreign_log(tmp_path, {0: [empty], 1: []}))
    for now in (NOW, NOW + 2 * DAY):
        log.clean(now, from_offset=0)
    assert offsets(dump(log.engine)) == [0]
