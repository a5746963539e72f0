"""What control batches say, read from bytes that are built by hand here."""

from __future__ import annotations

import gzip
import random
import struct

import pytest

from kafkalog.errors import CorruptBatchError
from kafkalog.storage_engine.format.batch import parse_header
from kafkalog.storage_engine.transactions.control_record import ControlRecord, read_control_record
from tests.builders.batch_builder import batch_data, sized, varint

CONTROL = 0x30
LOG_APPEND_TIME = 0x08
GZIP = 0x01
COMMIT_KEY = b"\0\0\0\1"
EPOCH_9 = b"\0\0\0\0\0\x09"


def record(
    key: bytes | None = COMMIT_KEY,
    value: bytes | None = EPOCH_9,
    *,
    timestamp_delta: int = 0,
    offset_delta: int = 0,
    headers: bytes = b"\0",
) -> bytes:
    deltas = varint(timestamp_delta) + varint(offset_delta)
    body = b"\0" + deltas + sized(key) + sized(value) + headers
    return varint(len(body)) + body


def batch(payload: bytes, *, attributes: int = CONTROL, **fields: int) -> bytes:
    fields = {"base_timestamp": 1000, "max_timestamp": 1000, "count": 1} | fields
    return batch_data(
        [], base_offset=42, payload=payload, attributes=attributes, producer=(77, 3, -1), **fields
    )


def read(data: bytes, position: int = 0) -> ControlRecord | None:
    return read_control_record(data, position, parse_header(data, position))


def test_a_commit_marker() -> None:
    data = batch(record())
    assert len(data) == 78
    assert read(data) == ControlRecord(1, 0, 9, 1000)


def test_an_abort_marker_amid_other_batches() -> None:
    data = batch(record()) + batch(record(b"\0\0\0\0", b"\0\0\x7f\xff\xff\xff")) + b"tail"
    found = read(data, 78)
    assert found == ControlRecord(0, 0, 2**31 - 1, 1000)
    assert found is not None
    assert found.is_marker


@pytest.mark.parametrize("kind", [2, 3, 4, 5, 6, 7, -1, 32767])
def test_other_control_records_have_a_type_alone(kind: int) -> None:
    for value in (None, b"", b"anything at all"):
        found = read(batch(record(struct.pack(">hh", 0, kind), value)))
        assert found == ControlRecord(kind, 0, -1, 1000)
        assert not found.is_marker


def test_later_versions_are_read_like_the_first() -> None:
    key, value = struct.pack(">hhq", 5, 0, 1), struct.pack(">hiq", 7, 9, 1)
    assert read(batch(record(key, value))) == ControlRecord(0, 5, 9, 1000)


def test_a_control_batch_without_records_says_nothing() -> None:
    assert read(batch(b"", count=0)) is None
    assert read(batch(b"not even looked at", count=0)) is None


def test_other_batches_say_nothing() -> None:
    assert read(batch(record(), attributes=0x10)) is None
    message = struct.pack(">qiIbb", 0, 14, 0, 1, 0x20) + bytes(43)
    assert read(message) is None


def test_a_delete_horizon_leaves_the_records_own_time() -> None:
    horizon = batch(
        record(timestamp_delta=-4000),
        attributes=CONTROL | 0x40,
        base_timestamp=5000,
        max_timestamp=1000,
    )
    assert read(horizon) == ControlRecord(1, 0, 9, 1000)


def test_the_time_of_appending_is_the_batchs() -> None:
    appended = batch(record(), attributes=CONTROL | LOG_APPEND_TIME, max_timestamp=1234)
    assert read(appended) == ControlRecord(1, 0, 9, 1234)


def test_a_compressed_control_batch_is_read_though_nobody_writes_one() -> None:
    data = batch(gzip.compress(record(), mtime=0), attributes=CONTROL | GZIP)
    assert read(data) == ControlRecord(1, 0, 9, 1000)


def test_headers_are_passed_over() -> None:
    headers = varint(2) + sized(b"name") + sized(b"value") + sized(b"") + sized(None)
    assert read(batch(record(headers=headers))) == ControlRecord(1, 0, 9, 1000)


def test_of_several_records_the_first_one_counts() -> None:
    section = record() + record(b"\0\0\0\0", offset_delta=1)
    assert read(batch(section, count=2)) == ControlRecord(1, 0, 9, 1000)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (batch(record(None)), "key of at least 4 bytes, found null"),
        (batch(record(b"\0\0\0")), "key of at least 4 bytes, found 3 bytes"),
        (batch(record(b"\xff\xff\0\0")), "key of version 0 or later, found version -1"),
        (batch(record(value=None)), "value of at least 6 bytes, found null"),
        (batch(record(value=b"\0\0\0\0\0")), "value of at least 6 bytes, found 5 bytes"),
        (batch(record(value=b"\x80\0\0\0\0\0")), "value of version 0 or later"),
        (batch(record(), count=-1), "-1 records that fill the batch"),
        (batch(b""), "a varint in the record at byte 0"),
        (batch(b"\xff" * 5 + record()), "a varint in the record at byte 0"),
        (batch(record() + b"\0"), "1 records that fill the batch"),
        (batch(varint(-5) + bytes(20)), "a length beyond its end"),
        (batch(varint(2**31 - 1) + bytes(20)), "a record within its batch at byte 0"),
        (batch(record(headers=varint(-1))), "the header count of the record"),
        (batch(record(headers=varint(2**31 - 1))), "the header count of the record"),
        (batch(record(headers=varint(1) + sized(None))), "fields within the record"),
        (batch(record(headers=b"\0\0\0")), "a record that ends with its fields"),
        (batch(varint(6) + b"\0\0\0" + varint(100) + b"\0"), "fields within the record"),
        (batch(b"\x1f\x8b", attributes=CONTROL | GZIP), "records that decompress"),
        (batch(b"", attributes=CONTROL | 7), "records that decompress"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_not_a_control_record_is_corrupt(data: bytes, words: str) -> None:
    with pytest.raises(CorruptBatchError) as caught:
        read(data)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_bomb_is_not_unpacked() -> None:
    bomb = gzip.compress(bytes(64 << 20), mtime=0)
    with pytest.raises(CorruptBatchError, match="1048576"):
        read(batch(bomb, attributes=CONTROL | GZIP))


def test_an_error_names_the_place_in_the_file() -> None:
    data = bytes(5) + batch(record(b""))
    header = parse_header(data, 5)
    with pytest.raises(CorruptBatchError, match=r"^7\.log: at byte 900:"):
        read_control_record(data, 5, header, path="7.log", file_position=900)
    with pytest.raises(CorruptBatchError, match="at byte 5:"):
        read_control_record(data, 5, header)


def test_a_batch_cut_off_in_the_buffer_is_corrupt_at_every_byte() -> None:
    data = batch(record())
    header = parse_header(data)
    for size in range(61, len(data)):
        with pytest.raises(CorruptBatchError):
            read_control_record(data[:size], 0, header)


def test_any_bytes_are_a_control_record_or_corrupt() -> None:
    rng = random.Random(15)
    section = record(headers=varint(1) + sized(b"k") + sized(b"v"))
    for _ in range(3000):
        damaged = bytearray(section)
        for _ in range(rng.randint(1, 3)):
            damaged[rng.randrange(len(damaged))] = rng.randrange(256)
        try:
            found = read(batch(bytes(damaged)))
        except CorruptBatchError:
            continue
        assert isinstance(found, ControlRecord)
