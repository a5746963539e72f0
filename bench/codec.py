"""Decoding and encoding of record batches, next to aiokafka's compiled codec.

    python -m bench.codec [--json] [--quick]

Records of 100 bytes (a key of 8, a value of 78 to 84), uncompressed and lz4, checksums included,
one thread. Half of a value is random, so that lz4 has something to find, as in documents. Batches
of about 1,000 records, and of 16 KiB, which is what a Kafka producer sends unless told otherwise.
Ours decodes chunks of 1 MiB, as a reader gets them, to Arrow with all seven columns, and encodes
from Arrow; aiokafka decodes each batch to objects with their fields read, and encodes from a list
of bytes: each to and from the form its users hold. Keys, values, offsets and times that either
decodes are compared, of either's encodings. Both run in one process, whose memory is told for each.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from aiokafka.record.default_records import DefaultRecordBatch, DefaultRecordBatchBuilder

from bench import compare, report
from kafkalog.schema import changelog_schema
from kafkalog.storage_engine.format import layout
from kafkalog.storage_engine.format.batch import iterate_headers
from kafkalog.storage_engine.reading.chunk_reader import ChunkReader
from kafkalog.storage_engine.records import records
from kafkalog.storage_engine.segment.open_segment import Chunk

RECORDS: Final = 50_000
CHUNK_SIZE: Final = 1 << 20
BASE_MS: Final = 1_700_000_000_000
BATCH_SIZES: Final = {"100 KB": 100_000, "16 KiB": 16 * 1024}
CODECS: Final = {"uncompressed": layout.CODEC_NONE, "lz4": layout.CODEC_LZ4}
UNIT: Final = "million records/s"


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the benchmark and print its figures."""
    parser = argparse.ArgumentParser(prog="python -m bench.codec", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON line per claim")
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    options = parser.parse_args(arguments)
    if not DefaultRecordBatch.__module__.startswith("aiokafka.record._crecords"):
        raise SystemExit("aiokafka has its codec in Python alone here, which is no peer")
    dice = random.Random(1)
    keys = [b"%08d" % i for i in range(RECORDS)]
    values = [dice.randbytes(40) + b"%038d" % i + b"=" * (i % 7) for i in range(RECORDS)]
    columns = (pa.array(keys), pa.array(values))
    times = np.arange(BASE_MS, BASE_MS + RECORDS)
    expected = list(zip(keys, values, times.tolist(), strict=True))
    amount = RECORDS / 1e6
    rounds = 3 if options.quick else 15
    for codec, (name, batch_size) in product(CODECS, BATCH_SIZES.items()):
        data = bytes(encode(*columns, times, batch_size, CODECS[codec]))
        headers = list(iterate_headers(data))
        batches = [data[position : position + header.size] for position, header in headers]
        counts = [header.records_count for _, header in headers]
        chunks = chunked(batches)
        theirs = aiokafka_encode(keys, values, counts, CODECS[codec])
        check(chunks, batches, expected, CODECS[codec])
        check(theirs, theirs, expected, CODECS[codec])  # each numbers its records from 0
        sizes = {"our_bytes": len(data), "bytes_of_the_peer": sum(map(len, theirs))}
        for verb, ours, peer in (
            (
                "decode to Arrow",
                partial(decode_chunks, chunks),
                partial(aiokafka_decode, batches),
            ),
            (
                "encode from Arrow",
                partial(encode, *columns, times, batch_size, CODECS[codec]),
                partial(aiokafka_encode, keys, values, counts, CODECS[codec]),
            ),
        ):
            result = compare(
                f"{verb}, 100-byte records, {codec}, batches of {name}",
                ours,
                peer,
                amount=amount,
                unit=UNIT,
                rounds=rounds,
                peer_name="aiokafka",
                target=">= 3",
            )
            report(result.told(**sizes), as_json=options.json)


def chunked(batches: Sequence[bytes]) -> list[bytes]:
    """Join neighbours to pieces of whole batches, as a reader's window finds them."""
    chunks = [b""]
    for batch in batches:
        if len(chunks[-1]) + len(batch) > CHUNK_SIZE:
            chunks.append(b"")
        chunks[-1] += batch
    return chunks


def encode(
    keys: pa.Array, values: pa.Array, times: npt.NDArray[np.int64], batch_size: int, codec: int
) -> memoryview:
    """Encode all rows."""
    return records.encode(
        keys,
        values,
        None,
        times,
        np.arange(len(times)),
        batch_size=batch_size,
        codec=codec,
        level=None,
        timestamp_type=layout.CREATE_TIME,
        max_message_bytes=1 << 20,
    ).data


def decode(reader: ChunkReader, buffer: bytes) -> list[pa.RecordBatch]:
    """Decode one chunk as a read of a whole range does, its checksums compared."""
    table, _, _ = records.scan_batches(buffer)
    records.check_crcs(buffer, table, path="bench", file_position=0)
    chunk = Chunk(buffer, table, Path("bench"), 0, 0, 0, RECORDS)
    return list(reader.read(chunk, np.ones(len(table), dtype=np.bool_)))


def decode_chunks(chunks: Sequence[bytes]) -> None:
    """Decode one chunk after the other; a reader hands each on before the next."""
    reader = ChunkReader(("bench", 0), changelog_schema())
    for chunk in chunks:
        decode(reader, chunk)


def check(
    chunks: Sequence[bytes],
    batches: Sequence[bytes],
    expected: Sequence[tuple[bytes, bytes, int]],
    codec: int,
) -> None:
    """Prove that batches, of either's, hold what was encoded, and that both decode it alike.

    The chunks are the same batches as ours reads them.
    """
    for data in batches:
        (_, header), *others = iterate_headers(data)
        if others or header.codec != codec:
            raise SystemExit(f"a batch has codec {header.codec}, expected {codec}")
    schema = ("key", "value", "timestamp", "offset", "timestampType")
    reader = ChunkReader(("bench", 0), changelog_schema())
    found: list[tuple[Any, ...]] = []
    for chunk in chunks:
        for batch in decode(reader, chunk):
            table = pa.table(batch).select(schema)
            times = table["timestamp"].cast(pa.int64())
            table = table.set_column(2, "timestamp", pc.divide(times, 1000))
            found.extend(zip(*(column.to_pylist() for column in table.columns), strict=True))
    theirs = [
        (record.key, record.value, record.timestamp, record.offset, record.timestamp_type)
        for record in aiokafka_records(batches)
    ]
    if found != theirs:
        raise SystemExit("ours and aiokafka decode the same batches differently")
    if [record[:3] for record in found] != list(expected):
        raise SystemExit("the decoded records are not those encoded")


def aiokafka_records(batches: Sequence[bytes]) -> Iterator[Any]:
    """Decode with aiokafka."""
    for data in batches:
        batch = DefaultRecordBatch(data)
        if not batch.validate_crc():
            raise SystemExit("aiokafka finds a wrong checksum")
        yield from batch


def aiokafka_decode(batches: Sequence[bytes]) -> None:
    """Decode with aiokafka, and read what our columns hold."""
    for data in batches:
        batch = DefaultRecordBatch(data)
        if not batch.validate_crc():
            raise SystemExit("aiokafka finds a wrong checksum")
        for record in batch:
            _ = (record.key, record.value, record.offset, record.timestamp, record.timestamp_type)


def aiokafka_encode(
    keys: Sequence[bytes], values: Sequence[bytes], counts: Sequence[int], codec: int
) -> list[bytes]:
    """Encode with aiokafka, in batches of as many records as ours."""
    row, built = 0, []
    for count in counts:
        builder = DefaultRecordBatchBuilder(
            magic=2,
            compression_type=codec,
            is_transactional=0,
            producer_id=-1,
            producer_epoch=-1,
            base_sequence=-1,
            batch_size=1 << 20,
        )
        for i in range(count):
            builder.append(i, BASE_MS + row, keys[row], values[row], [])
            row += 1
        built.append(builder.build())
    return built


if __name__ == "__main__":
    main()
