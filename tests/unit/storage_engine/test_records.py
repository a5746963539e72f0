"""Columns to batches and back: what is written is read, what is damaged is a typed error."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kafkalog.cleaner.rewrite.merge import group
from kafkalog.errors import CorruptBatchError, InvalidInputError, OversizedBatchError
from kafkalog.schema import HEADERS, changelog_schema
from kafkalog.storage_engine.format import batch as batch_module
from kafkalog.storage_engine.format import compression
from kafkalog.storage_engine.metadata.config import TopicConfig
from kafkalog.storage_engine.records import records
from tests.builders import batch_builder
from tests.builders.batch_builder import Record, batch_data
from tests.unit.cleaner.rewritten import rewritten
from tests.unit.storage_engine import naive

pytestmark = pytest.mark.usefixtures("compared_kernels")

ALL = changelog_schema(include_headers=True)
NONE, GZIP, SNAPPY, LZ4, ZSTD = range(5)
LOG_APPEND_TIME, TRANSACTIONAL, HORIZON = 0x08, 0x10, 0x40
PLACE: dict[str, Any] = {"path": "0.log", "file_position": 100}
BYTES = st.one_of(st.none(), st.binary(max_size=20), st.just(b"v" * 200))
ROWS = st.lists(
    st.tuples(
        BYTES,
        BYTES,
        st.lists(st.tuples(st.text(max_size=4), BYTES), max_size=2),
        st.integers(-1, 2**45),
    ),
    max_size=15,
)
few = settings(max_examples=60, deadline=None)


def read(data: Any, schema: pa.Schema = ALL, start: int = 0, end: int = 2**62) -> pa.RecordBatch:
    table, position, reason = records.scan_batches(data)
    assert (position, reason) == (len(data), None)
    records.check_crcs(data, table, **PLACE)
    found = records.index_records(data, table, **PLACE)
    rows = found.rows_between(start, end)
    result = records.to_arrow(found, table, rows, schema=schema, topic="t", partition=3)
    result.validate(full=True)
    return result


def tuples(result: pa.RecordBatch) -> list[tuple[Any, ...]]:
    rows = []
    for row in result.to_pylist():
        headers = [(h["key"], h["value"]) for h in row["headers"] or []]
        rows.append((row["offset"], row["key"], row["value"], headers, row["timestamp"]))
    return rows


def encode(
    rows: Sequence[Any], *, codec: int = NONE, batch_size: int = 300, **options: Any
) -> records.Encoded:
    keys, values, headers, times = zip(*rows, strict=True) if rows else ((), (), (), ())
    pairs = [[{"key": k, "value": v} for k, v in items] for items in headers]
    defaults = {"level": None, "timestamp_type": 0, "max_message_bytes": 1 << 20}
    return records.encode(
        pa.array(keys, pa.binary()),
        pa.array(values, pa.binary()),
        pa.array(pairs, HEADERS),
        np.array(times, dtype=np.int64),
        np.arange(len(rows)),
        **(defaults | {"batch_size": batch_size, "codec": codec} | options),
    )


def at(ms: int) -> datetime:
    return datetime.fromtimestamp(0, UTC) + np.timedelta64(ms, "ms").item()


@pytest.mark.slow
# --- there and back ------------------------------------------------------------------------------
@few
@given(ROWS, st.sampled_from(range(5)), st.integers(0, 2000))
def test_what_is_encoded_decodes_equal(rows: list[Any], codec: int, batch_size: int) -> None:
    encoded = encode(rows, codec=codec, batch_size=batch_size)
    assert len(rows) == sum(encoded.counts)
    assert tuples(read(encoded.data)) == [
        (i, key, value, headers, at(ms)) for i, (key, value, headers, ms) in enumerate(rows)
    ]


@few
@given(ROWS, st.integers(0, 2000))
def test_encoded_batches_are_the_twins_byte_for_byte(rows: list[Any], batch_size: int) -> None:
    items = [
        Record(i, ms, key, value, [(name.encode(), content) for name, content in headers])
        for i, (key, value, headers, ms) in enumerate(rows)
    ]
    encoded = encode(rows, batch_size=batch_size)
    expected = [
        batch_data(group, base_offset=group[0].offset) for group in naive.batches(items, batch_size)
    ]
    assert bytes(encoded.data) == b"".join(expected)
    ends = np.cumsum([0, *map(len, expected)]).tolist()
    assert encoded.positions == ends[:-1]


def test_rows_are_taken_in_the_order_given() -> None:
    encoded = records.encode(
        pa.array(["a", "b", "c"]),
        None,
        None,
        np.array([1, 2, 3]),
        np.array([2, 0]),
        batch_size=1000,
        codec=NONE,
        level=None,
        timestamp_type=0,
        max_message_bytes=1000,
    )
    found = read(encoded.data)
    assert found["key"].to_pylist() == [b"c", b"a"]
    assert found["value"].to_pylist() == [None, None]


@pytest.mark.parametrize("kind", [pa.binary(), pa.string(), pa.large_binary(), pa.large_string()])
def test_every_kind_of_binary_column_is_taken_sliced_or_not(kind: pa.DataType) -> None:
    column = pa.array([b"drop", b"one", None, b"", b"four"], pa.binary()).cast(kind)[1:]
    encoded = records.encode(
        column,
        column,
        None,
        np.zeros(4, np.int64),
        np.arange(4),
        batch_size=1000,
        codec=NONE,
        level=None,
        timestamp_type=0,
        max_message_bytes=1000,
    )
    found = read(encoded.data)
    assert found["key"].to_pylist() == [b"one", None, b"", b"four"]
    assert found["value"].to_pylist() == [b"one", None, b"", b"four"]


def test_sliced_headers_with_null_lists_are_taken() -> None:
    headers = pa.array(
        [[{"key": "x", "value": b"x"}], None, [], [{"key": "a", "value": None}] * 2], HEADERS
    )[1:]
    encoded = records.encode(
        None,
        None,
        headers,
        np.zeros(3, np.int64),
        np.arange(3),
        batch_size=1000,
        codec=NONE,
        level=None,
        timestamp_type=0,
        max_message_bytes=1000,
    )
    assert read(encoded.data)["headers"].to_pylist() == [
        None,
        None,
        [{"key": "a", "value": None}, {"key": "a", "value": None}],
    ]


def test_a_narrow_schema_in_any_order_is_all_that_is_built() -> None:
    encoded = encode([(b"k", b"v", [], 5)] * 3)
    schema = pa.schema([ALL.field("offset"), ALL.field("key")])
    found = read(encoded.data, schema)
    assert found.schema == schema
    assert found.to_pydict() == {"offset": [0, 1, 2], "key": [b"k"] * 3}
    assert read(encoded.data, pa.schema([])).num_rows == 3
    with pytest.raises(InvalidInputError, match="column 'x'"):
        read(encoded.data, pa.schema([pa.field("x", pa.int32())]))


def test_the_result_has_exactly_the_log_schema() -> None:
    found = read(encode([(b"k", None, [("h", b"1")], 1234)]).data)
    assert found.schema == ALL
    assert found.to_pylist() == [
        {
            "key": b"k",
            "value": None,
            "topic": "t",
            "partition": 3,
            "offset": 0,
            "timestamp": at(1234),
            "timestampType": 0,
            "headers": [{"key": "h", "value": b"1"}],
        }
    ]


def test_only_the_asked_range_of_offsets_is_returned() -> None:
    encoded = encode([(b"%d" % i, None, [], i) for i in range(40)], batch_size=100)
    assert len(encoded.positions) > 5
    for start, end in ((0, 40), (7, 8), (13, 31), (40, 50), (5, 5)):
        found = read(encoded.data, start=start, end=end)
        assert found["offset"].to_pylist() == list(range(start, min(end, 40)))


def test_only_the_selected_batches_are_decoded() -> None:
    encoded = encode([(b"%d" % i, None, [], i) for i in range(40)], batch_size=100)
    table, _, _ = records.scan_batches(encoded.data)
    found = records.index_records(encoded.data, table, selection=np.array([1, 3]), **PLACE)
    assert set(found.batch_index.tolist()) == {1, 3}
    assert len(found) == encoded.counts[1] + encoded.counts[3]


def test_log_append_time_reads_as_the_batchs_max_timestamp() -> None:
    data = batch_data(
        [Record(0, 5, b"k", b"v"), Record(1, 9, b"k", b"v")],
        attributes=LOG_APPEND_TIME,
        max_timestamp=7777,
    )
    found = read(data + batch_data([Record(2, 3, b"k", b"v")], base_offset=2))
    assert found["timestamp"].to_pylist() == [at(7777), at(7777), at(3)]
    assert found["timestampType"].to_pylist() == [1, 1, 0]
    written = encode([(b"k", b"v", [], 50)], timestamp_type=1)
    assert read(written.data)["timestampType"].to_pylist() == [1]


def test_a_batch_with_a_delete_horizon_keeps_its_timestamps() -> None:
    items = [Record(0, 5000, b"k", None)]
    data = batch_data(items, attributes=HORIZON, base_timestamp=99_999, max_timestamp=5000)
    assert read(data)["timestamp"].to_pylist() == [at(5000)]


def test_no_timestamp_and_wild_timestamps_do_not_wrap() -> None:
    edge = 2**63 - 1
    items = [Record(i, ms, b"k", b"v") for i, ms in enumerate([-1, edge, 0])]
    found = read(batch_data(items, base_timestamp=0, max_timestamp=edge))
    assert found["timestamp"].cast(pa.int64()).to_pylist() == [-1000, edge // 1000 * 1000, 0]


def test_header_keys_that_are_not_utf8_are_replaced_as_in_java() -> None:
    items = [Record(0, 1, b"k", b"v", [(b"ok", b"1"), (b"\xff\x41", None), (b"ok", b"2")])]
    assert read(batch_data(items))["headers"].to_pylist()[0] == [
        {"key": "ok", "value": b"1"},
        {"key": "\ufffdA", "value": None},
        {"key": "ok", "value": b"2"},
    ]


def test_an_empty_batch_has_no_records_and_nobody_looks_at_its_bytes() -> None:
    data = batch_data([], last_offset=5) + batch_data([], payload=b"?", attributes=ZSTD)
    assert read(data).num_rows == 0
    assert read(b"").num_rows == 0


def test_compressed_and_plain_batches_share_a_chunk() -> None:
    items = [Record(i, i, b"%d" % i, b"v" * i) for i in range(10)]
    data = b"".join(
        batch_data(
            [item],
            base_offset=i,
            attributes=i % 5,
            payload=compression.compress(i % 5, batch_builder.section([item], i, i)),
        )
        for i, item in enumerate(items)
    )
    assert tuples(read(data)) == [(r.offset, r.key, r.value, [], at(r.timestamp)) for r in items]


@pytest.mark.parametrize("codec", [GZIP, SNAPPY, LZ4, ZSTD])
def test_batches_that_hold_far_more_than_their_size_share_an_arena(codec: int) -> None:
    rows = [(b"%d" % i, b"v" * 100_000, [], i) for i in range(20)]
    data = encode(rows, codec=codec, batch_size=200_000).data
    assert len(data) < 200_000
    assert [row[:3] for row in tuples(read(data))] == [(i, *row[:2]) for i, row in enumerate(rows)]


# --- limits --------------------------------------------------------------------------------------
def test_a_record_that_no_batch_can_hold_is_named_with_its_size() -> None:
    rows = [(b"k", b"v", [], 1), (b"k", b"v" * 500, [], 1)]
    with pytest.raises(InvalidInputError, match=r"row 1: .* at most 300 bytes, found 571"):
        encode(rows, max_message_bytes=300)
    assert encode(rows, max_message_bytes=571).counts == [1, 1]
    with pytest.raises(InvalidInputError, match="found 571"):
        encode(rows, max_message_bytes=570)


def test_compression_may_make_a_record_fit_and_never_makes_it_too_large() -> None:
    packed = encode([(b"k", b"v" * 5000, [], 1)], codec=ZSTD, max_message_bytes=300)
    assert len(packed.data) < 300
    noise = np.random.default_rng(1).bytes(222)
    size = len(encode([(b"k", noise, [], 1)]).data)
    plain = encode([(b"k", noise, [], 1)], codec=GZIP, max_message_bytes=size)
    assert batch_module.parse_header(plain.data).codec == NONE
    with pytest.raises(InvalidInputError, match=r"row 0: .* found"):
        encode([(b"k", noise, [], 1)], codec=GZIP, max_message_bytes=size - 1)


def test_what_a_reader_would_take_for_a_bomb_is_not_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(compression, "SIZE_MAX", 1000)
    row = (b"k", b"v" * 5000, [], 1)
    with pytest.raises(InvalidInputError, match=r"found 5071.*=uncompressed and") as caught:
        encode([row], codec=ZSTD)
    size = int(str(caught.value).split("at least ")[1].split(",")[0])
    assert len(encode([row], codec=NONE, max_message_bytes=size).data) == size


@pytest.mark.parametrize("codec", [GZIP, SNAPPY, LZ4, ZSTD])
def test_a_batch_above_the_limit_is_not_called_damaged(codec: int) -> None:
    item = Record(0, 1, b"k", bytes(100_000))
    payload = compression.compress(codec, batch_builder.section([item], 0, 1))
    data = batch_data([item], attributes=codec, payload=payload)
    table, _, _ = records.scan_batches(data)
    with pytest.raises(OversizedBatchError, match="1000 decompressed bytes, found more") as caught:
        records.index_records(data, table, limit=1000, **PLACE)
    assert "not damage" in str(caught.value)
    assert "restore" not in str(caught.value)


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"key": pa.array([1])}, "key: expected binary or string, found int64"),
        ({"key": pa.array([b"a", b"b"])}, "key: expected 1 rows, found 2"),
        ({"headers": pa.array([["a"]])}, "headers: expected array<struct"),
        ({"headers": pa.array([None, None], HEADERS)}, "headers: expected 1 rows, found 2"),
        ({"headers": pa.array([[{"key": None, "value": b""}]], HEADERS)}, "row 0: a header's key"),
        ({"headers": pa.array([[None]], HEADERS)}, "row 0: a header's key"),
        ({"headers": pa.array([[{"name": "a", "value": b""}]])}, "fields key and value"),
        ({"rows": np.array([1])}, "row 1: the columns have no such row"),
        ({"rows": np.array([-1])}, "row -1: the columns have no such row"),
    ],
)
def test_columns_of_the_wrong_kind_are_refused(columns: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        records.encode(
            columns.get("key", pa.array([b"k"])),
            pa.array([b"v"]),
            columns.get("headers"),
            np.zeros(1, np.int64),
            columns.get("rows", np.zeros(1, np.int64)),
            batch_size=1000,
            codec=NONE,
            level=None,
            timestamp_type=0,
            max_message_bytes=1000,
        )


@pytest.mark.slow
def test_a_column_past_what_arrow_can_address_is_an_error_and_no_wrap() -> None:
    data = batch_data([Record(0, 1, b"k", b"v" * (1 << 20))])
    table, _, _ = records.scan_batches(data)
    found = records.index_records(data, table, **PLACE)
    rows = np.zeros(2048, dtype=np.int64)
    with pytest.raises(InvalidInputError, match="column value: expected at most 2147483647 bytes"):
        records.to_arrow(found, table, rows, schema=ALL, topic="t", partition=0)


@pytest.mark.parametrize("row", [-1, 1, 2**40])
def test_rows_that_are_none_are_refused(row: int) -> None:
    data = batch_data([Record(0, 1, b"k", b"v")])
    table, _, _ = records.scan_batches(data)
    found = records.index_records(data, table, **PLACE)
    with pytest.raises(InvalidInputError, match="rows"):
        records.to_arrow(found, table, np.array([row]), schema=ALL, topic="t", partition=0)


# --- damage --------------------------------------------------------------------------------------
GOOD = batch_data([Record(0, 5, b"key", b"value", [(b"h", b"1")])])


def test_a_wrong_checksum_names_file_position_expected_and_found() -> None:
    bad = bytearray(GOOD)
    bad[-1] ^= 1
    data = GOOD + bytes(bad) + bytes(bad)
    table, _, _ = records.scan_batches(data)
    with pytest.raises(CorruptBatchError) as caught:
        records.check_crcs(data, table, **PLACE)
    assert (caught.value.path, caught.value.position) == ("0.log", 100 + len(GOOD))
    assert "checksum 0x" in str(caught.value)


@pytest.mark.parametrize("cut", range(len(GOOD)))
def test_a_truncated_batch_is_not_scanned(cut: int) -> None:
    table, position, reason = records.scan_batches(GOOD + GOOD[:cut])
    assert (len(table), position, reason) == (1, len(GOOD), None)


def test_what_is_not_a_batch_is_told_in_words() -> None:
    for patch, at_, words in ((b"\x03", 16, "magic 3, above 2"), (b"\xff" * 4, 8, "length -1")):
        bad = bytearray(GOOD)
        bad[at_ : at_ + len(patch)] = patch
        _, position, reason = records.scan_batches(GOOD + bytes(bad))
        assert position == len(GOOD)
        assert words in str(reason)


@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
@pytest.mark.parametrize("position", range(21, len(GOOD)))
@pytest.mark.parametrize("flip", [0x01, 0x80, 0xFF])
def test_a_changed_byte_with_a_right_checksum_is_a_typed_error_or_reads(
    position: int, flip: int
) -> None:
    bad = bytearray(GOOD)
    bad[position] ^= flip
    bad[17:21] = naive.crc32c(bytes(bad[21:])).to_bytes(4, "big")
    try:
        assert read(bytes(bad)).num_rows <= 1
    except CorruptBatchError as error:
        assert error.position == 100
        assert "\n" not in str(error)


@pytest.mark.parametrize("count", [-1, -(2**31), 2, 2**31 - 1])
@pytest.mark.parametrize("codec", [NONE, ZSTD])
def test_a_wild_record_count_is_a_typed_error(count: int, codec: int) -> None:
    item = Record(0, 5, b"key", b"value")
    payload = compression.compress(codec, batch_builder.section([item], 0, 5))
    data = batch_data([item], count=count, attributes=codec, payload=payload)
    with pytest.raises(CorruptBatchError):
        read(data)


@pytest.mark.parametrize("codec", [GZIP, SNAPPY, LZ4, ZSTD, 5, 6, 7])
def test_damaged_compression_is_a_typed_error(codec: int) -> None:
    item = Record(0, 5, b"key", b"value" * 20)
    section = batch_builder.section([item], 0, 5)
    payload = compression.compress(codec, section) if codec <= ZSTD else section
    with pytest.raises(CorruptBatchError) as caught:
        read(batch_data([item], attributes=codec, payload=payload[:-9]))
    assert caught.value.position == 100


# --- filtering -----------------------------------------------------------------------------------
def filtered(data: bytes, keep: Sequence[bool], horizon: int | None = None, which: int = 0) -> Any:
    table, _, _ = records.scan_batches(data)
    start = int(table.positions[which])
    return rewritten(data[start : start + int(table.sizes[which])], keep, horizon) or None


ITEMS = [
    Record(50, 1000, b"a", b"1", [(b"h", None)]),
    Record(52, 900, b"b", None),
    Record(53, 1100, None, b"3"),
]
SEALED: dict[str, Any] = {
    "base_offset": 50,
    "last_offset": 57,
    "leader_epoch": 4,
    "producer": (77, 2, 1234),
}


def test_a_batch_that_keeps_all_is_returned_byte_for_byte() -> None:
    payload = compression.compress(GZIP, batch_builder.section(ITEMS, 50, 1000), 1)
    data = GOOD + batch_data(ITEMS, attributes=GZIP, payload=payload, **SEALED)
    assert filtered(data, [True] * 3, which=1) == data[len(GOOD) :]
    horizon = batch_data(ITEMS, attributes=HORIZON, base_timestamp=5000, **SEALED)
    assert filtered(horizon, [True] * 3, 5000) == horizon


def test_a_batch_that_keeps_no_record_is_dropped() -> None:
    assert filtered(batch_data(ITEMS, **SEALED), [False] * 3) is None


def test_a_filtered_batch_keeps_its_range_producer_and_epoch() -> None:
    expected = batch_data(ITEMS[1:], base_timestamp=900, max_timestamp=1100, **SEALED)
    assert filtered(batch_data(ITEMS, **SEALED), [False, True, True]) == expected
    expected = batch_data(ITEMS[:2], base_timestamp=1000, max_timestamp=1000, **SEALED)
    assert filtered(batch_data(ITEMS, **SEALED), [True, True, False]) == expected


@pytest.mark.parametrize("codec", range(5))
def test_a_filtered_batch_is_compressed_with_its_own_codec(codec: int) -> None:
    payload = compression.compress(codec, batch_builder.section(ITEMS, 50, 1000))
    data = batch_data(ITEMS, attributes=codec | TRANSACTIONAL, payload=payload, **SEALED)
    kept = filtered(data, [True, False, True])
    header = batch_module.parse_header(kept)
    assert (header.codec, header.is_transactional, header.records_count) == (codec, True, 2)
    found = read(kept)
    assert found["offset"].to_pylist() == [50, 53]
    assert found["timestamp"].to_pylist() == [at(1000), at(1100)]


def test_a_horizon_is_set_and_kept_and_timestamps_read_the_same() -> None:
    data = filtered(batch_data(ITEMS, **SEALED), [True] * 3, 88_888)
    assert data == batch_data(ITEMS, attributes=HORIZON, base_timestamp=88_888, **SEALED)
    again = filtered(data, [True, True, False])
    header = batch_module.parse_header(again)
    assert (header.attributes & HORIZON, header.base_timestamp) == (HORIZON, 88_888)
    assert read(again)["timestamp"].to_pylist() == [at(1000), at(900)]


def test_a_filtered_log_append_time_batch_keeps_its_time() -> None:
    data = batch_data(ITEMS, attributes=LOG_APPEND_TIME, max_timestamp=7777, **SEALED)
    kept = filtered(data, [False, False, True])
    header = batch_module.parse_header(kept)
    assert (header.base_timestamp, header.max_timestamp, header.timestamp_type) == (7777, 7777, 1)
    assert read(kept)["timestamp"].to_pylist() == [at(7777)]


def test_an_emptied_batch_keeps_its_range_and_producer_in_61_bytes() -> None:
    data = batch_data(ITEMS, attributes=HORIZON | TRANSACTIONAL | LOG_APPEND_TIME, **SEALED)
    table, _, _ = records.scan_batches(data)
    bits = TRANSACTIONAL | LOG_APPEND_TIME
    assert records.empty_batch(table, 0) == batch_data(
        [], attributes=bits, base_timestamp=-1, max_timestamp=1100, **SEALED
    )


@few
@given(ROWS.filter(bool), st.sampled_from(range(5)), st.data())
def test_what_is_kept_reads_the_same(rows: list[Any], codec: int, data: st.DataObject) -> None:
    encoded = encode(rows, codec=codec, batch_size=100_000)
    keep = data.draw(st.lists(st.booleans(), min_size=len(rows), max_size=len(rows)))
    horizon = data.draw(st.none() | st.integers(0, 2**45))
    kept = filtered(bytes(encoded.data), keep, horizon)
    whole = tuples(read(encoded.data))
    expected = [row for row, stays in zip(whole, keep, strict=True) if stays]
    assert (tuples(read(kept)) if kept else []) == expected


def test_neighbours_are_rebuilt_into_one_batch() -> None:
    first = batch_data(ITEMS, **(SEALED | {"producer": (-1, -1, -1)}))
    second = batch_data([Record(60, 5, b"z", b"z")], base_offset=58, last_offset=67)
    table, _, _ = records.scan_batches(first + second)
    found = records.index_records(first + second, table, **PLACE)
    rows = np.array([0, 2, 3])
    (merged,) = group.encode(found, table, np.arange(2), rows, TopicConfig.parse({}))
    assert merged.data == batch_data(
        [ITEMS[0], ITEMS[2], Record(60, 5, b"z", b"z")],
        base_offset=50,
        last_offset=67,
        leader_epoch=4,
    )


# --- partitions and imports ----------------------------------------------------------------------
def test_keys_go_to_kafkas_partitions_and_none_nowhere() -> None:
    keys = ["21", None, "foobar", "a-little-bit-long-string"]
    expected = [-1 if key is None else naive.partition(key.encode(), 7) for key in keys]
    for kind in (pa.string(), pa.large_string()):
        found = records.murmur2_partitions(pa.array(keys, kind), 7)
        assert found.dtype == np.int32
        assert found.tolist() == expected
    with pytest.raises(InvalidInputError, match="partition count"):
        records.murmur2_partitions(pa.array(["a"]), 0)


def test_importing_records_does_not_import_pyarrow() -> None:
    program = (
        "import sys, kafkalog.storage_engine.records.records\n"
        "import kafkalog.storage_engine.format.compression\n"
        "print({'pyarrow'} & set(sys.modules))"
    )
    out = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert out.stdout.strip() == "set()"
