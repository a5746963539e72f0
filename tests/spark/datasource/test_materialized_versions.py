"""A materialized table with `version=`: the larger version counts, whenever its row comes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import kafkalog
from kafkalog import KTable
from kafkalog.datasource.materialized_table import MaterializedTable
from kafkalog.errors import InvalidInputError
from kafkalog.storage_engine.fs import clock
from tests.log_place import log_in
from tests.spark.sink.version_histories import SELECT, Event, document, drawn, in_order

pytestmark = [pytest.mark.spark, pytest.mark.slow]
NOW_MS = 1_700_000_000_000


def topic(spark: Any, tmp_path: Path) -> KTable:
    with kafkalog.open(log_in(tmp_path)) as log:
        log.create_topic("t", 2, {"cleanup.policy": "compact"})
    return KTable(spark, log_in(tmp_path), "t")


def table_of(source: KTable, tmp_path: Path, **given: Any) -> MaterializedTable:
    return source.materialize(tmp_path / "table", select=SELECT, version="version", **given)


def append(tmp_path: Path, *events: Event) -> None:
    with kafkalog.open(log_in(tmp_path)) as log:
        log.append("t", [(event.key, document(event)) for event in events])


def rows(table: MaterializedTable) -> list[tuple[Any, ...]]:
    return sorted(map(tuple, table.df().collect()))


@pytest.mark.parametrize("is_few", [True, False], ids=["read by the driver", "read by tasks"])
def test_drawn_histories_out_of_order_end_as_those_in_order(
    spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_few: bool
) -> None:
    if not is_few:
        monkeypatch.setattr("kafkalog.datasource.materialized_table._DRIVER_BYTES", 1)
    table = table_of(topic(spark, tmp_path), tmp_path)
    batches = drawn()
    for number, batch in enumerate(batches, 1):
        append(tmp_path, *batch)
        assert rows(table) == in_order(batches[:number])
        table.refresh(grace_s=0)
        with kafkalog.open(log_in(tmp_path)) as log:
            log.clean("t", force=True)
        assert rows(table) == in_order(batches[:number])


def test_a_deleted_row_stays_deleted_as_long_as_its_version_is_known(
    spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_ms = NOW_MS
    monkeypatch.setattr(clock, "now_ms", lambda: now_ms)
    table = table_of(topic(spark, tmp_path), tmp_path, delete_retention_ms=1000)
    append(tmp_path, Event("a", 5, True, 0), Event("b", 1, False, 1))
    table.refresh()
    assert [file.rows for file in table.complete()[0].deletions] == [1]

    now_ms += 1000
    append(tmp_path, Event("a", 4, False, 2))
    assert rows(table) == [("b", 1, 1)]
    table.refresh()
    assert rows(table) == [("b", 1, 1)]

    now_ms += 1
    append(tmp_path, Event("b", 0, True, 3))
    table.refresh()
    assert (rows(table), [*table.complete()[0].deletions]) == ([("b", 1, 1)], [])
    append(tmp_path, Event("a", 4, False, 4))
    assert rows(table) == [("a", 4, 4), ("b", 1, 1)]


def test_of_equal_versions_the_later_record_counts(spark: Any, tmp_path: Path) -> None:
    table = table_of(topic(spark, tmp_path), tmp_path)
    for is_refreshed in (False, True):
        append(tmp_path, Event("a", 1, False, 1), Event("a", 1, False, 2))
        assert rows(table) == [("a", 1, 2)]
        append(tmp_path, Event("a", 1, True, 3))
        if is_refreshed:
            table.refresh()
        assert rows(table) == []
        append(tmp_path, Event("a", 1, False, 4))
        assert rows(table) == [("a", 1, 4)]


def test_a_version_may_be_a_field_or_a_column_of_the_source(spark: Any, tmp_path: Path) -> None:
    source = topic(spark, tmp_path)
    table = source.materialize(tmp_path / "table", json="n int", version="timestamp")
    assert table.df().columns == source.df(json="n int").columns
    with kafkalog.open(log_in(tmp_path)) as log:
        for value, ms in ((b'{"n": 1}', 5), (b'{"n": 2}', 4), (None, 3)):
            log.append("t", [{"key": b"a", "value": value, "timestamp": ms}])
        assert [row.n for row in table.df().collect()] == [1]
        table.refresh()
        log.append("t", [{"key": b"a", "value": None, "timestamp": 6}])
        log.append("t", [{"key": b"a", "value": b'{"n": 3}', "timestamp": 5}])
    assert table.df().collect() == []
    assert (table.refresh().rows, table.df().collect()) == (0, [])


def test_a_record_without_a_version_is_named(spark: Any, tmp_path: Path) -> None:
    table = table_of(topic(spark, tmp_path), tmp_path)
    append(tmp_path, Event("a", 1, False, 1), Event("a", None, False, 1))
    with pytest.raises(
        Exception, match=r"partition \d offset 1: its version version is null\. Let"
    ):
        table.df().collect()


def test_a_version_is_a_column_whose_values_have_an_order(spark: Any, tmp_path: Path) -> None:
    source = topic(spark, tmp_path)
    for given, words in (
        ({"json": "n int", "version": "nobody"}, "no such column"),
        ({"json": "n int", "version": "N"}, "Letter case counts"),
        ({"json": "n int", "version": ""}, "no such column"),
        ({"select": ["1 AS _kl_key"]}, "names begin with _kl_ are taken"),
        ({"json": "n string", "version": "n"}, "expected a whole number"),
        ({"select": ["1 AS v", "1 AS deleted"], "version": "v"}, "must be boolean"),
        ({"json": "n int", "envelope": "debezium", "version": "n"}, "envelope or version"),
        ({"json": "n int", "version": "n", "delete_retention_ms": -1}, "0 or more"),
    ):
        with pytest.raises(InvalidInputError, match=words):
            source.materialize(tmp_path / "table", **given)


def test_an_erasure_takes_the_version_of_a_deleted_row_out(spark: Any, tmp_path: Path) -> None:
    table = table_of(topic(spark, tmp_path), tmp_path)
    append(tmp_path, Event("a", 1, True, 1), Event("b", 1, False, 1))
    table.refresh()
    with kafkalog.open(log_in(tmp_path)) as log:
        assert not log.erase("t", ["a"], now=True).is_erased
        table.refresh(grace_s=0)
        assert log.erase("t", ["a"], now=True).is_erased
    assert rows(table) == [("b", 1, 1)]


def test_a_refresh_forgets_old_deletions_though_the_log_is_unchanged(
    spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_ms = NOW_MS
    monkeypatch.setattr(clock, "now_ms", lambda: now_ms)
    table = table_of(topic(spark, tmp_path), tmp_path, delete_retention_ms=1000)
    append(tmp_path, Event("a", 1, True, 1))
    assert table.refresh().version == 2
    now_ms += 1000
    assert table.refresh().version == 2
    now_ms += 1
    assert (table.refresh().version, table.refresh().version) == (3, 3)
    assert [*table.complete()[0].deletions] == []
