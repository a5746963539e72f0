import random
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from kafkalog.schema import HEADERS, changelog_schema
from kafkalog.storage_engine.directory.directory_log import DirectoryLog
from kafkalog.storage_engine.format import layout
from kafkalog.storage_engine.records.chosen_keys import ChosenKeys
from kafkalog.storage_engine.records.columns import ARROW_SIZE, arrow_batches
from tests.builders.log_builder import LogBuilder

SCHEMA = changelog_schema(include_headers=True)


def read(root: Path, schema: pa.Schema = SCHEMA) -> list[pa.RecordBatch]:
    with DirectoryLog(root, read_only=True) as engine, engine.snapshot("t", 0) as snapshot:
        return list(snapshot.read(0, snapshot.state.high_watermark, schema=schema))


def log_of(root: Path, values: list[bytes | None], codec: str = "uncompressed") -> None:
    config = {"max_message_bytes": 64 << 20, "compression_type": codec}
    log = LogBuilder(root, now_ms=1).topic(policy="delete", **config)
    log.append(*((None, value) for value in values), batch_size=32 << 20).close()


@pytest.mark.slow
@pytest.mark.parametrize("codec", ["uncompressed", "zstd"])
def test_a_large_record_batch_is_many_arrow_batches(tmp_path: Path, codec: str) -> None:
    chance = random.Random(1)
    values = [chance.randbytes(chance.choice([0, 10, 1 << 20, 3 << 20])) for _ in range(40)]
    log_of(tmp_path, values, codec)

    found = read(tmp_path)

    assert [v for batch in found for v in batch.column("value").to_pylist()] == values
    assert [o for batch in found for o in batch.column("offset").to_pylist()] == list(range(40))
    assert all(batch.nbytes <= ARROW_SIZE or batch.num_rows == 1 for batch in found)
    assert all(batch.num_rows for batch in found)


def test_a_record_that_is_larger_has_a_batch_of_its_own(tmp_path: Path) -> None:
    values = [b"a", bytes(9 << 20), b"b", None]
    log_of(tmp_path, list(values))

    found = read(tmp_path)

    assert [batch.num_rows for batch in found] in ([1, 1, 2], [1, 1, 1, 1])
    assert [v for batch in found for v in batch.column("value").to_pylist()] == values
    for batch in found:
        batch.validate(full=True)


def test_a_topics_name_in_every_row_counts(tmp_path: Path) -> None:
    log_of(tmp_path, [b""] * 200_000, "zstd")

    assert all(batch.nbytes <= ARROW_SIZE for batch in read(tmp_path))
    offsets = pa.schema([SCHEMA.field("offset")])
    assert sum(batch.num_rows for batch in read(tmp_path, offsets)) == 200_000


def test_headers_count_and_come_whole(tmp_path: Path) -> None:
    headers = [[{"key": f"h{n}", "value": bytes(1000)} for n in range(n % 5)] for n in range(3000)]
    with DirectoryLog(tmp_path) as engine:
        engine.create_topic("t", 1, {"cleanup.policy": "delete", "max.message.bytes": "99999999"})
        table = pa.table(
            {"value": pa.array([b""] * 3000, pa.binary()), "headers": pa.array(headers, HEADERS)}
        )
        engine.append("t", table, now_ms=1, batch_size=32 << 20)

    found = read(tmp_path)

    assert all(batch.nbytes <= ARROW_SIZE for batch in found)
    assert [h for b in found for h in b.column("headers").to_pylist()] == [
        h or None for h in headers
    ]


@pytest.mark.parametrize("max_bytes", [1, 100, 1000, 10**9])
def test_any_bound_keeps_rows_and_order(tmp_path: Path, max_bytes: int) -> None:
    values: list[bytes | None] = [bytes(n % 40) if n % 7 else None for n in range(200)]
    log_of(tmp_path, values)
    rows = None
    with DirectoryLog(tmp_path, read_only=True) as engine, engine.snapshot("t", 0) as snapshot:
        for chunk in snapshot.chunks(0, 200):
            for run, records in chunk.runs(chunk.table.attributes & layout.CONTROL_BIT == 0):
                rows = np.flatnonzero(records.value_sizes >= 0)
                found = list(
                    arrow_batches(
                        records, run.table, rows, ("t", 0), schema=SCHEMA, max_bytes=max_bytes
                    )
                )
    assert [v for b in found for v in b.column("value").to_pylist()] == [
        v for v in values if v is not None
    ]
    assert max_bytes > 1 or all(batch.num_rows == 1 for batch in found)


def test_no_rows_make_no_batch(tmp_path: Path) -> None:
    log_of(tmp_path, [b"x"])
    with DirectoryLog(tmp_path, read_only=True) as engine, engine.snapshot("t", 0) as snapshot:
        assert list(snapshot.read(0, 1, schema=SCHEMA, keys=ChosenKeys([b"k"]))) == []
