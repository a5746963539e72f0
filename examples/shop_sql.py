"""SQL: a compacted topic as a table; each query sees its current state.

`python -m examples.shop_sql [--path DIR]`
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

from examples.shop import CUSTOMER_FIELDS, CUSTOMERS, main, move, open_shop

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

BY_CITY: Final = "SELECT city, count(*) AS n FROM customers GROUP BY city ORDER BY city"


def run(spark: SparkSession, path: Path) -> list[str]:
    """Count customers by city, before and after some have moved or left."""
    with open_shop(path / "log") as log:
        create_views(spark, path / "log")
        before = [f"{row.city} {row.n}" for row in spark.sql(BY_CITY).collect()]
        move(log, [("ann", "Bern"), ("cem", None), ("dan", "Rome")])
        after = [f"{row.city} {row.n}" for row in spark.sql(BY_CITY).collect()]
    return ["before", *before, "after", *after]


def create_views(spark: SparkSession, log_path: Path) -> None:
    """Create two temporary views: the topic's latest records, and the same with parsed columns.

    `CREATE TABLE` does not work: Spark forgets the options of that table when it is queried.
    """
    spark.sql(
        "CREATE OR REPLACE TEMPORARY VIEW latest USING kafkalog "
        f"OPTIONS (path '{log_path}', subscribe '{CUSTOMERS}', view 'latest')"
    )
    spark.sql(
        "CREATE OR REPLACE TEMPORARY VIEW customers AS "
        "SELECT string(key) AS name, row.city FROM "
        f"(SELECT key, from_json(string(value), '{CUSTOMER_FIELDS}') AS row FROM latest)"
    )


if __name__ == "__main__":
    sys.exit(main(run, __doc__))
