"""What retention takes: by log start, by size, by time; whole segments, and never too much."""

from __future__ import annotations

import threading

import pytest

from kafkalog.cleaner import CleanerConfig, CleanerStats, CleanerThread
from kafkalog.errors import InvalidInputError, OffsetOutOfRangeError, UnknownTopicError
from kafkalog.log import KafkaLog
from kafkalog.storage_engine.format import layout
from tests.builders.batch_builder import at_times
from tests.builders.log_contents import offsets, values
from tests.unit.rules.acts import Written, eventually
from tests.unit.rules.places import DAY_MS, HOUR_MS, Place

START_MS = 1_700_000_000_000


def filled(place: Place, *, hours: int = 6, **config: object) -> Place:
    """A topic with one record an hour, each in a segment of its own."""
    place.topic(**{"policy": "delete", "segment_bytes": 100, **config})
    for hour in range(hours):
        append(place, hour)
    return place


def append(place: Place, hour: float) -> None:
    place.append((f"k{hour}", f"{hour}".zfill(30)), now_ms=at(hour))


def at(hour: float) -> int:
    return START_MS + int(hour * HOUR_MS)


# --- by time -------------------------------------------------------------------------------------


def test_segments_go_when_their_latest_record_is_older_than_retention_ms(place: Place) -> None:
    filled(place, retention_ms=3 * HOUR_MS)
    assert place.engine.apply_retention(now_ms=at(3)) == []  # exactly as old: kept
    (stats,) = place.engine.apply_retention(now_ms=at(4.5))
    assert (stats.log_start_offset, stats.segments, stats.error) == (2, 2, None)
    assert stats.bytes_removed == 2 * place.sizes()[0]
    assert place.log.offsets("t") == {0: (2, 6)}
    assert (offsets(place.log), place.bases()) == ([2, 3, 4, 5], [2, 3, 4, 5])


def test_where_all_segments_go_the_active_one_is_rolled_first(place: Place) -> None:
    filled(place, retention_ms=HOUR_MS)
    (stats,) = place.engine.apply_retention(now_ms=at(100))
    assert (stats.log_start_offset, stats.segments) == (6, 6)
    assert (place.bases(), place.log.offsets("t")) == ([6], {0: (6, 6)})
    assert place.engine.apply_retention(now_ms=at(200)) == []  # an empty active segment stays
    append(place, 201)
    assert offsets(place.log) == [6]
    assert values(place.other()) == [b"201".zfill(30)]


def test_the_walk_stops_at_the_first_segment_that_stays(place: Place) -> None:
    filled(place, hours=1, retention_ms=2 * HOUR_MS)
    for hour in (9, 1, 9):
        append(place, hour)
    place.engine.apply_retention(now_ms=at(9))
    assert place.bases() == [1, 2, 3]


def test_retention_ms_of_minus_one_keeps_everything(place: Place) -> None:
    filled(place, retention_ms=-1)
    assert place.engine.apply_retention(now_ms=at(10**6)) == []


def test_the_active_segment_counts_with_its_latest_record_though_no_index_has_it(
    place: Place,
) -> None:
    filled(place, hours=0, retention_ms=HOUR_MS, segment_bytes=100_000)
    append(place, 0)
    append(place, 5)
    assert place.engine.apply_retention(now_ms=at(5.5)) == []
    assert place.engine.apply_retention(now_ms=at(6.5))[0].log_start_offset == 2


def test_records_without_a_time_are_as_old_as_their_file(place: Place) -> None:
    """Or as their object, in a store: it is as old as the commit that brought it."""
    place.topic(policy="delete", retention_ms=1000)
    for base, now_ms in ((0, 5_000), (1, 7_000)):
        place.append_raw(at_times(base, (-1,)), now_ms=now_ms)
        place.set_age(base, now_ms).roll()
    assert place.engine.apply_retention(now_ms=6_000) == []
    assert place.engine.apply_retention(now_ms=6_001)[0].log_start_offset == 1


@pytest.mark.parametrize(
    ("keep", "segment", "config"),
    [
        (30, 7, {}),
        (10, 3, {"segment_ms": 3 * DAY_MS}),
        (20, 1, {"segment_bytes": 100}),
        (5, 7, {"policy": "compact,delete"}),
    ],
)
def test_records_go_with_their_segment_once_its_last_one_is_too_old(
    place: Place, keep: int, segment: int, config: dict[str, object]
) -> None:
    """A record a day; a segment takes those of at most `segment` days after its first one."""
    place.topic(**{"policy": "delete", "retention_ms": keep * DAY_MS, **config})
    starts = []
    for day in range(keep + 2 * segment + 3):
        place.append((f"k{day}", "v"), now_ms=at(24 * day))
        place.turn(at(24 * day) + 1)
        starts.append(place.log.offsets("t")[0][0])
    for day, start in enumerate(starts):
        assert day - keep - segment <= start <= max(0, day - keep + 1)
    assert starts[-1] > 0


# --- by size -------------------------------------------------------------------------------------


def test_the_oldest_segments_go_while_retention_bytes_stay(place: Place) -> None:
    filled(place, retention_ms=-1)
    size = place.sizes()[0]
    for limit, start in ((3 * size + 1, 2), (3 * size, 3), (0, 6)):
        place.log.alter_topic("t", {"retention.bytes": str(limit)})
        assert place.engine.apply_retention(now_ms=at(6))[0].log_start_offset == start
        assert place.engine.apply_retention(now_ms=at(6)) == []
    assert place.bases() == [6]


def test_size_comes_before_time(place: Place) -> None:
    filled(place, retention_ms=2 * HOUR_MS)
    place.log.alter_topic("t", {"retention.bytes": str(5 * place.sizes()[0])})
    assert place.engine.apply_retention(now_ms=at(4.5))[0].log_start_offset == 3


# --- by log start, by policy ---------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["compact", ""])
def test_without_the_policy_delete_only_what_lies_below_the_log_start_goes(
    place: Place, policy: str
) -> None:
    filled(place, retention_ms=1, retention_bytes=1)
    place.log.delete_records("t", 0, 3, now_ms=at(6))
    place.log.alter_topic("t", {"cleanup.policy": policy})
    stats = place.engine.apply_retention(now_ms=at(10**6))
    told = [(one.log_start_offset, one.segments) for one in stats]
    assert told == ([(3, 3)] if place.keeps_what_lies_below_the_log_start else [])
    assert (offsets(place.log), place.bases()) == ([3, 4, 5], [3, 4, 5])


def test_only_the_named_topic_is_looked_at(place: Place) -> None:
    filled(place, retention_ms=1)
    place.topic("u", 2, policy="delete", retention_ms=1)
    assert place.engine.apply_retention("u", now_ms=at(10**6)) == []
    assert place.bases() == [0, 1, 2, 3, 4, 5]
    with pytest.raises(UnknownTopicError):
        place.engine.apply_retention("v")


def test_a_log_opened_read_only_is_not_retained(place: Place) -> None:
    filled(place, hours=1, retention_ms=1)
    with pytest.raises(InvalidInputError, match="opened read-only"):
        place.other(read_only=True)._log.apply_retention(now_ms=at(10**6))


# --- readers -------------------------------------------------------------------------------------


def test_reading_below_the_log_start_names_the_valid_range(place: Place) -> None:
    filled(place, retention_ms=3 * HOUR_MS)
    place.engine.apply_retention(now_ms=at(4.5))
    with pytest.raises(OffsetOutOfRangeError, match=r"offset 1 is out of range.*\[2, 6\]"):
        list(place.log.read("t", 0, 1))


def test_a_reader_that_is_open_reads_on(place: Place) -> None:
    filled(place, retention_ms=HOUR_MS, file_delete_delay_ms=0)
    reader = place.log.read("t", 0)
    first = next(reader)
    place.engine.apply_retention(now_ms=at(100))
    rest = [offset for batch in reader for offset in batch["offset"].to_pylist()]
    assert first["offset"].to_pylist() + rest == [0, 1, 2, 3, 4, 5]


# --- delete_records ------------------------------------------------------------------------------


def test_deleted_records_are_gone_at_once_and_their_segments_later(place: Place) -> None:
    filled(place, hours=4, segment_bytes=100_000)
    assert place.log.delete_records("t", 0, 2, now_ms=at(4)) == 2
    assert offsets(place.other()) == [2, 3]
    assert place.engine.apply_retention(now_ms=at(4)) == []  # the segment holds younger ones too
    state = place.state()
    assert (state.log_start_offset, state.first_dirty_offset) == (2, 2)
    with pytest.raises(OffsetOutOfRangeError, match=r"\[2, 4\]"):
        list(place.log.read("t", 0, 1))


def test_minus_one_deletes_up_to_the_high_watermark(place: Place) -> None:
    filled(place, hours=4)
    assert place.log.delete_records("t", 0, -1, now_ms=at(4)) == 4
    assert offsets(place.log) == []
    place.engine.apply_retention(now_ms=at(4))
    assert len(place.bases()) == 1  # the active one stays
    append(place, 5)
    assert offsets(place.log) == [4]


def test_the_log_start_is_never_lowered(place: Place) -> None:
    filled(place)
    assert place.log.delete_records("t", 0, 4, now_ms=at(6)) == 4
    number = place.engine.state().number
    assert place.log.delete_records("t", 0, 2, now_ms=at(6)) == 4
    assert place.engine.state().number == number


@pytest.mark.parametrize("before", [-2, 7])
def test_records_out_of_range_cannot_be_deleted(place: Place, before: int) -> None:
    filled(place)
    with pytest.raises(OffsetOutOfRangeError, match=rf"offset {before} .*\[0, 6\]"):
        place.log.delete_records("t", 0, before)
    with pytest.raises(InvalidInputError, match="there is no 1"):
        place.log.delete_records("t", 1, 0)


@pytest.mark.parametrize("policy", ["compact", ""])
def test_records_are_deleted_only_where_the_policy_has_delete(place: Place, policy: str) -> None:
    filled(place, policy=policy)
    with pytest.raises(InvalidInputError, match=r"cleanup\.policy has delete"):
        place.log.delete_records("t", 0, 1)


# --- beside a cleaner ----------------------------------------------------------------------------


def two_an_hour(place: Place, *topics: str, **config: object) -> Place:
    """Topics with two records an hour, of a key that comes again and of one that does not."""
    for topic in topics or ("t",):
        place.topic(topic, segment_bytes=100, **config)
        for hour in range(6):
            place.append(("a", f"{hour}"), (f"k{hour}", "x"), now_ms=hour * HOUR_MS + 1)
    return place


def start(log: KafkaLog, topic: str = "t") -> tuple[int, int]:
    state = log.describe(topic).partitions[0]
    return state.log_start_offset, state.first_dirty_offset


def test_compact_delete_is_cleaned_and_then_loses_its_old_segments(place: Place) -> None:
    two_an_hour(place, policy="compact,delete", retention_ms=3 * HOUR_MS)
    (stats,) = place.log.clean(now_ms=int(4.5 * HOUR_MS))
    assert stats.error is None
    assert start(place.log) == (4, 10)
    assert offsets(place.log) == [5, 7, 8, 9, 10, 11]
    assert place.log.clean(now_ms=int(4.5 * HOUR_MS)) == []


def test_compact_alone_keeps_every_key_however_old(place: Place) -> None:
    two_an_hour(place, retention_ms=1, retention_bytes=1)
    place.log.clean(now_ms=10**9 * HOUR_MS)
    assert start(place.log)[0] == 0
    assert len(place.latest_offsets()) == 7


def test_nothing_below_the_log_start_is_dirty_or_cleaned_into_another_segment(
    place: Place,
) -> None:
    two_an_hour(place, policy="compact,delete", retention_ms=-1, min_cleanable_dirty_ratio=0)
    place.log.alter_topic("t", {"segment.bytes": "100000"})  # cleaned, all would be one segment
    place.log.delete_records("t", 0, 7, now_ms=1)
    assert start(place.log) == (7, 7)
    (stats,) = place.log.clean(now_ms=1)
    assert stats.start_offset == 7
    assert place.latest_offsets() == [7, 9, 10, 11]
    place.engine.apply_retention(now_ms=1)
    assert place.bases() == [6, 10]
    assert place.latest_offsets() == [7, 9, 10, 11]


def test_records_deleted_during_a_round_stay_clean(place: Place) -> None:
    two_an_hour(place, policy="compact,delete", retention_ms=-1)
    other = place.other()
    place.log.clean(now_ms=1, progress=lambda _: other.delete_records("t", 0, -1, now_ms=1))
    assert start(place.log) == (12, 12)
    assert place.latest_offsets() == []
    assert place.status(1).state == "clean"


def test_an_uncleanable_partition_is_not_retained(place: Place) -> None:
    two_an_hour(place, "t", "u", policy="compact,delete", retention_ms=1)
    place.mark(topic="t", now_ms=100 * HOUR_MS)
    place.turn(100 * HOUR_MS + 1)
    assert [start(place.log, topic)[0] for topic in ("t", "u")] == [0, 12]


@pytest.mark.parametrize("policy", ["delete", "compact,delete"])
def test_the_thread_applies_retention(place: Place, policy: str) -> None:
    two_an_hour(place, policy=policy, retention_ms=3 * HOUR_MS)
    clock = [int(4.5 * HOUR_MS)]
    config = CleanerConfig(backoff_ms=5, retention_check_interval_ms=HOUR_MS)
    thread = CleanerThread(place.engine, config, clock=lambda: clock[0])
    thread.start()
    try:
        eventually(lambda: thread.segments_deleted == 2)
        clock[0] += HOUR_MS
        eventually(lambda: thread.segments_deleted == 3)
    finally:
        thread.stop()
    assert place.log.offsets("t")[0] == (6, 12)
    assert thread.failures == 0


def test_the_thread_looks_at_topics_without_compact_only_at_their_interval(place: Place) -> None:
    two_an_hour(place, "c", "d", policy="delete", retention_ms=3 * HOUR_MS)
    changed = {"cleanup.policy": "compact,delete", "min.cleanable.dirty.ratio": "1"}
    place.log.alter_topic("c", changed)
    clock = [0]
    config = CleanerConfig(backoff_ms=5, retention_check_interval_ms=10 * HOUR_MS)
    thread = CleanerThread(place.engine, config, clock=lambda: clock[0])
    thread.start()
    try:
        eventually(lambda: thread._all_retained_ms == 0)
        clock[0] = 5 * HOUR_MS
        eventually(lambda: thread.segments_deleted == 2)
        assert [place.log.offsets(name)[0][0] for name in "cd"] == [4, 0]
        clock[0] = 10 * HOUR_MS
        eventually(lambda: thread.segments_deleted == 12)
    finally:
        thread.stop()


@pytest.mark.parametrize("rounds", [0, 1, 2])
@pytest.mark.parametrize("deleted_below", [4, 5, 7])
@pytest.mark.parametrize("is_aborted", [False, True])
def test_a_transaction_that_lost_its_beginning_is_not_damage(
    place: Place, is_aborted: bool, deleted_below: int, rounds: int
) -> None:
    log = Written.create(place, policy="compact,delete", retention_ms=-1)
    log.data(1, 2)
    log.transact(7, 1, 2)
    log.roll()
    log.mark(7, int(not is_aborted))  # offset 4: of the segment before it retention takes all
    log.data(1, 3)
    log.roll()
    log.data(1, 4)
    place.log.delete_records("t", 0, deleted_below)
    for now_ms in range(rounds):
        place.make_due(now_ms * 100_000_000).one_round(now_ms * 100_000_000)
    assert place.findings() == []
    place.engine.apply_retention(now_ms=0)
    assert place.findings() == []


def test_a_topic_that_is_deleted_while_it_is_cleaned_stops_the_cleaner_cleanly(
    place: Place,
) -> None:
    two_an_hour(place, "t", "u")
    other = place.other()
    deleter = threading.Thread(target=other.delete_topic, args=("t",), kwargs={"now_ms": 10**14})

    def delete(stats: CleanerStats) -> None:
        if deleter.ident is None:
            assert stats.topic == "t"
            deleter.start()  # in a directory it waits until the cleaning lets go
            eventually(lambda: "t" not in place.log.topics())

    assert [s.topic for s in place.log.clean(now_ms=1, progress=delete)] == ["u"]
    deleter.join(120)
    place.topic("t")
    assert place.note(layout.UNCLEANABLE) is None
    assert [s.topic for s in place.log.status(now_ms=1)] == ["t", "u"]
    assert place.findings() == []
