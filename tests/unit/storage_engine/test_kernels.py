"""Each kernel does what its naive twin does, on whatever bytes it is given.

Each call also compares the compiled kernel with its source as Python; `make test-kernels` runs the
file with bounds checks and sanitizers. Bytes that no encoder would write are a status, never a read
outside the array.
"""

from __future__ import annotations

import struct
import zlib
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kafkalog.storage_engine.format import ops
from kafkalog.storage_engine.records import codes
from kafkalog.storage_engine.records.kernels import (
    decode,
    encode,
    gather,
    legacy,
    match,
    murmur2,
    scan,
)
from tests.builders import batch_builder
from tests.builders.batch_builder import Record, batch_data, record, sized, varint
from tests.builders.message_builder import message
from tests.unit.storage_engine import naive, naive_messages

pytestmark = pytest.mark.usefixtures("compared_kernels")

I32 = st.integers(-(2**31), 2**31 - 1)
I64 = st.integers(-(2**63), 2**63 - 1)
BYTES = st.one_of(st.none(), st.binary(max_size=20), st.binary(min_size=130, max_size=140))
HEADERS = st.lists(st.tuples(st.binary(max_size=5), BYTES), max_size=3)
few = settings(max_examples=60, deadline=None)
many = settings(max_examples=300, deadline=None)

VARINTS = [
    (0, "00"),
    (-1, "01"),
    (1, "02"),
    (63, "7e"),
    (-64, "7f"),
    (64, "8001"),
    (-65, "8101"),
    (8191, "fe7f"),
    (-8192, "ff7f"),
    (8192, "808001"),
    (-8193, "818001"),
    (1048575, "feff7f"),
    (1048576, "80808001"),
    (134217727, "feffff7f"),
    (134217728, "8080808001"),
    (2147483647, "feffffff0f"),
    (-2147483648, "ffffffff0f"),
]
VARLONGS = [
    *VARINTS,
    (17179869183, "feffffff7f"),
    (17179869184, "808080808001"),
    (2199023255551, "feffffffff7f"),
    (2199023255552, "80808080808001"),
    (281474976710655, "feffffffffff7f"),
    (281474976710656, "8080808080808001"),
    (36028797018963967, "feffffffffffff7f"),
    (36028797018963968, "808080808080808001"),
    (4611686018427387903, "feffffffffffffff7f"),
    (4611686018427387904, "80808080808080808001"),
    (9223372036854775807, "feffffffffffffffff01"),
    (-9223372036854775808, "ffffffffffffffffff01"),
]


def array(data: bytes) -> Any:
    return np.frombuffer(data, dtype=np.uint8)


def naive_varint(data: bytes, bits: int) -> tuple[int, int]:
    try:
        return naive.read_varint(data, 0, len(data), bits)
    except ValueError:
        return 0, -1


@pytest.mark.parametrize(("value", "encoded"), VARLONGS)
def test_varlong_boundaries(value: int, encoded: str) -> None:
    data = bytes.fromhex(encoded)
    assert varint(value) == data
    assert encode.varint_size(np.int64(value)) == len(data)
    target = np.zeros(len(data), dtype=np.uint8)
    assert encode.write_varint(target, 0, np.int64(value)) == len(data)
    assert target.tobytes() == data
    assert decode.read_varlong(array(data), 0, len(data)) == (value, len(data))
    for cut in range(len(data)):
        assert decode.read_varlong(array(data), 0, cut) == (0, -1)


@pytest.mark.parametrize(("value", "encoded"), VARINTS)
def test_varint_boundaries(value: int, encoded: str) -> None:
    data = bytes.fromhex(encoded)
    assert decode.read_varint(array(b"?" + data + b"\x80"), 1, 2 + len(data)) == (
        value,
        1 + len(data),
    )
    for cut in range(len(data)):
        assert decode.read_varint(array(data), 0, cut) == (0, -1)


@pytest.mark.parametrize(
    ("encoded", "kernel", "bits"),
    [
        ("808080808000", decode.read_varint, 32),  # six bytes
        ("ffffffff7f", decode.read_varint, 32),  # bits past the 32nd
        ("8000", decode.read_varint, 32),  # longer than it need be
        ("8080808080808080808000", decode.read_varlong, 64),  # eleven bytes
        ("ffffffffffffffffff7f", decode.read_varlong, 64),
    ],
)
def test_odd_varints_read_as_in_java(encoded: str, kernel: Any, bits: int) -> None:
    data = bytes.fromhex(encoded)
    assert kernel(array(data), 0, len(data)) == naive_varint(data, bits)


@many
@given(st.binary(max_size=12))
def test_any_bytes_are_a_varint_or_none(data: bytes) -> None:
    assert decode.read_varint(array(data), 0, len(data)) == naive_varint(data, 32)
    assert decode.read_varlong(array(data), 0, len(data)) == naive_varint(data, 64)


@few
@given(I64)
def test_integers_are_big_endian(value: int) -> None:
    data = struct.pack(">q", value)
    assert ops.big_64(data, 0) == value
    assert ops.big_32(data, 4) == struct.unpack(">i", data[4:])[0]
    assert ops.big_16(data, 6) == struct.unpack(">h", data[6:])[0]


# --- batches -------------------------------------------------------------------------------------
def scanned(data: bytes) -> tuple[Any, int, int]:
    count, position, ending = scan.count_batches(array(data))
    table = np.full((codes.HEADER_FIELDS, count), -77, dtype=np.int64)
    scan.scan_batches(array(data), table)
    return table, position, ending


@few
@given(
    st.lists(st.tuples(I64, I32, I64, st.integers(0, 2**15 - 1)), max_size=4), st.integers(0, 70)
)
def test_scanned_headers_are_those_of_the_bytes(
    fields: list[tuple[int, int, int, int]], tail: int
) -> None:
    batches = [
        batch_data(
            [],
            payload=b"x" * (i * 3),
            base_offset=base_offset,
            last_offset=base_offset + delta,
            attributes=attributes,
            base_timestamp=time,
            max_timestamp=-time - 1,
            leader_epoch=delta,
            producer=(time, attributes, delta),
            count=delta,
        )
        for i, (base_offset, delta, time, attributes) in enumerate(fields)
    ]
    data = b"".join(batches) + batch_data([], payload=b"y" * 20)[:tail]
    table, position, ending = scanned(data)
    assert (position, ending) == (len(b"".join(batches)), codes.SCAN_END)
    start = 0
    for column, batch in zip(table.T.tolist(), batches, strict=True):
        offset, length, epoch, _, crc, bits, delta, *times, pid, pe, seq, n = naive.HEADER.unpack(
            batch[:61]
        )
        assert column == [
            *(start, length + 12, offset, delta, epoch, bits, *times, pid, pe, seq, n, crc, 2)
        ]
        start += len(batch)


@pytest.mark.parametrize(
    ("position", "patch", "ending"),
    [
        (8, struct.pack(">i", 48), codes.SCAN_LENGTH),
        (8, struct.pack(">i", -1), codes.SCAN_LENGTH),
        (8, struct.pack(">i", -(2**31)), codes.SCAN_LENGTH),
        (8, struct.pack(">i", 2**31 - 1), codes.SCAN_END),
        (8, struct.pack(">i", 25 - 12), codes.SCAN_LENGTH),
        (8, struct.pack(">ib", 33 - 12, 0) + b"\0" * 3 + b"\1", codes.SCAN_LENGTH),
        (16, b"\x03", codes.SCAN_MAGIC),
        (16, b"\xff", codes.SCAN_MAGIC),
    ],
)
def test_scan_ends_before_what_is_not_a_batch(position: int, patch: bytes, ending: int) -> None:
    good = batch_data([Record(0, 5, b"k", b"v")])
    bad = bytearray(good)
    bad[position : position + len(patch)] = patch
    assert scan.count_batches(array(good + bytes(bad) + good)) == (1, len(good), ending)


@many
@given(st.binary(max_size=80))
def test_scan_of_any_bytes_stays_inside(data: bytes) -> None:
    _, position, _ = scanned(data)
    assert 0 <= position <= len(data)


# --- records -------------------------------------------------------------------------------------
@st.composite
def some_records(draw: Any, max_size: int = 8) -> list[Record]:
    deltas = sorted(draw(st.sets(st.integers(0, 300), min_size=1, max_size=max_size)))
    return [
        Record(
            1000 + delta,
            1_700_000_000_000 + draw(st.integers(-(2**40), 2**40)),
            draw(BYTES),
            draw(BYTES),
            draw(HEADERS),
        )
        for delta in deltas
    ]


def sections(*columns: tuple[int, ...]) -> Any:
    return np.array(columns, dtype=np.int64).T.copy()


NONE = -(2**63)


def indexed(data: bytes, count: int, last_delta: int, append_time: int = NONE) -> Any:
    records = np.full((codes.RECORD_FIELDS, max(count, 0)), -77, dtype=np.int64)
    place = sections((0, len(data), count, 1000, last_delta, 1_700_000_000_000, append_time))
    status, found, _ = decode.index_records(array(data), place, records)
    return (status, found, records)


def as_records(data: bytes, table: Any) -> list[Record]:
    result = []
    for start, end, offset, time, kp, ks, vp, vs, hp in table.T.tolist():
        assert 0 <= start < end <= len(data)
        status, after = decode.skip_headers(array(data), hp, end)
        assert (status, after) == (codes.OK, end)
        headers = naive_headers(data, hp, end)
        key = None if ks < 0 else data[kp : kp + ks]
        value = None if vs < 0 else data[vp : vp + vs]
        result.append(Record(offset, time, key, value, headers))
    return result


def naive_headers(data: bytes, position: int, end: int) -> list[tuple[bytes, bytes | None]]:
    count, position = naive.read_varint(data, position, end, 32)
    headers = []
    for _ in range(count):
        name, position = naive.read_sized(data, position, end)
        content, position = naive.read_sized(data, position, end)
        assert name is not None
        headers.append((name, content))
    return headers


@few
@given(some_records(), st.sampled_from([NONE, 4321]))
def test_indexed_records_are_those_written(records: list[Record], append_time: int) -> None:
    data = batch_builder.section(records, 1000, 1_700_000_000_000)
    status, found, table = indexed(data, len(records), 300, append_time)
    assert (status, found) == (codes.OK, len(records))
    if append_time != NONE:
        records = [Record(r.offset, append_time, r.key, r.value, r.headers) for r in records]
    assert as_records(data, table) == records


def decoded(
    data: bytes, count: int, last_delta: int, append_time: int = NONE
) -> tuple[tuple[int, ...], list[tuple[int, int, bytes | None, bytes | None]]]:
    """Decode `data`: what the kernel returns, and (offset, microseconds, key, value) of each."""
    rows = max(count, 0)
    numbers = np.full((2, rows), -77, dtype=np.int64)
    columns = [empty_column(rows, len(data)), empty_column(rows, len(data))]
    place = sections((0, len(data), count, 1000, last_delta, 1_700_000_000_000, append_time))
    work = np.zeros((codes.RECORD_FIELDS, 1), dtype=np.int64)
    result = decode.decode_records(array(data), place, work, numbers, *columns[0], *columns[1])
    if result[0] != codes.OK:
        return tuple(map(int, result)), []
    keys, values = (values_of(rows, *column) for column in columns)
    assert result[3:] == (keys.count(None), values.count(None))
    return tuple(map(int, result)), list(zip(*numbers.tolist(), keys, values, strict=True))


def empty_column(rows: int, size: int) -> Any:
    validity = np.zeros((rows + 7) // 8, dtype=np.uint8)
    return np.full(rows + 1, -77, dtype=np.int32), validity, np.zeros(size, dtype=np.uint8)


def values_of(rows: int, offsets: Any, validity: Any, data: Any) -> list[bytes | None]:
    bits = np.unpackbits(validity, bitorder="little")
    return [data[offsets[i] : offsets[i + 1]].tobytes() if bits[i] else None for i in range(rows)]


MICROSECONDS_MAX = (2**63 - 1) // 1000


def columns_as_written(
    records: list[Record],
) -> list[tuple[int, int, bytes | None, bytes | None]]:
    return [
        (
            r.offset,
            min(max(r.timestamp, -MICROSECONDS_MAX), MICROSECONDS_MAX) * 1000,
            r.key,
            r.value,
        )
        for r in records
    ]


@few
@given(some_records(), st.sampled_from([NONE, 4321, 2**62]))
def test_decoded_columns_are_those_written(records: list[Record], append_time: int) -> None:
    data = batch_builder.section(records, 1000, 1_700_000_000_000)
    result, rows = decoded(data, len(records), 300, append_time)
    assert result[:2] == (codes.OK, len(records))
    if append_time != NONE:
        records = [Record(r.offset, append_time, r.key, r.value, r.headers) for r in records]
    assert rows == columns_as_written(records)


def test_columns_without_room_are_a_status() -> None:
    data = record(0, 0, b"key", None, [])
    place = sections((0, len(data), 1, 0, 0, 0, NONE))
    work, numbers = np.zeros((codes.RECORD_FIELDS, 1), np.int64), np.zeros((2, 1), np.int64)
    none, full = empty_column(-1, 0), empty_column(1, len(data))
    assert decode.column_room(*full, 1) == len(data)
    assert decode.column_room(*none, 1) == 2**31 - 1
    wanted = {
        codes.OK: (full, none),
        codes.BAD_RANGE: (empty_column(1, len(data) - 1), none),
    }
    for status, (keys, values) in wanted.items():
        for pair in ((keys, values), (values, keys)):
            found = decode.decode_records(array(data), place, work, numbers, *pair[0], *pair[1])
            assert found[0] == status
    narrow = (np.zeros(1, np.int32), full[1], full[2]), (full[0], full[1][:0], full[2])
    for column in narrow:
        found = decode.decode_records(array(data), place, work, numbers, *column, *none)
        assert found[0] == codes.BAD_RANGE
    column = empty_column(1, len(data))
    assert decode.append_value(array(data), work, 4, 0, *column, 0) == 3
    assert values_of(1, np.array([0, 3]), *column[1:]) == [b"key"]


def agrees_with_naive(data: bytes, count: int, last_delta: int) -> bool:
    """Index and decode `data`, compare with the twin, and say whether it was taken for records."""
    status, _, table = indexed(data, count, last_delta)
    result, rows = decoded(data, count, last_delta)
    assert result[0] == status
    try:
        expected = naive.read_section(
            data,
            count=count,
            base_offset=1000,
            last_offset_delta=last_delta,
            base_timestamp=1_700_000_000_000,
        )
    except ValueError:
        assert status != codes.OK
        return False
    assert status == codes.OK
    assert as_records(data, table) == expected
    assert rows == columns_as_written(expected)
    return True


@few
@given(some_records(max_size=3), st.data())
def test_a_changed_byte_is_a_status_or_what_the_twin_reads(
    records: list[Record], data: st.DataObject
) -> None:
    section = bytearray(batch_builder.section(records, 1000, 1_700_000_000_000))
    position = data.draw(st.integers(0, len(section) - 1))
    section[position] = data.draw(st.integers(0, 255))
    agrees_with_naive(bytes(section), len(records), 300)


@pytest.mark.slow
@few
@given(some_records(max_size=3))
def test_every_truncation_is_a_status(records: list[Record]) -> None:
    section = batch_builder.section(records, 1000, 1_700_000_000_000)
    for cut in range(len(section)):
        assert not agrees_with_naive(section[:cut], len(records), 300)
    assert not agrees_with_naive(section + b"\0", len(records), 300)


@many
@given(st.binary(max_size=60), st.integers(-2, 6))
def test_any_bytes_are_records_or_a_status(data: bytes, count: int) -> None:
    agrees_with_naive(data, count, 300)


WILD = [-(2**31), -2, 2**31 - 1, 2**30, 127, 128]


@pytest.mark.parametrize("wild", WILD)
@pytest.mark.parametrize("field", ["length", "key", "value", "headers", "name", "content"])
def test_wild_sizes_are_read_as_the_twin_reads_them(field: str, wild: int) -> None:
    def size(name: str, honest: int) -> bytes:
        return varint(wild if name == field else honest)

    body = b"\0" + varint(0) + varint(0) + size("key", 1) + b"k" + size("value", 1)
    body += b"v" + size("headers", 1) + size("name", 1) + b"n" + size("content", 1) + b"c"
    agrees_with_naive(size("length", len(body)) + body, 1, 300)


def test_offsets_must_rise_up_to_the_batchs_last() -> None:
    def offsets(*deltas: int) -> bytes:
        return b"".join(record(delta, 0, b"k", b"v", []) for delta in deltas)

    assert agrees_with_naive(offsets(0, 1, 5), 3, 5)
    assert not agrees_with_naive(offsets(0, 1, 6), 3, 5)
    assert not agrees_with_naive(offsets(1, 1), 2, 5)
    assert not agrees_with_naive(offsets(2, 1), 2, 5)
    assert not agrees_with_naive(offsets(-1), 1, 5)


def test_count_must_fit_the_section_and_the_table() -> None:
    data = record(0, 0, b"k", b"v", [])
    assert indexed(data, 2, 5)[0] == codes.BAD_COUNT
    assert indexed(data * 2, 1, 5)[0] == codes.BAD_COUNT
    records = np.zeros((codes.RECORD_FIELDS, 0), dtype=np.int64)
    place = sections((0, len(data), 1, 0, 5, 0, NONE))
    assert decode.index_records(array(data), place, records)[0] == codes.BAD_COUNT
    assert indexed(b"whatever", 0, 5)[0] == codes.OK, "nobody looks into an empty batch"


@pytest.mark.parametrize(("start", "end"), [(-1, 3), (0, 99), (5, 4), (99, 99), (-(2**63), 2**62)])
def test_a_section_outside_the_arena_is_a_status(start: int, end: int) -> None:
    records = np.zeros((codes.RECORD_FIELDS, 1), dtype=np.int64)
    place = sections((start, end, 1, 0, 5, 0, NONE))
    assert decode.index_records(array(b"12345678"), place, records)[0] == codes.BAD_RANGE


def test_read_record_leaves_deltas() -> None:
    data = record(7, -3, b"key", None, [(b"h", b"1")])
    table = np.zeros((codes.RECORD_FIELDS, 1), dtype=np.int64)
    assert decode.read_record(array(data), 0, len(data), table, 0) == codes.OK
    assert table[:, 0].tolist()[:4] == [0, len(data), 7, -3]


# --- columns -------------------------------------------------------------------------------------
def column_of(values: list[bytes | None], prefix: bytes = b"") -> tuple[bytes, Any]:
    """Lay values out with gaps: (data, places)."""
    data = prefix
    places = []
    for value in values:
        places.append((len(data), -1 if value is None else len(value)))
        data += (value or b"") + b"."
    return data, np.array(places, dtype=np.int64).reshape(-1, 2).T.copy()


@few
@given(st.lists(BYTES, max_size=20), st.data())
def test_gathered_columns_hold_the_rows_asked_for(
    values: list[bytes | None], data: st.DataObject
) -> None:
    arena, places = column_of(values, b"..")
    picks = data.draw(st.lists(st.integers(0, len(values) - 1), max_size=30)) if values else []
    rows = np.array(picks, dtype=np.int64)
    wanted = [values[i] for i in picks]
    size, nulls = gather.measure_column(len(arena), places[0], places[1], rows)
    assert (size, nulls) == (sum(len(v or b"") for v in wanted), wanted.count(None))
    offsets = np.full(len(rows) + 1, -77, dtype=np.int32)
    validity = np.zeros((len(rows) + 7) // 8, dtype=np.uint8)
    out = np.zeros(size, dtype=np.uint8)
    gather.gather_column(array(arena), places[0], places[1], rows, offsets, validity, out)
    bits = np.unpackbits(validity, bitorder="little")
    assert [
        out[offsets[i] : offsets[i + 1]].tobytes() if bits[i] else None for i in range(len(rows))
    ] == wanted


@pytest.mark.parametrize(
    ("position", "size", "row"),
    [
        (-1, 1, 0),
        (9, 1, 0),
        (8, 1, 0),
        (0, 9, 0),
        (0, 2**62, 0),
        (2**62, 1, 0),
        (0, 1, 1),
        (0, 1, -1),
    ],
)
def test_values_outside_the_arena_are_never_measured(position: int, size: int, row: int) -> None:
    places = np.array([[position], [size]], dtype=np.int64)
    assert gather.measure_column(8, places[0], places[1], np.array([row])) == (-1, row)
    assert encode.measure_fields(places, 0, 8, -1) == -1 or row != 0


@few
@given(st.lists(HEADERS, max_size=10))
def test_gathered_headers_are_those_written(lists: list[list[tuple[bytes, bytes | None]]]) -> None:
    records = [Record(1000 + i, 0, None, None, h) for i, h in enumerate(lists)]
    data = batch_builder.section(records, 1000, 0)
    table = np.zeros((codes.RECORD_FIELDS, len(lists)), dtype=np.int64)
    decode.index_records(
        array(data), sections((0, len(data), len(lists), 1000, 99, 0, NONE)), table
    )
    rows = np.arange(len(lists))[::-1].copy()
    place = (array(data), table[8], table[1], rows)
    status, with_headers, count, key_size, value_size = decode.measure_headers(*place)
    assert status == codes.OK
    assert with_headers == sum(map(bool, lists))
    assert count == sum(map(len, lists))
    lists_out, keys_out, values_out = (
        np.zeros(n + 1, np.int32) for n in (len(lists), count, count)
    )
    valid, value_valid = (np.zeros((n + 7) // 8, np.uint8) for n in (len(lists), count))
    keys, values = np.zeros(key_size, np.uint8), np.zeros(value_size, np.uint8)
    decode.gather_headers(*place, lists_out, valid, keys_out, keys, values_out, value_valid, values)
    flags = np.unpackbits(value_valid, bitorder="little")
    flat = [
        (
            keys[keys_out[i] : keys_out[i + 1]].tobytes(),
            values[values_out[i] : values_out[i + 1]].tobytes() if flags[i] else None,
        )
        for i in range(count)
    ]
    assert [flat[lists_out[i] : lists_out[i + 1]] for i in range(len(lists))] == lists[::-1]
    assert np.unpackbits(valid, bitorder="little")[: len(lists)].tolist() == [
        bool(h) for h in lists[::-1]
    ]


@many
@given(st.binary(max_size=30))
def test_skipped_headers_are_those_the_twin_reads(data: bytes) -> None:
    status, position = decode.skip_headers(array(data), 0, len(data))
    places = np.array([0], dtype=np.int64), np.array([len(data)], dtype=np.int64)
    measured, *_ = decode.measure_headers(array(data), *places, np.array([0]))
    assert measured == status
    if status == codes.OK:
        assert (
            len(naive_headers(data, 0, len(data))) == naive.read_varint(data, 0, len(data), 32)[0]
        )
        assert 0 < position <= len(data)


@pytest.mark.parametrize(("position", "end", "row"), [(-2, 2, 0), (0, 9, 0), (0, 2, 1), (0, 2, -1)])
def test_headers_outside_the_arena_are_a_status(position: int, end: int, row: int) -> None:
    place = np.array([position]), np.array([end]), np.array([row])
    assert decode.measure_headers(array(b"\0\0\0\0"), *place)[0] == codes.BAD_RANGE


# --- messages v0 and v1 --------------------------------------------------------------------------
@many
@given(st.binary(max_size=70), st.integers(0, 9), st.integers(0, 9))
def test_crc32_is_that_of_zlib(data: bytes, start: int, cut: int) -> None:
    end = max(len(data) - cut, start)
    if end <= len(data):
        assert legacy.crc32(array(data), start, end) == zlib.crc32(data[start:end])


def test_the_first_wrong_crc32_is_found() -> None:
    data = array(b"one two three")
    starts, ends = np.array([0, 4, 8]), np.array([3, 7, 13])
    crcs = np.array([zlib.crc32(word) for word in (b"one", b"two", b"three")])
    assert legacy.find_wrong_crc32(data, starts, ends, crcs) == (-1, 0)
    assert legacy.find_wrong_crc32(data, starts, ends, crcs ^ [0, 1, 1]) == (1, zlib.crc32(b"two"))
    for place in ((-1, 3), (3, 2), (0, 14)):
        bounds = np.array([place[0]]), np.array([place[1]])
        assert legacy.find_wrong_crc32(data, *bounds, np.array([0])) == (0, 0)


def indexed_messages(data: bytes, *, lowest: int, highest: int, base: int) -> list[Any] | None:
    """What the two kernels make of one wrapped set; None when a status says that it is wrong."""
    arena, bounds = array(data), np.array([[0], [len(data)]])
    counts, lasts = np.zeros(1, dtype=np.int64), np.zeros(1, dtype=np.int64)
    if legacy.count_messages(arena, bounds, counts, lasts)[0] != codes.OK:
        return None
    rules = np.array([[counts[0]], [lowest], [highest], [base], [-(2**63)], [1]])
    fields = np.full((codes.RECORD_FIELDS, int(counts[0])), -77, dtype=np.int64)
    status, _, _ = legacy.index_messages(arena, np.concatenate((bounds, rules)), fields)
    if status != codes.OK:
        return None
    found = []
    for _, _, offset, time, key, key_size, value, value_size, headers in fields.T.tolist():
        assert headers == -1
        parts = [
            None if size < 0 else data[at : at + size]
            for at, size in ((key, key_size), (value, value_size))
        ]
        found.append(Record(offset, time, *parts))
    return found


@many
@given(naive_messages.sets(), st.integers(-1, 3), st.integers(0, 30), st.integers(-1, 4))
def test_messages_are_those_of_the_naive_reader(
    data: bytes, lowest: int, highest: int, base: int
) -> None:
    try:
        expected = naive_messages.read_set(data, lowest=lowest, highest=highest, base=base)
    except ValueError:
        expected = None
    assert indexed_messages(data, lowest=lowest, highest=highest, base=base) == expected


@many
@given(st.binary(max_size=120))
def test_any_bytes_are_messages_or_a_status(data: bytes) -> None:
    _, position, _ = scanned(data)
    assert 0 <= position <= len(data)
    try:
        expected = naive_messages.read_set(data, lowest=0, highest=2**63 - 1, base=0)
    except ValueError:
        expected = None
    assert indexed_messages(data, lowest=0, highest=2**63 - 1, base=0) == expected


def test_message_sections_outside_the_arena_are_a_status() -> None:
    arena = array(message(1, 0, b"k", b"v"))
    out = np.zeros(1, dtype=np.int64)
    fields = np.zeros((codes.RECORD_FIELDS, 1), dtype=np.int64)
    for start, end in ((-1, 5), (5, 4), (0, arena.size + 1)):
        bounds = np.array([[start], [end]])
        assert legacy.count_messages(arena, bounds, out, out)[0] == codes.BAD_RANGE
        rules = np.array([[1], [0], [9], [0], [0], [1]])
        sections = np.concatenate((bounds, rules))
        assert legacy.index_messages(arena, sections, fields)[0] == codes.BAD_RANGE
    for count in (-1, 2):
        sections = np.array([[0], [arena.size], [count], [0], [9], [0], [0], [1]])
        assert legacy.index_messages(arena, sections, fields)[0] == codes.BAD_COUNT


def test_records_without_a_header_position_have_no_headers() -> None:
    place = np.array([-1]), np.array([4]), np.array([0])
    assert decode.measure_headers(array(b"\0\0\0\0"), *place) == (codes.OK, 0, 0, 0, 0)


# Values of Kafka's own UtilsTest.testMurmur2.
MURMUR2 = {
    b"21": -973932308,
    b"foobar": -790332482,
    b"a-little-bit-long-string": -985981536,
    b"a-little-bit-longer-string": -1486304829,
    b"lkjh234lh9fiuh90y23oiuhsafujhadof229phr9h19h89h8": -58897971,
    b"abc": 479470107,
}


@pytest.mark.parametrize(("key", "value"), MURMUR2.items())
def test_murmur2_is_kafkas(key: bytes, value: int) -> None:
    assert naive.murmur2(key) == value
    partitions = np.zeros(1, dtype=np.int32)
    place = np.array([0]), np.array([len(key)])
    assert murmur2.murmur2_partitions(array(key), *place, 2**31 - 1, partitions)
    assert partitions[0] == (value & 0x7FFF_FFFF) % (2**31 - 1)


@few
@given(st.lists(BYTES, max_size=20), st.integers(1, 1000))
def test_keys_go_where_the_twin_sends_them(keys: list[bytes | None], count: int) -> None:
    data, places = column_of(keys)
    partitions = np.full(len(keys), -77, dtype=np.int32)
    assert murmur2.murmur2_partitions(array(data), places[0], places[1], count, partitions)
    assert partitions.tolist() == [
        -1 if key is None else naive.partition(key, count) for key in keys
    ]


def test_a_key_outside_its_data_goes_nowhere() -> None:
    place, none = (np.array([4]), np.array([5])), np.zeros(1, np.int32)
    assert not murmur2.murmur2_partitions(array(b"12345678"), *place, 3, none)


# --- writing -------------------------------------------------------------------------------------
def columns_of(records: list[Record]) -> tuple[Any, ...]:
    """Return the arguments that `plan_batches` and `write_records` share."""
    flat = [header for item in records for header in item.headers]
    starts = np.cumsum([0, *(len(item.headers) for item in records)])
    lists = np.stack((starts[:-1], np.diff(starts))) if flat else np.zeros((2, 0), np.int64)
    return (
        column_of([item.key for item in records]),
        column_of([item.value for item in records]),
        lists,
        column_of([name for name, _ in flat]),
        column_of([content for _, content in flat]),
        np.array([item.timestamp for item in records], dtype=np.int64),
    )


def written(records: list[Record], rows: list[int], batch_size: int) -> tuple[bytes, Any]:
    keys, values, lists, names, contents, times = columns_of(records)
    order = np.array(rows, dtype=np.int64)
    sizes = np.zeros(len(rows), dtype=np.int64)
    plan = np.zeros((codes.PLAN_FIELDS, len(rows)), dtype=np.int64)
    status, count, _ = encode.plan_batches(
        *(keys[1], len(keys[0]), values[1], len(values[0]), lists),
        *(names[1], len(names[0]), contents[1], len(contents[0])),
        *(times, order, np.zeros(1, np.int64), batch_size, 2**31 - 1, sizes, plan),
    )
    assert status == codes.OK
    batches = plan[:, :count].copy()
    target = np.zeros(int(batches[2].sum()), dtype=np.uint8)
    place = (array(keys[0]), keys[1], array(values[0]), values[1], lists)
    place += (array(names[0]), names[1], array(contents[0]), contents[1], times, order, sizes)
    assert encode.write_records(target, *place, batches) == target.size
    if target.size:
        assert encode.write_records(target[:-1].copy(), *place, batches) == -1
    return target.tobytes(), batches


@few
@given(st.lists(st.tuples(BYTES, BYTES, HEADERS, I32), max_size=12), st.integers(0, 600), st.data())
def test_planned_and_written_records_are_the_twins(
    items: list[Any], batch_size: int, data: st.DataObject
) -> None:
    given_ = [Record(0, t, key, value, headers) for key, value, headers, t in items]
    rows = data.draw(st.permutations(range(len(given_))))
    ordered = [
        Record(i, given_[row].timestamp, given_[row].key, given_[row].value, given_[row].headers)
        for i, row in enumerate(rows)
    ]
    target, plan = written(given_, rows, batch_size)
    groups = naive.batches(ordered, batch_size)
    expected = [
        bytes(61) + batch_builder.section(group, group[0].offset, group[0].timestamp)
        for group in groups
    ]
    assert target == b"".join(expected)
    assert plan.T.tolist() == [
        [
            *(group[0].offset, group[-1].offset + 1, len(section)),
            *(group[0].timestamp, max(item.timestamp for item in group)),
        ]
        for group, section in zip(groups, expected, strict=True)
    ]


@pytest.mark.parametrize("what", ["row", "key", "value", "list", "name", "null name", "size"])
def test_columns_that_lie_are_a_status(what: str) -> None:
    keys, values, lists, names, contents, times = columns_of(
        [Record(0, 0, b"k", b"v", [(b"n", b"c")])]
    )
    rows = np.array([1 if what == "row" else 0])
    if what in {"key", "value", "name"}:
        {"key": keys, "value": values, "name": names}[what][1][0, 0] = 5
    if what == "null name":
        names[1][1, 0] = -1
    if what == "list":
        lists[1, 0] = 2
    status, size, row = encode.plan_batches(
        *(keys[1], len(keys[0]), values[1], len(values[0]), lists),
        *(names[1], len(names[0]), contents[1], len(contents[0])),
        *(times, rows, np.zeros(1, np.int64), 1000, 61 if what == "size" else 1000),
        *(np.zeros(1, np.int64), np.zeros((codes.PLAN_FIELDS, 1), np.int64)),
    )
    expected = {
        "size": codes.TOO_LARGE,
        "name": codes.BAD_HEADER_KEY,
        "null name": codes.BAD_HEADER_KEY,
    }
    assert status == expected.get(what, codes.BAD_RANGE)
    assert row == rows[0]
    if what == "size":
        assert size == 61 + len(record(0, 0, b"k", b"v", [(b"n", b"c")]))


def test_write_field_writes_size_and_value() -> None:
    for value in (None, b"", b"1", b"12345678", b"123456789" * 30):
        data, places = column_of([value], b"..")
        target = np.zeros(400, dtype=np.uint8)
        end = encode.write_field(target, 3, array(data), places, 0)
        assert target[3:end].tobytes() == sized(value)


@few
@given(some_records(), st.integers(-(2**30), 2**30), st.data())
def test_rewritten_records_read_the_same_under_another_base(
    records: list[Record], shift: int, data: st.DataObject
) -> None:
    section = batch_builder.section(records, 1000, 1_700_000_000_000)
    _, _, table = indexed(section, len(records), 300)
    kept = data.draw(st.lists(st.integers(0, len(records) - 1), unique=True).map(sorted))
    rows = np.array(kept, dtype=np.int64)
    base = (990, 1_700_000_000_000 + shift)
    nothing = np.zeros(0, dtype=np.uint8)
    size = encode.rewrite_records(array(section), table, rows, *base, nothing)
    target = np.zeros(size, dtype=np.uint8)
    assert encode.rewrite_records(array(section), table, rows, *base, target) == size
    assert target.tobytes() == batch_builder.section([records[i] for i in kept], *base)
    if size > 1:
        assert encode.rewrite_records(array(section), table, rows, *base, target[1:].copy()) == -1


def test_rewriting_refuses_rows_and_places_that_are_none() -> None:
    section = record(0, 0, b"k", b"v", [])
    _, _, table = indexed(section, 1, 300)
    nothing = np.zeros(0, dtype=np.uint8)
    for row in (-1, 1):
        assert encode.rewrite_records(array(section), table, np.array([row]), 0, 0, nothing) == -1
    for field, value in ((1, 999), (4, -5), (4, 999)):
        wrong = table.copy()
        wrong[field, 0] = value
        assert encode.rewrite_records(array(section), wrong, np.array([0]), 0, 0, nothing) == -1


def test_a_key_size_longer_than_it_need_be_is_rewritten_short() -> None:
    body = b"\0" + varint(0) + varint(0) + b"\x82\x00k" + sized(b"v") + b"\0"
    section = varint(len(body)) + body
    _, _, table = indexed(section, 1, 300)
    target = np.zeros(len(section) - 1, dtype=np.uint8)
    base = (1000, 1_700_000_000_000)
    size = encode.rewrite_records(array(section), table, np.array([0]), *base, target)
    assert target[:size].tobytes() == record(0, 0, b"k", b"v", [])


def test_copied_bytes_are_those_between() -> None:
    # Through a kernel: the copy itself is no Python function when it is compiled.
    data, places = column_of([b"a" * 8, b"b" * 100])
    out = np.zeros(108, dtype=np.uint8)
    offsets = np.zeros(3, dtype=np.int32)
    nothing = np.zeros(0, dtype=np.uint8)
    rows = np.arange(2)
    gather.gather_column(array(data), places[0], places[1], rows, offsets, nothing, out)
    assert out.tobytes() == b"a" * 8 + b"b" * 100


# --- match ---------------------------------------------------------------------------------------


@many
@given(
    st.lists(st.binary(max_size=1) | st.binary(min_size=8, max_size=9), min_size=1, max_size=6),
    st.data(),
)
def test_the_last_row_of_a_key_is_the_twins(keys: list[bytes], data: st.DataObject) -> None:
    """Keys of records may lie outside the arena: they equal none."""
    wanted = data.draw(st.lists(st.sampled_from([*keys, b"other"]), min_size=1, max_size=4))
    places = np.cumsum([0, *map(len, keys)])[:-1].astype(np.int64)
    sizes = np.array([len(key) for key in keys], dtype=np.int64)
    lost = data.draw(st.sets(st.integers(0, len(keys) - 1)))
    for row in lost:
        places[row] = data.draw(st.sampled_from([-1, 1 << 20, 1 << 62]))
    offsets = np.arange(len(keys), dtype=np.int64)
    start, end = data.draw(st.integers(0, 3)), data.draw(st.integers(0, 6))
    bounds = st.integers(0, len(keys))
    searches = data.draw(
        st.lists(st.tuples(st.integers(0, len(wanted) - 1), bounds, bounds), max_size=8)
    )
    numbers, firsts, stops = np.array(searches, dtype=np.int64).reshape(-1, 3).T.copy()
    wanted_sizes = np.array([len(key) for key in wanted], dtype=np.int64)
    rows = np.empty(len(searches), dtype=np.int64)

    match.last_rows(
        np.frombuffer(b"".join(keys), dtype=np.uint8), places, sizes, offsets,
        np.frombuffer(b"".join(wanted), dtype=np.uint8), np.cumsum(wanted_sizes) - wanted_sizes,
        wanted_sizes, numbers, firsts, stops, start, end, rows,
    )  # fmt: skip

    assert rows.tolist() == [
        max(
            (
                row
                for row in range(first, stop)
                if keys[row] == wanted[number] and row not in lost and start <= row < end
            ),
            default=-1,
        )
        for number, first, stop in searches
    ]
