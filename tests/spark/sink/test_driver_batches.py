"""The rows of a DataFrame on the driver, inside foreachBatch: one driver batch at a time."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from kafkalog.sink.upsert.driver_batches import in_driver_batches
from tests.spark.sink.test_spark_writes import changes, feed, finish

pytestmark = [pytest.mark.spark, pytest.mark.slow]
PARTS = 20
ROW_SIZE = 12 << 20
LOOKS = 8


def at_rest(runtime: Any) -> int:
    """Return what the JVM holds, in bytes, when it had time to let go of what was used.

    Of a job's results it does so a second or more later, by threads of py4j and of Spark.
    """
    held: list[int] = []
    for _ in range(LOOKS):
        time.sleep(0.5)
        runtime.gc()
        held.append(runtime.totalMemory() - runtime.freeMemory())
    return min(held)


def test_a_portion_that_was_used_is_not_kept(spark: Any, tmp_path: Path) -> None:
    feed(tmp_path / "source", 0, [("a", "x", 0)])
    runtime = spark.sparkContext._jvm.java.lang.Runtime.getRuntime()
    used: list[int] = []
    rows: list[int] = []

    def take(frame: Any, batch_id: int) -> None:
        session = frame.sparkSession
        large = session.range(PARTS, numPartitions=PARTS).selectExpr(
            "id", f"cast(repeat(cast(id % 10 as string), {ROW_SIZE}) as binary) value"
        )
        for driver_batch in in_driver_batches(large):
            rows.extend(driver_batch.column("id").to_pylist())
            if len(rows) in (3, PARTS):
                used.append(at_rest(runtime))

    finish(
        changes(spark, tmp_path / "source")
        .writeStream.foreachBatch(take)
        .option("checkpointLocation", str(tmp_path / "checkpoint"))
    )
    assert sorted(rows) == list(range(PARTS))
    # Kept, they would be PARTS - 3 rows; what else the JVM comes to hold is far less.
    assert used[1] - used[0] < PARTS * ROW_SIZE / 2, used
