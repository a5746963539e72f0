"""The rows of a micro-batch on their way into SQLite: a file beside the database.

ADBC fills it from Arrow columns, with no Python per row. Python's `sqlite3` then merges it into the
table, in SQL.

Invariants:

- Each of the two clients has an SQLite library of its own. Within one process they do not see each
  other's locks, and a library that closes a file drops the locks of the other. ADBC therefore never
  opens the database, which users read with `sqlite3` in the same process. ADBC has closed the
  staging file before `sqlite3` opens it.
- A table has one staging file, whose lock lets upserts take turns. A killed process leaves that one
  file at most, and the table's next upsert replaces it.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from kafkalog.errors import InvalidInputError, StorageError
from kafkalog.sink.upsert.rows import DELETED, RECORD
from kafkalog.sink.upsert.sqlite.table import quoted
from kafkalog.storage_engine.fs import files
from kafkalog.storage_engine.fs.locks import FileLock

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["NUMBER", "ORIGIN", "ROWS", "StagingFile", "check_client", "misfit"]

_PAUSE_S = 0.05
ROWS = "kafkalog_rows"
NUMBER = "kl_number"
"""The column that numbers the rows from 1, in the order in which they came."""
ORIGIN = list(RECORD)[:3]
"""The columns that name a row's record."""
_UNSAFE = ("PRAGMA journal_mode = OFF", "PRAGMA synchronous = OFF")
"""The file is of no use after a crash."""


def check_client() -> None:
    """Raise InvalidInputError if ADBC's client of SQLite is not installed."""
    try:
        import adbc_driver_sqlite  # noqa: F401
    except ImportError as fault:
        raise InvalidInputError(
            f"SQLiteUpsert needs ADBC: pip install 'kafkalog[sqlite]' ({fault})"
        ) from fault


class StagingFile:
    """The staging file of a table of `database`; `where` begins its errors."""

    def __init__(self, database: str, where: str, table: str) -> None:
        short = hashlib.sha256(table.lower().encode()).hexdigest()[:8]
        self.path = Path(f"{database}-kafkalog-{short}").absolute()
        self._where = where

    @contextmanager
    def held(self, timeout_s: float) -> Iterator[None]:
        """Hold the file's lock, with the file empty; remove the file at the end.

        Raises StorageError if another upsert holds it for longer than `timeout_s`.
        """
        lock = FileLock(self.path)
        until_s = time.monotonic() + timeout_s
        with ExitStack() as stack:
            with files.disk_faults(self.path):
                while not stack.enter_context(lock.exclusive(wait=False)):
                    stack.close()
                    if time.monotonic() > until_s:
                        raise StorageError(
                            f"{self._where}: another upsert has written to the table for longer "
                            f"than timeout_s={timeout_s:g}"
                        )
                    time.sleep(_PAUSE_S)
                files.create(self.path)
            try:
                yield
            finally:
                with files.disk_faults(self.path):
                    files.remove(self.path)

    def fill(
        self, encoding: str, names: Sequence[str], driver_batches: Iterable[pa.RecordBatch]
    ) -> None:
        """Write all rows; `encoding` is that of the database's text.

        Raises InvalidInputError for text that is not UTF-8, and StorageError.
        """
        from adbc_driver_manager import Error
        from adbc_driver_sqlite import dbapi

        columns = [DELETED, *ORIGIN, *names]
        # Columns without a type store each value as it comes.
        declared = ", ".join([f"{NUMBER} INTEGER PRIMARY KEY", *map(quoted, columns)])
        first = (f"PRAGMA encoding = '{encoding}'", *_UNSAFE, f"CREATE TABLE {ROWS} ({declared})")
        try:
            with (
                closing(dbapi.connect(str(self.path), autocommit=True)) as connection,
                closing(connection.cursor()) as cursor,
            ):
                for statement in (*first, "BEGIN"):
                    cursor.executemany(statement, None)
                for driver_batch in driver_batches:
                    rows = driver_batch.rename_columns([DELETED, *RECORD, *names]).select(columns)
                    self._check_text(rows)
                    cursor.adbc_ingest(ROWS, rows, mode="append")
                cursor.executemany("COMMIT", None)
        except Error as fault:
            raise StorageError(f"{self._where}: {self.path.name}: {fault}") from fault

    def _check_text(self, rows: pa.RecordBatch) -> None:
        """Raise InvalidInputError for text that is not UTF-8; SQLite would store it."""
        import pyarrow as pa

        for name, column in zip(rows.schema.names, rows.columns, strict=True):
            try:
                column.validate(full=True)
            except pa.ArrowInvalid as fault:
                number = next(n for n in range(len(column)) if not _is_valid(column.slice(n, 1)))
                record = [rows.column(name)[number].as_py() for name in ORIGIN]
                reason = f"column {name}: text that is not UTF-8"
                raise misfit(self._where, record, reason) from fault


def _is_valid(column: pa.Array) -> bool:
    import pyarrow as pa

    try:
        column.validate(full=True)
    except pa.ArrowInvalid:
        return False
    return True


def misfit(where: str, record: Sequence[object], reason: object) -> InvalidInputError:
    """Return the error that names the record of a row that does not fit."""
    topic, partition, offset = record
    return InvalidInputError(
        f"{where}: the record at {topic}-{partition} offset {offset} does not fit: {reason}"
    )
