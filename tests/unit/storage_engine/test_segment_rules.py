"""What Kafka's LogSegment guarantees, of a segment that is read, cut and appended to here."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pytest

from kafkalog.schema import changelog_schema
from kafkalog.storage_engine.directory.directory_log import DirectoryLog
from kafkalog.storage_engine.format.batch import iterate_headers
from kafkalog.storage_engine.metadata.state import PartitionState
from kafkalog.storage_engine.reading.directory_snapshot import DirectorySnapshot, open_snapshot
from kafkalog.storage_engine.segment.segment_times import largest_timestamp
from kafkalog.storage_engine.segment.segments import list_segments, next_offset
from kafkalog.storage_engine.segment.swaps import retire, sweep_deleted
from tests.builders.batch_builder import BuiltBatch, at_times, batch
from tests.builders.log_builder import LogBuilder
from tests.builders.log_contents import index_entries, offsets, segment_bases, time_index_entries
from tests.builders.message_builder import message
from tests.builders.segment_files import name, write_segment
from tests.unit.storage_engine.times import offset_since

INT32_MAX = 2**31 - 1


# --- reading one segment -------------------------------------------------------------------------


def open_segment(directory: Path, base: int, batches: Sequence[BuiltBatch]) -> DirectorySnapshot:
    """View a partition of one segment."""
    write_segment(directory, base, batches, interval=100)
    state = PartitionState(
        high_watermark=max([base, *(b.last_offset + 1 for b in batches)]),
        active_base=base,
        active_size=(directory / name(base, ".log")).stat().st_size,
        log_start_offset=base,
        listed_from=2**63 - 1,
    )
    return open_snapshot(directory, "t", 0, lambda: state)


def first_position(snapshot: DirectorySnapshot, offset: int) -> int | None:
    found = snapshot.position_of(offset)
    return None if found is None else found[1]


def offsets_of(snapshot: DirectorySnapshot, start: int, end: int) -> list[int]:
    tables = snapshot.read(start, end, schema=pa.schema([changelog_schema().field("offset")]))
    return [offset for table in tables for offset in table["offset"].to_pylist()]


def test_an_empty_segment_has_nothing_at_its_base(tmp_path: Path) -> None:
    with open_segment(tmp_path, 40, []) as snapshot:
        assert first_position(snapshot, 40) is None
        assert offsets_of(snapshot, 40, 40) == []


def test_reading_before_the_first_offset_begins_with_the_first_batch(tmp_path: Path) -> None:
    with open_segment(tmp_path, 40, [batch(50, 4)]) as snapshot:
        assert first_position(snapshot, 41) == 0
        assert offsets_of(snapshot, 41, 54) == [50, 51, 52, 53]


def test_reading_after_the_last_offset_finds_nothing(tmp_path: Path) -> None:
    with open_segment(tmp_path, 40, [batch(50, 2)]) as snapshot:
        assert first_position(snapshot, 52) is None
        assert offsets_of(snapshot, 52, 52) == []


def test_reading_from_a_gap_begins_with_the_batch_after_it(tmp_path: Path) -> None:
    first, second = batch(50, 2), batch(60, 2)
    with open_segment(tmp_path, 40, [first, second]) as snapshot:
        assert first_position(snapshot, 55) == len(first.data)
        assert offsets_of(snapshot, 55, 62) == [60, 61]


@pytest.mark.parametrize("chunk_size", [1, 70, 1 << 20])
def test_a_read_begins_at_the_batch_of_its_offset_however_little_is_asked_for(
    tmp_path: Path, chunk_size: int
) -> None:
    batches = [batch(50, 1), batch(51, 1)]
    size = len(batches[0].data)
    with open_segment(tmp_path, 40, batches) as snapshot:
        for offset, position in {48: 0, 50: 0, 51: size, 52: None}.items():
            assert first_position(snapshot, offset) == position
            chunks = list(snapshot.chunks(offset, 52, chunk_size=chunk_size))
            places = [c.file_position + int(p) for c in chunks for p in c.table.positions]
            assert places[:1] == ([] if position is None else [position])


def test_offsets_are_found_by_time_between_on_and_beyond_index_entries(tmp_path: Path) -> None:
    batches = [batch(i, 1, timestamp=i * 10) for i in range(40, 50)]
    expected = {420: 42, 421: 43, 430: 43, 431: 44, 491: None, 401: 41, 399: 40}
    with open_segment(tmp_path, 40, batches) as snapshot:
        assert {at: offset_since(snapshot, at) for at in expected} == expected
        assert largest_timestamp(snapshot.segments[0], snapshot.segments[0].size) == 490


def test_the_next_offset_passes_the_gap_before_the_last_batch(tmp_path: Path) -> None:
    with open_segment(tmp_path, 40, []) as snapshot:
        assert next_offset(snapshot.segments[0]) == 40
    with open_segment(tmp_path, 40, [batch(50, 3)]) as snapshot:
        assert next_offset(snapshot.segments[0]) == 53


@pytest.mark.parametrize("garbage", [b"\xfe" * 240, bytes(range(1, 241)), bytes(240)])
def test_damaged_indexes_hide_no_record(tmp_path: Path, garbage: bytes) -> None:
    batches = [batch(i, 1, timestamp=i * 10) for i in range(100)]
    open_segment(tmp_path, 0, batches).close()
    for suffix in (".index", ".timeindex"):
        path = tmp_path / name(0, suffix)
        path.write_bytes(path.read_bytes()[:5] + garbage)
    state = PartitionState(100, 0, (tmp_path / name(0, ".log")).stat().st_size)
    with open_snapshot(tmp_path, "t", 0, lambda: state) as snapshot:
        for i in range(99):
            assert offsets_of(snapshot, i, i + 1) == [i]
            assert (offset_since(snapshot, i * 10), offset_since(snapshot, i * 10 + 1)) == (
                i,
                i + 1,
            )


# --- appending and cutting -----------------------------------------------------------------------


def append(engine: DirectoryLog, *batches: BuiltBatch, publish: bool = True) -> None:
    """Append batches, offsets from 0; what is not published is as a dead process leaves it."""
    with engine.transaction() as transaction:
        data = b"".join(item.data for item in batches)
        *_, (_, last) = iterate_headers(data)
        transaction.appender("t", 0, 1).append([(last.next_offset, [data])])
        if publish:
            transaction.publish(1)


def spanning(last_offset: int) -> BuiltBatch:
    """A batch of one record that stands for the offsets 0 to `last_offset`."""
    return at_times(0, [5], last_offset=last_offset)


@pytest.mark.parametrize(("first", "expected"), [(INT32_MAX - 1, [0]), (INT32_MAX, [0, 2**31])])
def test_an_offset_that_the_indexes_cannot_tell_begins_a_segment(
    tmp_path: Path, first: int, expected: list[int]
) -> None:
    engine = LogBuilder(tmp_path).topic().engine
    append(engine, spanning(first))
    append(engine, spanning(0))
    assert segment_bases(engine) == expected
    assert offsets(engine) == [0, first + 1]


def test_what_was_not_committed_is_cut_again_and_again(tmp_path: Path) -> None:
    engine = LogBuilder(tmp_path).topic(index_interval_bytes=1).engine
    for i in range(30):
        append(engine, batch(0, 1))
        append(engine, batch(0, 1, size=50), publish=False)
        assert offsets(engine) == list(range(i + 1))
    append(engine, batch(0, 1))
    ends = [offset for offset, _ in index_entries(engine)]
    assert ends == list(range(1, 31))


def test_an_empty_segment_with_full_sized_indexes_is_not_rolled(tmp_path: Path) -> None:
    engine = LogBuilder(tmp_path).topic(segment_index_bytes=1000, segment_ms=1000).engine
    directory = engine.partition_directory("t", 0)
    for suffix, size in ((".index", 1000), (".timeindex", 996)):
        (directory / name(0, suffix)).write_bytes(bytes(size))
    append(engine, batch(0, 1, timestamp=5))
    assert segment_bases(engine) == [0]
    append(engine, batch(0, 1, timestamp=9))
    assert segment_bases(engine) == [0]


def test_largest_timestamp_and_next_offset_are_those_of_what_the_cut_leaves(tmp_path: Path) -> None:
    engine = LogBuilder(tmp_path).topic(index_interval_bytes=100).engine
    append(engine, batch(0, 1, timestamp=400))
    append(engine, *(batch(i, 1, timestamp=410 + i) for i in range(29)), publish=False)
    assert len(time_index_entries(engine)) > 9
    with engine.transaction() as transaction:
        transaction.appender("t", 0, 1)  # cuts
    assert time_index_entries(engine) == []
    assert index_entries(engine) == []
    (segment,) = list_segments(engine.partition_directory("t", 0))
    assert largest_timestamp(segment, segment.size) == 400
    assert next_offset(segment) == 1


def test_a_segment_that_is_cut_to_nothing_takes_the_same_offsets_again(tmp_path: Path) -> None:
    engine = LogBuilder(tmp_path).topic(index_interval_bytes=1).engine
    append(engine, *(batch(i, 1, timestamp=9000) for i in range(9)), publish=False)
    append(engine, batch(0, 2, timestamp=7))
    assert (segment_bases(engine), offsets(engine)) == ([0], [0, 1])
    assert index_entries(engine) == []


def test_a_cut_in_a_gap_takes_what_lies_behind_the_gap(tmp_path: Path) -> None:
    engine = LogBuilder(tmp_path).topic(index_interval_bytes=1).engine
    engine.append_raw("t", 0, batch(0, 1).data + batch(3, 1).data, now_ms=1)
    directory = engine.partition_directory("t", 0)
    with engine.transaction() as transaction:
        size = len(batch(0, 1).data)
        transaction.change_partition("t", 0, high_watermark=1, active_size=size)
        transaction.publish(1)
    append(engine, batch(0, 1, size=1))
    assert offsets(engine) == [0, 1]
    assert index_entries(engine) == [(1, size)]
    assert (directory / name(0, ".log")).read_bytes().startswith(batch(0, 1).data)


def test_a_reopened_log_is_cut_back_over_many_segments(tmp_path: Path) -> None:
    engine = LogBuilder(tmp_path).topic(segment_bytes=300).engine
    append(engine, *(batch(i, 1) for i in range(3)))
    append(engine, *(batch(i, 1) for i in range(97)), publish=False)
    assert len(segment_bases(engine)) > 20
    engine.close()
    reopened = DirectoryLog(tmp_path)
    assert offsets(reopened) == [0, 1, 2]
    append(reopened, batch(0, 1))
    assert (len(segment_bases(reopened)), offsets(reopened)) == (2, [0, 1, 2, 3])


def test_the_first_batchs_timestamp_drives_rolling_also_after_reopening(tmp_path: Path) -> None:
    engine = LogBuilder(tmp_path).topic(segment_ms=1000).engine
    append(engine, batch(0, 1, timestamp=1000), batch(1, 1, timestamp=1500))
    append(DirectoryLog(tmp_path), batch(0, 1, timestamp=2000))
    assert segment_bases(engine) == [0]
    append(DirectoryLog(tmp_path), batch(0, 1, timestamp=2001))
    assert segment_bases(engine) == [0, 3]


def test_a_segment_without_timestamps_is_not_rolled_by_time(tmp_path: Path) -> None:
    engine = LogBuilder(tmp_path).topic(segment_ms=1).engine
    append(engine, batch(0, 1, timestamp=-1))
    append(engine, batch(0, 1, timestamp=-1))
    assert segment_bases(engine) == [0]


def test_after_a_roll_the_indexes_hold_their_entries_and_nothing_else(tmp_path: Path) -> None:
    engine = LogBuilder(tmp_path).topic(index_interval_bytes=1, segment_bytes=500).engine
    directory = engine.partition_directory("t", 0)
    (directory / name(0, ".index")).write_bytes(bytes(8000))
    for i in range(9):
        append(engine, batch(0, 1, timestamp=100 + i))
    first = index_entries(engine)
    assert len(first) == segment_bases(engine)[1] - 1
    assert first == sorted(set(first)) and first[0][1] > 0
    # The largest timestamp has an entry at the end, though the first batch of a segment has none.
    assert time_index_entries(engine)[-1] == (
        100 + segment_bases(engine)[1] - 1,
        segment_bases(engine)[1] - 1,
    )


# --- names ---------------------------------------------------------------------------------------


def test_retiring_a_segment_creates_no_file_that_it_had_not(tmp_path: Path) -> None:
    write_segment(tmp_path, 40, [batch(40, 1)], indexes=False)
    retire(tmp_path, [40])
    assert os.listdir(tmp_path) == [name(40, ".log.deleted")]


def test_a_segment_without_a_transaction_index_is_deleted_without_a_fault(tmp_path: Path) -> None:
    write_segment(tmp_path, 40, [batch(40, 1)])
    retire(tmp_path, [40])
    now_ms = (tmp_path / name(40, ".log.deleted")).stat().st_ctime_ns // 1_000_000
    assert sweep_deleted(tmp_path, older_than_ms=0, now_ms=now_ms + 60_000) == 3
    assert os.listdir(tmp_path) == []


def test_messages_before_v2_have_the_same_rules(tmp_path: Path) -> None:
    data = [message(1, offset, b"k", b"v", timestamp=offset * 10) for offset in (50, 51, 60, 61)]
    (tmp_path / name(40, ".log")).write_bytes(b"".join(data))
    state = PartitionState(62, 40, sum(map(len, data)), log_start_offset=40, listed_from=2**63 - 1)
    with open_snapshot(tmp_path, "t", 0, lambda: state) as snapshot:
        assert first_position(snapshot, 41) == 0
        assert first_position(snapshot, 55) == len(data[0]) * 2
        assert first_position(snapshot, 62) is None
        assert offsets_of(snapshot, 41, 62) == [50, 51, 60, 61]
        assert (offset_since(snapshot, 511), offset_since(snapshot, 611)) == (60, None)
        assert next_offset(snapshot.segments[0]) == 62
