"""The commits of upserts in a Delta table's history.

Each commit carries two things in addition to the rows:

- Delta's transaction identifier `kafkalog`. Its version counts the upserts' commits. Delta skips a
  commit whose number the table has, and refuses it if another commit takes the number meanwhile. A
  commit therefore lands only on the positions that its writer has read.
- The positions of all queries and the table's key, as JSON in the commit's user metadata.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from kafkalog.errors import StorageError
from kafkalog.sink.upsert.position import Position

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


_FORMATS, _FORMAT = "kafkalog/", "kafkalog/1"
_ROWS_FIRST, _ROWS_FACTOR = 10, 10


@dataclass(frozen=True, slots=True)
class UpsertCommit:
    """A commit of an upsert."""

    number: int
    """Counts the upserts' commits of the table; never above the table's version."""
    positions: Mapping[str, Position]
    """The positions of all queries after the commit, by query id."""
    keys: tuple[str, ...] = ()
    """The columns of the table's key; () if no upsert is known to have committed."""

    def to_json(self) -> str:
        """Return the commit's user metadata."""
        positions = {
            query_id: {name: value for name, value in asdict(each).items() if value is not None}
            for query_id, each in self.positions.items()
        }
        own = {"commit": self.number, "key": self.keys, "positions": positions}
        return json.dumps({"format": _FORMAT, **own})

    @contextmanager
    def settings(self, spark: SparkSession) -> Iterator[None]:
        """Make the next commit of the session this one; put its settings back afterwards."""
        values = {
            "spark.databricks.delta.write.txnAppId": "kafkalog",
            "spark.databricks.delta.write.txnVersion": str(self.number),
            "spark.databricks.delta.commitInfo.userMetadata": self.to_json(),
            # Otherwise a value that does not fit could be stored as another one.
            "spark.sql.storeAssignmentPolicy": "ANSI",
        }
        before = {name: spark.conf.get(name, None) for name in values}
        try:
            for name, value in values.items():
                spark.conf.set(name, value)
            yield
        finally:
            for name, known in before.items():
                if known is None:
                    spark.conf.unset(name)
                else:
                    spark.conf.set(name, known)


def last_commit(spark: SparkSession, table: str) -> UpsertCommit:
    """Return the last commit of an upsert to a table, which is given as in SQL.

    If the history lacks them, the result has no positions and no key, and the table's version as
    its number. No commit that Delta has removed from the history has a higher number. Raises
    StorageError for a commit of another build that cannot be read.
    """
    wanted = _ROWS_FIRST
    while True:
        history = spark.sql(f"DESCRIBE HISTORY {table} LIMIT {wanted}")
        rows = history.select("version", "userMetadata").collect()
        for row in rows:
            found = _of_metadata(row.userMetadata)
            if found is not None:
                return _commit(found, f"version {row.version}")
        if len(rows) < wanted:
            return UpsertCommit(rows[0].version, {})
        wanted *= _ROWS_FACTOR


def _of_metadata(text: str | None) -> dict[str, Any] | None:
    """Return the metadata of an upsert; None for that of another commit."""
    try:
        found = json.loads(text or "null")
    except ValueError:
        return None
    is_ours = isinstance(found, dict) and str(found.get("format")).startswith(_FORMATS)
    return found if is_ours else None


def _commit(found: Mapping[str, Any], where: str) -> UpsertCommit:
    if found["format"] != _FORMAT:
        raise StorageError(
            f"{where}: another release of kafkalog has committed it (expected the format "
            f"{_FORMAT}, found {found['format']}). Install the newest release."
        )
    try:
        positions = {query_id: Position(**each) for query_id, each in found["positions"].items()}
        return UpsertCommit(found["commit"], positions, tuple(found["key"]))
    except (KeyError, TypeError, AttributeError):
        raise StorageError(
            f"{where}: another build of kafkalog has committed it (expected metadata with commit, "
            f"key and positions, found {', '.join(sorted(found))}). Go on with that build, or "
            "upsert into a new table."
        ) from None
