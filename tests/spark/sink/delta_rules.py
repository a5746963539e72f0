"""The rules of DeltaUpsert; `test_spark_delta` runs them where Spark has Delta Lake."""

from __future__ import annotations

import json
import logging
import shutil
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from examples import orders_pipeline
from kafkalog import KTableView
from kafkalog.errors import CommitConflictError, InvalidInputError, KafkaLogError, StorageError
from kafkalog.sink.query import MicroBatch
from kafkalog.sink.upsert import Batch, DeltaUpsert
from kafkalog.sink.upsert.delta import upsert as delta_module
from kafkalog.storage_engine.directory.directory_log import DirectoryLog
from tests import delta_spark
from tests.spark.examples.test_orders_pipeline import ROWS, dead_letters
from tests.spark.sink.test_spark_foreach_batch import forget_commit
from tests.spark.sink.test_spark_upsert import Change, frame_of
from tests.spark.sink.test_spark_writes import finish
from tests.spark.sink.version_histories import SELECT, Event, drawn, in_order, take
from tests.spark_home import quick_session

PATIENCE_S = 120
SETTINGS = ("write.txnAppId", "write.txnVersion", "commitInfo.userMetadata")


@pytest.fixture(scope="module")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    session = quick_session(tmp_path_factory.mktemp("spark"), delta_spark.settings())
    yield session
    session.stop()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "table"


@pytest.fixture
def upsert(path: Path) -> DeltaUpsert:
    return DeltaUpsert(path, schema="n int", key_type="string")


def batch(
    number: int, end: int | None = None, query_id: str = "q", is_replacing: bool = False
) -> Batch:
    ends = {"t": {"0": number + 1 if end is None else end}}
    return Batch(query_id, number, "run", ends, 1000 + number, is_replacing)


def change(key: str, n: int | None, offset: int = 0) -> Change:
    return key, None if n is None else json.dumps({"n": n}), offset


class Table:
    """A table as Spark reads it."""

    def __init__(self, spark: SparkSession, path: Path) -> None:
        self.spark, self.name = spark, f"delta.`{path}`"
        self.log = path / "_delta_log"

    def rows(self) -> list[tuple[Any, ...]]:
        return sorted(tuple(row) for row in self.spark.table(self.name).collect())

    def version(self) -> int:
        return max(int(file.stem) for file in self.log.glob("*.json"))

    def commit(self, version: int) -> str:
        return (self.log / f"{version:020d}.json").read_text()


@pytest.fixture
def table(spark: SparkSession, path: Path) -> Table:
    return Table(spark, path)


def store(
    upsert: DeltaUpsert, which: Batch, *changes: Change, session: SparkSession | None = None
) -> None:
    spark = session or SparkSession.active()
    frame = frame_of(spark, *(changes or [change("", 0)]))
    upsert._apply(frame if changes else frame.where("key is null"), which, None)


def test_a_commit_has_the_rows_and_the_position(
    upsert: DeltaUpsert, table: Table, caplog: pytest.LogCaptureFixture
) -> None:
    assert upsert.positions() == {}
    assert not upsert.has_rows()
    store(upsert, batch(0), change("a", 1, 0), change("b", 2, 1))
    assert not table.spark.table(table.name).schema["key"].nullable
    version = table.version()
    store(upsert, batch(1, 9), change("a", 3, 2), change("b", None, 3), change("c", None, 4))
    assert table.rows() == [("a", 3)]
    assert table.version() == version + 1
    assert '"appId":"kafkalog","version":2' in table.commit(version + 1)
    position = upsert.position("q")
    assert position is not None
    assert (position.batch_id, position.end_offsets, position.time_ms) == (1, {"t": {"0": 9}}, 1001)

    store(upsert, batch(1, 9), change("a", 4, 2))
    assert (table.rows(), table.version()) == ([("a", 3)], version + 1)
    assert "micro-batch 1 of query q was applied before" in caplog.text
    store(upsert, batch(1, 10), change("a", 5, 9))
    assert table.rows() == [("a", 5)]
    assert "comes again with another plan" in caplog.text

    store(upsert, batch(2, 12))
    assert table.version() == version + 3
    position = upsert.position("q")
    assert position is not None
    assert (position.batch_id, position.end_offsets) == (2, {"t": {"0": 12}})
    assert [upsert.has_rows(), store(upsert, batch(3, 13), change("a", None, 12))] == [True, None]
    assert not upsert.has_rows()
    for name in SETTINGS:
        assert table.spark.conf.get(f"spark.databricks.delta.{name}", None) is None


def test_an_older_checkpoint_or_log_is_refused_unless_reset(
    upsert: DeltaUpsert, table: Table
) -> None:
    store(upsert, batch(57), change("a", 1))
    with pytest.raises(CommitConflictError, match=r"committed 57 at \d\d:\d\d, got 3"):
        store(upsert, batch(3, 99), change("a", 2))
    with pytest.raises(CommitConflictError, match=r"t-0 committed up to 58, got 3 in micro-batch"):
        store(upsert, batch(58, 3), change("a", 2))
    assert table.rows() == [("a", 1)]
    upsert.reset_writer = True
    store(upsert, batch(3, 4), change("a", 2))
    assert table.rows() == [("a", 2)]
    position = upsert.position("q")
    assert position is not None
    assert (position.batch_id, position.end_offsets) == (3, {"t": {"0": 4}})


def test_a_gap_is_found_even_if_the_table_is_gone(
    upsert: DeltaUpsert, table: Table, path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store(upsert, batch(0), change("a", 1))
    store(upsert, batch(2), change("a", 2))
    assert "its last micro-batch of query q is 0, the next is 2" in caplog.text
    upsert.refuses_gaps = True
    with pytest.raises(CommitConflictError, match="of query q is 2, the next is 4"):
        store(upsert, batch(4), change("a", 3))
    assert table.rows() == [("a", 2)]
    shutil.rmtree(path)
    with pytest.raises(CommitConflictError, match="of query q is none, the next is 3"):
        store(upsert, batch(3), change("a", 3))
    assert not path.exists()


def test_replacing_is_one_commit_that_ends_the_positions_of_other_queries(
    upsert: DeltaUpsert, table: Table
) -> None:
    store(upsert, batch(3, query_id="old"), change("a", 1), change("b", 2))
    version = table.version()
    store(upsert, batch(0, is_replacing=True), change("c", 3), change("d", None), change("a", 4))
    assert table.rows() == [("a", 4), ("c", 3)]
    assert table.version() == version + 1
    assert upsert.positions().keys() == {"q"}
    # A faster run of the query may have replaced the rows since this one looked.
    store(upsert, batch(1, is_replacing=True), change("e", 5))
    assert table.rows() == [("a", 4), ("c", 3), ("e", 5)]
    upsert.refuses_gaps = True
    with pytest.raises(CommitConflictError, match="of query old is none, the next is 4"):
        store(upsert, batch(4, query_id="old"), change("a", 9))
    store(upsert, batch(0, query_id="third", is_replacing=True))
    assert (table.rows(), upsert.positions().keys()) == ([], {"third"})


def before_the_merge(
    upsert: DeltaUpsert, act: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Let another process act once, after the upsert has read the positions."""
    merge = upsert._merge

    def late(*rows: Any) -> bool:
        monkeypatch.undo()
        monkeypatch.setattr(delta_module, "_turns", {})  # the locks of another process
        act()
        return merge(*rows)

    monkeypatch.setattr(upsert, "_merge", late)


def test_a_commit_lands_only_on_the_positions_that_were_read(
    upsert: DeltaUpsert, table: Table, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rival = DeltaUpsert(path, schema="n int", key_type="string")
    elsewhere = table.spark.newSession()
    store(upsert, batch(0), change("a", 1))

    def of_this_query() -> None:
        store(rival, batch(1), change("a", 10), session=elsewhere)

    before_the_merge(upsert, of_this_query, monkeypatch)
    store(upsert, batch(1), change("a", 11))
    assert table.rows() == [("a", 10)]

    def of_another_query() -> None:
        store(rival, batch(0, query_id="other"), change("b", 20), session=elsewhere)

    before_the_merge(upsert, of_another_query, monkeypatch)
    store(upsert, batch(2), change("a", 12))
    assert table.rows() == [("a", 12), ("b", 20)]
    assert {name: each.batch_id for name, each in upsert.positions().items()} == {
        "q": 2,
        "other": 0,
    }

    def replace() -> None:
        store(
            rival, batch(0, query_id="new", is_replacing=True), change("c", 30), session=elsewhere
        )

    before_the_merge(upsert, replace, monkeypatch)
    upsert.refuses_gaps = True
    with pytest.raises(CommitConflictError, match="of query q is none, the next is 3"):
        store(upsert, batch(3), change("a", 13))
    assert table.rows() == [("c", 30)]


def test_an_error_after_a_commit_is_not_a_failure_and_without_a_history_it_is_unknown(
    upsert: DeltaUpsert,
    table: Table,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    store(upsert, batch(0), change("a", 1))
    version, merge = table.version(), upsert._merge

    def fail_late(*rows: Any) -> bool:
        merge(*rows)
        raise RuntimeError("the hook failed")

    monkeypatch.setattr(upsert, "_merge", fail_late)
    store(upsert, batch(1), change("a", 2))
    assert (table.rows(), table.version()) == ([("a", 2)], version + 1)
    assert "a commit has landed, and then came an error: the hook failed" in caplog.text
    assert "micro-batch 1 of query q was applied before" in caplog.text

    def lose_history(*rows: Any) -> bool:
        monkeypatch.setattr(delta_module, "last_commit", lambda *_: 1 / 0)
        return fail_late(*rows)

    monkeypatch.setattr(upsert, "_merge", lose_history)
    with pytest.raises(StorageError, match="whether micro-batch 2 is written is unknown: the hook"):
        store(upsert, batch(2), change("a", 3))
    monkeypatch.undo()
    position = upsert.position("q")
    assert position is not None
    assert (table.rows(), position.batch_id) == ([("a", 3)], 2)


def test_a_micro_batch_reads_the_history_once_and_once_more_if_it_has_changed_since(
    upsert: DeltaUpsert, table: Table, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store(upsert, batch(0), change("a", 1))
    reads, last_commit = [], delta_module.last_commit

    def counted(*given: Any) -> Any:
        reads.append(given)
        return last_commit(*given)

    monkeypatch.setattr(delta_module, "last_commit", counted)

    def take(number: int) -> int:
        frame = frame_of(table.spark, change("b", number))
        upsert.take(frame, number, MicroBatch("q", number, "run"), {"t": {"0": number + 1}})
        found = len(reads)
        reads.clear()
        return found

    assert take(1) == 1
    positions = upsert.positions

    def late() -> Any:
        found = positions()
        rival = DeltaUpsert(path, schema="n int", key_type="string")
        store(rival, batch(0, query_id="other"), change("c", 5))
        reads.clear()
        return found

    monkeypatch.setattr(upsert, "positions", late)
    assert take(2) == 1
    assert table.rows() == [("a", 1), ("b", 2), ("c", 5)]
    monkeypatch.undo()
    assert upsert.positions().keys() == {"q", "other"}


def wait_for(file: Path, patience_s: float = PATIENCE_S) -> bool:
    """Return whether another thread or task has made the file in time."""
    until = time.monotonic() + patience_s
    while not file.exists() and time.monotonic() < until:
        time.sleep(0.05)
    return file.exists()


def slowed(frame: Any, begun: Path, end: Path) -> Any:
    """Return rows whose task makes the file `begun`, and waits for the file `end`."""

    def wait(batches: Iterator[Any]) -> Iterator[Any]:
        begun.touch()
        wait_for(end)
        yield from batches

    return frame.mapInArrow(wait, frame.schema)


def test_a_conflict_with_a_foreign_writer_is_tried_again(
    upsert: DeltaUpsert, table: Table, tmp_path: Path
) -> None:
    store(upsert, batch(0), *[change(f"k{n}", n, n) for n in range(5)])
    merging, deleted = tmp_path / "merging", tmp_path / "deleted"

    def delete() -> None:
        wait_for(merging)
        table.spark.newSession().sql(f"DELETE FROM {table.name} WHERE key = 'k4'").collect()
        deleted.touch()

    with ThreadPoolExecutor(1) as writer:
        done = writer.submit(delete)
        upsert._apply(
            slowed(frame_of(table.spark, change("k0", 10, 5)), merging, deleted), batch(1), None
        )
        done.result()
    assert table.rows() == [("k0", 10), ("k1", 1), ("k2", 2), ("k3", 3)]


def test_upserts_of_one_query_into_two_tables_at_once_keep_their_own_positions(
    spark: SparkSession, upsert: DeltaUpsert, tmp_path: Path
) -> None:
    other = DeltaUpsert(tmp_path / "other", schema="n int", key_type="string")
    merging, seen, done = (tmp_path / name for name in ("merging", "seen", "done"))

    def second() -> None:
        wait_for(merging)
        store(other, batch(0, 20), change("b", 2))
        done.touch()

    with ThreadPoolExecutor(2) as threads:
        frame = slowed(frame_of(spark, change("a", 1)), merging, seen)
        ends = [
            threads.submit(upsert._apply, frame, batch(0, 10), None),
            threads.submit(second),
        ]
        wait_for(merging)
        assert not wait_for(done, patience_s=2)
        seen.touch()
        for each in ends:
            each.result()
    found = [each.positions()["q"].end_offsets for each in (upsert, other)]
    assert found == [{"t": {"0": 10}}, {"t": {"0": 20}}]


def test_tables_with_deletion_vectors_column_mapping_and_constraints_follow(
    upsert: DeltaUpsert, table: Table
) -> None:
    table.spark.sql(
        f"CREATE TABLE {table.name} (more STRING, n BIGINT, `Key` STRING, twice BIGINT "
        "GENERATED ALWAYS AS (n * 2)) USING delta TBLPROPERTIES "
        "('delta.enableDeletionVectors' = 'true', 'delta.columnMapping.mode' = 'name')"
    )
    table.spark.sql(f"ALTER TABLE {table.name} ADD CONSTRAINT small CHECK (n < 1000)")
    store(upsert, batch(0), *[change(f"k{n:03d}", n, n) for n in range(200)])
    store(upsert, batch(1), change("k001", None), change("k002", 7))
    assert '"deletionVector"' in table.commit(table.version())
    rows = table.spark.table(table.name).where("Key < 'k004'").collect()
    expected = [(None, 0, "k000", 0), (None, 7, "k002", 14), (None, 3, "k003", 6)]
    assert sorted((tuple(row) for row in rows), key=lambda row: row[2]) == expected
    version = table.version()
    with pytest.raises(StorageError, match=r"nothing of micro-batch 2 .*CHECK constraint small"):
        store(upsert, batch(2), change("k003", 1000))
    assert table.version() == version
    position = upsert.position("q")
    assert position is not None
    assert position.batch_id == 1
    store(upsert, batch(0, query_id="new", is_replacing=True), change("k", 5))
    assert [tuple(row) for row in table.spark.table(table.name).collect()] == [(None, 5, "k", 10)]


def test_a_row_that_would_be_stored_as_another_is_refused(
    spark: SparkSession, table: Table, path: Path
) -> None:
    spark.sql(f"CREATE TABLE {table.name} (key STRING NOT NULL, n SMALLINT) USING delta")

    def refused(kind: type[Exception], words: str, key: str, n: str, **given: Any) -> None:
        frame = spark.sql(
            f"select {key} key, {n} n, 't' topic, 0 partition, 7L offset, now() timestamp, "
            "binary('x') value"
        )
        shape: dict[str, Any] = {"select": ["key", "n", "false deleted"], **given}
        with pytest.raises(kind, match=words):
            DeltaUpsert(path, **shape)._apply(frame, batch(0), None)

    refused(InvalidInputError, "value of a record: .*OVERFLOW", "'a'", "100000L")
    refused(
        InvalidInputError,
        "value of a record: .CAST_INVALID_INPUT. The value 'x'",
        "'a'",
        "'x'",
        select=["key", "cast(n as smallint) n", "false deleted"],
    )
    refused(InvalidInputError, "column n is smallint, the rows bring string", "'a'", "'x'")
    refused(InvalidInputError, "column n is smallint, the rows bring double", "'a'", "1.5D")
    refused(InvalidInputError, "column n is smallint, the rows bring timestamp", "'a'", "now()")
    refused(
        InvalidInputError, "t-0 offset 7: column key .* not UTF-8", "cast(x'ff' as string)", "1"
    )
    refused(
        InvalidInputError,
        r"it lacks columns of the rows. Run ALTER TABLE .* ADD COLUMNS \(m INT\)",
        "'a'",
        "1",
        select=["key", "n as m", "false deleted"],
    )
    refused(
        InvalidInputError,
        "select makes one key of several keys",
        "explode(array('a', 'b'))",
        "1",
        select=lambda df: df.selectExpr("'one' key", "n", "false deleted"),
    )
    refused(
        InvalidInputError,
        "t-0 offset 7: the value is not a JSON document",
        "'a'",
        "1",
        select=None,
        schema="n int",
        key_type="string",
    )
    assert table.version() == 0


@pytest.mark.parametrize(
    ("kind", "refused", "kept"),
    [
        (
            "string",
            ["''", "'__HIVE_DEFAULT_PARTITION__'", "'a\\u0000'"],
            ["' '", "'a/b=é'", "null"],
        ),
        ("binary", ["X''", "X'ff'", "X'00'"], ["X'61'", "X'c3a9'"]),
        (
            "timestamp",
            ["timestamp'2024-10-27 02:30:00+01:00'"],
            ["timestamp'0001-01-01 00:00:00Z'"],
        ),
        ("double", [], ["double('NaN')", "1e-320D"]),
    ],
)
def test_a_value_that_the_name_of_a_partition_cannot_hold_is_refused(
    spark: SparkSession, table: Table, path: Path, kind: str, refused: list[str], kept: list[str]
) -> None:
    spark.conf.set("spark.sql.session.timeZone", "Europe/Berlin")
    try:
        spark.sql(f"CREATE TABLE {table.name} (p {kind}, n int) USING delta PARTITIONED BY (P)")

        def store(number: int, value: str, deleted: str = "false") -> None:
            frame = spark.sql(
                f"select cast({value} as {kind}) p, {number} n, 't' topic, 0 partition, 7L offset, "
                "now() timestamp, binary('x') key, binary('x') value"
            )
            upsert = DeltaUpsert(path, select=["p", "n", f"{deleted} deleted"], key="n")
            upsert._apply(frame, batch(number), None)

        for number, value in enumerate(kept):
            store(number, value)
        for number, value in enumerate(refused, len(kept)):
            with pytest.raises(InvalidInputError, match=r"t-0 offset 7: column p partitions"):
                store(number, value)
            store(number, value, "true")  # nothing of a deletion is stored
        for number, value in enumerate(kept):
            wanted = f"p <=> cast({value} as {kind}) and n = {number}"
            assert spark.table(table.name).where(wanted).count() == 1
    finally:
        spark.conf.set("spark.sql.session.timeZone", "UTC")


def test_a_missing_table_gets_the_types_of_the_rows(
    spark: SparkSession, path: Path, table: Table
) -> None:
    upsert = DeltaUpsert(
        path,
        select=[
            "cast(key as string) key",
            "value is null deleted",
            "make_dt_interval(0, offset) span",
            "array(named_struct('m', smallint(offset))) nested",
            "cast(offset as decimal(9,2)) `a``b`",
            "timestamp",
        ],
    )
    store(upsert, batch(0), ("a", "1", 1), ("a", "2", 2), ("c", None, 4))
    schema = {field.name: field.dataType.simpleString() for field in spark.table(table.name).schema}
    assert schema == {
        "key": "string",
        "span": "string",
        "nested": "array<struct<m:smallint>>",
        "a`b": "decimal(9,2)",
        "timestamp": "timestamp",
    }
    (row,) = spark.table(table.name).collect()
    assert (row.span, row.nested[0][0]) == ("INTERVAL '0 02:00:00' DAY TO SECOND", 2)


def test_a_table_of_the_catalog_follows(spark: SparkSession) -> None:
    upsert = DeltaUpsert("3d", schema="n int", key_type="string")  # 3d alone is a number
    assert not upsert.has_rows()
    store(upsert, batch(0), change("a", 1))
    store(upsert, batch(1), change("b", 2))
    store(upsert, batch(0, query_id="new", is_replacing=True), change("b", 3))
    assert [tuple(row) for row in spark.table("`3d`").collect()] == [("b", 3)]
    assert upsert.positions().keys() == {"new"}
    spark.sql("CREATE TABLE plain USING parquet AS SELECT 'a' key, 1 n")
    with pytest.raises(KafkaLogError, match="Delta table plain"):
        store(DeltaUpsert("plain", schema="n int", key_type="string"), batch(0), change("a", 1))


def test_a_table_whose_history_is_gone_takes_the_next_micro_batch(
    upsert: DeltaUpsert, table: Table, caplog: pytest.LogCaptureFixture
) -> None:
    store(upsert, batch(0), change("a", 1))
    properties = "'delta.checkpointInterval' = '1'"
    table.spark.sql(f"ALTER TABLE {table.name} SET TBLPROPERTIES ({properties})")
    table.spark.sql(f"INSERT INTO {table.name} VALUES ('x', 0)")
    last = table.version()
    for file in table.log.glob("*.json"):
        if int(file.stem) < last:
            file.unlink()
    assert upsert.positions() == {}
    store(upsert, batch(1), change("a", 3))
    assert "its last micro-batch of query q is none, the next is 1" in caplog.text
    assert table.rows() == [("a", 3), ("x", 0)]
    assert upsert.positions().keys() == {"q"}


def test_a_query_follows_exactly_once(spark: SparkSession, tmp_path: Path, table: Table) -> None:
    log, checkpoint = tmp_path / "log", tmp_path / "checkpoint"
    engine = DirectoryLog(log)
    engine.create_topic("t", 2)
    upsert = DeltaUpsert(tmp_path / "table", schema="n int", key_type="string")

    def run() -> int:
        reader = spark.readStream.format("kafkalog").option("subscribe", "t")
        stream = reader.option("startingOffsets", "earliest").load(str(log))
        finish(
            stream.writeStream.foreachBatch(upsert).option("checkpointLocation", str(checkpoint))
        )
        return table.version()

    def ends() -> dict[str, dict[str, int]]:
        return {"t": {str(number): end for number, (_, end) in engine.offsets("t").items()}}

    engine.append("t", [(f"k{n}", json.dumps({"n": n})) for n in range(4)])
    engine.append("t", [("k0", '{"n": 10}'), ("k1", None)])
    run()
    assert table.rows() == [("k0", 10), ("k2", 2), ("k3", 3)]
    engine.append("t", [("k2", '{"n": 22}'), ("k3", None), ("unknown", None)])
    version = run()
    (position,) = upsert.positions().values()
    assert (position.batch_id, position.end_offsets) == (1, ends())
    forget_commit(checkpoint, 1)
    engine.append("t", [("unknown", None)])
    assert run() == version + 1
    (position,) = upsert.positions().values()
    assert (position.batch_id, position.end_offsets) == (2, ends())
    assert table.rows() == [("k0", 10), ("k2", 22)]


def test_a_view_rebuilds_a_lost_table_in_one_commit(
    spark: SparkSession, tmp_path: Path, table: Table, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "kafkalog.sink")
    with DirectoryLog(tmp_path / "log") as engine:
        engine.create_topic("t", config={"cleanup.policy": "compact"})
        engine.append("t", [("a", '{"n": 1}'), ("b", '{"n": 2}'), ("a", None)])
    upsert = DeltaUpsert(tmp_path / "table", schema="n int", key_type="string")
    view = KTableView(spark, tmp_path / "log", "t", upsert, checkpoint=tmp_path / "views")
    try:
        view.start()
        view.wait_until(timeout_s=PATIENCE_S)
        assert table.rows() == [("b", 2)]
        spark.sql(f"DELETE FROM {table.name}")
        version = table.version()
        view.rebuild()
        view.wait_until(timeout_s=PATIENCE_S)
        assert (table.rows(), table.version()) == ([("b", 2)], version + 1)
        view.stop()
        shutil.rmtree(tmp_path / "table")
        view.start()
        view.wait_until(timeout_s=PATIENCE_S)
        assert table.rows() == [("b", 2)]
        assert "the checkpoint" in caplog.text
    finally:
        view.stop()


def test_a_key_of_two_columns_a_new_column_and_bad_records_outlive_a_restart(
    spark: SparkSession, tmp_path: Path, table: Table
) -> None:
    with DirectoryLog(tmp_path / "log") as engine:
        engine.create_topic("t", config={"cleanup.policy": "compact"})
        engine.append(
            "t",
            [
                ('{"region": "eu", "id": 1}', '{"n": 1}'),
                ('{"region": "us", "id": 1}', '{"n": 2}'),
                ('{"region": "us", "id": 1}', "broken"),
            ],
        )

    def view_of(schema: str, **given: Any) -> KTableView:
        given = {"key": ["region", "id"], **given}
        upsert = DeltaUpsert(tmp_path / "table", schema=schema, **given)
        return KTableView(
            spark,
            tmp_path / "log",
            "t",
            upsert,
            checkpoint=tmp_path / "views",
            trigger={"availableNow": True},
        )

    def follow(view: KTableView, *, rebuild: bool = False) -> int:
        try:
            view.start(rebuild=rebuild).awaitTermination()
            return view.progress().bad_records
        finally:
            view.stop()

    first, second = (
        "region string, id int, n int",
        "region string, id int, n int, note struct<`a-b`: string>",
    )
    assert follow(view_of(first, on_bad_record="deadletter:bad")) == 1
    assert table.rows() == [("eu", 1, 1), ("us", 1, 2)]
    with DirectoryLog(tmp_path / "log") as engine:
        engine.append("t", [('{"region": "eu", "id": 1}', '{"n": 3, "note": {"a-b": "x"}}')])
        engine.append("t", [('{"region": "us", "id": 1}', None), ("no key", "{}")])
    with pytest.raises(InvalidInputError, match=r"ADD COLUMNS \(note STRUCT<`a-b`: STRING>\)"):
        view_of(second).start()
    with pytest.raises(InvalidInputError, match=r"key .*\(expected id, found region and id\)"):
        view_of(first, key="id").start()
    assert follow(view_of(second, on_bad_record="skip", on_new_column="add")) == 2
    assert table.rows() == [("eu", 1, 3, ("x",))]
    assert follow(view_of(second, on_bad_record="skip", on_new_column="add"), rebuild=True) == 2
    assert table.rows() == [("eu", 1, 3, ("x",))]
    with DirectoryLog(tmp_path / "log", read_only=True) as engine:
        (letters,) = engine.read("bad", 0)
    assert letters.column("value").to_pylist() == [b"broken"]


def test_the_orders_of_the_example_become_equal_to_the_log(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    targets = orders_pipeline.targets

    def of_delta(*given: Any, **more: Any) -> list[Any]:
        return [each for each in targets(*given, **more) if each[0] == "delta"]

    monkeypatch.setattr(orders_pipeline, "targets", of_delta)
    orders_pipeline.run(spark, tmp_path, has_delta=True)
    orders = spark.table(f"delta.`{tmp_path}/delta/orders`")
    found = orders.select("region", "id", "item", "n", "note").collect()
    assert sorted(map(tuple, found)) == ROWS
    assert dead_letters(tmp_path, "delta") == [(b'{"region": "us", "id": 1}', b"no order")]
    people = spark.table(f"delta.`{tmp_path}/delta/customers`").select("key", "city").collect()
    assert sorted(map(tuple, people)) == [("ann", "Oslo"), ("bob", "Rome")]


def test_drawn_histories_out_of_order_end_as_those_in_order(
    spark: SparkSession, table: Table, path: Path
) -> None:
    upsert = DeltaUpsert(path, select=SELECT, version="version", delete_retention_ms=1000)
    batches = drawn()
    take(spark, upsert, batches)
    assert table.rows() == in_order(batches)
    gone = [Event("x", 5, True, 0), Event("y", 1, False, 1)]
    late = [Event("x", 4, False, 2), Event("y", 1, False, 3)]
    take(spark, upsert, [gone, late], first=10)
    assert [row for row in table.rows() if row[0] in {"x", "y"}] == [("y", 1, 3)]
    take(spark, upsert, [[Event("y", 0, True, 4)]], first=12, ms=1001)
    take(spark, upsert, [[Event("x", 4, False, 5)]], first=13, ms=1002)
    found = [row for row in table.rows() if row[0] in {"x", "y"}]
    assert found == [("x", 4, 5), ("y", 1, 3)]
