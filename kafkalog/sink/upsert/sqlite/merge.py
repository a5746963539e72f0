"""From staged rows to the SQLite table, in the caller's transaction: one statement for all rows.

Rows are inserted in the order of their keys, as the index of a large table is then written once. If
a statement fails, ever smaller pieces of the rows are tried, until one row is left to blame.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from pathlib import Path

from kafkalog.errors import InvalidInputError
from kafkalog.sink.upsert.rows import DELETED
from kafkalog.sink.upsert.sqlite.staging_file import NUMBER, ORIGIN, ROWS, misfit
from kafkalog.sink.upsert.sqlite.table import SQLiteTable, quoted

__all__ = ["SQLiteMerge"]

_ROW_FAULTS = (sqlite3.IntegrityError, sqlite3.DataError)
"""Faults that a single row causes."""
_SOURCE = f"kafkalog_staged.{ROWS}"
_OTHERS = "temp.kafkalog_others"


class SQLiteMerge:
    """The merge of the rows of a staging file into a table."""

    def __init__(self, table: SQLiteTable, staging_file: Path) -> None:
        self._table = table
        self._connection = table.connection
        self._connection.execute("ATTACH ? AS kafkalog_staged", (str(staging_file),))
        self._names = [quoted(name) for name in table.names]
        updates = ", ".join(f"{name} = excluded.{name}" for name in self._names if name != '"key"')
        self._on_conflict = (
            f'ON CONFLICT ("key") DO {"UPDATE SET " + updates if updates else "NOTHING"}'
        )
        self._some = f"mine.{NUMBER} BETWEEN ? AND ? AND NOT mine.{DELETED}"

    def run(self) -> None:
        """Delete and upsert the rows; raises InvalidInputError that names a record."""
        # BINARY whatever collation the column declares: "A" is not "a" in a log.
        self._apply(
            f'DELETE FROM {quoted(self._table.name)} WHERE "key" COLLATE BINARY IN '
            f'(SELECT "key" FROM {_SOURCE} WHERE {NUMBER} BETWEEN ? AND ? AND {DELETED})'
        )
        self._insert()

    def replace(self) -> None:
        """Make the rows the table's; raises InvalidInputError that names a record.

        Columns that the upsert does not write keep their values as long as the key stays. The rows
        are inserted into an empty table, so that no old row blocks a unique value.
        """
        others = self._table.others()
        if not others or not self._table.has_rows():
            self._table.clear()
            self._insert()
            return
        self._keep(others)
        self._table.clear()
        # Rows of old keys first, since a column of others may number the rows.
        self._insert(others, f"JOIN {_OTHERS} AS theirs ON theirs.{NUMBER} = mine.{NUMBER}")
        is_old = f"SELECT 1 FROM {_OTHERS} AS theirs WHERE theirs.{NUMBER} = mine.{NUMBER}"
        self._insert(only=f"AND NOT EXISTS ({is_old})")

    def _keep(self, others: Sequence[str]) -> None:
        """Save the values of columns that the upsert does not write, for keys that stay."""
        kept = ", ".join(f"kl_{number}" for number in range(len(others)))
        columns = ", ".join(f"theirs.{quoted(name)}" for name in others)
        self._connection.execute(
            f"CREATE TEMP TABLE kafkalog_others ({NUMBER} INTEGER PRIMARY KEY, {kept})"
        )
        self._connection.execute(
            f"INSERT INTO {_OTHERS} SELECT mine.{NUMBER}, {columns} "
            # A cross join reads the left table first, and finds each key by the right one's index.
            f"FROM {_SOURCE} AS mine CROSS JOIN {quoted(self._table.name)} AS theirs "
            f'ON theirs."key" = mine."key" COLLATE BINARY WHERE NOT mine.{DELETED}'
        )

    def _insert(self, others: Sequence[str] = (), join: str = "", only: str = "") -> None:
        into = ", ".join([*self._names, *map(quoted, others)])
        kept = [f"theirs.kl_{number}" for number in range(len(others))]
        values = ", ".join([*(f"mine.{name}" for name in self._names), *kept])
        self._apply(
            f"INSERT INTO {quoted(self._table.name)} ({into}) "
            f"SELECT {values} FROM {_SOURCE} AS mine {join} WHERE {self._some} {only} "
            f'ORDER BY mine."key" {self._on_conflict}'
        )

    def _apply(self, statement: str) -> None:
        """Run a statement on all rows; its two parameters are the first and the last number."""
        (last,) = self._connection.execute(
            f"SELECT coalesce(max({NUMBER}), 0) FROM {_SOURCE}"
        ).fetchone()
        try:
            self._connection.execute(statement, (1, last))
        except _ROW_FAULTS as fault:
            if self._connection.in_transaction:  # else a trigger has rolled it back
                self._blame(statement, 1, last)
            raise InvalidInputError(f"{self._table.where}: {fault}") from fault

    def _blame(self, statement: str, first: int, last: int) -> None:
        """Apply rows; raise InvalidInputError for the first that does not fit."""
        try:
            self._connection.execute(statement, (first, last))
        except _ROW_FAULTS as fault:
            if not self._connection.in_transaction:  # a trigger has rolled it back
                raise InvalidInputError(f"{self._table.where}: {fault}") from fault
            if first == last:
                record = self._connection.execute(
                    f"SELECT {', '.join(ORIGIN)} FROM {_SOURCE} WHERE {NUMBER} = ?", (first,)
                ).fetchone()
                raise misfit(self._table.where, record, fault) from fault
            middle = (first + last) // 2
            self._blame(statement, first, middle)
            self._blame(statement, middle + 1, last)
