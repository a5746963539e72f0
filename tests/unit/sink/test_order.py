"""in_order: what one task does with its rows."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import types

from kafkalog.errors import InvalidInputError
from kafkalog.sink.order import in_order, sorted_batches


def batches(rows: list[tuple[object, ...]], size: int = 3) -> list[pa.RecordBatch]:
    names = ["seq", "key", "part"][: len(rows[0])]
    return [
        pa.RecordBatch.from_pylist(
            [dict(zip(names, row, strict=True)) for row in rows[start : start + size]]
        )
        for start in range(0, len(rows), size)
    ]


def test_rows_of_several_batches_are_sorted_together() -> None:
    rows = [(seq, f"k{seq % 7}") for seq in range(100)]
    shuffled = random.Random(1).sample(rows, len(rows))
    table = pa.Table.from_batches(sorted_batches(batches(shuffled), ["seq"]))
    assert [tuple(row.values()) for row in table.to_pylist()] == rows


def test_output_batches_are_bounded_by_rows_and_by_bytes() -> None:
    rows = [(seq, "k" * 100) for seq in range(50)]
    by_rows = list(sorted_batches(batches(rows), ["seq"], rows_max=8))
    assert max(batch.num_rows for batch in by_rows) == 8
    by_bytes = list(sorted_batches(batches(rows), ["seq"], bytes_max=500))
    assert max(batch.nbytes for batch in by_bytes) <= 600
    assert sum(batch.num_rows for batch in by_bytes) == 50


def test_nulls_come_first_and_ties_are_broken_by_the_next_column() -> None:
    rows: list[tuple[object, ...]] = [(2, "a", 2), (None, "b", 1), (2, "c", 1), (1, "d", None)]
    table = pa.Table.from_batches(sorted_batches(batches(rows, 10), ["seq", "part"]))
    assert table.column("key").to_pylist() == ["b", "d", "c", "a"]


def test_no_rows_give_no_batches() -> None:
    assert list(sorted_batches([], ["seq"])) == []


def test_intervals_of_months_are_refused_by_name() -> None:
    schema = types.StructType().add("key", "string").add("age", types.YearMonthIntervalType())
    frame: Any = SimpleNamespace(schema=schema)
    with pytest.raises(InvalidInputError, match="by='age': Spark cannot hand interval year to"):
        in_order(frame, by="age")
    with pytest.raises(InvalidInputError, match="column 'age': Spark cannot hand interval year to"):
        in_order(frame, by="key")
