"""Logs in the formats v0 and v1: what an independent encoder wrote is what every reader finds.

The encoder is `message_builder.py`; aiokafka's is the second source.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lz4.frame
import numpy as np
import pyarrow as pa
import pytest
from aiokafka.record.legacy_records import LegacyRecordBatchBuilder

from kafkalog.errors import CorruptBatchError, InvalidInputError
from kafkalog.schema import changelog_schema
from kafkalog.storage_engine.format import compression
from kafkalog.storage_engine.format.batch import iterate_headers
from kafkalog.storage_engine.metadata.state import PartitionState
from kafkalog.storage_engine.reading.directory_snapshot import DirectorySnapshot, open_snapshot
from kafkalog.storage_engine.records import records
from kafkalog.storage_engine.segment import open_segment
from kafkalog.storage_engine.segment.byte_source import FileBytes
from kafkalog.storage_engine.segment.locate import headers
from kafkalog.storage_engine.segment.segments import SegmentFiles, next_offset
from tests.builders.batch_builder import GZIP, LZ4, NONE, SNAPPY, Record, batch, compressed
from tests.builders.message_builder import entry, message, wrapper
from tests.unit.storage_engine.times import offset_since

pytestmark = pytest.mark.usefixtures("compared_kernels")

SCHEMA = changelog_schema(include_headers=True)
CODECS = [(GZIP, False), (SNAPPY, False), (SNAPPY, True), (LZ4, False)]


@dataclass(frozen=True)
class Entry:
    """One entry of a log: a message, a wrapper or a batch v2, and what a reader finds in it."""

    data: bytes
    messages: list[Record]
    types: int
    last_offset: int


def some(first: int, count: int, *, step: int = 1, magic: int = 1) -> list[Record]:
    kinds: list[Callable[[int], tuple[bytes | None, bytes | None]]] = [
        lambda i: (b"key-%d" % i, b"value-%d" % i),
        lambda i: (None, b"no key"),
        lambda i: (b"%d" % i, None),
        lambda i: (b"", b""),
        lambda i: (None, None),
    ]
    offsets = range(first, first + count * step, step)
    return [Record(i, 1000 + 10 * i if magic else -1, *kinds[i % 5](i)) for i in offsets]


def plain(magic: int, first: int, count: int = 1) -> list[Entry]:
    return [
        Entry(
            message(magic, m.offset, m.key, m.value, timestamp=m.timestamp),
            [m],
            0 if magic else -1,
            m.offset,
        )
        for m in some(first, count, magic=magic)
    ]


def packed(magic: int, codec: int, first: int, count: int, *, step: int = 1, **how: Any) -> Entry:
    inner = some(first, count, step=step, magic=magic)
    return Entry(wrapper(magic, codec, inner, **how), inner, 0 if magic else -1, inner[-1].offset)


def modern(first: int, count: int, codec: int = NONE) -> Entry:
    found = batch(first, count, codec=codec)
    return Entry(found.data, found.records, 0, found.last_offset)


@dataclass
class Log:
    """A partition of segments, each a list of entries, with indexes of every other entry."""

    directory: Path
    segments: dict[int, list[Entry]]
    indexed: bool = True
    state: PartitionState = field(init=False)

    def __post_init__(self) -> None:
        for base, entries in self.segments.items():
            self.write(base, b"".join(e.data for e in entries))
            offsets, times, position, largest = b"", b"", 0, -1
            for number, item in enumerate(entries):
                largest = max([largest, *(m.timestamp for m in item.messages)])
                if number % 2 and self.indexed:
                    offsets += struct.pack(">ii", item.last_offset - base, position)
                    if largest >= 0:
                        times += struct.pack(">qi", largest, item.last_offset - base)
                position += len(item.data)
            self.path(base, ".index").write_bytes(offsets)
            self.path(base, ".timeindex").write_bytes(times)
        active = max(self.segments)
        lasts = [e.last_offset for entries in self.segments.values() for e in entries]
        self.state = PartitionState(
            high_watermark=max([active, *(last + 1 for last in lasts)]),
            active_base=active,
            active_size=self.path(active).stat().st_size,
            log_start_offset=min(self.segments),
            listed_from=2**63 - 1,
        )

    def path(self, base: int, suffix: str = ".log") -> Path:
        return self.directory / f"{base:020d}{suffix}"

    def write(self, base: int, data: bytes) -> None:
        self.path(base).write_bytes(data)

    def snapshot(self) -> DirectorySnapshot:
        return open_snapshot(self.directory, "t", 0, lambda: self.state)

    def expected(self, start: int, end: int) -> list[Record]:
        found = [
            m for base in sorted(self.segments) for e in self.segments[base] for m in e.messages
        ]
        return [m for m in found if start <= m.offset < end]


def messages_of(batches: list[pa.RecordBatch]) -> list[Record]:
    found = []
    for rows in batches:
        columns = [rows.column(name).to_pylist() for name in ("offset", "key", "value")]
        times = (rows.column("timestamp").cast(pa.int64()).to_numpy() // 1000).tolist()
        assert rows.column("headers").null_count == rows.num_rows
        for offset, key, value, time in zip(*columns, times, strict=True):
            found.append(Record(offset, time, key, value))
    return [m if m.timestamp != -1 else Record(m.offset, -1, m.key, m.value) for m in found]


def read(snapshot: DirectorySnapshot, start: int, end: int) -> list[Record]:
    return messages_of(list(snapshot.read(start, end, schema=SCHEMA)))


def read_all(directory: Path, *entries: Entry, base: int = 0) -> list[Record]:
    log = Log(directory, {base: list(entries)})
    with log.snapshot() as snapshot:
        return read(snapshot, base, log.state.high_watermark)


def mixed() -> dict[int, list[Entry]]:
    """All formats and codecs, plain and wrapped, gaps within and between, in several segments."""
    return {
        0: [*plain(0, 0, 4), packed(0, GZIP, 4, 3), packed(0, LZ4, 9, 4, step=2), *plain(0, 20)],
        24: [packed(0, SNAPPY, 24, 5, raw=True), *plain(1, 30, 2), packed(1, GZIP, 34, 5)],
        40: [packed(1, LZ4, 41, 6, step=3, start=2), *plain(1, 60, 3), packed(1, SNAPPY, 64, 4)],
        70: [*plain(1, 70), modern(71, 4), packed(1, GZIP, 75, 2), modern(77, 3, GZIP)],
        80: [modern(80, 2), *plain(0, 82), packed(0, GZIP, 83, 1), packed(1, LZ4, 85, 2)],
    }


@pytest.fixture
def log(tmp_path: Path) -> Log:
    return Log(tmp_path, mixed())


# --- what is read --------------------------------------------------------------------------------


@pytest.mark.parametrize("magic", [0, 1])
@pytest.mark.parametrize(("codec", "raw"), CODECS)
def test_a_wrapper_of_any_codec_reads_as_its_messages(
    tmp_path: Path, magic: int, codec: int, raw: bool
) -> None:
    item = packed(magic, codec, 7, 20, raw=raw)
    assert read_all(tmp_path, item, base=5) == item.messages


@pytest.mark.parametrize("magic", [0, 1])
def test_a_plain_message_is_a_batch_of_one(tmp_path: Path, magic: int) -> None:
    items = plain(magic, 0, 10)
    assert read_all(tmp_path, *items) == [m for item in items for m in item.messages]


@pytest.mark.slow
@pytest.mark.parametrize("indexed", [True, False])
def test_every_range_of_a_log_of_all_formats_holds_exactly_its_records(
    tmp_path: Path, indexed: bool
) -> None:
    log = Log(tmp_path, mixed(), indexed)
    end = log.state.high_watermark
    assert end == 87
    with log.snapshot() as snapshot:
        for start in range(end + 1):
            for stop in {start, start + 1, start + 6, end} & set(range(start, end + 1)):
                assert read(snapshot, start, stop) == log.expected(start, stop)


@pytest.mark.parametrize("chunk_size", [1, 11, 12, 17, 26, 40, 100, 333])
def test_chunks_of_any_size_hold_each_message_once(log: Log, chunk_size: int) -> None:
    with log.snapshot() as snapshot:
        found = [
            chunk.buffer[position : position + size]
            for chunk in snapshot.chunks(0, 87, chunk_size=chunk_size)
            for position, size in zip(chunk.table.positions, chunk.table.sizes, strict=True)
        ]
    assert found == [e.data for base in sorted(log.segments) for e in log.segments[base]]


@pytest.mark.parametrize("chunk_size", [1, 50, 150, 400])
@pytest.mark.parametrize("start", range(0, 87, 3))
def test_reading_from_any_offset_is_right_whatever_the_chunks(
    log: Log, monkeypatch: pytest.MonkeyPatch, chunk_size: int, start: int
) -> None:
    monkeypatch.setattr(DirectorySnapshot.chunks, "__kwdefaults__", {"chunk_size": chunk_size})
    with log.snapshot() as snapshot:
        assert read(snapshot, start, 87) == log.expected(start, 87)


@pytest.mark.parametrize("run_size", [1, 40, 100, 300, 1 << 20])
def test_runs_of_compressed_and_plain_messages_keep_their_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run_size: int
) -> None:
    monkeypatch.setattr(open_segment, "RUN_SIZE", run_size)
    items: list[Entry] = []
    for i in range(0, 200, 5):
        batches = [modern(i + 4, 1)] if i % 3 else plain(1, i + 4)
        items += [*plain(i % 3 % 2, i, 2), packed(1, GZIP, i + 2, 2), *batches]
    assert read_all(tmp_path, *items) == [m for item in items for m in item.messages]


@pytest.mark.parametrize("run_size", [1, 60, 200])
@pytest.mark.parametrize("start", [0, 22, 36, 73])
def test_a_log_of_all_formats_reads_the_same_in_runs_of_any_size(
    log: Log, monkeypatch: pytest.MonkeyPatch, run_size: int, start: int
) -> None:
    monkeypatch.setattr(open_segment, "RUN_SIZE", run_size)
    with log.snapshot() as snapshot:
        assert read(snapshot, start, 87) == log.expected(start, 87)


@pytest.mark.parametrize("magic", [0, 1])
@pytest.mark.parametrize("plains", [0, 1, 30])
def test_what_wrappers_hold_is_decompressed_in_bounded_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, magic: int, plains: int
) -> None:
    run_size = 20_000
    monkeypatch.setattr(open_segment, "RUN_SIZE", run_size)
    items: list[Entry] = []
    offset = 0
    for _ in range(40):
        items += plain(magic, offset, plains)
        inner = [Record(offset + plains + i, -1, None, b"0" * 500) for i in range(6)]
        item = Entry(wrapper(magic, GZIP, inner), inner, 0, inner[-1].offset)
        items.append(item)
        offset = item.last_offset + 1
    largest = len(b"".join(message(magic, m.offset, None, m.value) for m in inner))
    log = Log(tmp_path, {0: items})
    found: list[int] = []
    bases: list[int] = []
    sizes = []
    with log.snapshot() as snapshot:
        (chunk,) = snapshot.chunks(0, offset)
        for run, table in chunk.runs(np.ones(len(chunk.table), dtype=np.bool_)):
            assert set(table.batch_index.tolist()) == set(range(len(run.table)))
            bases += run.table.base_offsets.tolist()
            found += table.offsets.tolist()
            sizes.append(table.arena.size)
    assert max(sizes) < run_size + largest
    assert min(sizes[:-1]) >= run_size
    assert bases == chunk.table.base_offsets.tolist()
    assert found == [m.offset for item in items for m in item.messages]


def test_only_the_first_batches_of_one_format_are_indexed_at_once() -> None:
    items = [e for entries in mixed().values() for e in entries]
    data = b"".join(e.data for e in items)
    table, _, _ = records.scan_batches(data)
    left = np.arange(len(table))
    batches = []
    while len(left):
        found = records.index_records(data, table, path="x", file_position=0, selection=left)
        assert len(set(table.is_message[left[: found.batch_count]].tolist())) == 1
        batches.append(records.to_arrow(found, table, None, schema=SCHEMA, topic="t", partition=0))
        left = left[found.batch_count :]
    assert messages_of(batches) == [m for item in items for m in item.messages]


def test_the_timestamp_type_says_that_v0_has_none(log: Log) -> None:
    with log.snapshot() as snapshot:
        found = pa.Table.from_batches(list(snapshot.read(0, 87, schema=SCHEMA)))
    types = [
        item.types for base in log.segments for item in log.segments[base] for _ in item.messages
    ]
    assert found.column("timestampType").to_pylist() == types
    assert set(types) == {-1, 0}


def test_a_header_walk_finds_ends_and_positions(log: Log) -> None:
    with log.snapshot() as snapshot:
        for base, entries in log.segments.items():
            files = next(s for s in snapshot.segments if s.base_offset == base)
            assert isinstance(files, SegmentFiles)
            assert next_offset(files) == entries[-1].last_offset + 1
            position = 0
            lowest = base
            for item in entries:
                for offset in range(lowest, item.last_offset + 1):
                    place = snapshot.position_of(offset)
                    assert place is not None
                    assert (place[0].base_offset, place[1]) == (base, position)
                lowest = item.last_offset + 1
                position += len(item.data)
        assert snapshot.position_of(87) is None


def test_headers_of_messages_say_what_is_known(log: Log) -> None:
    data = log.path(24).read_bytes()
    (_, first), (_, second), *_ = iterate_headers(data)
    assert (first.magic, first.base_offset, first.last_offset, first.records_count) == (
        0,
        0,
        28,
        -1,
    )
    assert (first.codec, first.timestamp_type, first.max_timestamp) == (SNAPPY, -1, -1)
    assert (second.magic, second.base_offset, second.last_offset) == (1, 30, 30)
    assert (second.timestamp_type, second.max_timestamp, second.records_count) == (0, 1300, 1)
    assert (second.is_control, second.is_transactional) == (False, False)
    source = FileBytes(os.open(log.path(24), os.O_RDONLY))
    try:
        assert list(headers(source, 0, len(data))) == list(iterate_headers(data))
    finally:
        source.close()


def test_unknown_attribute_bits_of_messages_mean_nothing(tmp_path: Path) -> None:
    items = [
        Entry(message(magic, magic, b"k", b"v", attributes=0x70 | 8 * (1 - magic)), [], 0, magic)
        for magic in (0, 1)
    ]
    assert [m.offset for m in read_all(tmp_path, *items)] == [0, 1]


@pytest.mark.parametrize("time", range(990, 1900, 7))
def test_offsets_are_found_by_time(log: Log, time: int) -> None:
    young = [m.offset for m in log.expected(0, 87) if m.timestamp >= time]
    with log.snapshot() as snapshot:
        assert offset_since(snapshot, time) == (young[0] if young else None)


# --- the second source ---------------------------------------------------------------------------


@pytest.mark.parametrize("codec", [NONE, GZIP, SNAPPY, LZ4])
@pytest.mark.parametrize("magic", [0, 1])
def test_what_aiokafka_builds_is_read(tmp_path: Path, magic: Any, codec: int) -> None:
    if (magic, codec) == (0, LZ4):
        pytest.skip("aiokafka does not write it")
    builder = LegacyRecordBatchBuilder(magic=magic, compression_type=codec, batch_size=1 << 20)
    expected = [Record(i, m.timestamp, m.key, m.value) for i, m in enumerate(some(0, 12))]
    if magic == 0:
        expected = [Record(m.offset, -1, m.key, m.value) for m in expected]
    for m in expected:
        builder.append(m.offset, timestamp=m.timestamp, key=m.key, value=m.value)
    data = bytearray(builder.build())
    if codec:
        data[:8] = struct.pack(">q", 11)  # as a broker does
    assert read_all(tmp_path, Entry(bytes(data), [], 0, 11)) == expected


# --- quirks of wrappers --------------------------------------------------------------------------


def test_a_wrapper_v1_at_offset_zero_takes_inner_offsets_as_they_stand(tmp_path: Path) -> None:
    item = packed(1, GZIP, 0, 4, offset=0)
    log = Log(tmp_path, {0: [item, packed(1, GZIP, 4, 2), *plain(1, 6)]})
    with log.snapshot() as snapshot:
        for start in range(7):
            assert read(snapshot, start, 7) == log.expected(start, 7)


def test_a_wrapper_v1_below_its_last_inner_offset_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CorruptBatchError, match="offset 3 of its last message"):
        read_all(tmp_path, packed(1, GZIP, 0, 4, offset=2))


def test_inner_offsets_v1_may_begin_anywhere(tmp_path: Path) -> None:
    item = packed(1, GZIP, 50, 3, start=7, step=2)
    assert read_all(tmp_path, item) == item.messages


def test_under_log_append_time_all_messages_read_the_wrappers(tmp_path: Path) -> None:
    inner = some(0, 5)
    log = Log(tmp_path, {0: [Entry(wrapper(1, GZIP, inner, append_time=77), inner, 1, 4)]})
    with log.snapshot() as snapshot:
        found = pa.Table.from_batches(list(snapshot.read(0, 5, schema=SCHEMA)))
        assert found["timestampType"].to_pylist() == [1] * 5
        assert found["timestamp"].cast(pa.int64()).to_pylist() == [77_000] * 5
        assert (offset_since(snapshot, 77), offset_since(snapshot, 78)) == (0, None)


def test_a_plain_message_of_log_append_time_reads_its_own(tmp_path: Path) -> None:
    data = message(1, 0, b"k", b"v", timestamp=5, attributes=8)
    assert read_all(tmp_path, Entry(data, [], 1, 0)) == [Record(0, 5, b"k", b"v")]


@pytest.mark.parametrize("magic", [0, 1])
def test_inner_messages_of_the_other_format_are_read(tmp_path: Path, magic: int) -> None:
    inner = some(10, 5, magic=1 - magic)
    data = wrapper(magic, GZIP, inner, inner_magic=1 - magic)
    assert read_all(tmp_path, Entry(data, inner, 0, 14)) == inner


def test_a_last_inner_message_that_is_cut_off_is_left_out(tmp_path: Path) -> None:
    whole, cut = message(0, 3, b"k", b"v"), message(0, 4, b"k", b"v")
    for number, size in enumerate(range(len(cut))):
        directory = tmp_path / str(number)
        directory.mkdir()
        item = Entry(wrapper(0, GZIP, [], offset=3, payload=whole + cut[:size]), [], 0, 3)
        assert read_all(directory, item) == [Record(3, -1, b"k", b"v")]


def test_the_header_checksum_of_lz4_is_wrong_in_v0_and_right_in_v1(tmp_path: Path) -> None:
    inner = message(1, 0, b"k", b"v")
    bad = message(1, 0, None, compressed(LZ4, inner, magic=0), attributes=LZ4)
    with pytest.raises(CorruptBatchError):
        read_all(tmp_path, Entry(bad, [], 0, 0))


@pytest.mark.parametrize("store_size", [True, False])
@pytest.mark.parametrize("wrong", range(0, 256, 5))
def test_any_lz4_header_checksum_is_taken_for_v0(store_size: bool, wrong: int) -> None:
    frame = bytearray(lz4.frame.compress(b"data" * 9, block_linked=False, store_size=store_size))
    frame[14 if store_size else 6] = wrong
    found = compression.decompress(LZ4, bytes(frame), limit=99, is_lz4_header_checked=False)
    assert found == b"data" * 9


@pytest.mark.parametrize("size", range(12))
def test_an_lz4_frame_cut_in_its_header_is_a_fault_in_v0_too(size: int) -> None:
    frame = lz4.frame.compress(b"data", store_size=True)[:size]
    with pytest.raises(ValueError, match="expected"):
        compression.decompress(LZ4, frame, limit=99, is_lz4_header_checked=False)


# --- damage and malice ---------------------------------------------------------------------------

INNER = message(1, 0, b"k", b"v")


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (wrapper(1, GZIP, [], offset=5, payload=b""), "at least one message"),
        (wrapper(1, GZIP, [], offset=5, payload=INNER[:-1]), "at least one message"),
        (wrapper(1, GZIP, [], offset=5, payload=INNER + b"\0" * 12), "a record within"),
        (message(1, 5, None, None, attributes=GZIP), "a value of"),
        (message(1, 5, None, b"", attributes=GZIP), "gzip"),
        (message(1, 5, None, b"no gzip", attributes=GZIP), "gzip"),
        (message(0, 5, None, b"abc", attributes=4), "zstd"),
        (message(1, 5, None, b"abc", attributes=4), "zstd"),
        (message(1, 5, None, b"abc", attributes=5), "codec 5"),
        (message(0, 5, None, b"abc", attributes=7), "codec 7"),
        (wrapper(1, GZIP, [], offset=5, payload=INNER[:-1] + b"x"), "the checksum"),
        (
            wrapper(1, GZIP, [], offset=5, payload=packed(1, GZIP, 0, 2).data),
            "no compressed message within",
        ),
        (wrapper(1, GZIP, [], offset=5, payload=message(2, 0, b"k", b"v")), "v0 or v1"),
        (wrapper(0, GZIP, [], offset=5, payload=INNER + INNER), "offsets that rise"),
        (wrapper(0, GZIP, [], offset=5, payload=message(0, 6, b"", b"")), "offsets that rise"),
        (wrapper(0, GZIP, [], offset=5, payload=message(0, -1, b"", b"")), "offsets that rise"),
        (wrapper(1, GZIP, [], offset=5, payload=message(1, -(2**63), b"", b"")), "offsets that"),
        (entry(5, b"\0\0" + struct.pack(">ii", 2**31 - 1, 0)), "fields within"),
        (entry(5, b"\0\0" + struct.pack(">ii", 1, 0)), "fields within"),
        (entry(5, b"\0\0" + struct.pack(">ii", -1, 1)), "fields within"),
        (entry(5, b"\0\1" + struct.pack(">ii", 2**31 - 1, 0)), "a key that fits"),
        (entry(5, b"\0\1" + struct.pack(">ii", -1, 2**31 - 1)), "a value of"),
        (struct.pack(">qi", 5, 13) + b"\0" * 60, "less than a header"),
        (entry(5, b"\1\0" + b"\0" * 15), "less than a header"),
    ],
)
def test_what_no_kafka_writes_is_a_typed_error(tmp_path: Path, data: bytes, words: str) -> None:
    with pytest.raises(CorruptBatchError, match=words):
        read_all(tmp_path, Entry(data + b"\0" * (words == "less than a header") * 40, [], 0, 5))


def test_negative_sizes_are_null_and_bytes_behind_the_value_are_passed_over(tmp_path: Path) -> None:
    data = entry(0, b"\0\0" + struct.pack(">ii", -7, 1) + b"v tail")
    assert read_all(tmp_path, Entry(data, [], -1, 0)) == [Record(0, -1, None, b"v")]


def test_messages_below_the_end_of_the_log_before_them_are_refused(tmp_path: Path) -> None:
    shifted = Entry(wrapper(0, GZIP, some(3, 5, magic=0)), [], -1, 7)
    for number, before in enumerate(([packed(1, GZIP, 0, 5)], plain(1, 0, 5), [modern(0, 5)])):
        directory = tmp_path / str(number)
        directory.mkdir()
        with pytest.raises(CorruptBatchError, match="offsets that rise"):
            read_all(directory, *before, shifted)


def test_a_wrapper_that_grows_past_the_limit_is_refused() -> None:
    data = packed(1, GZIP, 0, 400).data
    table, _, _ = records.scan_batches(data)
    with pytest.raises(CorruptBatchError, match="at most 1000 decompressed bytes"):
        records.index_records(data, table, path="x", file_position=0, limit=1000)


def small() -> list[Entry]:
    return [
        *plain(0, 0, 2),
        packed(0, LZ4, 2, 3),
        packed(0, SNAPPY, 5, 2),
        *plain(1, 7),
        packed(1, GZIP, 8, 3),
        packed(1, LZ4, 11, 2),
        modern(13, 2),
        *plain(1, 15),
    ]


@pytest.mark.slow
def test_a_log_cut_at_any_byte_yields_whole_entries_and_then_an_error(tmp_path: Path) -> None:
    entries = small()
    log = Log(tmp_path, {0: entries, 16: []})
    sound = log.path(0).read_bytes()
    ends = [sum(len(e.data) for e in entries[:i]) for i in range(len(entries) + 1)]
    for cut in range(len(sound)):
        log.write(0, sound[:cut])
        whole = [
            m for e, end in zip(entries, ends[1:], strict=True) if end <= cut for m in e.messages
        ]
        found: list[pa.RecordBatch] = []
        with log.snapshot() as snapshot:
            if cut in ends:
                found.extend(snapshot.read(0, 16, schema=SCHEMA))
            else:
                with pytest.raises(CorruptBatchError):
                    found.extend(snapshot.read(0, 16, schema=SCHEMA))
        assert messages_of(found) == whole


@pytest.mark.slow
def test_every_flipped_byte_is_an_error_or_changes_nothing(tmp_path: Path) -> None:
    log = Log(tmp_path, {0: small(), 16: plain(1, 16)})
    sound = log.path(0).read_bytes()
    unnoticed = 0
    for place in range(len(sound)):
        for flip in (1 << (place % 8), 0xFF):
            damaged = bytearray(sound)
            damaged[place] ^= flip
            log.write(0, bytes(damaged))
            with log.snapshot() as snapshot:
                try:
                    found = read(snapshot, 0, 17)
                except CorruptBatchError as fault:
                    assert fault.path == str(log.path(0))
                    continue
            assert found == log.expected(0, 17)
            unnoticed += 1
    assert unnoticed <= 2 * 4  # the leader epoch of the one batch v2, which nobody reads


@pytest.mark.slow
def test_every_changed_byte_under_a_right_checksum_is_an_error_or_reads(tmp_path: Path) -> None:
    for item in small():
        for place in range(16, len(item.data)):
            for byte in (0, 1, 0x7F, 0x80, 0xFF):
                data = bytearray(item.data)
                data[place] = byte
                data[12:16] = struct.pack(">I", zlib.crc32(data[16:]))
                log = Log(tmp_path, {0: [Entry(bytes(data), [], 0, item.last_offset)]})
                with log.snapshot() as snapshot:
                    try:
                        found = read(snapshot, 0, log.state.high_watermark)
                    except CorruptBatchError:
                        continue
                offsets = [m.offset for m in found]
                assert offsets == sorted(set(offsets))


@pytest.mark.parametrize("size", [-(2**31), -1, 0, 13, 2**31 - 1])
def test_a_hostile_entry_size_is_a_typed_error(tmp_path: Path, size: int) -> None:
    good = plain(1, 0)[0]
    bad = bytearray(plain(1, 1)[0].data)
    bad[8:12] = struct.pack(">i", size)
    log = Log(tmp_path, {0: [good, Entry(bytes(bad), [], 0, 1)]})
    with log.snapshot() as snapshot:
        with pytest.raises(CorruptBatchError) as it:
            read(snapshot, 0, 2)
        assert it.value.position == len(good.data)
        with pytest.raises(CorruptBatchError):
            snapshot.position_of(1)


# --- never written -------------------------------------------------------------------------------


def test_messages_are_not_rewritten_as_batches() -> None:
    for item in (plain(1, 1)[0], packed(0, GZIP, 1, 3)):
        data = modern(0, 1).data + item.data
        table, _, _ = records.scan_batches(data)
        for number in range(2):
            place = {"path": "x", "file_position": 0, "selection": np.array([number])}
            found = records.index_records(data, table, **place)
            with pytest.raises(InvalidInputError, match="v0 and v1"):
                records.rebuild_batch(found, table, 1, np.arange(1))
        with pytest.raises(InvalidInputError, match="v0 and v1"):
            records.empty_batch(table, 1)
