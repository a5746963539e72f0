"""A materialized view in Spark: it follows its log, and is rebuilt when the table is lost."""

from __future__ import annotations

import logging
import shutil
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

import kafkalog
from kafkalog import KTableView
from kafkalog.errors import InvalidInputError, StorageError
from kafkalog.sink.upsert import SQLiteUpsert
from kafkalog.storage_engine.place import open_log
from tests.log_place import log_in
from tests.spark.sink.test_spark_upsert import append, table

pytestmark = [pytest.mark.spark, pytest.mark.slow]


@pytest.fixture
def log(tmp_path: Path) -> Path:
    with open_log(log_in(tmp_path)) as engine:
        engine.create_topic("t", partitions=2, config={"cleanup.policy": "compact"})
    append(log_in(tmp_path), ["a", "b", "a"], ['{"n":1}', '{"n":2}', '{"n":3}'], [0, 1, 0])
    return log_in(tmp_path)


@pytest.fixture
def view(spark: Any, log: Path, tmp_path: Path) -> Iterator[KTableView]:
    made = view_of(spark, log, tmp_path)
    yield made
    made.stop()


def view_of(spark: Any, log: Path, tmp_path: Path, **options: str) -> KTableView:
    target = SQLiteUpsert(tmp_path / "view.db", "stock", schema="n int", key_type="string")
    checkpoint = tmp_path / "views" / "stock"
    return KTableView(spark, log, "t", target, checkpoint=checkpoint, options=options)


def wait_for_generation(tmp_path: Path, number: str) -> None:
    """Return when only this generation is left: the others go just after it has landed."""
    until = time.monotonic() + 60
    while True:
        root = tmp_path / "views" / "stock"
        left = sorted(path.name for path in root.iterdir() if path.is_dir())
        if left == [number]:
            return
        assert time.monotonic() < until, left
        time.sleep(0.05)


def test_a_view_follows_and_outlives_its_table(
    spark: Any, log: Path, view: KTableView, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "kafkalog.sink")
    database, backup = tmp_path / "view.db", tmp_path / "backup.db"
    query = view.start()
    assert view.start() is query
    view.wait_until(timeout_s=120)
    assert table(database) == [("a", 3), ("b", 2)]
    shutil.copyfile(database, backup)
    with pytest.raises(StorageError, match="the view is running already"):
        view_of(spark, log, tmp_path).start()
    append(log, ["b", "c"], [None, '{"n":4}'], [1, 1])
    view_of(None, log, tmp_path).wait_until(timeout_s=120)
    assert table(database) == [("a", 3), ("c", 4)]
    progress = view.progress()
    assert (progress.lag, progress.partitions[1].applied, progress.query_id) == (0, 3, query.id)

    view.stop()
    append(log, ["d"], ['{"n":5}'], [0])
    assert view.progress().lag == 1
    assert view.start().id == query.id  # nothing was lost: the same generation goes on
    view.wait_until(timeout_s=120)
    assert table(database) == [("a", 3), ("c", 4), ("d", 5)]
    assert "rebuilt" not in caplog.text

    view.stop()
    shutil.copyfile(backup, database)
    rebuilt = view.start()
    assert "one of them was put back from a backup" in caplog.text
    view.wait_until(timeout_s=120)
    assert table(database) == [("a", 3), ("c", 4), ("d", 5)]
    assert rebuilt.id != query.id
    wait_for_generation(tmp_path, "2")


def test_a_table_lost_under_a_running_view_ends_the_query_and_is_rebuilt(
    log: Path, view: KTableView, tmp_path: Path
) -> None:
    view.start()
    view.wait_until(timeout_s=120)
    (tmp_path / "view.db").unlink()
    append(log, ["c"], ['{"n":4}'], [1])
    with pytest.raises(Exception, match="start the view again, it will be rebuilt"):
        view.wait_until(timeout_s=120)
    view.start()
    view.wait_until(timeout_s=120)
    assert table(tmp_path / "view.db") == [("a", 3), ("b", 2), ("c", 4)]
    view.rebuild()
    view.wait_until(timeout_s=120)
    assert table(tmp_path / "view.db") == [("a", 3), ("b", 2), ("c", 4)]
    wait_for_generation(tmp_path, "3")


def test_a_topic_created_again_under_a_running_view_ends_the_query_and_is_rebuilt(
    spark: Any, log: Path, tmp_path: Path
) -> None:
    view = view_of(spark, log, tmp_path, failOnDataLoss="false")
    query = view.start()
    view.wait_until(timeout_s=120)
    with open_log(log) as engine:
        engine.delete_topic("t")
        engine.create_topic("t", partitions=2, config={"cleanup.policy": "compact"})
    append(log, ["x", "y", "z", "u"], ['{"n":7}'] * 4, [0, 0, 0, 1])
    with pytest.raises(Exception, match=r"created again\. Start the view again\."):
        query.awaitTermination(120)
    assert table(tmp_path / "view.db") == [("a", 3), ("b", 2)]
    with pytest.raises(Exception, match=r"created again\. Start the view again\."):
        view.wait_until()
    view.start()
    view.wait_until(timeout_s=120)
    view.stop()
    assert table(tmp_path / "view.db") == [("u", 7), ("x", 7), ("y", 7), ("z", 7)]


def test_a_later_deletion_in_another_partition_wins_over_an_earlier_value(
    log: Path, view: KTableView, tmp_path: Path
) -> None:
    append(log, ["a", "b", "c"], [None, '{"n":9}', None], [1, 0, 0])
    view.start()
    view.wait_until(timeout_s=120)
    assert table(tmp_path / "view.db") == [("b", 9)]


def test_a_later_deletion_of_a_key_that_is_spelled_otherwise_wins(
    spark: Any, tmp_path: Path
) -> None:
    with open_log(log_in(tmp_path)) as engine:
        engine.create_topic("t", partitions=2, config={"cleanup.policy": "compact"})
    keys = ['{"id":1}', '{"id":2}', '{"id":3}', '{"id": 3}', '{"id":4}']
    append(log_in(tmp_path), keys, ['{"n":1}', '{"n":2}', '{"n":3}', None, "{"], [0, 1, 0, 0, 0])
    append(log_in(tmp_path), ['{"id": 1}', '{"id":4}'], [None, '{"n":4}'], [1, 0])
    target = SQLiteUpsert(tmp_path / "view.db", "stock", schema="id int, n int", key=["id"])
    view = KTableView(spark, log_in(tmp_path), "t", target, checkpoint=tmp_path / "views" / "stock")
    view.start()
    view.wait_until(timeout_s=120)
    view.stop()
    with closing(sqlite3.connect(tmp_path / "view.db")) as connection:
        found = connection.execute("SELECT * FROM stock ORDER BY id").fetchall()
    assert found == [(2, 2), (4, 4)]


@pytest.mark.parametrize("is_first", [False, True])
def test_a_view_that_began_with_the_changelog_goes_on(
    log: Path, view: KTableView, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_first: bool
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(KTableView, "_needs_latest_alone", False)
        query_id = view.start().id
        view.wait_until(timeout_s=120)
        view.stop()
    if is_first:  # as if it had died in its first micro-batch
        commits = tmp_path / "views" / "stock" / "1" / "commits"
        shutil.rmtree(commits)
        (tmp_path / "view.db").unlink()
    append(log, ["a", "b", "c"], ['{"n":4}', None, '{"n":5}'], [0, 1, 1])
    with kafkalog.open(log) as opened:
        opened.clean("t", force=True)
    assert view.start().id == query_id
    view.wait_until(timeout_s=120)
    assert table(tmp_path / "view.db") == [("a", 4), ("c", 5)]


def test_rows_of_somebody_else_are_replaced_on_demand_only(
    spark: Any, log: Path, view: KTableView, tmp_path: Path
) -> None:
    with closing(sqlite3.connect(tmp_path / "view.db")) as connection, connection:
        connection.execute("CREATE TABLE stock (key TEXT PRIMARY KEY, n INTEGER)")
        connection.execute("INSERT INTO stock VALUES ('mine', 1)")
    with pytest.raises(InvalidInputError, match="no view has ever kept it"):
        view.start()
    assert table(tmp_path / "view.db") == [("mine", 1)]
    view.start(rebuild=True)
    view.wait_until(timeout_s=120)
    assert table(tmp_path / "view.db") == [("a", 3), ("b", 2)]
