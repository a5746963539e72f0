"""Tables that follow a stream's micro-batches: kafkalog's, and those of its peers."""

from __future__ import annotations

import json
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol

import kafkalog
from bench.broker import full_size
from bench.spark import CONNECTOR
from tests import delta_spark, spark_peers
from tests.conformance import kafka
from tests.conformance.jars import PEERS

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

FIELDS: Final = "n int, name string, city string"
REFRESHES: Final = 10
"""Micro-batches from one refresh to the next."""
_COLUMNS: Final = f"key string, {FIELDS}"
_TOPIC: Final = "t"
_PARTITIONS: Final = 2
_MERGE: Final = """
    MERGE INTO {table} AS t USING changes AS c ON t.key = c.key
    WHEN MATCHED AND c.deleted THEN DELETE
    WHEN MATCHED THEN UPDATE SET t.n = c.n, t.name = c.name, t.city = c.city
    WHEN NOT MATCHED AND NOT c.deleted
        THEN INSERT (key, n, name, city) VALUES (c.key, c.n, c.name, c.city)
"""


class Table(Protocol):
    """A table that follows the micro-batches."""

    def write(self, changes: DataFrame, number: int) -> None:
        """Take a micro-batch: key, value (JSON, null for a deletion), fields, deleted."""

    def df(self) -> DataFrame:
        """Return the rows as they are now: key and fields."""

    def lookup(self, keys: Sequence[str]) -> dict[str, int]:
        """Return the field `n` of those keys that have a row."""


class Ours:
    """A compacted topic, cleaned, with a materialized table."""

    def __init__(self, spark: SparkSession, root: Path) -> None:
        self._root = root
        self._log = kafkalog.open(root / "log")
        self._log.create_topic(_TOPIC, _PARTITIONS)
        kafkalog.register(spark)
        self._source = kafkalog.KTable(spark, root / "log", _TOPIC)
        self._table = self._source.materialize(root / "table", json=FIELDS)

    def write(self, changes: DataFrame, number: int) -> None:
        """Append, clean what is due, and refresh the table when its time has come."""
        writer = changes.select("key", "value").write.format("kafkalog").mode("append")
        writer.option("path", str(self._root / "log")).option("topic", _TOPIC).save()
        self._log.clean()
        if number % REFRESHES == REFRESHES - 1:
            self.refresh()

    def refresh(self) -> None:
        """Take all changes into the files."""
        self._table.refresh(grace_s=0)

    def df(self) -> DataFrame:
        """Return the rows of files and changes."""
        return self._table.df().selectExpr("cast(key AS string) AS key", "n", "name", "city")

    def lookup(self, keys: Sequence[str]) -> dict[str, int]:
        """Look keys up in the log, without Spark."""
        found = self._source.lookup_many(keys).items()
        values = {str(key): record.value for key, record in found if record is not None}
        return {key: json.loads(value)["n"] for key, value in values.items() if value is not None}


class _Rows(ABC):
    """A table in which Spark looks keys up."""

    @abstractmethod
    def df(self) -> DataFrame:
        """Return its rows."""

    def lookup(self, keys: Sequence[str]) -> dict[str, int]:
        rows = self.df().select("key", "n")
        return {row.key: row.n for row in rows.where(rows.key.isin(*keys)).collect()}


class _Merged(_Rows):
    """A table that MERGE changes."""

    def __init__(self, spark: SparkSession, table: str, how: str) -> None:
        self._spark = spark
        self._table = table
        spark.sql(f"CREATE TABLE {table} ({_COLUMNS}) USING {how}")

    def write(self, changes: DataFrame, number: int) -> None:
        changes.createOrReplaceTempView("changes")
        self._spark.sql(_MERGE.format(table=self._table)).collect()

    def df(self) -> DataFrame:
        return self._spark.table(self._table)


class _Topic(_Rows):
    """A compacted topic of a Kafka broker, through Spark's connector."""

    def __init__(self, spark: SparkSession, broker: kafka.KafkaBroker) -> None:
        broker.create_topic(_TOPIC, _PARTITIONS, {"cleanup.policy": "compact"})
        self._spark = spark
        self._bootstrap = broker.bootstrap

    def write(self, changes: DataFrame, number: int) -> None:
        writer = changes.select("key", "value").write.format("kafka").option("topic", _TOPIC)
        writer.option("kafka.bootstrap.servers", self._bootstrap).save()

    def df(self) -> DataFrame:
        from pyspark.sql import functions as F

        reader = self._spark.read.format("kafka").option("subscribe", _TOPIC)
        records = reader.option("kafka.bootstrap.servers", self._bootstrap).load()
        latest = records.groupBy("key").agg(F.max_by("value", "offset").alias("value"))
        row = F.from_json(F.col("value").cast("string"), FIELDS).alias("row")
        rows = latest.where("value IS NOT NULL").select(F.col("key").cast("string"), row)
        return rows.select("key", "row.*")


@dataclass(frozen=True, slots=True)
class Peer:
    """Another table that follows a stream."""

    title: str
    release: str
    """The Spark that it is published for."""
    jars: str
    """Its class path; "" if it has not been fetched."""
    settings: Callable[[Path], Mapping[str, str]]
    """Spark's settings for a table in a directory."""
    make: Callable[[SparkSession, Path, ExitStack], Table]
    """Makes the table in a directory; the stack closes what it has started."""
    target: str = ""
    """What part of its processor time a micro-batch of ours may take."""

    def is_there(self) -> bool:
        """Return whether the peer and its Spark have been fetched."""
        return bool(self.jars) and spark_peers.package(self.release).is_dir()

    def conf(self, root: Path) -> dict[str, str]:
        """Return Spark's settings for a table in a directory, with the class path."""
        paths = {f"spark.{each}.extraClassPath": self.jars for each in ("driver", "executor")}
        return {**paths, **self.settings(root)}


def _delta(title: str, is_dv: str) -> Peer:
    features = ("enableDeletionVectors", "enableChangeDataFeed")
    given = ", ".join(f"'delta.{each}' = '{is_dv}'" for each in features)
    jars = spark_peers.jars("4.2", "delta")
    return Peer(
        title,
        "4.2",
        jars,
        lambda _: delta_spark.settings_of(jars),
        lambda spark, root, _: _Merged(
            spark, f"delta.`{root}/t`", f"delta TBLPROPERTIES ({given})"
        ),
        "<= 0.34",
    )


def _iceberg() -> Peer:
    modes = ", ".join(
        f"'write.{change}.mode' = 'merge-on-read'" for change in ("merge", "update", "delete")
    )
    how = f"iceberg TBLPROPERTIES ('format-version' = '3', {modes})"
    catalog = "spark.sql.catalog.ice"
    settings = {
        "spark.sql.extensions": "org.apache.iceberg.spark.extensions.IcebergSparkSessionExtensions",
        catalog: "org.apache.iceberg.spark.SparkCatalog",
        f"{catalog}.type": "hadoop",
    }
    return Peer(
        "Iceberg v3, merge on read",
        "4.1",
        _jars(PEERS / "iceberg"),
        lambda root: {**settings, f"{catalog}.warehouse": str(root)},
        lambda spark, _, __: _Merged(spark, "ice.db.t", how),
        "<= 1",
    )


def _kafka() -> Peer:
    return Peer(
        "Kafka, Spark's connector",
        "4.2",
        _jars(CONNECTOR),
        lambda _: {},
        lambda spark, root, opened: _Topic(spark, opened.enter_context(full_size(root))),
    )


def _jars(directory: Path) -> str:
    return os.pathsep.join(map(str, sorted(directory.glob("*.jar"))))


ALL: Final = {
    "delta": _delta("Delta Lake", "false"),
    "delta_dv": _delta("Delta Lake with deletion vectors and change feed", "true"),
    "iceberg": _iceberg(),
    "kafka": _kafka(),
}
