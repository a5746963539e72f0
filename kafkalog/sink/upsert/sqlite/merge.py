"""From staged rows to the SQLite table, in the caller's transaction: one statement for all rows.

Rows are inserted in the order of their keys, as the index of a large table is then written once. If
a statement fails, ever smaller pieces of the rows are tried, until one row is left to blame. It
fails the merge, or it is left out. An earlier record of its key then counts as the latest, so the
staging file must have all records, and the merge chooses among them. It tries the earlier records
of all refused keys at once, and then starts again with those that the table takes.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kafkalog.errors import InvalidInputError
from kafkalog.sink.upsert.bad_records import Refusal
from kafkalog.sink.upsert.latest import Version, newest_first
from kafkalog.sink.upsert.rows import DELETED
from kafkalog.sink.upsert.sqlite.staging_file import NUMBER, ORIGIN, ROWS, TIME, misfit
from kafkalog.sink.upsert.sqlite.table import SQLiteTable, quoted

__all__ = ["SQLiteMerge"]

_ROW_FAULTS = (sqlite3.IntegrityError, sqlite3.DataError)
"""Faults that a single row causes."""
_SOURCE = f"kafkalog_staged.{ROWS}"
_OTHERS = "temp.kafkalog_others"
_LATEST = "temp.kafkalog_latest"
"""The numbers of the rows that count, if others are staged too."""


class SQLiteMerge:
    """The merge of the rows of a staging file into a table.

    With `leaves_out` the file has all records, and those that the table refuses are left out.
    Without it, the file has the latest record of each key.
    """

    def __init__(self, table: SQLiteTable, staging_file: Path, *, leaves_out: bool = False) -> None:
        self._table = table
        self._leaves_out = leaves_out
        self._refused: dict[int, Refusal] = {}
        self._connection = table.connection
        self._connection.execute("ATTACH ? AS kafkalog_staged", (str(staging_file),))
        self._names = [quoted(name) for name in table.names]
        self._keys = [quoted(name) for name in table.keys]
        updates = [f"{name} = excluded.{name}" for name in self._names if name not in self._keys]
        self._on_conflict = (
            f"ON CONFLICT ({', '.join(self._keys)}) DO "
            f"{'UPDATE SET ' + ', '.join(updates) if updates else 'NOTHING'}"
        )
        only = f" AND mine.{NUMBER} IN {_LATEST}" if leaves_out else ""
        self._deletions = f"mine.{DELETED}{only}"
        self._rows = f"NOT mine.{DELETED}{only}"
        self._some = f"mine.{NUMBER} BETWEEN ?1 AND ?2"

    def run(self, *, is_replacing: bool) -> list[Refusal]:
        """Delete and upsert the rows, or make them the table's; return what was left out.

        Raises InvalidInputError that names a record.
        """
        apply = self._replace if is_replacing else self._upsert
        if not self._leaves_out:
            apply()
            return []
        known = -1
        while known < len(self._refused):
            known = len(self._refused)
            self._connection.execute("SAVEPOINT kafkalog_merge")
            self._choose()
            apply()
            if known < len(self._refused):
                self._try_earlier(list(self._refused)[known:])
                self._connection.execute("ROLLBACK TO kafkalog_merge")
            self._connection.execute("RELEASE kafkalog_merge")
        return list(self._refused.values())

    def _choose(self) -> None:
        """Choose the latest record of each key, as `latest_rows` does, among those not refused."""
        key = ", ".join(self._keys)
        self._connection.execute(
            f"CREATE TEMP TABLE kafkalog_refused ({NUMBER} INTEGER PRIMARY KEY)"
        )
        self._connection.executemany(
            "INSERT INTO temp.kafkalog_refused VALUES (?)", [(number,) for number in self._refused]
        )
        self._connection.execute(
            f"CREATE TEMP TABLE kafkalog_latest ({NUMBER} INTEGER PRIMARY KEY)"
        )
        self._connection.execute(
            f"INSERT INTO {_LATEST} SELECT {NUMBER} FROM ("
            f"SELECT {NUMBER}, row_number() OVER (PARTITION BY {key} "
            f"ORDER BY {TIME} DESC, kl_topic DESC, kl_partition DESC) AS kl_rank FROM ("
            f"SELECT *, row_number() OVER (PARTITION BY {key}, kl_topic, kl_partition "
            f"ORDER BY kl_offset DESC) AS kl_age FROM {_SOURCE} "
            f"WHERE {NUMBER} NOT IN temp.kafkalog_refused) WHERE kl_age = 1) WHERE kl_rank = 1"
        )
        self._connection.execute("DROP TABLE temp.kafkalog_refused")

    def _try_earlier(self, refused: Sequence[int]) -> None:
        """Find the record of each refused key that the table takes; refuse the later ones."""
        key = ", ".join(self._keys)
        self._connection.execute(f"CREATE TEMP TABLE kafkalog_keys ({key})")
        self._connection.executemany(
            f"INSERT INTO temp.kafkalog_keys SELECT {key} FROM {_SOURCE} WHERE {NUMBER} = ?",
            [(number,) for number in refused],
        )
        versions: dict[tuple[Any, ...], list[Version]] = {}
        for *found, topic, partition, offset, time, number in self._connection.execute(
            f"SELECT {key}, {', '.join(ORIGIN)}, {TIME}, {NUMBER} FROM {_SOURCE} "
            f"WHERE ({key}) IN (SELECT {key} FROM temp.kafkalog_keys)"
        ).fetchall():
            if number not in self._refused:
                version = Version(topic, partition, offset, time, number)
                versions.setdefault(tuple(found), []).append(version)
        for of_key in versions.values():
            for version in newest_first(of_key):
                self._connection.execute(f"INSERT INTO {_LATEST} VALUES (?)", (version.number,))
                for statement in (self._deletion(), self._insertion()):
                    self._apply_some(statement, version.number, version.number)
                if version.number not in self._refused:
                    break

    def _upsert(self) -> None:
        self._apply(self._deletion())
        self._insert()

    def _deletion(self) -> str:
        keys = ", ".join(self._keys)
        deleted = f"SELECT {keys} FROM {_SOURCE} AS mine WHERE {self._some} AND {self._deletions}"
        # BINARY whatever collation a column declares: "A" is not "a" in a log.
        exactly = ", ".join(f"{key} COLLATE BINARY" for key in self._keys)
        wanted = f"({exactly}) IN ({deleted})"
        if len(self._keys) > 1:  # SQLite finds several columns by their index only as they are
            wanted = f"({keys}) IN ({deleted}) AND {wanted}"
        return f"DELETE FROM {quoted(self._table.name)} WHERE {wanted}"

    def _replace(self) -> None:
        """Make the rows the table's.

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
        same = " AND ".join(f"theirs.{key} = mine.{key} COLLATE BINARY" for key in self._keys)
        self._connection.execute(
            f"CREATE TEMP TABLE kafkalog_others ({NUMBER} INTEGER PRIMARY KEY, {kept})"
        )
        self._connection.execute(
            f"INSERT INTO {_OTHERS} SELECT mine.{NUMBER}, {columns} "
            # A cross join reads the left table first, and finds each key by the right one's index.
            f"FROM {_SOURCE} AS mine CROSS JOIN {quoted(self._table.name)} AS theirs "
            f"ON {same} WHERE {self._rows}"
        )

    def _insert(self, others: Sequence[str] = (), join: str = "", only: str = "") -> None:
        self._apply(self._insertion(others, join, only))

    def _insertion(self, others: Sequence[str] = (), join: str = "", only: str = "") -> str:
        into = ", ".join([*self._names, *map(quoted, others)])
        kept = [f"theirs.kl_{number}" for number in range(len(others))]
        values = ", ".join([*(f"mine.{name}" for name in self._names), *kept])
        order = ", ".join(f"mine.{key}" for key in self._keys)
        return (
            f"INSERT INTO {quoted(self._table.name)} ({into}) SELECT {values} "
            f"FROM {_SOURCE} AS mine {join} WHERE {self._some} AND {self._rows} {only} "
            f"ORDER BY {order} {self._on_conflict}"
        )

    def _apply(self, statement: str) -> None:
        """Run a statement on all rows; its two parameters are the first and the last number."""
        (last,) = self._connection.execute(
            f"SELECT coalesce(max({NUMBER}), 0) FROM {_SOURCE}"
        ).fetchone()
        self._apply_some(statement, 1, last)

    def _apply_some(self, statement: str, first: int, last: int) -> None:
        """Run a statement on a piece of the rows, or on ever smaller ones."""
        try:
            self._connection.execute(statement, (first, last))
        except _ROW_FAULTS as fault:
            if not self._connection.in_transaction:  # a trigger has rolled it back
                raise InvalidInputError(f"{self._table.where}: {fault}") from fault
            if first == last:
                self._refuse(first, fault)
                return
            middle = (first + last) // 2
            self._apply_some(statement, first, middle)
            self._apply_some(statement, middle + 1, last)

    def _refuse(self, number: int, fault: sqlite3.Error) -> None:
        """Leave out the row of this number; raise InvalidInputError unless the merge may."""
        topic, partition, offset = self._connection.execute(
            f"SELECT {', '.join(ORIGIN)} FROM {_SOURCE} WHERE {NUMBER} = ?", (number,)
        ).fetchone()
        refusal = Refusal(topic, partition, offset, str(fault))
        if not self._leaves_out:
            raise misfit(self._table.where, refusal) from fault
        self._refused[number] = refusal
