"""What Kafka's LogCleanerTest says, with its numbers: rounds, groups, deletions, faults.

Each test names in its docstring the one of Kafka's, or the rules, that it stands for. Kafka's tests
of transactions are in test_transactions.py, those of the offset map in test_log_cleaner_rules_map.
"""

from __future__ import annotations

from pathlib import Path

from kafkalog.cleaner.schedule.manager import clean
from kafkalog.storage_engine.directory.directory_log import DirectoryLog
from kafkalog.storage_engine.segment.segments import SegmentFiles
from kafkalog.storage_engine.transactions.producer_replay import recorded_producers
from tests.unit.cleaner.naive import batch, foreign_log, records_of
from tests.unit.cleaner.transactional_log import DAY, Log

MAX = 2**31 - 1
NOW = 10 * DAY


def segments(log: Log) -> list[SegmentFiles]:
    """All live segments, the active one last."""
    with log.engine.snapshot("t", 0, whole=True) as snapshot:
        return list(snapshot.segments)


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


# --- groups --------------------------------------------------------------------------------------


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
