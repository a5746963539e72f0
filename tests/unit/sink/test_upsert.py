"""What all upserts have in common: which micro-batches are due, and how many rows they may be."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql.types import IntegerType, StructField, StructType

import kafkalog
from kafkalog.errors import CommitConflictError, InvalidInputError
from kafkalog.sink.query import MicroBatch
from kafkalog.sink.upsert import Batch, Position, Upsert
from kafkalog.sink.upsert.bad_records import BadRecords, plan_number
from kafkalog.sink.upsert.driver_batches import parts_for
from kafkalog.sink.upsert.latest import Version, newest_first
from kafkalog.values.row_marks import deletion_column


class Remembering(Upsert):
    """An upsert whose target is this object."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self.known: dict[str, Position] = {}
        self.batches: list[Batch] = []

    def positions(self) -> dict[str, Position]:
        return self.known

    def has_rows(self) -> bool:
        return bool(self.known)

    def additions(self, spark: Any, rows: Any) -> list[str]:
        return []

    def _apply(self, df: Any, batch: Batch, position: Position | None) -> None:
        self.known[batch.query_id] = batch.position(refused=0)
        self.batches.append(batch)


def batch(batch_id: int, **ends: int) -> Batch:
    offsets = {"t": {name[1:]: end for name, end in ends.items()}} if ends else {}
    return Batch("q", batch_id, "run", offsets, 1_700_000_000_000)


A_NUMBER = StructType([StructField("a", IntegerType())])
AT_3 = Position(3, {"t": {"0": 10, "1": 5}}, 1_700_000_000_000)


@pytest.mark.parametrize(
    ("given", "is_due"),
    [
        (batch(4, p0=10, p1=5), True),
        (batch(4), True),
        (batch(9, p0=1), True),
        (batch(3, p0=10, p1=5), False),
        (batch(3), False),
        (batch(3, p0=9, p1=6), True),
        (batch(3, p0=10, p1=5, p2=0), True),
    ],
)
def test_a_batch_is_due_when_it_is_later_or_reaches_further(given: Batch, is_due: bool) -> None:
    assert Remembering("t").is_due(given, AT_3) is is_due
    assert Remembering("t").is_due(given, None)


def test_the_last_batch_with_fewer_records_is_refused_unless_the_writer_is_reset() -> None:
    shorter = batch(3, p0=9, p1=5)
    with pytest.raises(CommitConflictError, match="with fewer records than the table has"):
        Remembering("t").is_due(shorter, AT_3)
    assert Remembering("t", reset_writer=True).is_due(shorter, AT_3)


@pytest.mark.parametrize(
    ("position", "starts", "is_lost"),
    [
        (AT_3, {"0": 10, "1": 5}, False),
        (AT_3, {"0": 9}, False),
        (AT_3, {"0": 10, "1": 6}, True),
        (AT_3, {"2": 1}, True),
        (None, {"0": 0}, False),
        (None, {"0": 1}, True),
    ],
)
@pytest.mark.parametrize("batch_id", [4, 7])
def test_a_batch_that_begins_above_the_table_is_refused_unless_the_writer_is_reset(
    position: Position | None, starts: dict[str, int], is_lost: bool, batch_id: int
) -> None:
    given = replace(batch(batch_id, p0=20, p1=20), start_offsets={"t": starts})
    Remembering("t", reset_writer=True)._check_gap(given, position)
    if is_lost:
        with pytest.raises(CommitConflictError, match="lacks the changes between"):
            Remembering("t")._check_gap(given, position)
    else:
        Remembering("t")._check_gap(given, position)


def test_a_function_may_leave_out_micro_batches_of_its_run() -> None:
    rows: Any = None
    upsert = Remembering("leaving out")
    for number, run in ((0, "run 1"), (2, "run 1"), (4, "run 2")):
        running = MicroBatch("q", number, run)
        starts, ends = {"t": {"0": number}}, {"t": {"0": number + 1}}
        if run == "run 1":
            upsert.take(rows, number, running, ends, start_offsets=starts)
        else:  # what the table lacks now may be of a restore
            with pytest.raises(CommitConflictError, match="reset_writer=True accepts the gap"):
                upsert.take(rows, number, running, ends, start_offsets=starts)


@pytest.mark.parametrize(("first", "is_lost"), [(0, False), (1, True), (None, True)])
def test_a_function_may_leave_out_the_first_micro_batches_of_a_query(
    first: int | None, is_lost: bool
) -> None:
    given = replace(batch(1, p0=2), start_offsets={"t": {"0": 1}}, first_of_run=first)
    if is_lost:
        with pytest.raises(CommitConflictError, match="reset_writer=True accepts the gap"):
            Remembering("first ones")._check_gap(given, None)
    else:
        Remembering("first ones")._check_gap(given, None)


def test_a_table_that_is_put_back_while_its_query_runs_is_refused() -> None:
    upsert = Remembering("put back")
    rows: Any = None
    upsert.take(rows, 0, MicroBatch("q", 0, "run"), {"t": {"0": 1}}, first_of_run=0)
    upsert.known.clear()
    with pytest.raises(CommitConflictError, match="reset_writer=True accepts the gap"):
        upsert.take(
            rows,
            1,
            MicroBatch("q", 1, "run"),
            {"t": {"0": 2}},
            start_offsets={"t": {"0": 1}},
            first_of_run=0,
        )


def test_a_query_without_offsets_is_known_by_its_batch_ids_alone() -> None:
    assert not Remembering("t").is_due(batch(3), Position(3, {}, 0))


@pytest.mark.parametrize(
    ("first", "second", "is_due"),
    [
        (("files", {}), ("others", {}), True),
        (("files", {}), ("files", {}), False),
        (("files", {"t": {"0": 5}}), ("others", {"t": {"0": 5}}), True),
        ((None, {"t": {"0": 5}}), ("files", {}), True),
    ],
)
def test_a_batch_that_comes_again_with_other_files_is_due(
    first: tuple[Any, Any], second: tuple[Any, Any], is_due: bool
) -> None:
    rows: Any = None
    upsert = Remembering("files", checkpoint=None)
    for run, (others, ends) in enumerate([first, second, second]):
        running = MicroBatch("q", 0, f"run {run}")
        upsert.take(rows, 0, running, ends, other_ends=others)
    assert len(upsert.batches) == 1 + is_due


def test_a_micro_batch_that_had_no_rows_and_comes_again_with_rows_is_applied() -> None:
    rows: Any = None
    upsert = Remembering("filled")  # under Spark Connect the rows say how far a micro-batch reaches
    upsert.take(rows, 0, MicroBatch("q", 0, "run 1"), batch(0).end_offsets)
    upsert.take(rows, 0, MicroBatch("q", 0, "run 2"), batch(0, p0=10).end_offsets)
    upsert.take(rows, 0, MicroBatch("q", 0, "run 3"), batch(0, p0=10).end_offsets)
    assert [each.end_offsets for each in upsert.batches] == [{}, {"t": {"0": 10}}]


def test_dead_letters_of_another_plan_of_a_micro_batch_are_not_a_repetition() -> None:
    given = plan_number(3, {"t": {"0": 10, "1": 5}}, 7)
    assert given == plan_number(3, {"t": {"1": 5, "0": 10}}, 7)
    others = [(3, {"t": {"0": 11, "1": 5}}), (4, {"t": {"0": 10, "1": 5}}), (3, {}), (4, {})]
    assert len({given, *(plan_number(*plan, 7) for plan in others)}) == 5
    assert plan_number(3, {"t": {"0": 10, "1": 5}}, 8) != given


def test_only_a_micro_batch_that_was_planned_again_has_been_applied_in_part() -> None:
    rows: Any = None
    upsert = Remembering("planned", reset_writer=True)
    upsert.known["q"] = AT_3
    for run, (batch_id, end) in enumerate([(3, 12), (4, 20), (2, 21)]):
        ends = {"t": {"0": end, "1": 5}}
        upsert.take(rows, batch_id, MicroBatch("q", batch_id, f"run {run}"), ends)
    applied = [each.applied for each in upsert.batches]
    assert applied == [AT_3.end_offsets, {}, {"t": {"0": 20, "1": 5}}]


class RefusedRecord(Exception):
    """As Spark raises it for `raise_error`."""

    def getCondition(self) -> str:
        return "USER_RAISED_EXCEPTION"

    def getMessageParameters(self) -> dict[str, str]:
        return {"errorMessage": "t-0 offset 3: no number"}


def test_an_error_about_a_record_names_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*given: Any) -> None:
        raise RefusedRecord

    upsert = Remembering("naming")
    monkeypatch.setattr(upsert, "_apply", fail)
    rows: Any = None
    with pytest.raises(InvalidInputError, match=r"^table naming: t-0 offset 3: no number$"):
        upsert.take(rows, 0, MicroBatch("q", 0, "run 1"), {})


def test_an_earlier_batch_is_refused_unless_the_writer_is_reset() -> None:
    words = r"^table t: this checkpoint is older than the table: committed 3 at \d\d:\d\d, got 2; "
    with pytest.raises(CommitConflictError, match=words + "reset_writer=True accepts it$"):
        Remembering("t").is_due(batch(2), AT_3)
    assert Remembering("t", reset_writer=True).is_due(batch(2), AT_3)


@pytest.mark.parametrize(
    ("position", "batch_id", "is_gap"),
    [(None, 0, False), (None, 1, True), (AT_3, 4, False), (AT_3, 5, True), (AT_3, 3, False)],
)
def test_a_jump_is_warned_of_and_refused_by_a_view(
    position: Position | None,
    batch_id: int,
    is_gap: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING, "kafkalog.sink")
    upsert = Remembering("t")
    upsert._check_gap(batch(batch_id), position)
    assert ("lacks the changes between" in caplog.text) is is_gap
    upsert.refuses_gaps = True
    if is_gap:
        with pytest.raises(CommitConflictError, match="start the view again, it will be rebuilt"):
            upsert._check_gap(batch(batch_id), position)
    else:
        upsert._check_gap(batch(batch_id), position)


def test_a_query_has_one_upsert_to_a_table_in_a_micro_batch() -> None:
    rows: Any = None
    first, second, other = Remembering("here"), Remembering("here"), Remembering("there")
    running = MicroBatch("twice", 0, "run 1")
    first.take(rows, 0, running, {})
    other.take(rows, 0, running, {})
    with pytest.raises(InvalidInputError, match="table here: a second upsert of micro-batch 0 of"):
        second.take(rows, 0, running, {})
    first.take(rows, 1, running, {})
    again = MicroBatch("twice", 0, "run 2")
    first.take(rows, 1, again, {})  # a start repeats the last one


def test_an_upsert_that_failed_may_be_called_again() -> None:
    rows: Any = None
    upsert, running = Remembering("failing"), MicroBatch("failing", 0, "run 1")
    upsert.known["failing"] = Position(5, {}, 0)
    with pytest.raises(CommitConflictError):
        upsert.take(rows, 4, running, {})
    upsert.reset_writer = True
    upsert.take(rows, 4, running, {})
    assert upsert.known["failing"].batch_id == 4


def test_only_the_first_micro_batch_of_all_replaces_a_table() -> None:
    rows: Any = None
    upsert = Remembering("replaced", replace_first=True)
    upsert.take(rows, 3, MicroBatch("late", 0, "run 1"), {})  # its position was lost
    upsert.take(rows, 0, MicroBatch("first", 0, "run 1"), {})
    upsert.take(rows, 1, MicroBatch("first", 0, "run 1"), {})
    assert [(b.query_id, b.batch_id) for b in upsert.batches if b.is_replacing] == [("first", 0)]


def test_rows_are_at_most_the_offsets_since_the_position() -> None:
    assert batch(4, p0=12, p1=5, p2=3).record_count_max(AT_3) == 5
    assert batch(4, p0=8, p1=6).record_count_max(AT_3) == 1
    assert batch(4, p0=12, p1=5).record_count_max(None) == 17
    assert batch(4).record_count_max(AT_3) is None
    # One that comes again, or comes from an older checkpoint, begins before the position.
    assert batch(3, p0=12, p1=5).record_count_max(AT_3) == 17


@pytest.mark.parametrize(
    ("versions", "expected"),
    [
        # Within a partition the offset counts, whatever the timestamps say.
        ([(0, 1, 100), (0, 2, 5), (0, 3, 50)], [3, 2, 1]),
        # Between partitions the timestamps of their latest records count.
        ([(0, 1, 100), (0, 2, 5), (1, 7, 50)], [7, 2, 1]),
        ([(0, 1, 10), (0, 9, None), (1, 7, 5)], [7, 9, 1]),
        ([(0, 9, 50), (1, 7, 50), (1, 6, None)], [7, 9, 6]),
        ([(0, 9, None), (1, 7, None)], [7, 9]),
    ],
)
def test_each_record_of_a_key_is_the_latest_without_those_before_it(
    versions: list[tuple[int, int, int | None]], expected: list[int]
) -> None:
    given = [Version("t", *version, number=0) for version in versions]
    assert [version.offset for version in newest_first(given)] == expected


@pytest.mark.parametrize("name", ["deleted", "Deleted", "DELETED"])
def test_the_column_of_deletions_is_found_in_any_case(name: str) -> None:
    assert deletion_column(["key", name, "value"]) == name
    assert deletion_column(["key", "is_deleted"]) is None


def test_a_part_has_25_thousand_rows_until_there_are_400_parts() -> None:
    assert parts_for(None) is None
    assert [parts_for(rows) for rows in (0, 1, 25_000, 25_001)] == [1, 1, 1, 2]
    assert parts_for(10_000_000) == 400
    assert parts_for(10**12) == 400


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"select": ["key"], "schema": "a int"}, "select or schema, not both"),
        ({"select": "key"}, "a list of expressions"),
        ({"key_type": "int"}, 'key_type is "binary" or "string"'),
        ({"select": ["key"], "key_type": "string"}, "goes without select"),
        ({"table": ""}, "not a table name"),
        ({"table": "a\0b"}, "not a table name"),
    ],
)
def test_contradicting_arguments_are_refused(more: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidInputError, match=words):
        Remembering(**{"table": "t", **more})


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"on_bad_record": "deadletter"}, r'is "fail", "skip" or "deadletter:<topic>"'),
        ({"on_bad_record": None}, r'is "fail", "skip" or "deadletter:<topic>", not None'),
        ({"on_bad_record": 5}, r'is "fail", "skip" or "deadletter:<topic>", not 5'),
        ({"on_bad_record": "deadletter:a b"}, "on_bad_record, the dead-letter topic: "),
        ({"on_bad_record": "skip", "select": lambda df: df}, "a select function leaves out"),
        ({"on_new_column": "drop"}, 'on_new_column is "fail" or "add"'),
        ({"key": ["region", "id"]}, "needs select, or schema without key_type"),
        ({"key": ["a", "A"], "schema": "a int"}, "one or more different columns"),
        ({"key": None, "schema": "a int"}, "one or more different columns, not None"),
        ({"key": [1], "schema": "a int"}, "one or more different columns"),
        ({"key": "", "select": ["value"]}, "one or more different columns"),
        ({"key": ["b"], "schema": A_NUMBER}, "key names the column b .*found a"),
        ({"schema": StructType()}, "schema: expected the schema of a struct"),
        ({"key": [], "schema": "a int"}, "one or more different columns"),
        ({"key": ["id"], "schema": "id int", "key_type": "string"}, "schema without key_type"),
        ({"on_bad_records": "skip"}, r"no argument on_bad_records= \(expected on_bad_record=\)"),
        ({"jsn": None}, r"there is no argument jsn= \(expected json=\)"),
        ({"zz": 1}, r"no argument zz= \(expected one of avro, checkpoint, "),
    ],
)
def test_arguments_that_do_not_go_together_are_refused(given: Any, words: str) -> None:
    with pytest.raises(InvalidInputError, match=words):
        Remembering("t", **given)


def test_the_dead_letters_of_a_view_go_to_its_log_unless_another_is_given() -> None:
    rule = BadRecords.parse("deadletter:bad", "")
    assert rule.beside("/log", "orders") == BadRecords(True, "bad", "/log")
    elsewhere = BadRecords.parse("deadletter:bad", "/other").beside("/log", "orders")
    assert (elsewhere.path, elsewhere.is_elsewhere) == ("/other", True)
    assert BadRecords.parse("skip", "").beside("/log", "orders").path == "/log"


def test_a_dead_letter_topic_needs_its_log() -> None:
    with pytest.raises(InvalidInputError, match="Give the upsert path=, the log of the topic"):
        BadRecords.parse("deadletter:bad", "").check({})


@pytest.mark.parametrize("path", ["", "/log", "file:/log", "/more/../log"])
def test_a_view_does_not_read_its_own_dead_letters(path: str) -> None:
    with pytest.raises(InvalidInputError, match="bad is the topic that the query reads"):
        BadRecords.parse("deadletter:bad", path).beside("/log", "bad")
    BadRecords.parse("deadletter:bad", "/other").beside("/log", "bad")


def test_the_dead_letters_of_a_log_in_an_object_store_go_there_with_its_options() -> None:
    options = {"STORE.region": "r", "includeHeaders": "true"}
    rule = BadRecords.parse("deadletter:bad", "")
    assert rule.beside("s3://b/log", "orders", options).options == {"store.region": "r"}
    with pytest.raises(InvalidInputError, match="bad is the topic that the query reads"):
        rule.beside("s3://b/log", "bad", options)
    directory = BadRecords.parse("deadletter:bad", "/other").beside("s3://b/log", "bad", options)
    assert (directory.options, directory.is_elsewhere) == ({}, True)


def test_an_upsert_does_not_read_its_own_dead_letters(tmp_path: Path) -> None:
    rows: Any = None
    upsert = Remembering("own", on_bad_record="deadletter:o", path=tmp_path)
    with pytest.raises(InvalidInputError, match="o is the topic that the query reads"):
        upsert.take(rows, 0, MicroBatch("q", 0, "run 1"), {"o": {"0": 1}})
    assert upsert.known == {}


@pytest.mark.parametrize("policy", ["compact", "compact,delete"])
def test_a_compacted_topic_takes_no_dead_letters(place: Path | str, policy: str) -> None:
    with kafkalog.open(place) as log:
        log.create_topic("bad", config={"cleanup.policy": policy})
        rule = BadRecords.parse("deadletter:bad", str(place))
        with pytest.raises(InvalidInputError, match=f"cleanup.policy=delete, found {policy}"):
            rule.check({})
        log.alter_topic("bad", config={"cleanup.policy": "delete"})
    rule.check({})


def test_a_topic_of_kafkas_own_takes_no_dead_letters() -> None:
    with pytest.raises(InvalidInputError, match="dead-letter topic: topic '__cluster_metadata'"):
        BadRecords.parse("deadletter:__cluster_metadata", "/log")
