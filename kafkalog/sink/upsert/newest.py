"""The newest record of each key in a micro-batch, found by Spark's tasks.

Within a partition the higher offset is newer. A key lives in one partition, unless the topic has
grown or a producer chose partitions itself: between partitions offsets say nothing, so there the
timestamp of each partition's newest record decides. Records without a key are left out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kafkalog.errors import InvalidInputError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

__all__ = ["newest_per_key"]

_NEEDED = ("key", "value", "topic", "partition", "offset", "timestamp")


def newest_per_key(df: DataFrame) -> DataFrame:
    """Return the newest row of each key, with all columns of `df`; one shuffle, by key.

    Raises InvalidInputError when `df` lacks a column of the source that tells what is newest.
    """
    from pyspark.sql import functions as F

    missing = [name for name in _NEEDED if name not in df.columns]
    if missing:
        raise InvalidInputError(
            f"an upsert needs the source's columns {', '.join(_NEEDED)}; missing: "
            f"{', '.join(missing)}; shape the table's columns with select= instead"
        )
    row = F.struct(*[df[name] for name in df.columns]).alias("row")
    # The rows are spread by key alone, which serves both groupings: Spark needs no second shuffle.
    spread = df.where(F.col("key").isNotNull()).repartition("key")
    by_partition = spread.groupBy("key", "topic", "partition").agg(
        F.max_by(row, "offset").alias("row")
    )
    age = F.struct("row.timestamp", "row.topic", "row.partition")
    return by_partition.groupBy("key").agg(F.max_by("row", age).alias("row")).select("row.*")
