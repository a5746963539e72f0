"""What a Python data source costs in Spark when it does nothing: the floor beneath ours.

The source has offsets and no rows, the sink counts the rows that it is given; both hand over Arrow
batches, as ours do. The option `counted` names a directory for what the sink counted: a small file
for each commit, which is not synced. Spark's workers import this module.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import (
    DataSource,
    DataSourceArrowWriter,
    DataSourceStreamArrowWriter,
    DataSourceStreamReader,
    InputPartition,
    WriterCommitMessage,
)
from pyspark.sql.streaming.datasource import ReadLimit, ReadMaxRows

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.types import StructType

__all__ = ["FORMAT", "Floor", "counted_rows"]

FORMAT = "floor"


class Floor(DataSource):
    """A source with `micro_batches` offsets and no rows, and a sink that only counts."""

    @classmethod
    def name(cls) -> str:
        """Return the name it is registered under."""
        return FORMAT

    def schema(self) -> str:
        """Return the columns of a Kafka source, as far as a copy needs them."""
        return "key binary, value binary"

    def streamReader(self, schema: StructType) -> _Reader:
        """Return a source without rows."""
        return _Reader(int(self.options.get("microBatches", "1")))

    def writer(self, schema: StructType, overwrite: bool) -> _BatchWriter:
        """Return a sink that counts."""
        return _BatchWriter(self.options.get("counted"))

    def streamWriter(self, schema: StructType, overwrite: bool) -> _StreamWriter:
        """Return a sink that counts."""
        return _StreamWriter(self.options.get("counted"))


def counted_rows(directory: Path) -> int:
    """Return how many rows the sinks have counted into a directory."""
    return sum(int(path.read_text()) for path in directory.iterdir())


@dataclass
class _Counted(WriterCommitMessage):
    rows: int


class _Reader(DataSourceStreamReader):
    """One more offset at every question, up to an end; one partition, whose task yields nothing."""

    def __init__(self, micro_batches: int) -> None:
        self._micro_batches = micro_batches

    def getDefaultReadLimit(self) -> ReadLimit:
        return ReadMaxRows(1)

    def initialOffset(self) -> dict[str, int]:
        return {"offset": 0}

    def latestOffset(self, start: Mapping[str, int], limit: ReadLimit) -> dict[str, int]:
        return {"offset": min(start["offset"] + 1, self._micro_batches)}

    def partitions(self, start: Mapping[str, int], end: Mapping[str, int]) -> list[InputPartition]:
        return [InputPartition(0)] if end["offset"] > start["offset"] else []

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return iter(())

    def commit(self, end: Mapping[str, int]) -> None:
        """Nothing to keep."""


class _BatchWriter(DataSourceArrowWriter):
    def __init__(self, directory: str | None) -> None:
        self._directory = directory

    def write(self, iterator: Iterator[pa.RecordBatch]) -> _Counted:
        return _Counted(sum(batch.num_rows for batch in iterator))

    def commit(self, messages: Sequence[Any]) -> None:
        _keep(self._directory, "batch", messages)


class _StreamWriter(DataSourceStreamArrowWriter):
    def __init__(self, directory: str | None) -> None:
        self._directory = directory

    def write(self, iterator: Iterator[pa.RecordBatch]) -> _Counted:
        return _Counted(sum(batch.num_rows for batch in iterator))

    def commit(self, messages: Sequence[Any], batchId: int) -> None:
        _keep(self._directory, str(batchId), messages)

    def abort(self, messages: Sequence[Any], batchId: int) -> None:
        """Nothing to undo."""


def _keep(directory: str | None, name: str, messages: Sequence[Any]) -> None:
    if directory is not None:
        Path(directory, name).write_text(str(sum(message.rows for message in messages)))
