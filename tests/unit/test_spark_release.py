"""What fits a release of Spark, and what an older one refuses."""

from __future__ import annotations

from pathlib import Path

import pyspark
import pytest

from kafkalog import spark_release
from kafkalog.datasource.register import register
from kafkalog.datasource.stream_reader import KafkaLogStreamReader
from kafkalog.errors import InvalidInputError
from kafkalog.spark_release import avro_package, delta_package, fault_of_release
from tests.unit.datasource.logs import append, numbered, source


@pytest.mark.parametrize(
    ("found", "avro", "delta"),
    [
        ("4.0.5", "4.0.2", ("4.0", "io.delta:delta-spark_4.0_2.13:4.4.0")),
        ("4.1.4", "4.1.1", ("4.1", "io.delta:delta-spark_4.1_2.13:4.4.0")),
        ("4.2.1", "4.2.0", ("4.2", "io.delta:delta-spark_4.2_2.13:4.4.0")),
        ("4.3.0", "4.2.0", ("4.2", "io.delta:delta-spark_4.2_2.13:4.4.0")),
        ("4.10.0.dev1", "4.2.0", ("4.2", "io.delta:delta-spark_4.2_2.13:4.4.0")),
    ],
)
def test_each_release_is_told_its_packages(found: str, avro: str, delta: tuple[str, str]) -> None:
    assert avro_package(found) == f"org.apache.spark:spark-avro_2.13:{avro}"
    assert delta_package(found) == delta
    assert fault_of_release(found) is None


def test_a_spark_before_4_0_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pyspark, "__version__", "3.5.9")
    with pytest.raises(InvalidInputError, match=r"expected Spark 4\.0 or later, found 3\.5\.9"):
        register(object())  # type: ignore[arg-type]


@pytest.mark.parametrize("option", ["maxOffsetsPerTrigger", "minOffsetsPerTrigger"])
def test_a_limit_is_refused_where_spark_has_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, option: str
) -> None:
    append(tmp_path, "t", numbered(3))
    given = source(tmp_path, startingOffsets="earliest", **{option: "2"})
    reader = KafkaLogStreamReader(dict(given.options), given.schema())
    reader.initialOffset()

    monkeypatch.setattr(spark_release, "HAS_LIMITS", False)
    reader = KafkaLogStreamReader(dict(given.options), given.schema())
    with pytest.raises(InvalidInputError, match=rf"{option}: .*expected Spark 4\.2 or later"):
        reader.initialOffset()


def test_a_delay_of_its_own_is_refused_there_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    append(tmp_path, "t", numbered(3))
    monkeypatch.setattr(spark_release, "HAS_LIMITS", False)
    given = source(tmp_path, maxTriggerDelay="5m")
    with pytest.raises(InvalidInputError, match=r"maxTriggerDelay: .*expected Spark 4\.2"):
        KafkaLogStreamReader(dict(given.options), given.schema()).initialOffset()
