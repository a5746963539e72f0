"""What is said of a partition; every sentence has the figure that decides."""

from __future__ import annotations

import contextlib
import re

import pytest

from kafkalog.cleaner import abort_and_pause
from kafkalog.cleaner.dedup.presence import announced
from kafkalog.cli import run
from kafkalog.errors import UnknownTopicError
from tests.builders.batch_builder import ABORT, at_times, marker
from tests.builders.log_builder import NOW_MS
from tests.unit.rules.acts import utc
from tests.unit.rules.places import DAY_MS, HOUR_MS, Place


def told(place: Place, now_ms: int = NOW_MS):
    (explanation,) = place.log.explain("t", now_ms=now_ms)
    return explanation


def finding(place: Place, code: str, now_ms: int = NOW_MS):
    (found,) = [one for one in told(place, now_ms).findings if one.code == code]
    return found


def codes(place: Place, now_ms: int = NOW_MS) -> list[str]:
    """What is said, without that of cleaners."""
    return [one.code for one in told(place, now_ms).findings if "cleaner" not in one.code]


def of_cleaners(place: Place, now_ms: int = NOW_MS) -> list[str]:
    return [one.code for one in told(place, now_ms).findings if "cleaner" in one.code]


def running(place: Place) -> contextlib.AbstractContextManager[None]:
    """Do as a cleaner that runs somewhere."""
    return announced(place.log.root) if place.knows_its_cleaners else contextlib.nullcontext()


def filled(place: Place, rounds: int = 3, **config: object) -> Place:
    return place.topic(**{"segment_bytes": 100, **config}).rounds(rounds, "ab")


def test_an_empty_partition_is_empty(place: Place) -> None:
    place.topic(segment_bytes=100)
    assert [one.code for one in told(place).findings] == ["empty"]
    assert told(place).answer == "is clean"


def missing(place: Place) -> str:
    """The code of a cleaner that nobody sees: only a directory's locks show that none runs."""
    return "no cleaner" if place.knows_its_cleaners else "cleaner unknown"


def test_a_dirty_partition_is_due_and_needs_a_cleaner(place: Place) -> None:
    filled(place)
    assert codes(place) == ["due"]
    assert told(place).is_due
    assert "dirty ratio is 1.00" in finding(place, "due").sentence
    answer = "is due, and no cleaner runs" if place.knows_its_cleaners else "is due"
    assert told(place).answer == answer
    assert finding(place, missing(place)).commands == (f"kafkalog cleaner {place.where}",)


def test_a_cleaner_of_any_process_is_seen_while_it_runs(place: Place) -> None:
    filled(place)
    before = told(place)
    with running(place):
        assert of_cleaners(place) == ["cleaner" if place.knows_its_cleaners else missing(place)]
        expected = "will be cleaned" if place.knows_its_cleaners else before.answer
        assert told(place).answer == expected
    assert told(place) == before


def test_the_ratio_says_how_much_is_missing(place: Place) -> None:
    filled(place, min_cleanable_dirty_ratio=0.8)
    place.log.clean("t", force=True, now_ms=NOW_MS)
    place.rounds(2, "ab")
    first, second, _ = [size for size in place.sizes() if size]  # clean, dirty, active
    ratio = finding(place, "ratio")
    assert told(place).findings[0] == ratio
    share = second / (first + second)
    assert f"is {share:.2f} ({second} bytes dirty of {first + second} bytes)" in ratio.sentence
    assert "min.cleanable.dirty.ratio, 0.8" in ratio.sentence
    missing = int(ratio.sentence.split("with ")[1].split(" ")[0])
    assert (second + missing) / (first + second + missing) > 0.8
    assert (second + missing - 2) / (first + second + missing - 2) <= 0.8
    assert f"It was cleaned last at {utc(NOW_MS)[:16]}" in ratio.sentence


def test_a_lower_ratio_is_advised_in_tenths_and_only_below_the_present_one(place: Place) -> None:
    filled(place, min_cleanable_dirty_ratio=1)
    place.log.clean("t", force=True, now_ms=NOW_MS)
    advised = []
    place.rounds(1, "ab")
    for _ in range(12):
        place.rounds(1, "ab")
        found = finding(place, "ratio")
        ratio = place.status(NOW_MS).dirty_ratio
        advised.append(found.commands[-1].rpartition("min.cleanable.dirty.ratio=")[2])
        if len(found.commands) == 1:
            assert ratio <= 0.1
        else:
            assert float(advised[-1]) == round(float(advised[-1]), 1)
            assert 0 < ratio - float(advised[-1]) < 0.1001
    assert "0.8" in advised


def test_what_lies_in_the_active_segment_waits_for_the_next_one(place: Place) -> None:
    filled(place, segment_bytes=100_000, segment_ms=2 * HOUR_MS)
    active = finding(place, "active segment")
    assert told(place).answer == "is not due"
    assert "from offset 0 on" in active.sentence
    assert f"({place.sizes()[0]} bytes of 97.7 KiB)" in active.sentence
    assert "2 hours" in active.sentence
    assert f"kafkalog clean {place.where} t --force" in str(active.remedy)


def test_an_active_segment_alone_is_told_with_the_cleaner_that_is_missing(place: Place) -> None:
    filled(place, 1)
    assert codes(place) == ["active segment"]
    assert of_cleaners(place) == [missing(place)]
    found = finding(place, missing(place))
    assert found.commands == (f"kafkalog cleaner {place.where}",)
    assert found.remedy is not None and found.commands[0] in found.remedy
    if place.knows_its_cleaners:
        with running(place):
            assert of_cleaners(place) == []


@pytest.mark.parametrize(
    ("clean", "dirty", "ratio", "missing"),
    [
        (0, 1, 0.5, "once it has 64 KiB, as less would save too little room."),
        (9000, 3000, 0.5, "once the dirty ratio, .*dirty.ratio, 0.5; now it is 0.2[45]."),
        (9000, 1, 0.5, "once it has .* KiB, as less .*dirty.ratio, 0.5; now it is 0.00."),
    ],
)
def test_of_what_closes_an_active_segment_only_what_is_missing_is_said(
    place: Place, clean: int, dirty: int, ratio: float, missing: str
) -> None:
    place.topic(min_cleanable_dirty_ratio=ratio)
    rows = [(f"k{number}", "v" * 80) for number in range(clean)]
    if rows:
        place.commits([rows])
        place.log.clean("t", force=True, now_ms=NOW_MS)
    place.commits([[(f"k{number}", "w" * 80) for number in range(dirty)]])
    sentence = finding(place, "active segment").sentence
    assert re.search(missing + "$", sentence)
    assert ("as less would" in sentence) == ("as less" in missing)


def test_an_active_segment_that_is_full_ends_with_the_next_append(place: Place) -> None:
    filled(place, segment_bytes=100_000)
    sentence = finding(place, "active segment").sentence
    assert "an append that would take it above segment.bytes" in sentence
    place.log.alter_topic("t", {"segment.bytes": str(place.sizes()[0] - 1)})
    sentence = finding(place, "active segment").sentence
    assert "has reached segment.bytes" in sentence
    assert "so the next append begins another one" in sentence


def test_where_the_ratio_is_the_cause_only_a_forced_cleaning_helps(place: Place) -> None:
    filled(place, 1, min_cleanable_dirty_ratio=1).roll().rounds(1, "ab")
    assert finding(place, "ratio").commands[0] == f"kafkalog clean {place.where} t --force"
    place.log.alter_topic("t", {"min.cleanable.dirty.ratio": "0"})
    assert finding(place, "due").commands == (f"kafkalog clean {place.where} t",)


def test_a_lag_ends_at_a_known_time(place: Place) -> None:
    filled(place, min_compaction_lag_ms=HOUR_MS)
    lag = finding(place, "lag")
    assert lag.until_ms == NOW_MS + HOUR_MS
    assert utc(NOW_MS + HOUR_MS) in lag.sentence
    assert "1 hour" in lag.sentence
    before = finding(place, "lag", NOW_MS + HOUR_MS - 1)
    assert codes(place, NOW_MS + HOUR_MS - 1)[0] == "lag"
    assert before.commands == lag.commands  # the advice is the same at any time
    assert lag.commands[0].endswith("min.compaction.lag.ms=0")
    assert codes(place, NOW_MS + HOUR_MS)[0] == "due"


@pytest.mark.parametrize("config", [{"segment_bytes": 100_000}, {}])
def test_a_lag_holds_back_the_active_segment_too(place: Place, config: dict[str, int]) -> None:
    filled(place, 1, min_compaction_lag_ms=HOUR_MS, **config)
    assert codes(place)[:2] == ["lag", "active segment"]
    assert finding(place, "lag").until_ms == NOW_MS + HOUR_MS
    assert "lag" not in codes(place, NOW_MS + HOUR_MS)


def test_the_longest_lag_makes_it_due(place: Place) -> None:
    filled(place, max_compaction_lag_ms=HOUR_MS, min_cleanable_dirty_ratio=1.0)
    assert codes(place, NOW_MS + HOUR_MS)[0] == "ratio"
    due = finding(place, "due", NOW_MS + 3 * HOUR_MS)
    assert "max.compaction.lag.ms (1 hour) passed 2 hours ago" in due.sentence


def test_an_open_transaction_is_told_with_its_producer_and_its_age(place: Place) -> None:
    place.topic(segment_bytes=100)
    for batch in (
        at_times(0), at_times(1, (4, 5), 7, transactional=True), at_times(3), at_times(4)
    ):  # fmt: skip
        place.append_raw(batch)
    found = finding(place, "transaction")
    assert "producer 7 is open from offset 1 on" in found.sentence
    assert "since " in found.sentence
    assert codes(place)[0] == "due"  # what lies below
    place.append_raw(marker(5, ABORT, 7))
    assert "transaction" not in codes(place)


def test_the_lowest_barrier_is_told_first(place: Place) -> None:
    place.topic(segment_bytes=100, min_compaction_lag_ms=HOUR_MS)
    place.append_raw(at_times(0, (1,), 7, transactional=True)).rounds(3, "ab")
    assert codes(place) == ["transaction", "lag", "active segment"]
    if place.knows_its_cleaners:  # it would not help
        assert "--force" not in str(finding(place, "no cleaner").remedy)


def test_another_policy_is_the_only_thing_told(place: Place) -> None:
    filled(place, policy="delete")
    assert [one.code for one in told(place).findings] == ["policy"]
    policy = finding(place, "policy")
    assert "cleanup.policy is delete" in policy.sentence
    assert policy.remedy is not None
    assert "--config cleanup.policy=compact" in policy.remedy
    place.log.alter_topic("t", {"cleanup.policy": ""})
    assert "is empty" in finding(place, "policy").sentence


@pytest.mark.parametrize(
    ("config", "code"),
    [
        ({"policy": "delete"}, "policy"),
        ({"segment_bytes": 100, "min_compaction_lag_ms": DAY_MS}, "lag"),
        ({"segment_bytes": 100, "min_cleanable_dirty_ratio": 1}, "ratio"),
        ({}, "active segment"),
    ],
)
def test_explain_says_what_a_partition_waits_for(
    place: Place, config: dict[str, object], code: str
) -> None:
    place.topic(**config)
    for number in range(8):
        place.append((f"k{number}", "v" * 40), now_ms=NOW_MS + number)
    found = told(place, NOW_MS + 20_000)
    assert (found.is_due, found.findings[0].code) == (False, code)


def test_an_uncleanable_partition_says_why_since_when_and_until_when(place: Place) -> None:
    filled(place)
    retry_at_ms = place.mark("a bad batch", now_ms=NOW_MS + HOUR_MS, failures=2)
    found = told(place, NOW_MS + HOUR_MS)
    assert not found.is_due
    assert [one.code for one in found.findings] == ["uncleanable", "due"]
    (mark, _) = found.findings
    assert f"since {utc(NOW_MS + HOUR_MS)}, 2 times in a row: a bad batch." in mark.sentence
    assert f"until {utc(retry_at_ms)}" in mark.sentence
    assert mark.until_ms == retry_at_ms
    assert "tries again" in finding(place, "uncleanable", retry_at_ms).sentence


def test_the_command_that_explain_names_shows_the_damage(
    place: Place, capsys: pytest.CaptureFixture[str]
) -> None:
    filled(place).spoil(1)
    assert place.log.clean(now_ms=NOW_MS)[0].error
    (command,) = finding(place, "uncleanable").commands
    assert run(command.split()[1:]) == 1
    assert "damage" in capsys.readouterr().out


def test_a_running_cleaning_is_reported(place: Place) -> None:
    filled(place)
    before = told(place)
    with place.at_work(now_ms=NOW_MS):
        if place.shows_who_is_at_work:
            assert codes(place)[0] == "cleaning"
            assert told(place).answer == "is being cleaned"
        else:
            assert told(place) == before


def test_a_paused_partition_is_reported(place: Place) -> None:
    filled(place)
    if place.can_be_paused:
        with abort_and_pause(place.log, "t", 0):
            assert codes(place) == ["paused", "due"]
            assert not told(place).is_due
    assert told(place).is_due


def test_tombstones_wait_until_a_known_time(place: Place) -> None:
    place.topic(segment_bytes=100, delete_retention_ms=HOUR_MS).append(("a", None), ("b", None))
    place.log.clean("t", force=True, now_ms=NOW_MS)
    assert codes(place) == ["all clean", "tombstones"]
    found = finding(place, "tombstones")
    assert found.sentence.startswith("2 tombstones stay for followers to see")
    assert found.until_ms == NOW_MS + HOUR_MS
    due = finding(place, "due", NOW_MS + HOUR_MS)
    assert "delete horizon" in due.sentence


def test_a_topic_that_is_not_there_is_an_error(place: Place) -> None:
    with pytest.raises(UnknownTopicError):
        place.topic().log.explain("u", now_ms=NOW_MS)


def test_dirt_that_a_lag_keeps_in_closed_segments_is_not_said_to_be_in_the_active_one(
    place: Place,
) -> None:
    place.topic(segment_bytes=1024, min_compaction_lag_ms=HOUR_MS)
    place.commits([[(f"k{n}", "x" * 20) for n in range(10)]] * 4)
    sentence = finding(place, "active segment").sentence
    assert sentence.startswith("The rest is in the active segment, from offset ")


def test_a_lowered_delete_retention_does_not_change_what_is_said_of_a_horizon(
    place: Place,
) -> None:
    place.topic(delete_retention_ms=HOUR_MS).append(("a", None))
    place.log.clean("t", force=True, now_ms=NOW_MS)
    place.log.alter_topic("t", {"delete.retention.ms": "2000"})
    found = finding(place, "tombstones")
    assert found.until_ms == NOW_MS + HOUR_MS
    assert "delete.retention.ms (" not in found.sentence and "2 s" not in found.sentence
