"""The versions of a materialized table's rows, which keep an older row from changing anything.

The rows in the files have their versions. Files of deletions, next to them, keep the versions of
deleted rows for a while. All records since the moment of the files take part, because an obsolete
one may have the largest version.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from kafkalog.values.row_marks import deletion_column, marks_deletion
from kafkalog.values.row_version import check_version, lacks_version, newest
from kafkalog.values.spark_sql import quoted

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.types import StructType

    from kafkalog.tables.manifest import Manifest

GONE: Final = "_kl_gone"
"""The column that is true for a deletion."""
_GONE_MS: Final = "_kl_gone_ms"
"""When a deletion was taken into the files."""
_REMEDY: Final = "Let select make a version, for example of the record's timestamp."


@dataclass(frozen=True, slots=True)
class TableVersions:
    """How a table finds the row of each key that counts, by its column `version`."""

    version: str
    retention_ms: int
    """How long a deletion is remembered."""
    place: Sequence[str]
    """The columns with a row's key, partition and offset."""

    def marked(
        self, rows: DataFrame, columns: Sequence[str], *, is_selected: bool
    ) -> tuple[DataFrame, list[str]]:
        """Return rows whose versions are checked, and the columns of the table.

        `rows` has `columns`, those of the place, and `_kl_gone`. If `select` made them, a column
        `deleted` becomes part of that. A null version fails the query, and the error has the
        record's place. Raises InvalidInputError.
        """
        from pyspark.sql import functions as F

        schema = rows.select(*map(quoted, columns)).schema
        check_version(self.version, columns, schema)
        if is_selected and (mark := marks_deletion(schema)) is not None:
            columns = [name for name in columns if name != deletion_column(columns)]
            rows = rows.withColumn(GONE, F.col(GONE) | mark)
        _, partition, offset = map(F.col, self.place)
        reason = lacks_version(self.version, schema[self.version].dataType)
        fault = F.format_string(f"partition %s offset %s: %s. {_REMEDY}", partition, offset, reason)
        version = F.when(reason.isNull(), F.col(quoted(self.version))).otherwise(
            F.raise_error(fault)
        )
        kept = [name for name in rows.columns if name in {*columns, *self.place, GONE}]
        return rows.withColumn(self.version, version).select(*map(quoted, kept)), [*columns]

    def newest(
        self, marked: DataFrame, now_ms: int, *, held: DataFrame | None, gone: DataFrame | None
    ) -> DataFrame:
        """Return the row or deletion of each key that counts.

        `held` and `gone` are the rows and the deletions that the files have of these keys.
        """
        from pyspark.sql import functions as F

        found = marked.withColumn(_GONE_MS, F.when(F.col(GONE), F.lit(now_ms)))
        if held is not None:
            found = found.unionByName(
                held.withColumn(GONE, F.lit(False)).withColumn(_GONE_MS, F.lit(None).cast("long"))
            )
        if gone is not None:
            found = found.unionByName(gone.withColumn(GONE, F.lit(True)), allowMissingColumns=True)
        key, partition, offset = self.place
        row = F.struct(*map(quoted, found.columns))
        last = F.max_by(row, newest(self.version, offset)).alias("row")
        return found.groupBy(partition, key).agg(last).select("row.*")

    def rows(self, found: DataFrame) -> DataFrame:
        """Return the rows of the keys that are not deleted."""
        return found.where(f"NOT {GONE}").drop(GONE, _GONE_MS)

    def deletions(self, found: DataFrame, now_ms: int) -> DataFrame:
        """Return the deletions that are still to be remembered."""
        kept = found.where(f"{GONE} AND {_GONE_MS} >= {now_ms - self.retention_ms}")
        return kept.select(*map(quoted, [*self.place, self.version, _GONE_MS]))

    def has_to_forget(self, manifest: Manifest, now_ms: int) -> bool:
        """Return whether the files have deletions, and all of them may be forgotten."""
        return bool(manifest.deletions) and manifest.made_ms < now_ms - self.retention_ms

    def deletions_schema(self, schema: StructType) -> StructType:
        """Return the columns of deletions in files, next to those of rows."""
        from pyspark.sql.types import LongType, StructField, StructType

        names = [*self.place, self.version]
        return StructType([*(schema[name] for name in names), StructField(_GONE_MS, LongType())])
