"""The latest record of each key in a micro-batch, found by Spark's tasks.

Within a partition the higher offset is newer. A key may occur in two partitions if the topic has
grown or a producer chose partitions itself. Then the partition whose latest record of the key has
the higher timestamp wins. Records without a key are left out.

If rows have a version, the larger one is newer, and this order decides between equal ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from kafkalog.errors import InvalidInputError
from kafkalog.values.row_version import newest
from kafkalog.values.spark_sql import quoted

if TYPE_CHECKING:
    from datetime import datetime

    from pyspark.sql import DataFrame


NEEDED = ("key", "value", "topic", "partition", "offset", "timestamp")


class Version(NamedTuple):
    """A record of a key."""

    topic: str
    partition: int
    offset: int
    timestamp: int | datetime | None
    number: int
    """Its row, as the caller knows it."""


def with_keys(df: DataFrame) -> DataFrame:
    """Return the records with a key; raises InvalidInputError if `df` lacks a needed column."""
    missing = [name for name in NEEDED if name not in df.columns]
    if missing:
        raise InvalidInputError(
            f"an upsert needs the source's columns {', '.join(NEEDED)}; missing: "
            f"{', '.join(missing)}; shape the table's columns with select= instead"
        )
    return df.where(df["key"].isNotNull())


def latest_per_key(df: DataFrame, parts: int | None = None) -> DataFrame:
    """Return the latest record of each key, with all columns of `df`; one shuffle, by key.

    The result has `parts` Spark partitions, or Spark's own number. Raises InvalidInputError.
    """
    return latest_rows(with_keys(df), ("topic", "partition", "offset", "timestamp"), parts)


def latest_rows(
    rows: DataFrame,
    record: Sequence[str],
    parts: int | None = None,
    keys: Sequence[str] = ("key",),
    version: str | None = None,
) -> DataFrame:
    """Return the latest row per key, which the columns `keys` make.

    `record`: the columns of topic, partition, offset and timestamp. `version`: the column of the
    rows' versions, if they have any; none is null.
    """
    from pyspark.sql import functions as F

    topic, partition, offset, timestamp = record
    row = F.struct(*[F.col(quoted(name)) for name in rows.columns])
    # Rows are spread by key alone, which serves both groupings: Spark needs no second shuffle.
    key = list(map(quoted, keys))
    spread = rows.repartition(*key) if parts is None else rows.repartition(parts, *key)
    last = F.max_by(row, newest(version, offset)).alias("row")
    by_partition = spread.groupBy(*key, topic, partition).agg(last)
    held = [] if version is None else [F.col("row")[version]]
    age = F.struct(*held, f"row.{timestamp}", f"row.{topic}", f"row.{partition}")
    return by_partition.groupBy(*key).agg(F.max_by("row", age).alias("row")).select("row.*")


def newest_first(versions: Iterable[Version]) -> Iterator[Version]:
    """Yield the records of one key: each is the latest of those that were not yielded."""
    of_partitions: dict[tuple[str, int], list[Version]] = {}
    for version in sorted(versions, key=lambda each: each.offset):
        of_partitions.setdefault(version[:2], []).append(version)
    while of_partitions:
        # A record without a timestamp is older than any other.
        ages = {place: each[-1].timestamp for place, each in of_partitions.items()}
        timed = [(at, place) for place, at in ages.items() if at is not None]
        latest = max(timed)[1] if timed else max(ages)
        yield of_partitions[latest].pop()
        if not of_partitions[latest]:
            del of_partitions[latest]
