"""What Kafka's MemoryRecords guarantees, of batches that are encoded, read, filtered and emptied.

Batches are built by `batch_builder.py`; codecs by the libraries' own encoders.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from kafkalog.errors import CorruptBatchError
from kafkalog.schema import HEADERS, changelog_schema
from kafkalog.storage_engine.format import batch as batches
from kafkalog.storage_engine.metadata.state import PartitionState
from kafkalog.storage_engine.reading.directory_snapshot import open_snapshot
from kafkalog.storage_engine.records import records
from kafkalog.storage_engine.transactions.control_record import read_control_record
from tests.builders.batch_builder import (
    GZIP,
    LOG_APPEND_TIME,
    LZ4,
    NO_PRODUCER,
    NONE,
    TRANSACTIONAL,
    ZSTD,
    Record,
    batch,
    batch_data,
    compressed,
    empty,
    marker,
    record,
)
from tests.builders.message_builder import message, messages, wrapper
from tests.builders.segment_files import name, write_segment
from tests.unit.cleaner.rewritten import rewritten
from tests.unit.storage_engine.times import offset_since

PLACE: dict[str, Any] = {"path": "0.log", "file_position": 0}


def found_in(data: bytes) -> list[tuple[Any, ...]]:
    table, position, reason = records.scan_batches(data)
    assert (position, reason) == (len(data), None)
    records.check_crcs(data, table, **PLACE)
    schema = changelog_schema()
    found = records.index_records(data, table, **PLACE)
    rows = records.to_arrow(found, table, None, schema=schema, topic="t", partition=0)
    times = rows["timestamp"].cast(pa.int64()).to_pylist()
    types = rows["timestampType"].to_pylist()
    columns = [rows[key].to_pylist() for key in ("offset", "key", "value")]
    return [(*row[:3], row[3] // 1000, row[4]) for row in zip(*columns, times, types, strict=True)]


def headers_of(data: bytes) -> list[batches.BatchHeader]:
    return [header for _, header in batches.iterate_headers(data)]


def filtered(data: bytes, keep: Callable[[int], bool], horizon: int | None = None) -> bytes:
    """Every batch with the records whose offsets `keep` wants; batches without any are left out."""
    table, _, _ = records.scan_batches(data)
    found = records.index_records(data, table, **PLACE)
    return rewritten(data, [keep(offset) for offset in found.offsets.tolist()], horizon)


# --- building and reading ------------------------------------------------------------------------

SIX = [
    (1, b"a", b"1"),
    (2, b"b", b"2"),
    (3, b"c", b"3"),
    (4, None, b"4"),
    (5, b"d", None),
    (6, None, None),
]


@pytest.mark.parametrize("first", [0, 57, 2**40])
@pytest.mark.parametrize(
    ("magic", "codec"),
    [(m, c) for m in range(3) for c in range(5) if m == 2 or c != ZSTD],
)
def test_records_of_every_format_and_codec_are_read_in_order(
    tmp_path: Path, magic: int, codec: int, first: int
) -> None:
    rows = [(first + i, time, key, value) for i, (time, key, value) in enumerate(SIX)]
    if magic == 2:
        items = [Record(*row) for row in rows]
        data = batch_data(items, codec=codec, leader_epoch=998, producer=(25, 3, 7))
    elif codec:
        data = wrapper(magic, codec, [Record(*row) for row in rows])
    else:
        data = messages(magic, [Record(*row) for row in rows])
    (tmp_path / name(first, ".log")).write_bytes(data)
    state = PartitionState(first + 6, first, len(data), log_start_offset=first)
    with open_snapshot(tmp_path, "t", 0, lambda: state) as snapshot:
        tables = list(snapshot.read(first, first + 6, schema=changelog_schema()))
    found = [row for table in tables for row in table.to_pylist()]
    assert [(r["offset"], r["key"], r["value"]) for r in found] == [
        (offset, key, value) for offset, _, key, value in rows
    ]
    times = [t for table in tables for t in table["timestamp"].cast(pa.int64()).to_pylist()]
    assert [t // 1000 for t in times] == ([t for _, t, _, _ in rows] if magic else [-1] * 6)
    assert {r["timestampType"] for r in found} == ({0} if magic else {-1})


@pytest.mark.parametrize("codec", range(5))
def test_a_headers_fields_are_those_the_batch_was_built_with(codec: int) -> None:
    items = [Record(57 + i, time, key, value) for i, (time, key, value) in enumerate(SIX)]
    (header,) = headers_of(batch_data(items, codec=codec, leader_epoch=998, producer=(25, 3, 7)))
    assert (header.base_offset, header.last_offset, header.records_count) == (57, 62, 6)
    assert (header.codec, header.timestamp_type, header.max_timestamp) == (codec, 0, 6)
    assert (header.producer_id, header.producer_epoch, header.base_sequence) == (25, 3, 7)
    assert header.leader_epoch == 998


def encoded(headers: Sequence[int], batch_size: int, codec: int = NONE) -> list[int]:
    """Encode records `key`, `value` with so many headers each; the records in each batch."""
    item = {"key": "hello", "value": b"world.world"}
    result = records.encode(
        pa.array([b"key"] * len(headers)),
        pa.array([b"value"] * len(headers)),
        pa.array([[item] * count for count in headers], HEADERS),
        np.zeros(len(headers), dtype=np.int64),
        np.arange(len(headers)),
        batch_size=batch_size,
        codec=codec,
        level=None,
        timestamp_type=0,
        max_message_bytes=1 << 20,
    )
    return result.counts


def test_a_batch_takes_records_as_long_as_it_has_room() -> None:
    size = len(record(1, 0, b"key", b"value", []))
    assert encoded([0, 0, 0], 61 + 2 * size) == [2, 1]
    assert encoded([0, 0, 0], 61 + 2 * size - 1) == [1, 1, 1]


def test_the_room_a_record_needs_counts_its_headers() -> None:
    assert encoded([0, 0], 120) == [2]
    assert encoded([0, 10], 120) == [1, 1]


GOLDEN = {  # (magic, codec): what Kafka's own builder is held to
    (0, NONE): 1978725405,
    (0, LZ4): 66944826,
    (1, NONE): 109425508,
    (1, LZ4): 1407303399,
    (2, NONE): 3851219455,
    (2, LZ4): 2745969314,
}


@pytest.mark.parametrize(("magic", "codec"), GOLDEN)
def test_checksums_are_kafkas_golden_numbers(magic: int, codec: int) -> None:
    rows = [(0, 283843, b"key1", b"value1"), (1, 1234, b"key2", b"value2")]
    if magic == 2:
        keys, values, times = ([row[i] for row in rows] for i in (2, 3, 1))
        data = bytes(
            records.encode(
                pa.array(keys),
                pa.array(values),
                None,
                np.array(times),
                np.arange(2),
                batch_size=1000,
                codec=codec,
                level=None,
                timestamp_type=0,
                max_message_bytes=1000,
            ).data
        )
    elif codec:
        data = wrapper(magic, codec, [Record(*row) for row in rows])
    else:
        data = messages(magic, [Record(*row) for row in rows])
    assert headers_of(data)[0].crc == GOLDEN[magic, codec]
    table, _, _ = records.scan_batches(data)
    records.check_crcs(data, table, **PLACE)


def test_the_size_of_the_next_batch_is_told_by_its_first_17_bytes() -> None:
    data = batch_data([Record(0, 10, None, b"abc")])
    size = len(data)
    for known in (1, 12, 16, 17, 60, 61, size - 1):
        table, position, reason = records.scan_batches(data[:known])
        assert (len(table), position, reason) == (0, 0, None)  # more is needed
    for place, byte, words in ((16, 10, "magic 10"), (11, 0, "less than a header")):
        wrong = bytearray(data)
        wrong[place] = byte
        assert words in str(records.scan_batches(wrong)[2])
        assert headers_of(bytes(wrong)) == []
    assert headers_of(data)[0].size == size


@pytest.mark.parametrize("magic", [0, 1])
def test_zstd_is_not_a_codec_before_v2(tmp_path: Path, magic: int) -> None:
    data = message(magic, 0, None, compressed(ZSTD, message(magic, 0, b"k", b"v")), attributes=ZSTD)
    (tmp_path / name(0, ".log")).write_bytes(data)
    state = PartitionState(1, 0, len(data))
    with (
        open_snapshot(tmp_path, "t", 0, lambda: state) as snapshot,
        pytest.raises(CorruptBatchError, match="zstd"),
    ):
        list(snapshot.read(0, 1, schema=changelog_schema()))


# --- control batches -----------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [0, 1])
def test_a_transactions_marker_is_78_bytes_and_says_how_it_ended(kind: int) -> None:
    data = marker(
        983, kind, 73, timestamp=5000, epoch=13, coordinator_epoch=347, leader_epoch=29
    ).data
    header = batches.parse_header(data)
    assert (len(data), header.base_offset, header.records_count) == (78, 983, 1)
    assert header.is_control and header.is_transactional
    assert (header.producer_id, header.producer_epoch, header.leader_epoch) == (73, 13, 29)
    found = read_control_record(data, 0, header)
    assert found is not None
    assert (found.type, found.version, found.coordinator_epoch) == (kind, 0, 347)


@pytest.mark.parametrize("kind", [2, 3, 4, 5, 6, 77])
def test_a_leader_change_is_a_control_batch_that_no_reader_sees(tmp_path: Path, kind: int) -> None:
    change = Record(983, 5000, struct.pack(">hh", 0, kind), b"of a quorum")
    data = batch_data([change], control=True, leader_epoch=20)
    header = batches.parse_header(data)
    found = read_control_record(data, 0, header)
    assert found is not None
    assert (found.type, found.is_marker, header.is_transactional) == (kind, False, False)
    (tmp_path / name(983, ".log")).write_bytes(data)
    state = PartitionState(984, 983, len(data), log_start_offset=983)
    with open_snapshot(tmp_path, "t", 0, lambda: state) as snapshot:
        for read_committed in (True, False):
            rows = snapshot.read(983, 984, schema=changelog_schema(), read_committed=read_committed)
            assert list(rows) == []


# --- filtering -----------------------------------------------------------------------------------


def three(base: int, offsets: tuple[int, int, int], **fields: Any) -> bytes:
    first, second, third = offsets
    items = [
        Record(first, 10 + base, None, b"a"),
        Record(second, 11 + base, b"1", b"b"),
        Record(third, 12 + base, None, b"c"),
    ]
    return batch_data(items, base_offset=base, **fields)


@pytest.mark.parametrize("codec", range(5))
def test_filtering_keeps_the_leader_epoch(codec: int) -> None:
    data = three(0, (0, 1, 2), codec=codec, leader_epoch=67)
    (header,) = headers_of(filtered(data, lambda offset: offset == 1))
    assert header.leader_epoch == 67


@pytest.mark.parametrize("codec", range(5))
@pytest.mark.parametrize(
    ("producer", "attributes"),
    [(NO_PRODUCER, 0), ((23, 5, 10), 0), ((99384, 234, 15), TRANSACTIONAL)],
)
def test_filtering_keeps_producer_epoch_sequence_and_range(
    codec: int, producer: tuple[int, int, int], attributes: int
) -> None:
    data = three(3, (3, 4, 5), codec=codec, producer=producer, attributes=attributes)
    kept = filtered(data, lambda offset: offset > 3)
    (header,) = headers_of(kept)
    assert (header.producer_id, header.producer_epoch, header.base_sequence) == producer
    assert (header.base_offset, header.last_offset, header.records_count) == (3, 5, 2)
    assert (header.is_transactional, header.codec) == (bool(attributes), codec)
    assert found_in(kept) == [(4, b"1", b"b", 14, 0), (5, None, b"c", 15, 0)]


@pytest.mark.parametrize("codec", range(5))
def test_a_batch_that_was_cleaned_before_keeps_its_first_and_last_offset(codec: int) -> None:
    data = three(0, (5, 8, 10), codec=codec)
    kept = filtered(data, lambda offset: offset == 8)
    (header,) = headers_of(kept)
    assert (header.base_offset, header.last_offset) == (0, 10)
    assert found_in(kept) == [(8, b"1", b"b", 11, 0)]
    assert filtered(kept, lambda offset: True) == kept  # and is copied as it is from then on


def four_batches(codec: int) -> list[bytes]:
    rows: list[list[tuple[int, int, bytes | None, bytes | None]]] = [
        [(0, 10, None, b"a")],
        [(1, 11, b"1", b"b"), (2, 12, None, b"c")],
        [(3, 13, None, b"d"), (4, 20, b"4", b"e"), (5, 15, b"5", b"f")],
        [(6, 16, b"6", b"g")],
    ]
    return [batch_data([Record(*row) for row in group], codec=codec) for group in rows]


@pytest.mark.parametrize("codec", range(5))
def test_filtering_leaves_every_batch_its_range_codec_and_largest_time(codec: int) -> None:
    data = b"".join(four_batches(codec))
    kept = filtered(data, lambda offset: offset in (1, 4, 5, 6))
    headers = headers_of(kept)
    assert [(h.base_offset, h.last_offset) for h in headers] == [(1, 2), (3, 5), (6, 6)]
    assert [h.max_timestamp for h in headers] == [11, 20, 16]
    assert {h.codec for h in headers} == {codec}
    assert found_in(kept) == [
        (1, b"1", b"b", 11, 0),
        (4, b"4", b"e", 20, 0),
        (5, b"5", b"f", 15, 0),
        (6, b"6", b"g", 16, 0),
    ]


@pytest.mark.parametrize("codec", range(5))
def test_discarded_batches_leave_their_neighbours_byte_for_byte(codec: int) -> None:
    first, second, third, fourth = four_batches(codec)
    data = first + second + third + fourth
    assert filtered(data, lambda offset: offset in (0, 3, 4, 5)) == first + third


@pytest.mark.parametrize("codec", range(5))
def test_log_append_time_stays_in_every_batch_that_stays(codec: int) -> None:
    fields: dict[str, Any] = {"attributes": LOG_APPEND_TIME, "max_timestamp": 88_000}
    data = batch_data([Record(0, 10, None, b"a")], codec=codec, **fields)
    data += three(1, (1, 2, 3), codec=codec, producer=(25, 3, 7), **fields)
    data += three(4, (4, 5, 6), codec=codec, **fields)
    kept = filtered(data, lambda offset: offset in (2, 5))
    assert [(h.timestamp_type, h.max_timestamp, h.codec) for h in headers_of(kept)] == [
        (1, 88_000, codec)
    ] * 2
    assert [(row[3], row[4]) for row in found_in(kept)] == [(88_000, 1)] * 2


@pytest.mark.parametrize("codec", range(5))
def test_a_delete_horizon_takes_the_base_timestamps_place_and_no_time_changes(codec: int) -> None:
    items = [
        Record(0, 5, b"0", b"0"),
        Record(1, 10, b"1", None),
        Record(2, 15, b"2", b"2"),
    ]
    horizon = (2**31 - 1) // 2
    kept = filtered(batch_data(items, codec=codec), lambda offset: True, horizon)
    (header,) = headers_of(kept)
    assert (header.attributes & 0x40, header.base_timestamp) == (0x40, horizon)
    assert [row[3] for row in found_in(kept)] == [5, 10, 15]


# --- empty batches -------------------------------------------------------------------------------


@pytest.mark.parametrize("codec", range(5))
@pytest.mark.parametrize("transactional", [0, TRANSACTIONAL])
def test_a_batch_kept_for_its_range_alone_is_a_header_of_61_bytes(
    codec: int, transactional: int
) -> None:
    items = [Record(3, 11, b"2", b"b"), Record(4, 12, b"3", b"c")]
    data = batch_data(
        items, codec=codec, producer=(23, 5, 10), leader_epoch=293, attributes=transactional
    )
    table, _, _ = records.scan_batches(data)
    emptied = records.empty_batch(table, 0)
    header = batches.parse_header(emptied)
    assert (len(emptied), header.records_count, header.codec) == (61, 0, NONE)
    assert (header.base_offset, header.last_offset, header.base_sequence) == (3, 4, 10)
    assert (header.max_timestamp, header.timestamp_type, header.leader_epoch) == (12, 0, 293)
    assert header.is_transactional == bool(transactional)


EMPTY = empty(3, 3, max_timestamp=77, producer=(23, 5, 10), leader_epoch=293).data


def test_an_empty_batch_that_is_kept_again_is_the_same_61_bytes() -> None:
    data = EMPTY
    table, _, _ = records.scan_batches(data)
    assert len(data) == 61
    assert records.empty_batch(table, 0) == data


def test_an_empty_batch_that_is_not_kept_leaves_no_byte() -> None:
    assert filtered(EMPTY, lambda offset: True) == b""


def test_a_horizon_goes_with_the_last_record() -> None:
    data = batch_data(
        [Record(3, 11, b"k", None)], base_offset=3, attributes=0x40, base_timestamp=99
    )
    table, _, _ = records.scan_batches(data)
    header = batches.parse_header(records.empty_batch(table, 0))
    assert (header.attributes & 0x40, header.base_timestamp) == (0, -1)


def test_a_segment_of_empty_batches_has_a_time_and_no_records(tmp_path: Path) -> None:
    items = [empty(0, 4, max_timestamp=900), empty(5, 9, max_timestamp=800), batch(10, 1)]
    write_segment(tmp_path, 0, items)
    state = PartitionState(11, 0, (tmp_path / name(0, ".log")).stat().st_size)
    with open_snapshot(tmp_path, "t", 0, lambda: state) as snapshot:
        assert offset_since(snapshot, 1) == 10
        assert offset_since(snapshot, 801) == 10


@pytest.mark.parametrize("bits", [0x0100, 0x7F00, -0x8000, 0x0080])
def test_bits_above_the_low_byte_of_the_attributes_mean_nothing(bits: int) -> None:
    items = [Record(0, 5, b"0", b"0"), Record(1, 10, b"1", None)]
    plain, odd = batch_data(items, codec=GZIP), batch_data(items, codec=GZIP, attributes=bits)
    (header,) = headers_of(odd)
    assert (header.codec, header.timestamp_type, header.attributes & 0x40) == (GZIP, 0, 0)
    assert not header.is_control and not header.is_transactional
    assert found_in(odd) == found_in(plain)
