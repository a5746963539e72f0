"""What all upserts have in common: which micro-batches are due, and how many rows they may be."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from kafkalog.errors import CommitConflictError, InvalidInputError
from kafkalog.sink.query import MicroBatch
from kafkalog.sink.upsert import Batch, Position, Upsert
from kafkalog.sink.upsert.bad_records import BadRecords
from kafkalog.sink.upsert.driver_batches import parts_for
from kafkalog.sink.upsert.rows import deletion_column


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


AT_3 = Position(3, {"t": {"0": 10, "1": 5}}, 1_700_000_000_000)


@pytest.mark.parametrize(
    ("given", "is_due"),
    [
        (batch(4, p0=10, p1=5), True),
        (batch(4), True),
        (batch(9, p0=1), True),
        (batch(3, p0=10, p1=5), False),
        (batch(3), False),
        (batch(3, p0=9, p1=5), False),
        (batch(3, p0=9, p1=6), True),
        (batch(3, p0=10, p1=5, p2=0), True),
    ],
)
def test_a_batch_is_due_when_it_is_later_or_reaches_further(given: Batch, is_due: bool) -> None:
    assert Remembering("t").is_due(given, AT_3) is is_due
    assert Remembering("t").is_due(given, None)


def test_a_query_without_offsets_is_known_by_its_batch_ids_alone() -> None:
    assert not Remembering("t").is_due(batch(3), Position(3, {}, 0))


def test_a_micro_batch_that_had_no_rows_and_comes_again_with_rows_is_applied() -> None:
    rows: Any = None
    upsert = Remembering("filled")  # under Spark Connect the rows say how far a micro-batch reaches
    upsert.take(rows, 0, MicroBatch("q", 0, "run 1"), batch(0).end_offsets)
    upsert.take(rows, 0, MicroBatch("q", 0, "run 2"), batch(0, p0=10).end_offsets)
    upsert.take(rows, 0, MicroBatch("q", 0, "run 3"), batch(0, p0=10).end_offsets)
    assert [each.end_offsets for each in upsert.batches] == [{}, {"t": {"0": 10}}]


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
        ({"on_bad_record": "deadletter:a b"}, "on_bad_record, the dead-letter topic: "),
        ({"on_bad_record": "skip", "select": lambda df: df}, "a select function leaves out"),
        ({"on_new_column": "drop"}, 'on_new_column is "fail" or "add"'),
        ({"key": ["region", "id"]}, "needs select, or schema without key_type"),
        ({"key": ["a", "A"], "schema": "a int"}, "one or more different columns"),
        ({"key": [], "schema": "a int"}, "one or more different columns"),
        ({"key": ["id"], "schema": "id int", "key_type": "string"}, "schema without key_type"),
    ],
)
def test_arguments_that_do_not_go_together_are_refused(given: Any, words: str) -> None:
    with pytest.raises(InvalidInputError, match=words):
        Remembering("t", **given)


def test_a_dead_letter_topic_needs_its_log_and_is_not_the_views_topic() -> None:
    rule = BadRecords.parse("deadletter:bad", "")
    assert rule.beside("/log", "orders") == BadRecords(True, "bad", "/log")
    assert BadRecords.parse("deadletter:bad", "/other").beside("/log", "orders").path == "/other"
    with pytest.raises(InvalidInputError, match="bad is the topic that the view reads"):
        rule.beside("/log", "bad")
    with pytest.raises(InvalidInputError, match="Give the upsert path=, the log of the topic"):
        rule.leave_out(None, "q", 0)  # type: ignore[arg-type]  # it looks at the path first
