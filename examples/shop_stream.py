"""Stream: the turnover of every half hour, written back to the log exactly once.

`python -m examples.shop_stream [--path DIR]`
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

from examples.shop import ORDERS, fields, main, open_shop, take_orders

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

TURNOVER: Final = "turnover"


def run(spark: SparkSession, path: Path) -> list[str]:
    """Run a query until it has read everything; then, after new orders, the same query again."""
    with open_shop(path / "log") as log:
        take_orders(log, range(100))
        follow(spark, path).awaitTermination()
        take_orders(log, range(100, 200))
        follow(spark, path).awaitTermination()
        rows = [row for batch in log.latest(TURNOVER) for row in batch.to_pylist()]
    return sorted(f"{row['key'].decode()} {row['value'].decode()}" for row in rows)


def follow(spark: SparkSession, path: Path) -> StreamingQuery:
    """Start the query; it continues from its checkpoint, with at most 60 orders at a time."""
    orders = (
        spark.readStream.format("kafkalog")
        .option("path", str(path / "log"))
        .option("subscribe", ORDERS)
        .option("startingOffsets", "earliest")
        .option("maxOffsetsPerTrigger", "60")
        .load()
    )
    return (
        turnover(fields(orders))
        .writeStream.format("kafkalog")
        .option("path", str(path / "log"))
        .option("topic", TURNOVER)
        .option("checkpointLocation", str(path / "checkpoint"))
        .trigger(availableNow=True)
        .start()
    )


def turnover(orders: DataFrame) -> DataFrame:
    """Return a row for each half hour that is over, since no order comes an hour late."""
    from pyspark.sql import functions as f

    return (
        orders.withWatermark("timestamp", "1 hour")
        .groupBy(f.window("timestamp", "30 minutes"))
        .agg(f.sum("amount").alias("amount"))
        .select(
            f.date_format("window.start", "HH:mm").alias("key"),
            f.col("amount").cast("string").alias("value"),
        )
    )


if __name__ == "__main__":
    sys.exit(main(run, __doc__))
