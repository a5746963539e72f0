"""Attempts, retries and runs of a write: one copy of each row, and nothing left that is not used.

Every test is a sequence of Spark's calls; no JVM.
"""

from __future__ import annotations

import itertools
import os
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from kafkalog.errors import CommitConflictError, StorageError
from kafkalog.sink import plan
from kafkalog.storage_engine.directory import staged_directory
from kafkalog.storage_engine.directory.directory_log import DirectoryLog
from kafkalog.storage_engine.fs import file_system
from kafkalog.storage_engine.fs.file_system import FileSystem
from kafkalog.storage_engine.log.results import STAGED_RETENTION_MS
from kafkalog.storage_engine.writing import staging
from tests.builders.log_contents import values
from tests.unit.sink.spark_write import Row, SparkWrite, batches, staged_names, task


def rows(*texts: str) -> list[Row]:
    return [{"key": text[:1].encode(), "value": text.encode()} for text in texts]


@pytest.fixture
def write(tmp_path: Path) -> SparkWrite:
    return SparkWrite(tmp_path / "log")


def test_of_two_attempts_of_a_partition_the_one_with_a_message_counts(write: SparkWrite) -> None:
    speculative = [write.attempt(rows("a1", "b1")) for _ in range(3)]
    other = write.attempt(rows("c1"), partition=1)
    write.commit([speculative[1], other])
    assert values(write.root) == [b"a1", b"b1", b"c1"]
    assert staged_names(write.root) == []


def test_an_attempt_that_ends_after_the_commit_is_removed_by_the_next(write: SparkWrite) -> None:
    write.commit([write.attempt(rows("a1"))])
    write.attempt(rows("a1"))  # a speculative copy, whose task Spark is about to kill
    assert len(staged_names(write.root)) == 1
    write.micro_batch([rows("a2")], batch_id=1)
    assert values(write.root) == [b"a1", b"a2"]
    assert staged_names(write.root) == []


def test_an_attempt_may_lose_its_file_to_the_commit_of_another(
    write: SparkWrite, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staging, "_GATHER_SIZE", 1)
    monkeypatch.setattr(staged_directory, "_PENDING_SIZE", 0)
    counted: list[Any] = []

    def slow() -> Iterator[pa.RecordBatch]:
        yield from batches(rows("a1"), write.names, 1)
        deadline = time.monotonic() + 120
        while not staged_names(write.root):  # they are encoded while Spark brings more
            assert time.monotonic() < deadline, "nothing was staged"
            time.sleep(0.01)
        write.commit([write.attempt(rows("a1", "b1"))])
        assert staged_names(write.root) == []
        counted.append(values(write.root))
        yield from batches(rows("b1"), write.names, 1)

    properties = {"sql.streaming.queryId": write.query, "streaming.sql.batchId": "0"}
    with task(0, properties):
        write.writer().write(slow())
    assert counted == [[b"a1", b"b1"]]
    write.micro_batch([rows("c1")], batch_id=1)
    assert values(write.root) == [b"a1", b"b1", b"c1"]
    assert staged_names(write.root) == []


@pytest.mark.parametrize("plain", [False, True])
def test_what_a_killed_executor_left_goes_with_the_commit_of_its_retry(
    write: SparkWrite, plain: bool
) -> None:
    write.plain = plain
    writer = write.writer()
    write.attempt(rows("a1"), writer=writer)  # killed before its message was sent
    message = write.attempt(rows("a1"), writer=writer)
    writer.commit([message]) if plain else write.commit([message])
    assert values(write.root) == [b"a1"]
    assert staged_names(write.root) == []


def test_a_retried_stage_leaves_one_copy(write: SparkWrite) -> None:
    """An executor is lost after its tasks had ended: Spark runs these partitions again."""
    first = [write.attempt(rows(f"a{n}"), partition=n) for n in range(3)]
    again = [write.attempt(rows(f"a{n}"), partition=n) for n in (0, 2)]
    write.commit([again[0], first[1], again[1]])
    assert values(write.root) == [b"a0", b"a1", b"a2"]
    assert staged_names(write.root) == []


@pytest.mark.parametrize("failed", ["before the commit", "after the commit"])
def test_a_retried_micro_batch_leaves_one_copy(write: SparkWrite, failed: str) -> None:
    messages = [write.attempt(rows("a1"), batch_id=4), write.attempt(rows("b1"), partition=1)]
    if failed == "after the commit":
        write.commit(messages, 4)
    restarted = SparkWrite(write.root, run="run-2")
    restarted.micro_batch([rows("a1"), rows("b1")], batch_id=4)
    restarted.micro_batch([rows("a2")], batch_id=5)
    assert values(write.root) == [b"a1", b"b1", b"a2"]
    assert staged_names(write.root) == []


def test_two_queries_on_one_topic_leave_each_others_files_alone(write: SparkWrite) -> None:
    other = SparkWrite(write.root, query="query-2")
    mine, theirs = write.attempt(rows("a1")), other.attempt(rows("a2"))
    write.attempt(rows("lost"), partition=1)
    write.commit([mine])
    assert len(staged_names(write.root)) == 1
    write.abort([write.attempt(rows("a3"), batch_id=1), None], 1)
    other.commit([theirs])
    assert values(write.root) == [b"a1", b"a2"]
    assert staged_names(write.root) == []


def test_an_abort_leaves_alone_what_a_newer_run_of_the_query_stages(write: SparkWrite) -> None:
    old = write.attempt(rows("a1"))
    newer = SparkWrite(write.root, run="run-2")
    message = newer.attempt(rows("a1"))
    write.attempt(rows("b1"), partition=1)
    write.abort([old, None])
    newer.commit([message])
    assert values(write.root) == [b"a1"]
    assert staged_names(write.root) == []


def test_an_abort_without_a_single_message_leaves_files_to_the_next_commit(
    write: SparkWrite, tmp_path: Path
) -> None:
    (tmp_path / "metadata").write_text('{"id":"query-1"}')
    write.options["checkpointLocation"] = str(tmp_path)
    write.attempt(rows("a1"))
    newer = SparkWrite(write.root, run="run-2")
    message = newer.attempt(rows("a1"))
    write.abort([None, None])
    newer.commit([message])
    assert values(write.root) == [b"a1"]
    assert staged_names(write.root) == []


def test_an_abort_leaves_alone_what_another_job_of_the_same_transaction_stages(
    write: SparkWrite,
) -> None:
    write.options |= {"txnAppId": "monthly", "txnVersion": "202610"}
    first, second = write.writer(), write.writer()
    kept = write.attempt(rows("a1"), writer=first)
    write.attempt(rows("a1"), writer=second)
    second.abort([None])
    first.commit([kept])
    assert values(write.root) == [b"a1"]
    assert staged_names(write.root) == []


def test_the_plan_of_a_micro_batch_is_durable_before_its_rows(
    write: SparkWrite, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = tmp_path / "checkpoint"
    for name in ("metadata", "offsets/0", "offsets/1", "offsets/.1.crc", "sources/0/1"):
        path = checkpoint / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("v1")
    write.options["checkpointLocation"] = f"file://{checkpoint}"
    synced: list[str] = []

    class Noted(FileSystem):
        def fsync(self, fd: int) -> None:
            synced.append(os.readlink(f"/proc/self/fd/{fd}").removeprefix(f"{tmp_path}/"))
            super().fsync(fd)

    monkeypatch.setattr(file_system, "current", Noted())
    message = write.attempt(rows("a1"), batch_id=1)
    assert "checkpoint/offsets/1" in synced  # a head start, of which the commit knows nothing
    synced.clear()
    plan._synced.clear()  # the commit is another process
    monkeypatch.setattr(plan, "_SETTLED_NS", -1)
    write.commit([message], 1)
    rows_are_in = synced.index("log/t-0/00000000000000000000.log")
    for name in ("metadata", "offsets/1", "offsets/.1.crc", "sources/0/1", "offsets", "sources/0"):
        assert f"checkpoint/{name}" in synced[:rows_are_in], synced
    assert "checkpoint/offsets/0" not in synced
    synced.clear()
    write.commit([write.attempt(rows("a2"), batch_id=2)], 2)
    assert "checkpoint/metadata" not in synced  # once per process


def test_an_abort_of_batch_1_leaves_batch_10_alone(write: SparkWrite) -> None:
    kept = write.attempt(rows("a1"), batch_id=10)
    write.abort([write.attempt(rows("a2"), batch_id=1)], 1)
    write.commit([kept], 10)
    assert values(write.root) == [b"a1"]


def test_a_commit_that_fails_is_aborted_and_can_be_done_again(write: SparkWrite) -> None:
    message = write.attempt(rows("a1"))
    (file,) = write.root.glob("*.staged")
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(StorageError, match="run the batch again"):
        write.commit([message])
    assert staged_names(write.root) == []
    write.micro_batch([rows("a1")])
    assert values(write.root) == [b"a1"]


def test_the_grace_time_is_longer_than_any_use(write: SparkWrite) -> None:
    plain = SparkWrite(write.root, plain=True)
    plain.attempt(rows("a1"))  # a driver that died: nobody will name this file again
    message = write.attempt(rows("b1"))
    (abandoned, *_) = (path for path in write.root.glob("*.staged"))
    written_ms = int(abandoned.stat().st_mtime * 1000)
    engine = DirectoryLog(write.root)
    assert engine.sweep_staged(now_ms=written_ms + STAGED_RETENTION_MS // 2) == 0
    write.commit([message])
    assert engine.sweep_staged(now_ms=written_ms + STAGED_RETENTION_MS + 2000) == 1
    assert values(write.root) == [b"b1"]


def test_large_runs_of_lost_attempts_go_too(
    write: SparkWrite, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staged_directory, "SEGMENT_RUN_SIZE", 500)
    monkeypatch.setattr(staging, "_GATHER_SIZE", 1)
    write.batch_rows = 40
    many = rows(*(f"{n % 10}-{n:050d}" for n in range(200)))
    write.attempt(many)
    assert any(name.endswith(".staged-offsets") for name in staged_names(write.root))
    write.micro_batch([many])
    assert values(write.root) == [row["value"] for row in many]
    assert staged_names(write.root) == []


def test_one_app_id_and_version_for_several_topics_loses_nothing(write: SparkWrite) -> None:
    """Delta's idiom inside foreachBatch: (id, version) per micro-batch, whatever is written."""
    for version, _ in itertools.product(("3", "4"), range(2)):  # each batch comes twice
        for topic in ("x", "y"):
            write.options = {"topic": topic, "txnAppId": "job", "txnVersion": version}
            write.commit([write.attempt(rows(f"{topic}{version}"))])
    assert values(write.root, "x") == [b"x3", b"x4"]
    assert values(write.root, "y") == [b"y3", b"y4"]
    write.options = {"topic": "x", "txnAppId": "job", "txnVersion": "3"}
    with pytest.raises(CommitConflictError, match=r"committed 4 at .*, got 3"):
        write.commit([write.attempt(rows("x5"))])
    assert staged_names(write.root) == []


@pytest.mark.parametrize("seed", range(6))
def test_any_mixture_of_failures_leaves_one_copy_of_each_row(tmp_path: Path, seed: int) -> None:
    """Two queries; attempts doubled, lost, late; commits failing, forgotten; drivers replaced."""
    chance = random.Random(seed)
    queries = [SparkWrite(tmp_path / "log", query=f"query-{n}") for n in range(2)]
    runs = itertools.count()
    expected: list[bytes] = []
    for batch_id in range(6):
        for query in queries:
            parts = [
                rows(*(f"{query.query}/{batch_id}/{part}/{n}" for n in range(chance.randint(0, 4))))
                for part in range(3)
            ]
            expected += [row["value"] for part in parts for row in part]
            while not _try(query, parts, batch_id, chance):
                query.run = f"run-{next(runs)}"
    for query in queries:
        query.micro_batch([rows("end")], batch_id=6)
    found = values(tmp_path / "log")
    assert sorted(v for v in found if v != b"end") == sorted(expected)
    assert staged_names(tmp_path / "log") == []


def _try(query: SparkWrite, parts: list[list[Row]], batch_id: int, chance: random.Random) -> bool:
    """Run a micro-batch as an unlucky Spark; False when its driver does not live to know it."""
    messages: list[Any] = []
    for number, part in enumerate(parts):
        attempts = [
            query.attempt(part, partition=number, batch_id=batch_id)
            for _ in range(chance.randint(1, 3))
        ]
        messages.append(chance.choice(attempts))
        if chance.random() < 0.1:  # the stage fails
            query.abort([*messages, None], batch_id)
            return False
    if chance.random() < 0.1:
        return False
    query.commit(messages, batch_id)
    if chance.random() < 0.3:
        query.attempt(parts[0], partition=0, batch_id=batch_id)
    return chance.random() > 0.2
