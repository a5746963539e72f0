"""Whichever way a chunk's records take to Arrow, they are the same."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from kafkalog.errors import CorruptBatchError, InvalidInputError
from kafkalog.schema import changelog_schema
from kafkalog.storage_engine.directory.directory_log import DirectoryLog
from kafkalog.storage_engine.format import compression
from kafkalog.storage_engine.reading import chunk_reader
from kafkalog.storage_engine.records import records
from kafkalog.storage_engine.records.columns import ARROW_SIZE
from kafkalog.storage_engine.segment import open_segment
from tests.builders import batch_builder
from tests.builders.batch_builder import Record, batch_data, section

NOW_MS = 1_700_000_000_000
WITH_HEADERS = changelog_schema(include_headers=True)


@pytest.fixture(scope="module", params=["uncompressed", "lz4", "gzip"])
def log(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[DirectoryLog]:
    """A log with nulls, empty values and times that no microsecond tells, stamped or not."""
    dice = random.Random(1)
    root = tmp_path_factory.mktemp("log") / request.param
    with DirectoryLog(root) as opened:
        config = {"cleanup.policy": "delete", "compression.type": request.param}
        config["message.timestamp.after.max.ms"] = str(2**63 - 1)
        opened.create_topic("t", 1, config)
        for commit in range(6):
            stamp = "LogAppendTime" if commit == 3 else "CreateTime"
            opened.alter_topic("t", {"message.timestamp.type": stamp})
            opened.append("t", rows(dice, 500), now_ms=NOW_MS + commit, batch_size=700)
        yield opened


def rows(dice: random.Random, count: int) -> pa.Table:
    def values() -> list[bytes | None]:
        return [dice.choice((None, b"", dice.randbytes(dice.randrange(60)))) for _ in range(count)]

    times = [dice.choice((0, NOW_MS, 2**62, dice.randrange(2**40))) for _ in range(count)]
    columns: dict[str, Any] = {"key": pa.array(values(), pa.binary())}
    columns["value"] = pa.array(values(), pa.binary())
    columns["timestamp"] = pa.array(times, pa.int64())
    return pa.table(columns)


def read(log: Any, schema: pa.Schema) -> list[pa.RecordBatch]:
    with log.snapshot("t", 0) as snapshot:
        return list(snapshot.read(0, snapshot.state.high_watermark, schema=schema))


@pytest.mark.parametrize(
    "names",
    [
        ["key", "value", "topic", "partition", "offset", "timestamp", "timestampType"],
        ["timestamp", "value"],
        ["key"],
        ["offset", "topic"],
        ["timestampType"],
    ],
)
def test_columns_are_the_same_straight_and_by_a_table(log: Any, names: list[str]) -> None:
    # Headers are read by a table of the records alone.
    schema = pa.schema([WITH_HEADERS.field(name) for name in names])
    straight = read(log, schema)
    by_table = pa.Table.from_batches(read(log, WITH_HEADERS)).select(names)
    for batch in straight:
        batch.validate(full=True)
    assert pa.Table.from_batches(straight).equals(by_table)
    assert pa.Table.from_batches(straight).num_rows == 3000


def test_many_small_records_are_cut_by_their_bytes(
    log: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    schema = changelog_schema()
    whole = pa.Table.from_batches(read(log, schema))
    size = 120_000  # more than the bytes of the records, less than those of their columns
    monkeypatch.setattr(chunk_reader, "ARROW_SIZE", size)
    found = read(log, schema)
    assert len(found) > 1
    bitmaps = 2000  # of nulls, which nobody counts
    assert all(0 < batch.nbytes <= size + bitmaps for batch in found)
    assert pa.Table.from_batches(found).equals(whole)


# --- bytes of strangers --------------------------------------------------------------------------
NARROW = pa.schema([field for field in WITH_HEADERS if field.name != "headers"])
APPEND_TIME, CONTROL, HORIZON, LZ4 = 0x08, 0x20, 0x40, 3


def strange_batch(dice: random.Random, base: int) -> tuple[bytes, int]:
    """A batch of any kind, perhaps damaged where its checksum would not tell; and where it ends."""
    offset = base
    records = []
    for _ in range(dice.choice((0, 1, 1, 2, 5, 40))):
        headers = [(b"h", dice.choice((None, b"", b"x")))] * dice.choice((0, 0, 0, 1, 3))
        key, value = (dice.choice((None, b"", b"12345678", dice.randbytes(30))) for _ in range(2))
        time = dice.choice((0, NOW_MS, 2**62, -(2**62), -1))
        records.append(Record(offset, time, key, value, headers))
        offset += dice.choice((1, 1, 1, 7))
    time = dice.choice((records[0].timestamp if records else -1, 0, 2**63 - 1))
    payload = section(records, base, signed_base(time, records))
    count = len(records)
    if dice.random() < 0.2:
        count = dice.choice((count + 1, max(count - 1, 0), -1, 2**31 - 1))
    if payload and dice.random() < 0.3:
        damaged = bytearray(payload)
        damaged[dice.randrange(len(damaged))] = dice.randrange(256)
        payload = bytes(damaged)[: dice.choice((len(damaged), dice.randrange(len(damaged) + 1)))]
    attributes = dice.choice((0, 0, APPEND_TIME, CONTROL, HORIZON, HORIZON | APPEND_TIME))
    if dice.random() < 0.3:
        payload = compression.compress(LZ4, payload)
        attributes |= LZ4
    last = max(offset - 1, base) + dice.choice((0, 0, 3))
    data = batch_data(
        records,
        payload=payload,
        base_offset=base,
        last_offset=last,
        count=count,
        attributes=attributes,
        base_timestamp=signed_base(time, records),
        max_timestamp=dice.choice((NOW_MS, -1, 2**63 - 1)),
    )
    return data, last + 1


def signed_base(time: int, records: list[Record]) -> int:
    """A base whose deltas a varlong can tell."""
    return 0 if any(abs(record.timestamp - time) >= 2**63 for record in records) else time


def outcome(chunk: open_segment.Chunk, *, is_straight: bool) -> Any:
    reader = chunk_reader.ChunkReader(("t", 3), NARROW)
    reader._is_all = is_straight
    is_wanted = chunk.table.attributes & CONTROL == 0
    try:
        batches = list(reader.read(chunk, is_wanted))
    except CorruptBatchError as fault:
        return str(fault)
    for batch in batches:
        batch.validate(full=True)
    return pa.Table.from_batches(batches, NARROW)


@pytest.mark.parametrize("seed", range(150))
def test_what_is_damaged_is_found_alike_on_both_ways(seed: int) -> None:
    dice = random.Random(seed)
    data, end = b"", dice.choice((0, 100, 2**40))
    start = end
    for _ in range(dice.choice((1, 2, 6))):
        one, end = strange_batch(dice, end + dice.choice((0, 0, 5)))
        data += one
    table, consumed, reason = records.scan_batches(data)
    assert (consumed, reason) == (len(data), None)
    chunk = open_segment.Chunk(data, table, Path("a.log"), 7, 0, start, end)
    expected = outcome(chunk, is_straight=False)
    found = outcome(chunk, is_straight=True)
    assert found == expected if isinstance(expected, str) else found.equals(expected)


def test_a_batch_that_was_handed_out_stays_as_it_is(log: Any) -> None:
    with log.snapshot("t", 0) as snapshot:
        batches, copies = [], []
        for batch in snapshot.read(0, snapshot.state.high_watermark, schema=NARROW):
            batches.append(batch)
            copies.append(pa.ipc.read_record_batch(batch.serialize(), NARROW))
    for batch, copy in zip(batches, copies, strict=True):
        assert batch.equals(copy)


@pytest.mark.slow
def test_a_long_name_of_a_topic_takes_no_more_than_a_batch_may() -> None:
    """The smallest records there are, so many that their names would be 40 MiB."""
    name, count = "t" * 249, 160_000
    payload = b"".join(batch_builder.record(number, 0, None, None, []) for number in range(count))
    data = batch_data([], payload=payload, last_offset=count - 1, count=count, base_timestamp=0)
    table, _, _ = records.scan_batches(data)
    chunk = open_segment.Chunk(data, table, Path("a.log"), 0, 0, 0, count)
    before = pa.total_allocated_bytes()
    rows = 0
    for batch in chunk_reader.ChunkReader((name, 0), NARROW).read(chunk, np.array([True])):
        assert batch.nbytes <= ARROW_SIZE + 50_000  # bitmaps, which nobody counts
        assert pa.total_allocated_bytes() - before < 24 << 20
        rows += batch.num_rows
    assert rows == count


def test_a_read_of_no_columns_still_has_rows(log: Any) -> None:
    assert sum(batch.num_rows for batch in read(log, pa.schema([]))) == 3000


def test_a_column_that_a_log_has_not_is_refused(log: Any) -> None:
    with pytest.raises(InvalidInputError, match="other"):
        read(log, pa.schema([("key", pa.binary()), ("other", pa.int32())]))
