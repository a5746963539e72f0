"""All tasks of an action see one moment, whatever is committed, cleaned and retried meanwhile.

A process commits, every 50 ms, one atomic change of all keys in four partitions, and cleans the
topic all the time. Meanwhile Spark reads the table, and joins it with itself, also with tasks that
fail and are done again when hundreds of commits have passed. Two values in one result are a mixed
moment. KAFKALOG_MOMENTS=full does it 100 and 20 times.
"""

from __future__ import annotations

import contextlib
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kafkalog.storage_engine.engine import Engine
from tests.acceptance.moment_writer import CONFIG, KEYS_PER_PARTITION, PARTITIONS, TOPIC, rows
from tests.datasource.logs import rows as rows_of
from tests.datasource.logs import source
from tests.datasource.spark_task import task

IS_FULL = os.environ.get("KAFKALOG_MOMENTS") == "full"
READS, JOINS = (100, 20) if IS_FULL else (10, 3)
FAILING_READS, FAILING_JOINS = (20, 5) if IS_FULL else (1, 1)
KEYS = PARTITIONS * KEYS_PER_PARTITION


@contextlib.contextmanager
def written(root: Path) -> Iterator[list[int]]:
    """Let the table change, and wait until it does and is cleaned.

    In the end the list has the counts of commits and of cleanings.
    """
    counts: list[int] = []
    command = [sys.executable, "-m", "tests.acceptance.moment_writer", str(root), "0.05"]
    writer = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        with Engine(root, read_only=True) as engine:
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
    with Engine(tmp_path) as engine:
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
        for action in range(3 * (READS + JOINS)):
            with task(str(action)):
                seen.append(look(1 if action < 3 * READS else 2))

    commits, cleanings = counts
    print(f"{len(seen)} actions, {commits} commits, {cleanings} cleanings")
    assert [values for values in seen if len(values) > 1] == []
    assert len(set().union(*seen)) > 2
    assert cleanings > 0


@pytest.mark.spark
@pytest.mark.slow
def test_no_action_sees_two_moments(spark: Any, tmp_path: Path) -> None:
    with Engine(tmp_path) as engine:
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
