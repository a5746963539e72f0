"""The Parquet files of a materialized table: executors write them, and read those of a store.

Spark itself reads the files of a directory. It reads an object store only with a package of Hadoop
and settings of its own, so tasks fetch those files as they fetch a log's objects.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from kafkalog.errors import StorageError
from kafkalog.plain_errors import plain
from kafkalog.tables.table_place import KEY_COLUMN, table_place

if TYPE_CHECKING:
    import pyarrow as pa

WRITTEN: Final = "path string, rows long, size long, partitions array<int>, firsts array<long>"
"""What a task says of a file: also the offset of the first row of each partition in it."""
_GROUP_BYTES: Final = 64 << 20
"""Arrow bytes of a row group; a task holds one, and the file that it writes."""
_FILE_BYTES: Final = 128 << 20
_READ_ROWS: Final = 10_000


@plain
@dataclass(frozen=True, slots=True)
class TableWriter:
    """Writes the rows of a task into files; Spark sends a copy to each (`mapInArrow`)."""

    location: str
    options: Mapping[str, str]
    directory: str
    """The directory of the files, below the location."""
    place_columns: Sequence[str]
    """The columns with a row's key, partition and offset."""
    columns: Sequence[str]
    """The names of the columns in the files, in the order of those that the task gets."""

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Write the batches, and yield a row for each file. Raises StorageError."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        groups = self._groups(batches)
        for group in groups:
            buffer = pa.BufferOutputStream()
            firsts: dict[int, int] = {}
            rows = 0
            about = {KEY_COLUMN: self.place_columns[0].encode()}
            with pq.ParquetWriter(buffer, group.schema.with_metadata(about)) as writer:
                next_group: pa.Table | None = group
                while next_group is not None:
                    writer.write_table(next_group)
                    rows += next_group.num_rows
                    self._note_firsts(next_group, firsts)
                    next_group = next(groups, None) if buffer.tell() < _FILE_BYTES else None
            data = buffer.getvalue()
            name = f"{self.directory}/{uuid.uuid4().hex}.parquet"
            table_place(self.location, self.options).write(name, memoryview(data).cast("B"))
            yield pa.RecordBatch.from_pydict(
                {
                    "path": [name],
                    "rows": [rows],
                    "size": [data.size],
                    "partitions": pa.array([[*firsts]], pa.list_(pa.int32())),
                    "firsts": pa.array([[*firsts.values()]], pa.list_(pa.int64())),
                }
            )

    def _groups(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.Table]:
        """Yield the rows in tables of about `_GROUP_BYTES`; none is empty."""
        import pyarrow as pa

        held: list[pa.RecordBatch] = []
        size = 0
        for batch in batches:
            if batch.num_rows:
                held.append(batch.rename_columns([*self.columns]))
                size += batch.nbytes
            if size >= _GROUP_BYTES:
                yield pa.Table.from_batches(held)
                held, size = [], 0
        if held:
            yield pa.Table.from_batches(held)

    def _note_firsts(self, rows: pa.Table, firsts: dict[int, int]) -> None:
        _, partition, offset = self.place_columns
        found = rows.group_by(partition).aggregate([(offset, "min")])
        numbers = found.column(partition).to_pylist()
        for number, first in zip(numbers, found.column(f"{offset}_min").to_pylist(), strict=True):
            firsts[number] = min(first, firsts.get(number, first))


@plain
@dataclass(frozen=True, slots=True)
class TableReader:
    """Reads whole files of an object store; Spark sends a copy to each task (`mapInArrow`)."""

    location: str
    options: Mapping[str, str]
    names: Sequence[str]

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Yield the rows of the files for the batches with these numbers. Raises StorageError."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        place = table_place(self.location, self.options)
        for batch in batches:
            for number in batch.column(0).to_pylist():
                name = self.names[number]
                if (data := place.read(name)) is None:
                    raise StorageError(
                        f"{place}/{name}: the file of a materialized table is missing: a refresh "
                        "has replaced it, and its grace time is over. Call df() again."
                    )
                yield from pq.ParquetFile(pa.BufferReader(data)).iter_batches(_READ_ROWS)
