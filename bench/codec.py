"""How fast record batches are decoded and encoded, beside aiokafka's compiled codec.

    python -m bench.codec [--json] [--quick]

Records of 100 bytes (a key of 8, a value of 78 to 84), uncompressed and lz4, checksums included,
one thread. Half of a value is random, so that lz4 has something to find, as in documents. Batches
of about 1,000 records, and of 16 KiB, which is what a Kafka producer sends unless told otherwise.
Ours decodes chunks of 1 MiB, as a reader gets them, to Arrow with all seven columns, and encodes
from Arrow; aiokafka decodes each batch to objects with their fields read, and encodes from a list
of bytes: each to and from the form its users hold.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from functools import partial
from itertools import product
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from aiokafka.record.default_records import DefaultRecordBatch, DefaultRecordBatchBuilder

from bench import compare, report
from bench.memory import peak_mib, reset_peak
from kafkalog.schema import changelog_schema
from kafkalog.storage_engine import layout, records
from kafkalog.storage_engine.batch import iterate_headers

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
    dice = random.Random(1)
    keys = [b"%08d" % i for i in range(RECORDS)]
    values = [dice.randbytes(40) + b"%038d" % i + b"=" * (i % 7) for i in range(RECORDS)]
    columns = (pa.array(keys), pa.array(values))
    times = np.arange(BASE_MS, BASE_MS + RECORDS)
    amount = RECORDS / 1e6
    rounds = 3 if options.quick else 15
    for codec, (name, batch_size) in product(CODECS, BATCH_SIZES.items()):
        data = bytes(encode(*columns, times, batch_size, CODECS[codec]))
        headers = list(iterate_headers(data))
        batches = [data[position : position + header.size] for position, header in headers]
        counts = [header.records_count for _, header in headers]
        chunks = chunked(batches)
        check(chunks, columns[1])
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
            reset_peak()
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
            report(result.told(process_mib=round(peak_mib())), as_json=options.json)


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


def decode(chunk: bytes) -> pa.RecordBatch:
    """Decode one chunk, its checksums compared."""
    table, _, _ = records.scan_batches(chunk)
    records.check_crcs(chunk, table, path="bench", file_position=0)
    return records.decode(
        chunk,
        table,
        start=0,
        end=RECORDS,
        schema=changelog_schema(),
        topic="bench",
        partition=0,
        path="bench",
        file_position=0,
    )


def decode_chunks(chunks: Sequence[bytes]) -> None:
    """Decode one chunk after the other; a reader hands each on before the next."""
    for chunk in chunks:
        decode(chunk)


def check(chunks: Sequence[bytes], values: pa.Array) -> None:
    """Prove that what is measured is right."""
    found = pa.Table.from_batches([decode(chunk) for chunk in chunks])
    if not found["value"].combine_chunks().equals(values):
        raise SystemExit("the decoded values are not those encoded")


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
) -> None:
    """Encode with aiokafka, in batches of as many records as ours."""
    row = 0
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
        builder.build()


if __name__ == "__main__":
    main()
