"""A topic that pytest's plugin gives to a test is read by Spark."""

from __future__ import annotations

from typing import Any

import pytest

from kafkalog.pytest_plugin import MakeTopic

pytestmark = [pytest.mark.spark, pytest.mark.slow]


def test_spark_reads_it_with_its_options(kafkalog_topic: MakeTopic, spark: Any) -> None:
    topic = kafkalog_topic(records=[("a", "1"), ("b", "2"), ("a", "3")])
    reader = spark.read.format("kafkalog").options(**topic.options)
    assert reader.load().count() == 3
    rows = reader.option("view", "latest").load().collect()
    assert {(bytes(row.key), bytes(row.value)) for row in rows} == {(b"a", b"3"), (b"b", b"2")}
