"""The threads of the background cleaner: their death, other settings, what they leave and count.

A test names the fault of Kafka's, or the test of Kafka's, that it stands for.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from kafkalog.cleaner import CleanerConfig, CleanerThread
from kafkalog.errors import InvalidInputError
from kafkalog.storage_engine.format import layout
from tests.builders.batch_builder import CONTROL, TRANSACTIONAL
from tests.builders.log_contents import offsets
from tests.unit.cleaner.naive import batch, dump, latest_values, records_of
from tests.unit.rules.acts import Written, eventually
from tests.unit.rules.places import HOUR_MS, Place
from tests.unit.rules.test_manager import MINUTE, filled

QUICK = CleanerConfig(backoff_ms=5)


@contextmanager
def running(
    place: Place, config: CleanerConfig = QUICK, *, clock: list[int] | None = None
) -> Iterator[CleanerThread]:
    thread = CleanerThread(place.engine, config, clock=lambda: clock[0] if clock else 1_000)
    thread.start()
    try:
        yield thread
    finally:
        thread.stop()


# --- several at once -----------------------------------------------------------------------------


@pytest.mark.slow
def test_threads_and_writers_at_the_same_time_agree(place: Place) -> None:
    filled(place, "a", "b", min_cleanable_dirty_ratio=0)
    with running(place, CleanerConfig(threads=4, backoff_ms=1)) as thread:
        for i in range(60):
            place.to("a" if i % 2 else "b").append(("a", f"new {i}"), (f"k{i}", "x"), now_ms=1)
        eventually(lambda: all(s.state != "dirty" for s in place.log.status(now_ms=1_000)))
    assert (thread.failures, thread.deaths) == (0, 0)
    for topic, last in (("a", 59), ("b", 58)):
        found = latest_values(records_of(dump(place.engine, topic)))
        assert found[b"a"] == (68, f"new {last}".encode())
        assert len(found) == 2 + 30


def test_a_partition_that_another_one_cleaned_meanwhile_is_not_cleaned_again(place: Place) -> None:
    filled(place)

    def be_quicker(_: object) -> None:
        assert place.one_round(1_000) is not None
        place.append(("a", "x"), ("b", "x"), now_ms=1_000)  # work, but not enough to be due

    assert place.one_round(1_000, watch=be_quicker) is None
    assert place.state().first_dirty_offset == 8


# --- death and faults ----------------------------------------------------------------------------


class Killed(BaseException):
    """Nothing that a thread handles."""


def test_a_thread_that_dies_is_counted_and_replaced(place: Place) -> None:
    """LogCleanerIntegrationTest.testIsThreadFailed"""
    calls = 0

    def clock() -> int:
        nonlocal calls
        calls += 1
        if calls <= 3:
            raise Killed
        return 1_000

    thread = CleanerThread(filled(place).engine, QUICK, clock=clock)
    assert (thread.deaths, thread.dead_threads) == (0, 0)
    thread.start()
    eventually(lambda: thread.cleanings == 1)
    assert (thread.deaths, thread.dead_threads, thread.is_alive) == (3, 0, True)
    thread.stop()
    assert (thread.deaths, thread.dead_threads, thread.is_alive) == (3, 0, False)


def test_the_death_of_one_thread_leaves_the_others_at_work(place: Place) -> None:
    doomed: list[int] = []

    def clock() -> int:
        if not doomed:
            doomed.append(threading.get_ident())
            raise Killed
        return 1_000

    config = CleanerConfig(threads=2, backoff_ms=10**6)
    thread = CleanerThread(filled(place).engine, config, clock=clock)
    thread.start()
    eventually(lambda: thread.cleanings == 1 and thread.deaths == 1)
    started = time.monotonic()
    thread.stop()  # at once, though the new thread still pauses
    assert time.monotonic() - started < 60


def test_an_error_of_the_clock_does_not_end_the_thread(place: Place) -> None:
    calls = []

    def clock() -> int:
        calls.append(1)
        if len(calls) < 3:
            raise OSError("no time")
        return 1_000

    thread = CleanerThread(filled(place).engine, CleanerConfig(backoff_ms=1), clock=clock)
    thread.start()
    eventually(lambda: thread.cleanings == 1)
    thread.stop()
    assert thread.failures == 2


def test_a_partition_that_fails_leaves_the_thread_and_the_others_alone(place: Place) -> None:
    """KAFKA-7215: one bad partition was the end of all cleaning"""
    filled(place, "bad", "good", min_cleanable_dirty_ratio=0.1).spoil(1, topic="bad")
    place.to("good")
    with running(place, CleanerConfig(backoff_ms=2, threads=2)) as thread:
        for i in range(3):
            eventually(lambda: place.status(1_000, "good").state == "not due")
            assert thread.is_alive
            for j in range(5):
                place.append(("a", f"{i}"), ("b", f"{j}"), now_ms=1_000)
        eventually(lambda: place.status(1_000, "good").state == "not due")
        assert (thread.deaths, thread.failures) == (0, 1)
    assert place.status(1_000, "bad").state == "uncleanable"


def test_a_control_batch_without_a_record_does_not_end_the_thread(place: Place) -> None:
    """KAFKA-7467"""
    log = Written.create(place, segment_bytes=75)
    for i in range(4):
        log.data(1)
        empty = batch(log.end, [("", "")], producer=3, attributes=TRANSACTIONAL | CONTROL)
        log._append(type(empty)(**{**vars(empty), "records": ()}))
        log.data(2 + i % 2)
    with running(place) as thread:
        eventually(lambda: thread.cleanings > 0)
        eventually(lambda: place.status(1_000).state == "not due")
        assert (thread.deaths, thread.failures) == (0, 0)
    data = [item for item in dump(place.engine) if not item.attributes & CONTROL]
    found = latest_values(records_of(data))
    assert {key: offset for key, (offset, _) in found.items()} == {b"1": 9, b"2": 8, b"3": 11}


def test_a_partition_that_failed_is_tried_again_without_a_restart(place: Place) -> None:
    """LinkedIn 535: in Kafka it is left alone until the broker restarts"""
    repair, clock = filled(place).spoil(1), [1_000]
    with running(place, clock=clock) as thread:
        eventually(lambda: thread.failures == 1)
        clock[0] += MINUTE
        eventually(lambda: thread.failures == 2)
        repair()
        clock[0] += 2 * MINUTE
        eventually(lambda: thread.cleanings == 1)
    assert place.note(layout.UNCLEANABLE) is None


def test_a_changed_config_ends_the_quarantine(place: Place) -> None:
    """KAFKA-19895"""
    repair = filled(place).spoil(1)
    with running(place) as thread:
        eventually(lambda: thread.failures == 1)
        repair()
        place.log.alter_topic("t", {"max.message.bytes": "2000000"})
        eventually(lambda: thread.cleanings == 1)
    assert place.status(1_000).state == "not due"


# --- other settings ------------------------------------------------------------------------------


def test_other_settings_take_hold_while_it_runs_and_counters_stay(place: Place) -> None:
    """LogCleanerTest.testMetricsActiveAfterReconfiguration, ...ParameterizedIntegrationTest
    .cleanerConfigUpdateTest
    """

    def threads() -> set[threading.Thread]:
        return {each for each in threading.enumerate() if each.name == "kafkalog-cleaner"}

    with running(filled(place)) as thread:
        eventually(lambda: thread.cleanings == 1)
        before = threads()
        thread.reconfigure(CleanerConfig(threads=2, backoff_ms=5))
        after = threads()
        assert thread.is_alive and len(after) == 2 and not before & after
        assert (thread.cleanings, thread.config.threads) == (1, 2)
        place.rounds(4, "ab", now_ms=1_000)
        eventually(lambda: thread.cleanings == 2)
        assert thread.dead_threads == thread.deaths == 0


@pytest.mark.parametrize(("now", "then", "allowed"), [
    (1, 0, False), (1, 2, True), (1, 3, False), (4, 1, False), (4, 2, True), (5, 2, True),
    (4, 8, True), (4, 9, False),
])  # fmt: skip
def test_a_number_of_threads_is_at_most_doubled_or_halved(
    place: Place, now: int, then: int, allowed: bool
) -> None:
    thread = CleanerThread(place.engine, CleanerConfig(threads=now))
    if allowed:
        thread.reconfigure(CleanerConfig(threads=then))
        assert thread.config.threads == then
    else:
        with pytest.raises(InvalidInputError, match="threads"):
            thread.reconfigure(CleanerConfig(threads=then))
        assert thread.config.threads == now
    assert not thread.is_alive


# --- without compaction --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "config", [CleanerConfig(enable=False, backoff_ms=5), CleanerConfig(threads=0, backoff_ms=5)]
)
def test_without_the_cleaner_nothing_is_compacted_and_retention_goes_on(
    place: Place, config: CleanerConfig
) -> None:
    filled(place, "compacted")
    place.topic("old", policy="delete", retention_ms=1).append(("a", "1"), now_ms=1)
    with running(place, config) as thread:
        eventually(lambda: thread.segments_deleted == 1)
    assert thread.cleanings == 0
    assert len(offsets(place.log, "compacted")) == 10


def test_without_the_cleaner_compacted_topics_are_not_retained_either(place: Place) -> None:
    filled(place, policy="compact,delete", retention_ms=1).append(("a", "1"), now_ms=1)
    place.topic("old", policy="delete", retention_ms=1).append(("a", "1"), now_ms=1)
    with running(place, CleanerConfig(enable=False, backoff_ms=5)) as thread:
        eventually(lambda: thread.segments_deleted == 1)
    assert place.state("t").log_start_offset == 0


# --- what it counts and leaves -------------------------------------------------------------------


def test_what_rounds_removed_is_what_the_log_lost(place: Place) -> None:
    count, size = len(offsets(filled(place).regroup().log)), sum(place.sizes())
    with running(place) as thread:
        eventually(lambda: thread.cleanings == 1)
    assert thread.records_removed == count - len(offsets(place.log))
    assert thread.bytes_removed == size - sum(place.sizes())


@pytest.mark.parametrize("read_only", [False, True])
def test_a_closed_log_answers_no_more(place: Place, read_only: bool) -> None:
    log = filled(place).other(read_only=read_only)
    assert log.status() and log.explain("t")
    log.close()
    for ask in (log.status, lambda: log.explain("t")):
        with pytest.raises(InvalidInputError, match="the log is closed"):
            ask()


def test_only_what_is_older_than_the_lag_is_cleaned_and_nothing_is_lost(place: Place) -> None:
    """LogCleanerLagIntegrationTest.cleanerTest"""
    place.topic(segment_bytes=300, min_compaction_lag_ms=HOUR_MS)
    now = [1_000]

    def append(name: str) -> None:
        for i in range(30):
            place.append((f"{i % 10}", f"{name} {i}"), now_ms=now[0])

    append("old")
    before = records_of(dump(place.engine))
    with running(place, clock=now) as thread:
        eventually(lambda: thread.last_look_ms == now[0])
    assert records_of(dump(place.engine)) == before  # all of it is too young
    now[0] += HOUR_MS
    boundary = place.bases()[-1]
    append("new")
    before = records_of(dump(place.engine))
    with running(place, clock=now) as thread:
        eventually(lambda: place.state().first_dirty_offset >= boundary)
    assert thread.failures == 0
    after = records_of(dump(place.engine))
    assert latest_values(after) == latest_values(before)
    young = [record for record in before if record.timestamp >= now[0]]
    assert [record for record in after if record.timestamp >= now[0]] == young
    assert len(after) < len(before)


@pytest.mark.slow
@pytest.mark.parametrize("codec", ["uncompressed", "gzip", "snappy", "lz4", "zstd"])
def test_a_log_cleaned_again_and_again_says_the_same_and_is_smaller(
    place: Place, codec: str
) -> None:
    """LogCleanerParameterizedIntegrationTest.cleanerTest"""
    sizes = {"small": 300, "large": 1_500}
    for topic, size in sizes.items():
        place.topic(topic, compression_type=codec, segment_bytes=size, min_cleanable_dirty_ratio=0)
    source = random.Random(codec)
    expected: dict[str, dict[bytes | None, bytes | None]] = {topic: {} for topic in sizes}
    with running(place, CleanerConfig(threads=2, backoff_ms=20)) as thread:
        for topic in [*sizes] * 2:
            for _ in range(25):
                pairs = [
                    (f"{source.randrange(20)}", f"{source.random()}" * source.randrange(1, 9))
                    for _ in range(source.randrange(1, 5))
                ]
                place.to(topic).append(*pairs, now_ms=1_000)
                expected[topic] |= {key.encode(): value.encode() for key, value in pairs}
            end = place.bases(topic)[-1]
            assert end > 0
            eventually(lambda: place.state(topic).first_dirty_offset >= end)  # noqa: B023
    assert (thread.failures, thread.deaths) == (0, 0)
    for topic in sizes:
        after = records_of(dump(place.engine, topic))
        found = {key: value for key, (_, value) in latest_values(after).items()}
        assert found == expected[topic]
        assert len(after) < place.state(topic).high_watermark


@pytest.mark.slow
def test_a_changed_rate_frees_a_round_that_waits(place: Place) -> None:
    """LogCleanerIntegrationTest.testReconfigureLogCleanerIoMaxBytesPerSecond"""
    filled(place).rounds(12, "ab", value=lambda number: f"{number}" + "x" * 200_000, now_ms=1000)
    slow = CleanerConfig(backoff_ms=5, io_buffer_size=1000, io_max_bytes_per_second=1)
    thread = CleanerThread(place.engine, slow, clock=lambda: 1_000)
    time.sleep(0.4)  # the rate is looked at every 300 ms
    thread.start()
    time.sleep(1.5)
    assert thread.cleanings == 0
    thread.reconfigure(CleanerConfig(backoff_ms=5, io_max_bytes_per_second=10**12))
    eventually(lambda: thread.cleanings == 1)
    thread.stop()
    assert thread.failures == 0


def test_what_was_found_due_is_told(place: Place) -> None:
    """C39"""
    filled(place, max_compaction_lag_ms=300, min_cleanable_dirty_ratio=1)
    place.topic("empty")
    waits = CleanerConfig(backoff_ms=10**6)
    with running(place, waits) as thread:
        eventually(lambda: thread.last_look_ms == 1_000)
        assert (thread.max_dirty_ratio, thread.max_compaction_delay_ms) == (1.0, 0)
    with running(place, waits, clock=[1_400]) as late:
        eventually(lambda: late.cleanings == 1)
    assert late.last_look_ms == 1_400
