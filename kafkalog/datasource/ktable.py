"""A topic as a table: the latest value of each key."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import (
    TYPE_CHECKING,
    Any,
    Final,
    Literal,
    Self,
    TypeVar,
    Unpack,
    overload,
)

from kafkalog.errors import InvalidInputError
from kafkalog.storage_engine.log.readable_log import ReadableLog
from kafkalog.storage_engine.place import opened_for_spark, spark_path
from kafkalog.values.columns import columns_of
from kafkalog.values.decoded_value import avro_document, json_document
from kafkalog.values.record_form import DocumentArguments, RecordForm, document_arguments
from kafkalog.values.row_version import DELETE_RETENTION_MS

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, DataFrameReader, SparkSession

    from kafkalog.cleaner.key_index.key_lookup import KeptLookups, KeyLookup, Record
    from kafkalog.datasource.materialized_table import MaterializedTable
    from kafkalog.values.schema_registry import SchemaRegistry

FORMAT: Final = "kafkalog"
T = TypeVar("T")


class KTable:
    """A topic's latest record of each key, for Spark and for single lookups; a context manager.

    `path` is a log directory, also a Kafka broker's, or the URL of a log in an object store.
    Nothing is cached: each Spark action and each lookup sees the present log. In an object store a
    DataFrame is of the moment at which Spark planned it. `spark` may be None if you use only
    `lookup`, which needs no Spark. Raises InvalidInputError for a path without a log,
    UnknownTopicError.
    """

    def __init__(
        self,
        spark: SparkSession | None,
        path: str | Path,
        topic: str,
        *,
        options: Mapping[str, str] | None = None,
    ) -> None:
        """`options` are those of an object store, `store.*`."""
        self.topic = topic
        self.path = spark_path(path)
        self.options = dict(options or {})
        self._spark = spark
        self._mutex = threading.Lock()
        self._lookups: KeptLookups | None = None
        with self._log() as log:
            log.describe(topic)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the files that lookups keep open; the next lookup opens them again."""
        if self._lookups is not None:
            self._lookups.close()

    def df(
        self,
        *,
        options: Mapping[str, str] | None = None,
        bad_column: str | None = None,
        **documents: Unpack[DocumentArguments],
    ) -> DataFrame:
        """Return the table: one row per key, with the columns of the source.

        With `json` or `avro` the fields of the values are columns, and with `key_json` or
        `key_avro` those of the keys, see `value_columns`, which has `bad_column` too. The subject
        of framed values is by default `<topic>-value`. `options` are further options of the source,
        such as `includeHeaders`. Each action sees the present log; a value whose schema was not
        registered when the DataFrame was made is an error that says so.
        """
        frame = self._reader(options).load()
        return self._with_columns(frame, documents, bad_column, is_table=True)

    def count(self, *, options: Mapping[str, str] | None = None) -> int:
        """Return how many rows `df` has with these `options`, at less cost than `df().count()`.

        Spark does not tell a source in Python which columns a query needs (Spark's
        `PythonScanBuilder`, up to 4.2). So `df().count()` brings all keys and values into Spark.
        This brings the offsets alone. A schema of your own does the same for other columns:
        `spark.read.format("kafkalog").schema("key binary, offset bigint")`.
        """
        return self._reader(options).schema("offset bigint").load().count()

    def _reader(self, options: Mapping[str, str] | None) -> DataFrameReader:
        reader = self._session().read.format(FORMAT).options(**{**self.options, **(options or {})})
        return reader.options(path=self.path, subscribe=self.topic, view="latest")

    def create_view(
        self,
        name: str,
        *,
        options: Mapping[str, str] | None = None,
        bad_column: str | None = None,
        **documents: Unpack[DocumentArguments],
    ) -> None:
        """Register the table in SQL as a temporary view; it replaces a view of that name."""
        frame = self.df(options=options, bad_column=bad_column, **documents)
        frame.createOrReplaceTempView(name)

    def materialize(
        self,
        location: str | Path,
        *,
        select: Sequence[str] | None = None,
        version: str | None = None,
        delete_retention_ms: int = DELETE_RETENTION_MS,
        **documents: Unpack[DocumentArguments],
    ) -> MaterializedTable:
        """Keep the table in typed Parquet files at a location, and return it.

        A query of these files costs a fraction of `df()`, which decodes every value again. The
        columns are those of `df` for the same arguments, or what `select` makes of them: SQL
        expressions, here also over the source's own columns.

        `version` names a column: the row with the larger version counts, in whatever order records
        come, as in `Upsert`. A tombstone is a deletion, and so is a row of `select` whose boolean
        column `deleted` is true. The files remember a deletion's version for `delete_retention_ms`
        at least. A record whose version is null fails the query.

        `location` is a directory that all executors share, or the URL of a prefix in an object
        store. Unless it has files that the log can complete, they are made now. The process needs
        permission to write to the log, which gets a mark of each refresh. Raises InvalidInputError.
        """
        from kafkalog.datasource.materialized_table import MaterializedTable

        if select is None and not any(documents.values()):
            raise InvalidInputError("materialize: give the columns: json=, avro= or select=")
        table = MaterializedTable(
            self._session(),
            self.path,
            self.topic,
            location,
            options=self.options,
            select=select,
            version=version,
            delete_retention_ms=delete_retention_ms,
            documents=documents,
        )
        table.complete()
        return table

    def _with_columns(
        self,
        frame: DataFrame,
        documents: DocumentArguments,
        bad_column: str | None,
        *,
        is_table: bool = False,
    ) -> DataFrame:
        """Return records with the fields of their documents; JSON that does not parse is null."""
        given = document_arguments(documents)
        if not given:
            return frame
        form = RecordForm.of(is_strict=bad_column is not None, **given)
        return columns_of(
            frame,
            form,
            bad_column=bad_column,
            topics=[self.topic],
            deleted=None if is_table else "deleted",
            is_table=is_table,
        )

    @overload
    def lookup(self, key: bytes | str, *, partition: int | None = None) -> Record | None: ...

    @overload
    def lookup(
        self,
        key: bytes | str,
        *,
        partition: int | None = None,
        json: Literal[True],
    ) -> Any: ...

    @overload
    def lookup(
        self,
        key: bytes | str,
        *,
        partition: int | None = None,
        avro: str | SchemaRegistry,
        reader: str | None = None,
    ) -> Any: ...

    def lookup(
        self,
        key: bytes | str,
        *,
        partition: int | None = None,
        json: bool = False,
        avro: str | SchemaRegistry | None = None,
        reader: str | None = None,
    ) -> Any:
        """Return the latest record of one key, without Spark; None if it has no value.

        Text is encoded as UTF-8. Cleaned segments are searched through their key indexes. Newer
        records get an index in memory, once lookups have scanned as many bytes as these records
        take. Each commit extends it, and it has at most 128 MiB. With more uncleaned records than
        that, 5.6 million or more of them, lookups scan the records.

        The key is searched in the partition where Kafka's default partitioner sends it, or in
        `partition`.

        With `json=True` it is the value's document, as `json.loads` gives it. With `avro`, a schema
        or a registry, it is the value as the package fastavro decodes it: a dict for a record. The
        reader's schema is `reader`, by default the writer's.

        Thread-safe. Raises CorruptBatchError, StorageError, and InvalidInputError for an invalid
        key or partition, and for a value that is not such a document, with its place.
        """
        found = self._looked_up(lambda lookup: lookup.get(key, partition=partition))
        if found is None or found.value is None or not (json or avro):
            return found
        where = f"{self.topic}-{found.partition} offset {found.offset}"
        if json:
            return json_document(found.value, where)
        assert avro is not None
        return avro_document(found.value, where, avro, reader)

    def lookup_many(
        self, keys: Iterable[bytes | str], *, partition: int | None = None
    ) -> dict[bytes | str, Record | None]:
        """Return the latest record of each key, as `lookup` does, all of them at once.

        The result has the keys as they were given, with None for one that has no value. A thousand
        keys at once take a fraction of the time of a thousand calls. They keep the key indexes in
        memory, 8 bytes a record and at most 128 MiB a partition, until `close` or until something
        is committed there. Raises like `lookup`.
        """
        wanted = list(keys)
        return self._looked_up(lambda lookup: lookup.get_many(wanted, partition=partition))

    def _looked_up(self, ask: Callable[[KeyLookup], T]) -> T:
        from kafkalog.cleaner.key_index.key_lookup import KeptLookups

        with self._mutex:
            self._lookups = self._lookups or KeptLookups(self._log)
        return self._lookups.ask(self.topic, ask)

    def updates(
        self,
        previous: bool = False,
        *,
        options: Mapping[str, str] | None = None,
        bad_column: str | None = None,
        **documents: Unpack[DocumentArguments],
    ) -> DataFrame:
        """Return a stream of changes: key, value, deleted, offset, timestamp, partition.

        It starts with the present records, unless `options` (the source's) say otherwise. `deleted`
        is true for a tombstone, whose value is null. Records without a key are left out. Changes of
        one key come in the order of the log.

        With `previous=True` a column `previous` has the key's value before the change, null for a
        key that is new to the stream or was deleted. Spark keeps these values as state
        (`transformWithState`), which needs RocksDB as the session's state store provider and the
        package protobuf. It is much slower than the plain stream: some 1,100 changes a second on
        two cores (bench.previous_value). Every key of a micro-batch takes three exchanges with
        Spark's process.

        `json`, `avro`, `key_json`, `key_avro` and `bad_column` make columns as in `df`, but not of
        the column `previous`. A value with a schema that was registered later stops the query;
        start it again, and it continues.

        Raises InvalidInputError if the provider or the package is missing.
        """
        given = {"startingOffsets": "earliest", **self.options, **(options or {})}
        reader = self._session().readStream.format(FORMAT).options(**given)
        frame = reader.options(path=self.path, subscribe=self.topic).load()
        names = ["key", "value", "value IS NULL AS deleted", "offset", "timestamp", "partition"]
        changes = frame.where("key IS NOT NULL")
        if not previous:
            columns = self._with_columns(changes.selectExpr(*names, "topic"), documents, bad_column)
            return columns.drop("topic")
        from kafkalog.datasource.previous_value import with_previous

        changes = with_previous(changes.selectExpr(*names))
        return self._with_columns(changes, documents, bad_column)

    def _log(self) -> ReadableLog:
        return opened_for_spark({**self.options, "path": self.path})

    def _session(self) -> SparkSession:
        if self._spark is None:
            raise InvalidInputError(
                "this KTable was made without a Spark session and can only look keys up: "
                "KTable(spark, path, topic)"
            )
        return self._spark
