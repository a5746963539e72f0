"""Batches of others decode equal, and ours decode equal with others.

Two encoders that share no code with ours: aiokafka's, and librdkafka's, whose batches come over the
wire from the mock cluster it can run on the loopback interface.
"""

from __future__ import annotations

import importlib
import os
import random
import socket
import struct
import time
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pytest

from kafkalog.schema import HEADERS, changelog_schema
from kafkalog.storage_engine.format import batch as batch_module
from kafkalog.storage_engine.format import layout
from kafkalog.storage_engine.format.stamping import stamp
from kafkalog.storage_engine.records import records

pytestmark = pytest.mark.usefixtures("compared_kernels")

SECONDS_MAX = 20.0
BASE_MS = 1_700_000_000_000
CODECS = list(layout.CODECS.items())


def foreign(name: str) -> Any:
    """Import a peer; skip where it is missing, but not where all tests are promised to run."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        if os.environ.get("CI"):
            raise
        pytest.skip(f"{name} cannot be imported: {error}")


class Message(NamedTuple):
    key: bytes | None
    value: bytes | None
    headers: list[tuple[str, bytes | None]]
    timestamp: int


def messages() -> list[Message]:
    dice = random.Random(7)
    header_lists: list[list[tuple[str, bytes | None]]] = [
        [],
        [("a", b"1"), ("a", b"2"), ("b", None)],
        [("schlüssel", b"")],
    ]
    sizes = [0, 1, 8, 78, 127, 128, 5000, 40_000]
    return [
        Message(
            None if i % 5 == 1 else b"key-%d" % (i % 9),
            None if i % 7 == 2 else dice.randbytes(sizes[i % 8] // 2) + b"x" * (sizes[i % 8] // 2),
            header_lists[i % 3],
            BASE_MS + dice.randrange(-10_000, 10_000),
        )
        for i in range(60)
    ]


def decoded(data: bytes) -> list[Message]:
    table, position, reason = records.scan_batches(data)
    assert (position, reason) == (len(data), None)
    records.check_crcs(data, table, path="x", file_position=0)
    schema = changelog_schema(include_headers=True)
    indexed = records.index_records(data, table, path="x", file_position=0)
    found = records.to_arrow(indexed, table, None, schema=schema, topic="t", partition=0)
    found.validate(full=True)
    assert found["offset"].to_pylist() == list(range(found.num_rows))
    zero = datetime.fromtimestamp(0, UTC)
    return [
        Message(
            row["key"],
            row["value"],
            [(header["key"], header["value"]) for header in row["headers"] or []],
            (row["timestamp"] - zero) // timedelta(milliseconds=1),
        )
        for row in found.to_pylist()
    ]


def codecs_of(data: bytes) -> set[int]:
    return {header.codec for _, header in batch_module.iterate_headers(data)}


# --- aiokafka ------------------------------------------------------------------------------------
@pytest.mark.parametrize(("name", "codec"), CODECS)
def test_batches_of_aiokafka_decode_equal(name: str, codec: int) -> None:
    module = foreign("aiokafka.record.default_records")
    given = messages()
    data = b""
    for start in range(0, len(given), 20):
        builder = module.DefaultRecordBatchBuilder(
            magic=2,
            compression_type=codec,
            is_transactional=0,
            producer_id=-1,
            producer_epoch=-1,
            base_sequence=-1,
            batch_size=1 << 24,
        )
        for i, item in enumerate(given[start : start + 20]):
            assert builder.append(i, item.timestamp, item.key, item.value, item.headers)
        batch = bytearray(builder.build())
        stamp(batch, 0, start, 0)
        data += batch
    assert codecs_of(data) == {codec}
    assert decoded(data) == given


@pytest.mark.parametrize(("name", "codec"), CODECS)
def test_aiokafka_decodes_our_batches_equal(name: str, codec: int) -> None:
    module = foreign("aiokafka.record.default_records")
    given = messages()
    encoded = records.encode(
        pa.array([item.key for item in given], pa.binary()),
        pa.array([item.value for item in given], pa.binary()),
        pa.array([[{"key": k, "value": v} for k, v in item.headers] for item in given], HEADERS),
        np.array([item.timestamp for item in given]),
        np.arange(len(given)),
        batch_size=60_000,
        codec=codec,
        level=None,
        timestamp_type=layout.CREATE_TIME,
        max_message_bytes=1 << 20,
    )
    found = []
    for position, header in batch_module.iterate_headers(encoded.data):
        batch = module.DefaultRecordBatch(bytes(encoded.data[position : position + header.size]))
        assert batch.validate_crc()
        assert (batch.base_offset, batch.compression_type) == (header.base_offset, codec)
        for record in batch:
            assert record.offset == len(found)
            found.append(Message(record.key, record.value, list(record.headers), record.timestamp))
    assert len(encoded.positions) > 1
    assert found == given


# --- librdkafka ----------------------------------------------------------------------------------
def mock_address(producer: Any) -> tuple[str, int]:
    broker = next(iter(producer.list_topics(timeout=SECONDS_MAX).brokers.values()))
    return broker.host, broker.port


def text(value: str) -> bytes:
    return struct.pack(">h", len(value)) + value.encode()


def fetch(connection: socket.socket, topic: str, offset: int) -> tuple[bytes, int]:
    """Return (record batches from `offset` on, high watermark): one Fetch request, version 4."""
    body = struct.pack(">iiiib", -1, 100, 1, 1 << 26, 0)
    body += struct.pack(">i", 1) + text(topic)
    body += struct.pack(">iiqi", 1, 0, offset, 1 << 26)
    request = struct.pack(">hhi", 1, 4, 99) + text("kafkalog") + body
    connection.sendall(struct.pack(">i", len(request)) + request)
    stream = connection.makefile("rb")
    answer = stream.read(struct.unpack(">i", stream.read(4))[0])
    position = 4 + 4 + 4 + len(text(topic)) + 4  # correlation, throttle, topics, name, partitions
    _, error, high_watermark, _, aborted = struct.unpack_from(">ihqqi", answer, position)
    position += 26 + max(aborted, 0) * 16
    (size,) = struct.unpack_from(">i", answer, position)
    assert error == 0
    return answer[position + 4 : position + 4 + max(size, 0)], high_watermark


def produced(topic: str, given: list[Message], codec_name: str) -> bytes:
    """Have librdkafka encode the messages, and return its record batches off the wire."""
    confluent_kafka = foreign("confluent_kafka")
    producer = confluent_kafka.Producer(
        {
            "test.mock.num.brokers": 1,
            "compression.type": codec_name,
            "linger.ms": 20,
            "batch.num.messages": 25,
            "message.timeout.ms": int(SECONDS_MAX * 1000),
            "log_level": 0,
        }
    )
    for item in given:
        producer.produce(
            topic,
            value=item.value,
            key=item.key,
            partition=0,
            timestamp=item.timestamp,
            headers=item.headers,
        )
    assert producer.flush(SECONDS_MAX) == 0, "the mock cluster did not take every message"
    data = b""
    end = time.monotonic() + SECONDS_MAX
    with socket.create_connection(mock_address(producer), timeout=SECONDS_MAX) as connection:
        count = 0
        while count < len(given) and time.monotonic() < end:
            part, _ = fetch(connection, topic, count)
            data += part
            count = max((h.next_offset for _, h in batch_module.iterate_headers(data)), default=0)
    return data


@pytest.mark.parametrize(("name", "codec"), CODECS)
def test_batches_of_librdkafka_decode_equal(name: str, codec: int) -> None:
    given = messages()
    data = produced("t", given, name)
    # librdkafka sends a batch that compression would enlarge as it is.
    assert codec in codecs_of(data)
    assert codecs_of(data) <= {codec, layout.CODEC_NONE}
    assert decoded(data) == given
