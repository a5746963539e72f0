"""A materialized table is equal to `view=latest`, whatever happens to its log and to its files."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import kafkalog
from kafkalog import KTable
from kafkalog.datasource.materialized_table import MaterializedTable
from kafkalog.errors import InvalidInputError
from kafkalog.sink.upsert import SQLiteUpsert
from kafkalog.storage_engine.fs import file_system
from kafkalog.storage_engine.object_store.address import StoreAddress
from tests.log_place import in_a_directory, log_in

pytestmark = [pytest.mark.spark, pytest.mark.slow]
NOW_MS = 1_700_000_000_000
DAY_MS = 86_400_000
JSON = "n int, s string"
HISTORIES = 1_000 if os.environ.get("KAFKALOG_TABLES") == "full" else 2


def fill(root: Any, *, partitions: int = 2, count: int = 8, **config: object) -> None:
    with kafkalog.open(root) as log:
        settings = {name.replace("_", "."): str(value) for name, value in config.items()}
        log.create_topic("t", partitions, settings or {"cleanup.policy": "compact"})
        log.append("t", [(f"k{i}", f'{{"n": {i}, "s": "a"}}') for i in range(count)])


def append(root: Any, *records: tuple[str, str | None]) -> None:
    with kafkalog.open(root) as log:
        log.append("t", list(records))


def rows(frame: Any) -> list[tuple[Any, ...]]:
    """Return all that a frame has of the records, sorted."""
    names = ["key", "partition", "offset", "timestamp", "n", "s"]
    return sorted(tuple(map(str, row)) for row in frame.select(*names).collect())


def latest_rows(spark: Any, root: Any) -> list[tuple[Any, ...]]:
    return rows(KTable(spark, root, "t").df(json=JSON))


def is_right(table: MaterializedTable, spark: Any, root: Any) -> bool:
    return rows(table.df()) == latest_rows(spark, root)


def made(spark: Any, tmp_path: Path) -> MaterializedTable:
    return KTable(spark, log_in(tmp_path), "t").materialize(tmp_path / "table", json=JSON)


class Dies(BaseException):
    """What ends a process at a step."""


class DyingFileSystem(file_system.FileSystem):
    """The driver dies before or after it links a manifest, or while it removes old files."""

    def __init__(self, call: str) -> None:
        self.call = call

    def link(self, source: Path, target: Path) -> None:
        is_manifest = target.name.startswith("manifest-")
        if is_manifest and self.call == "before the manifest":
            raise Dies
        super().link(source, target)
        if is_manifest and self.call == "after the manifest":
            raise Dies

    def unlink(self, path: Path) -> None:
        if self.call == "while old files go" and path.suffix == ".parquet":
            raise Dies
        super().unlink(path)


def test_a_table_shows_what_view_latest_shows(spark: Any, tmp_path: Path) -> None:
    root = log_in(tmp_path)
    fill(root)
    table = made(spark, tmp_path)
    frame, latest = table.df(), KTable(spark, root, "t").df(json=JSON)
    assert frame.columns == latest.columns
    assert "Join" not in frame._jdf.queryExecution().toString()  # the files alone
    assert rows(frame) == rows(latest)

    append(root, ("k0", None), ("k1", '{"n": 100}'), ("new", "no json"), ("null", '{"n": null}'))
    table.create_view("materialized")
    before = rows(table.df())
    assert before == rows(spark.table("materialized")) == latest_rows(spark, root)
    frame = table.df()
    progress = table.refresh(grace_s=3600)
    assert (progress.version, progress.lag, progress.rows) == (2, 0, 9)

    append(root, ("k1", None))
    assert rows(frame) == rows(frame) == rows(spark.table("materialized")) == before
    assert rows(table.df()) == latest_rows(spark, root) != before
    assert table.progress().lag == 1
    assert table.refresh(grace_s=0).version == 3
    assert len(list((tmp_path / "table").glob("manifest-*.json"))) == 1
    assert rows(spark.table("materialized")) == latest_rows(spark, root)
    assert table.refresh().version == 3  # nothing has changed


def test_many_changes_are_read_by_tasks(
    spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kafkalog.datasource.materialized_table._DRIVER_BYTES", 1)
    root = log_in(tmp_path)
    fill(root)
    table = made(spark, tmp_path)
    append(root, ("k0", None), ("k1", '{"n": 100}'))
    frame = table.df()
    assert "kafkalog" in frame._jdf.queryExecution().toString()
    assert rows(frame) == latest_rows(spark, root)
    with kafkalog.open(root) as log:
        log.append("t", [("k2", None)])
        log.clean("t", force=True, now_ms=NOW_MS)
        log.append("t", [("k1", "{}")])
        log.clean("t", force=True, now_ms=NOW_MS + 1000 * DAY_MS)
    with pytest.raises(Exception, match=r"files are of|cleaned up to"):
        frame.select("n").collect()
    table.refresh()
    assert is_right(table, spark, root)


@in_a_directory("the step is one of the file system")
@pytest.mark.parametrize(
    "step", ["before the manifest", "after the manifest", "while old files go"]
)
def test_a_refresh_that_dies_leaves_the_old_table_or_the_new_one(
    spark: Any, tmp_path: Path, step: str
) -> None:
    root = log_in(tmp_path)
    fill(root)
    table = made(spark, tmp_path)
    append(root, ("k0", None), ("k1", '{"n": 100}'))
    with contextlib.suppress(Dies), file_system.replaced(DyingFileSystem(step)):
        table.refresh(grace_s=0)
        pytest.fail("the step was never reached")
    assert table.progress().version == (1 if step == "before the manifest" else 2)
    assert is_right(table, spark, root)
    append(root, ("k2", None))
    table.refresh(grace_s=0)
    assert is_right(table, spark, root)
    named = {file.path for file in table.complete()[0].files}
    found = (tmp_path / "table").rglob("*.parquet")
    assert {str(path.relative_to(tmp_path / "table")) for path in found} == named


def test_of_several_refreshes_at_once_all_end_with_the_table(spark: Any, tmp_path: Path) -> None:
    root = log_in(tmp_path)
    fill(root)
    tables = [made(spark, tmp_path) for _ in range(3)]
    append(root, ("k0", None))
    faults: list[BaseException] = []

    def refresh(table: MaterializedTable) -> None:
        try:
            table.refresh(grace_s=0)
        except BaseException as fault:
            faults.append(fault)

    threads = [threading.Thread(target=refresh, args=[table]) for table in tables]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert faults == []
    assert {table.progress().lag for table in tables} == {0}
    assert is_right(tables[0], spark, root)


def test_files_that_the_log_cannot_complete_are_made_again(spark: Any, tmp_path: Path) -> None:
    root = log_in(tmp_path)
    fill(root)
    table = made(spark, tmp_path)
    with kafkalog.open(root) as log:
        log.append("t", [("k0", None)])
        log.clean("t", force=True, now_ms=NOW_MS)
        log.append("t", [("k1", "{}")])
        log.clean("t", force=True, now_ms=NOW_MS + 1000 * DAY_MS)
    assert "are gone, the files are of" in str(table.progress().fault)
    assert is_right(table, spark, root)
    assert (table.progress().version, table.progress().fault) == (2, None)

    with kafkalog.open(root) as log:
        log.delete_topic("t")
    fill(root, count=3)
    assert is_right(table, spark, root)


@in_a_directory("a file is removed by hand")
def test_a_refresh_makes_files_again_that_somebody_has_removed(spark: Any, tmp_path: Path) -> None:
    fill(log_in(tmp_path))
    table = made(spark, tmp_path)
    next((tmp_path / "table").rglob("*.parquet")).unlink()
    with pytest.raises(Exception, match="PATH_NOT_FOUND"):
        rows(table.df())
    assert (table.refresh().version, table.refresh().version) == (2, 2)
    assert is_right(table, spark, log_in(tmp_path))


def test_the_rows_of_added_partitions_are_there(spark: Any, tmp_path: Path) -> None:
    root = log_in(tmp_path)
    fill(root)
    table = made(spark, tmp_path)
    with kafkalog.open(root) as log:
        log.alter_topic("t", partitions=4, keys_may_move=True)
        log.append("t", [(f"q{i}", f'{{"n": {i}}}') for i in range(9)])
    assert is_right(table, spark, root)
    table.refresh()
    assert is_right(table, spark, root)


def test_columns_come_from_keys_and_from_expressions(spark: Any, tmp_path: Path) -> None:
    root = log_in(tmp_path)
    fill(root, count=0, partitions=1)
    append(root, ('{"id": 1}', '{"n": 1, "key": 5}'), ('{"id": 2}', '{"n": 2}'))
    source = KTable(spark, root, "t")
    arguments = {"json": "n int, key int", "key_json": "id int"}
    keyed = source.materialize(tmp_path / "keyed", **arguments)
    chosen = source.materialize(tmp_path / "chosen", select=["string(key) AS k", "length(value)"])
    for change in ("", '{"n": 3}'):
        if change:
            append(root, ('{"id": 1}', change), ('{"id": 2}', None))
        latest = source.df(**arguments)  # type: ignore[arg-type]
        assert keyed.df().columns == latest.columns
        assert sorted(keyed.df().collect()) == sorted(latest.collect())
        expected = source.df().selectExpr("string(key) AS k", "length(value)")
        assert chosen.df().columns == expected.columns
        assert sorted(chosen.df().collect()) == sorted(expected.collect())
    other = source.materialize(tmp_path / "chosen", select=["offset"])
    assert (other.df().columns, other.progress().version) == (["offset"], 2)
    with pytest.raises(InvalidInputError, match="give the columns"):
        source.materialize(tmp_path / "none")


@pytest.mark.parametrize("is_versioned", [False, True], ids=["by offset", "by version"])
def test_a_column_may_have_any_name(spark: Any, tmp_path: Path, is_versioned: bool) -> None:
    from pyspark.sql.types import StructType

    root, given = log_in(tmp_path), {}
    names = ["a`b", "a.b", "*", "%s", " ", "", "\u00e9", "$", "row", "'\"", "kl_n"]
    if is_versioned:
        given["version"] = "kl_n"
    form = StructType()
    for name in names:
        form.add(name, "long")
    fill(root, count=0)
    source = KTable(spark, root, "t")
    table = source.materialize(tmp_path / "table", json=form, **given)
    for number in (1, 2):
        value = json.dumps(dict.fromkeys(names, number))
        append(root, ("k", value), (f"l{number}", value))
        latest = sorted(map(tuple, source.df(json=form).collect()))
        assert sorted(map(tuple, table.df().collect())) == latest
        table.refresh()
        assert sorted(map(tuple, table.df().collect())) == latest


def test_a_key_that_shares_the_hash_of_a_changed_one_stays(
    spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pyspark.sql import functions

    one = functions.lit(1).cast("bigint")
    monkeypatch.setattr(functions, "xxhash64", lambda *_: one)
    root = log_in(tmp_path)
    fill(root)
    table = made(spark, tmp_path)
    append(root, ("k0", None), ("k1", '{"n": 100}'))
    assert is_right(table, spark, root)


def test_a_change_event_that_deletes_a_row_leaves_none(spark: Any, tmp_path: Path) -> None:
    root = log_in(tmp_path)
    fill(root, count=0)

    def event(op: str, after: str) -> str:
        return f'{{"op": "{op}", "after": {after}}}'

    append(root, ("a", event("c", '{"n": 1}')), ("b", event("d", "null")))
    source = KTable(spark, root, "t")
    table = source.materialize(tmp_path / "table", json="n int", envelope="debezium")
    for changes in ((), (("a", event("d", "null")), ("c", event("u", '{"n": 2}')))):
        append(root, *changes)
        expected = source.df(json="n int", envelope="debezium")
        assert sorted(table.df().collect()) == sorted(expected.collect()) != []
    assert table.refresh().rows == 1


def test_other_engines_read_the_files_of_the_manifest(spark: Any, tmp_path: Path) -> None:
    import json

    import duckdb

    fill(log_in(tmp_path))
    location = tmp_path / "table"
    made(spark, tmp_path)
    manifest = json.loads(max(location.glob("manifest-*.json")).read_text())
    files = [str(location / file["path"]) for file in manifest["files"]]
    found = duckdb.sql("SELECT sum(n), count(*) FROM read_parquet($1)", params=[files]).fetchall()
    assert found == [(28, 8)]


@contextlib.contextmanager
def drawn_history(spark: Any, tmp_path: Path, rng: random.Random) -> Iterator[Any]:
    """Yield a function that does something to a log or to its table."""
    root, now_ms = tmp_path / "log", NOW_MS
    fill(root, cleanup_policy="compact,delete", segment_bytes=500)
    table = made(spark, tmp_path)

    def act() -> MaterializedTable:
        nonlocal now_ms
        now_ms += rng.choice([0, DAY_MS // 2, 2 * DAY_MS])
        kind = rng.choice("aaacdeprk")
        with kafkalog.open(root) as log:
            if kind == "a":
                keys = rng.choices(range(12), k=rng.randint(1, 6))
                values = [None if rng.random() < 0.3 else f'{{"n": {now_ms % 99}}}' for _ in keys]
                log.append("t", [(f"k{k}", v) for k, v in zip(keys, values, strict=True)])
            elif kind == "c":
                log.clean("t", force=True, now_ms=now_ms)
            elif kind == "d":
                first, end = log.offsets("t")[0]
                log.delete_records("t", 0, rng.randint(first, end))
            elif kind == "e":
                log.erase("t", [f"k{rng.randrange(12)}"], now=True)
            elif kind == "p" and len(log.offsets("t")) < 4:
                log.alter_topic("t", partitions=len(log.offsets("t")) + 1, keys_may_move=True)
        if kind == "r":
            table.refresh(grace_s=rng.choice([0, 3600]))
        elif kind == "k":
            step = rng.choice(["before the manifest", "after the manifest", "while old files go"])
            with contextlib.suppress(Dies), file_system.replaced(DyingFileSystem(step)):
                table.refresh(grace_s=0)
        return table

    yield act
    shutil.rmtree(root)


@in_a_directory("steps of it are of the file system")
@pytest.mark.parametrize("seed", range(HISTORIES))
def test_a_table_is_right_in_any_history(spark: Any, tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    with drawn_history(spark, tmp_path, rng) as act:
        for _ in range(3):
            for _ in range(rng.randint(1, 4)):
                table = act()
            assert is_right(table, spark, tmp_path / "log")


def test_an_erasure_names_the_tables_that_still_have_the_key(spark: Any, tmp_path: Path) -> None:
    root = log_in(tmp_path)
    fill(root)
    chosen = KTable(spark, root, "t").materialize(tmp_path / "chosen", select=["offset"])
    table = made(spark, tmp_path)
    with kafkalog.open(root) as log:
        erased = log.erase("t", ["k3"], now=True)
        left = {str(one.path.parent.parent.parent) for one in erased.after.residuals}
        assert not erased.is_erased
        assert left == {str(tmp_path / "chosen"), str(tmp_path / "table")}
        assert all("refresh(grace_s=0)" in one.remedy for one in erased.after.residuals)
        for each in (chosen, table):
            each.refresh(grace_s=0)
        assert log.erase("t", ["k3"], now=True).is_erased
    assert is_right(table, spark, root)


def test_a_view_refreshes_a_table_of_which_a_tenth_has_changed(spark: Any, tmp_path: Path) -> None:
    root = log_in(tmp_path)
    fill(root, count=20)
    table = made(spark, tmp_path)
    view = kafkalog.KTableView(
        spark,
        root,
        "t",
        SQLiteUpsert(tmp_path / "t.db", "t", schema=JSON),
        checkpoint=tmp_path / "view",
        trigger={"availableNow": True},
        tables=[table],
    )
    for count, version in ((1, 1), (4, 2)):
        append(root, *[(f"k{i}", '{"n": 100}') for i in range(count)])
        assert view.start().awaitTermination(120)
        assert table.progress().version == version
    assert is_right(table, spark, root)


def test_log_and_table_may_be_in_an_object_store(spark: Any, s3_address: StoreAddress) -> None:
    root, options = f"{s3_address}/log", s3_address.options
    with kafkalog.open(root, options=options) as log:
        log.create_topic("t", 2)
        log.append("t", [(f"k{i}", f'{{"n": {i}, "s": "a"}}') for i in range(8)])
        source = KTable(spark, root, "t", options=options)
        table = source.materialize(f"{s3_address}/table", json=JSON)
        assert rows(table.df()) == rows(source.df(json=JSON))
        log.append("t", [("k0", None), ("k1", '{"n": 100}'), ("new", None)])
        assert rows(table.df()) == rows(source.df(json=JSON))
        assert table.refresh(grace_s=0).rows == 7
        assert rows(table.df()) == rows(source.df(json=JSON))
        left = log.erase("t", ["k3"], now=True).after.residuals
        assert [one.path.name.endswith(".parquet") for one in left] == [True]
        table.refresh(grace_s=0)
        assert log.erase("t", ["k3"], now=True).is_erased
        assert rows(table.df()) == rows(source.df(json=JSON))
