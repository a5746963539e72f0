"""The data of the four Spark examples: a shop's orders, and the table of its customers.

Each example is a program, such as `python -m examples.shop_batch [--path DIR]`. It makes a log,
reads it with Spark and prints its findings.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pyarrow as pa

import kafkalog

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from kafkalog.log import KafkaLog

__all__ = [
    "CUSTOMERS",
    "CUSTOMER_FIELDS",
    "OPENING_MS",
    "ORDERS",
    "fields",
    "main",
    "move",
    "open_shop",
    "take_orders",
]

ORDERS: Final = "orders"
CUSTOMERS: Final = "customers"
ORDER_FIELDS: Final = "customer string, amount int"
CUSTOMER_FIELDS: Final = "city string"
OPENING_MS: Final = 1_767_258_000_000
"""2026-01-01 09:00 UTC; the n-th order comes n minutes later."""
MINUTE_MS: Final = 60_000
NAMES: Final = ("ann", "bob", "cem")
_CONFIG: Final = {
    "spark.driver.host": "127.0.0.1",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.log.level": "ERROR",
    "spark.sql.shuffle.partitions": "2",
    "spark.sql.session.timeZone": "UTC",
}


def open_shop(path: Path) -> KafkaLog:
    """Open a new shop's log: orders are events and stay, customers are a compacted table."""
    log = kafkalog.open(path)
    log.create_topic(
        ORDERS, partitions=3, config={"cleanup.policy": "delete", "retention.ms": "-1"}
    )
    log.create_topic(CUSTOMERS, partitions=2, config={"cleanup.policy": "compact"})
    move(log, [("ann", "Oslo"), ("bob", "Rome"), ("cem", "Oslo")])
    return log


def take_orders(log: KafkaLog, numbers: Iterable[int]) -> None:
    """Append orders in one commit: number n comes in the n-th minute and costs n."""
    rows = [(n, NAMES[n % len(NAMES)]) for n in numbers]
    log.append(
        ORDERS,
        pa.table(
            {
                "key": [str(n) for n, _ in rows],
                "value": [json.dumps({"customer": name, "amount": n}) for n, name in rows],
                "timestamp": [OPENING_MS + n * MINUTE_MS for n, _ in rows],
            }
        ),
    )


def move(log: KafkaLog, cities: Iterable[tuple[str, str | None]]) -> None:
    """Set the cities where customers live; None removes a customer."""
    log.append(
        CUSTOMERS,
        [(name, None if city is None else json.dumps({"city": city})) for name, city in cities],
    )


def fields(orders: DataFrame) -> DataFrame:
    """Return orders as columns: customer, amount and time."""
    from pyspark.sql.functions import col, from_json

    order = from_json(col("value").cast("string"), ORDER_FIELDS)
    return orders.select(order.alias("order"), "timestamp").select("order.*", "timestamp")


def main(
    run: Callable[[SparkSession, Path], list[str]],
    described: str | None,
    arguments: Sequence[str] | None = None,
) -> int:
    """Run an example in a temporary directory, or in the one that is named; print its lines."""
    parser = argparse.ArgumentParser(description=(described or "").partition("\n")[0])
    parser.add_argument("--path", type=Path, metavar="DIR", help="keep log and checkpoint here")
    path: Path | None = parser.parse_args(arguments).path
    spark = start_spark()
    with tempfile.TemporaryDirectory(prefix="kafkalog-shop-") as scratch:
        print(*run(spark, path.absolute() if path else Path(scratch)), sep="\n")
    return 0


def start_spark() -> SparkSession:
    """Start Spark for two cores, or return the existing session.

    Its workers must run this interpreter, where kafkalog is installed. No other setting and no
    registration is needed.
    """
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    from pyspark.sql import SparkSession

    builder = SparkSession.builder.master("local[2]").appName("shop")
    builder = builder.config(map={**_CONFIG})
    return builder.getOrCreate()
