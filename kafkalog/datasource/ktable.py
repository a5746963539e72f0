"""A topic as a table: the latest value of each key."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final, Self, TypeVar

from kafkalog.errors import InvalidInputError
from kafkalog.storage_engine.log.readable_log import ReadableLog
from kafkalog.storage_engine.place import opened_for_spark, spark_path
from kafkalog.values.columns import value_columns

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType

    from kafkalog.cleaner.key_index.key_lookup import KeyLookup, Record
    from kafkalog.datasource.materialized_table import MaterializedTable

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
        self._lookup: KeyLookup | None = None
        with self._log() as log:
            log.describe(topic)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the files that lookups keep open; the next lookup opens them again."""
        with self._mutex:
            if self._lookup is not None:
                self._lookup.close()
                self._lookup = None

    def df(
        self,
        *,
        json: StructType | str | None = None,
        avro: str | None = None,
        options: Mapping[str, str] | None = None,
    ) -> DataFrame:
        """Return the table: one row per key, with the columns of the source.

        With `json` or `avro` the fields of the values are columns, see `value_columns`. `options`
        are further options of the source, such as `includeHeaders`. Each action sees the present
        log.
        """
        reader = self._session().read.format(FORMAT).options(**{**self.options, **(options or {})})
        frame = reader.options(path=self.path, subscribe=self.topic, view="latest").load()
        if json is None and avro is None:
            return frame
        return value_columns(frame, json=json, avro=avro)

    def create_view(
        self,
        name: str,
        *,
        json: StructType | str | None = None,
        avro: str | None = None,
        options: Mapping[str, str] | None = None,
    ) -> None:
        """Register the table in SQL as a temporary view; it replaces a view of that name."""
        self.df(json=json, avro=avro, options=options).createOrReplaceTempView(name)

    def materialize(
        self,
        location: str | Path,
        *,
        json: StructType | str | None = None,
        avro: str | None = None,
        select: Sequence[str] | None = None,
        key_json: StructType | str | None = None,
    ) -> MaterializedTable:
        """Keep the table in typed Parquet files at a location, and return it.

        A query of these files costs a fraction of `df()`, which decodes every value again. Give one
        of `json` and `avro`, as in `df`, or `select`: SQL expressions over the source's columns.
        With `key_json`, a Spark schema or its DDL, the fields of JSON keys are columns too.

        `location` is a directory that executors share, or the URL of a prefix in an object store.
        The files are made now if it has none that the log can complete. This needs leave to write
        to the log, which gets a mark of each refresh. Raises InvalidInputError.
        """
        from kafkalog.datasource.materialized_table import MaterializedTable

        if sum(given is not None for given in (json, avro, select)) != 1:
            raise InvalidInputError("materialize: give one of json=, avro= and select=")
        table = MaterializedTable(
            self._session(),
            self.path,
            self.topic,
            str(location),
            options=self.options,
            values={
                "json": json,
                "avro": avro,
                "select": None if select is None else [*select],
                "key_json": key_json,
            },
        )
        table.complete()
        return table

    def lookup(self, key: bytes | str, *, partition: int | None = None) -> Record | None:
        """Return the latest record of one key, without Spark; None if it has no value.

        Text is encoded as UTF-8. Cleaned segments are searched through their key indexes, newer
        records are scanned. The key is searched in the partition where Kafka's default partitioner
        sends it, or in `partition`. Thread-safe. Raises CorruptBatchError, StorageError, and
        InvalidInputError for an invalid key or partition.
        """
        return self._looked_up(lambda lookup: lookup.get(key, partition=partition))

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
        from kafkalog.cleaner.key_index.key_lookup import KeyLookup

        while True:
            with self._mutex:
                if self._lookup is None:
                    self._lookup = KeyLookup(self._log(), self.topic)
                lookup = self._lookup
            try:
                return ask(lookup)
            except InvalidInputError:
                if not lookup.is_closed:  # else another thread has called `close`
                    raise

    def updates(
        self, previous: bool = False, *, options: Mapping[str, str] | None = None
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

        Raises InvalidInputError if the provider or the package is missing.
        """
        given = {"startingOffsets": "earliest", **self.options, **(options or {})}
        reader = self._session().readStream.format(FORMAT).options(**given)
        frame = reader.options(path=self.path, subscribe=self.topic).load()
        changes = frame.where("key IS NOT NULL").selectExpr(
            "key", "value", "value IS NULL AS deleted", "offset", "timestamp", "partition"
        )
        if not previous:
            return changes
        from kafkalog.datasource.previous_value import with_previous

        return with_previous(changes)

    def _log(self) -> ReadableLog:
        return opened_for_spark({**self.options, "path": self.path})

    def _session(self) -> SparkSession:
        if self._spark is None:
            raise InvalidInputError(
                "this KTable was made without a Spark session and can only look keys up: "
                "KTable(spark, path, topic)"
            )
        return self._spark
