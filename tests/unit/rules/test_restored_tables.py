"""A log, a query's checkpoint and the table it keeps, each restored from another moment.

Whatever was restored, the query then fails, or brings the table to the log's latest records. It
never goes on with a table that lacks some. `Query` does what Spark does with a source, a checkpoint
and a `foreachBatch`, without Spark.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import sqlite3
import uuid
from collections import Counter
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxRows

import kafkalog
from kafkalog.datasource.source import KafkaLogDataSource
from kafkalog.errors import KafkaLogError
from kafkalog.sink.query import MicroBatch
from kafkalog.sink.upsert import Batch, Position, SQLiteUpsert
from tests.unit.datasource.logs import rows as rows_of
from tests.unit.sink.sqlite_rows import KINDS, NAMES, driver_batch, row

HISTORIES = 500 if os.environ.get("KAFKALOG_TABLES") == "full" else 12
pytestmark = [pytest.mark.slow] if HISTORIES == 500 else []
KEYS = [f"k{number}" for number in range(6)]
PARTS = ("log", "checkpoint", "table.db")
RIGHT, WRONG = "right", "WRONG"


class Upsert(SQLiteUpsert):
    """An upsert of records that are here, and not in a frame of Spark's."""

    def _apply(self, df: Any, batch: Batch, position: Position | None) -> None:
        latest = {(found["partition"], found["key"]): found for found in df}
        given = [row(f["key"], f["value"], f["offset"], f["partition"]) for f in latest.values()]
        batches = [driver_batch(given)] if given else []
        self.apply(batch, NAMES, KINDS, batches)


class Query:
    """A query that was started on a checkpoint, in a process of its own."""

    def __init__(self, place: Path, **options: Any) -> None:
        self.place, self.options = place, options
        self.plans = place / "checkpoint" / "offsets"
        self.commits = place / "checkpoint" / "commits"
        for directory in (self.plans, self.commits):
            directory.mkdir(parents=True, exist_ok=True)
        given = {"path": str(place / "log"), "subscribe": "t", "startingOffsets": "earliest"}
        source = KafkaLogDataSource(options=given)
        self.reader = source.streamReader(source.schema())
        self.run_id = str(uuid.uuid4())

    def planned(self) -> list[int]:
        return sorted(int(path.name) for path in self.plans.iterdir())

    def plan(self, number: int) -> Any:
        return json.loads((self.plans / str(number)).read_text())

    def run(self, batches: int, *, most: int | None = None, dies: bool = False) -> None:
        """Run micro-batches while there are any; die in the last one, after the table has it."""
        limit = ReadAllAvailable() if most is None else ReadMaxRows(most)
        known = self.planned()
        first = self.reader.initialOffset() if not known or known[-1] == 0 else None
        if known and not (self.commits / str(known[-1])).exists():
            self.micro_batch(known[-1], first)
        for left in reversed(range(batches)):
            number = len(self.planned()) and self.planned()[-1] + 1
            start = self.plan(number - 1) if number else first
            end = self.reader.latestOffset(start, limit)
            if end == start:
                return
            (self.plans / str(number)).write_text(json.dumps(end))
            self.micro_batch(number, first, dies=dies and not left)

    def micro_batch(self, number: int, first: Any, *, dies: bool = False) -> None:
        start, end = self.plan(number - 1) if number else first, self.plan(number)
        found = rows_of(self.reader, self.reader.partitions(start, end))
        upsert = Upsert(self.place / "table.db", "kept", **self.options)
        running = MicroBatch("query", number, self.run_id)
        upsert.take(found, number, running, end, start_offsets=start if number else {})
        if not dies:
            (self.commits / str(number)).touch()

    def stop(self) -> None:
        self.reader.stop()


class History:
    """A log, a checkpoint and a table, with copies of earlier moments."""

    def __init__(self, place: Path, seed: int) -> None:
        self.place, self.drawn = place / "now", random.Random(seed)
        self.copies: list[Path] = []
        self.ends: list[dict[int, int]] = []
        self.place.mkdir(parents=True)
        with kafkalog.open(self.place / "log") as log:
            log.create_topic("t", partitions=2, config={"cleanup.policy": "compact"})

    def append(self) -> None:
        records = [
            (self.drawn.choice(KEYS), self.drawn.choice([None, f"{self.drawn.random()}"]))
            for _ in range(self.drawn.randint(1, 5))
        ]
        with kafkalog.open(self.place / "log") as log:
            log.append("t", records)

    def run(self, *, batches: int = 9, **more: Any) -> None:
        query = Query(self.place)
        try:
            query.run(batches, **more)
        finally:
            query.stop()

    def save(self) -> None:
        copy = self.place.with_name(f"copy{len(self.copies)}")
        shutil.copytree(self.place, copy)
        self.copies.append(copy)
        self.ends.append(self.log_ends())

    def go_on(self) -> None:
        """Do what happens from day to day, and save it at some moments."""
        for _ in range(self.drawn.randint(4, 9)):
            self.drawn.choice([self.append, self.append, self.save, self.run, self.some_work])()
        self.save()
        self.append()
        self.run()

    def some_work(self) -> None:
        self.run(batches=self.drawn.randint(1, 2), most=2, dies=self.drawn.random() < 0.4)

    def restore(self, part: str, copy: Path) -> None:
        ours, theirs = self.place / part, copy / part
        if ours.is_dir():
            shutil.rmtree(ours)
        for old in self.place.glob(f"{part}*"):
            old.unlink()
        if theirs.is_dir():
            shutil.copytree(theirs, ours)
        for kept in copy.glob(f"{part}*"):
            if kept.is_file():
                shutil.copy(kept, self.place)

    def log_ends(self) -> dict[int, int]:
        with kafkalog.open(self.place / "log", read_only=True) as log:
            return {number: end for number, (_, end) in log.offsets("t").items()}

    def reached(self) -> dict[int, int]:
        """Return how far the table or the checkpoint is, by partition."""
        found = Upsert(self.place / "table.db", "kept").position("query")
        table = {} if found is None else found.end_offsets.get("t", {})
        plans = (self.place / "checkpoint" / "offsets").glob("*")
        planned = [json.loads(path.read_text())["t"] for path in plans]
        known = [table, *planned]
        return {n: max(int(ends.get(str(n), 0)) for ends in known) for n in (0, 1)}

    def table(self) -> dict[bytes, bytes]:
        with closing(sqlite3.connect(self.place / "table.db")) as connection, suppress(Exception):
            return dict(connection.execute("SELECT key, value FROM kept"))
        return {}

    def latest(self) -> dict[bytes, bytes]:
        with kafkalog.open(self.place / "log", read_only=True) as log:
            found = log.table("t").to_pydict()
        return dict(zip(found["key"], found["value"], strict=True))


def outcome(history: History) -> str:
    """Start the query again; return what comes of it."""
    try:
        history.run()
    except KafkaLogError as fault:
        return type(fault).__name__
    return RIGHT if history.table() == history.latest() else WRONG


def drawn_history(place: Path, seed: int) -> tuple[str, str]:
    """Restore one part, or two, from drawn moments; return which, and what came of it.

    Nobody can tell that a log was restored if it has grown again, in one of its partitions, above
    what the table and the checkpoint have of what is lost.
    """
    history = History(place, seed)
    history.go_on()
    drawn = history.drawn
    parts = drawn.choice([(a,) for a in PARTS] + [(a, b) for a in PARTS for b in PARTS if a < b])
    for part in parts:
        history.restore(part, drawn.choice(history.copies))
    reached, restored = history.reached(), history.log_ends()
    found = outcome(history) if drawn.random() < 0.7 else RIGHT
    if found in (RIGHT, WRONG):  # a query without a micro-batch cannot know anything
        history.append()
        grown = history.log_ends()
        is_shorter = any(restored[n] < end for n, end in reached.items())
        more = [grown[number] - end for number, end in reached.items()]
        is_hidden = is_shorter and (max(more) > 0 or min(more) == 0)
        found = "cannot be told" if is_hidden else outcome(history)
    return "+".join(parts), found


def test_a_table_is_right_or_its_query_fails_after_any_restore(tmp_path: Path) -> None:
    found = Counter(drawn_history(tmp_path / f"{seed}", seed) for seed in range(HISTORIES))
    assert not [each for each in found if each[1] == WRONG], found
    print(found)
