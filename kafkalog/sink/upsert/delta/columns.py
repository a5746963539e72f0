"""The columns of a Delta table, and rows that are to fit them.

Rows are cast to the table's types, whole columns at a time. Only if that fails, halving finds the
row that does not fit, so that the error can name its record.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kafkalog.errors import InvalidInputError
from kafkalog.sink.upsert.rows import DELETED, RECORD

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.types import DataType, StructType

__all__ = ["DeltaColumns", "delta_type", "first_fault", "record_of", "table_schema"]

_PLAIN = {
    *("binary", "string", "boolean", "byte", "short", "integer", "long", "float", "double"),
    *("decimal", "date", "timestamp", "timestamp_ntz"),
}

_DIGITS_MAX = 76
"""Digits of Arrow's widest decimal."""
_DAYS = (-719_162, 2_932_897)
"""Days from 1970 to the years 1 and 10000: readers cannot open a table with a time outside them."""
_PER_DAY = {"s": 86_400, "ms": 86_400_000, "us": 86_400_000_000, "ns": 86_400_000_000_000}


def delta_type(kind: DataType) -> DataType | None:
    """Return the Delta type for values of `kind`; None if they are stored as text."""
    from pyspark.sql import types

    nested = {
        types.ArrayType: ("elementType",),
        types.MapType: ("keyType", "valueType"),
    }.get(type(kind))
    if nested is not None:
        inner = [delta_type(getattr(kind, name)) for name in nested]
    elif isinstance(kind, types.StructType):
        inner = [delta_type(field.dataType) for field in kind.fields]
    else:
        return kind if kind.typeName() in _PLAIN else None
    return None if None in inner else kind


def table_schema(names: Sequence[str], kinds: Sequence[DataType]) -> StructType:
    """Return the schema of a new table; its JSON is Delta's own, and only `key` is not null."""
    from pyspark.sql.types import StructField, StructType

    return StructType(
        [
            StructField(name, kind, nullable=name != "key")
            for name, kind in zip(names, kinds, strict=True)
        ]
    )


@dataclass(frozen=True, slots=True)
class DeltaColumns:
    """The columns of a table that the rows fill."""

    where: str
    """The table, as errors name it."""
    fields: tuple[pa.Field, ...]
    """The table's fields, in the order of the rows' columns."""

    @classmethod
    def of(cls, where: str, schema: pa.Schema, names: Sequence[str]) -> DeltaColumns:
        """Find the rows' columns in the table, in any letter case.

        Raises InvalidInputError for a missing column, and a further one that may not be null.
        """
        by_name = {name.lower(): name for name in reversed(schema.names)}
        missing = [name for name in names if name.lower() not in by_name]
        if missing:
            raise InvalidInputError(
                f"{where} has the columns {', '.join(schema.names)}; missing: {', '.join(missing)}"
            )
        fields = tuple(schema.field(by_name[name.lower()]) for name in names)
        known = {field.name for field in fields}
        required = [f.name for f in schema if not f.nullable and f.name not in known]
        if required:
            raise InvalidInputError(
                f"{where}: column {required[0]} may not be null, and the rows do not have it; they "
                f"have {', '.join(names)}"
            )
        return cls(where, fields)

    @property
    def names(self) -> list[str]:
        """The rows' columns, spelled as in the table."""
        return [field.name for field in self.fields]

    @property
    def schema(self) -> pa.Schema:
        """The schema of fitting rows: `kl_deleted` and the table's types."""
        import pyarrow as pa

        return pa.schema(
            [pa.field(DELETED, pa.bool_()), *(pa.field(f.name, f.type) for f in self.fields)]
        )

    def fit(self, rows: pa.RecordBatch) -> list[pa.RecordBatch]:
        """Cast rows (`kl_deleted`, the record's columns, the table's) to the table's types.

        The first batch has the rows to store, the second the deletions, whose only value is the
        key. Raises InvalidInputError that names the first record that does not fit.
        """
        import pyarrow.compute as pc

        deleted = rows.column(0)
        fitting = [
            self._fitting(part, is_deletion)
            for part, is_deletion in (
                (rows.filter(pc.invert(deleted)), False),
                (rows.filter(deleted), True),
            )
            if part.num_rows
        ]
        return fitting

    def _fitting(self, rows: pa.RecordBatch, is_deletion: bool) -> pa.RecordBatch:
        import pyarrow as pa

        columns = [rows.column(0)]
        for place, field in enumerate(self.fields):
            if is_deletion and field.name.lower() != "key":
                columns.append(pa.nulls(rows.num_rows, field.type))
            else:
                columns.append(self._column(rows, len(RECORD) + 1 + place, field))
        return pa.RecordBatch.from_arrays(columns, schema=self.schema)

    def _column(self, rows: pa.RecordBatch, place: int, field: pa.Field) -> pa.Array:
        import pyarrow as pa

        column = rows.column(place)
        if not field.nullable and column.null_count:
            row = column.is_null().index(True).as_py()
            raise InvalidInputError(
                f"{record_of(rows, row)}: {self.where}: column {field.name} may not be null"
            )
        if _has_text(column.type) and not _is_utf8(column):
            row = first_fault(len(column), lambda start, n: _is_utf8(_copied(column, start, n)))
            raise InvalidInputError(
                f"{record_of(rows, row)}: {self.where}: column {field.name} is text, the row "
                "brings bytes that are not UTF-8; keep them as binary, or make text of them with "
                "select="
            )
        if not _is_of_our_years(column):
            row = first_fault(
                len(column), lambda start, n: _is_of_our_years(column.slice(start, n))
            )
            raise InvalidInputError(
                f"{record_of(rows, row)}: {self.where}: column {field.name} would make the table "
                f"unreadable by {_number(column[row])} from 1970, a time outside the years 1 to "
                "9999; keep it as a number, or make it null with select="
            )
        if column.type == field.type:
            return column
        if not _is_near(column.type, field.type):
            raise InvalidInputError(
                f"{record_of(rows, 0)}: {self.where}: column {field.name} is {field.type}, the row "
                f"brings {column.type}; cast it with select="
            )
        try:
            return _cast(column, field.type)
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
            row = first_fault(
                len(column), lambda start, n: _fits(column.slice(start, n), field.type)
            )
            raise InvalidInputError(
                f"{record_of(rows, row)}: {self.where}: column {field.name} is {field.type}, which "
                f"does not hold {str(column[row].as_py())[:100]}"
            ) from None


def record_of(rows: pa.RecordBatch, row: int) -> str:
    """Name the record of a row, as far as it is known."""
    topic, partition, offset = (rows.column(place)[row].as_py() for place in (1, 2, 3))
    if offset is None:
        return "a record (select drops topic, partition and offset)"
    return f"{topic}-{partition} offset {offset}"


def first_fault(count: int, is_good: Callable[[int, int], bool]) -> int:
    """Return the first bad row of `count`, by halving with `is_good(start, count)`."""
    low, high = 0, count
    while high - low > 1:
        middle = (low + high) // 2
        if is_good(low, middle - low):
            low = middle
        else:
            high = middle
    return low


def _cast(column: pa.Array, wanted: pa.DataType) -> pa.Array:
    return column.cast(_between(column.type, wanted)).cast(wanted)


def _fits(column: pa.Array, wanted: pa.DataType) -> bool:
    import pyarrow as pa

    try:
        _cast(column, wanted)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
        return False
    return True


def _between(given: pa.DataType, wanted: pa.DataType) -> pa.DataType:
    """Return an intermediate type through which a cast to `wanted` keeps each value, or fails.

    Arrow casts integers to a decimal only if the whole integer type fits. It turns a decimal that
    overflows 38 digits into another number, so decimals are cast through 76 digits.
    """
    import pyarrow as pa
    from pyarrow import types as t

    if t.is_decimal(wanted) and given != wanted:
        return pa.decimal256(_DIGITS_MAX, wanted.scale)
    if t.is_struct(given):
        pairs = zip(given, wanted, strict=True)
        return pa.struct([mine.with_type(_between(mine.type, other.type)) for mine, other in pairs])
    if t.is_map(given):
        return pa.map_(
            _between(given.key_type, wanted.key_type), _between(given.item_type, wanted.item_type)
        )
    if _is_list(given):
        field = given.value_field.with_type(_between(given.value_type, wanted.value_type))
        return pa.large_list(field) if t.is_large_list(given) else pa.list_(field)
    return given


def _number(time: pa.Scalar) -> str:
    import pyarrow as pa

    if pa.types.is_date(time.type):
        return f"{time.cast(pa.int32()).as_py()} days"
    return f"{time.cast(pa.int64()).as_py()} {time.type.unit}"


def _is_of_our_years(column: pa.Array) -> bool:
    import pyarrow as pa
    import pyarrow.compute as pc

    if pa.types.is_date32(column.type):
        numbers, per_day = column.cast(pa.int32()), 1
    elif pa.types.is_timestamp(column.type):
        numbers, per_day = column.cast(pa.int64()), _PER_DAY[column.type.unit]
    else:
        return True
    ends = pc.min_max(numbers).as_py()
    first, end = (days * per_day for days in _DAYS)
    return ends["min"] is None or (first <= ends["min"] and ends["max"] < end)


def _has_text(kind: pa.DataType) -> bool:
    return _is_text(kind) or any(
        _has_text(kind.field(place).type) for place in range(kind.num_fields)
    )


def _is_utf8(column: pa.Array) -> bool:
    import pyarrow as pa

    try:
        column.validate(full=True)
    except pa.ArrowInvalid:
        return False
    return True


def _copied(column: pa.Array, start: int, count: int) -> pa.Array:
    """Return a copy of some rows of a column; a slice would share the bytes behind them."""
    import pyarrow as pa

    return column.take(pa.array(range(start, start + count), pa.int64()))


def _is_near(given: pa.DataType, wanted: pa.DataType) -> bool:
    """Return whether a cast between the types keeps each value, or fails."""
    from pyarrow import types as t

    if t.is_struct(given) and t.is_struct(wanted):
        return [field.name for field in given] == [field.name for field in wanted] and all(
            _is_near(mine.type, other.type) for mine, other in zip(given, wanted, strict=True)
        )
    if t.is_map(given) and t.is_map(wanted):
        return _is_near(given.key_type, wanted.key_type) and _is_near(
            given.item_type, wanted.item_type
        )
    if _is_list(given) and _is_list(wanted):
        return _is_near(given.value_type, wanted.value_type)
    if t.is_timestamp(given) and t.is_timestamp(wanted):
        return (given.tz is None) == (wanted.tz is None)
    if t.is_integer(given):
        return bool(t.is_integer(wanted) or t.is_decimal(wanted) or t.is_float64(wanted))
    if t.is_floating(given):
        return bool(t.is_floating(wanted) and given.bit_width <= wanted.bit_width)
    same = (t.is_decimal, _is_text, _is_bytes)
    return given == wanted or any(kind(given) and kind(wanted) for kind in same)


def _is_list(kind: pa.DataType) -> bool:
    from pyarrow import types as t

    return bool(t.is_list(kind) or t.is_large_list(kind))


def _is_text(kind: pa.DataType) -> bool:
    from pyarrow import types as t

    return bool(t.is_string(kind) or t.is_large_string(kind))


def _is_bytes(kind: pa.DataType) -> bool:
    from pyarrow import types as t

    return bool(t.is_binary(kind) or t.is_large_binary(kind))
