"""A materialized table: typed Parquet files with a topic's latest records, completed from the log.

The files are as of one moment. A query reads them, leaves out the keys that the log has changed
since, and adds those changes. When the log can no longer do that, `table_moment` says so; then the
files are made again. Invariants:

- A manifest is made once, after its files are durable, and after the log has a mark of its refresh.
  A process that dies before leaves the table as it was, and files that the next refresh removes.
- If two refreshes run at once, one makes the next manifest. The other one begins again.
- A query keeps the files of its manifest for a grace time, however often the table is refreshed
  meanwhile.
"""

from __future__ import annotations

import contextlib
import functools
import json
import re
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from kafkalog.datasource.columns import arrow_schema
from kafkalog.datasource.offsets import Offsets, TopicPartition
from kafkalog.datasource.options import SourceOptions
from kafkalog.datasource.read_planner import planner_of
from kafkalog.datasource.table_files import WRITTEN, TableReader, TableWriter
from kafkalog.datasource.table_versions import GONE, TableVersions
from kafkalog.errors import IncompleteTableError, InvalidInputError, StorageError
from kafkalog.spark_results import collected
from kafkalog.storage_engine.fs import clock, files
from kafkalog.storage_engine.object_store.address import is_store_url
from kafkalog.storage_engine.place import open_log, opened_for_spark
from kafkalog.tables.manifest import Manifest, TableFile, manifest_name
from kafkalog.tables.table_moment import (
    PartitionMoment,
    TableMoment,
    location_of,
    mark_of,
    marks_of,
)
from kafkalog.tables.table_place import (
    TablePlace,
    check_outside_log,
    table_location,
    table_place,
)
from kafkalog.values.columns import columns_of
from kafkalog.values.record_form import DocumentArguments, RecordForm, document_arguments
from kafkalog.values.row_version import check_has_no_events, checked_retention
from kafkalog.values.schema_registry import SchemaRegistry
from kafkalog.values.spark_sql import quoted

if TYPE_CHECKING:
    from pathlib import Path

    import pyarrow as pa
    from pyspark.sql import DataFrame, Row, SparkSession
    from pyspark.sql.types import StructType

    from kafkalog.storage_engine.log.log import Log
    from kafkalog.storage_engine.metadata.log_change import LogChange
    from kafkalog.storage_engine.metadata.state import State, TopicState

GRACE_S: Final = 3600.0
_TRIES: Final = 5
_DUE: Final = 10
"""A refresh is due if one in so many rows may have changed."""
_FILES_MIN: Final = 8
_FILE_BYTES: Final = 64 << 20
"""Bytes of the log for which a refresh has a task more."""
_DRIVER_BYTES: Final = 64 << 20
"""Arrow bytes of changes that the driver reads; more are read by tasks."""
_MAP_BYTES: Final = 128 << 20
_READ: Final = ("key", "value", "topic", "partition", "offset", "timestamp", "timestampType")
_PLACE: Final = ("key", "partition", "offset")
_PLACES: Final = (0, -4, -3)
"""Where these columns are among the source's, also if fields are in place of the value."""
_HIDDEN: Final = ("_kl_key", "_kl_partition", "_kl_offset")
_OVERTAKEN: Final = re.compile(r"IncompleteTableError|MomentPassedError|cleaned up to offset")
"""An error of a task that a cleaning has caused; Spark keeps only its text."""


class _Typed(NamedTuple):
    """The rows of a table's files, or what is to become them."""

    rows: DataFrame
    columns: Sequence[str]
    """Those of the table."""
    place_columns: Sequence[str]
    """Those with a row's key, partition and offset."""
    readers: Sequence[str]
    """The readers' schemas that a registry gave."""
    newest: DataFrame | None = None
    """The changed rows with their deletions, if rows have versions."""


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
        spark: SparkSession | None,
        path: str,
        topic: str,
        location: str | Path,
        *,
        options: Mapping[str, str],
        select: Sequence[str] | None,
        version: str | None,
        delete_retention_ms: int,
        documents: DocumentArguments,
    ) -> None:
        """The last four are the arguments of `KTable.materialize`."""
        self.topic = topic
        self.path = path
        self.location = table_location(location)
        check_outside_log(self.location, self.path)
        self.options = dict(options)
        self._spark = spark
        self._select = select
        self._documents = document_arguments(documents)
        self._views: set[str] = set()
        check_has_no_events(version, has_events="envelope" in self._documents)
        retention_ms = checked_retention(delete_retention_ms)
        self._versions = None if version is None else TableVersions(version, retention_ms, _HIDDEN)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_spark": None}

    def df(self) -> DataFrame:
        """Return the table as of this call, with the columns of `KTable.df`.

        If nothing has changed since the last refresh, the frame is the files alone. Files that the
        log cannot complete are made again first. All actions on the frame see the same rows, as
        long as its files are there: a refresh keeps them for its grace time.
        """
        for _ in range(_TRIES):
            manifest, state = self.complete()
            if not self._behind(manifest.moment, state.topic(self.topic)):
                return self._files(manifest).select(*map(quoted, manifest.columns))
            try:
                typed = self._rows(manifest, state)
            except Exception as fault:
                _pass_unless_overtaken(fault)
                continue
            return typed.rows.select(*map(quoted, typed.columns))
        raise self._unable()

    def create_view(self, name: str) -> None:
        """Register `df()` in SQL as a temporary view; it replaces a view of that name.

        The view is of this call. `refresh` renews the views that this object has made.
        """
        self.df().createOrReplaceTempView(name)
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
                if (
                    self._place.newest() == before
                ):  # else another refresh may have removed its files
                    _pass_unless_overtaken(fault)
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

    def refresh_if_due(self, spark: SparkSession) -> None:
        """Refresh in a session if a tenth of the rows may have changed, or the log demands it.

        A `KTableView` calls it after each micro-batch, perhaps in another process.
        """
        self._spark = spark
        found = self.progress()
        if found.fault is not None or _DUE * found.lag > found.rows:
            self.refresh()

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
        raise self._unable()

    def _unable(self) -> IncompleteTableError:
        return IncompleteTableError(
            f"{self.location}: the log cannot complete the materialized table, though it was tried "
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

    def _rows(self, base: Manifest | None, state: State) -> _Typed:
        """Return the rows of a state: from files and changes, or from the log alone."""
        if base is None:
            return self._newest(self._typed(self._latest(self._ends(state), None)))
        from pyspark.sql import functions as f

        changes, are_few = self._changes(base.moment, state)
        typed = self._typed(changes if self._versions else changes.where("value IS NOT NULL"))
        files = self._files(base)
        dtypes = [each for each in typed.rows.dtypes if each[0] != GONE]
        if (dtypes, typed.readers) != (files.dtypes, base.readers):
            return self._rows(None, state)  # a registry has another schema by now
        key, partition = (files[quoted(name)] for name in typed.place_columns[:2])
        changed = changes.select(
            f.xxhash64("partition", "key").alias("hash"),
            f.col("partition").alias("of"),
            f.col("key").alias("with"),
        )
        # A join by a number costs less than one by keys. A key that only shares the hash of a
        # changed one stays. An equality in its place would make Spark join by keys again.
        is_changed = (
            (f.xxhash64(partition, key) == changed["hash"])
            & partition.between(changed["of"], changed["of"])
            & key.between(changed["with"], changed["with"])
        )
        changed = f.broadcast(changed) if are_few else changed
        kept = files.join(changed, is_changed, "left_anti")
        if self._versions:
            held = files.join(changed, is_changed, "left_semi")
            schema = self._versions.deletions_schema(files.schema)
            typed = self._newest(typed, held, self._read(base.deletions, schema))
        return typed._replace(rows=kept.unionByName(typed.rows))

    def _newest(
        self, typed: _Typed, held: DataFrame | None = None, gone: DataFrame | None = None
    ) -> _Typed:
        """Return the rows that count by their versions, if they have any; see `TableVersions`."""
        if not self._versions:
            return typed
        found = self._versions.newest(typed.rows, clock.now_ms(), held=held, gone=gone)
        return typed._replace(rows=self._versions.rows(found), newest=found)

    def _changes(self, moment: TableMoment, state: State) -> tuple[DataFrame, bool]:
        """Return the latest records of the keys that have changed up to a state, with tombstones.

        If rows have versions, it is all records since the moment.
        The truth value says whether they are few: some megabytes are read here, in a fraction of
        the time that tasks in Python take to start.
        """
        found = self._read_changes(moment, state)
        if found is None:
            return self._latest(self._ends(state), moment), False
        # The coalesce only keeps the optimizer from decoding the values here, row by row.
        return self._session.createDataFrame(found).coalesce(_FILES_MIN), True

    def _read_changes(self, moment: TableMoment, state: State) -> pa.Table | None:
        """Return the changes; None if they are too large for this process."""
        import pyarrow as pa

        from kafkalog.cleaner.key_index.latest_view import latest

        rows: list[pa.RecordBatch] = []
        size, schema = 0, arrow_schema(_READ)
        with opened_for_spark(self._log_options) as log:
            for (topic, number), end in self._ends(state).items():
                start = moment.start(number, state.topic(topic).partitions[number].log_start_offset)
                if start >= end:
                    continue
                check = functools.partial(moment.check_partition, number=number)
                with log.snapshot(topic, number, whole=True, check=check) as snapshot:
                    snapshot.check_not_lost(start, end)
                    for batch in latest(
                        snapshot,
                        end,
                        since=start,
                        budget_bytes=_MAP_BYTES,
                        schema=schema,
                        with_tombstones=True,
                        with_obsolete=self._versions is not None,
                    ):
                        rows.append(batch)
                        size += batch.nbytes
                        if size > _DRIVER_BYTES:
                            return None
        return pa.Table.from_batches(rows, schema)

    def _ends(self, state: State) -> Offsets:
        return {
            TopicPartition(self.topic, number): held.last_stable_offset
            for number, held in state.topic(self.topic).present()
        }

    def _files(self, manifest: Manifest) -> DataFrame:
        from pyspark.sql.types import StructType

        return self._read(manifest.files, StructType.fromJson(dict(manifest.schema)))

    def _read(self, files: Sequence[TableFile], schema: StructType) -> DataFrame:
        if not files:
            return self._session.createDataFrame([], schema)
        names = [file.path for file in files]
        if is_store_url(self.location):
            reader = TableReader(self.location, self.options, names)
            numbers = self._session.range(0, len(names), 1, len(names))
            return numbers.mapInArrow(reader.__call__, schema)
        paths = [_as_glob(f"file://{self.location}/{name}") for name in names]
        return self._session.read.schema(schema).parquet(*paths)

    def _latest(self, ends: Offsets | None, moment: TableMoment | None) -> DataFrame:
        """Return the latest records, or with a moment those of the keys that changed since.

        If rows have versions, it is all records.
        """
        reader = self._session.read.format("kafkalog").options(**self._log_options)
        reader = reader.options(subscribe=self.topic, view="latest")
        if self._versions:
            reader = reader.options(withObsolete="true")
        if moment is not None:
            reader = reader.options(completes=moment.dumps())
        if ends is not None:
            texts = {str(place.partition): end for place, end in ends.items()}
            reader = reader.options(endingOffsets=json.dumps({self.topic: texts}))
        return reader.load().select(*_READ)

    def _typed(self, rows: DataFrame) -> _Typed:
        """Return records with the columns of the files."""
        has_keys = any(name.startswith("key_") for name in self._documents)
        if self._select is None and not has_keys and not self._versions:
            typed, readers = self._decoded(rows)  # it puts fields in place of the value
            columns = typed.columns
            return _Typed(typed, columns, [columns[place] for place in _PLACES], readers)
        hidden = dict(zip(_HIDDEN, _PLACE, strict=True))
        if self._versions:
            hidden[GONE] = "value IS NULL"
        made = [f"{source} AS {name}" for name, source in hidden.items()]
        typed, readers = self._decoded(rows.selectExpr("*", *made))
        if self._select is not None:
            typed = typed.selectExpr(*self._select, *hidden)
        columns = typed.columns[: -len(hidden)]
        if taken := [name for name in columns if name.lower().startswith("_kl_")]:
            raise InvalidInputError(
                f"materialize: columns whose names begin with _kl_ are taken: {', '.join(taken)}"
            )
        if self._versions:
            is_selected = self._select is not None
            typed, columns = self._versions.marked(typed, columns, is_selected=is_selected)
        return _Typed(typed, columns, _HIDDEN, readers)

    def _decoded(self, rows: DataFrame) -> tuple[DataFrame, Sequence[str]]:
        """Return records with the columns that `KTable.df` has, and the readers' schemas."""
        if not self._documents:
            return rows, []
        form = RecordForm.of(is_strict=False, **self._documents)
        return columns_of(rows, form, topics=[self.topic], is_table=True), form.readers()

    # --- writing ---------------------------------------------------------------------------------

    def _refreshed(self, before: Manifest | None) -> Manifest | None:
        """Return the manifest of what the log had at this call; None if another came first."""
        with contextlib.ExitStack() as opened:
            log = opened.enter_context(open_log(self.path, create=False, options=self.options))
            log.check_writable()
            state = log.state()
            topic = state.topic(self.topic)
            base = before if before is not None and not self._fault(before, state) else None
            if base is not None and not base.paths.issubset(self._place.names()):
                if self._place.newest() != before:
                    return None
                base = None  # somebody has removed files, and the log has all rows
            if base is not None and not self._behind(base.moment, topic):
                forgets = self._versions and self._versions.has_to_forget(base, clock.now_ms())
                if not forgets:
                    return base
            options = SourceOptions.parse({**self._log_options, "subscribe": self.topic})
            planner = opened.enter_context(contextlib.closing(planner_of(options)))
            # If a cleaner passes the ends all the same, a task fails.
            planner.hold_views({}, self._ends(state))
            version = 1 if before is None else before.version + 1
            return self._write(log, base, version, state)

    def _write(
        self, log: Log, base: Manifest | None, version: int, state: State
    ) -> Manifest | None:
        """Write the files of a version, and its manifest; None if there is one already."""
        ends = self._ends(state)
        typed = self._rows(base, state)
        directory = f"data/{version}-{uuid.uuid4().hex}"
        tasks = max(_FILES_MIN, sum(log.size_of(*place) for place in ends) // _FILE_BYTES)

        def write(rows: DataFrame) -> list[Row]:
            names, place = rows.columns, typed.place_columns
            writer = TableWriter(self.location, self.options, directory, place, names)
            # Spark reads a dot, a backtick or a star in these names as syntax.
            plain = rows.toDF(*[f"c{number}" for number in range(len(names))])
            return collected(plain.coalesce(tasks).mapInArrow(writer.__call__, WRITTEN))

        written, gone = write(typed.rows), []
        if self._versions and typed.newest is not None:
            gone = write(self._versions.deletions(typed.newest, clock.now_ms()))
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
            schema=json.loads(typed.rows.schema.json()),
            columns=typed.columns,
            place_columns=typed.place_columns,
            readers=typed.readers,
            files=[TableFile(file.path, file.rows, file.size) for file in written],
            deletions=[TableFile(file.path, file.rows, file.size) for file in gone],
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
    def _session(self) -> SparkSession:
        assert self._spark is not None, "only a copy in a micro-batch has none, and gets one"
        return self._spark

    @property
    def _place(self) -> TablePlace:
        return table_place(self.location, self.options)

    @property
    def _definition(self) -> dict[str, Any]:
        """The arguments of the columns, as a manifest keeps them."""
        given = {name: _plain(value) for name, value in self._documents.items()}
        if self._select is not None:
            given["select"] = [*self._select]
        return {**given, "version": self._versions.version} if self._versions else given

    @property
    def _log_options(self) -> dict[str, str]:
        return {**self.options, "path": self.path}


def _pass_unless_overtaken(fault: Exception) -> None:
    """Raise an error again unless a cleaning has caused it; Spark keeps only the text of some."""
    files.pass_on(fault)
    if not _OVERTAKEN.search(f"{type(fault).__name__} {fault}"):
        raise fault


def _plain(value: Any) -> Any:
    """Return an argument as plain JSON: a schema as its own, a registry as what tells it apart."""
    if isinstance(value, SchemaRegistry):
        return value.identity
    to_json = getattr(value, "json", None)
    return json.loads(to_json()) if callable(to_json) else str(value)


def _as_glob(path: str) -> str:
    """Return a path as Spark takes one, which reads it as a pattern."""
    return re.sub(r"([\[\]{}*?\\])", r"\\\1", path)
