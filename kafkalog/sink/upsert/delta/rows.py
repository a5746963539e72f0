"""The rows of a micro-batch on their way into a Delta table."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain
from typing import TYPE_CHECKING

from kafkalog.errors import InvalidInputError
from kafkalog.sink.upsert.delta.columns import DeltaColumns, record_of

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["KEY_COUNT", "FittingRows", "RepeatableRows"]

KEY_COUNT = "kl_count"
"""A last column of rows whose keys may not be unique: the number of rows with the row's key."""
_IN_MEMORY_SIZE = 16 << 20


class RepeatableRows:
    """Rows that are read once per attempt to commit.

    Up to 16 MiB are kept in memory; more are asked of Spark again.
    """

    def __init__(self, portions: Callable[[], Iterator[pa.RecordBatch]]) -> None:
        self._portions = portions
        self._kept: list[pa.RecordBatch] | None = None

    @property
    def are_none(self) -> bool:
        """Whether a `read` has found no rows at all."""
        return self._kept == []

    def read(self) -> Iterator[pa.RecordBatch]:
        """Return the rows; the first of them are there when this returns."""
        if self._kept is not None:
            return iter(self._kept)
        following = self._portions()
        first, size = [], 0
        for portion in following:
            if portion.num_rows:
                first.append(portion)
                size += portion.nbytes
            if size > _IN_MEMORY_SIZE:
                return chain(first, following)
        self._kept = first
        return iter(first)


class FittingRows:
    """Rows, brought to a table's types while Delta reads them."""

    def __init__(self, target: DeltaColumns, portions: Iterator[pa.RecordBatch]) -> None:
        self._target = target
        self._portions = portions
        self.fault: BaseException | None = None
        """What went wrong with the rows; Delta's own error then only quotes it."""

    def as_changes(self) -> pa.RecordBatchReader:
        """Return `kl_deleted` and the columns that the rows have, in the table's types."""
        return _reader(self._target.schema, self._fitting())

    def as_table(self, schema: pa.Schema) -> pa.RecordBatchReader:
        """Return the rows that are no deletions, with all columns of the table's `schema`."""
        return _reader(schema, self._stored(schema))

    def _fitting(self) -> Iterator[pa.RecordBatch]:
        try:
            for portion in self._portions:
                self._check_keys(portion)
                yield from self._target.fit(portion)
        except BaseException as fault:
            self.fault = fault
            raise

    def _stored(self, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
        import pyarrow as pa

        given = self._target.names
        for rows in self._fitting():
            if not rows.column(0)[0].as_py():
                columns = [
                    rows.column(given.index(field.name) + 1)
                    if field.name in given
                    else pa.nulls(rows.num_rows, field.type)
                    for field in schema
                ]
                yield pa.RecordBatch.from_arrays(columns, schema=schema)

    def _check_keys(self, portion: pa.RecordBatch) -> None:
        import pyarrow.compute as pc

        if portion.schema.names[-1] != KEY_COUNT:
            return
        doubled = pc.greater(portion.column(portion.num_columns - 1), 1)
        row = doubled.index(True).as_py()
        if row >= 0:
            raise InvalidInputError(
                f"{record_of(portion, row)}: {self._target.where}: select makes one key of several "
                "keys of the log; make it one-to-one with the record's key"
            )


def _reader(schema: pa.Schema, batches: Iterator[pa.RecordBatch]) -> pa.RecordBatchReader:
    import pyarrow as pa

    return pa.RecordBatchReader.from_batches(schema, batches)
