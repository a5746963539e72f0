"""What only Spark can show of a batch read: how frames are used again, and how filters arrive."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.datasource.logs import append_to

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


@pytest.fixture
def pushing(spark: Any) -> Iterator[None]:
    spark.conf.set(PUSH_DOWN, "true")
    yield
    spark.conf.unset(PUSH_DOWN)


def test_frames_are_used_again_and_see_what_came_later(spark: Any, tmp_path: Path) -> None:
    append_to(tmp_path, "t", {0: 10, 1: 10, 2: 1})
    frame = reading(spark, tmp_path, minPartitions="6")
    rdd = frame.select("partition", "offset").rdd
    assert rdd.getNumPartitions() >= 6
    assert (len(rdd.collect()), frame.union(frame).count()) == (21, 42)

    append_to(tmp_path, "t", {0: 3, 1: 3, 2: 3})

    found = [tuple(row) for row in rdd.collect()]
    assert sorted(found) == [(p, o) for p, end in ((0, 13), (1, 13), (2, 4)) for o in range(end)]
    assert frame.count() == 30


def test_filters_are_pushed_where_spark_pushes_them_and_change_no_answer(
    spark: Any, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    append_to(tmp_path, "t", {0: 40, 1: 40, 2: 40})
    conditions = {
        "partition = 1 AND offset >= 30": (1, 10),
        "key IN (X'3131', X'3535')": (3, 2),
        "timestamp > TIMESTAMP'2023-11-14 22:13:20Z'": (3, 0),
        "cast(key AS string) = '11'": (3, 120),
    }
    plain = reading(spark, tmp_path)
    expected = {c: sorted(map(str, plain.where(c).collect())) for c in conditions}
    assert scanned(plain.where("partition = 1 AND offset >= 30")) == (3, 120)

    request.getfixturevalue("pushing")
    frame = reading(spark, tmp_path)

    for condition, work in conditions.items():
        assert sorted(map(str, frame.where(condition).collect())) == expected[condition]
        assert scanned(frame.where(condition)) == work
    view = reading(spark, tmp_path, view="latest")
    assert view.where("partition = 2 AND offset < 10").count() == 10
