"""A materialized table: typed Parquet files with a topic's latest records, completed from the log.

The files are as of one moment. A query reads them, leaves out the keys that the log has changed
since, and adds those changes. `table_moment` says when the log can no longer do that; then the
files are made again. Invariants:

- A manifest is made once, after its files are durable, and after the log has a mark of its refresh.
  A process that dies before leaves the table as it was, and files that the next refresh removes.
- Of two refreshes at once, one makes the next manifest. The other one begins again.
- A query keeps the files of its manifest for a grace time, whatever is refreshed meanwhile.
"""

from __future__ import annotations

import contextlib
import json
import re
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from kafkalog.datasource.offsets import Offsets, TopicPartition
from kafkalog.datasource.options import SourceOptions
from kafkalog.datasource.read_planner import planner_of
from kafkalog.datasource.table_files import WRITTEN, TableReader, TableWriter
from kafkalog.errors import IncompleteTableError, InvalidInputError, StorageError
from kafkalog.storage_engine.fs import clock, files
from kafkalog.storage_engine.object_store.address import is_store_url
from kafkalog.storage_engine.place import open_log, opened_for_spark, spark_path
from kafkalog.tables.manifest import Manifest, TableFile, manifest_name
from kafkalog.tables.table_moment import (
    PartitionMoment,
    TableMoment,
    location_of,
    mark_of,
    marks_of,
)
from kafkalog.tables.table_place import table_place
from kafkalog.values.spark_sql import quoted

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from kafkalog.storage_engine.log.log import Log
    from kafkalog.storage_engine.metadata.log_change import LogChange
    from kafkalog.storage_engine.metadata.state import State, TopicState

GRACE_S: Final = 3600.0
_TRIES: Final = 5
_FILES_MIN: Final = 8
_FILE_BYTES: Final = 64 << 20
"""Bytes of the log for which a refresh has a task more."""
_BROADCAST_MAX: Final = 1_000_000
"""Changes up to which every task gets all changed keys; with more, Spark chooses."""
_READ: Final = ("key", "value", "topic", "partition", "offset", "timestamp", "timestampType")
_PLACE: Final = ("key", "partition", "offset")
_PLACES: Final = (0, -4, -3)
"""Where these columns are among the source's, also if fields are in place of the value."""
_HIDDEN: Final = ("_kl_key", "_kl_partition", "_kl_offset")
_OVERTAKEN: Final = re.compile(r"IncompleteTableError|MomentPassedError|cleaned up to offset")
"""An error of a task that a cleaning has caused; Spark keeps only its text."""


@dataclass(frozen=True, slots=True)
class TableProgress:
    """How far the files of a materialized table are behind the log."""

    version: int
    """The number of its manifest."""
    time_ms: int
    """When the files were made."""
    rows: int
    size: int
    """Their bytes."""
    applied: Mapping[int, int]
    """By partition, the offset below which the files have the latest records."""
    lag: int
    """Offsets beyond that, which a query adds from the log."""
    fault: str | None
    """Why the log can no longer complete the files, so that they must be made again."""


class MaterializedTable:
    """The latest records of a topic in Parquet files, and what the log has changed since.

    `KTable.materialize` makes one. It keeps no files open and may be used by several threads.
    """

    def __init__(
        self,
        spark: SparkSession,
        path: str,
        topic: str,
        location: str,
        *,
        options: Mapping[str, str],
        select: Sequence[str] | None,
        documents: Mapping[str, Any],
        decode: Callable[[DataFrame], DataFrame],
    ) -> None:
        """`decode` gives records the columns that `documents` say; see `KTable.materialize`."""
        self.topic = topic
        self.path = path
        self.location = spark_path(location)
        self.options = dict(options)
        self._spark = spark
        self._select = select
        self._documents = {name: each for name, each in documents.items() if each is not None}
        self._decode = decode
        self._views: set[str] = set()
        self._place = table_place(self.location, self.options)

    def df(self) -> DataFrame:
        """Return the table, with the columns of `KTable.df`.

        Each action sees the table as of one moment, which is that of this call or later. If nothing
        has changed since the last refresh, the frame is the files alone, and of this call. Files
        that the log cannot complete are made again first.
        """
        manifest, state = self.complete()
        if not self._behind(manifest.moment, state.topic(self.topic)):
            return self._files(manifest).select(*map(quoted, manifest.columns))
        return self._merged(manifest, state)

    def create_view(self, name: str) -> None:
        """Register the table in SQL as a temporary view; it replaces a view of that name.

        Each query sees what was committed before it. `refresh` lets the view read the new files;
        after a refresh by another process, create the view again within the grace time.
        """
        self._merged(*self.complete()).createOrReplaceTempView(name)
        self._views.add(name)

    def refresh(self, *, grace_s: float = GRACE_S) -> TableProgress:
        """Take what the log has changed since the last refresh into new files; return the progress.

        Does nothing if nothing has changed. All files are written again if the log can no longer
        complete them, or if the arguments of the columns are others. Files that were replaced more
        than `grace_s` seconds ago are removed, with those of refreshes that died.

        Writes a mark to the log. Raises InvalidInputError for a broker's directory and a log that
        may only be read, UnknownTopicError, and StorageError if cleanings or other refreshes
        overtake it again and again.
        """
        for _ in range(_TRIES):
            before = self._place.newest()
            try:
                manifest = self._refreshed(before)
            except Exception as fault:
                files.pass_on(fault)
                if not _OVERTAKEN.search(f"{type(fault).__name__} {fault}"):
                    raise
                continue
            if manifest is None:
                continue
            self._place.collect(manifest, before_ms=clock.now_ms() - int(grace_s * 1000))
            if before is None or manifest.version != before.version:
                for name in tuple(self._views):
                    self.create_view(name)
            return self.progress()
        raise StorageError(
            f"{self.location}: cleanings or other refreshes have overtaken the refresh of the "
            f"materialized table (expected success in {_TRIES} tries). Refresh again."
        )

    def progress(self) -> TableProgress:
        """Return how far the files are, and how far behind the log.

        Raises InvalidInputError before the first refresh.
        """
        manifest = self._place.newest()
        if manifest is None:
            raise InvalidInputError(f"{self.location}: there is no table yet. Call refresh().")
        with opened_for_spark(self._log_options) as log:
            state = log.state()
        moment, topic = manifest.moment, state.topics.get(self.topic)
        return TableProgress(
            manifest.version,
            manifest.made_ms,
            sum(file.rows for file in manifest.files),
            sum(file.size for file in manifest.files),
            {number: held.offset for number, held in moment.partitions.items()},
            0 if topic is None else self._behind(moment, topic),
            self._fault(manifest, state),
        )

    # --- reading ---------------------------------------------------------------------------------

    def complete(self) -> tuple[Manifest, State]:
        """Return a manifest that the log can complete, and the log's state; refresh for it.

        Raises IncompleteTableError if others spoil the files again and again.
        """
        for _ in range(_TRIES):
            manifest = self._place.newest()
            with opened_for_spark(self._log_options) as log:
                state = log.state()
            if manifest is not None and self._fault(manifest, state) is None:
                return manifest, state
            self.refresh()
        raise IncompleteTableError(
            f"{self.location}: the log cannot complete the materialized table, though it was made "
            f"{_TRIES} times. Look for what cleans or replaces {self.path}."
        )

    def _fault(self, manifest: Manifest, state: State) -> str | None:
        """Return why the files must be made again; None if the log completes them."""
        if manifest.moment.topic != self.topic:
            return f"the table is of topic {manifest.moment.topic!r}"
        if dict(manifest.definition) != self._definition:
            return "its columns come from other arguments"
        return manifest.moment.fault(state)

    def _behind(self, moment: TableMoment, topic: TopicState) -> int:
        """Return how many offsets the log has beyond the files."""
        return sum(
            max(0, held.last_stable_offset - moment.start(number, held.log_start_offset))
            for number, held in topic.present()
        )

    def _merged(self, manifest: Manifest, state: State, ends: Offsets | None = None) -> DataFrame:
        """Return the files less the keys that have changed, and the changes, up to `ends`."""
        from pyspark.sql import functions as f

        behind = self._behind(manifest.moment, state.topic(self.topic))
        changes = self._latest(ends, manifest.moment)
        keys = changes.select(
            f.xxhash64("partition", "key").alias("_kl_hash"),
            f.col("partition").alias("_kl_p"),
            f.col("key").alias("_kl_k"),
        )
        key, partition, _ = map(quoted, manifest.place_columns)
        # Spark joins by the one number. That the keys are equal, it then checks of few rows.
        is_changed = (
            (f.xxhash64(partition, key) == f.col("_kl_hash"))
            & f.col(key).between(f.col("_kl_k"), f.col("_kl_k"))
            & f.col(partition).between(f.col("_kl_p"), f.col("_kl_p"))
        )
        gone = f.broadcast(keys) if behind <= _BROADCAST_MAX else keys
        kept = self._files(manifest).join(gone, is_changed, "left_anti")
        merged = kept.unionByName(self._typed(changes.where("value IS NOT NULL"))[0])
        return merged if ends is not None else merged.select(*map(quoted, manifest.columns))

    def _files(self, manifest: Manifest) -> DataFrame:
        from pyspark.sql.types import StructType

        schema = StructType.fromJson(dict(manifest.schema))
        if not manifest.files:
            return self._spark.createDataFrame([], schema)
        names = [file.path for file in manifest.files]
        if is_store_url(self.location):
            reader = TableReader(self.location, self.options, names)
            numbers = self._spark.range(0, len(names), 1, len(names))
            return numbers.mapInArrow(reader.__call__, schema)
        paths = [_as_glob(f"file://{self.location}/{name}") for name in names]
        return self._spark.read.schema(schema).parquet(*paths)

    def _latest(self, ends: Offsets | None, moment: TableMoment | None) -> DataFrame:
        """Return the latest records, or with a moment those of the keys that changed since."""
        reader = self._spark.read.format("kafkalog").options(**self._log_options)
        reader = reader.options(subscribe=self.topic, view="latest")
        if moment is not None:
            reader = reader.options(completes=moment.dumps())
        if ends is not None:
            texts = {str(place.partition): end for place, end in ends.items()}
            reader = reader.options(endingOffsets=json.dumps({self.topic: texts}))
        return reader.load().select(*_READ)

    def _typed(self, rows: DataFrame) -> tuple[DataFrame, Sequence[str], Sequence[str]]:
        """Return the rows of the files, the table's columns, and the place columns."""
        has_keys = any(name.startswith("key_") for name in self._documents)
        if self._select is None and not has_keys:
            typed = self._decode(rows)  # it puts fields in place of the value
            return typed, typed.columns, [typed.columns[place] for place in _PLACES]
        hidden = [f"{name} AS {also}" for name, also in zip(_PLACE, _HIDDEN, strict=True)]
        typed = self._decode(rows.selectExpr("*", *hidden))
        if self._select is not None:
            typed = typed.selectExpr(*self._select, *_HIDDEN)
        return typed, typed.columns[: -len(_HIDDEN)], _HIDDEN

    # --- writing ---------------------------------------------------------------------------------

    def _refreshed(self, before: Manifest | None) -> Manifest | None:
        """Return the manifest of what the log had at this call; None if another came first."""
        with contextlib.ExitStack() as opened:
            log = opened.enter_context(open_log(self.path, create=False, options=self.options))
            log.check_writable()
            state = log.state()
            topic = state.topic(self.topic)
            base = before if before is not None and not self._fault(before, state) else None
            ends = {
                TopicPartition(self.topic, number): held.last_stable_offset
                for number, held in topic.present()
            }
            if base is not None and not self._behind(base.moment, topic):
                return base
            options = SourceOptions.parse({**self._log_options, "subscribe": self.topic})
            planner = opened.enter_context(contextlib.closing(planner_of(options)))
            planner.hold_views({}, ends)  # if a cleaner passes them all the same, a task fails
            version = 1 if before is None else before.version + 1
            return self._write(log, base, version, state, ends)

    def _write(
        self, log: Log, base: Manifest | None, version: int, state: State, ends: Offsets
    ) -> Manifest | None:
        """Write the files of a version, and its manifest; None if there is one already."""
        rows, columns, place_columns = self._typed(self._latest(ends, None))
        if base is not None:
            rows = self._merged(base, state, ends)
        directory = f"data/{version}-{uuid.uuid4().hex}"
        writer = TableWriter(self.location, self.options, directory, place_columns)
        tasks = max(_FILES_MIN, sum(log.size_of(*place) for place in ends) // _FILE_BYTES)
        written = rows.coalesce(tasks).mapInArrow(writer.__call__, WRITTEN).collect()
        firsts: dict[int, int] = {}
        for file in written:
            for number, first in zip(file.partitions, file.firsts, strict=True):
                firsts[number] = min(first, firsts.get(number, first))
        partitions = {
            place.partition: PartitionMoment(end, firsts.get(place.partition))
            for place, end in ends.items()
        }
        manifest = Manifest(
            version=version,
            moment=self._marked(log, state, base, partitions),
            made_ms=clock.now_ms(),
            definition=self._definition,
            schema=json.loads(rows.schema.json()),
            columns=columns,
            place_columns=place_columns,
            files=[TableFile(file.path, file.rows, file.size) for file in written],
        )
        is_ours = self._place.create(manifest_name(version), manifest.encode())
        return manifest if is_ours else None

    def _marked(
        self,
        log: Log,
        state: State,
        base: Manifest | None,
        partitions: Mapping[int, PartitionMoment],
    ) -> TableMoment:
        """Commit the table's mark to the log that was in `state`, and return the new moment."""
        now_ms, topic_id = clock.now_ms(), state.topic(self.topic).topic_id
        made = mark_of(self.location, uuid.uuid4().hex, self.topic)
        mark = made if base is None else base.moment.mark

        def commit(change: LogChange) -> TableMoment:
            found = change.state
            known = found.writers.get(mark)
            number = 1 if known is None else known.batch_id + 1
            moment = TableMoment(self.topic, topic_id, mark, number, partitions)
            if base is not None:
                base.moment.check_log(found)
            if found.number < state.number or topic_id != found.topic(self.topic).topic_id:
                raise IncompleteTableError(
                    f"{self.location}: topic {self.topic!r} of {self.path} was created again, or "
                    "an older copy of the log put back, during a refresh. Refresh again."
                )
            change.record_writer(mark, number, 0, now_ms)
            for other in marks_of(found, self.topic):
                if other != mark and location_of(other) == self.location:
                    change.end_writer(other)
            return moment

        return log.change(commit, now_ms=now_ms)

    @property
    def _definition(self) -> dict[str, Any]:
        """The arguments of the columns, as a manifest keeps them."""
        given = {name: _plain(value) for name, value in self._documents.items()}
        return given if self._select is None else {**given, "select": [*self._select]}

    @property
    def _log_options(self) -> dict[str, str]:
        return {**self.options, "path": self.path}


def _plain(value: Any) -> Any:
    """Return an argument as plain JSON: a schema as its own, a registry as its description."""
    to_json = getattr(value, "json", None)
    return json.loads(to_json()) if callable(to_json) else str(value)


def _as_glob(path: str) -> str:
    """Return a path as Spark takes one, which reads it as a pattern."""
    return re.sub(r"([\[\]{}*?\\])", r"\\\1", path)
