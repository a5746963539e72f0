"""Cleaning a log in an object store: its requests, conflicts, deaths, and who does it."""

from __future__ import annotations

import contextlib
import logging
import random
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import pyarrow as pa
import pytest

import kafkalog
from kafkalog.cleaner import CleanerConfig, CleanerThread
from kafkalog.cleaner import spark as spark_job
from kafkalog.cleaner.key_index.key_lookup import KeyLookup
from kafkalog.cleaner.objects import upkeep
from kafkalog.cleaner.objects.fetched_objects import FetchedObjects
from kafkalog.cleaner.objects.object_moment import ObjectMoment
from kafkalog.cleaner.objects.object_round import ObjectRound
from kafkalog.cleaner.schedule import manager
from kafkalog.cleaner.schedule.partition_cleaner import PartitionCleaner
from kafkalog.cleaner.schedule.scheduler import choose
from kafkalog.cleaner.shelves import moment_of, shelf_of
from kafkalog.cleaner.state.uncleanable import read_uncleanable
from kafkalog.cli import clean as clean_verb
from kafkalog.errors import CommitInDoubtError, StorageError
from kafkalog.sink import backlog
from kafkalog.sink.options import SinkOptions
from kafkalog.sink.shared_log import shared_log
from kafkalog.storage_engine.format import layout
from kafkalog.storage_engine.object_store import collector, object_log, side_object
from kafkalog.storage_engine.object_store.object_log import ObjectLog
from kafkalog.storage_engine.object_store.store_state import stored_names
from tests.unit.rules.acts import eventually
from tests.unit.storage_engine.spoiled_client import Killed, Spoil, SpoiledClient
from tests.unit.storage_engine.store_log import Impatient, new_object_log

if TYPE_CHECKING:
    from kafkalog.cleaner.rewrite.groups import RewrittenGroup
    from kafkalog.storage_engine.object_store.client import ObjectClient

NOW_MS = 1_700_000_000_000
DAY_MS = 86_400_000
CHANGING = {"cleanup.policy": "compact,delete"}
CLOSED = {"segment.bytes": "100"}
"""Each append closes the segment of the one before."""


@pytest.fixture
def log() -> ObjectLog:
    return new_object_log()


def fill(
    log: ObjectLog, partitions: int = 1, commits: int = 4, *, keys: int = 5, topic: str = "t"
) -> None:
    """Append, in each commit, a record of each key to each partition."""
    count = keys * partitions
    for number in range(commits):
        rows = {
            "key": [b"%d" % (row // partitions) for row in range(count)],
            "value": [b"%d %d" % (number, row) for row in range(count)],
            "partition": pa.array([row % partitions for row in range(count)], pa.int32()),
        }
        log.append(topic, pa.table(rows), now_ms=NOW_MS + number)


def records(log: ObjectLog) -> dict[tuple[str, int], list[tuple[int, bytes, bytes | None]]]:
    return {
        (topic, partition): [
            (row["offset"], row["key"], row["value"])
            for batch in log.read(topic, partition)
            for row in batch.to_pylist()
        ]
        for topic in log.topics()
        for partition in log.offsets(topic)
    }


def latest(log: ObjectLog) -> dict[tuple[str, int], list[tuple[int, bytes, bytes | None]]]:
    """Return the latest record of each key, also a tombstone."""
    return {
        place: sorted({key: (offset, key, value) for offset, key, value in found}.values())
        for place, found in records(log).items()
    }


def run(log: ObjectLog, now_ms: int = NOW_MS, **options: Any) -> list[Any]:
    return manager.clean(log, force=True, now_ms=now_ms, **options)


def stored(log: ObjectLog) -> set[str]:
    return {each.name for prefix in ("data", "segments") for each in log.client.list(prefix)}


def named(log: ObjectLog) -> set[str]:
    state = log.store_state()
    entries = [*state.objects.items(), *state.dropped.items()]
    return {name for entry, each in entries for name in stored_names(entry, each)}


# --- requests ------------------------------------------------------------------------------------


@pytest.mark.parametrize("partitions", [1, 12])
def test_an_object_is_fetched_once_and_so_is_its_side(log: ObjectLog, partitions: int) -> None:
    log.create_topic("t", partitions)
    fill(log, partitions)
    upkeep.regroup_due(log, now_ms=NOW_MS, force=True)
    expected = latest(log)
    before = Counter(log.client.counts)
    assert [stats.rounds for stats in run(log)] == [1] * partitions
    counts = Counter(log.client.counts) - before
    # Of each partition: the segment, its side, and the boundary after the commit. And a poll, and
    # the boundary after the commit that closes the active segments.
    assert counts["GET"] == 3 * partitions + 2
    # Of each: the claim, the segment, its side, the commit. And the first commit.
    assert (counts["PUT"], counts["LIST"]) == (4 * partitions + 1, 0)
    assert records(log) == expected
    assert named(log) == stored(log)


def test_an_empty_partition_costs_no_request(log: ObjectLog) -> None:
    log.create_topic("t", 3)
    before = Counter(log.client.counts)
    assert run(log) == []
    assert Counter(log.client.counts) - before == {"GET": 1}  # the newest state


def test_a_key_is_looked_up_by_three_requests(
    log: ObjectLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The head of the indexes, a block of the key index, and a batch; then there are the polls.

    The secret of the key index decides which block has a key, so it is always the same one here.
    """
    monkeypatch.setattr(secrets, "token_bytes", random.Random(2).randbytes)
    monkeypatch.setattr(side_object, "BEGINNING", 9_000)
    monkeypatch.setattr(side_object, "AROUND", 0)
    log.create_topic("t")
    keys = [b"key %d" % number for number in range(20_000)]
    log.append("t", [(key, key * 2) for key in keys], now_ms=NOW_MS)
    log.append("t", [("key 7", "new")], now_ms=NOW_MS)
    run(log)
    before = Counter(log.client.counts)
    with KeyLookup(log, "t") as lookup:
        record = lookup.get(b"key 12345")
        assert record is not None and record.value == b"key 12345" * 2
        assert Counter(log.client.counts) - before == {"GET": 3 + 3}
        before = Counter(log.client.counts)
        assert lookup.get(b"key 12346") is not None
        assert (Counter(log.client.counts) - before)["GET"] <= 1 + 2
        for key in random.Random(1).sample(keys[8:], 50):
            found = lookup.get(key)
            assert found is not None and found.value == key * 2
        new = lookup.get("key 7")
        assert new is not None and new.value == b"new"
        assert lookup.get("none") is None
        assert lookup.scanned_bytes == 0


def test_a_key_is_looked_up_by_three_requests_however_many_segments_there_are(
    log: ObjectLog,
) -> None:
    """The filters of keys tell which segment has it, and stay here when the partition changes."""
    log.create_topic("t", 1, {"segment.bytes": "20000", "compression.type": "uncompressed"})
    keys = [b"key %d" % number for number in range(10_000)]
    for first in range(0, len(keys), 500):
        log.append("t", [(key, key) for key in keys[first : first + 500]], now_ms=NOW_MS)
    run(log)
    run(log)
    assert len(log.store_state().objects) > 10
    with KeyLookup(log, "t") as lookup:
        assert lookup.get("key 0") is not None  # it asks all segments

        def requests(key: bytes) -> int:
            before = Counter(log.client.counts)
            found = lookup.get(key)
            assert found is not None and found.value == key
            assert {*(Counter(log.client.counts) - before)} == {"GET"}
            return (Counter(log.client.counts) - before).total()

        counts = Counter(requests(key) for key in random.Random(1).sample(keys, 300))
        # The poll, a block and a batch; and the block of a key that passes a filter by chance.
        assert counts[4] <= 10 and {*counts} <= {1, 2, 3, 4}
        log.append("t", [("new", "new")], now_ms=NOW_MS)
        assert requests(b"new") <= 3 + 1
        assert requests(keys[5]) <= 3 + 1
        before = Counter(log.client.counts)
        assert lookup.get("none") is None
        assert (Counter(log.client.counts) - before).total() <= 2


def test_a_lookup_that_stays_open_asks_the_objects_of_now(log: ObjectLog) -> None:
    log.create_topic("t")
    fill(log)
    with KeyLookup(log, "t") as lookup:
        for act in (
            lambda: upkeep.regroup_due(log, now_ms=NOW_MS, force=True),
            lambda: run(log),
        ):
            assert lookup.get("3") is not None
            before = set(log.store_state().objects)
            act()
            assert not before & set(log.store_state().objects)
            log.client.delete([name for each in before for name in (each, each[:-3] + "side")])
        assert lookup.get("3") is not None


def test_a_clean_log_is_left_alone(log: ObjectLog) -> None:
    log.create_topic("t", 2)
    fill(log, 2)
    run(log)
    number = log.store_state().number
    before = Counter(log.client.counts)
    assert manager.clean(log, now_ms=NOW_MS) == []
    assert Counter(log.client.counts) - before == {"GET": 1}
    assert log.store_state().number == number


def test_segments_without_obsolete_records_are_neither_fetched_nor_written_again(
    log: ObjectLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are written once more, for their key index."""
    log.create_topic("t", 1, {"segment.bytes": "300", "compression.type": "uncompressed"})
    for first in range(0, 40, 8):
        rows = [(b"%d" % key, b"v" * 20) for key in range(first, first + 8)]
        log.append("t", rows, now_ms=NOW_MS)
    run(log)
    kept = set(log.store_state().objects)
    log.append("t", [("39", "w")], now_ms=NOW_MS)
    expected = latest(log)
    fetched: list[str] = []
    pieces = log.client.pieces

    def noted(name: str, size: int) -> Iterator[bytes]:
        fetched.append(name)
        return pieces(name, size)

    monkeypatch.setattr(log.client, "pieces", noted)
    run(log)
    assert records(log) == expected
    still = kept & set(log.store_state().objects)
    assert len(still) == len(kept) - 1
    assert not still & {*fetched}
    # Each input at most once: the fresh object, the dirty segment, the one with key 39, and sides.
    assert len(fetched) == len({*fetched}) == 1 + 1 + 1 + len(kept) + 1


# --- rules ---------------------------------------------------------------------------------------


def test_a_tombstone_goes_in_two_stages(log: ObjectLog) -> None:
    log.create_topic("t", 1, {"delete.retention.ms": "1000"})
    fill(log, commits=2, keys=2)
    log.append("t", [("0", None)], now_ms=NOW_MS)
    run(log)
    assert [value for _, _, value in records(log)["t", 0]] == [b"1 1", None]
    state = log.store_state()
    cleaned = state.cleaned_of(log.describe("t").topic_id, 0)
    assert cleaned is not None and layout.DELETE_HORIZON in cleaned.notes
    assert choose(ObjectMoment(log, state, NOW_MS + 999)).partitions == []
    assert choose(ObjectMoment(log, state, NOW_MS + 1000)).partitions == [("t", 0)]
    manager.clean(ObjectLog(log.address), now_ms=NOW_MS + 1000)
    assert [value for _, _, value in records(log)["t", 0]] == [b"1 1"]
    assert choose(moment_of(log, NOW_MS + DAY_MS)).partitions == []


def test_a_section_of_which_nothing_stays_is_read_and_cleaned_again(log: ObjectLog) -> None:
    log.create_topic("t", 1, {"delete.retention.ms": "0"})
    log.append("t", [("a", "1"), ("a", None)], now_ms=NOW_MS)
    run(log)
    run(log, NOW_MS + 1)
    run(log, NOW_MS + 2)
    assert records(log)["t", 0] == []
    assert log.offset_for_time("t", NOW_MS)[0] is None
    log.append("t", [("b", "1"), ("b", "2")], now_ms=NOW_MS)
    assert len(records(log)["t", 0]) == 2
    run(log, NOW_MS + 3)
    assert records(log)["t", 0] == [(3, b"b", b"2")]
    assert records(ObjectLog(log.address)) == records(log)


def test_two_empty_segments_become_one(log: ObjectLog) -> None:
    log.create_topic("t", 1, {"delete.retention.ms": "0", "segment.bytes": "1500"})
    for number in range(4):
        log.append("t", [("key", b"%d" % number * 2_000)], now_ms=NOW_MS)
        run(log, NOW_MS + number)
    state = ObjectLog(log.address).store_state()
    found = state.extents(log.describe("t").topic_id, 0)
    assert [(e.base_offset, e.next_offset) for _, e in found] == [(0, 2), (2, 3), (3, 4)]
    assert [each.extent.size > 0 for each in found] == [False, False, True]
    assert [state.time_of(each) for each in found] == [NOW_MS] * 3
    assert records(ObjectLog(log.address))["t", 0] == [(3, b"key", b"3" * 2_000)]


def test_only_the_segments_between_the_lags_and_over_the_ratio_are_due(log: ObjectLog) -> None:
    lags = {"min.compaction.lag.ms": "5000", "max.compaction.lag.ms": "100000"}
    log.create_topic("t", 1, {**lags, "min.cleanable.dirty.ratio": "0.9", **CLOSED})
    fill(log)
    log.append("t", [("active", "1")], now_ms=NOW_MS)
    upkeep.regroup_due(log, now_ms=NOW_MS, force=True)
    last_ms = NOW_MS + 3

    def due(now_ms: int) -> bool:
        return bool(choose(moment_of(log, now_ms)).partitions)

    assert [due(last_ms + ms) for ms in (-4, 4_999, 5_000)] == [False, True, True]
    manager.clean(log, now_ms=last_ms + 5_000)
    fill(log, commits=1)
    log.append("t", [("active", "2")], now_ms=NOW_MS)
    upkeep.regroup_due(log, now_ms=NOW_MS, force=True)
    assert [due(NOW_MS + ms) for ms in (6_000, 100_000, 100_001)] == [False, False, True]


def test_the_policy_delete_is_regrouped_and_not_cleaned(log: ObjectLog) -> None:
    log.create_topic("t", 1, {"cleanup.policy": "delete"})
    fill(log)
    before = records(log)
    assert run(log) == []
    assert records(log) == before
    assert log.store_state().fresh == 0


def test_retention_takes_old_segments_of_a_cleaned_topic(log: ObjectLog) -> None:
    log.create_topic("t", 1, {**CHANGING, "retention.ms": "1000"})
    fill(log)
    regrouped = upkeep.regroup_due(log, now_ms=NOW_MS, force=True)
    cleaned = manager.clean(log, force=True, now_ms=NOW_MS)
    retained = manager.retain(log, None, now_ms=NOW_MS)
    assert [len(each) for each in (regrouped, cleaned, retained)] == [1, 1, 0]
    assert len(records(log)["t", 0]) == 5
    manager.clean(log, now_ms=NOW_MS + 2000)
    retained = manager.retain(log, None, now_ms=NOW_MS + 2000)
    assert [each.log_start_offset for each in retained] == [20]
    assert records(log)["t", 0] == []


# --- conflicts -----------------------------------------------------------------------------------


def during_the_swap(log: ObjectLog, act: Callable[[ObjectLog], Any]) -> list[Any]:
    """Let another process act before the commit of a cleaning."""
    upkeep.regroup_due(log, now_ms=NOW_MS, force=True)
    other, swap, acts = ObjectLog(log.address), log.swap, [act]

    def late(*given: Any, **options: Any) -> bool:
        for each in acts:
            acts.clear()
            each(other)
        return swap(*given, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(log, "swap", late)
        return run(log)


def test_of_two_cleaners_one_is_lost_and_deletes_what_it_wrote(log: ObjectLog) -> None:
    log.create_topic("t")
    fill(log)
    expected = latest(log)
    assert during_the_swap(log, run) == []
    assert records(log) == expected
    assert named(log) == stored(log)


def test_a_round_that_was_in_vain_was_not_broken_off(log: ObjectLog) -> None:
    log.create_topic("t")
    fill(log)
    upkeep.regroup_due(log, now_ms=NOW_MS, force=True)
    upkeep.roll_active(log, now_ms=NOW_MS)
    aborted: list[Any] = []
    cleaner = PartitionCleaner(shelf=shelf_of(log), now_ms=NOW_MS, on_aborted=aborted.append)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(log, "swap", lambda *_, **__: False)
        assert cleaner.clean("t", 0, force=True) is None
    assert aborted == []


@pytest.mark.parametrize("is_regrouped", [False, True], ids=["regroup", "clean"])
def test_who_finds_its_inputs_replaced_and_deleted_is_lost(
    log: ObjectLog, monkeypatch: pytest.MonkeyPatch, is_regrouped: bool
) -> None:
    log.create_topic("t")
    fill(log)
    if is_regrouped:
        upkeep.regroup_due(log, now_ms=NOW_MS, force=True)
    expected, pieces = latest(log), log.client.pieces
    acts: list[Callable[[ObjectLog], Any]] = [run]
    lock = threading.Lock()

    def late(name: str, size: int) -> Iterator[bytes]:
        with lock:
            while acts:
                other = ObjectLog(log.address)
                acts.pop()(other)
                collector.delete_dropped(other, now_ms=NOW_MS + DAY_MS)
        return pieces(name, size)

    monkeypatch.setattr(log.client, "pieces", late)
    assert run(log) == []
    assert records(log) == expected
    assert named(log) == stored(log)
    for number in log.offsets("t"):
        cleaned = log.store_state().cleaned_of(log.describe("t").topic_id, number)
        assert cleaned is not None and layout.UNCLEANABLE not in cleaned.notes


@pytest.mark.parametrize("is_deleted", [False, True], ids=["merged", "deleted"])
def test_a_merge_plans_each_partition_by_the_newest_state(
    log: ObjectLog, monkeypatch: pytest.MonkeyPatch, is_deleted: bool
) -> None:
    log.create_topic("t", 2, {"cleanup.policy": "delete"})
    for _ in range(8):
        fill(log, 2, commits=1)
        upkeep.regroup_due(log, now_ms=NOW_MS, force=True)
    expected, swap = records(log), log.swap
    others = [ObjectLog(log.address)]

    def late(*given: Any, **options: Any) -> bool:
        while others:
            other = others.pop()
            if is_deleted:
                other.delete_topic("t", now_ms=NOW_MS)
            else:
                assert len(upkeep.merge_due(other, now_ms=NOW_MS)) == 1
        return swap(*given, **options)

    monkeypatch.setattr(log, "swap", late)
    (done,) = upkeep.merge_due(log, now_ms=NOW_MS)
    assert done.is_lost == is_deleted
    assert records(log) == ({} if is_deleted else expected)
    assert named(log) == stored(log)


def test_an_append_during_a_cleaning_stays_dirty(log: ObjectLog) -> None:
    log.create_topic("t")
    fill(log)
    assert len(during_the_swap(log, lambda other: fill(other, commits=1))) == 1
    assert len(records(log)["t", 0]) == 10
    expected = latest(log)
    run(log)
    assert records(log) == expected


@pytest.mark.parametrize(
    "act",
    [
        pytest.param(lambda other: other.delete_topic("t", now_ms=NOW_MS), id="topic"),
        pytest.param(lambda other: other.delete_records("t", 0, 17), id="some records"),
        pytest.param(lambda other: other.delete_records("t", 0, -1), id="all records"),
        pytest.param(lambda other: other.apply_retention(now_ms=NOW_MS * 2), id="retention"),
        pytest.param(
            lambda other: other.alter_topic("t", {"cleanup.policy": "delete"}), id="policy"
        ),
    ],
)
def test_what_is_deleted_during_a_cleaning_does_not_come_back(
    log: ObjectLog, act: Callable[[ObjectLog], Any]
) -> None:
    log.create_topic("t", 1, CHANGING)
    fill(log)
    during_the_swap(log, act)
    other = ObjectLog(log.address)
    assert records(log) == records(other)
    assert all(offset >= 17 for offset, _, _ in records(log).get(("t", 0), [])) or (
        log.describe("t").config["cleanup.policy"] == "delete"
    )
    assert named(log) == stored(log)


def test_a_claim_keeps_other_cleaners_away_for_ten_minutes(log: ObjectLog) -> None:
    log.create_topic("t")
    fill(log)
    upkeep.regroup_due(log, now_ms=NOW_MS, force=True)
    upkeep.roll_active(log, now_ms=NOW_MS)
    other = ObjectLog(log.address)
    with other.claim(f"{log.describe('t').topic_id}-0", now_ms=NOW_MS) as is_mine:
        assert is_mine
        assert manager.clean(log, now_ms=NOW_MS) == []
        assert len(manager.clean(log, now_ms=NOW_MS + 600_000)) == 1
    assert [*log.client.list("claims")] == []


# --- faults --------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("spoil", [Spoil.KILLED_BEFORE, Spoil.KILLED_AFTER, Spoil.FAILED])
def test_a_death_or_failure_at_any_request_leaves_all_or_nothing(
    spoil: Spoil, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(object_log, "ObjectClient", SpoiledClient)
    monkeypatch.setattr(object_log, "CommitLog", Impatient)
    number, is_spoiled = 0, True
    while is_spoiled:
        number += 1
        log = new_object_log()
        log.create_topic("t", 2)
        fill(log, 2, commits=2)
        expected = latest(log)
        assert isinstance(log.client, SpoiledClient)
        log.client.is_spoiled = False
        log.client.spoil({number: spoil})
        with contextlib.suppress(Killed, StorageError, CommitInDoubtError):
            run(log)
        is_spoiled = log.client.is_spoiled
        log.client.spoil({})
        other = ObjectLog(log.address)
        assert latest(other) == expected
        assert named(other) <= stored(other)
        run(other, NOW_MS + DAY_MS)
        assert records(other) == expected
    assert number > 30


def test_a_damaged_segment_marks_its_partition_and_stops_no_other(log: ObjectLog) -> None:
    log.create_topic("t", 2)
    fill(log, 2)
    upkeep.regroup_due(log, now_ms=NOW_MS, force=True)
    topic_id = log.describe("t").topic_id
    ((name, _),) = log.store_state().extents(topic_id, 1)
    found = log.client.get(name)
    assert found is not None
    data = bytearray(found.data)
    data[layout.BATCH_OVERHEAD + 5] ^= 1
    log.client.put_unique(name, bytes(data))
    results = {stats.partition: stats.error for stats in run(log)}
    assert results[0] is None
    assert results[1] is not None and results[1].startswith(log.root)
    cleaned = log.store_state().cleaned_of(topic_id, 1)
    assert cleaned is not None
    mark = read_uncleanable(moment_of(log, NOW_MS).notes("t", 1))
    assert mark is not None and (mark.reason, mark.failures) == (results[1], 1)

    def chosen(now_ms: int) -> list[tuple[str, int]]:
        return choose(moment_of(log, now_ms)).partitions

    assert (chosen(NOW_MS + 1), chosen(NOW_MS + 60_000)) == ([], [("t", 1)])
    log.client.put_unique(name, found.data)
    assert [stats.error for stats in manager.clean(log, now_ms=NOW_MS + 60_000)] == [None]
    cleaned = log.store_state().cleaned_of(topic_id, 1)
    assert cleaned is not None and layout.UNCLEANABLE not in cleaned.notes


def test_a_damaged_fresh_object_stays_and_is_the_error_of_its_partition(log: ObjectLog) -> None:
    log.create_topic("t")
    fill(log)
    name = sorted(log.store_state().objects)[1]
    found = log.client.get(name)
    assert found is not None
    data = bytearray(found.data)
    data[layout.BATCH_OVERHEAD + 5] ^= 1
    log.client.put_unique(name, bytes(data))
    (failed,) = run(log)
    assert failed.error is not None and f"{log.root}/{name}:" in failed.error
    assert [each for each in log.store_state().objects if each.startswith("data")] == [name]
    mark = read_uncleanable(moment_of(log, NOW_MS).notes("t", 0))
    assert mark is not None and mark.reason == failed.error
    assert manager.clean(log, now_ms=NOW_MS + 1) == []
    (again,) = run(log)
    assert again.error == failed.error
    log.client.put_unique(name, found.data)
    expected = latest(log)
    assert [stats.error for stats in run(log)] == [None]
    assert records(log) == expected
    assert log.store_state().fresh == 0
    assert read_uncleanable(moment_of(log, NOW_MS).notes("t", 0)) is None


@pytest.mark.parametrize("harmed", [0, 1])
def test_damage_in_a_fresh_object_is_the_error_of_the_partition_whose_records_it_hits(
    log: ObjectLog, harmed: int
) -> None:
    log.create_topic("t", 2)
    fill(log, 2)
    name = sorted(log.store_state().objects)[1]
    (extent,) = (e for e in log.store_state().objects[name].extents if e.partition == harmed)
    found = log.client.get(name)
    assert found is not None
    data = bytearray(found.data)
    data[extent.position + extent.size - 3] ^= 1
    log.client.put_unique(name, bytes(data))
    errors = [(stats.partition, stats.error is None) for stats in run(log)]
    assert (harmed, False) in errors and (1 - harmed, False) not in errors


def test_each_damaged_fresh_object_is_told_and_the_rest_is_cleaned_in_the_same_look(
    log: ObjectLog,
) -> None:
    for topic in ("bad", "good", "worse"):
        log.create_topic(topic, 1, CLOSED)
        fill(log, topic=topic)
    for topic in ("bad", "worse"):
        name = log.store_state().extents(log.describe(topic).topic_id, 0)[1].object_name
        log.client.put_unique(name, bytes(log.store_state().objects[name].size))
    failed: list[Any] = []
    stats = manager.clean_filthiest(log, now_ms=NOW_MS + DAY_MS, on_failed=failed.append)
    assert {each.topic for each in failed} == {"bad", "worse"}
    assert stats is not None and (stats.topic, stats.error) == ("good", None)
    thread = CleanerThread(log, clock=lambda: NOW_MS + 3 * DAY_MS)
    thread.start()
    eventually(lambda: thread.failures == 2)
    thread.stop()
    assert (thread.failures, thread.aborts) == (2, 0)


def test_a_partition_of_which_nothing_could_be_tried_keeps_its_mark(log: ObjectLog) -> None:
    log.create_topic("t")
    fill(log)
    shelf_of(log).mark("t", 0, StorageError("damaged"), now_ms=NOW_MS)
    cleaner = PartitionCleaner(shelf=shelf_of(log), now_ms=NOW_MS)
    assert cleaner.clean("t", 0, force=True) is None
    assert read_uncleanable(moment_of(log, NOW_MS).notes("t", 0)) is not None


def test_a_round_that_is_made_again_counts_once(
    log: ObjectLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    log.create_topic("t", 1, CHANGING)
    fill(log)
    upkeep.regroup_due(log, now_ms=NOW_MS, force=True)
    upkeep.roll_active(log, now_ms=NOW_MS)
    count = len(records(log)["t", 0])
    answers = [False]
    swap = log.swap

    def second(*given: Any, **named: Any) -> bool:
        return answers.pop() if answers else swap(*given, **named)

    monkeypatch.setattr(log, "swap", second)
    cleaner = PartitionCleaner(shelf=shelf_of(log), now_ms=NOW_MS, waits=True)
    stats = cleaner.clean("t", 0, force=True, until_clean=True)
    assert stats is not None and (stats.rounds, stats.records_read) == (1, count)


def test_damage_of_a_topic_that_is_not_compacted_does_not_fail_a_cleaning(log: ObjectLog) -> None:
    log.create_topic("t", 1, {"cleanup.policy": "delete"})
    fill(log, commits=1)
    (name,) = log.store_state().objects
    log.client.put_unique(name, bytes(log.store_state().objects[name].size))
    assert run(log) == []
    assert read_uncleanable(moment_of(log, NOW_MS).notes("t", 0)) is None


def test_retention_leaves_an_uncleanable_partition_alone(log: ObjectLog) -> None:
    log.create_topic("t", 2, {"cleanup.policy": "compact,delete", "retention.ms": "1000"})
    fill(log, 2)
    later_ms = NOW_MS + DAY_MS
    shelf_of(log).mark("t", 1, StorageError("damaged"), now_ms=NOW_MS)
    assert [each.partition for each in manager.retain(log, now_ms=later_ms)] == [0]
    shelf_of(log).mark("t", 1, OSError(28, "No space"), now_ms=NOW_MS)
    assert [each.partition for each in manager.retain(log, now_ms=later_ms)] == [1]


@pytest.mark.parametrize("is_forced", [False, True])
def test_a_commit_in_doubt_marks_its_partition_and_is_tried_again_later(
    log: ObjectLog, monkeypatch: pytest.MonkeyPatch, is_forced: bool
) -> None:
    log.create_topic("t", 1, CHANGING)
    fill(log)
    upkeep.regroup_due(log, now_ms=NOW_MS, force=True)
    upkeep.roll_active(log, now_ms=NOW_MS)

    def in_doubt(*_: Any, **__: Any) -> bool:
        raise CommitInDoubtError("the commit is in doubt")

    with monkeypatch.context() as patched:
        patched.setattr(log, "swap", in_doubt)
        (told,) = manager.clean(log, force=is_forced, now_ms=NOW_MS)
        assert told.error == "the commit is in doubt"
        assert manager.clean(log, now_ms=NOW_MS + 1) == []
    mark = read_uncleanable(moment_of(log, NOW_MS).notes("t", 0))
    assert mark is not None and mark.reason == told.error
    assert [stats.error for stats in run(log)] == [None]


def test_fresh_objects_that_a_cleaning_waits_for_are_due_at_once(log: ObjectLog) -> None:
    log.create_topic("t", 1, CLOSED)

    def regrouped() -> int:
        return len(upkeep.regroup_due(log, now_ms=NOW_MS))

    log.append("t", [("k", "v" * 50)], now_ms=NOW_MS)
    assert regrouped() == 0  # it is in the active segment
    log.append("t", [("k", "v" * 50)], now_ms=NOW_MS)
    assert [regrouped(), regrouped()] == [1, 0]


def test_an_aborted_cleaning_changes_nothing(log: ObjectLog) -> None:
    log.create_topic("t")
    fill(log)
    upkeep.regroup_due(log, now_ms=NOW_MS, force=True)
    upkeep.roll_active(log, now_ms=NOW_MS)
    before, number = records(log), log.store_state().number
    aborted: list[Any] = []

    def check() -> None:
        from kafkalog.cleaner.shelf import CleaningAborted

        raise CleaningAborted("stop")

    cleaner = PartitionCleaner(
        shelf=shelf_of(log), now_ms=NOW_MS, check_abort=check, on_aborted=aborted.append
    )
    assert cleaner.clean("t", 0, force=True) is None
    assert len(aborted) == 1
    assert (records(log), log.store_state().number) == (before, number)
    assert named(log) == stored(log)


# --- who does it ---------------------------------------------------------------------------------


@pytest.fixture
def public() -> Iterator[kafkalog.KafkaLog]:
    log = new_object_log()
    log.create_topic("t", 2)
    fill(log, 2)
    upkeep.roll_active(log, now_ms=NOW_MS)
    with kafkalog.open(log.root) as opened:
        yield opened


def test_a_log_in_an_object_store_is_cleaned_on_demand(public: kafkalog.KafkaLog) -> None:
    assert [stats.records_kept for stats in public.clean("t", force=True)] == [5, 5]
    assert sum(rows.num_rows for rows in public.read("t", 0)) == 5
    record = public.lookup("t", "3", partition=0)
    assert record is not None and record.value == b"3 6"


def test_a_thread_regroups_and_cleans_what_is_due() -> None:
    log = new_object_log()
    log.create_topic("t", 2)
    fill(log, 2)
    upkeep.roll_active(log, now_ms=NOW_MS)
    with kafkalog.open(log.root, cleaner=CleanerConfig(backoff_ms=10)) as opened:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            if sum(map(len, records(log).values())) == 10:
                break
            time.sleep(0.05)
        cleaner = opened.cleaner
        assert cleaner is not None and cleaner.failures == 0
    assert sum(map(len, records(log).values())) == 10
    assert log.store_state().fresh == 0


def test_the_verb_clean_cleans_a_log_in_an_object_store(
    public: kafkalog.KafkaLog, capsys: pytest.CaptureFixture[str]
) -> None:
    root = str(public._log.root)
    assert clean_verb.command(root, "t", force=True, json=True) == 0
    assert capsys.readouterr().out.count('"recordsKept":') == 2


def test_a_task_of_the_spark_job_cleans_its_partitions(public: kafkalog.KafkaLog) -> None:
    log = public._log
    assert isinstance(log, ObjectLog)
    shelf = shelf_of(log)
    failed, partitions = spark_job._chosen(shelf, ["t"], True)
    assert (failed, partitions) == ([], [("t", 0), ("t", 1)])
    batch = pa.record_batch({"id": pa.array([1], pa.int64())})
    (found,) = spark_job._clean_places(shelf.place, partitions, True, CleanerConfig(), [batch])
    assert found.num_rows == 1
    assert [len(rows) for rows in records(log).values()] == [20, 5]


def test_the_sink_warns_of_fresh_objects_and_a_commit_regroups_them_at_the_limit(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    root = new_object_log().root
    options = SinkOptions.parse({"path": root, "topic": "t"})
    log = shared_log(options.root)
    assert isinstance(log, ObjectLog)
    log.create_topic("t")
    monkeypatch.setattr(object_log, "FRESH_WARNED", 3)
    monkeypatch.setattr(object_log, "FRESH_MAX", 5)
    with caplog.at_level(logging.WARNING, "kafkalog.sink"):
        for number in range(1, 5):
            log.append("t", [("k", "v")], now_ms=NOW_MS)
            backlog.warn_of_backlog(options, "q", NOW_MS)
            assert len(caplog.records) == (number >= 3)
    assert "kafkalog cleaner memory://" in caplog.text
    assert log.store_state().fresh == 4
    before = log.offsets("t")
    log.append("t", [("k", "v")], now_ms=NOW_MS)
    assert (log.store_state().fresh, len(log.store_state().objects)) == (0, 1)
    assert log.offsets("t") == {0: (0, before[0][1] + 1)}


def test_an_object_is_read_while_it_is_fetched_and_its_last_byte_once_it_has_ended(
    tmp_path: Path,
) -> None:
    class Slow:
        """A client whose objects come in two pieces, the second one when it may."""

        address = new_object_log().address
        may_end = threading.Event()

        def pieces(self, name: str, size: int) -> Iterator[memoryview]:
            yield memoryview(b"12345")
            self.may_end.wait()
            yield memoryview(b"678")
            if name == "longer":
                raise StorageError("expected 8 bytes, found more")

    client = Slow()
    with contextlib.closing(
        FetchedObjects(cast("ObjectClient", client), tmp_path, {"whole": 8, "longer": 8})
    ) as objects:
        assert [objects.read(name, 4, 1) for name in ("whole", "longer")] == [b"2345"] * 2
        client.may_end.set()
        assert objects.read("whole", 100, 5) == b"678"
        assert objects.read("longer", 2, 5) == b"67"
        for _ in range(2):
            with pytest.raises(StorageError, match="found more"):
                objects.read("longer", 3, 5)


def test_an_idle_look_plans_each_partition_once(
    log: ObjectLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    log.create_topic("t", 3, {"min.cleanable.dirty.ratio": "1"})
    fill(log, 3)
    planned: list[tuple[str, int]] = []
    plan = ObjectMoment._plan

    def counted(self: ObjectMoment, topic: str, partition: int) -> Any:
        planned.append((topic, partition))
        return plan(self, topic, partition)

    monkeypatch.setattr(ObjectMoment, "_plan", counted)
    assert manager.clean_filthiest(log, now_ms=NOW_MS) is None
    assert sorted(planned) == [("t", 0), ("t", 1), ("t", 2)]


def test_an_output_is_an_object_soon_and_its_files_and_gaps_are_gone(
    log: ObjectLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    log.create_topic("t", 1, {"segment.bytes": "400"})
    fill(log, commits=30)
    expected, counts, add = latest(log), list[int](), ObjectRound.add_finished

    def counted(self: ObjectRound, group: RewrittenGroup) -> None:
        counts.append(len([*self.scratch.glob(f"*{layout.LOG}{layout.CLEANED}")]))
        add(self, group)

    monkeypatch.setattr(ObjectRound, "add_finished", counted)
    (stats,) = run(log)
    assert stats.segments_after > 8 and max(counts) <= 3
    assert records(log) == expected


def test_each_object_has_a_file_of_its_own_and_is_fetched_once(
    log: ObjectLog, tmp_path: Path
) -> None:
    """A mapped file that is written again ends the process by SIGBUS: fuzz found it."""
    log.create_topic("t", config=CHANGING)
    fill(log)
    upkeep.regroup_due(log, now_ms=NOW_MS, force=True)
    sizes = {each.name: each.size for each in log.client.list("segments")}
    before = Counter(log.client.counts)
    with contextlib.closing(FetchedObjects(log.client, tmp_path, sizes)) as objects:
        for name in [*sizes] * 2:
            found = log.client.get(name)
            assert found is not None and bytes(objects.fetch(name, 0, sizes[name])) == found.data
    assert len([*tmp_path.iterdir()]) == len(sizes) == 2
    assert (Counter(log.client.counts) - before)["GET"] == 2 + 2 * 2


def sweep_before_the_first_swap(log: ObjectLog, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let another process sweep all objects that no commit names when the log swaps first."""
    swap = log.swap
    swept: list[int] = []

    def swap_late(*arguments: Any, **options: Any) -> bool:
        if not swept:
            other = ObjectLog(log.address)
            swept.append(other.store_state().number)
            other.change(lambda draft: draft.sweep(swept[0]), now_ms=NOW_MS)
        return swap(*arguments, **options)

    monkeypatch.setattr(log, "swap", swap_late)


def test_a_cleaning_whose_outputs_a_sweep_took_does_not_blame_the_partition(
    log: ObjectLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    log.create_topic("t", 1, CHANGING)
    fill(log)
    upkeep.regroup_due(log, force=True, now_ms=NOW_MS)
    sweep_before_the_first_swap(log, monkeypatch)
    assert not manager.clean(log, "t", force=True, now_ms=NOW_MS)
    state = log.store_state()
    assert state.cleaned_of(log.describe("t").topic_id, 0) is None
    (done,) = manager.clean(log, "t", force=True, now_ms=NOW_MS)
    assert done.error is None
    assert done.records_removed == 15


def test_a_regrouping_whose_outputs_a_sweep_took_is_done_again(
    log: ObjectLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    log.create_topic("t", 1, CHANGING)
    fill(log)
    sweep_before_the_first_swap(log, monkeypatch)
    done = upkeep.regroup_due(log, force=True, now_ms=NOW_MS)
    assert [each.is_lost for each in done] == [True, False]


@pytest.mark.parametrize("is_regrouped", [False, True])
def test_a_missing_object_of_one_topic_keeps_no_other_from_being_cleaned(
    log: ObjectLog, is_regrouped: bool
) -> None:
    for topic in ("t", "u"):
        log.create_topic(topic, 1, CHANGING)
        for _ in range(4):
            fill(log, topic=topic, commits=1)
        if is_regrouped:
            upkeep.regroup_due(log, force=True, now_ms=NOW_MS)
    topic_id = log.describe("u").topic_id
    log.client.delete([log.store_state().extents(topic_id, 0)[0].object_name])
    done = manager.clean(log, force=True, now_ms=NOW_MS)
    assert {each.topic: each.error is None for each in done}["t"]
    assert sum(each.records_removed for each in done if each.topic == "t") == 15


def test_a_file_that_nobody_reads_any_more_goes_and_its_name_is_fetched_anew(
    log: ObjectLog, tmp_path: Path
) -> None:
    for name in ("one", "other"):
        log.client.put_unique(name, name.encode())
    with contextlib.closing(
        FetchedObjects(log.client, tmp_path, {"one": 3, "other": 5})
    ) as objects:
        assert [objects.read(name, 9, 0) for name in ("one", "other")] == [b"one", b"other"]
        objects.forget(["one", "never read"])
        eventually(lambda: len([*tmp_path.iterdir()]) == 1)
        assert [objects.read(name, 9, 0) for name in ("one", "other")] == [b"one", b"other"]
