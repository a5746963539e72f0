"""What a cleaner of a log in an object store does besides: merge, collect, and report."""

from __future__ import annotations

from collections import Counter

import pytest

from kafkalog.cleaner.objects import upkeep
from kafkalog.cleaner.objects.object_moment import ObjectMoment
from kafkalog.cleaner.objects.regroup_plan import MERGED, fresh_of
from kafkalog.cleaner.report.store_figures import store_figures
from kafkalog.cleaner.schedule import manager
from kafkalog.storage_engine.object_store import regroup
from kafkalog.storage_engine.object_store.collector import DELETE_DELAY_MS
from kafkalog.storage_engine.object_store.object_log import ObjectLog
from tests.unit.storage_engine.store_log import new_object_log
from tests.unit.storage_engine.test_regroup import NOW_MS, contents, fill

HOUR_MS = 3_600_000


@pytest.fixture
def log() -> ObjectLog:
    return new_object_log()


def regrouped(log: ObjectLog) -> None:
    regroup.regroup(log, regroup.fresh_objects(log.store_state()), now_ms=NOW_MS)


def segments(log: ObjectLog, topic: str, count: int) -> None:
    """Write so many segment objects in each partition."""
    for _ in range(count):
        fill(log, topic, 2, commits=1)
        regrouped(log)


def moment(log: ObjectLog, now_ms: int) -> ObjectMoment:
    return ObjectMoment(log, log.store_state(), now_ms)


def test_eight_small_segment_objects_become_one_with_the_same_records(log: ObjectLog) -> None:
    log.create_topic("t", 2, {"cleanup.policy": "delete", "retention.ms": "-1"})
    segments(log, "t", MERGED + 1)
    before = contents(log)
    assert len(log.store_state().objects) == 2 * (MERGED + 1)
    done = upkeep.merge_due(log, now_ms=NOW_MS)
    assert [(each.objects, each.segments, each.is_lost) for each in done] == [
        (MERGED, 1, False)
    ] * 2
    assert len(log.store_state().objects) == 2 * 2
    assert contents(log) == before
    assert upkeep.merge_due(log, now_ms=NOW_MS) == []


def test_a_clean_section_is_not_merged(log: ObjectLog) -> None:
    log.create_topic("t", 2)
    segments(log, "t", MERGED)
    manager.clean(log, force=True, now_ms=NOW_MS)
    number = log.state().number
    assert upkeep.merge_due(log, now_ms=NOW_MS) == []
    assert log.state().number == number


def test_fresh_objects_are_counted_with_their_ages_and_the_gap_between_them(
    log: ObjectLog,
) -> None:
    log.create_topic("t", 2)
    log.append("t", [(b"k", b"v")], now_ms=NOW_MS)
    log.append("t", [(b"k", b"v")], now_ms=NOW_MS + 6000)
    found = fresh_of(log.store_state(), NOW_MS + 10_000)
    assert (found.count, found.partitions, found.alone) == (2, 1, 0)
    assert (found.oldest_ms, found.waited_ms, found.gap_ms) == (NOW_MS, 14_000, 5000)
    regrouped(log)
    log.append("t", [(b"k", b"v")], now_ms=NOW_MS + 60_000)
    found = fresh_of(log.store_state(), NOW_MS + 60_000)
    assert (found.count, found.alone, found.gap_ms) == (1, 1, HOUR_MS // 3)


def test_a_regroup_is_awaited_by_a_partition_that_is_due(log: ObjectLog) -> None:
    log.create_topic("t", 1)
    log.append("t", [(b"k", b"v")], now_ms=NOW_MS)
    assert moment(log, NOW_MS + 59_999).regroup.code == "young"
    assert moment(log, NOW_MS + 60_000).regroup.code == "cheap"
    upkeep.roll_active(log, now_ms=NOW_MS)
    assert moment(log, NOW_MS).regroup.code == "awaited"
    log.alter_topic("t", {"cleanup.policy": "delete"})
    assert moment(log, NOW_MS + 60_000).regroup.code == "cheap"


def test_a_cleaner_collects_dropped_objects_at_once_and_lists_once_an_hour(log: ObjectLog) -> None:
    log.create_topic("t", 2)
    fill(log, "t", 2)
    regrouped(log)
    assert manager.sweep(log, now_ms=NOW_MS) == 0
    before = Counter(log.client.counts)
    assert manager.sweep(log, now_ms=NOW_MS + HOUR_MS - 1) == 0
    assert Counter(log.client.counts) - before == {"GET": 1}
    assert DELETE_DELAY_MS == HOUR_MS
    assert manager.sweep(log, now_ms=NOW_MS + HOUR_MS) == 6
    counts = Counter(log.client.counts)
    assert manager.sweep(log, now_ms=NOW_MS + 2 * HOUR_MS) == 0
    assert (Counter(log.client.counts) - counts)["LIST"] == 5


def test_a_report_counts_the_requests_of_one_read(log: ObjectLog) -> None:
    log.create_topic("t", 12)
    fill(log, "t", 12, commits=3)
    found = store_figures(moment(log, NOW_MS))
    assert (found.objects, found.fresh_objects, found.dropped_objects) == (3, 3, 0)
    assert (found.read_requests, found.read_amplification) == (12, 1.0)  # three objects, four tasks
    assert found.write_amplification == 1.0
    regrouped(log)
    found = store_figures(moment(log, NOW_MS))
    assert (found.fresh_objects, found.dropped_objects, found.read_requests) == (0, 3, 12)
    assert found.deleted_from_ms == NOW_MS + HOUR_MS
    assert found.write_amplification == 2.0
