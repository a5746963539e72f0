"""What once went wrong in Kafka's cleaner, and in Redpanda's: what a cleaning leaves of a log.

Each test names the fault's number, and runs the cleaner as a user does. Faults of threads, of what
is chosen, and races are in test_regressions_running.py.
"""

from __future__ import annotations

import os
import random
import struct
from dataclasses import replace
from pathlib import Path

import pytest

from kafkalog.cleaner import CleanerConfig, CleanerStats
from kafkalog.cleaner.schedule.manager import clean, clean_filthiest
from kafkalog.storage_engine.directory.directory_log import DirectoryLog
from kafkalog.storage_engine.format import layout
from kafkalog.storage_engine.ownership.adopt import adopt
from kafkalog.storage_engine.ownership.release import release
from kafkalog.storage_engine.segment.segments import list_segments
from tests.builders.batch_builder import CONTROL, GZIP, TRANSACTIONAL, Record, batch_data, empty
from tests.builders.log_contents import damage, latest_column, segment_sizes
from tests.unit.cleaner.naive import batch, dump, foreign_log, latest_values, offsets, records_of
from tests.unit.cleaner.transactional_log import DAY, Log, kafkas

MAX = 2**31 - 1
NOW = 10 * DAY
OURS = CleanerConfig()
BOTH = pytest.mark.parametrize("config", [kafkas(), OURS], ids=["kafkas", "ours"])


def forced(engine: DirectoryLog, now_ms: int = NOW, config: CleanerConfig = OURS) -> CleanerStats:
    (stats,) = clean(engine, "t", force=True, now_ms=now_ms, config=config)
    assert stats.error is None
    return stats


# --- more keys than memory -----------------------------------------------------------------------


@pytest.mark.parametrize("spill", [False, True])
def test_a_segment_with_more_keys_than_memory_is_cleaned_to_its_end(
    tmp_path: Path, spill: bool
) -> None:
    """KAFKA-3587, KAFKA-3894, Redpanda 16952 and 24323: given up, or tried again for ever"""
    engine = foreign_log(
        tmp_path,
        {0: [batch(10 * i, [(f"k{j}", f"{i}") for j in range(10)]) for i in range(6)], 60: []},
        config={"min.cleanable.dirty.ratio": "0"},
    )
    config = CleanerConfig(dedupe_buffer_size=24 * 5, spill=spill, merge_batches=False)
    ends: list[int] = []
    while (stats := clean_filthiest(engine, now_ms=1, config=config)) is not None:
        assert stats.error is None
        ends.append(stats.end_offset)
        assert len(ends) <= 60
    assert ends == ([60] if spill else sorted(set(ends)))
    assert (ends[-1], offsets(dump(engine))) == (60, list(range(50, 60)))


def test_a_log_that_is_overwritten_for_ever_keeps_its_size(tmp_path: Path) -> None:
    """Redpanda 13982: overwritten topics did not shrink to a constant size"""
    engine = DirectoryLog(tmp_path)
    engine.create_topic("t", 1, {"segment.bytes": "2000"})
    found = []
    for i in range(12):
        for j in range(10):
            engine.append("t", [(f"k{k}", f"{i:3}-{j}") for k in range(10)], now_ms=NOW + i)
        forced(engine, NOW + i)
        found.append((sum(segment_sizes(engine)), len(segment_sizes(engine))))
    assert len(set(found[2:])) == 1
    assert len(latest_column(engine)) == 10


# --- missing and far offsets ---------------------------------------------------------------------


@pytest.mark.parametrize("first_dirty", [0, 10, 12, 14])
def test_missing_offsets_are_passed_once(tmp_path: Path, first_dirty: int) -> None:
    """KAFKA-8764: a round that found no record in [first dirty offset, end) was done for ever"""
    engine = foreign_log(
        tmp_path,
        {
            0: [batch(i, [(f"k{i % 3}", "v")]) for i in range(10)],
            15: [],
            30: [batch(30, [("a", "b")])],
        },
        config={"min.cleanable.dirty.ratio": "0"},
        first_dirty=first_dirty,
    )
    unforced = clean_filthiest(engine, now_ms=NOW, config=kafkas())
    assert unforced is not None
    assert unforced.end_offset == 30  # there is no record in what it had to clean
    stats = forced(engine, config=kafkas())
    assert stats.end_offset == 31
    assert clean(engine, force=True, now_ms=NOW, config=kafkas()) == []


@BOTH
def test_a_segment_whose_offsets_no_index_can_tell_is_cleaned(
    tmp_path: Path, config: CleanerConfig
) -> None:
    """KAFKA-5413, KAFKA-6264: an offset too far above its segment's base ended the thread"""
    contents = [batch(base, [(f"k{base}", "v"), ("x", "v")]) for base in (0, 10, MAX + 7, 2 * MAX)]
    end = 2 * MAX + 2
    engine = foreign_log(
        tmp_path, {0: contents, end: [batch(end, [("x", "w")])]},
        config={"index.interval.bytes": "0"},
    )  # fmt: skip
    forced(engine, config=config)
    assert offsets(dump(engine)) == [0, 10, MAX + 7, 2 * MAX, end]
    assert damage(tmp_path) == []
    bases = [s.base_offset for s in list_segments(tmp_path / "t-0")]
    assert len(bases) > 3
    engine.append("t", [("k0", "w")], now_ms=1)
    forced(engine, config=config)
    assert offsets(dump(engine)) == [10, MAX + 7, 2 * MAX, end, end + 1]


@pytest.mark.parametrize("first", [(), (0, 5)], ids=["empty", "begun"])
def test_a_copy_of_a_compacted_log_with_far_offsets_has_sound_indexes(
    tmp_path: Path, first: tuple[int, ...]
) -> None:
    """KAFKA-4451: negative entries in the index of an empty follower that takes far offsets"""
    # Times are as far apart as offsets are, and are not to begin a segment in their place.
    log = Log.create(tmp_path, index_interval_bytes="0", segment_ms=str(2**63 - 1))
    for base in (*first, MAX + 3, MAX + 9, 3 * MAX):
        log._append(batch(base, [(f"{base % 4}", "v")]))
    assert damage(tmp_path) == []
    forced(log.engine)
    assert damage(tmp_path) == []
    expected = {
        key: offset for key, (offset, _) in latest_values(records_of(log.batches())).items()
    }
    assert latest_column(log.engine) == expected
    assert max(log.offsets()) == 3 * MAX


def test_segments_without_records_do_not_pile_up(tmp_path: Path) -> None:
    """KAFKA-12889: segments that were cleaned away whole were never joined"""
    span = MAX + 1
    contents = {
        i * span: [batch(i * span, [("k", "v")]), batch((i + 1) * span - 1, [("k", "v")])]
        for i in range(6)
    }
    engine = foreign_log(tmp_path, contents | {6 * span: [batch(6 * span, [("k", "w")])]})
    for i in range(3):
        forced(engine)
        engine.append("t", [("k", f"{i}")], now_ms=1)
    assert len(segment_sizes(engine)) <= 4
    assert segment_sizes(engine).count(0) <= 1


# --- batches too large ---------------------------------------------------------------------------


@pytest.mark.parametrize("buffer", [1, 1 << 20])
@pytest.mark.parametrize("merge", [False, True])
def test_batches_beyond_what_the_topic_takes_are_cleaned(
    tmp_path: Path, buffer: int, merge: bool
) -> None:
    """KAFKA-6834, KAFKA-4019: larger than max.message.bytes, and than the cleaner's buffer"""
    engine = DirectoryLog(tmp_path)
    engine.create_topic("t", 1)
    noise = random.Random(1).randbytes(300_000)
    for i in range(4):
        engine.append("t", [(f"k{i % 2}", noise), ("x", noise[i:])], now_ms=1, batch_size=1 << 20)
    engine.alter_topic("t", {"max.message.bytes": "1000"})
    forced(engine, config=CleanerConfig(io_buffer_size=buffer, merge_batches=merge))
    assert offsets(dump(engine)) == [4, 6, 7]
    assert {len(r.value or b"") for r in records_of(dump(engine))} == {300_000, 299_997}


@BOTH
def test_a_batch_that_grows_by_being_compressed_anew_is_written(
    tmp_path: Path, config: CleanerConfig
) -> None:
    """KAFKA-5316: what remained of a batch was larger than all of it, and than the limit"""
    log = Log.create(tmp_path, compression_gzip_level="1")
    words = [b"%d" % n for n in range(300)]
    rng = random.Random(2)
    records = [
        Record(i, 1000, b"key-%d" % i, b" ".join(rng.choices(words, k=400))) for i in range(40)
    ]
    data = batch_data(records, codec=GZIP, leader_epoch=0)
    log.engine.alter_topic("t", {"max.message.bytes": str(len(data))})
    log.engine.append_raw("t", 0, data, now_ms=0)
    log.engine.append("t", [("key-39", None)], now_ms=0)
    forced(log.engine, config=config)
    first = segment_sizes(log.engine)[0] - len(empty(40, 40).data)
    assert first > len(data)
    assert log.offsets() == [*range(39), 40]
    assert [r.value for r in records_of(log.batches())][:39] == [r.value for r in records[:39]]


# --- deletions -----------------------------------------------------------------------------------


@BOTH
def test_a_tombstone_in_an_old_file_waits_for_its_full_time(
    tmp_path: Path, config: CleanerConfig
) -> None:
    """KAFKA-4529: a tombstone went at once, since a segment beside it was old"""
    engine = DirectoryLog(tmp_path)
    engine.create_topic("t", 1)
    engine.append("t", [("a", "1"), ("b", "1")], now_ms=1)
    forced(engine, NOW, config)
    engine.append("t", [("a", None), ("c", "1")], now_ms=2)
    for path in (tmp_path / "t-0").glob("*.log"):
        os.utime(path, ns=(0, 0))
    forced(engine, NOW + 5, config)
    for now in (NOW + 6, NOW + DAY + 4):
        engine.append("t", [("z", f"{now}")], now_ms=3)
        for path in (tmp_path / "t-0").glob("*.log"):
            os.utime(path, ns=(0, 0))
        forced(engine, now, config)
        assert b"a" in {r.key for r in records_of(dump(engine))}
    clean(engine, now_ms=NOW + DAY + 5, config=config)
    assert b"a" not in {r.key for r in records_of(dump(engine))}


@BOTH
def test_a_tombstone_goes_in_time_however_often_its_segment_is_written(
    tmp_path: Path, config: CleanerConfig
) -> None:
    """KAFKA-8522: each cleaning gave the file a new time, and with it every tombstone a new day"""
    engine = DirectoryLog(tmp_path)
    engine.create_topic("t", 1, {"min.cleanable.dirty.ratio": "0"})
    engine.append("t", [("a", "1"), ("a", None)], now_ms=1)
    hour = DAY // 24
    for i in range(30):
        engine.append("t", [("x", f"{i}"), (f"y{i}", "1")], now_ms=NOW)
        forced(engine, NOW + i * hour, config)
        has_tombstone = b"a" in {r.key for r in records_of(dump(engine))}
        assert has_tombstone == (i < 24), i


def test_a_tombstone_of_a_quiet_partition_goes_in_time(tmp_path: Path) -> None:
    """In Kafka it stays until somebody writes"""
    engine = DirectoryLog(tmp_path)
    engine.create_topic("t", 1)
    engine.append("t", [("a", "1"), ("a", None), ("b", "1")], now_ms=1)
    for now, expected in ((NOW, [1, 2]), (NOW + DAY - 1, [1, 2]), (NOW + DAY, [2])):
        clean(engine, force=now == NOW, now_ms=now)
        assert offsets(dump(engine)) == expected


# --- the end of the log --------------------------------------------------------------------------


@BOTH
@pytest.mark.parametrize("tail", ["tombstones", "transaction", "markers"])
def test_the_log_end_survives_a_tail_that_is_cleaned_away_whole(
    tmp_path: Path, tail: str, config: CleanerConfig
) -> None:
    """KAFKA-17076: after a forced roll nothing but the tail tells where the log ends"""
    root = tmp_path / "log"
    log = Log.create(root, min_cleanable_dirty_ratio="0")
    log.data(1, 2, 3)
    if tail == "tombstones":
        log.data(1, 2, 3, tombstones=True)
    else:
        log.data(1, 2, 3, tombstones=True)
        if tail == "transaction":
            log.transact(7, 4, 5)
        log.abort(7)
    for i in range(4):
        clean(log.engine, force=True, now_ms=NOW + i * (DAY + 1), config=config)
    assert log.offsets() == []
    for path in (log.directory).glob("*.snapshot"):
        path.unlink()
    assert log.engine.offsets("t")[0][1] == log.end
    (left,) = dump(log.engine)  # the last batch, without records
    assert (left.last, left.records) == (log.end - 1, ())
    log.engine.close()
    # Nor does a load by Kafka's rules, which has the files alone, lose it.
    release(root, now_ms=NOW)
    (root / layout.COMMIT_RELEASED).unlink()
    for path in [*root.glob("*checkpoint"), *(root / "t-0").glob("*.index")]:
        path.unlink()
    (root / "meta.properties").write_text("version=1\nnode.id=1\ncluster.id=x\n")
    adopt(root, config={"*": {"cleanup.policy": "compact"}}, now_ms=NOW)
    with DirectoryLog(root) as engine:
        assert engine.offsets("t")[0][1] == log.end
        assert engine.append("t", [("new", "1")], now_ms=NOW) is not None
        assert offsets(dump(engine)) == [log.end]


@BOTH
def test_the_log_end_survives_without_its_journal_right_after_the_roll(
    tmp_path: Path, config: CleanerConfig
) -> None:
    """KAFKA-17076: the same with obsolete records, which need a record above them"""
    log = Log.create(tmp_path)
    for _ in range(3):
        log.data(1, 2)
    log.roll()
    log.data(1, 2, tombstones=True)
    for i in range(4):
        clean(log.engine, force=True, now_ms=NOW + i * (DAY + 1), config=config)
    bases = [s.base_offset for s in list_segments(log.directory)]
    assert (log.offsets(), log.last_offsets(), bases[-1]) == ([], [7], 8)
    log.data(3)
    assert log.offsets() == [8]
    forced(log.engine, NOW + 9 * DAY, config)
    assert log.last_offsets() == [8]  # the empty batch has done its work


# --- transactions and producers ------------------------------------------------------------------


def test_batches_of_a_producer_whose_sequences_begin_anew_do_not_pile_up(tmp_path: Path) -> None:
    """KAFKA-8335: a coordinator's producers left an empty batch for every transaction"""
    log = Log.create(tmp_path)
    counts = []
    for i in range(15):
        log.sequences.clear()
        now_ms = NOW + i * (DAY + 1)  # the producer never expires
        log.transact(1, 1, time=now_ms)
        log.commit(1, time=now_ms)
        forced(log.engine, now_ms, kafkas())
        counts.append(len(log.batches()))
    assert max(counts) <= 5
    assert log.keys() == [1]


@pytest.mark.parametrize("end", [0, 1])
def test_a_transaction_over_many_segments_is_whole_or_gone(tmp_path: Path, end: int) -> None:
    """KAFKA-8351: markers in another segment than their data"""
    log = Log.create(tmp_path, segment_bytes="75")
    log.data(1, 2)
    for key in (1, 2, 3):
        log.transact(9, key)
        log.roll()
    log.mark(9, end)
    log.data(4)
    expected = {b"1": 2, b"2": 3, b"3": 4} if end else {b"1": 0, b"2": 1}
    for i in range(3):
        forced(log.engine, NOW + i * (DAY + 1), kafkas())
        assert latest_column(log.engine) == expected | {b"4": log.end - 1}
        assert (5 in log.offsets()) == (bool(end) or i < 2)  # in two stages, behind its data
        log.data(4)


def test_an_abort_marker_stays_while_a_later_round_may_need_it(tmp_path: Path) -> None:
    """KAFKA-13727: partial rounds removed a marker, and aborted records came back"""
    log = Log.create(tmp_path)
    for key in range(6):
        log.data(key)
    for key in range(6):  # it begins where the first rounds have ended
        log.transact(1, key)
    log.abort(1)
    log.data(9)
    log.roll()
    expected = {b"%d" % key: key for key in range(6)} | {b"9": 13}
    rounds = 0
    while log.first_dirty_offset < log.end:
        log.clean(NOW + rounds * (DAY + 1), config=kafkas(3))
        assert latest_column(log.engine) == expected
        rounds += 1
    assert rounds > 2
    log.clean(NOW + 99 * DAY)
    assert (latest_column(log.engine), log.indexed()) == (expected, [])


@pytest.mark.parametrize("kind", [0, 1])
def test_records_with_the_key_of_a_marker_and_markers_pass_each_other_by(
    tmp_path: Path, kind: int
) -> None:
    """KAFKA-14055, and the same fault in crabka (528): either removed the other"""
    log = Log.create(tmp_path)
    key = struct.pack(">hh", 0, kind)
    log.engine.append("t", [(key, "before")], now_ms=0)
    log.end += 1
    log.transact(1, 1)
    log.mark(1, kind)
    expected = {key: 0, b"1": 1} if kind else {key: 0}
    for _ in range(2):
        forced(log.engine, NOW, kafkas())
        assert (latest_column(log.engine), 2 in log.offsets()) == (expected, True)
        log.data(2)
        expected[b"2"] = log.end - 1
    log.engine.append("t", [(key, "behind")], now_ms=0)
    forced(log.engine, NOW, kafkas())
    assert latest_column(log.engine) == expected | {key: log.end}
    assert 2 in log.offsets()


def test_aborted_batches_larger_than_all_buffers_go(tmp_path: Path) -> None:
    """KAFKA-6854: batches that were dropped whole were taken for a buffer that is too small"""
    log = Log.create(tmp_path)
    for _ in range(3):
        log.transact(1, *range(500))
    log.abort(1)
    log.data(1)
    config = replace(kafkas(), io_buffer_size=1)
    forced(log.engine, NOW, config)
    assert latest_column(log.engine) == {b"1": log.end - 1}
    assert len(log.offsets()) == 2


@BOTH
def test_a_producers_last_batch_stays_and_readers_pass_over_it(
    tmp_path: Path, config: CleanerConfig
) -> None:
    """KAFKA-5490: the last sequence number was lost, and consumers stopped at empty batches"""
    log = Log.create(tmp_path)
    log.data(1, 2, producer=5, time=NOW)
    log.data(1, 2)
    log.data(3)
    forced(log.engine, NOW, config)
    (empty, *_) = log.batches()
    assert (empty.producer, empty.sequence, empty.last, empty.records) == (5, 0, 1, ())
    for start in range(log.end):
        rows = [o for b in log.engine.read("t", 0, start=start) for o in b["offset"].to_pylist()]
        assert rows == [offset for offset in (2, 3, 4) if offset >= start]


def test_a_control_batch_without_a_record_is_no_fault(tmp_path: Path) -> None:
    """KAFKA-7467: it ended the thread"""
    log = Log.create(tmp_path)
    log.data(1)
    empty = batch(1, [], producer=3, attributes=TRANSACTIONAL | CONTROL)
    log._append(replace(empty, last=1))
    log.data(1)
    forced(log.engine, NOW, kafkas())
    assert log.offsets() == [2]


# --- damage --------------------------------------------------------------------------------------


def test_what_lies_behind_a_bad_batch_is_never_dropped(tmp_path: Path) -> None:
    """crabka took a bad batch for the end of its segment"""
    contents = [batch(i, [(f"k{i}", "v")]) for i in range(6)]
    engine = foreign_log(tmp_path, {0: contents, 6: []})
    path = tmp_path / "t-0" / f"{0:020d}.log"
    data = bytearray(path.read_bytes())
    data[2 * len(data) // 6 + 30] ^= 1
    path.write_bytes(data)
    for _ in range(2):
        (stats,) = clean(engine, force=True, now_ms=NOW)
        assert stats.error is not None
        assert path.read_bytes() == data
