"""A Python data source that only hands over: what no source in Python can be faster than.

Its batches lie ready in Arrow files, which each task maps into memory, so nothing is read, decoded
or copied in Python. As a stream it gives one row for each byte of a file, made without looking at
anything else; as a sink of a stream it lets rows go by.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamArrowWriter,
    DataSourceStreamReader,
    InputPartition,
    WriterCommitMessage,
)
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit
from pyspark.sql.types import StructType

from kafkalog.datasource.columns import spark_schema
from kafkalog.schema import changelog_schema

__all__ = ["ReadyBatches", "write_ready"]


class _File(InputPartition):
    """One task's batches."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.path = path


class _Reader(DataSourceReader):
    def __init__(self, directory: str) -> None:
        self.directory = directory

    def partitions(self) -> list[InputPartition]:
        return [_File(str(path)) for path in sorted(Path(self.directory).glob("*.arrow"))]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        assert isinstance(partition, _File)
        with pa.memory_map(partition.path) as mapped, pa.ipc.open_file(mapped) as file:
            for number in range(file.num_record_batches):
                yield file.get_batch(number)


class _Rows(InputPartition):
    """The rows of a micro-batch."""

    def __init__(self, count: int) -> None:
        super().__init__(count)
        self.count = count


class _StreamReader(DataSourceStreamReader):
    def __init__(self, path: str) -> None:
        self.path = path

    def initialOffset(self) -> dict[str, int]:
        return {"rows": 0}

    def getDefaultReadLimit(self) -> ReadLimit:
        return ReadAllAvailable()

    def latestOffset(self, start: dict[str, int], limit: ReadLimit) -> dict[str, int]:
        return {"rows": Path(self.path).stat().st_size}

    def partitions(self, start: dict[str, int], end: dict[str, int]) -> list[InputPartition]:
        return [_Rows(end["rows"] - start["rows"])]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        assert isinstance(partition, _Rows)
        schema = changelog_schema()
        columns = [pa.nulls(partition.count, field.type) for field in schema]
        yield pa.RecordBatch.from_arrays(columns, schema=schema)


class _StreamWriter(DataSourceStreamArrowWriter):
    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        for _ in iterator:
            pass
        return WriterCommitMessage()

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        pass

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        pass


class ReadyBatches(DataSource):
    """`format("ready")`; the option `path` is a directory of Arrow files, one for each task.

    For a stream it is the file whose bytes count.
    """

    @classmethod
    def name(cls) -> str:
        """Return the name of the format."""
        return "ready"

    def schema(self) -> StructType:
        """Return the columns of a log."""
        return spark_schema(include_headers=False)

    def reader(self, schema: StructType) -> DataSourceReader:
        """Return the reader; it has all columns."""
        return _Reader(self.options["path"])

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        """Return the micro-batch reader."""
        return _StreamReader(self.options["path"])

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamArrowWriter:
        """Return the sink."""
        return _StreamWriter()


def write_ready(path: Path, batches: Iterator[pa.RecordBatch], rows: int) -> None:
    """Write an Arrow file in batches of `rows` each, but for the last."""
    table = pa.Table.from_batches(batches).combine_chunks()
    with pa.ipc.new_file(path, table.schema) as file:
        file.write_table(table, max_chunksize=rows)
