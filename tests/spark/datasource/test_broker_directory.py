"""Spark reads the directory of a live broker, and partitions rescued from a disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.builders.rescued import TOPIC, rescued
from tests.unit.datasource.logs import broker_directory
from tests.unit.storage_engine import broker_root

pytestmark = [pytest.mark.spark, pytest.mark.slow]


def test_spark_streams_from_a_live_broker(spark: Any, tmp_path: Path) -> None:
    root = broker_directory(tmp_path / "log")
    seen: list[list[tuple[int, int]]] = []

    def run() -> None:
        query = (
            spark.readStream.format("kafkalog")
            .options(subscribe="t", startingOffsets="earliest")
            .load(str(root.path))
            .writeStream.foreachBatch(
                lambda frame, _: seen.append(
                    sorted((row.partition, row.offset) for row in frame.collect())
                )
            )
            .option("checkpointLocation", str(tmp_path / "checkpoint"))
            .trigger(availableNow=True)
            .start()
        )
        assert query.awaitTermination(120)

    with root.alive():
        run()
        root.checkpoint(broker_root.HIGH_WATERMARK, {"t-0": 100, "t-2": 10})
        run()
    run()
    records = [record for batch in seen for record in batch]
    assert sorted(records) == [(0, n) for n in range(100)] + [(2, n) for n in range(30)]
    assert len([batch for batch in seen if batch]) == 3


def test_spark_reads_rescued_partitions_of_every_codec(spark: Any, tmp_path: Path) -> None:
    written = rescued(tmp_path)
    frame = spark.read.format("kafkalog").option("subscribe", TOPIC).load(str(tmp_path))
    rows = frame.select("partition", "offset", "key", "value").orderBy("partition", "offset")
    found = [(row[0], row[1], bytes(row[2]), row[3] and bytes(row[3])) for row in rows.collect()]
    assert found == written
