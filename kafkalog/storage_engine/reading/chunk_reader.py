"""Convert the records of chunks to Arrow batches, in one of two ways.

If all records of the batches are wanted, one kernel finds them and copies their columns. It does so
in one pass over the bytes, with the same checks as an index. Most reads of a whole range take this
way. The other way builds a table of the records first (`arrow_batches`). It serves chosen keys,
headers, the ends of a range, messages v0 and v1, and batches of large values.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from kafkalog.storage_engine.format import layout
from kafkalog.storage_engine.records import codes, columns
from kafkalog.storage_engine.records.columns import ARROW_SIZE, arrow_batches, row_size
from kafkalog.storage_engine.records.kernels import decode
from kafkalog.storage_engine.records.sections import Sections, find_sections, index_sections
from kafkalog.storage_engine.records.tables import BatchTable, ChunkFault, Integers
from kafkalog.storage_engine.segment import open_segment

if TYPE_CHECKING:
    import numpy.typing as npt
    import pyarrow as pa

    from kafkalog.storage_engine.records.chosen_keys import ChosenKeys
    from kafkalog.storage_engine.segment.open_segment import Chunk

_COLUMNS: Final = {"key", "value", "topic", "partition", "offset", "timestamp", "timestampType"}
_ROOM: Final = 1 << 6
"""Initial rows of a column of constants; doubled for larger batches."""


@dataclass(frozen=True, slots=True)
class _Constant:
    """A column of one value: an integer, or for `topic` its name."""

    name: str
    value: int


class ChunkReader:
    """Convert the chunks of one partition to Arrow batches of `schema`."""

    def __init__(
        self, place: tuple[str, int], schema: pa.Schema, keys: ChosenKeys | None = None
    ) -> None:
        """`place` is topic and partition; with `keys`, only records of these keys are read."""
        self._place = place
        self._schema = schema
        self._keys = keys
        self._constants: dict[_Constant, pa.Array] = {}
        names = set(schema.names)
        is_plain = bool(names) and names <= _COLUMNS  # without columns, others count the rows
        self._is_all = is_plain and keys is None

    def read(self, chunk: Chunk, is_wanted: npt.NDArray[np.bool_]) -> Iterator[pa.RecordBatch]:
        """Yield the records of the wanted batches (b) that lie in the chunk's range.

        The yielded batches have a bounded size; none is empty. Raises CorruptBatchError.
        """
        table = chunk.table
        is_whole = chunk.start <= table.base_offsets[0] and table.last_offsets[-1] < chunk.end
        if self._is_all and is_whole and not table.has_messages:
            return self._straight(chunk, is_wanted)
        return self._chosen(chunk, is_wanted)

    def _chosen(self, chunk: Chunk, is_wanted: npt.NDArray[np.bool_]) -> Iterator[pa.RecordBatch]:
        for run, records in chunk.runs(is_wanted):
            rows = records.rows_between(chunk.start, chunk.end)
            if self._keys is not None:
                rows = self._keys.rows(records, rows)
            yield from arrow_batches(records, run.table, rows, self._place, schema=self._schema)
            del run, records

    def _straight(self, chunk: Chunk, is_wanted: npt.NDArray[np.bool_]) -> Iterator[pa.RecordBatch]:
        table = chunk.table
        # Do not skip a negative count: reading the batch reports it.
        selection = (is_wanted & (table.counts != 0)).nonzero()[0]
        while len(selection):
            fault = ChunkFault(chunk.path, chunk.file_position, table, selection)
            run_size = open_segment.RUN_SIZE
            sections = find_sections(chunk.buffer, table, run_size=run_size, fault=fault)
            count = len(sections)
            if sections.size > ARROW_SIZE:  # the values' positions decide where to split it
                records = index_sections(sections)
                yield from arrow_batches(records, table, None, self._place, schema=self._schema)
                del records
            else:
                yield from self._batches(sections, table, selection[:count])
            del sections
            selection = selection[count:]

    def _batches(
        self, sections: Sections, table: BatchTable, selection: Integers
    ) -> Iterator[pa.RecordBatch]:
        import pyarrow as pa

        count, size = sections.record_count, sections.size
        numbers = columns.allocate(2 * count, np.int64).reshape(2, count)
        work = np.empty((codes.RECORD_FIELDS, 1), dtype=np.int64)
        key = _Values(count, size if "key" in self._schema.names else None)
        value = _Values(count, size if "value" in self._schema.names else None)
        status, section, position, key_nulls, value_nulls = decode.decode_records(
            sections.arena, sections.places, work, numbers, *key.arrays, *value.arrays
        )
        sections.check(status, section, position)
        made: list[pa.Array | _Constant] = []
        for field in self._schema:
            match field.name:
                case "key":
                    made.append(key.column(key_nulls))
                case "value":
                    made.append(value.column(value_nulls))
                case "offset":
                    made.append(columns.of_integers(numbers[0], field.type))
                case "timestamp":
                    made.append(columns.of_integers(numbers[1], field.type))
                case "timestampType":
                    made.append(_timestamp_types(table, sections, selection))
                case name:
                    made.append(_Constant(name, self._place[1]))
        per_row = row_size(self._schema.names, self._place[0])
        ends = per_row * np.arange(1, count + 1) + key.ends + value.ends
        first = 0
        while first < count:
            before = int(ends[first - 1]) if first else 0
            stop = max(first + 1, int(ends.searchsorted(before + ARROW_SIZE, side="right")))
            cut = [
                self._repeated(column, stop - first)
                if isinstance(column, _Constant)
                else column.slice(first, stop - first)
                for column in made
            ]
            yield pa.RecordBatch.from_arrays(cut, schema=self._schema)
            first = stop

    def _repeated(self, constant: _Constant, count: int) -> pa.Array:
        column = self._constants.get(constant)
        if column is None or len(column) < count:
            room = max(_ROOM, 1 << (count - 1).bit_length())
            if constant.name == "topic":
                column = columns.repeated_text(self._place[0], room)
            else:
                column = columns.repeated_integer(constant.value, room)
            self._constants[constant] = column
        return column.slice(0, count)


def _timestamp_types(
    table: BatchTable, sections: Sections, selection: Integers
) -> pa.Array | _Constant:
    """Return the column, as a constant if all rows have one value."""
    import pyarrow as pa

    types = (table.attributes[selection] & layout.TIMESTAMP_TYPE_BIT != 0).astype(np.int32)
    if types.min() == types.max():
        return _Constant("timestampType", int(types[0]))
    return columns.of_integers(np.repeat(types, sections.places[2]), pa.int32())


class _Values:
    """A column of keys or values to fill, or none; `size` bounds its bytes."""

    def __init__(self, count: int, size: int | None) -> None:
        self._count = count
        is_wanted = size is not None
        self._offsets = columns.allocate(count + 1 if is_wanted else 0, np.int32)
        self._validity = np.zeros((count + 7) // 8 if is_wanted else 0, dtype=np.uint8)
        self._data = columns.allocate(size or 0)
        self.arrays = (self._offsets, self._validity, self._data)

    @property
    def size(self) -> int:
        return int(self._offsets[-1]) if len(self._offsets) else 0

    @property
    def ends(self) -> npt.NDArray[np.int32] | int:
        return self._offsets[1:] if len(self._offsets) else 0

    def column(self, nulls: int) -> pa.Array:
        return columns.of_values(self._offsets, self._validity, self._data[: self.size], nulls)
