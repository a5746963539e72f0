"""Reading extents: which requests are sent, and what the records are."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Sequence

import pyarrow as pa
import pytest

from kafkalog.cleaner.objects import upkeep
from kafkalog.cleaner.schedule import manager
from kafkalog.errors import (
    CorruptBatchError,
    CorruptLogError,
    InvalidInputError,
    OffsetOutOfRangeError,
    StorageError,
    UnknownTopicError,
)
from kafkalog.schema import changelog_schema
from kafkalog.storage_engine.format import layout
from kafkalog.storage_engine.object_store import fetched_ranges
from kafkalog.storage_engine.object_store.client import ObjectClient
from kafkalog.storage_engine.object_store.fetched_ranges import FetchedRanges
from kafkalog.storage_engine.object_store.object_log import ObjectLog
from kafkalog.storage_engine.object_store.object_snapshot import ObjectSnapshot, open_snapshot
from kafkalog.storage_engine.object_store.store_state import (
    PlacedExtent,
    StoreChange,
    StoreState,
)
from tests.unit.storage_engine.store_log import memory_address
from tests.unit.storage_engine.stored_records import NOW_MS, rows_of

SCHEMA = changelog_schema(include_headers=True)


class Log:
    """A log in memory with one topic, and a client that only reads."""

    def __init__(self, partitions: int = 2) -> None:
        address = memory_address()
        self.log = ObjectLog(address)
        self.topic_id = self.log.create_topic("t", partitions).topic_id
        self.writer, self.client = self.log.client, ObjectClient(address)

    @property
    def state(self) -> StoreState:
        return self.log.store_state()

    def append(self, rows: pa.RecordBatch, **options: int) -> StoreState:
        self.log.append("t", rows, now_ms=NOW_MS, **options)
        return self.state

    def extents(
        self, partition: int = 0, state: StoreState | None = None
    ) -> Sequence[PlacedExtent]:
        return (state or self.state).extents(self.topic_id, partition)

    def bases(self, state: StoreState, partition: int = 0) -> list[int]:
        return [placed.extent.base_offset for placed in self.extents(partition, state)]

    def snapshot(self, partition: int = 0) -> ObjectSnapshot:
        return open_snapshot(self.client, self.state, "t", partition)

    def content(self, name: str) -> bytes:
        stored = self.client.get(name)
        assert stored is not None
        return bytes(stored.data)

    @property
    def gets(self) -> int:
        return self.client.counts.get("GET", 0)


@pytest.fixture
def log() -> Log:
    return Log()


def read(snapshot: ObjectSnapshot, start: int = 0, end: int | None = None) -> pa.Table:
    end = snapshot.state.high_watermark if end is None else end
    return pa.Table.from_batches(snapshot.read(start, end, schema=SCHEMA), SCHEMA)


def values(table: pa.Table) -> list[bytes]:
    return table["value"].to_pylist()


# --- the index of the extents --------------------------------------------------------------------


def test_the_extents_of_a_partition_are_ascending_and_name_their_objects(log: Log) -> None:
    for number in range(3):
        log.append(rows_of(4, 2, first=4 * number))
    state = log.state
    assert log.bases(state) == log.bases(state, 1) == [0, 2, 4]
    names = [placed.object_name for placed in log.extents(0, state)]
    assert names == [placed.object_name for placed in log.extents(1, state)] == [*state.objects]
    assert log.extents(2, state) == state.extents("B" * 22, 0) == ()


def test_the_index_of_a_later_state_is_that_of_a_state_read_at_once(log: Log) -> None:
    states = [log.append(rows_of(2, 2, first=2 * number)) for number in range(2)]
    assert log.bases(states[0]) == [0]
    states.append(log.append(rows_of(1, 1)))
    assert [log.bases(state) for state in states] == [[0], [0, 1], [0, 1, 2]]
    dropped = next(iter(states[-1].objects))

    def drop(state: StoreState) -> dict[str, object]:
        change = StoreChange()
        change.drop(dropped)
        return change.record(0)

    after = log.log._log.commit(drop)
    read_at_once = StoreState.of_snapshot(after.number, after.snapshot())
    for partition in (0, 1):
        assert [*log.extents(partition, after)] == [*log.extents(partition, read_at_once)]
    assert (log.bases(after), log.bases(after, 1)) == ([1, 2], [1])


# --- records -------------------------------------------------------------------------------------


def test_a_partition_is_read_with_offsets_times_and_headers(log: Log) -> None:
    log.append(rows_of(5, 2))
    log.append(rows_of(3, 2, first=5))
    with log.snapshot(1) as snapshot:
        table = read(snapshot)
    assert values(table) == [b"%010d" % number for number in (1, 3, 5, 7)]
    assert table["offset"].to_pylist() == [0, 1, 2, 3]
    assert set(table["partition"].to_pylist()) == {1}
    assert set(table["topic"].to_pylist()) == {"t"}


def with_gaps() -> Log:
    """Return a log with a segment object of 12 offsets whose records 0 to 4 are cleaned away."""
    log = Log(1)
    log.log.alter_topic("t", {"cleanup.policy": "compact"})
    for number in range(12):
        log.append(rows_of(1, first=number))
    manager.clean(log.log, "t", force=True, now_ms=NOW_MS + 1)
    return log


def test_a_read_of_a_segment_with_gaps_fetches_their_list_and_keeps_none() -> None:
    """A long read passes many segments; the beginning of each side object has up to 512 KiB."""
    log = with_gaps()
    (placed,) = log.extents()
    assert placed.extent.gaps == 1
    with log.snapshot() as snapshot:
        before = log.gets
        table = read(snapshot)
        assert table["offset"].to_pylist() == [*range(5, 12)]
        assert log.gets == before + 2
        assert not snapshot.sides


def test_a_read_of_a_segment_without_gaps_fetches_no_list(log: Log) -> None:
    log.append(rows_of(4, 2))
    upkeep.regroup_due(log.log, force=True, now_ms=NOW_MS)
    before = log.gets
    for partition in (0, 1):
        with log.snapshot(partition) as snapshot:
            assert snapshot._extents[0].extent.gaps == 0
            read(snapshot)
    assert log.gets == before + 2


@pytest.mark.parametrize("is_known", [True, False])
def test_a_batch_whose_base_offset_lies_in_a_gap_is_refused(is_known: bool) -> None:
    """No checksum covers the base offset; an early release has not counted the gaps."""
    log = with_gaps()
    ((name, extent),) = log.extents()
    changed = layout.stored_segment(log.state.number, log.topic_id, 0, 0, "c" * 16)
    log.writer.put_unique(layout.stored_side(changed), log.content(layout.stored_side(name)))
    data = bytearray(log.content(name))
    assert data[:8] == (5).to_bytes(8)
    data[:8] = (4).to_bytes(8)
    log.writer.put_unique(changed, bytes(data))
    extents = [PlacedExtent(changed, extent if is_known else dataclasses.replace(extent, gaps=-1))]
    state = log.state.log.topic("t").partitions[0]
    snapshot = ObjectSnapshot(FetchedRanges(log.client, extents), "t", 0, state, extents)
    with snapshot, pytest.raises(CorruptBatchError, match="offset 5"):
        read(snapshot)


@pytest.mark.parametrize("batch_size", [1, 70, 1 << 20])
def test_every_range_holds_exactly_its_records(batch_size: int) -> None:
    log = Log(1)
    for number in range(3):
        log.append(rows_of(4, first=4 * number), batch_size=batch_size)
    with log.snapshot() as snapshot:
        for start in range(13):
            for end in range(start, 13):
                found = values(read(snapshot, start, end))
                assert found == [b"%010d" % number for number in range(start, end)]


def test_an_empty_partition_is_read_as_empty_and_offsets_outside_are_refused(log: Log) -> None:
    with log.snapshot() as snapshot:
        assert read(snapshot).num_rows == 0
        with pytest.raises(OffsetOutOfRangeError):
            read(snapshot, 0, 1)
    assert log.gets == 0


def test_a_snapshot_keeps_its_state(log: Log) -> None:
    log.append(rows_of(2))
    with log.snapshot() as snapshot:
        log.append(rows_of(2))
        assert read(snapshot).num_rows == 2


def test_the_batches_that_are_read_are_stamped(log: Log) -> None:
    log.append(rows_of(3), batch_size=1)
    log.append(rows_of(3), batch_size=1)
    with log.snapshot() as snapshot:
        tables = [chunk.table for chunk in snapshot.chunks(0, 6)]
    assert [offset for table in tables for offset in table.base_offsets] == [0, 1, 2, 3, 4, 5]
    assert {epoch for table in tables for epoch in table.leader_epochs} == {0}


def test_a_topic_and_a_partition_that_do_not_exist_are_refused(log: Log) -> None:
    state = log.state
    with pytest.raises(UnknownTopicError):
        open_snapshot(log.client, state, "u", 0)
    with pytest.raises(InvalidInputError, match="partitions 0 to 1, there is no 2"):
        open_snapshot(log.client, state, "t", 2)


# --- requests ------------------------------------------------------------------------------------


def test_opening_a_partition_asks_nothing_and_a_small_extent_is_one_request(log: Log) -> None:
    log.append(rows_of(100), batch_size=100)
    with log.snapshot() as snapshot:
        assert log.gets == 0
        assert read(snapshot).num_rows == 100
    assert log.gets == 1


def test_a_second_pass_over_a_small_partition_asks_nothing(log: Log) -> None:
    for number in range(3):
        log.append(rows_of(10, first=number))
    with log.snapshot() as snapshot:
        assert read(snapshot) == read(snapshot)
    assert log.gets == 3


def snapshots(log: Log, ranges: FetchedRanges, partitions: Sequence[int]) -> list[ObjectSnapshot]:
    state = log.state
    held = state.log.topic("t").partitions
    return [
        ObjectSnapshot(ranges, "t", number, held[number], log.extents(number, state))
        for number in partitions
    ]


def placed(log: Log, partitions: Sequence[int]) -> list[PlacedExtent]:
    return [each for number in partitions for each in log.extents(number)]


def test_neighbouring_partitions_are_one_request_for_each_object() -> None:
    log = Log(12)
    for number in range(40):
        log.append(rows_of(24, 12, first=24 * number))
    with FetchedRanges(log.client, placed(log, range(12))) as ranges:
        for snapshot in snapshots(log, ranges, range(12)):
            assert read(snapshot).num_rows == 80
    assert log.gets == 40


def test_partitions_that_do_not_touch_are_a_request_each() -> None:
    log = Log(3)
    log.append(rows_of(6, 3))
    with FetchedRanges(log.client, placed(log, [0, 2])) as ranges:
        assert [read(snapshot).num_rows for snapshot in snapshots(log, ranges, [0, 2])] == [2, 2]
    assert log.gets == 2


def test_a_large_extent_is_fetched_in_ranges_a_few_ahead(
    log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetched_ranges, "RANGE_SIZE", 1000)
    log.append(rows_of(200, size=90), batch_size=700)
    (one,) = log.extents()
    asked: list[tuple[int, int]] = []
    fetch, lock = log.client.fetch, threading.Lock()

    def noted(name: str, position: int, size: int) -> memoryview:
        with lock:
            asked.append((position, size))
        return fetch(name, position, size)

    monkeypatch.setattr(log.client, "fetch", noted)
    with log.snapshot() as snapshot:
        chunks = snapshot.chunks(0, 200, chunk_size=1000)
        next(chunks)
        first = len(asked)
        rest = sum(len(chunk.table) for chunk in chunks)
    assert first <= 2 + fetched_ranges.AHEAD and rest
    ranges = -(-one.extent.size // 1000)
    assert sorted(asked) == [
        (place * 1000, min(1000, one.extent.size - place * 1000)) for place in range(ranges)
    ]


def test_ranges_beyond_the_budget_are_forgotten(log: Log) -> None:
    for number in range(20):
        log.append(rows_of(10, first=number))
    extents = placed(log, [0])
    with FetchedRanges(log.client, extents, kept_size=1) as ranges:
        (snapshot,) = snapshots(log, ranges, [0])
        assert read(snapshot) == read(snapshot)
        assert len(ranges._kept) <= fetched_ranges.AHEAD + 1
    assert log.gets == 40


# --- faults --------------------------------------------------------------------------------------


def spoiled(log: Log, position: int, new: bytes) -> None:
    """Change the only object."""
    (name,) = log.state.objects
    found = log.writer.get(name)
    assert found is not None
    data = bytearray(found.data)
    data[position : position + len(new)] = new
    log.writer.put_unique(name, bytes(data))


def test_a_changed_byte_is_found_and_the_error_names_the_object(log: Log) -> None:
    log.append(rows_of(5))
    (name,) = log.state.objects
    spoiled(log, 80, b"?")
    with log.snapshot() as snapshot, pytest.raises(CorruptBatchError) as fault:
        read(snapshot)
    assert f"{log.client.address}/{name}, extent of byte 0: at byte 0" in str(fault.value)


@pytest.mark.parametrize("offset", [0, 3, 2**62, 2**63 - 1])
def test_a_base_offset_that_does_not_follow_is_found(log: Log, offset: int) -> None:
    log.append(rows_of(3), batch_size=1)
    (one,) = log.extents()
    spoiled(log, one.extent.size // 3, layout.STAMP_OFFSET.pack(offset))
    with log.snapshot() as snapshot, pytest.raises(CorruptBatchError):
        read(snapshot)


def test_an_object_that_is_cut_off_or_missing_is_an_error(log: Log) -> None:
    log.append(rows_of(3))
    (name,) = log.state.objects
    found = log.writer.get(name)
    assert found is not None
    log.writer.put_unique(name, found.data[:100])
    with log.snapshot() as snapshot, pytest.raises(CorruptLogError, match="found the end"):
        read(snapshot)
    log.writer.delete([name])
    with log.snapshot() as snapshot, pytest.raises(StorageError, match="the object is missing"):
        read(snapshot)


def test_an_extent_that_ends_early_is_found(log: Log) -> None:
    """The batches of an extent reach exactly to the next one."""
    log.append(rows_of(3), batch_size=1)
    (one,) = log.extents()
    short = dataclasses.replace(one.extent, size=one.extent.size // 3 * 2)
    state = log.state.log.topic("t").partitions[0]
    placed_short = [PlacedExtent(one.object_name, short)]
    with FetchedRanges(log.client, placed_short) as ranges, pytest.raises(CorruptBatchError):
        read(ObjectSnapshot(ranges, "t", 0, state, placed_short))


def test_a_missing_extent_is_found(log: Log) -> None:
    log.append(rows_of(3))
    log.append(rows_of(3))
    first, second = log.extents()
    state = log.state.log.topic("t").partitions[0]
    for left, missing in ([first], 3), ([second], 0), ([], 0):
        with FetchedRanges(log.client, left) as ranges:
            snapshot = ObjectSnapshot(ranges, "t", 0, state, left)
            with pytest.raises(StorageError, match=f"the extent of offset {missing} of t-0"):
                read(snapshot)


def test_a_failed_range_is_asked_for_again(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    log.append(rows_of(3))
    fetch = log.client.fetch

    def failing(name: str, position: int, size: int) -> memoryview:
        raise StorageError("no")

    with log.snapshot() as snapshot:
        monkeypatch.setattr(log.client, "fetch", failing)
        with pytest.raises(StorageError, match="no"):
            read(snapshot)
        monkeypatch.setattr(log.client, "fetch", fetch)
        assert read(snapshot).num_rows == 3
