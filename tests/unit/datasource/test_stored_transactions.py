"""A copied log with transactions, in an object store: reads give what a directory's reads give.

A marker may lie after the range of a task. The tasks that a plan makes know only some objects after
their range, so tests change that number.
"""

from __future__ import annotations

import json
import pickle
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from kafkalog.cleaner.key_index.key_lookup import KeyLookup
from kafkalog.cleaner.schedule import manager
from kafkalog.datasource import stored_partition
from kafkalog.datasource.stored_partition import StoredPartition
from kafkalog.errors import KafkaLogError, MomentPassedError, StorageError
from kafkalog.inspection.verify_store import verify_store
from kafkalog.storage_engine.copying import copied_batches
from kafkalog.storage_engine.copying.copy import copy
from kafkalog.storage_engine.directory.directory_log import DirectoryLog
from kafkalog.storage_engine.format import layout
from kafkalog.storage_engine.object_store.object_log import ObjectLog
from kafkalog.storage_engine.object_store.store_state import StoreChange, StoreState
from kafkalog.storage_engine.transactions import transaction_markers
from tests.builders.batch_builder import ABORT, BuiltBatch, batch, joined, marker
from tests.unit.datasource.logs import read_batch, rows, source
from tests.unit.datasource.streaming_query import StreamingQuery
from tests.unit.datasource.two_logs import sorted_rows
from tests.unit.storage_engine.copied_log import CONFIG, NOW_MS, RandomBatches, ends, fill, records
from tests.unit.storage_engine.store_log import new_object_log


@pytest.fixture(autouse=True)
def nothing_known() -> None:
    transaction_markers.known_markers.clear()


@pytest.fixture
def log(tmp_path: Path) -> Iterator[DirectoryLog]:
    with DirectoryLog(tmp_path / "source") as log:
        log.create_topic("t", 1, {**CONFIG, "cleanup.policy": "compact,delete"}, now_ms=NOW_MS)
        yield log


@pytest.fixture
def store() -> ObjectLog:
    return new_object_log()


def plain(offset: int) -> BuiltBatch:
    return batch(offset, 1)


def of_7(offset: int, sequence: int) -> BuiltBatch:
    """Return a batch of a transaction of producer 7."""
    return batch(offset, 1, producer=(7, 0, sequence), transactional=True)


def append(log: DirectoryLog, *batches: BuiltBatch) -> None:
    """Append batches, each as a segment of its own."""
    log.alter_topic("t", {"segment.bytes": "14"})
    for each in batches:
        log.append_raw("t", 0, each.data, now_ms=NOW_MS)


def aborted(log: DirectoryLog, count: int = 12) -> None:
    """Append an aborted transaction of `count` segments, its marker, and a batch."""
    data = [of_7(place, place) for place in range(count)]
    append(log, *data, marker(count, ABORT, 7), plain(count + 1))


def planned(store: ObjectLog, **options: str) -> tuple[Any, list[StoredPartition]]:
    data_source = source(store.root, **options)
    reader = data_source.reader(data_source.schema())
    return reader, pickle.loads(pickle.dumps(reader.partitions()))


OPTIONS: list[dict[str, str]] = [
    {},
    {"minPartitions": "7"},
    {"maxRecordsPerPartition": "300"},
    {"kafka.isolation.level": "read_uncommitted"},
    {"view": "latest"},
]


@pytest.mark.parametrize("later", [0, 1, 8])
@pytest.mark.parametrize("seed", range(6))
def test_a_read_of_any_range_gives_the_records_of_a_directory(
    log: DirectoryLog, store: ObjectLog, seed: int, later: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw = random.Random(seed)
    monkeypatch.setattr(stored_partition, "LATER", later)
    monkeypatch.setattr(stored_partition, "SPLIT_BYTES", draw.choice([1, 5000, 1 << 26]))
    monkeypatch.setattr(copied_batches, "COMMIT_BYTES", draw.choice([1, 5000, 1 << 26]))
    fill(log, RandomBatches(draw), 25, NOW_MS)
    if draw.random() < 0.5:
        manager.clean(log, "t", force=True, now_ms=NOW_MS)
    copy(log, store, now_ms=NOW_MS)
    start, stable, _ = ends(log)
    for options in OPTIONS:
        expected = sorted_rows(read_batch(log.root, **options))
        assert sorted_rows(read_batch(store.root, **options)) == expected
    for _ in range(4):
        first = draw.randrange(start, stable + 1)
        last = draw.randrange(first, stable + 1)
        options = {
            "startingOffsets": json.dumps({"t": {"0": first}}),
            "endingOffsets": json.dumps({"t": {"0": last}}),
        }
        expected = sorted_rows(read_batch(log.root, **options))
        assert sorted_rows(read_batch(store.root, **options)) == expected


@pytest.mark.parametrize("seed", range(4))
def test_a_stream_with_small_micro_batches_gives_the_records_of_a_directory(
    log: DirectoryLog, store: ObjectLog, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stored_partition, "LATER", seed)
    fill(log, RandomBatches(random.Random(seed)), 25, NOW_MS)
    copy(log, store, now_ms=NOW_MS)
    found = []
    for place in (log.root, store.root):
        query = StreamingQuery(
            place, {"startingOffsets": "earliest", "maxOffsetsPerTrigger": "300"}
        )
        query.start()
        found.append(query.drain())
    assert found[1] == found[0]
    assert found[0]


def offsets(found: Sequence[dict[str, Any]]) -> list[int]:
    return [row["offset"] for row in found]


def test_a_task_has_some_segments_after_its_range_if_it_reads_committed_records(
    log: DirectoryLog, store: ObjectLog
) -> None:
    aborted(log)
    copy(log, store, now_ms=NOW_MS)
    end = '{"t":{"0":2}}'
    for options, count in (
        ({}, stored_partition.LATER),
        ({"kafka.isolation.level": "read_uncommitted"}, 0),
    ):
        _, (task,) = planned(store, endingOffsets=end, **options)
        (one,) = task.ranges
        assert [each.extent.base_offset for each in one.extents] == [0, 1]
        assert [each.extent.base_offset for each in one.later] == [*range(2, 2 + count)]


def test_a_marker_beyond_the_plan_is_found_in_the_log_as_it_is_now(
    log: DirectoryLog, store: ObjectLog
) -> None:
    aborted(log)
    copy(log, store, now_ms=NOW_MS)
    reader, tasks = planned(store, endingOffsets='{"t":{"0":2}}')
    append(log, plain(14))
    copy(log, store, now_ms=NOW_MS)
    assert rows(reader, tasks) == []
    assert offsets(read_batch(store.root)) == [13, 14]


def test_a_marker_beyond_the_plan_of_a_log_that_was_cleaned_since_is_of_a_passed_moment(
    log: DirectoryLog, store: ObjectLog
) -> None:
    aborted(log)
    copy(log, store, now_ms=NOW_MS)
    reader, tasks = planned(store, endingOffsets='{"t":{"0":2}}')
    manager.clean(store, "t", force=True, now_ms=NOW_MS + 1)
    told = r"a transaction of t-0 ends above offset 9.* load the DataFrame, and run the action"
    with pytest.raises(MomentPassedError, match=told):
        rows(reader, tasks)


def test_a_task_that_looks_further_for_a_marker_leaves_its_other_partitions_as_planned(
    log: DirectoryLog, store: ObjectLog
) -> None:
    aborted(log)
    log.alter_topic("t", partitions=2, keys_may_move=True)
    log.append_raw("t", 1, joined([plain(0), plain(1)]), now_ms=NOW_MS)
    copy(log, store, now_ms=NOW_MS)
    reader, (task,) = planned(store, endingOffsets='{"t":{"0":2,"1":2}}')
    assert len(task.ranges) == 2
    manager.clean(store, "t", partition=1, force=True, now_ms=NOW_MS + 1)
    assert [(row["partition"], row["offset"]) for row in rows(reader, [task])] == [(1, 0), (1, 1)]


def test_a_log_whose_end_is_not_there_is_named_as_damaged(
    log: DirectoryLog, store: ObjectLog
) -> None:
    aborted(log)
    copy(log, store, now_ms=NOW_MS)

    def drop_the_end(state: StoreState) -> Any:
        change = StoreChange()
        for name, _ in state.extents(state.log.topic("t").topic_id, 0)[12:]:
            change.drop(name)
        return change.record(NOW_MS)

    store._log.commit(drop_the_end)
    with pytest.raises(StorageError, match="the extent of offset 12 of t-0 is missing"):
        read_batch(store.root, endingOffsets='{"t":{"0":2}}')
    with pytest.raises(StorageError, match="the extent of offset 12 of t-0 is missing"):
        list(store.read("t", 0, 0, 2))


@pytest.mark.parametrize("damage", ["gone", "changed"])
def test_a_marker_that_cannot_be_read_is_an_error(
    log: DirectoryLog, store: ObjectLog, damage: str
) -> None:
    aborted(log, 3)
    copy(log, store, now_ms=NOW_MS)
    topic_id = store.describe("t").topic_id
    extents = store.store_state().extents(topic_id, 0)
    (name,) = (placed.object_name for placed in extents if placed.extent.base_offset == 3)
    stored = store.client.get(name)
    assert stored is not None
    store.client.delete([name])
    if damage == "changed":
        store.client.put_unique(name, bytes(stored.data[:-1]) + b"?")
    for start, end in ((0, 3), (0, 5), (2, 3)):
        with pytest.raises(KafkaLogError):
            list(store.read("t", 0, start, end))
    with pytest.raises(KafkaLogError):
        read_batch(store.root, endingOffsets='{"t":{"0":3}}')
    assert offsets(next(iter(store.read("t", 0, 4))).to_pylist()) == [4]


def test_a_segment_whose_list_of_gaps_cannot_be_read_hides_no_marker(
    log: DirectoryLog, store: ObjectLog
) -> None:
    append(log, of_7(0, 0))
    log.alter_topic("t", {"segment.bytes": "10000"})
    for each in plain(1), plain(5), marker(6, ABORT, 7), plain(7):
        log.append_raw("t", 0, each.data, now_ms=NOW_MS)
    copy(log, store, now_ms=NOW_MS)
    extents = store.store_state().extents(store.describe("t").topic_id, 0)
    (name,) = (placed.object_name for placed in extents if placed.extent.gaps)
    store.client.delete([layout.stored_side(name)])
    with pytest.raises(StorageError, match="the object is missing"):
        list(store.read("t", 0, 0, 1))


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("kind", ["directory", "store"])
def test_many_keys_at_once_get_their_latest_committed_records(
    log: DirectoryLog, store: ObjectLog, kind: str, seed: int
) -> None:
    draw = random.Random(seed)
    log.alter_topic("t", {"segment.bytes": str(draw.choice([3000, 30_000]))})
    fill(log, RandomBatches(draw), 40, NOW_MS)
    manager.clean(log, "t", force=True, now_ms=NOW_MS)  # it writes key indexes
    copy(log, store, now_ms=NOW_MS)
    manager.clean(store, "t", force=True, now_ms=NOW_MS)
    place = log if kind == "directory" else store
    expected: dict[bytes, Any] = {}
    for offset, row in sorted(records(place, "read_committed").items()):
        if offset < ends(place)[1]:
            expected[row["key"]] = row
    keys = [b"%d" % key for key in range(300)]
    with KeyLookup(place, "t") as lookup:
        found = lookup.get_many(keys)
    for key in keys:
        row, record = expected.get(key), found[key]
        assert (record and (record.offset, record.value)) == (
            (row["offset"], row["value"]) if row and row["value"] is not None else None
        )


@pytest.mark.parametrize("seed", range(6))
def test_verify_finds_nothing_in_a_sound_copy(
    log: DirectoryLog, store: ObjectLog, seed: int
) -> None:
    draw = random.Random(seed)
    written = RandomBatches(draw)
    for _ in range(2):
        fill(log, written, 20, NOW_MS)
        copy(log, store, now_ms=NOW_MS)
    assert [str(each) for each in verify_store(store, deep=True)] == []
    manager.clean(store, "t", force=True, now_ms=NOW_MS)
    assert [str(each) for each in verify_store(store, deep=True)] == []


def test_verify_finds_a_base_offset_that_was_changed_within_a_gap(
    log: DirectoryLog, store: ObjectLog
) -> None:
    for each in plain(0), plain(5), plain(6):
        log.append_raw("t", 0, each.data, now_ms=NOW_MS)
    copy(log, store, now_ms=NOW_MS)
    ((name, _),) = store.store_state().extents(store.describe("t").topic_id, 0)
    stored = store.client.get(name)
    assert stored is not None
    data = bytearray(stored.data)
    place = len(plain(0).data)
    assert data[place : place + 8] == (5).to_bytes(8)
    data[place : place + 8] = (4).to_bytes(8)
    store.client.put_unique(name, bytes(data))
    (finding,) = (each for each in verify_store(store, deep=True) if each.is_damage)
    assert finding.position == place
    assert "from offset 5 on" in str(finding)
