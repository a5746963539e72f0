"""Regrouping: mixed objects become segment objects with the same records, whatever happens."""

from __future__ import annotations

import contextlib
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pytest

from kafkalog.errors import CommitInDoubtError, CorruptBatchError, CorruptLogError, StorageError
from kafkalog.storage_engine.format import layout
from kafkalog.storage_engine.format.batch import parse_header
from kafkalog.storage_engine.object_store import object_log, regroup
from kafkalog.storage_engine.object_store.object_log import ObjectLog
from kafkalog.storage_engine.object_store.regroup import Regrouped, fresh_objects
from kafkalog.storage_engine.object_store.store_state import stored_names
from tests.unit.storage_engine.spoiled_client import Killed, Spoil, SpoiledClient
from tests.unit.storage_engine.store_log import Impatient, new_object_log

NOW_MS = 1_700_000_000_000


@pytest.fixture
def log() -> ObjectLog:
    return new_object_log()


def fill(
    log: ObjectLog, topic: str, partitions: int, commits: int = 6, count: int = 40, size: int = 9
) -> None:
    chance = random.Random(f"{topic} {commits}")
    for number in range(commits):
        rows = {
            "key": [chance.randbytes(4) for _ in range(count)],
            "value": pa.array(
                [None if chance.random() < 0.1 else chance.randbytes(size) for _ in range(count)],
                pa.binary(),
            ),
            "partition": pa.array([row % partitions for row in range(count)], pa.int32()),
        }
        log.append(topic, pa.table(rows), now_ms=NOW_MS + number)


def contents(log: ObjectLog) -> dict[tuple[str, int], list[dict[str, Any]]]:
    return {
        (topic, partition): [
            row
            for batch in log.read(topic, partition, include_headers=True)
            for row in batch.to_pylist()
        ]
        for topic in log.topics()
        for partition in log.offsets(topic)
    }


def run(log: ObjectLog) -> Regrouped:
    return regroup.regroup(log, fresh_objects(log.store_state()), now_ms=NOW_MS)


def counted(log: ObjectLog, act: Callable[[], Any]) -> Counter[str]:
    before = Counter(log.client.counts)
    act()
    return Counter(log.client.counts) - before


def stored(log: ObjectLog) -> set[str]:
    """Return the data objects that the store has."""
    return {each.name for prefix in ("data", "segments") for each in log.client.list(prefix)}


def named(log: ObjectLog) -> set[str]:
    """Return the data objects that the log names, also the dropped ones."""
    state = log.store_state()
    entries = [*state.objects.items(), *state.dropped.items()]
    return {name for entry, each in entries for name in stored_names(entry, each)}


@pytest.mark.parametrize("partitions", [1, 12, 100])
def test_each_object_is_fetched_once_however_many_partitions_it_has(
    log: ObjectLog, partitions: int
) -> None:
    log.create_topic("t", partitions)
    fill(log, "t", partitions, count=3 * partitions)
    before = contents(log)
    log.store_state()
    counts = counted(log, lambda: run(log))
    # For the state and the boundary: two GETs; the commit: a PUT.
    assert counts == {"GET": 6 + 2, "PUT": 2 * partitions + 1}
    assert contents(log) == before
    assert ObjectLog(log.address).offsets("t") == log.offsets("t")
    assert len(log.store_state().objects) == partitions
    assert len(log.store_state().dropped) == 6


def test_a_segment_object_is_a_log_of_kafka(log: ObjectLog) -> None:
    """Its batches have their offsets, and it has the epoch of the partition."""
    log.create_topic("t")
    fill(log, "t", 1, commits=3)
    run(log)
    ((name, each),) = log.store_state().objects.items()
    found = log.client.get(name)
    assert found is not None and len(found.data) == each.size
    offsets, position = [], 0
    while position < each.size:
        header = parse_header(found.data, position)
        offsets.append((header.base_offset, header.last_offset, header.leader_epoch))
        position += header.size
    assert offsets == [(0, 39, 0), (40, 79, 0), (80, 119, 0)]


def test_segments_are_as_large_as_the_topic_allows(
    log: ObjectLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    log.create_topic("t", 1, {"segment.bytes": "2000", "compression.type": "uncompressed"})
    log.create_topic("u", 1, {"compression.type": "uncompressed"})
    monkeypatch.setattr(regroup, "SEGMENT_SIZE_MAX", 5000)
    for topic in "tu":
        fill(log, topic, 1, commits=20)
    before = contents(log)
    run(log)
    sizes: dict[str, list[int]] = {"t": [], "u": []}
    for topic, found in sizes.items():
        extents = log.store_state().extents(log.describe(topic).topic_id, 0)
        found += [placed.extent.size for placed in extents]
    assert max(sizes["t"]) <= 2000 < max(sizes["u"]) <= 5000
    assert min(sizes["t"][:-1]) > 1000
    assert contents(log) == before


def test_a_batch_that_is_larger_than_a_segment_has_one_of_its_own(log: ObjectLog) -> None:
    log.create_topic("t", 1, {"segment.bytes": "500", "compression.type": "uncompressed"})
    fill(log, "t", 1, commits=3, count=2, size=900)
    before = contents(log)
    assert run(log).segments == 3
    assert contents(log) == before


@pytest.mark.parametrize("step", [1, 300, 1000])
def test_an_extent_is_read_in_steps_of_any_size(
    log: ObjectLog, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    monkeypatch.setattr(regroup, "_STEP", step)
    log.create_topic("t", 1)
    rows = {"key": [b"%d" % n for n in range(100)], "value": [bytes(n) for n in range(100)]}
    for _ in range(2):
        log.append("t", pa.table(rows), now_ms=NOW_MS, batch_size=200)
    before = contents(log)
    assert run(log).segments == 1
    assert contents(log) == before


def test_an_old_regrouping_and_fresh_objects_are_read_together(log: ObjectLog) -> None:
    log.create_topic("t", 2)
    for round_ in range(3):
        fill(log, "t", 2, commits=2 + round_)
        if round_ < 2:
            run(log)
    before = contents(log)
    assert len(before["t", 0]) == 9 * 20
    run(log)
    assert contents(log) == before
    number = log.store_state().number
    assert run(log).objects == 0
    assert log.store_state().number == number


def test_a_regrouping_takes_no_more_than_its_limit_and_at_least_one_object(
    log: ObjectLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    log.create_topic("t")
    fill(log, "t", 1)
    before = contents(log)
    size = max(each.size for each in log.store_state().objects.values())
    monkeypatch.setattr(regroup, "REGROUP_BYTES", 2 * size)
    assert run(log).objects == 2
    monkeypatch.setattr(regroup, "REGROUP_BYTES", 1)
    assert run(log).objects == 1
    assert len(fresh_objects(log.store_state())) == 3
    assert contents(log) == before


def test_times_and_offsets_are_found_by_the_indexes(log: ObjectLog) -> None:
    log.create_topic("t", 1, {"compression.type": "uncompressed", "index.interval.bytes": "500"})
    fill(log, "t", 1, commits=30)
    times = range(NOW_MS - 1, NOW_MS + 32)
    before = [log.offset_for_time("t", ms) for ms in times]
    run(log)
    assert [log.offset_for_time("t", ms) for ms in times] == before
    for start in (0, 1, 39, 40, 41, 700, 1199):
        first = next(log.read("t", 0, start)).to_pylist()[0]
        assert first["offset"] == start
    log.store_state()
    # The state, the range of the records, and the indexes.
    assert counted(log, lambda: next(log.read("t", 0, 700))) == {"GET": 3}
    assert counted(log, lambda: next(log.read("t", 0))) == {"GET": 2}


def test_records_below_the_log_start_and_of_deleted_topics_are_left_behind(log: ObjectLog) -> None:
    log.create_topic("t", 2, {"cleanup.policy": "delete"})
    log.create_topic("u")
    fill(log, "t", 2)
    rows = pa.table({"key": [b"k"], "value": [b"v"]})
    log.append("u", rows)
    log.delete_records("t", 0, 45)
    log.delete_topic("u", now_ms=NOW_MS)
    before = contents(log)
    run(log)
    assert contents(log) == before
    assert {e.extent.base_offset for e in log.store_state().extents(topic_id(log), 0)} == {40}
    assert named(log) == stored(log)


def topic_id(log: ObjectLog, topic: str = "t") -> str:
    return log.describe(topic).topic_id


def during_the_swap(log: ObjectLog, act: Callable[[ObjectLog], Any]) -> Regrouped:
    """Let another process act between the writing of the segments and their commit."""
    other, swap = ObjectLog(log.address), log.swap

    def late(*given: Any, **options: Any) -> bool:
        act(other)
        return swap(*given, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(log, "swap", late)
        return run(log)


def test_of_two_regroupings_one_is_lost_and_deletes_what_it_wrote(log: ObjectLog) -> None:
    log.create_topic("t", 2)
    fill(log, "t", 2)
    before = contents(log)
    assert during_the_swap(log, run).is_lost
    assert contents(log) == before
    assert named(log) == stored(log)


def test_an_append_during_a_regrouping_stays_fresh(log: ObjectLog) -> None:
    log.create_topic("t", 2)
    fill(log, "t", 2)
    assert not during_the_swap(log, lambda other: fill(other, "t", 2, commits=1)).is_lost
    assert len(fresh_objects(log.store_state())) == 1
    assert [len(rows) for rows in contents(log).values()] == [140, 140]


@pytest.mark.parametrize(
    "act",
    [
        pytest.param(lambda other: other.delete_topic("t", now_ms=NOW_MS), id="deletion"),
        pytest.param(lambda other: other.delete_records("t", 0, -1), id="records of one"),
        pytest.param(
            lambda other: [other.delete_records("t", number, -1) for number in (0, 1)],
            id="all records",
        ),
        pytest.param(lambda other: other.apply_retention(now_ms=NOW_MS + 10**12), id="retention"),
    ],
)
def test_what_is_deleted_during_a_regrouping_does_not_come_back(
    log: ObjectLog, act: Callable[[ObjectLog], Any]
) -> None:
    log.create_topic("t", 2, {"cleanup.policy": "delete"})
    fill(log, "t", 2)
    during_the_swap(log, act)
    other = ObjectLog(log.address)
    assert contents(log) == contents(other)
    assert len(contents(log).get(("t", 0), [])) == 0
    assert named(log) == stored(log)


def test_a_damaged_object_is_not_regrouped(log: ObjectLog) -> None:
    log.create_topic("t")
    fill(log, "t", 1)
    before = log.store_state().objects
    name = fresh_objects(log.store_state())[3]
    found = log.client.get(name)
    assert found is not None
    data = bytearray(found.data)
    data[layout.BATCH_OVERHEAD + 5] ^= 1
    log.client.put_unique(name, bytes(data))
    with pytest.raises(CorruptBatchError, match=name):
        run(log)
    log.client.put_unique(name, found.data[:-1])
    with pytest.raises(CorruptLogError, match="expected an object of"):
        run(log)
    assert log.store_state().objects == before
    assert named(log) == stored(log)


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
        fill(log, "t", 2, commits=3)
        before = contents(log)
        assert isinstance(log.client, SpoiledClient)
        log.client.is_spoiled = False
        log.client.spoil({number: spoil})
        with contextlib.suppress(Killed, StorageError, CommitInDoubtError):
            run(log)
        is_spoiled = log.client.is_spoiled
        log.client.spoil({})
        other = ObjectLog(log.address)
        assert contents(other) == before
        assert named(other) <= stored(other)
        run(other)
        assert contents(other) == before
        assert not fresh_objects(other.store_state())
    assert number > 10
