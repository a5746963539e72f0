"""DeltaUpsert: a Delta Lake table that follows a log, one commit per micro-batch.

Invariants:

- One commit of the table holds rows and positions, see `commits`.
- A commit lands only on the positions that were read for it. If another upsert commits meanwhile,
  the attempt starts again, so two runs of one query never apply a micro-batch twice.
- A commit that replaces all rows keeps no position of another query.
- The rows stay in Spark: executors merge them.
"""

from __future__ import annotations

import logging
import random
import re
import threading
import time
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Unpack

from kafkalog.errors import CommitConflictError, InvalidInputError, KafkaLogError, StorageError
from kafkalog.plain_errors import refusal
from kafkalog.sink.upsert.delta.columns import DeltaRows
from kafkalog.sink.upsert.delta.commits import UpsertCommit, last_commit
from kafkalog.sink.upsert.delta.versions import DeltaVersions
from kafkalog.sink.upsert.position import Position
from kafkalog.sink.upsert.rows import DELETED, UpsertRows
from kafkalog.sink.upsert.upsert import Batch, Upsert, UpsertArguments
from kafkalog.spark_release import delta_package
from kafkalog.spark_results import collected, is_connect
from kafkalog.storage_engine.fs import files
from kafkalog.values.spark_sql import quoted

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


_log = logging.getLogger("kafkalog.sink")
_ATTEMPTS = 12
_PAUSE_S, _PAUSE_MAX_S = 0.1, 5.0
_SOURCE = "kl_source"
_NAME_PART = re.compile(r"`(?:[^`]|``)+`|[^.`]+")
"""A part of a table's name, with or without quotes."""
_MISSING = ("DELTA_TABLE_ONLY_OPERATION", "TABLE_OR_VIEW_NOT_FOUND", "SCHEMA_NOT_FOUND")
_CONFLICTS = ("DELTA_CONCURRENT_", "DELTA_METADATA_CHANGED", "DELTA_PROTOCOL_CHANGED")
_REASON = re.compile(r"\[[A-Z][A-Z0-9_.]+\].*?(?=\n\s+at |\nCaused by|\n\nJVM|\Z)", re.DOTALL)
"""An error of Spark or Delta in the text of an exception, before its stack trace."""
_turns: dict[tuple[str, str], threading.Lock] = {}
"""Per table, since a commit makes concurrent attempts void; and per session, which has the
settings and the view of one commit at a time."""


class DeltaUpsert(Upsert):
    """Keep a Delta Lake table equal to the latest records of a stream of this source.

    `table` is a path or URI if it has a slash, else a name in the catalog, as in `shop.stock`. The
    session needs Delta Lake, which is published for Spark 4.0, 4.1 and 4.2, each its own:

        --packages io.delta:delta-spark_4.2_2.13:4.4.0
        spark.sql.extensions=io.delta.sql.DeltaSparkSessionExtension
        spark.sql.catalog.spark_catalog=org.apache.spark.sql.delta.catalog.DeltaCatalog

    A missing table is created with the types of the rows. Types that Delta lacks (intervals,
    variants) are stored as text. An existing table must have the rows' columns, in any order. A
    column's type may be wider, or narrower if every value fits. Further columns keep their values
    and are null in new rows. If all rows are replaced, as in a view's rebuild, they become null in
    all rows. Its key must be unique; Delta does not check that. The table remembers the columns of
    the key, and an upsert with another key is refused. The table may have deletion vectors, column
    mapping, constraints and generated columns. A row that a constraint of the table refuses fails
    the micro-batch, whatever `on_bad_record` says.

    Spark reduces each micro-batch to the latest record per key and merges it, in executors. The
    merge reads the keys of the whole table and rewrites the files it changes, so few large
    micro-batches cost less than many small ones. OPTIMIZE and VACUUM are up to you. Delta's RESTORE
    brings back the rows but not the position, so rebuild the table after it.

    The positions are in the commits. If nobody but other writers commits for
    `delta.logRetentionDuration` (30 days), Delta drops the commit that holds our position. A view
    is then rebuilt, and a query of your own continues with a warning.

    `Upsert` describes the other arguments and the errors. End offsets below those of an earlier
    micro-batch are refused, like a lower batch id. The exception is the last micro-batch, which
    Spark may plan again.
    """

    def __init__(self, table: str | PathLike[str], **given: Unpack[UpsertArguments]) -> None:
        address = table if isinstance(table, str) else str(Path(table).absolute())
        super().__init__(address, **given)
        self._in_sql = f"delta.{quoted(address)}" if "/" in address else _in_sql(address)
        self._deletions = _deletions_of(address)
        self._seen: UpsertCommit | None = None
        """What `positions` has found, until a micro-batch is applied."""

    @property
    def where(self) -> str:
        """The table, as errors and warnings name it."""
        return f"Delta table {self.table}"

    def positions(self) -> dict[str, Position]:
        """Return the position of each query that has written to the table, by query id."""
        self._seen = self._last_commit(self._active_session())
        return {} if self._seen is None else dict(self._seen.positions)

    def has_rows(self) -> bool:
        """Return whether the table exists and has rows."""
        spark = self._active_session()
        return self._last_commit(spark) is not None and not spark.table(self._in_sql).isEmpty()

    def additions(self, spark: SparkSession, rows: UpsertRows) -> list[str]:
        """Return the statements that add the columns which the rows have and the table lacks."""
        last = self._last_commit(spark)
        if last is None:
            return []
        self._check_key(last)
        return self._additions(DeltaRows(rows, may_repeat_keys=False), spark)

    def _additions(self, rows: DeltaRows, spark: SparkSession) -> list[str]:
        from pyspark.sql.types import StructType

        return [
            f"ALTER TABLE {self._in_sql} ADD COLUMNS ({StructType([field]).toDDL()})"
            for field in rows.missing(self.where, spark.table(self._in_sql).schema)
        ]

    def _apply(self, df: DataFrame, batch: Batch, position: Position | None) -> None:
        last, self._seen = self._seen, None
        if self.bad_records.are_left_out:
            last = None  # Spark has counted them since
        rows = self.shape.rows(df, latest=True)
        # Other rows are the latest of their key already.
        self._store(batch, DeltaRows(rows, may_repeat_keys=not self.shape.is_row_by_row), last)

    def _store(self, batch: Batch, rows: DeltaRows, last: UpsertCommit | None) -> None:
        """Commit the rows and the position of a micro-batch, unless the table has them already.

        `last` is the last commit that is known. An attempt on an older one is void.
        """
        spark = rows.spark
        session = spark._jsparkSession.sessionUUID()
        for attempt in range(_ATTEMPTS):
            if attempt:
                pause_s = min(_PAUSE_MAX_S, _PAUSE_S * 2**attempt)
                time.sleep(pause_s * random.uniform(0.5, 1))
            with (
                _turns.setdefault(("table", self.table), threading.Lock()),
                _turns.setdefault(("session", session), threading.Lock()),
            ):
                if self._commit(batch, rows, last or self._last_commit(spark)):
                    return
            last = None
        raise StorageError(
            f"{self.where}: each of {_ATTEMPTS} attempts to commit met another writer's commit, so "
            f"nothing of micro-batch {batch.batch_id} is written; let fewer streams and jobs write "
            "to the table at once"
        )

    def _commit(self, batch: Batch, rows: DeltaRows, last: UpsertCommit | None) -> bool:
        """Make one attempt; return False if another writer's commit came after `last`."""
        spark = rows.spark
        if last is not None:
            self._check_key(last)
        known = {} if last is None else last.positions
        position = known.get(batch.query_id)
        if not self.is_due(batch, position):
            return True
        self._check_gap(batch, position)
        # Spark may plan the last micro-batch again, with more of one partition and less of another.
        if position is not None and batch.batch_id != position.batch_id:
            self._check_offsets(batch, position)
        is_replacing = batch.is_replacing and position is None
        commit = UpsertCommit(
            1 if last is None else last.number + 1,
            {**({} if is_replacing else known), batch.query_id: batch.position()},
            tuple(rows.keys),
        )
        try:
            if last is None:
                columns = rows.schema.toDDL()
                spark.sql(f"CREATE TABLE IF NOT EXISTS {self._in_sql} ({columns}) USING delta")
            additions = self._additions(rows, spark)
            if additions and not self.adds_columns:
                raise self.lacks_columns(additions)
            for statement in additions:
                spark.sql(statement)
            rows.check(self.where, spark.table(self._in_sql).schema)
            (detail,) = spark.sql(f"DESCRIBE DETAIL {self._in_sql}").collect()
            frame = rows.stored(detail["partitionColumns"])
            versions = self._versions(rows)
            if versions is not None:
                versions.declare(is_new=is_replacing or last is None)
                frame = versions.but_older(frame)
                versions.remember(frame, batch.now_ms, self.delete_retention_ms)
            with commit.settings(spark):
                if not is_replacing:
                    return self._merge(rows, frame, versions)
                self._replace(rows, frame)
        except KafkaLogError:
            raise
        except Exception as fault:
            files.pass_on(fault)
            if not any(word in _reason(fault) for word in _CONFLICTS):
                self._refuse_if_unwritten(spark, batch, known, fault)
            return False
        landed = self._last_commit(spark)
        return landed is not None and landed.positions.get(batch.query_id) == batch.position()

    def _refuse_if_unwritten(
        self, spark: SparkSession, batch: Batch, known: Mapping[str, Position], fault: Exception
    ) -> None:
        """Raise the error of an attempt, unless the positions have changed since they were read.

        They have changed if the error came after the commit, or if another upsert has committed.
        """
        reason = _reason(fault)
        try:
            found = self._last_commit(spark)
        except StorageError:
            raise StorageError(
                f"{self.where}: whether micro-batch {batch.batch_id} is written is unknown: "
                f"{reason}. Start the query again: the history of the table then decides"
            ) from fault
        if found is None or found.positions == known:
            words = f"{self.where}: nothing of micro-batch {batch.batch_id} is written: "
            refused = refusal(fault)
            if refused is not None:
                raise InvalidInputError(f"{words}{refused}") from fault
            raise StorageError(f"{words}{reason}") from fault
        _log.warning("%s: a commit has landed, and then came an error: %s", self.where, reason)

    def _versions(self, rows: DeltaRows) -> DeltaVersions | None:
        if self.shape.version is None:
            return None
        return DeltaVersions(rows, self.shape.version, self._deletions)

    def _merge(self, rows: DeltaRows, frame: DataFrame, versions: DeltaVersions | None) -> bool:
        """Merge the rows; return False if Delta has skipped the commit: its number was taken."""
        newer = "" if versions is None else f" AND {versions.is_newer}"
        updates = ", ".join(f"t.{quoted(n)} = {new}" for n, new in rows.assignments().items())
        inserted = rows.insertions()
        names, values = ", ".join(map(quoted, inserted)), ", ".join(inserted.values())
        same = " AND ".join(f"t.{name} = s.{name}" for name in map(quoted, rows.keys))
        frame.createOrReplaceTempView(_SOURCE)
        try:
            counts = frame.sparkSession.sql(
                f"MERGE INTO {self._in_sql} t USING {_SOURCE} s ON {same} "
                f"WHEN MATCHED AND s.{DELETED}{newer} THEN DELETE "
                f"WHEN MATCHED{newer} THEN UPDATE SET {updates} "
                f"WHEN NOT MATCHED AND NOT s.{DELETED} "
                f"THEN INSERT ({names}) VALUES ({values})"
            )
            return bool(collected(counts))
        finally:
            frame.sparkSession.catalog.dropTempView(_SOURCE)

    def _replace(self, rows: DeltaRows, frame: DataFrame) -> None:
        from pyspark.sql import functions as F

        new = [f"{value} AS {quoted(name)}" for name, value in rows.insertions().items()]
        stored = frame.alias("s").where(~F.col(DELETED)).selectExpr(*new)
        stored.writeTo(self._in_sql).overwrite(F.lit(True))

    def _last_commit(self, spark: SparkSession) -> UpsertCommit | None:
        """Return the last commit of an upsert; None if the table is missing."""
        if is_connect(spark):
            raise InvalidInputError(
                f"{self.where}: DeltaUpsert needs a classic Spark session: under Spark Connect all "
                "queries of a client share one session, and so the settings of Delta's commit"
            )
        try:
            return last_commit(spark, self._in_sql)
        except Exception as fault:
            files.pass_on(fault)
            reason = _reason(fault)
            if any(word in reason for word in _MISSING):
                return None
            # The name is quoted, so what Spark itself cannot parse is DESCRIBE HISTORY.
            if "PARSE_SYNTAX_ERROR" in reason:
                release, package = delta_package(spark.version)
                raise InvalidInputError(
                    f"{self.where}: this Spark session has no Delta Lake (expected Spark {release} "
                    f"with Delta, found Spark {spark.version} without). Start Spark {release} with "
                    f"--packages {package} and the settings "
                    "spark.sql.extensions=io.delta.sql.DeltaSparkSessionExtension and "
                    "spark.sql.catalog.spark_catalog=org.apache.spark.sql.delta.catalog.DeltaCatalog"
                ) from fault
            raise StorageError(f"{self.where}: its history: {reason}") from fault

    def _active_session(self) -> SparkSession:
        from pyspark.sql import SparkSession

        try:
            return SparkSession.active()
        except Exception as fault:
            files.pass_on(fault)
            raise InvalidInputError(
                f"{self.where}: Spark reads its position; start a Spark session first"
            ) from fault

    def _check_key(self, last: UpsertCommit) -> None:
        """Refuse an upsert with another key, which would find other rows than the last one."""
        ours, theirs = self.shape.keys, last.keys
        if theirs and {name.lower() for name in ours} != {name.lower() for name in theirs}:
            raise InvalidInputError(
                f"{self.where}: its rows have another key than the upsert's (expected "
                f"{' and '.join(ours)}, found {' and '.join(theirs)}). If the upsert has got "
                "another key, drop the table and start the view or a new query. Else give the "
                "upsert the table's key with key=."
            )

    def _check_offsets(self, batch: Batch, position: Position) -> None:
        if self.reset_writer:
            return
        for topic, partitions in batch.end_offsets.items():
            for partition, offset in partitions.items():
                reached = position.end_offsets.get(topic, {}).get(partition, 0)
                if offset < reached:
                    raise CommitConflictError(
                        f"{self.where}: the log of this stream is older than the table: "
                        f"{topic}-{partition} committed up to {reached}, got {offset} in "
                        f"micro-batch {batch.batch_id}. If the topic was created again, rebuild "
                        "the table. If a crash took Spark's last plan and the new one is shorter, "
                        "reset_writer=True continues with the table's rows"
                    )


def _deletions_of(address: str) -> str:
    """Return the table, as in SQL, with the versions of a table's deleted rows."""
    prefix = "kafkalog_deletions_"
    if "/" in address:
        parent, _, name = address.rstrip("/").rpartition("/")
        return f"delta.{quoted(f'{parent}/{prefix}{name}')}"
    *parts, last = _NAME_PART.findall(_in_sql(address))
    return ".".join([*parts, f"`{prefix}{last[1:]}"])


def _in_sql(name: str) -> str:
    """Return a table's name with each part in quotes; a part may have them already."""
    parts = _NAME_PART.findall(name)
    if ".".join(parts) != name:
        raise InvalidInputError(
            f"DeltaUpsert: {name!r} is not a table name (expected a path with a slash, or parts "
            "with dots between them). Write a part with a dot or a backquote in backquotes."
        )
    return ".".join(part if part.startswith("`") else quoted(part) for part in parts)


def _reason(fault: Exception) -> str:
    """Return the innermost error of Spark's or Delta's in one line."""
    text = str(fault)
    found = _REASON.findall(text)
    return " ".join((found[-1] if found else text).split())[:500]
