"""Versions of rows in SQLite: an older row changes nothing, whenever it comes.

The table itself has the versions of its rows. The table `kafkalog_deletions_<table>` keeps the
versions of deleted rows for a while. It changes in the transaction of the merge.
"""

from __future__ import annotations

from kafkalog.sink.upsert.rows import DELETED
from kafkalog.sink.upsert.sqlite.staging_file import ROWS
from kafkalog.sink.upsert.sqlite.table import SQLiteTable, quoted

_SOURCE = f"kafkalog_staged.{ROWS}"


class SQLiteVersions:
    """The versions of a table's rows, by the column `version`, with a staging file attached."""

    def __init__(self, table: SQLiteTable, version: str) -> None:
        self._execute = table.connection.execute
        self._table = quoted(table.name)
        self._deletions = quoted(f"kafkalog_deletions_{table.name}")
        self._version = quoted(version)
        self._names = list(map(quoted, table.keys))
        self._keys = ", ".join(self._names)

    def forget(self) -> None:
        """Forget the versions of deleted rows: the table begins again."""
        self._execute(f"DROP TABLE IF EXISTS {self._deletions}")

    def leave_out_older(self, *, is_replacing: bool) -> None:
        """Drop the staged rows whose key has, or had, a larger version.

        If all rows are replaced, no row is older.
        """
        self._execute(
            f"CREATE TABLE IF NOT EXISTS {self._deletions} "
            f"({self._keys}, kl_version, kl_time_ms, PRIMARY KEY ({self._keys}))"
        )
        if is_replacing:
            return
        self._execute(
            f"DELETE FROM {_SOURCE} AS mine WHERE EXISTS (SELECT 1 {self._of_mine(self._table)} "
            f"AND kept.{self._version} > mine.{self._version}) OR EXISTS (SELECT 1 "
            f"{self._of_mine(self._deletions)} AND kept.kl_version > mine.{self._version})"
        )

    def remember(self, now_ms: int, retention_ms: int) -> None:
        """Remember the versions of rows that the merge has deleted; forget old ones."""
        has_row = f"EXISTS (SELECT 1 {self._of_mine(self._table)})"
        mine = ", ".join(f"mine.{name}" for name in self._names)
        self._execute(
            f"INSERT OR REPLACE INTO {self._deletions} ({self._keys}, kl_version, kl_time_ms) "
            f"SELECT {mine}, mine.{self._version}, ? FROM {_SOURCE} AS mine "
            f"WHERE mine.{DELETED} AND NOT {has_row}",
            (now_ms,),
        )
        self._execute(
            f"DELETE FROM {self._deletions} WHERE kl_time_ms < ? OR ({self._keys}) IN "
            f"(SELECT {mine} FROM {_SOURCE} AS mine WHERE NOT mine.{DELETED} AND {has_row})",
            (now_ms - retention_ms,),
        )

    def _of_mine(self, table: str) -> str:
        same = " AND ".join(f"kept.{name} = mine.{name} COLLATE BINARY" for name in self._names)
        return f"FROM {table} AS kept WHERE {same}"
