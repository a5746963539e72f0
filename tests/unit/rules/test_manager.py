"""What is cleaned and what is not: by force and when due, after faults, and beside others."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable

import pytest

from kafkalog.cleaner import CleanerConfig, CleanerStats, CleanerThread
from kafkalog.cleaner.shelf import CleaningAborted
from kafkalog.errors import InvalidInputError, UnknownTopicError
from kafkalog.log import KafkaLog
from kafkalog.storage_engine.format import layout
from kafkalog.storage_engine.fs import clock
from tests.builders.log_contents import offsets, pairs
from tests.unit.cleaner.naive import dump, latest_values, records_of
from tests.unit.rules.acts import eventually
from tests.unit.rules.places import DAY_MS, Place

MINUTE = 60_000


def filled(place: Place, *topics: str, partitions: int = 1, **config: object) -> Place:
    """Topics of several closed segments in which one key is written again and again."""
    for topic in topics or ("t",):
        place.topic(topic, partitions, segment_bytes=100, **config).rounds(5, "ab", now_ms=1000)
    return place


# --- choosing ------------------------------------------------------------------------------------


def test_cleaning_what_is_due_leaves_the_active_segment_alone(place: Place) -> None:
    (stats,) = filled(place).log.clean(now_ms=1)
    assert (stats.start_offset, stats.end_offset, stats.records_kept) == (0, 8, 2)
    assert offsets(place.log) == [6, 7, 8, 9]
    assert place.log.clean(now_ms=1) == []


def test_a_forced_cleaning_takes_the_active_segment_too(place: Place) -> None:
    (stats,) = filled(place).log.clean(force=True, now_ms=1)
    assert stats.end_offset == 10
    assert offsets(place.log) == [8, 9]
    assert place.log.clean(force=True, now_ms=1) == []
    place.append(("c", "1"))
    assert offsets(place.log) == [8, 9, 10]


def test_a_forced_cleaning_respects_the_shortest_lag(place: Place) -> None:
    filled(place, min_compaction_lag_ms=500)
    assert place.log.clean(force=True, now_ms=1_499) == []
    assert len(place.log.clean(force=True, now_ms=1_500)) == 1


def test_the_filthiest_partition_comes_first(place: Place) -> None:
    filled(place, "a", "b", "c", min_cleanable_dirty_ratio=0.1)
    for topic, count in (("a", 3), ("b", 6)):
        place.log.clean(topic, force=True, now_ms=1)
        place.to(topic).rounds(count, "ab", now_ms=1000)
    assert [stats.topic for stats in place.log.clean(now_ms=1)] == ["c", "b", "a"]


def test_a_topic_that_is_not_compacted_is_not_cleaned(place: Place) -> None:
    filled(place, policy="delete", retention_ms=-1)
    assert place.log.clean(force=True, now_ms=1) == []
    with pytest.raises(InvalidInputError, match=r"cleanup\.policy"):
        place.log.clean("t", force=True, now_ms=1)
    with pytest.raises(UnknownTopicError):
        place.log.clean("u", now_ms=1)
    assert place.status(1).state == "not compacted"


def test_all_partitions_of_a_topic_are_cleaned(place: Place) -> None:
    place.topic(partitions=4).rounds(3, [f"k{j}" for j in range(40)])
    assert [s.partition for s in place.log.clean("t", force=True, now_ms=1)] == [0, 1, 2, 3]
    found = pairs(place.log)
    assert len(found) == len(dict(found)) == 40


def test_a_tombstone_that_is_due_brings_the_cleaner_to_a_quiet_partition(place: Place) -> None:
    filled(place, delete_retention_ms=500).append(("a", None), now_ms=1)
    place.log.clean(force=True, now_ms=1_000)
    assert offsets(place.log) == [9, 10]
    assert place.log.clean(now_ms=1_499) == []
    assert place.status(1_500).state == "dirty"
    assert [s.rounds for s in place.log.clean(now_ms=1_500)] == [1]
    assert offsets(place.log) == [9]
    assert place.log.clean(now_ms=10**9) == []


def test_each_partitions_round_begins_at_its_own_time(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a", "b"):
        place.topic(name, delete_retention_ms=3000).append(("k", None), ("x", "y"), now_ms=1)
    times = iter(range(10_000, 10_000_000, 10_000))
    with monkeypatch.context() as patch:
        patch.setattr(clock, "now_ms", lambda: next(times))
        results = place.log.clean(force=True)
    assert [stats.error for stats in results] == [None, None]
    first, second = (place.status(1, name).earliest_delete_horizon_ms for name in ("a", "b"))
    assert first is not None and second is not None
    assert second - first >= 10_000


def test_the_longest_lag_brings_the_cleaner_whatever_the_ratio(place: Place) -> None:
    """LogCleanerIntegrationTest.testMaxLogCompactionLag"""
    lag = 7_200_000
    place.topic(
        segment_bytes=1 << 20,
        min_compaction_lag_ms=1,
        max_compaction_lag_ms=lag,
        min_cleanable_dirty_ratio=1,
    )
    place.commits(([("a", f"old {i}"), ("b", f"old {i}")] for i in range(10)), now_ms=1000)
    assert place.log.clean(now_ms=1000 + 2 * lag) == []  # all of it is in the active segment
    late = 1000 + lag + 1
    # The segment is as old as the lag, so another one begins.
    place.commits(([("a", f"new {i}"), ("b", f"new {i}")] for i in range(10)), now_ms=late)
    assert place.log.clean(now_ms=1000 + lag) == []
    (stats,) = place.log.clean(now_ms=late)
    assert (stats.end_offset, stats.compaction_delay_ms) == (20, 1)
    assert offsets(place.log) == [18, 19, *range(20, 40)]
    assert place.log.clean(now_ms=late + lag + 1000) == []  # nothing closed is dirty


@pytest.mark.parametrize(
    ("lag", "config", "wanted"),
    [
        (30, {}, 31),
        (5, {}, 7),
        (12, {"segment_ms": 2 * DAY_MS}, 13),
        (9, {"segment_bytes": 200}, 10),
    ],
)
def test_a_deleted_key_is_gone_once_the_largest_lag_has_passed(
    place: Place, lag: int, config: dict[str, object], wanted: int
) -> None:
    """It was deleted on day 1; an active segment is closed by the first record after its time."""
    lags = {"max_compaction_lag_ms": lag * DAY_MS, "min_cleanable_dirty_ratio": 0.9}
    place.topic(**lags, **config).append(*((f"user-{n}", "x" * 200) for n in range(90)), now_ms=0)
    place.log.clean("t", force=True, now_ms=1)
    gone = None
    for day in range(1, lag + 4):
        place.append((f"user-{day}", None), now_ms=day * DAY_MS)
        place.log.clean(now_ms=day * DAY_MS + 1_000)
        if gone is None and b"user-1" not in [key for key, value in pairs(place.log) if value]:
            gone = day
    assert gone == wanted


def test_a_cleaning_leaves_the_last_clean_segment_alone_if_nothing_in_it_has_changed(
    place: Place,
) -> None:
    place.topic(delete_retention_ms=0, segment_bytes=100)
    place.append(("a", None)).append(("b", "v" * 300))
    place.log.clean("t", force=True, now_ms=1)
    place.log.clean("t", now_ms=2)
    last = place.status(3).last_cleaning
    assert last is not None
    assert (last.records_read, last.bytes_written) == (1, 0)


# --- faults --------------------------------------------------------------------------------------


def test_a_corrupt_partition_becomes_uncleanable_and_the_others_are_cleaned(place: Place) -> None:
    repair = filled(place, "bad", "good").spoil(1, topic="bad")
    before = place.content("bad")
    first, second = sorted(place.log.clean(now_ms=1_000), key=lambda stats: stats.topic)
    assert first.error is not None and "checksum" in first.error
    assert str(place.where) in first.error and ".log" in first.error
    assert second.error is None and second.rounds == 1
    assert place.content("bad") == before  # not a byte has changed, least of all a checksum
    bad, good = place.log.status(now_ms=1_000)
    assert (bad.state, bad.reason, good.state) == ("uncleanable", first.error, "not due")
    # A minute later, then two: the pause doubles.
    assert place.log.clean(now_ms=1_000 + MINUTE - 1) == []
    assert len(place.log.clean(now_ms=1_000 + MINUTE)) == 1
    assert place.log.clean(now_ms=1_000 + 3 * MINUTE - 1) == []
    mark = json.loads(place.note(layout.UNCLEANABLE, "bad") or "")
    assert (mark["version"], mark["failures"], mark["since_ms"]) == (1, 2, 1_000)
    repair()
    assert [s.error for s in place.log.clean(now_ms=1_000 + 3 * MINUTE)] == [None]
    assert [s.state for s in place.log.status(now_ms=1)] == ["not due", "not due"]
    assert place.note(layout.UNCLEANABLE, "bad") is None


def test_a_mark_is_tried_again_when_its_time_comes_though_nothing_is_due(place: Place) -> None:
    filled(place, min_cleanable_dirty_ratio=1).log.clean(force=True, now_ms=1)
    retry_at_ms = place.mark(now_ms=1)
    assert place.log.clean(now_ms=retry_at_ms - 1) == []
    assert place.status(retry_at_ms - 1).state == "uncleanable"
    place.log.clean(now_ms=retry_at_ms)
    assert place.status(retry_at_ms).state == "clean"


def test_a_changed_config_or_force_tries_an_uncleanable_partition_again(place: Place) -> None:
    repair = filled(place).spoil(1)
    assert place.log.clean(now_ms=1_000)[0].error
    place.log.alter_topic("t", {"max.message.bytes": "2000000"})
    assert place.log.clean(now_ms=1_001)[0].error
    assert place.log.clean(now_ms=1_002) == []
    repair()
    assert place.log.clean(force=True, now_ms=1_003)[0].error is None
    assert place.note(layout.UNCLEANABLE) is None


def test_a_mark_of_a_newer_release_is_respected(place: Place) -> None:
    filled(place).put_note(layout.UNCLEANABLE, '{"version": 2, "why": []}')
    assert place.log.clean(now_ms=10**12) == []
    assert "newer release" in str(place.status(1).reason)


@pytest.mark.parametrize("content", [
    "", "{", "[]", "7", '{"version": 1}', '{"version": 1, "reason": 3}',
    '{"version": 1, "reason": "x", "retry_at_ms": "soon"}',
    '{"version": 1, "reason": "x", "config": 7}', '{"version": 1, "reason": "x", "more": 1}',
])  # fmt: skip
def test_a_text_that_is_not_a_mark_keeps_the_cleaner_away_until_a_forced_cleaning(
    place: Place, content: str
) -> None:
    filled(place).put_note(layout.UNCLEANABLE, content)
    assert place.log.clean(now_ms=10**12) == []
    found = place.status(1)
    assert (found.state, found.reason is not None) == ("uncleanable", True)
    assert "a cleaning with --force replaces it" in str(found.reason)
    assert [stats.error for stats in place.log.clean(force=True, now_ms=1)] == [None]
    assert place.note(layout.UNCLEANABLE) is None


@pytest.mark.parametrize("is_forced", [False, True])
def test_a_partition_that_has_lost_its_last_record_loses_its_mark(
    place: Place, is_forced: bool
) -> None:
    filled(place, policy="compact,delete")
    retry_at_ms = place.mark(now_ms=1)
    place.log.delete_records("t", 0, -1, now_ms=1)
    assert place.status(1).state == "uncleanable"
    assert place.log.clean(force=is_forced, now_ms=retry_at_ms) == []
    assert (place.status(1).state, place.note(layout.UNCLEANABLE)) == ("clean", None)


def test_a_partition_that_cannot_be_read_keeps_no_other_from_being_cleaned(place: Place) -> None:
    filled(place, "bad", "good").regroup()
    name, data = next(iter(place.content("bad").items()))
    place.remove_content(name)
    results = {stats.topic: stats.error for stats in place.log.clean(now_ms=1)}
    assert results["good"] is None and results["bad"]
    assert place.log.clean(now_ms=2) == []
    place.put_content(name, data)
    assert [stats.error for stats in place.log.clean(now_ms=1 + MINUTE)] == [None]


def test_a_cleaning_that_is_asked_to_stop_leaves_the_log_as_it_was(place: Place) -> None:
    before = dump(filled(place).regroup().engine)

    def stop() -> None:
        raise CleaningAborted("asked to")

    assert place.one_round(1, check_abort=stop) is None
    assert dump(place.engine) == before
    assert place.status(1).state == "dirty"


# --- several cleaners ----------------------------------------------------------------------------


@pytest.mark.slow
def test_cleaners_and_writers_at_the_same_time_agree(place: Place) -> None:
    filled(place, min_cleanable_dirty_ratio=0)
    stop = threading.Event()
    faults: list[BaseException] = []

    def run(work: Callable[[KafkaLog], object], other: KafkaLog) -> None:
        try:
            while not stop.is_set():
                work(other)
        except BaseException as fault:
            faults.append(fault)

    def force(other: KafkaLog) -> None:
        assert [stats.error for stats in other.clean(force=True, now_ms=5) if stats.error] == []

    def look(other: KafkaLog) -> None:
        found = latest_values(records_of(dump(other._log)))
        assert set(found) >= {b"a", b"b"}

    threads = [
        threading.Thread(target=run, args=(work, place.other())) for work in (force, force, look)
    ]
    for thread in threads:
        thread.start()
    for i in range(40):
        place.append(("a", f"new {i}"), (f"k{i}", "x"), now_ms=1)
    stop.set()
    for thread in threads:
        thread.join()
    assert faults == []
    place.log.clean(force=True, now_ms=5)
    found = records_of(dump(place.engine))
    assert len(found) == 42
    assert latest_values(found)[b"a"] == (88, b"new 39")


def test_a_partition_that_another_cleaner_works_on_is_passed_over(place: Place) -> None:
    filled(place, "a", "b")
    with place.at_work("a", now_ms=1):
        assert [stats.topic for stats in place.log.clean(now_ms=1)] == ["b"]
    assert [stats.topic for stats in place.log.clean(now_ms=1)] == ["a"]


def test_a_forced_cleaning_waits_for_another_cleaners_lock_alone(place: Place) -> None:
    filled(place)
    with place.at_work(now_ms=1):
        found = [stats.topic for stats in place.log.clean(force=True, now_ms=1)]
    assert found == ([] if place.has_a_lock_for_each_cleaning else ["t"])


def test_a_partition_that_is_gone_meanwhile_is_not_cleaned(place: Place) -> None:
    filled(place, "a", "z", partitions=2)
    other = place.other()

    def create_again(_: CleanerStats) -> None:
        if len(other.describe("z").partitions) == 2:
            other.delete_topic("z", now_ms=1000)
            other.create_topic("z", 1, now_ms=1000)

    found = place.log.clean(force=True, now_ms=2000, progress=create_again)
    assert found and not [stats for stats in found if stats.error]
    assert [stats.topic for stats in found if stats.records_read] == ["a"] * len(found)


# --- the thread ----------------------------------------------------------------------------------


def test_the_thread_cleans_what_is_due_and_goes_on_after_faults(place: Place) -> None:
    filled(place, "bad", "good").spoil(1, topic="bad")
    thread = CleanerThread(place.engine, CleanerConfig(backoff_ms=10), clock=lambda: 1_000)
    thread.start()
    try:
        eventually(lambda: thread.cleanings == 1 and thread.failures == 1)
        place.to("good").rounds(4, "ab", now_ms=1000)
        expected = ["uncleanable", "not due"]
        eventually(lambda: [s.state for s in place.log.status(now_ms=1_000)] == expected)
    finally:
        thread.stop()
    assert not thread.is_alive
    assert thread.failures == 1


def test_the_thread_stops_at_once_and_can_start_again(place: Place) -> None:
    place.topic(segment_bytes=100)
    thread = CleanerThread(place.engine, CleanerConfig(backoff_ms=10**7), clock=lambda: 1_000)
    for expected in (1, 2):
        place.rounds(4, "ab", now_ms=1000)
        thread.start()
        thread.start()
        eventually(lambda: thread.cleanings == expected)  # noqa: B023
        thread.stop()
        assert not thread.is_alive


def test_bad_partitions_are_marked_told_and_never_stop_the_good_ones(place: Place) -> None:
    """LogCleanerIntegrationTest.testMarksPartitionsAsOfflineAndPopulatesUncleanableMetrics"""
    filled(place, "a", "b", "c")
    repair = place.spoil(0, topic="a")
    place.spoil(0, topic="b")
    thread = CleanerThread(place.engine, CleanerConfig(backoff_ms=5), clock=lambda: 1000)
    thread.start()
    eventually(lambda: thread.cleanings == 1 and thread.failures == 2)
    thread.stop()
    found = place.log.status(now_ms=1000)
    assert [s.state for s in found] == ["uncleanable", "uncleanable", "not due"]
    assert all(s.dirty_bytes > 0 and s.reason for s in found[:2])
    repair()
    place.log.clean("a", force=True, now_ms=1000)
    states = [s.state for s in place.log.status(now_ms=1000)]
    assert states == ["clean", "uncleanable", "not due"]


# --- beside readers, and what earlier cleanings have left ----------------------------------------


def test_a_reader_that_is_open_during_a_cleaning_sees_its_moment(place: Place) -> None:
    reader = filled(place).log.read("t", 0)
    first = next(reader)
    place.log.clean(force=True, now_ms=1)
    rest = [offset for batch in reader for offset in batch["offset"].to_pylist()]
    assert first["offset"].to_pylist() + rest == list(range(10))
    assert offsets(place.log) == [8, 9]


@pytest.mark.parametrize("text", ["{", "7", "[" * 100_000])
def test_a_note_of_an_earlier_cleaning_that_cannot_be_read_stops_none(
    place: Place, text: str
) -> None:
    filled(place)
    for name in (layout.LAST_CLEANING, layout.DELETE_HORIZON, layout.UNCLEANABLE):
        place.put_note(name, text)
    assert [stats.error for stats in place.log.clean(force=True, now_ms=1)] == [None]
    assert (offsets(place.log), place.status(1).state) == ([8, 9], "clean")


def test_a_message_says_of_each_cleaning_what_was_cleaned_and_why(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "kafkalog.cleaner")
    filled(place).append(("a", None), now_ms=1000)
    place.log.clean("t", force=True, now_ms=1000)
    end = place.state().cleaned_to
    assert f"cleaned offsets 0 to {end - 1}, because it was forced" in caplog.text
    place.log.clean("t", now_ms=1000 + 3 * DAY_MS)
    assert f"cleaned again below offset {end}, because a delete horizon" in caplog.text
