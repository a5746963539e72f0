"""Versions of rows in PostgreSQL: an older row changes nothing, whenever it comes.

The table itself has the versions of its rows. A table `kafkalog_deletions_...` in the same schema
keeps the versions of deleted rows for a while. It changes in the transaction of the merge.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kafkalog.errors import InvalidInputError
from kafkalog.sink.upsert.postgres.client import run, sql_name

if TYPE_CHECKING:
    import psycopg
    from psycopg.sql import Composed, Identifier

    from kafkalog.sink.upsert.postgres.table import Column, PostgresTable

    Connection = psycopg.Connection[tuple[Any, ...]]

_ORDERED = ("smallint", "integer", "bigint", "numeric", "date", "timestamp")
"""The types whose values have the order of the rows' versions."""


@dataclass(frozen=True, slots=True)
class PostgresVersions:
    """The versions of a table's rows, by one of its columns."""

    table: PostgresTable
    version: str

    @classmethod
    def prepare(
        cls, connection: Connection, table: PostgresTable, version: str, columns: Sequence[Column]
    ) -> PostgresVersions:
        """Create the table of deletions if it is missing.

        Raises InvalidInputError if the column has another order than the versions.
        """
        from psycopg.sql import SQL

        (kind,) = (column.kind for column in columns if column.name == version)
        if not kind.startswith(_ORDERED):
            raise InvalidInputError(
                f'table {table}: column "{version}" is {kind} (expected a whole number, a date or '
                "a timestamp, to compare versions). Change its type, or name another column."
            )
        found = cls(table, version)
        keys, key = table.key(), table.key("kept.{}")
        with connection.transaction():
            table.lock(connection)
            if table.oid(connection, table.deletions) is not None:
                return found
            run(
                connection,
                SQL(
                    "CREATE TABLE {} AS SELECT {}, kept.{} AS kl_version, 0::bigint AS kl_time_ms "
                    "FROM {} AS kept WITH NO DATA"
                ).format(found._deletions, key, sql_name(version), table.identifier),
            )
            run(
                connection,
                SQL("ALTER TABLE {} ADD PRIMARY KEY ({})").format(found._deletions, keys),
            )
        return found

    @property
    def _deletions(self) -> Identifier:
        return self.table.beside(self.table.deletions)

    def but_older(self, rows: Composed) -> Composed:
        """Leave out the rows of a query if their key has, or had, a larger version."""
        from psycopg.sql import SQL

        version = sql_name(self.version)
        return SQL(
            "SELECT * FROM ({}) AS mine WHERE NOT EXISTS ({} AND kept.{version} > mine.{version}) "
            "AND NOT EXISTS ({} AND kept.kl_version > mine.{version})"
        ).format(rows, self._of(self.table.identifier), self._of(self._deletions), version=version)

    def forget(self, connection: Connection) -> None:
        """Forget all versions of deleted rows: the table begins again."""
        from psycopg.sql import SQL

        run(connection, SQL("DELETE FROM {}").format(self._deletions))

    def remember(
        self,
        connection: Connection,
        rows: Composed,
        values: Mapping[str, Any],
        times: tuple[int, int],
    ) -> None:
        """Remember the versions of the rows that a merge has deleted, as of a time (ms).

        The second time is the one before which they are forgotten.
        """
        from psycopg.sql import SQL

        has_row, key = self._of(self.table.identifier), self.table.key()
        now_ms, forgotten_ms = times
        run(
            connection,
            SQL(
                "INSERT INTO {} ({key}, kl_version, kl_time_ms) SELECT {key}, {}, %(now_ms)s "
                "FROM ({}) AS mine WHERE kl_deleted AND NOT EXISTS ({}) ON CONFLICT ({key}) DO "
                "UPDATE SET kl_version = excluded.kl_version, kl_time_ms = excluded.kl_time_ms"
            ).format(self._deletions, sql_name(self.version), rows, has_row, key=key),
            {**values, "now_ms": now_ms},
        )
        run(
            connection,
            SQL(
                "DELETE FROM {} WHERE kl_time_ms < %(forgotten_ms)s OR ({key}) IN (SELECT {key} "
                "FROM ({}) AS mine WHERE NOT kl_deleted AND EXISTS ({}))"
            ).format(self._deletions, rows, has_row, key=key),
            {**values, "forgotten_ms": forgotten_ms},
        )

    def _of(self, table: Identifier) -> Composed:
        from psycopg.sql import SQL

        return SQL("SELECT FROM {} AS kept WHERE ({}) = ({})").format(
            table, self.table.key("kept.{}"), self.table.key("mine.{}")
        )
