"""Micro-batches after a checkpoint or a log was restored, or with a checkpoint of two queries."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import kafkalog
from kafkalog.errors import CommitConflictError
from kafkalog.sink.shared_log import shared_log
from kafkalog.storage_engine.fs import clock
from kafkalog.storage_engine.metadata.writer import WRITER_RETENTION_MS
from kafkalog.storage_engine.place import written_place
from kafkalog.storage_engine.writing.writers import forget_writer
from tests.unit.rules.places import DIRECTORY, OBJECTS, new_log
from tests.unit.sink.spark_write import SparkWrite

QUERY = "11111111-2222-3333-4444-555555555555"


class Stream:
    """A streaming query with a checkpoint on disk, as Spark writes it, and a log."""

    def __init__(self, place: Any, checkpoint: Path) -> None:
        self.place, self.checkpoint = place, checkpoint
        self.planned_ms = clock.now_ms()
        self.options: dict[str, str] = {"checkpointLocation": str(checkpoint)}
        self.settings: dict[str, str] = {}
        (checkpoint / "offsets").mkdir(parents=True)
        (checkpoint / "metadata").write_text(json.dumps({"id": QUERY}))

    def plan(self, batch_id: int, *sources: str, version: str = "v1") -> None:
        lines = [version, json.dumps({"batchTimestampMs": self.planned_ms}), *sources]
        (self.checkpoint / "offsets" / str(batch_id)).write_text("\n".join(lines))

    def write(self, batch_id: int, *values: str) -> None:
        given = {"topic": "t", **self.options}
        rows = [{"key": value, "value": value} for value in values]
        write = SparkWrite(str(self.place), given, query=QUERY, settings=self.settings)
        write.micro_batch([rows], batch_id)

    def run(self, batch_id: int, end: int, *values: str) -> None:
        """Plan a micro-batch to `end`, and write its rows."""
        self.plan(batch_id, json.dumps({"in": {"0": end}}))
        self.write(batch_id, *values)

    def refused(self, batch_id: int, end: int, *values: str) -> str:
        with pytest.raises(CommitConflictError) as fault:
            self.run(batch_id, end, *values)
        return str(fault.value)

    def reset(self) -> Stream:
        other = Stream.__new__(Stream)
        other.__dict__.update(self.__dict__, options={**self.options, "resetWriter": "true"})
        return other

    def elsewhere(self, place: Any) -> Stream:
        other = Stream.__new__(Stream)
        other.__dict__.update(self.__dict__, place=place)
        return other

    def values(self) -> list[str]:
        with kafkalog.open(str(self.place), read_only=True) as log:
            found = [
                value.decode()
                for partition in log.offsets("t")
                for batch in log.read("t", partition)
                for value in batch.column("value").to_pylist()
            ]
        return sorted(found)


@pytest.fixture(params=[DIRECTORY, OBJECTS])
def places(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Any]:
    """Yield new logs of one kind."""
    return (new_log(request.param, tmp_path / f"log{number}") for number in range(9))


@pytest.fixture
def stream(places: Iterator[Any], tmp_path: Path) -> Stream:
    return Stream(next(places), tmp_path / "checkpoint")


def test_the_same_plan_again_is_dropped(stream: Stream) -> None:
    stream.plan(0, '{"in": {"0": 1, "1": 2}}', "-", "7")
    stream.write(0, "a")
    stream.plan(0, '{"in":{"1":2,"0":1}}', "-", "7")
    stream.write(0, "a")
    stream.plan(0, '2:7\n0:{"in":{"1":2,"0":1}}\n1:-', version="v2")
    stream.write(0, "a")
    assert stream.values() == ["a"]


@pytest.mark.parametrize(
    ("sources", "word"),
    [
        (['{"in": {"0": 30}}'], "another plan"),
        (['{"in": {"0": 19}}'], "another plan"),
        (['{"in": {"0": 20, "1": 0}}'], "another plan"),
        (["20"], "another plan"),
        (["-"], "another plan"),
        (['{"in": {"0": 20}}', '{"u": {"0": 1}}'], "others, of 2 sources instead of 1"),
    ],
)
def test_a_last_micro_batch_with_other_ends_is_refused_until_the_writer_is_reset(
    stream: Stream, sources: list[str], word: str
) -> None:
    stream.run(0, 10, "a")
    stream.run(1, 20, "b")
    stream.plan(1, *sources)
    for _ in range(2):
        with pytest.raises(CommitConflictError, match=rf"{word}.*restored.*resetWriter=true"):
            stream.write(1, "b", "e")
    assert stream.values() == ["a", "b"]
    stream.reset().write(1, "b", "e")
    stream.write(1, "b", "e")
    stream.run(2, 40, "f")
    assert stream.values() == ["a", "b", "b", "e", "f"]


@pytest.mark.parametrize("log_file", ["1", "1.compact"])
def test_other_files_of_a_source_of_files_are_other_ends(stream: Stream, log_file: str) -> None:
    def plan(path: str) -> None:
        entry = {"path": path, "timestamp": 1, "batchId": 1}
        text = f"v1\n{json.dumps(entry, separators=(',', ':'))}\n"
        (stream.checkpoint / "sources" / "0").mkdir(parents=True, exist_ok=True)
        (stream.checkpoint / "sources" / "0" / log_file).write_text(text)
        stream.plan(1, '{"logOffset":1}')

    stream.run(0, 1, "a")
    plan("file:///b")
    stream.write(1, "b")
    stream.write(1, "b")
    plan("file:///c")
    with pytest.raises(CommitConflictError, match="another plan"):
        stream.write(1, "c")
    assert stream.values() == ["a", "b"]


def test_a_list_of_files_that_spark_has_removed_proves_nothing(stream: Stream) -> None:
    stream.plan(0, '{"logOffset":0}')
    stream.write(0, "a")
    stream.run(1, 1, "b")
    assert stream.values() == ["a", "b"]


@pytest.mark.parametrize("behind", [1, 2, 3])
def test_a_checkpoint_of_several_micro_batches_ago_is_refused_until_the_writer_is_reset(
    stream: Stream, behind: int
) -> None:
    for number in range(5):
        stream.run(number, number + 1, f"{number}")
    first = 4 - behind
    assert "this checkpoint is older than the log: committed 4" in stream.refused(first, 9, "e")
    stream.reset().run(first, 9, "e")
    stream.run(first + 1, 10, "f")
    assert stream.values() == ["0", "1", "2", "3", "4", "e", "f"]


@pytest.mark.parametrize(("kept", "missing"), [(1, "batches 1 to 3 are"), (3, "batch 3 is")])
def test_a_log_that_lacks_micro_batches_refuses_the_next_one_until_the_writer_is_reset(
    stream: Stream, places: Iterator[Any], kept: int, missing: str
) -> None:
    restored = stream.elsewhere(next(places))
    for number in range(4):
        stream.run(number, number + 1, f"{number}")
        if number < kept:
            restored.run(number, number + 1, f"{number}")
    assert f"micro-{missing} not in the log" in restored.refused(4, 5, "4")
    restored.reset().run(4, 5, "4")
    restored.run(5, 6, "5")
    assert restored.values() == [*map(str, range(kept)), "4", "5"]


def test_a_log_without_any_micro_batch_of_a_query_refuses_a_later_one(
    stream: Stream, places: Iterator[Any]
) -> None:
    stream.run(0, 1, "a")
    stream.run(1, 2, "b")
    new = stream.elsewhere(next(places))
    assert "micro-batches 0 to 1 are not in the log" in new.refused(2, 3, "c")
    new.reset().run(2, 3, "c")
    new.run(3, 4, "d")
    assert new.values() == ["c", "d"]


def test_micro_batches_without_rows_are_not_a_gap(stream: Stream) -> None:
    stream.run(0, 1)
    stream.run(1, 2, "a")
    for number in (2, 3, 4):
        stream.run(number, number + 1)
    stream.run(5, 6, "b")
    stream.run(6, 7)
    assert "another plan" in stream.refused(6, 8, "c")
    assert stream.values() == ["a", "b"]


def test_a_query_that_was_idle_until_the_log_forgot_it_goes_on(
    stream: Stream, places: Iterator[Any]
) -> None:
    stream.planned_ms -= WRITER_RETENTION_MS + 86_400_000
    stream.plan(6, "1")
    stream.elsewhere(next(places)).run(7, 1, "a")


@pytest.mark.parametrize("by", ["the user", "the topic's deletion"])
def test_a_query_that_was_made_forgotten_goes_on(stream: Stream, by: str) -> None:
    stream.run(0, 1, "a")
    engine, now_ms = shared_engine_of(stream), clock.now_ms()
    if by == "the user":
        forget_writer(engine, QUERY, now_ms=now_ms)
    else:
        engine.delete_topic("t", now_ms=now_ms)
    stream.run(1, 2, "b")
    assert stream.values() == (["a", "b"] if by == "the user" else ["b"])
    assert "another plan" in stream.refused(1, 3, "c")


def shared_engine_of(stream: Stream) -> Any:
    return shared_log(written_place({"path": str(stream.place)}))


def test_two_queries_on_copies_of_a_checkpoint_are_told_apart(
    stream: Stream, tmp_path: Path
) -> None:
    other = Stream(stream.place, tmp_path / "copy")
    stream.run(0, 1, "a")
    other.plan(0, '{"in": {"0": 1}}')
    stream.run(1, 2, "b")
    assert "two queries write with copies" in other.refused(1, 3, "b", "c")
    assert "two queries write with copies" in other.refused(2, 4, "d")
    stream.run(2, 4, "c")
    assert "another query writes with a copy" in other.refused(1, 3, "b", "c")
    assert stream.values() == ["a", "b", "c"]


def test_without_a_readable_plan_the_id_alone_decides(stream: Stream) -> None:
    stream.options["checkpointLocation"] = "s3://bucket/checkpoint"
    stream.write(0, "a")
    stream.write(0, "b")
    stream.write(2, "c")
    assert stream.values() == ["a", "c"]


def test_a_checkpoint_in_the_directory_of_the_session_is_read(
    stream: Stream, places: Iterator[Any], tmp_path: Path
) -> None:
    stream.options = {"queryName": "checkpoint"}
    stream.settings = {"spark.sql.streaming.checkpointLocation": f"file://{tmp_path}/"}
    stream.run(0, 1, "a")
    stream.run(1, 2, "b")
    assert "another plan" in stream.refused(1, 3, "b", "e")
    assert "micro-batches 0 to 1 are not" in stream.elsewhere(next(places)).refused(2, 3, "e")
    stream.reset().run(1, 3, "b", "e")
    assert stream.values() == ["a", "b", "b", "e"]


def test_a_checkpoint_of_another_query_proves_nothing(stream: Stream) -> None:
    stream.run(0, 1, "a")
    (stream.checkpoint / "metadata").write_text(json.dumps({"id": QUERY.replace("1", "9")}))
    stream.run(0, 2, "b")
    assert stream.values() == ["a"]


def test_an_append_in_foreach_batch_may_leave_micro_batches_out(
    stream: Stream, tmp_path: Path
) -> None:
    def append(batch_id: int, end: int, *values: str, **more: str) -> None:
        stream.plan(batch_id, json.dumps({"in": {"0": end}}))
        once = {"txnAppId": QUERY, "txnVersion": str(batch_id)}
        stream.options = {"checkpointLocation": str(stream.checkpoint), **once, **more}
        stream.write(batch_id, *values)

    append(3, 1, "a")
    append(7, 2, "b")
    append(7, 2, "b")
    with pytest.raises(CommitConflictError, match="another plan"):
        append(7, 3, "b", "c")
    with pytest.raises(CommitConflictError, match="older than the log"):
        append(6, 3, "c")
    append(7, 3, "c", resetWriter="true")
    append(8, 4, "d")
    assert stream.values() == ["a", "b", "c", "d"]


def test_a_log_of_a_release_that_kept_no_ends_goes_on(stream: Stream) -> None:
    stream.run(0, 1, "a")
    engine = shared_engine_of(stream)
    known = engine.state().writers[f"{QUERY} t"]
    assert known.ends is not None
    old = known._replace(ends=None)
    engine.change(
        lambda change: change.record_writer(f"{QUERY} t", old.batch_id, old.rows, old.time_ms),
        now_ms=clock.now_ms(),
    )
    stream.run(0, 9, "a")
    stream.run(3, 9, "b")
    assert stream.values() == ["a", "b"]
