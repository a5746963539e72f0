"""A connection of ADBC, which copies Arrow columns into PostgreSQL.

It uses the lower of ADBC's two interfaces. The other one, DB-API, imports pandas, which takes a
fresh task most of a second.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pyarrow as pa


class ArrowConnection:
    """A connection in autocommit; `conninfo` is complete, see `complete_conninfo`.

    Raises adbc_driver_manager.Error, as all methods do.
    """

    def __init__(self, conninfo: str) -> None:
        import adbc_driver_postgresql
        from adbc_driver_manager import AdbcConnection

        self._database = adbc_driver_postgresql.connect(conninfo)
        try:
            self._connection = AdbcConnection(self._database)
        except BaseException:
            self._database.close()
            raise
        self._depth = 0

    def execute(self, statement: str) -> None:
        """Run a statement that returns no rows."""
        from adbc_driver_manager import AdbcStatement

        with AdbcStatement(self._connection) as prepared:
            prepared.set_sql_query(statement)
            prepared.execute_update()

    def ingest(self, schema: str, table: str, rows: pa.Table) -> None:
        """Copy rows into the columns of the same names."""
        from adbc_driver_manager import (
            INGEST_OPTION_MODE,
            INGEST_OPTION_MODE_APPEND,
            INGEST_OPTION_TARGET_TABLE,
            AdbcStatement,
            StatementOptions,
        )

        options = {
            INGEST_OPTION_MODE: INGEST_OPTION_MODE_APPEND,
            INGEST_OPTION_TARGET_TABLE: table,
            StatementOptions.INGEST_TARGET_DB_SCHEMA.value: schema,
        }
        with AdbcStatement(self._connection) as copying:
            copying.set_options(**options)
            copying.bind_stream(rows)
            copying.execute_update()

    @contextmanager
    def transaction(self, *, force_rollback: bool = False) -> Iterator[None]:
        """Commit what is done inside; roll it back after an exception or with `force_rollback`.

        Inside another transaction it is a savepoint.
        """
        from adbc_driver_manager import Error

        name = f"kafkalog_{self._depth}"
        begin, commit, rollback = "BEGIN", "COMMIT", "ROLLBACK"
        if self._depth:
            begin, commit = f"SAVEPOINT {name}", f"RELEASE {name}"
            rollback = f"ROLLBACK TO {name}"
        self.execute(begin)
        self._depth += 1
        try:
            yield
        except BaseException:
            with suppress(Error):  # a lost connection has rolled back
                self.execute(rollback)
            raise
        else:
            self.execute(rollback if force_rollback else commit)
        finally:
            self._depth -= 1

    def close(self) -> None:
        """End the connection, and an open transaction with it."""
        self._connection.close()
        self._database.close()

    def __enter__(self) -> ArrowConnection:
        """Return the connection."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """End the connection."""
        self.close()
