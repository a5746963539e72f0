"""A micro-batch on its way into a table that dies before or after each statement.

`python -m tests.acceptance.killed_statements DIR [--postgres CONNINFO [--staged]] [--every]`. At
each moment in turn a process kills itself with SIGKILL. The table and its position must then be as
before the micro-batch, or as after it; another process applies it again at once, and the one after
it. For SQLite a moment is before or after a call that runs SQL, for
PostgreSQL before or after each round trip to the server. A line of JSON is printed for each death:
the micro-batch, the moment, and whether the table had it then.
Without `--every` only moments before statements that write, lock or commit are met, each kind once,
and the last.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import sqlite3
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any, LiteralString

from kafkalog.sink.upsert import PostgresUpsert, SQLiteUpsert
from kafkalog.sink.upsert.postgres.staging import remove_orphans
from kafkalog.sink.upsert.postgres.table import PostgresTable
from tests.acceptance.killed_steps import in_child
from tests.postgres_server import query
from tests.unit.sink.postgres_rows import apply_small, apply_staged, batch, driver_batch

TABLE, POSITIONS = "stock", "kafkalog_positions"
ROWS_OF: LiteralString = "SELECT key, value FROM stock"
POSITION: LiteralString = "SELECT batch_id FROM kafkalog_positions"
WRITES = re.compile(
    "INSERT|DELETE|CREATE|DROP|LOCK TABLE|FOR UPDATE|advisory|_gen|copy|COMMIT|SAVEPOINT"
)
RANDOM = re.compile("[0-9a-f]{8}")
ROWS = (
    [("a", "0"), ("b", "0"), ("c", "0")],
    [("a", "1"), ("b", None), ("d", "1")],
    [("a", None), ("e", "2")],
)
"""By micro-batch: upserts of new and of known keys, and a deletion."""
STATES = (
    {"a": "0", "b": "0", "c": "0"},
    {"a": "1", "c": "0", "d": "1"},
    {"c": "0", "d": "1", "e": "2"},
)
"""The table after each."""
State = tuple[dict[str, str], int]
"""The rows, and the last micro-batch that the table knows, -1 for none."""


class Moments:
    """Names the moments of this process, and kills it at the `fatal` one."""

    def __init__(self, report: Path, fatal: int | None) -> None:
        self.names: list[str] = []
        self._report, self._fatal = report, fatal

    def around(self, what: str, work: Callable[[], Any]) -> Any:
        self._pass_by(f"before {what}")
        result = work()
        self._pass_by(f"after {what}")
        return result

    def _pass_by(self, moment: str) -> None:
        self.names.append(moment)
        if len(self.names) - 1 == self._fatal:
            os.kill(os.getpid(), signal.SIGKILL)

    def finish(self) -> None:
        """Tell all the moments that there were."""
        self._report.write_text(json.dumps(self.names))


class Target(ABC):
    """A table, looked at and written to."""

    @abstractmethod
    def reset(self) -> None:
        """Remove table and positions."""

    @abstractmethod
    def apply(self, batch_id: int) -> bool:
        """Apply a micro-batch; False when it was there."""

    @abstractmethod
    def arm(self, moments: Moments) -> None:
        """Let statements of this process be moments."""

    @abstractmethod
    def state(self) -> State:
        """Return what any reader sees at one moment; this changes nothing, repairs nothing."""

    @abstractmethod
    def check_remains(self, where: str) -> None:
        """Look at what else the deaths may have left."""


class SQLiteTarget(Target):
    """A file; its journal is left as the dead process left it."""

    def __init__(self, root: Path) -> None:
        self.database = root / "tables.db"
        self.upsert = SQLiteUpsert(self.database, TABLE, timeout_s=10)

    def reset(self) -> None:
        for path in self.database.parent.glob("tables.db*"):
            path.unlink()

    def apply(self, batch_id: int) -> bool:
        rows = driver_batch(ROWS[batch_id], offset=10 * batch_id)
        # In two driver_batches, as a large micro-batch comes.
        driver_batches = [rows.slice(0, 1), rows.slice(1)]
        return self.upsert.apply(
            batch(batch_id), ["key", "value"], ["TEXT", "TEXT"], driver_batches
        )

    def arm(self, moments: Moments) -> None:
        class Connection(sqlite3.Connection):
            """One whose statements, and whose commit, are moments."""

            def execute(self, sql: str, *values: Any) -> Any:
                return moments.around(sql, lambda: sqlite3.Connection.execute(self, sql, *values))

            def executemany(self, sql: str, *values: Any) -> Any:
                run = sqlite3.Connection.executemany
                return moments.around(sql, lambda: run(self, sql, *values))

            def commit(self) -> None:
                moments.around("COMMIT", lambda: sqlite3.Connection.commit(self))

        ours: Any = partial(sqlite3.connect, factory=Connection)
        sqlite3.connect = ours

    def state(self) -> State:
        # Of a copy: opening the file would be the recovery that the retry has to do.
        seen = self.database.parent / "seen"
        shutil.rmtree(seen, ignore_errors=True)
        seen.mkdir()
        for path in self.database.parent.glob("tables.db*"):
            shutil.copy(path, seen)
        with closing(sqlite3.connect(seen / "tables.db", isolation_level=None)) as connection:
            connection.execute("BEGIN")
            found = connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")
            tables = {name for (name,) in found}
            rows = connection.execute(ROWS_OF).fetchall() if TABLE in tables else []
            known = connection.execute(POSITION).fetchall() if POSITIONS in tables else []
        return dict(rows), known[0][0] if known else -1

    def check_remains(self, where: str) -> None:
        with closing(sqlite3.connect(self.database)) as connection:
            assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)], where


class PostgresTarget(Target):
    """A server's; a transaction of the dead process ends when the server notices."""

    def __init__(self, conninfo: str, *, is_staged: bool) -> None:
        self.upsert = PostgresUpsert(conninfo, TABLE)
        self.is_staged = is_staged

    def reset(self) -> None:
        for name in (TABLE, POSITIONS):
            query(self.upsert.conninfo, f"DROP TABLE IF EXISTS {name}")

    def apply(self, batch_id: int) -> bool:
        rows = driver_batch(ROWS[batch_id], offset=10 * batch_id)
        self.remove_orphans()  # as a query does that starts
        if self.is_staged:
            tasks = [rows.slice(0, 1)], [rows.slice(1)]
            return apply_staged(self.upsert, batch(batch_id), *tasks)
        return apply_small(self.upsert, batch(batch_id), rows)

    def remove_orphans(self) -> None:
        with self.upsert.connection() as connection:
            remove_orphans(connection, PostgresTable.find(connection, TABLE))

    def arm(self, moments: Moments) -> None:
        import psycopg

        wait, execute = psycopg.Connection.wait, psycopg.Connection.execute
        said = [""]

        def told(self: Any, statement: Any, *args: Any, **kwargs: Any) -> Any:
            text = statement if isinstance(statement, str) else ""
            said[0] = text or getattr(statement, "as_string", lambda _: str(statement))(self)
            try:
                return execute(self, statement, *args, **kwargs)
            finally:
                said[0] = ""

        def counted(self: Any, work: Any, *args: Any, **kwargs: Any) -> Any:
            # BEGIN, COMMIT and what belongs to COPY have no statement, but a name of their own.
            what = said[0] or getattr(work, "__name__", "?")
            return moments.around(what, lambda: wait(self, work, *args, **kwargs))

        for name, call in {"execute": told, "wait": counted}.items():
            setattr(psycopg.Connection, name, call)

    def state(self) -> State:
        import psycopg

        with psycopg.connect(self.upsert.conninfo) as connection:
            connection.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY")

            def all_of(name: str, statement: LiteralString) -> list[Any]:
                found = connection.execute("SELECT to_regclass(%s)", [name]).fetchone()
                return connection.execute(statement).fetchall() if found != (None,) else []

            known = all_of(POSITIONS, POSITION)
            return dict(all_of(TABLE, ROWS_OF)), known[0][0] if known else -1

    def check_remains(self, where: str) -> None:
        deadline = time.monotonic() + 120
        while query(
            self.upsert.conninfo,
            "SELECT FROM pg_class WHERE relname LIKE 'kafkalog\\_staging%' "
            "AND relnamespace = current_schema()::regnamespace",
        ):
            # The server may not have noticed by then that the owner was dead.
            assert time.monotonic() < deadline, f"{where}: staging stays"
            self.remove_orphans()


def moments_of(target: Target, report: Path, doing: int, fatal: int | None) -> list[str]:
    """Apply a micro-batch, up to the moment `fatal`; else return all its moments."""
    in_child(target.reset)
    for batch_id in range(doing):
        assert in_child(partial(target.apply, batch_id))

    def work() -> None:
        moments = Moments(report, fatal)
        target.arm(moments)
        target.apply(doing)
        moments.finish()

    if in_child(work):
        assert fatal is None
        return [str(name) for name in json.loads(report.read_text())]
    return []


def check_state(target: Target, doing: int, where: str) -> bool:
    """Nothing half done may be seen after a death; returns whether the micro-batch is there."""
    before = (STATES[doing - 1], doing - 1) if doing else ({}, -1)
    after = (STATES[doing], doing)
    found = target.state()
    assert found in (before, after), f"{where}: half written: {found}"
    return found == after


def recover(target: Target, doing: int, where: str) -> None:
    """Apply a micro-batch that was killed again, and those that follow."""
    for batch_id in range(doing, len(ROWS)):
        assert in_child(partial(target.apply, batch_id)), where
        assert target.state() == (STATES[batch_id], batch_id), where
        if batch_id == doing:
            # Spark was not told: the same again, and it must be a repetition now.
            assert not target.apply(batch_id), where
    target.check_remains(where)


def chosen(moments: list[str]) -> list[int]:
    """Return the moments before a statement that writes, locks or commits, each kind once.

    Between the one before it and this nothing has happened.
    """
    first: dict[str, int] = {}
    for number, moment in enumerate(moments):
        if WRITES.search(moment) and moment.startswith("before"):
            first.setdefault(RANDOM.sub("", moment), number)
    return [*first.values(), len(moments) - 1]


def main() -> int:
    """Die in the micro-batch that changes the table; with `--every` also in the one before."""
    parser = argparse.ArgumentParser()
    parser.add_argument("directory", type=Path)
    parser.add_argument("--postgres")
    parser.add_argument("--staged", action="store_true")
    parser.add_argument("--every", action="store_true")
    options = parser.parse_args()
    target: Target = SQLiteTarget(options.directory)
    if options.postgres:
        target = PostgresTarget(options.postgres, is_staged=options.staged)
    report = options.directory / "report"
    for doing in (0, 1) if options.every else (1,):
        moments = moments_of(target, report, doing, None)
        for fatal in range(len(moments)) if options.every else chosen(moments):
            moments_of(target, report, doing, fatal)
            where = f"micro-batch {doing}, {moments[fatal]}"
            is_there = check_state(target, doing, where)
            recover(target, doing, where)
            print(json.dumps([doing, moments[fatal], is_there]), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
