"""Batch: the spending of customers in one hour, found by the records' time.

`python -m examples.shop_batch [--path DIR]`
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

from examples.shop import OPENING_MS, ORDERS, fields, main, open_shop, take_orders

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

HOUR_MS: Final = 3_600_000


def run(spark: SparkSession, path: Path) -> list[str]:
    """Sum up the second hour twice: the same DataFrame sees the orders that came in between."""
    with open_shop(path / "log") as log:
        take_orders(log, range(90))
        second_hour = orders_since(spark, path / "log", OPENING_MS + HOUR_MS)
        morning = spending(second_hour)
        take_orders(log, range(90, 120))
        noon = spending(second_hour)
    return ["at 10:30", *morning, "at 11:00", *noon]


def orders_since(spark: SparkSession, log_path: Path, since_ms: int) -> DataFrame:
    """Return the orders since a time; only the part of the log that is that young is read."""
    orders = (
        spark.read.format("kafkalog")
        .option("path", str(log_path))
        .option("subscribe", ORDERS)
        .option("startingTimestamp", str(since_ms))
        .load()
    )
    return fields(orders)


def spending(orders: DataFrame) -> list[str]:
    """Return each customer's number of orders and their sum."""
    from pyspark.sql import functions as f

    customers = orders.groupBy("customer").agg(
        f.count("*").alias("n"), f.sum("amount").alias("sum")
    )
    return [
        f"{row.customer} {row.n} {row['sum']}" for row in customers.orderBy("customer").collect()
    ]


if __name__ == "__main__":
    sys.exit(main(run, __doc__))
