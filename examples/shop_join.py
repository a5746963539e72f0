"""Join: each order with the city where its customer lives at that time, from a compacted topic.

`python -m examples.shop_join [--path DIR]`
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import kafkalog
from examples.shop import (
    CUSTOMER_FIELDS,
    CUSTOMERS,
    ORDERS,
    fields,
    main,
    move,
    open_shop,
    take_orders,
)

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


def run(spark: SparkSession, path: Path) -> list[str]:
    """Let customers move and leave while the query runs: it sees the current cities."""
    found: list[str] = []

    def collect(deliveries: DataFrame, _batch: int) -> None:
        found.extend(f"{row.amount} {row.customer} {row.city}" for row in deliveries.collect())

    with open_shop(path / "log") as log:
        query = (
            deliveries(spark, path / "log")
            .writeStream.foreachBatch(collect)
            .option("checkpointLocation", str(path / "checkpoint"))
            .start()
        )
        try:
            take_orders(log, range(3))
            query.processAllAvailable()
            move(log, [("ann", "Bern"), ("cem", None)])
            take_orders(log, range(3, 6))
            query.processAllAvailable()
        finally:
            query.stop()
    return sorted(found)


def deliveries(spark: SparkSession, log_path: Path) -> DataFrame:
    """Return the stream of orders, each with its customer's city; null without a customer."""
    orders = (
        spark.readStream.format("kafkalog")
        .option("path", str(log_path))
        .option("subscribe", ORDERS)
        .option("startingOffsets", "earliest")
        .load()
    )
    customers = kafkalog.KTable(spark, log_path, CUSTOMERS).df(json=CUSTOMER_FIELDS)
    homes = customers.selectExpr("string(key) AS customer", "city")
    return fields(orders).join(homes, "customer", "left")


if __name__ == "__main__":
    sys.exit(main(run, __doc__))
