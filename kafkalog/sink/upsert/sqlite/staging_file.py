"""The rows of a micro-batch before SQLite has them: a file in the database's directory.

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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from kafkalog.errors import InvalidInputError, StorageError
from kafkalog.extras import install_command
from kafkalog.sink.upsert.bad_records import Refusal
from kafkalog.sink.upsert.rows import DELETED, RECORD, REMEDY
from kafkalog.sink.upsert.sqlite.table import quoted
from kafkalog.storage_engine.fs import files
from kafkalog.storage_engine.fs.locks import FileLock

if TYPE_CHECKING:
    import pyarrow as pa


_PAUSE_S = 0.05
ROWS = "kafkalog_rows"
NUMBER = "kl_number"
"""The column that numbers the rows from 1, in the order in which they came."""
*ORIGIN, TIME = RECORD
"""The columns that name a row's record, and its timestamp, which a file of all records has too."""
_UNSAFE = ("PRAGMA journal_mode = OFF", "PRAGMA synchronous = OFF")
"""The file is of no use after a crash."""


def check_client() -> None:
    """Raise InvalidInputError if ADBC's client of SQLite is not installed."""
    try:
        import adbc_driver_sqlite  # noqa: F401
    except ImportError as fault:
        raise InvalidInputError(
            f"SQLiteUpsert needs ADBC: {install_command('sqlite')} ({fault})"
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
        self,
        encoding: str,
        names: Sequence[str],
        driver_batches: Iterable[pa.RecordBatch],
        *,
        leaves_out: bool = False,
    ) -> list[Refusal]:
        """Write all rows; `encoding` is that of the database's text.

        A row with text that is not UTF-8 raises InvalidInputError. With `leaves_out` it is left out
        and returned. Raises StorageError.
        """
        from adbc_driver_manager import Error
        from adbc_driver_sqlite import dbapi

        columns = [DELETED, *ORIGIN, *([TIME] if leaves_out else []), *names]
        # Columns without a type store each value as it comes.
        declared = ", ".join([f"{NUMBER} INTEGER PRIMARY KEY", *map(quoted, columns)])
        first = (f"PRAGMA encoding = '{encoding}'", *_UNSAFE, f"CREATE TABLE {ROWS} ({declared})")
        refused: list[Refusal] = []
        try:
            with (
                closing(dbapi.connect(str(self.path), autocommit=True)) as connection,
                closing(connection.cursor()) as cursor,
            ):
                for statement in (*first, "BEGIN"):
                    cursor.executemany(statement, None)
                for driver_batch in driver_batches:
                    rows = driver_batch.rename_columns([DELETED, *RECORD, *names]).select(columns)
                    if bad := _not_utf8(rows):
                        refused += self._refusals(rows, bad, leaves_out=leaves_out)
                        rows = rows.filter([number not in bad for number in range(len(rows))])
                    cursor.adbc_ingest(ROWS, _with_numbered_times(rows), mode="append")
                cursor.executemany("COMMIT", None)
        except Error as fault:
            raise StorageError(f"{self._where}: {self.path.name}: {fault}") from fault
        return refused

    def _refusals(
        self, rows: pa.RecordBatch, bad: Mapping[int, str], *, leaves_out: bool
    ) -> list[Refusal]:
        """Return the records of rows by number, with why; raise InvalidInputError for the first."""
        topics, partitions, offsets = rows.select(ORIGIN).take(list(bad)).columns
        refusals = [
            Refusal(topic.as_py(), partition.as_py(), offset.as_py(), reason)
            for topic, partition, offset, reason in zip(
                topics, partitions, offsets, bad.values(), strict=True
            )
        ]
        if not leaves_out:
            raise misfit(self._where, refusals[0])
        return refusals


def _with_numbered_times(rows: pa.RecordBatch) -> pa.RecordBatch:
    """Return rows with their timestamps, if they have any, as microseconds."""
    place = rows.schema.get_field_index(TIME)
    if place < 0:
        return rows
    return rows.set_column(place, TIME, rows.column(place).cast("int64"))


def _not_utf8(rows: pa.RecordBatch) -> dict[int, str]:
    """Return the numbers of rows with text that is not UTF-8, and why; SQLite would store it."""
    return {
        number: f"column {name}: text that is not UTF-8"
        for name, column in zip(rows.schema.names, rows.columns, strict=True)
        for number in _invalid(column, 0, len(column))
    }


def _invalid(column: pa.Array, first: int, count: int) -> Iterator[int]:
    """Yield the numbers of the values that are not what the column's type says."""
    import pyarrow as pa

    try:
        column.slice(first, count).validate(full=True)
    except pa.ArrowInvalid:
        if count == 1:
            yield first
        else:
            half = count // 2
            yield from _invalid(column, first, half)
            yield from _invalid(column, first + half, count - half)


def misfit(where: str, refusal: Refusal) -> InvalidInputError:
    """Return the error that names the record of a row that does not fit."""
    topic, partition, offset, reason = refusal
    return InvalidInputError(
        f"{where}: the record at {topic}-{partition} offset {offset} does not fit: {reason}. "
        f"{REMEDY}"
    )
