"""All tasks of an action see one moment, whatever is committed, cleaned and retried meanwhile.

A process commits, every 50 ms, one atomic change of all keys in four partitions, and cleans the
topic all the time. Meanwhile Spark reads the table, and joins it with itself, also with tasks that
fail and are done again when hundreds of commits have passed. Two values in one result are a mixed
moment. KAFKALOG_MOMENTS=full does it 100 and 20 times (`make moment-test`).

A changelog is read beside cleanings that are forced, too. Such a read is right or fails, and says
so. It is right when each partition has the last value for each of its keys, the same one
everywhere, and when each time the action reads a partition it finds the same records.
"""

from __future__ import annotations

import contextlib
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kafkalog.datasource import range_reader
from kafkalog.errors import MomentPassedError
from kafkalog.storage_engine.directory.directory_log import DirectoryLog
from tests.acceptance.moment_writer import CONFIG, KEYS_PER_PARTITION, PARTITIONS, TOPIC, rows
from tests.unit.datasource.logs import rows as rows_of
from tests.unit.datasource.logs import source
from tests.unit.datasource.spark_task import task

IS_FULL = os.environ.get("KAFKALOG_MOMENTS") == "full"
READS, JOINS = (100, 20) if IS_FULL else (4, 2)
FAILING_READS, FAILING_JOINS = (20, 5) if IS_FULL else (1, 1)
ROUNDS = 20 if IS_FULL else 1
"""How often Spark does all actions over a changelog."""
ACTIONS = 300 if IS_FULL else 30
"""Reads whose tasks run without Spark."""
KEYS = PARTITIONS * KEYS_PER_PARTITION


@contextlib.contextmanager
def written(root: Path, forced_s: float | None = None) -> Iterator[list[int]]:
    """Let the table change, and wait until it does and is cleaned.

    In the end the list has the counts of commits and of cleanings.
    """
    counts: list[int] = []
    command = [sys.executable, "-m", "tests.acceptance.moment_writer", str(root), "0.05"]
    command += [] if forced_s is None else [str(forced_s)]
    writer = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        with DirectoryLog(root, read_only=True) as engine:
            while engine.describe(TOPIC).partitions[0].first_dirty_offset == 0:
                assert writer.poll() is None
                time.sleep(0.05)
        yield counts
    finally:
        told, _ = writer.communicate()
        counts += map(int, told.split())


def failing_once(batches: Iterator[Any]) -> Iterator[Any]:
    """Fail each task's first attempt when it has read everything."""
    from pyspark import TaskContext

    yield from batches
    context = TaskContext.get()
    assert context is not None
    if context.attemptNumber() == 0 and context.partitionId() % 2 == 0:
        raise ValueError("the task is to be done again")


@pytest.mark.slow
def test_tasks_far_apart_see_one_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without Spark: the tasks of reads and of self-joins, some of them done twice.

    Commits land between any two tasks; without the pin nearly every action would be mixed.
    """
    monkeypatch.setenv("SPARK_LOCAL_DIRS", "/scratch/blockmgr-1")
    with DirectoryLog(tmp_path) as engine:
        engine.create_topic(TOPIC, PARTITIONS, CONFIG)
        engine.append(TOPIC, rows(0))
    data_source = source(tmp_path, subscribe=TOPIC, view="latest")
    reader = data_source.reader(data_source.schema())
    partitions = reader.partitions()

    def look(times: int, attempts_max: int = 2) -> set[bytes]:
        values: set[bytes] = set()
        for _ in range(times):
            for partition in partitions:
                count = min(random.choice((1, 1, 2)), attempts_max)
                attempts = [rows_of(reader, [partition]) for _ in range(count)]
                assert all(attempt == attempts[0] for attempt in attempts)
                assert len(attempts[0]) == KEYS_PER_PARTITION
                values |= {row["value"] for row in attempts[0]}
                time.sleep(random.random() * 0.04)
        return values

    with written(tmp_path) as counts:
        deadline = time.monotonic() + 60
        while len(look(1, attempts_max=1)) == 1:  # no task, no pin
            assert time.monotonic() < deadline, "nothing to tell apart"
        seen: list[set[bytes]] = []
        for action in range(ACTIONS + ACTIONS // 4):
            with task(str(action)):
                seen.append(look(1 if action < ACTIONS else 2))

    commits, cleanings = counts
    print(f"{len(seen)} actions, {commits} commits, {cleanings} cleanings")
    assert [values for values in seen if len(values) > 1] == []
    assert len(set().union(*seen)) > 2
    assert cleanings > 0


@pytest.mark.spark
@pytest.mark.slow
def test_no_action_sees_two_moments(spark: Any, tmp_path: Path) -> None:
    with DirectoryLog(tmp_path) as engine:
        engine.create_topic(TOPIC, PARTITIONS, CONFIG)
        engine.append(TOPIC, rows(0))
    frame = (
        spark.read.format("kafkalog")
        .options(path=str(tmp_path), subscribe=TOPIC, view="latest")
        .load()
        .select("key", "value")
    )
    failing = frame.mapInArrow(failing_once, frame.schema)

    def joined(left: Any, right: Any) -> Any:
        return left.join(right.withColumnRenamed("value", "other"), "key")

    seen: list[set[bytes]] = []
    mixed: list[list[Any]] = []

    def look(result: Any) -> None:
        found = result.collect()
        assert len(found) == KEYS
        values = {bytes(value) for row in found for value in row[1:]}
        seen.append(values)
        if len(values) > 1:
            mixed.append(found)

    with written(tmp_path) as counts:
        for place in range(max(READS, JOINS)):
            if place < READS:
                look(failing if place < FAILING_READS else frame)
            if place < JOINS:
                look(joined(failing if place < FAILING_JOINS else frame, frame))

    commits, cleanings = counts
    print(f"{len(seen)} actions, {commits} commits, {cleanings} cleanings, {len(mixed)} mixed")
    assert len(seen) == READS + JOINS
    assert mixed == []
    assert len(set().union(*seen)) > 1, "nothing changed meanwhile"
    assert commits > 0
    assert cleanings > 0


Record = tuple[int, int, bytes, int]
"""Partition, offset, key and value."""


def last_values(found: Iterable[Record]) -> set[int]:
    """Return the values of the keys' latest records; each key has to be there."""
    latest_records = {key: value for _, _, key, value in sorted(found)}
    assert len(latest_records) == KEYS
    return set(latest_records.values())


@pytest.mark.slow
def test_a_changelog_is_of_one_moment_or_says_that_it_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without Spark: tasks of whole partitions and of pieces of them, some of them done twice."""
    monkeypatch.setenv("SPARK_LOCAL_DIRS", "/scratch/blockmgr-1")
    monkeypatch.setattr(range_reader, "_CLEANER_WAIT_S", 0.0)
    with DirectoryLog(tmp_path) as engine:
        engine.create_topic(TOPIC, PARTITIONS, CONFIG)
        engine.append(TOPIC, rows(0))
    right: list[set[int]] = []
    refused = 0

    def look(**options: str) -> set[Record]:
        found: set[Record] = set()
        data_source = source(tmp_path, subscribe=TOPIC, **options)
        reader = data_source.reader(data_source.schema())
        for partition in reader.partitions():
            attempts = [rows_of(reader, [partition]) for _ in range(random.choice((1, 1, 2)))]
            assert all(attempt == attempts[0] for attempt in attempts)
            found |= {(r["partition"], r["offset"], r["key"], int(r["value"])) for r in attempts[0]}
            time.sleep(random.random() * 0.04)
        return found

    with written(tmp_path, forced_s=0.3) as counts:
        for action in range(ACTIONS):
            with task(str(action)):
                try:
                    whole, pieces = look(), look(minPartitions="12")
                except MomentPassedError:
                    refused += 1
                    continue
                assert whole == pieces
                right.append(last_values(whole))

    commits, cleanings = counts
    print(f"{len(right)} right, {refused} refused, {commits} commits, {cleanings} cleanings")
    assert [values for values in right if len(values) > 1] == []
    assert right and refused and cleanings


@pytest.mark.spark
@pytest.mark.slow
def test_an_action_over_a_changelog_is_of_one_moment_or_fails(spark: Any, tmp_path: Path) -> None:
    """Joins with itself, unions, sorts, subqueries, and tasks that are done again."""
    with DirectoryLog(tmp_path) as engine:
        engine.create_topic(TOPIC, PARTITIONS, CONFIG)
        engine.append(TOPIC, rows(0))

    def changelog(**options: str) -> Any:
        reader = spark.read.format("kafkalog").options(path=str(tmp_path), subscribe=TOPIC)
        columns = ("partition", "offset", "key", "bigint(string(value)) AS value")
        return reader.options(**options).load().selectExpr(*columns)

    frame, pieces, view = changelog(), changelog(minPartitions="12"), changelog(view="latest")
    frame.createOrReplaceTempView("held")
    columns = ["partition", "offset", "key", "value"]
    latest_records = "SELECT * FROM held WHERE value = (SELECT max(value) FROM held)"
    # Each is made anew for its action: of an old one Spark keeps results of the action before.
    actions: dict[str, Callable[[], Any]] = {
        "read": lambda: frame,
        "pieces": lambda: pieces,
        "failing": lambda: frame.mapInArrow(failing_once, frame.schema),
        "sort": lambda: pieces.orderBy("value", "offset"),
        "union": lambda: frame.union(pieces).groupBy(*columns).count().where("count = 2"),
        "join": lambda: frame.join(pieces, columns, "full_outer"),
        "table": lambda: frame.join(view, columns, "left"),
        "latest_records": lambda: spark.sql(latest_records),
        "difference": lambda: frame.exceptAll(pieces),
    }
    right = dict.fromkeys(actions, 0)
    refused = 0
    with written(tmp_path, forced_s=5.0) as counts:
        for _ in range(ROUNDS):
            for name, result in actions.items():
                try:
                    found = [tuple(row)[:4] for row in result().collect()]
                except Exception as fault:
                    assert "run the action again" in str(fault), fault
                    refused += 1
                    continue
                right[name] += 1
                if name == "difference":
                    assert found == []
                else:
                    assert len(last_values(found)) == 1, name

    commits, cleanings = counts
    print(f"right: {right}, {refused} refused, {commits} commits, {cleanings} cleanings")
    assert sum(right.values()) > 0
    assert cleanings > 0
