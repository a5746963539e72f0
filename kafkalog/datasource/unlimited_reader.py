"""The micro-batch reader for Spark 4.0 and 4.1, which do not say where a micro-batch starts.

Whatever the trigger, they call for a new query `latestOffset`, `initialOffset` and `partitions`.
For one that starts again they call `partitions` from the last planned end to itself. If its last
micro-batch is repeated, `initialOffset` and `partitions` follow. A micro-batch starts where the
last planned one ends.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from pyspark.sql.datasource import DataSourceStreamReader, InputPartition

from kafkalog.datasource.offsets import OffsetJson
from kafkalog.datasource.stream_reader import KafkaLogStreamReader
from kafkalog.plain_errors import plain
from kafkalog.spark_release import ReadAllAvailable

if TYPE_CHECKING:
    import pyarrow as pa


@plain
class UnlimitedStreamReader(DataSourceStreamReader):
    """Keeps the start of the next micro-batch, which reads all that is there."""

    def __init__(self, reader: KafkaLogStreamReader) -> None:
        self._reader = reader
        self._start: OffsetJson | None = None

    def initialOffset(self) -> OffsetJson:
        """Return the start of a new query."""
        return self._reader.initialOffset()

    def latestOffset(self) -> OffsetJson:  # type: ignore[override]  # that of 4.2 takes two
        """Return the end of the next micro-batch; Spark runs it if it is not the last one's."""
        start = self._reader.initialOffset() if self._start is None else self._start
        self._start = self._reader.latestOffset(start, ReadAllAvailable())
        return self._start

    def partitions(self, start: OffsetJson, end: OffsetJson) -> Sequence[InputPartition]:
        """Return the ranges of a micro-batch; an empty one tells where a query continues."""
        self._start = end
        return self._reader.partitions(start, end)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yield the records of one range, or of the view with which it begins."""
        return self._reader.read(partition)

    def commit(self, end: OffsetJson) -> None:
        """Do nothing: the log keeps no positions of its readers."""

    def stop(self) -> None:
        """Close the log."""
        self._reader.stop()
