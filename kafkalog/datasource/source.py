"""`format("kafkalog")`: the class through which Spark reads and writes a log.

Each Python process of a query imports this module, and most need only the class. Readers and
writers are therefore imported where they are made.
"""

from __future__ import annotations

import logging
from collections.abc import MutableMapping
from functools import cached_property
from typing import TYPE_CHECKING

from pyspark.sql.datasource import DataSource

from kafkalog.datasource.columns import check_columns, spark_schema
from kafkalog.datasource.options import SourceOptions
from kafkalog.plain_errors import plain
from kafkalog.storage_engine.metadata import address
from kafkalog.storage_engine.object_store.address import store_address
from kafkalog.storage_engine.place import check_has_log

if TYPE_CHECKING:
    from pyspark.sql.datasource import (
        DataSourceArrowWriter,
        DataSourceStreamArrowWriter,
        DataSourceStreamReader,
    )
    from pyspark.sql.types import StructType

    from kafkalog.datasource.batch_reader import KafkaLogBatchReader

_LOGGER = logging.getLogger(__name__)
_WARNED: set[tuple[str, ...]] = set()


@plain
class KafkaLogDataSource(DataSource):
    """A log as a Spark table, with the options and columns of `format("kafka")`.

    `path` is a log directory, also a Kafka broker's, or all directories of a broker separated by
    commas, or an address in an object store. Spark makes an instance for every read and write, and
    does not say which. Options that select topics mean a read and are checked at once, so that
    `load()` fails on a bad one. Raises InvalidInputError.
    """

    def __init__(self, options: MutableMapping[str, str]) -> None:
        super().__init__(options)
        if store_address(options) is None:
            address.log_directories(options)
        if SourceOptions.are_reading(options):
            check_has_log(self._read_options.place)
            _warn_once(self._read_options.ignored)

    @cached_property
    def _read_options(self) -> SourceOptions:
        return SourceOptions.parse(self.options)

    @classmethod
    def name(cls) -> str:
        """Return the name of the format."""
        return "kafkalog"

    def schema(self) -> StructType:
        """Return the columns of a read; raises InvalidInputError if no topic is selected."""
        return spark_schema(include_headers=self._read_options.include_headers)

    def reader(self, schema: StructType) -> KafkaLogBatchReader:
        """Return the batch reader for a schema: ours, or the user's subset of it."""
        from kafkalog.datasource.batch_reader import KafkaLogBatchReader

        check_columns(schema)
        return KafkaLogBatchReader(self._read_options, tuple(schema.fieldNames()))

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        """Return the micro-batch reader; Spark would lose an error raised here."""
        from kafkalog.datasource.stream_reader import KafkaLogStreamReader
        from kafkalog.spark_release import HAS_LIMITS

        reader = KafkaLogStreamReader(dict(self.options), schema)
        if HAS_LIMITS:
            return reader
        from kafkalog.datasource.unlimited_reader import UnlimitedStreamReader

        return UnlimitedStreamReader(reader)

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceArrowWriter:
        """Return the writer of `df.write`."""
        from kafkalog.sink.writer import batch_writer

        return batch_writer(self.options, schema, overwrite)

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamArrowWriter:
        """Return the writer of `df.writeStream`."""
        from kafkalog.sink.writer import stream_writer

        return stream_writer(self.options, schema, overwrite)


def _warn_once(ignored: tuple[str, ...]) -> None:
    """Warn of options without effect, once per process: Spark makes several instances."""
    if ignored and ignored not in _WARNED:
        _WARNED.add(ignored)
        _LOGGER.warning(
            "options without effect, since no Kafka client is involved: %s", ", ".join(ignored)
        )
