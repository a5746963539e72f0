"""What once went wrong in Kafka's cleaner, and in Redpanda's: what a cleaning leaves of a log.

Each test names the fault's number, and runs the cleaner as a user does. Faults of threads, of what
is chosen, and races are in test_regressions_running.py.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kafkalog.cleaner import CleanerConfig, CleanerStats
from kafkalog.cleaner.schedule.manager import clean
from kafkalog.storage_engine.directory.directory_log import DirectoryLog
from kafkalog.storage_engine.format import layout
from kafkalog.storage_engine.ownership.adopt import adopt
from kafkalog.storage_engine.ownership.release import release
from kafkalog.storage_engine.segment.segments import list_segments
from tests.builders.log_contents import damage, latest_column
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


# --- missing and far offsets ---------------------------------------------------------------------


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


# --- damage --------------------------------------------------------------------------------------
