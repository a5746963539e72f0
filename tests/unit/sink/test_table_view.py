"""KTableView without Spark: when a view goes on, when it is rebuilt, and how far it says it is.

The table is a real SQLite file that an upsert has written; the checkpoint has Spark's files.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sqlite3
import threading
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

import kafkalog
from kafkalog.datasource.source import KafkaLogDataSource
from kafkalog.datasource.stream_reader import KafkaLogStreamReader
from kafkalog.errors import CommitConflictError, InvalidInputError, StorageError, UnknownTopicError
from kafkalog.sink.upsert import Batch, Position, SQLiteUpsert
from kafkalog.sink.views.generations import Generations
from kafkalog.sink.views.table_view import KTableView, _Apply
from kafkalog.sink.views.view_fitness import check_owned, is_emptied, reason_to_rebuild
from kafkalog.storage_engine.directory.directory_log import DirectoryLog
from kafkalog.storage_engine.metadata.state import TopicState
from tests.unit.sink.sqlite_rows import KINDS, NAMES, driver_batch, query, row

NOW = 1_700_000_000_000
DAY = 86_400_000


class Place:
    """A log with a topic of two partitions, a table and a checkpoint."""

    def __init__(self, directory: Path) -> None:
        self.log = directory / "log"
        self.database = directory / "view.db"
        self.checkpoint = directory / "checkpoint"
        self.generations = Generations(self.checkpoint)
        with DirectoryLog(self.log) as engine:
            engine.create_topic("t", partitions=2, config={"cleanup.policy": "compact"})
        self.append(6)

    def append(self, count: int, value: bytes | None = b"v") -> None:
        import pyarrow as pa

        rows = {
            "key": [b"k%d" % n for n in range(count)],
            "value": pa.array([value] * count, pa.binary()),
        }
        numbers = pa.array([0] * count, pa.int32())
        with DirectoryLog(self.log) as engine:
            engine.append("t", pa.table({**rows, "partition": numbers}))

    def topic(self) -> TopicState:
        with DirectoryLog(self.log, read_only=True) as engine:
            return engine.describe("t")

    def target(self) -> SQLiteUpsert:
        return SQLiteUpsert(self.database, "stock")

    def view(self, spark: Any = None, **more: Any) -> KTableView:
        return KTableView(spark, self.log, "t", self.target(), checkpoint=self.checkpoint, **more)

    def add_generation(self, query_id: str | None, committed: int | None) -> int:
        """Leave what Spark leaves of a query that noted micro-batches up to `committed`."""
        topic = self.topic()
        number = self.generations.add(topic.name, topic.topic_id)
        if query_id is not None:
            (self.generations.path(number) / "metadata").write_text(json.dumps({"id": query_id}))
        commits = self.generations.path(number) / "commits"
        commits.mkdir()
        for batch_id in range(-1 if committed is None else committed + 1):
            (commits / str(batch_id)).write_text("v1\n{}")
            (commits / f".{batch_id}.crc").touch()
        return number

    def apply(self, query_id: str, batch_id: int, end: int, time_ms: int = NOW) -> None:
        batch = Batch(query_id, batch_id, "run", {"t": {"0": end, "1": 0}}, time_ms)
        rows = [driver_batch([row(b"k", b"v", end)])]
        assert self.target().apply(batch, NAMES, KINDS, rows)

    def empty_table(self) -> None:
        with closing(sqlite3.connect(self.database)) as connection, connection:
            connection.execute("DELETE FROM stock")

    def recreate_topic(self) -> None:
        with DirectoryLog(self.log) as engine:
            engine.delete_topic("t")
            engine.create_topic("t", partitions=2, config={"cleanup.policy": "compact"})

    def reason(self, now_ms: int = NOW, **state: int) -> str | None:
        topic = self.topic()
        first = dataclasses.replace(topic.partitions[0], **state)
        topic = dataclasses.replace(topic, partitions=[first, topic.partitions[1]])
        return reason_to_rebuild(self.target(), self.generations, topic, now_ms)


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def test_a_view_continues_if_table_and_checkpoint_agree(place: Place) -> None:
    place.add_generation("q", 2)
    place.apply("q", 2, 5)
    assert place.reason() is None
    place.apply("q", 3, 6)  # applied, and not yet noted by Spark
    assert place.reason() is None


def test_a_view_goes_on_before_anything_has_landed(place: Place) -> None:
    place.add_generation(None, None)
    assert place.reason() is None
    place.add_generation("q", None)
    assert place.reason() is None
    place.apply("q", 0, 1)
    assert place.reason() is None


def test_a_lost_table_is_rebuilt(place: Place) -> None:
    place.add_generation("q", 2)
    reason = place.reason()
    assert reason is not None
    assert "checkpoint/1 is at micro-batch 2, the table at none" in reason


@pytest.mark.parametrize(("committed", "applied"), [(5, 2), (2, 5), (None, 3)])
def test_a_table_or_checkpoint_from_a_backup_is_rebuilt(
    place: Place, committed: int | None, applied: int
) -> None:
    place.add_generation("q", committed)
    place.apply("q", applied, 3)
    reason = place.reason()
    assert reason is not None
    last = -1 if committed is None else committed
    assert f"of query q is at micro-batch {last}, the table at {applied}" in reason


def test_a_topic_made_anew_is_rebuilt(place: Place) -> None:
    place.add_generation("q", 2)
    place.apply("q", 2, 5)
    place.recreate_topic()
    assert place.reason() == "topic t was deleted and created again"


def test_a_log_that_no_longer_reaches_the_table_is_rebuilt(place: Place) -> None:
    place.add_generation("q", 2)
    place.apply("q", 2, 4)
    assert place.reason(log_start_offset=4) is None
    assert place.reason(log_start_offset=5) == "it is at offset 4 of t-0, which holds 5 to 6"
    assert place.reason(high_watermark=3) == "it is at offset 4 of t-0, which holds 0 to 3"


def test_a_table_that_may_have_missed_a_deletion_is_rebuilt(place: Place) -> None:
    place.add_generation("q", 2)
    place.apply("q", 2, 4)
    assert place.reason(NOW + 2 * DAY, first_dirty_offset=6, deletions_gone_to=4) is None
    reason = place.reason(NOW, deletions_gone_to=5)
    assert reason is not None
    assert "at offset 4 of t-0, of which deletions up to offset 5 are gone" in reason


def test_a_table_with_rows_of_somebody_else_is_refused(place: Place) -> None:
    check_owned(place.target(), place.generations)
    query(place.database, "CREATE TABLE stock (key PRIMARY KEY)")
    check_owned(place.target(), place.generations)
    query(place.database, "DROP TABLE stock")
    query(place.database, "CREATE TABLE stock AS SELECT 1 AS key")
    with pytest.raises(InvalidInputError, match=r"no view has ever kept it; start\(rebuild=True\)"):
        check_owned(place.target(), place.generations)
    place.add_generation("q", 2)
    with pytest.raises(InvalidInputError, match="no view has ever kept it"):
        check_owned(place.target(), place.generations)


def test_a_table_of_another_checkpoint_is_refused(place: Place) -> None:
    place.apply("other", 7, 4)
    with pytest.raises(InvalidInputError, match="query other brought it to micro-batch 7"):
        check_owned(place.target(), place.generations)
    place.add_generation("q", None)  # it died before its first micro-batch
    with pytest.raises(InvalidInputError, match="query other brought it to micro-batch 7"):
        check_owned(place.target(), place.generations)


def test_a_table_of_any_earlier_generation_is_the_views_own(place: Place) -> None:
    for query_id in ("first", "second", None):
        number = place.add_generation(query_id, None)
    place.generations.remove_before(number)
    place.apply("first", 7, 4)  # put back from a backup
    check_owned(place.target(), place.generations)
    assert place.generations.query_ids() == {"first", "second"}


def test_a_generation_of_before_ids_were_noted_is_read(place: Place) -> None:
    number = place.add_generation("q", 2)
    (place.checkpoint / "1.json").write_text('{"topic": "t", "topic_id": "id"}')
    assert place.generations.topic(number) == ("t", "id")
    assert place.generations.query_ids() == {"q"}
    (place.checkpoint / "1.json").write_text("[]")
    with pytest.raises(InvalidInputError, match=r"1\.json: it should say which topic"):
        place.generations.query_ids()


def test_a_view_does_not_go_on_over_rows_that_replaced_its_own(place: Place) -> None:
    place.add_generation("q", 2)
    place.apply("q", 2, 4)
    replacing = Batch("other", 0, "run", {"u": {"0": 1}}, NOW, is_replacing=True)
    rows = [driver_batch([row(b"x", b"9", 0)])]
    assert place.target().apply(replacing, NAMES, KINDS, rows)
    with pytest.raises(InvalidInputError, match="query other brought it to micro-batch 0"):
        place.view()._generation(False)
    late = place.target()
    late.refuses_gaps = True
    following = Batch("q", 3, "run", {"t": {"0": 6, "1": 0}}, NOW)
    with pytest.raises(CommitConflictError, match="its last micro-batch of query q is none"):
        late.apply(following, NAMES, KINDS, rows)


def test_an_emptied_table_is_rebuilt_where_the_log_has_rows_for_it(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    place.add_generation("q", 2)
    place.apply("q", 2, 4)
    place.empty_table()
    assert place.view()._generation(False) == 2
    assert "is rebuilt from the log: the table is empty, though the log has rows" in caplog.text


def test_a_table_that_is_empty_once_more_after_that_goes_on(place: Place) -> None:
    place.add_generation("q", 0)
    place.apply("q", 0, 4)
    place.empty_table()
    assert place.view()._generation(False) == 2
    (place.generations.path(2) / "metadata").write_text('{"id": "r"}')
    place.apply("r", 0, 4)
    place.empty_table()  # as a `select` does that takes all rows for deletions
    assert place.view()._generation(False) == 2


def test_an_empty_table_of_a_log_without_values_goes_on(place: Place) -> None:
    place.append(6, None)
    place.add_generation("q", 2)
    for batch_id, end, is_lost in ((2, 0, False), (2, 11, True), (3, 12, False)):
        place.apply("q", batch_id, end)  # below 11 the last deletion is still to come
        place.empty_table()
        live = place.view()._has_live_keys
        assert is_emptied(place.target(), place.generations, live) is is_lost


@pytest.mark.parametrize(("bad_records", "is_lost"), [(0, True), (2, True), (3, False)])
def test_an_empty_table_whose_keys_may_all_be_bad_records_goes_on(
    place: Place, bad_records: int, is_lost: bool
) -> None:
    place.append(3)
    ends = {"t": {"0": 3}}
    position = Position(0, ends, 0, bad_records=bad_records)
    assert place.view()._has_live_keys(position) is is_lost


def test_a_table_put_back_without_its_position_is_the_views_own(place: Place) -> None:
    class PutBack(SQLiteUpsert):
        def positions(self) -> dict[str, Position]:
            return {}

        def writers(self) -> set[str]:
            return {"q"}

    place.add_generation("q", 2)
    place.apply("q", 2, 4)
    check_owned(PutBack(place.database, "stock"), place.generations)


def test_a_position_in_a_deleted_topic_counts_for_nothing(place: Place) -> None:
    place.add_generation("q", 2)
    place.apply("q", 2, 6)
    place.recreate_topic()
    place.append(3)
    assert place.view().progress().lag == 3
    with pytest.raises(TimeoutError, match="still missing: t-0 from 0 to 3"):
        place.view().wait_until(timeout_s=0)


def test_the_highest_generation_counts_and_lower_ones_go(place: Place) -> None:
    assert place.generations.current() is None
    assert [place.add_generation(f"q{n}", n) for n in range(1, 12)] == list(range(1, 12))
    assert place.generations.current() == 11
    assert place.generations.query_id(11) == "q11"
    assert place.generations.last_committed(11) == 11
    place.generations.remove_before(11)
    place.generations.remove_before(11)
    assert sorted(path.name for path in place.checkpoint.iterdir()) == ["11", "11.json"]
    assert place.generations.topic(11) == ("t", place.topic().topic_id)


@pytest.mark.parametrize("is_planned", [False, True])
def test_a_query_that_died_in_its_first_plan_starts_again(place: Place, is_planned: bool) -> None:
    """Spark refuses to begin in a checkpoint whose `offsets` holds a file, though no plan."""
    number = place.add_generation("q", None)
    place.generations.remove_cut_short_plan(number)  # no plan was begun
    plans = place.generations.path(number) / "offsets"
    plans.mkdir()
    left = [".0.1b4e28ba.tmp", "..0.1b4e28ba.tmp.crc", *(["0", ".0.crc"] if is_planned else [])]
    for name in left:
        (plans / name).touch()
    place.generations.remove_cut_short_plan(number)
    assert {path.name for path in plans.iterdir()} == (set(left) if is_planned else set())


def test_a_generation_whose_topic_is_unknown_is_named(place: Place) -> None:
    number = place.add_generation("q", None)
    (place.checkpoint / "1.json").write_text("{")
    with pytest.raises(InvalidInputError, match=r"1\.json: it should say which topic"):
        place.generations.topic(number)


def test_progress_needs_no_spark(place: Place) -> None:
    view = place.view()
    before = view.progress()
    assert (before.query_id, before.batch_id, before.lag) == (None, None, 6)
    place.add_generation("q", 2)
    place.apply("q", 2, 4)
    found = view.progress()
    assert (found.query_id, found.batch_id, found.time_ms, found.lag) == ("q", 2, NOW, 2)
    first = found.partitions[0]
    assert (first.applied, first.log_start, first.log_end, first.lag) == (4, 0, 6, 2)
    assert found.partitions[1].lag == 0


def test_waiting_ends_when_the_table_has_come_so_far(place: Place) -> None:
    place.add_generation("q", 0)
    place.apply("q", 0, 4)
    view = place.view()
    view.wait_until({0: 4})
    later = threading.Timer(0.3, place.apply, ("q", 1, 6))
    later.start()
    view.wait_until(timeout_s=10)
    later.join()


def test_waiting_in_vain_says_what_is_missing(place: Place) -> None:
    place.add_generation("q", 0)
    place.apply("q", 0, 4)
    with pytest.raises(TimeoutError, match="after 0 s there is still missing: t-0 from 4 to 6"):
        place.view().wait_until(timeout_s=0)
    with pytest.raises(TimeoutError, match="t-1 from 0 to 9"):
        place.view().wait_until({0: 3, 1: 9}, timeout_s=0)
    with pytest.raises(InvalidInputError, match=r"topic t has the partitions \[0, 1\], not \[7\]"):
        place.view().wait_until({0: 3, 7: 1})


class Stopped:
    """A query that is over, as Spark shows it."""

    isActive = False

    def __init__(self, fault: Exception | None) -> None:
        self._fault = fault

    def exception(self) -> Exception | None:
        return self._fault

    def stop(self) -> None:
        pass


def test_waiting_for_a_query_that_died_raises_its_exception(place: Place) -> None:
    view = place.view()
    view._query = Stopped(ZeroDivisionError("what it died of"))  # type: ignore[assignment]
    with pytest.raises(ZeroDivisionError, match="what it died of"):
        view.wait_until()
    view._query = Stopped(None)  # type: ignore[assignment]
    with pytest.raises(StorageError, match="its query has stopped; still missing: t-0 from 0 to 6"):
        view.wait_until()


def test_stop_ends_the_waiting(place: Place) -> None:
    view = place.view()
    query: Any = Stopped(None)
    query.isActive = True
    view._query = query
    later = threading.Timer(0.3, view.stop)
    later.start()
    with pytest.raises(StorageError, match="its query has stopped; still missing"):
        view.wait_until(timeout_s=60)
    later.join()
    with pytest.raises(StorageError, match="its query has stopped; still missing"):
        view.wait_until(timeout_s=60)


def test_no_micro_batch_mixes_a_topic_with_the_one_created_after_it(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[int] = []
    monkeypatch.setattr(
        SQLiteUpsert, "take", lambda upsert, df, batch_id, *more: taken.append(batch_id)
    )
    number = place.add_generation("q", 0)
    plans = place.generations.path(number) / "offsets"
    plans.mkdir()
    (plans / "1").write_text('v1\n{}\n{"t":{"0":6,"1":0}}')
    apply: Any = _Apply(place.target(), place.generations, number, "r", {"path": str(place.log)})
    apply(None, 1)
    place.recreate_topic()
    with pytest.raises(
        StorageError, match=r"topic t was .* created again\. Start the view again\."
    ):
        apply(None, 1)
    with DirectoryLog(place.log) as engine:
        engine.delete_topic("t")
    apply(None, 1)  # `failOnDataLoss` says whether a topic that is gone ends the query
    assert taken == [1, 1]


def test_waiting_for_a_topic_that_was_created_again_under_the_query_ends(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    place.add_generation("q", 0)
    place.apply("q", 0, 6)
    view = place.view(object())
    running: Any = Stopped(None)
    running.isActive = True
    view._query = running
    assert view.start() is running
    place.recreate_topic()
    place.append(3)
    with pytest.raises(
        StorageError, match=r"topic t was .* created again\. Start the view again\."
    ):
        view.wait_until(timeout_s=10)
    monkeypatch.setattr(KTableView, "_start", lambda view, changes, number: number)
    monkeypatch.setattr(SQLiteUpsert, "check_columns", lambda upsert, changes, topics: None)
    monkeypatch.setattr(KTableView, "_changes", lambda view, spark: spark)
    started: Any = view.start()
    assert started == 2
    view._query = None
    view.stop()


@pytest.mark.parametrize("level", ["read_uncommitted", "READ_UNCOMMITTED "])
def test_the_end_of_a_view_goes_by_its_isolation_level_in_any_case(
    place: Place, level: str
) -> None:
    assert place.view(options={"kafka.isolation.level": level})._reads_uncommitted
    assert not place.view(options={"kafka.isolation.level": "read_committed"})._reads_uncommitted


def test_one_object_at_a_time_runs_a_view(place: Place) -> None:
    first, second = place.view(), place.view()
    first._lock()
    with pytest.raises(StorageError, match="the view is running already"):
        second._lock()  # the first has yet to start its query
    first._query = Stopped(None)  # type: ignore[assignment]
    first._query.isActive = True  # type: ignore[misc, union-attr]
    with pytest.raises(StorageError, match="the view is running already"):
        second._lock()
    first._query.isActive = False  # type: ignore[misc, union-attr]
    second._lock()
    second.stop()
    first._lock()
    first.stop()


def test_of_many_starts_at_once_one_runs(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    running: list[KTableView] = []
    ready = threading.Barrier(8)

    def start(view: KTableView, spark: Any, number: int) -> Any:
        running.append(view)
        time.sleep(0.05)
        query = Stopped(None)
        query.isActive = True
        return query

    def begin(view: KTableView) -> None:
        ready.wait()
        with contextlib.suppress(StorageError):
            view.start()

    monkeypatch.setattr(KTableView, "_start", start)
    monkeypatch.setattr(SQLiteUpsert, "check_columns", lambda upsert, changes, topics: None)
    monkeypatch.setattr(KTableView, "_changes", lambda view, spark: spark)
    views = [place.view(object()) for _ in range(4)]
    threads = [threading.Thread(target=begin, args=(view,)) for view in views * 2]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(running) == 1
    running[0].stop()


class Reading:
    """A session and its reader, which notes the options."""

    def __init__(self) -> None:
        self.given: dict[str, str] = {}
        self.readStream = self.load = self

    def format(self, name: str) -> Reading:
        return self

    def options(self, **more: str) -> Reading:
        self.given.update(more)
        return self

    def __call__(self) -> Reading:
        return self


@pytest.mark.parametrize("rule", ["fail", "skip", "deadletter:bad"])
def test_a_view_reads_the_headers_for_its_dead_letters(place: Place, rule: str) -> None:
    spark: Any = Reading()
    upsert = SQLiteUpsert(place.database, "stock", on_bad_record=rule)
    KTableView(None, place.log, "t", upsert, checkpoint=place.checkpoint)._changes(spark)
    assert (spark.given.get("includeHeaders") == "true") == rule.startswith("deadletter")


@pytest.mark.parametrize(
    ("given", "options", "view"),
    [
        ({"schema": "n int"}, {"maxOffsetsPerTrigger": "1", "keys": '["k1"]'}, "latest"),
        ({"select": lambda frame: frame}, {}, "latest"),
        ({"select": ["key", "value"]}, {}, "changelog"),
        ({"on_bad_record": "skip"}, {}, "changelog"),
        ({"on_bad_record": "deadletter:bad"}, {}, "changelog"),
        ({}, {"kafka.isolation.level": "read_uncommitted"}, "changelog"),
        ({}, {"minpartitions": "4"}, "changelog"),
        ({}, {"maxRecordsPerPartition": "4"}, "changelog"),
    ],
)
def test_a_view_begins_with_the_latest_records_where_they_make_the_same_table(
    place: Place, given: dict[str, Any], options: dict[str, str], view: str
) -> None:
    spark: Any = Reading()
    upsert = SQLiteUpsert(place.database, "stock", **given)
    made = KTableView(None, place.log, "t", upsert, checkpoint=place.checkpoint, options=options)
    made._changes(spark)
    assert spark.given["view"] == view
    reader = KafkaLogStreamReader(spark.given, KafkaLogDataSource(spark.given).schema())
    assert reader.initialOffset() == {"t": {"0": -2, "1": -2}}


def test_wrong_arguments_are_refused(place: Place) -> None:
    with pytest.raises(InvalidInputError, match="it sets startingOffsets itself"):
        place.view(options={"startingOffsets": "latest", "includeHeaders": "true"})
    with pytest.raises(InvalidInputError, match="local file system, not hdfs://host/c"):
        KTableView(None, place.log, "t", place.target(), checkpoint="hdfs://host/c")
    with pytest.raises(InvalidInputError, match="its path is empty"):
        KTableView(None, place.log, "t", place.target(), checkpoint="")
    named = SQLiteUpsert(place.database, "stock", name="mine")
    with pytest.raises(InvalidInputError, match="found 'mine'"):
        KTableView(None, place.log, "t", named, checkpoint=place.checkpoint)
    place.database.touch()
    with pytest.raises(InvalidInputError, match="checkpoint is a directory, this is a file"):
        KTableView(None, place.log, "t", place.target(), checkpoint=place.database)._lock()
    with pytest.raises(UnknownTopicError):
        KTableView(None, place.log, "other", place.target(), checkpoint=place.checkpoint)
    with pytest.raises(InvalidInputError, match="without a Spark session"):
        place.view().start()
    assert kafkalog.KTableView is KTableView


def test_a_checkpoint_of_another_topics_view_is_refused(place: Place) -> None:
    place.generations.add("other", "id")
    with pytest.raises(InvalidInputError, match="the checkpoint of a view of topic other, not t"):
        place.view()._generation(False)
