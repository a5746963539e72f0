"""The page of first mistakes shows errors that its lines really cause in Spark."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.unit.first_mistakes import error_of, make_log, mistakes, says

pytestmark = [pytest.mark.spark, pytest.mark.slow]


def test_each_line_of_spark_fails_as_the_page_says(spark: Any, tmp_path: Path) -> None:
    names = make_log(tmp_path)
    names["spark"] = spark
    names["source"] = lambda **options: spark.read.format("kafkalog").options(**options)
    names["rows"] = spark.sql("SELECT 'fig' AS key, '1' AS value")
    names["sink"] = names["rows"].write.format("kafkalog").mode("append")
    said = {line: error_of(line, names, tmp_path) for _, line in mistakes(of_spark=True)}
    wrong = [(shown, said[line]) for shown, line in mistakes(True) if not says(shown, said[line])]
    assert wrong == []
