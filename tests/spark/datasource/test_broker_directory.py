"""Spark streams from the directory of a live broker."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

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
