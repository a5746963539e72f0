"""Cleaning as a Spark job does what cleaning in this process does."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from kafkalog.cleaner import CleanerConfig
from kafkalog.cleaner import spark as spark_job
from kafkalog.cleaner.schedule import manager
from kafkalog.storage_engine.directory.directory_log import DirectoryLog
from kafkalog.storage_engine.format import layout
from kafkalog.storage_engine.fs import locks

pytestmark = [pytest.mark.spark, pytest.mark.slow]
NOW = 1_700_000_000_000


def log(root: Path) -> DirectoryLog:
    engine = DirectoryLog(root)
    engine.create_topic("t", 3, {"segment.bytes": "500"})
    engine.create_topic("u", 1, {"segment.bytes": "500"})
    engine.create_topic("d", 1, {"cleanup.policy": "delete"})
    for i in range(4):
        for topic in ("t", "u"):
            engine.append(topic, [(f"k{n}", f"{i}") for n in range(30)], now_ms=NOW)
    return engine


def records(engine: DirectoryLog, topic: str) -> list[dict[str, Any]]:
    return [
        row
        for partition, _ in engine.describe(topic).present()
        for batch in engine.read(topic, partition)
        for row in batch.to_pylist()
    ]


def test_a_job_leaves_what_a_cleaning_here_leaves(spark: Any, tmp_path: Path) -> None:
    ours = log(tmp_path / "ours")
    shutil.copytree(tmp_path / "ours", tmp_path / "sparks")
    manager.clean(ours, force=True, now_ms=NOW)
    results = spark_job.clean(spark, tmp_path / "sparks", force=True)
    sparks = DirectoryLog(tmp_path / "sparks")
    assert sorted((stats.topic, stats.partition) for stats in results) == [
        ("t", 0),
        ("t", 1),
        ("t", 2),
        ("u", 0),
    ]
    assert [stats.error for stats in results] == [None] * 4
    assert sum(stats.records_kept for stats in results) == 60
    for topic in ("t", "u"):
        assert records(sparks, topic) == records(ours, topic)
    assert spark_job.clean(spark, tmp_path / "sparks", force=True) == []


def test_a_job_cleans_what_is_due_of_the_topics_that_are_named(spark: Any, tmp_path: Path) -> None:
    engine = log(tmp_path)
    results = spark_job.clean(spark, tmp_path, ["u"], config=CleanerConfig(spill=False))
    assert [(stats.topic, stats.end_offset) for stats in results] == [
        ("u", engine.describe("u").partitions[0].active_base)
    ]
    assert len(records(engine, "t")) == 120


def test_a_partition_that_cannot_be_cleaned_stops_no_other(spark: Any, tmp_path: Path) -> None:
    engine = log(tmp_path)
    path = min((tmp_path / "t-1").glob("*.log"))
    data = bytearray(path.read_bytes())
    data[70] ^= 1
    path.write_bytes(data)
    with locks.FileLock(tmp_path / "t-2" / layout.CLEANER_LOCK).exclusive():
        results = spark_job.clean(spark, tmp_path, force=True)
    faults = {(stats.topic, stats.partition): stats.error for stats in results}
    assert faults.keys() == {("t", 0), ("t", 1), ("u", 0)}
    assert path.name in str(faults["t", 1])
    assert faults["t", 0] is faults["u", 0] is None
    assert engine.describe("t").partitions[2].first_dirty_offset == 0
