"""Each change with the value that it replaces; Spark keeps the values as state."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

from pyspark.sql.streaming.stateful_processor import StatefulProcessor

from kafkalog.errors import InvalidInputError
from kafkalog.extras import install_command
from kafkalog.spark_release import lacking

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, Row, SparkSession
    from pyspark.sql.streaming.stateful_processor import StatefulProcessorHandle, ValueState

_PROVIDER_CONF: Final = "spark.sql.streaming.stateStore.providerClass"
_PROVIDER: Final = "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"
_COLUMNS: Final = (
    "key binary, value binary, deleted boolean, offset bigint, timestamp timestamp, partition int, "
    "previous binary"
)


def with_previous(changes: DataFrame) -> DataFrame:
    """Return a stream of changes with the column `previous`; see `KTable.updates`."""
    by_key = changes.groupBy("key")
    if not hasattr(by_key, "transformWithState"):
        raise lacking("updates(previous=True)", "4.1", "Leave previous= out")
    _check_session(changes.sparkSession)
    return by_key.transformWithState(
        statefulProcessor=PreviousValue(),
        outputStructType=_COLUMNS,
        outputMode="Append",
        timeMode="None",
    )


class PreviousValue(StatefulProcessor):
    """Keeps the latest value of each key; a deleted key takes no room."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        """Open the state."""
        self._value: ValueState = handle.getValueState("value", "value binary")

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        """Yield one key's changes of a micro-batch, all in memory, in the order of the log."""
        from pyspark.sql import Row

        found = self._value.get() if self._value.exists() else None
        previous = None if found is None else found[0]
        before = previous
        for row in sorted(rows, key=lambda row: (row.partition, row.offset)):
            yield Row(
                key=row.key,
                value=row.value,
                deleted=row.deleted,
                offset=row.offset,
                timestamp=row.timestamp,
                partition=row.partition,
                previous=previous,
            )
            previous = row.value
        if previous is not None:
            self._value.update((previous,))
        elif before is not None:
            self._value.clear()

    def close(self) -> None:
        """Do nothing: the state is Spark's."""


def _check_session(spark: SparkSession) -> None:
    provider = str(spark.conf.get(_PROVIDER_CONF, ""))
    if not provider.endswith(_PROVIDER.rpartition(".")[2]):
        raise InvalidInputError(
            "updates(previous=True) keeps state in RocksDB: set the session's configuration "
            f"{_PROVIDER_CONF} to {_PROVIDER} before the query begins, found {provider or 'none'}"
        )
    if importlib.util.find_spec("google") is None or not _has_protobuf():
        raise InvalidInputError(
            "updates(previous=True) needs the package protobuf, by which Spark's Python workers "
            f"reach its state: {install_command('state')}"
        )


def _has_protobuf() -> bool:
    return importlib.util.find_spec("google.protobuf") is not None
