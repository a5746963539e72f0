"""Spark Connect on each older release of Spark: a chosen set of the cells of the table."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import spark_peers
from tests.spark.connect.cells import AVRO, CELLS, RUNS
from tests.spark.connect.conftest import outcomes, with_jar
from tests.spark_home import make_spark_home

pytestmark = [pytest.mark.spark, pytest.mark.slow]
CHOSEN = [
    "batch read: `subscribe`, `subscribePattern`, `assign`, offsets and times",
    "`KTable.df(json=)` and `create_view(json=)`",
    "`KTable.materialize`: `df`, `create_view` and `refresh`",
    "change events in JSON: `value_columns` and an upsert with `envelope=`",
    AVRO,
    "stream read of `view=latest`",
    'stream write by `writeStream.format("kafkalog")`',
    "`Append(..., name=)` in output mode `update`",
    "`SQLiteUpsert(..., name=)`",
]


def test_the_chosen_cells_are_cells_of_the_table() -> None:
    assert {*CHOSEN} <= {*CELLS}


@pytest.mark.parametrize("release", spark_peers.RELEASES)
def test_an_older_release_of_spark_connect_does_the_same(tmp_path: Path, release: str) -> None:
    spark_peers.require(release)
    home = make_spark_home(tmp_path / "home", spark_peers.package(release))
    variables = {"SPARK_HOME": str(home), "SPARK_TESTING": "1"}
    variables["PYTHONPATH"] = spark_peers.environment(release)["PYTHONPATH"]
    variables |= with_jar(tmp_path, spark_peers.jars(release, "spark-avro"))
    found = outcomes("local[2]", tmp_path, *CHOSEN, **variables)
    assert found == dict.fromkeys(CHOSEN, RUNS)
