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
"""The last column of rows whose keys may repeat: the number of rows with the row's key."""
_IN_MEMORY_SIZE = 16 << 20


class RepeatableRows:
    """Rows for several attempts: up to 16 MiB are kept in memory, more are computed again."""

    def __init__(self, driver_batches: Callable[[], Iterator[pa.RecordBatch]]) -> None:
        self._driver_batches = driver_batches
        self._kept: list[pa.RecordBatch] | None = None

    @property
    def are_none(self) -> bool:
        """Whether a `read` has found no rows at all."""
        return self._kept == []

    def read(self) -> Iterator[pa.RecordBatch]:
        """Return the rows; the first of them have been computed when this returns."""
        if self._kept is not None:
            return iter(self._kept)
        following = self._driver_batches()
        first, size = [], 0
        for driver_batch in following:
            if driver_batch.num_rows:
                first.append(driver_batch)
                size += driver_batch.nbytes
            if size > _IN_MEMORY_SIZE:
                return chain(first, following)
        self._kept = first
        return iter(first)


class FittingRows:
    """Rows that are cast to a table's types while Delta reads them."""

    def __init__(self, target: DeltaColumns, driver_batches: Iterator[pa.RecordBatch]) -> None:
        self._target = target
        self._driver_batches = driver_batches
        self.fault: BaseException | None = None
        """The fault in the rows; Delta's own error only quotes it."""

    def as_changes(self) -> pa.RecordBatchReader:
        """Return `kl_deleted` and the columns that the rows have, in the table's types."""
        return _reader(self._target.schema, self._fitting())

    def as_table(self, schema: pa.Schema) -> pa.RecordBatchReader:
        """Return the rows that are not deletions, with all columns of the table's `schema`."""
        return _reader(schema, self._stored(schema))

    def _fitting(self) -> Iterator[pa.RecordBatch]:
        try:
            for driver_batch in self._driver_batches:
                self._check_keys(driver_batch)
                yield from self._target.fit(driver_batch)
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

    def _check_keys(self, driver_batch: pa.RecordBatch) -> None:
        import pyarrow.compute as pc

        if driver_batch.schema.names[-1] != KEY_COUNT:
            return
        doubled = pc.greater(driver_batch.column(driver_batch.num_columns - 1), 1)
        row = doubled.index(True).as_py()
        if row >= 0:
            raise InvalidInputError(
                f"{record_of(driver_batch, row)}: {self._target.where}: select makes one key of "
                "several keys of the log; make it one-to-one with the record's key"
            )


def _reader(schema: pa.Schema, batches: Iterator[pa.RecordBatch]) -> pa.RecordBatchReader:
    import pyarrow as pa

    return pa.RecordBatchReader.from_batches(schema, batches)
