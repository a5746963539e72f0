"""Windows in the keys of Kafka Streams, by Spark's own functions as in pyarrow."""

from __future__ import annotations

from typing import Any

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from kafkalog import window_columns
from tests.unit.values.test_window_keys import keys, table

pytestmark = [pytest.mark.spark, pytest.mark.slow]

FORMS = {
    "app-windows-changelog": "window-store",
    "app-join-left-changelog": "window-store",
    "app-sessions-changelog": "session",
    "sessioned": "session",
    "windowed": "window",
}


def frame(spark: SparkSession, *given: bytes | None) -> Any:
    rows = [("t", 0, offset, key) for offset, key in enumerate(given)]
    return spark.createDataFrame(rows, "topic string, partition int, offset bigint, key binary")


@pytest.mark.parametrize("topic, form", FORMS.items())
def test_spark_finds_the_windows_that_pyarrow_finds(
    spark: SparkSession, topic: str, form: str
) -> None:
    wanted = window_columns(table(*keys(topic), None), form)
    found = window_columns(frame(spark, *keys(topic), None), form)
    assert found.columns[4:] == wanted.column_names[1:]
    rows = found.orderBy("offset").select(wanted.column_names).toArrow()
    assert rows.cast(wanted.schema).to_pylist() == wanted.to_pylist()


@pytest.mark.parametrize("key, form", [(b"short", "window"), (b"a longer plain key", "session")])
def test_a_key_of_another_form_fails_the_query_with_its_place(
    spark: SparkSession, key: bytes, form: str
) -> None:
    df = window_columns(frame(spark, None, key), form)
    with pytest.raises(PySparkException, match=f"t-0 offset 1: .* found X'{key.hex().upper()}'"):
        df.collect()
