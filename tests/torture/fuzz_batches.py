"""Fuzz targets of what lies in `.log` files: batches, messages, records, their compression."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import pairwise
from pathlib import Path

import numpy as np

from kafkalog.schema import changelog_schema
from kafkalog.storage_engine.broker.metadata_log import read_topics
from kafkalog.storage_engine.format import batch, compression, layout
from kafkalog.storage_engine.reading.chunk_reader import ChunkReader
from kafkalog.storage_engine.segment.log_scanner import INSPECT, RECOVER, REPLAY, LogScanner
from kafkalog.storage_engine.segment.open_segment_file import OpenSegmentFile
from kafkalog.storage_engine.segment.segments import SegmentFiles
from kafkalog.storage_engine.transactions.control_record import read_control_record
from tests.builders.batch_builder import compressed
from tests.torture import fuzz_checksums
from tests.torture.fuzz_target import Case, Target, exhaust, file_target, refusing
from tests.unit.storage_engine import sample_root, test_metadata_log

_LOG_NAME = layout.segment_file(0, layout.LOG)
_LIMIT = 1 << 20
_PLAIN, _FULL = changelog_schema(), changelog_schema(include_headers=True)


def targets() -> list[Target]:
    """Return them all."""
    found = [_of_log(f"batches_{name}", _batches_of(codec)) for name, codec in _CODECS.items()]
    found += [_of_log("batches_transactions", _transactions), _of_log("messages", _messages)]
    found += [_of_codec(name, codec) for name, codec in _CODECS.items() if codec]
    found += [
        file_target(
            "metadata_log",
            f"{layout.METADATA_DIRECTORY}/{_LOG_NAME}",
            lambda path: read_topics(path.parent),
            _metadata,
            mend=fuzz_checksums.batches,
        ),
        file_target(
            "metadata_snapshot",
            f"{layout.METADATA_DIRECTORY}/{4:020d}-{1:010d}.checkpoint",
            lambda path: read_topics(path.parent),
            _metadata,
            mend=fuzz_checksums.batches,
        ),
    ]
    return found


_CODECS = {name: codec for name, codec in layout.CODECS.items() if codec < 5}


# --- logs ----------------------------------------------------------------------------------------


def _of_log(name: str, seeds: Callable[[], Iterable[bytes]]) -> Target:
    return file_target(
        name, _LOG_NAME, _read_log, lambda _: list(seeds()), mend=fuzz_checksums.batches
    )


def _read_log(path: Path) -> None:
    """Read a `.log` file in the ways in which it is read: by chunks, by headers, as a broker."""
    opened = OpenSegmentFile(_files(path), end_offset=layout.INT64_MAX, committed=None)
    try:
        for schema in (_PLAIN, _FULL):
            with refusing():
                reader = ChunkReader(("t", 0), schema)
                for chunk in opened.chunks(0, layout.INT64_MAX, 1 << 20):
                    exhaust(reader.read(chunk, np.ones(len(chunk.table), dtype=np.bool_)))
        with refusing():
            for position, header in opened.batches_from(0):
                _look_at(opened, path, position, header)
        exhaust(opened.batches_since(1000), opened.batches_since_largest()[1])
    finally:
        opened.close()
    for policy in (RECOVER, REPLAY, INSPECT):
        with LogScanner.opened(path, policy, next_offset=0) as scan:
            exhaust(scan)


def _look_at(opened: OpenSegmentFile, path: Path, position: int, header: batch.BatchHeader) -> None:
    data = path.read_bytes()
    with refusing():
        opened.batch_at(position)
    with refusing():
        opened.first_since(position, header, 1000, start=0, end=layout.INT64_MAX)
        opened.latest(position, header, start=0, end=layout.INT64_MAX)
        opened.base_offset_of(position, header)
    with refusing():
        read_control_record(data, position, header)


def _files(path: Path) -> SegmentFiles:
    return SegmentFiles(path.parent, 0, path.stat().st_size)


def _batches_of(codec: int) -> Callable[[], list[bytes]]:
    def build() -> list[bytes]:
        stored, some = sample_root.stored, sample_root.some
        one = stored(some(0, 4, tombstone=True), codec=codec).data
        large = stored(some(0, 40, size=300), codec=codec).data
        more = stored(some(4, 3, size=40), codec=codec).data
        kept = stored(some(7, 3, step=2), last=20, codec=codec, horizon=9_000).data
        return [one, one + more + kept, large, kept]

    return build


def _transactions() -> list[bytes]:
    return [segment.data for segment in sample_root.varied().segments]


def _messages() -> list[bytes]:
    segments = sample_root.legacy().segments
    return [s.data for s in segments] + [item.data for s in segments for item in s.batches]


def _metadata(_: Path) -> list[bytes]:
    made = test_metadata_log
    records = [
        made.topic("t-7"),
        made.partition(1),
        made.config("t-7", "cleanup.policy", "compact"),
        made.config("t-7", "segment.ms", None),
        made.frame(layout.BEGIN_TRANSACTION_RECORD, b"\0\0"),
        made.topic("u", made.OTHER_ID),
        made.frame(layout.END_TRANSACTION_RECORD, b"\0"),
        made.removed(made.OTHER_ID),
    ]
    return [made.batch(0, records), made.batch(0, records[:2]) + made.batch(2, records[2:])]


# --- compression ---------------------------------------------------------------------------------


def _contents() -> list[bytes]:
    words = b"".join(b"%d: some words, " % n for n in range(300))
    return [b"", b"a", b"abcd" * 50, words, bytes(5000)]


def _of_codec(name: str, codec: int) -> Target:
    def decode(data: bytes) -> None:
        for is_checked in (True, False):
            with refusing(ValueError):
                found = compression.decompress(
                    codec, data, limit=_LIMIT, is_lz4_header_checked=is_checked
                )
                assert len(found) <= _LIMIT, f"{len(found)} bytes, above the limit"

    def begin(_: Path) -> Case:
        made = [compression.compress(codec, content) for content in _contents()]
        made += [compressed(codec, content) for content in _contents()]
        return Case(decode, [*made, *(one + other for one, other in pairwise(made))])

    # The limit is a MiB here, and little is needed above it; but a frame of zstd may ask for a
    # window of 128 MiB, which the library grants.
    memory = 256 << 20 if codec == layout.CODEC_ZSTD else 64 << 20
    return Target(name=f"compression_{name}", begin=begin, memory=memory)
