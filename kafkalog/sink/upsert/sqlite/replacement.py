"""The replacement of all rows of an SQLite table, in a transaction of the caller.

Columns that the upsert does not write keep their values as long as the key stays. For that the new
rows wait in a temporary table until all of them are known. They are inserted into an empty table,
so that no old row blocks a unique value.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from kafkalog.errors import InvalidInputError
from kafkalog.sink.upsert.sqlite.table import LEADING, ROW_FAULTS, SQLiteTable, quoted, values_of

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["replace_rows"]

_AT_ONCE = 10_000
"""Rows in one statement; if one does not fit, they are tried one by one."""
_RECORD = ("kl_topic", "kl_partition", "kl_offset")


def replace_rows(table: SQLiteTable, driver_batches: Iterable[pa.RecordBatch]) -> None:
    """Make these rows the table's; raises InvalidInputError that names a record."""
    others = table.others()
    if others and table.has_rows():
        waiting = _WaitingRows(table, others)
        for driver_batch in driver_batches:
            table.write(driver_batch, waiting.put)
        waiting.keep_others()
        table.clear()
        waiting.move()
    else:
        table.clear()
        for driver_batch in driver_batches:
            table.write(driver_batch)


class _WaitingRows:
    """New rows, and values of old rows to keep, in temporary tables without column types."""

    def __init__(self, table: SQLiteTable, others: Sequence[str]) -> None:
        self._table = table
        self._connection = table.connection
        self._others = others
        names = [quoted(name) for name in table.names]
        kept = [f"kl_{number}" for number in range(len(others))]
        self._connection.execute(
            "CREATE TEMP TABLE kafkalog_rows (kl_number INTEGER PRIMARY KEY, "
            f"{', '.join([*_RECORD, *names])})"
        )
        self._connection.execute(
            f"CREATE TEMP TABLE kafkalog_others (kl_number INTEGER PRIMARY KEY, {', '.join(kept)})"
        )
        marks = ", ".join("?" for _ in [*_RECORD, *names])
        self._insert = (
            f"INSERT INTO temp.kafkalog_rows ({', '.join([*_RECORD, *names])}) VALUES ({marks})"
        )
        into, mine = f"INSERT INTO {quoted(table.name)}", [f"mine.{name}" for name in names]
        self._move_staying = (
            f"{into} ({', '.join([*names, *map(quoted, others)])}) "
            f"SELECT {', '.join([*mine, *kept])} FROM temp.kafkalog_rows AS mine "
            "JOIN temp.kafkalog_others AS theirs ON theirs.kl_number = mine.kl_number "
            f"WHERE mine.kl_number BETWEEN ? AND ? {table.on_conflict}"
        )
        self._move_new = (
            f"{into} ({', '.join(names)}) SELECT {', '.join(mine)} FROM temp.kafkalog_rows AS mine "
            "WHERE mine.kl_number BETWEEN ? AND ? AND NOT EXISTS (SELECT 1 FROM "
            "temp.kafkalog_others AS theirs WHERE theirs.kl_number = mine.kl_number) "
            f"{table.on_conflict}"
        )

    def put(self, driver_batch: pa.RecordBatch) -> None:
        import pyarrow.compute as pc

        stored = driver_batch.filter(pc.invert(driver_batch.column(0)))
        columns = [*stored.columns[1 : 1 + len(_RECORD)], *stored.columns[LEADING:]]
        values = map(values_of, [*_RECORD, *self._table.names], columns)
        self._connection.executemany(self._insert, zip(*values, strict=True))

    def keep_others(self) -> None:
        """Save the values of columns that the upsert does not write, for keys that stay."""
        columns = ", ".join(f"theirs.{quoted(name)}" for name in self._others)
        self._connection.execute(
            f"INSERT INTO temp.kafkalog_others SELECT mine.kl_number, {columns} "
            # A cross join reads the left table first, and finds each key by the right one's index.
            f"FROM temp.kafkalog_rows AS mine CROSS JOIN {quoted(self._table.name)} AS theirs "
            'ON theirs."key" = mine."key" COLLATE BINARY'
        )

    def move(self) -> None:
        """Insert all rows, those of old keys first, since a column of others may number rows."""
        (count,) = self._connection.execute(
            "SELECT coalesce(max(kl_number), 0) FROM temp.kafkalog_rows"
        ).fetchone()
        for statement in (self._move_staying, self._move_new):
            for first in range(1, count + 1, _AT_ONCE):
                last = first + _AT_ONCE - 1
                try:
                    self._connection.execute(statement, (first, last))
                except ROW_FAULTS as fault:
                    self._raise_for_row(statement, range(first, last + 1))
                    raise InvalidInputError(f"{self._table.where}: {fault}") from fault

    def _raise_for_row(self, statement: str, numbers: range) -> None:
        for number in numbers:
            try:
                self._connection.execute(statement, (number, number))
            except ROW_FAULTS as fault:
                topic, partition, offset = self._connection.execute(
                    f"SELECT {', '.join(_RECORD)} FROM temp.kafkalog_rows WHERE kl_number = ?",
                    (number,),
                ).fetchone()
                raise self._table.misfit(topic, partition, offset, fault) from fault
