"""A Python data source that only hands over: what no source in Python can be faster than.

Its batches lie ready in Arrow files, which each task maps into memory, so nothing is read, decoded
or copied in Python. As a stream it gives one row per micro-batch, made without reading anything.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
from pyspark.sql.types import StructType

from kafkalog.datasource.columns import spark_schema

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


class ReadyBatches(DataSource):
    """`format("ready")`; the option `path` is a directory of Arrow files, one for each task."""

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


def write_ready(path: Path, batches: Iterator[pa.RecordBatch], rows: int) -> None:
    """Write an Arrow file in batches of `rows` each, but for the last."""
    table = pa.Table.from_batches(batches).combine_chunks()
    with pa.ipc.new_file(path, table.schema) as file:
        file.write_table(table, max_chunksize=rows)
