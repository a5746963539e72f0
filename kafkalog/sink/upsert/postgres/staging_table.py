"""Rows on their way into PostgreSQL: Arrow columns in a staging table, by ADBC's binary COPY.

The columns of the table have the types of the rows. The merge turns them into the types of the
upsert's table.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kafkalog.sink.upsert.kept_values import KEPT
from kafkalog.sink.upsert.postgres.client import is_row_fault, sql_name
from kafkalog.sink.upsert.postgres.misfit import Misfit
from kafkalog.sink.upsert.postgres.plain_arrays import repeated
from kafkalog.sink.upsert.rows import DELETED, RECORD

if TYPE_CHECKING:
    import pyarrow as pa
    from psycopg.sql import Identifier

    from kafkalog.sink.upsert.postgres.arrow_connection import ArrowConnection
    from kafkalog.sink.upsert.postgres.table import Column


ATTEMPT = "kl_attempt"
"""The staged column with the task attempt that wrote a row."""
_PIECE_SIZE = 4 << 20
_YEARS = (-719_162, 11_248_738)
"""Days from 1970 to the years 1 and 32768, between which Arrow and PostgreSQL agree."""
_PER_DAY = {"s": 86_400, "ms": 86_400_000, "us": 86_400_000_000, "ns": 86_400_000_000_000}


class RefusedRowsError(Exception):
    """PostgreSQL cannot store one of the rows; the message says why."""


def pieces(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Yield the rows in non-empty pieces of a few MiB, so that ADBC's copy of them is small."""
    for batch in batches:
        count = max(1, batch.num_rows * _PIECE_SIZE // max(1, batch.nbytes))
        for start in range(0, batch.num_rows, count):
            yield batch.slice(start, count)


@dataclass(frozen=True, slots=True)
class StagingTable:
    """A table with the columns of `UpsertRows`, and the attempt."""

    schema: str
    name: str
    columns: tuple[Column, ...]
    """The table's own columns, without those that name a row's record."""
    keys: tuple[str, ...] = ("key",)
    """Those of the table's key."""
    keeps: bool = False
    """Whether a row may lack values that the table keeps; it then has a column `KEPT`."""

    @property
    def names(self) -> list[str]:
        """The columns of the rows, as they come."""
        kept = [KEPT] if self.keeps else []
        return [DELETED, *RECORD, *kept, *(column.name for column in self.columns)]

    @property
    def identifier(self) -> Identifier:
        """The table in SQL."""
        return sql_name(self.schema, self.name)

    def ingest(
        self, connection: ArrowConnection, batches: Sequence[pa.RecordBatch], attempt: int
    ) -> None:
        """Copy rows in the caller's transaction; raises RefusedRowsError."""
        import pyarrow as pa
        from adbc_driver_manager import Error

        for batch in batches:
            for name, column in zip(batch.schema.names, batch.columns, strict=True):
                if name != "kl_timestamp":  # the table does not store the record's time
                    _check_years(column)
        marked = [
            batch.append_column(ATTEMPT, repeated(attempt, batch.num_rows)) for batch in batches
        ]
        try:
            connection.ingest(self.schema, self.name, pa.Table.from_batches(marked))
        except Error as fault:
            if not is_row_fault(fault.sqlstate):
                raise
            raise RefusedRowsError(_message(fault)) from fault

    def misfit(self, connection: ArrowConnection, row: pa.Table, reason: str) -> Misfit:
        """Return the one row that cannot be copied for this `reason`, with its column."""
        for column in self.columns:
            try:
                with connection.transaction(force_rollback=True):
                    self.ingest(connection, row.select([column.name]).to_batches(), 0)
            except RefusedRowsError as refused:
                reason = f'column "{column.name}": {refused}'
                break
        topic, partition, offset = (row.column(name)[0].as_py() for name in list(RECORD)[:3])
        keys = None if offset is not None else [_value(row, name) for name in self.keys]
        return Misfit(
            topic, partition, offset, keys[0] if keys and len(keys) == 1 else keys, reason
        )


def _message(fault: Any) -> str:
    """Return PostgreSQL's own message, without what ADBC puts around it."""
    for name, value in fault.details or ():
        if name in {"PG_DIAG_MESSAGE_PRIMARY", b"PG_DIAG_MESSAGE_PRIMARY"}:
            return bytes(value).decode("utf-8", "replace")
    return str(fault)


def _check_years(column: pa.Array) -> None:
    """Raise RefusedRowsError for a time that PostgreSQL would take for another one."""
    import pyarrow as pa
    import pyarrow.compute as pc

    kind = column.type
    if pa.types.is_date32(kind):
        numbers, per_day, unit = pc.cast(column, pa.int32()), 1, "days"
    elif pa.types.is_timestamp(kind):
        numbers, per_day, unit = pc.cast(column, pa.int64()), _PER_DAY[kind.unit], kind.unit
    else:
        return
    ends = pc.min_max(numbers).as_py()
    first, end = (day * per_day for day in _YEARS)
    for found in (ends["min"], ends["max"]):
        if found is not None and not first <= found < end:
            raise RefusedRowsError(
                f"the time {found} {unit} from 1970 is outside the years 1 to 32767"
            )


def _value(row: pa.Table, name: str) -> object:
    """Return a value of the one row, as bytes if it is text that is not UTF-8."""
    import pyarrow as pa

    column = row.column(name)
    try:
        return column[0].as_py()
    except UnicodeDecodeError:
        return column.cast(pa.binary())[0].as_py()
