"""Versions of rows in Delta: an older row changes nothing, whenever it comes.

The table itself has the versions of its rows. The Delta table `kafkalog_deletions_<table>`, next to
it, keeps the versions of deleted rows for a while. Delta has no transaction of two tables, so the
deletions of a micro-batch are remembered first. If its rows then fail to land, it comes again.
Until then a remembered version keeps away only rows that are older than a deletion of the log.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kafkalog.sink.upsert.rows import DELETED
from kafkalog.values.spark_sql import quoted

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from kafkalog.sink.upsert.delta.columns import DeltaRows

_GONE = "kl_gone"


@dataclass(frozen=True, slots=True)
class DeltaVersions:
    """The versions of rows, by the column `version`; `deletions` is the other table, in SQL."""

    rows: DeltaRows
    version: str
    deletions: str

    @property
    def is_newer(self) -> str:
        """The condition of a MERGE that a row of the source `s` is not older than that of `t`."""
        version = quoted(self.version)
        return f"(t.{version} IS NULL OR s.{version} >= t.{version})"

    def declare(self, *, is_new: bool) -> None:
        """Create the table of deletions if it is missing; empty it if the other one is new."""
        schema = self.rows.schema
        keys = ", ".join(
            f"{quoted(key)} {schema[key].dataType.simpleString()}" for key in self._keys
        )
        kind = schema[self.version].dataType.simpleString()
        self.rows.spark.sql(
            f"CREATE TABLE IF NOT EXISTS {self.deletions} "
            f"({keys}, kl_version {kind}, kl_time_ms bigint) USING delta"
        )
        if is_new:
            self.rows.spark.sql(f"DELETE FROM {self.deletions}")

    def but_older(self, frame: DataFrame) -> DataFrame:
        """Leave out the rows whose key was deleted with a larger version."""
        from pyspark.sql import functions as F

        older = F.expr(f"{self._same} AND t.kl_version > s.{quoted(self.version)}")
        gone = self.rows.spark.table(self.deletions).alias("t")
        return frame.alias("s").join(gone, older, "left_anti")

    def remember(self, frame: DataFrame, now_ms: int, retention_ms: int) -> None:
        """Remember the versions of the deletions among rows; forget old ones if there are any."""
        from pyspark.sql import functions as F

        gone = frame.where(F.col(DELETED))
        if gone.isEmpty():
            return
        version = f"s.{quoted(self.version)}"
        keys = [quoted(key) for key in self._keys]
        gone.createOrReplaceTempView(_GONE)
        try:
            self.rows.spark.sql(
                f"MERGE INTO {self.deletions} t USING {_GONE} s ON {self._same} "
                f"WHEN MATCHED AND {version} >= t.kl_version THEN UPDATE SET "
                f"t.kl_version = {version}, t.kl_time_ms = {now_ms} "
                f"WHEN NOT MATCHED THEN INSERT ({', '.join(keys)}, kl_version, kl_time_ms) "
                f"VALUES ({', '.join(f's.{key}' for key in keys)}, {version}, {now_ms}) "
                f"WHEN NOT MATCHED BY SOURCE AND t.kl_time_ms < {now_ms - retention_ms} THEN DELETE"
            )
        finally:
            self.rows.spark.catalog.dropTempView(_GONE)

    @property
    def _keys(self) -> list[str]:
        return self.rows.keys

    @property
    def _same(self) -> str:
        return " AND ".join(f"t.{key} = s.{key}" for key in map(quoted, self._keys))
