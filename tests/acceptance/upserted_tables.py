"""The tables that killed upserts fill, seen from outside, without Spark and without our code."""

from __future__ import annotations

import json
import os
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import Any, Protocol

import pyarrow.parquet as pq

from tests import delta_spark
from tests.acceptance.micro_batches import TableRow
from tests.postgres_server import query
from tests.spark_home import make_spark_home

Position = tuple[int, dict[str, dict[str, int]]]
"""The last micro-batch that a table holds, and its end offsets."""


class Tables(Protocol):
    """A table per topic in each database."""

    target: str
    """The databases, as `killed_upserts` takes them."""
    count: int

    def environment(self, root: Path) -> dict[str, str]:
        """Return the environment of Spark's driver."""

    def positions(self) -> dict[str, Position]:
        """Return the position of each table that has one, by the table."""

    def staged(self) -> set[str]:
        """Return files whose rows are in no table yet, or were so once."""

    def rows(self, topic: str) -> dict[str, list[TableRow]]:
        """Return the rows of each table of a topic, by the table."""

    def query_ids(self) -> set[str]:
        """Return the queries that have a position in a table."""

    def check_remains(self) -> None:
        """Fail if something is there that the upserts should have removed, or not have written."""


class DatabaseTables:
    """Tables in PostgreSQL and in a file of SQLite."""

    count = 4

    def __init__(self, root: Path, conninfo: str) -> None:
        self.target, self._file = conninfo, root / "tables.db"

    def environment(self, root: Path) -> dict[str, str]:
        return {**os.environ, "SPARK_HOME": str(make_spark_home(root / "spark"))}

    def positions(self) -> dict[str, Position]:
        found = {}
        for name, look in (("postgres", self._in_postgres), ("sqlite", self._in_sqlite)):
            rows: list[Any] = []
            with suppress(Exception):  # not there yet, or not answering
                rows = look("SELECT target_table, batch_id, end_offsets FROM kafkalog_positions")
            for table, number, ends in rows:
                decoded = json.loads(ends) if isinstance(ends, str) else ends
                found[f"{name} {table}"] = (number, decoded)
        return found

    def staged(self) -> set[str]:
        return set()

    def rows(self, topic: str) -> dict[str, list[TableRow]]:
        rows_of = f'SELECT key, value, partition, "offset" FROM {topic}_table'
        return {"PostgreSQL": self._in_postgres(rows_of), "SQLite": self._in_sqlite(rows_of)}

    def query_ids(self) -> set[str]:
        writers = "SELECT query_id FROM kafkalog_positions"
        return {each for (each,) in [*self._in_postgres(writers), *self._in_sqlite(writers)]}

    def check_remains(self) -> None:
        staging = "SELECT relname FROM pg_class WHERE relname LIKE 'kafkalog\\_staging%'"
        here = "relnamespace = current_schema()::regnamespace"
        assert self._in_postgres(f"{staging} AND {here}") == []

    def _in_postgres(self, statement: str) -> list[Any]:
        return query(self.target, statement)

    def _in_sqlite(self, statement: str) -> list[Any]:
        address = f"file:{self._file}?mode=ro"
        with closing(sqlite3.connect(address, uri=True, timeout=120)) as connection:
            return connection.execute(statement).fetchall()


class DeltaTables:
    """Tables of Delta Lake. A table is what the commits in its log add and do not remove."""

    count = 2
    target = "delta"

    def __init__(self, root: Path, topics: Sequence[str]) -> None:
        self._tables = {topic: root / "delta" / f"{topic}_table" for topic in topics}

    def environment(self, root: Path) -> dict[str, str]:
        home = make_spark_home(root / "spark", delta_spark.PYSPARK)
        return {**delta_spark.environment(), "SPARK_HOME": str(home)}

    def positions(self) -> dict[str, Position]:
        return {
            table.name: (each["batch_id"], each["end_offsets"])
            for table, found in self._last_positions()
            for each in found.values()
        }

    def staged(self) -> set[str]:
        return {file.name for table in self._tables.values() for file in table.glob("*.parquet")}

    def rows(self, topic: str) -> dict[str, list[TableRow]]:
        table = self._tables[topic]
        files: set[str] = set()
        for commit in _commits(table):
            actions = list(map(json.loads, commit.read_text().splitlines()))
            files -= {each["remove"]["path"] for each in actions if "remove" in each}
            added = [each["add"] for each in actions if "add" in each]
            assert not any("deletionVector" in each for each in added)
            files |= {each["path"] for each in added}
        columns = ["key", "value", "partition", "offset"]
        return {
            "Delta Lake": [
                (row["key"], row["value"], row["partition"], row["offset"])
                for file in files
                for row in pq.ParquetFile(table / file).read(columns).to_pylist()
            ]
        }

    def query_ids(self) -> set[str]:
        return {name for _, found in self._last_positions() for name in found}

    def _last_positions(self) -> Iterator[tuple[Path, dict[str, Any]]]:
        for table in self._tables.values():
            last = max((table / "_delta_log").glob("*.json"), default=None)
            if last is not None:
                yield table, _stored_positions(last)

    def check_remains(self) -> None:
        """Each micro-batch is one commit; the first commit creates the table."""
        for table in self._tables.values():
            held = [list(_stored_positions(commit).values()) for commit in _commits(table)]
            assert [[each["batch_id"] for each in found] for found in held] == [
                [],
                *([number] for number in range(len(held) - 1)),
            ]


def _commits(table: Path) -> list[Path]:
    """Return the files of a table's commits, oldest first; their numbers have no gap."""
    found = sorted((table / "_delta_log").glob("*.json"))
    assert [int(file.stem) for file in found] == list(range(len(found)))
    return found


def _stored_positions(commit: Path) -> dict[str, Any]:
    """Return the positions in a commit, by query id."""
    info = json.loads(commit.read_text().splitlines()[0])["commitInfo"]
    found: dict[str, Any] = json.loads(info.get("userMetadata", '{"positions": {}}'))["positions"]
    return found
