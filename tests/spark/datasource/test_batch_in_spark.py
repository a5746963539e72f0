"""What only Spark can show of a batch read: how frames and views are used again."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kafkalog.datasource.ktable import KTable
from tests.log_place import in_a_directory, log_in
from tests.unit.datasource.logs import append_to

pytestmark = [pytest.mark.spark, pytest.mark.slow]

PUSH_DOWN = "spark.sql.python.filterPushdown.enabled"


def reading(spark: Any, root: Path, **options: str) -> Any:
    return spark.read.format("kafkalog").options(**{"subscribe": "t", **options}).load(str(root))


def scanned(frame: Any) -> tuple[int, int]:
    """The tasks that a frame without shuffle has, and the rows that left our workers."""
    plan = frame._jdf.queryExecution().executedPlan()
    frame._jdf.collectToPython()
    scan = plan.collectLeaves().head()
    return plan.execute().getNumPartitions(), scan.metrics().apply("numOutputRows").value()


def counted(spark: Any, query: str) -> tuple[int, ...]:
    (row,) = spark.sql(query).collect()
    return tuple(row)


@pytest.fixture(params=["true", "false"])
def pushing(spark: Any, request: pytest.FixtureRequest) -> Iterator[str]:
    """Whether Spark offers its filters to sources in Python."""
    spark.conf.set(PUSH_DOWN, request.param)
    yield request.param
    spark.conf.unset(PUSH_DOWN)


@in_a_directory("a frame of a store is of the moment of its plan")
def test_frames_are_used_again_and_see_what_came_later(spark: Any, tmp_path: Path) -> None:
    append_to(log_in(tmp_path), "t", {0: 10, 1: 10, 2: 1})
    frame = reading(spark, log_in(tmp_path), minPartitions="6")
    rdd = frame.select("partition", "offset").rdd
    assert rdd.getNumPartitions() >= 6
    assert (len(rdd.collect()), frame.union(frame).count()) == (21, 42)

    append_to(log_in(tmp_path), "t", {0: 3, 1: 3, 2: 3})

    found = [tuple(row) for row in rdd.collect()]
    assert sorted(found) == [(p, o) for p, end in ((0, 13), (1, 13), (2, 4)) for o in range(end)]
    assert frame.count() == 30


VIEWS = ["changelog", "latest"]


@pytest.mark.parametrize("view", VIEWS)
def test_the_filter_of_one_query_does_not_apply_to_the_next(
    spark: Any, pushing: str, tmp_path: Path, view: str
) -> None:
    append_to(log_in(tmp_path), "t", {0: 27, 1: 40, 2: 33})
    reading(spark, log_in(tmp_path), view=view).createOrReplaceTempView("used_again")

    assert counted(spark, "SELECT count(*) FROM used_again") == (100,)
    assert counted(spark, "SELECT count(*) FROM used_again WHERE partition = 0") == (27,)
    assert counted(spark, "SELECT count(*) FROM used_again") == (100,)
    assert counted(spark, "SELECT count(*) FROM used_again WHERE key = X'3939'") == (1,)
    assert counted(spark, "SELECT count(*) FROM used_again WHERE offset >= 30") == (13,)
    assert counted(spark, "SELECT count(*) FROM used_again") == (100,)


@pytest.mark.parametrize("view", VIEWS)
def test_each_use_of_a_view_in_a_statement_has_its_own_filter(
    spark: Any, pushing: str, tmp_path: Path, view: str
) -> None:
    append_to(log_in(tmp_path), "t", {0: 27, 1: 40, 2: 33})
    reading(spark, log_in(tmp_path), view=view).createOrReplaceTempView("used_twice")

    of_each = "SELECT (SELECT count(*) FROM used_twice WHERE partition = {})".format
    assert counted(spark, f"{of_each(0)}, ({of_each(1)}), ({of_each(2)})") == (27, 40, 33)
    joined = (
        "SELECT count(*) FROM used_twice a JOIN used_twice b ON a.offset = b.offset "
        "WHERE a.partition = 1 AND b.partition = 2"
    )
    assert counted(spark, joined) == (33,)


def test_a_view_of_a_ktable_has_all_rows_after_a_query_with_a_filter(
    spark: Any, pushing: str, tmp_path: Path
) -> None:
    append_to(log_in(tmp_path), "t", {0: 27, 1: 40, 2: 33})
    KTable(spark, log_in(tmp_path), "t").create_view("table_of_t")

    assert counted(spark, "SELECT count(*) FROM table_of_t WHERE partition = 0") == (27,)
    assert counted(spark, "SELECT count(*) FROM table_of_t") == (100,)
    assert counted(spark, "SELECT count(*) FROM table_of_t WHERE key = X'3939'") == (1,)
    assert counted(spark, "SELECT count(*) FROM table_of_t") == (100,)


@in_a_directory("a task for each partition")
def test_rows_of_other_keys_do_not_leave_the_tasks(
    spark: Any, pushing: str, tmp_path: Path
) -> None:
    append_to(log_in(tmp_path), "t", {0: 40, 1: 40, 2: 40})

    assert scanned(reading(spark, log_in(tmp_path))) == (3, 120)
    assert scanned(reading(spark, log_in(tmp_path), keys='["11", "55"]')) == (3, 2)
    sent = {"partitioner": "murmur2", "keys": '["11"]'}
    assert scanned(reading(spark, log_in(tmp_path), **sent))[0] == 1
