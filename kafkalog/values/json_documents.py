"""JSON documents of given fields, decoded by Spark's `from_json`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import reduce
from operator import or_
from typing import TYPE_CHECKING, Any, Final

from kafkalog.values.bad_values import with_reason, with_struct
from kafkalog.values.connect_types import is_in_years
from kafkalog.values.framing import body_of, is_framed

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame
    from pyspark.sql.types import DataType, StructField, StructType


_CORRUPT: Final = "kl_corrupt"
_ALL: Final = "kl_all"
_INFINITE: Final = "INF|Infinity"
"""How Spark's parser lets a document say that a number is infinite."""


class JsonDocuments:
    """The JSON documents of `fields` in a `column`; `options` are those of `from_json`.

    The five bytes that Confluent's serializers put before a document are passed over. A document
    cannot begin with a zero byte.

    With `is_strict` false, a document that does not parse gives what Spark makes of it: nulls, or
    the fields before the fault. It is then never bad. Else it is bad too if something follows it,
    or if Spark would round a decimal or take another value for one that is too large. Reasons name
    `form`, by default the fields.
    """

    def __init__(
        self,
        fields: StructType,
        column: str = "value",
        *,
        options: Mapping[str, str] | None = None,
        is_strict: bool = True,
        form: StructType | None = None,
    ) -> None:
        self.fields = fields
        self._form = form or fields
        self._read: Any = _widened(fields, with_decimals=is_strict)
        self._column = column
        self._options = dict(options or {})
        self._is_strict = is_strict

    def names(self) -> list[str]:
        """Return the fields of the structs."""
        return list(self.fields.names)

    def text(self) -> Column:
        """Return the documents as text."""
        from pyspark.sql import functions as F

        column = F.col(self._column).cast("binary")
        return F.when(is_framed(column), body_of(column)).otherwise(column).cast("string")

    def decoded(self, df: DataFrame) -> DataFrame:
        """Return `df` with structs in the column, and with reasons in `kl_bad`."""
        from pyspark.sql import functions as F
        from pyspark.sql.types import ArrayType, StructType

        text = self.text()
        if not self._is_strict:
            # Spark Connect refuses an empty map.
            document = F.from_json(text, self._read, self._options or None)
            frame = with_reason(df, F.lit(None).cast("string")).withColumn(self._column, document)
            if self._read != self.fields:
                values = self._values(F.col(self._column))
                frame = with_struct(frame, self._column, F.struct(*values))
            return frame
        # As the first of two elements, because Spark's parser passes over what follows a document.
        valid = F.try_validate_utf8(text)  # the parser would put U+FFFD for bytes that are no UTF-8
        listed = F.concat(F.lit(f'{{"{_ALL}":['), valid, F.lit("\n,null]}"))
        whole = StructType().add(_ALL, ArrayType(self._read)).add(_CORRUPT, "string")
        options = {**self._options, "columnNameOfCorruptRecord": _CORRUPT, "mode": "PERMISSIVE"}
        struct, shown = f"kl_{self._column}", f"kl_{self._column}_text"
        # Each step is its own projection, so that Spark parses once, not once per field.
        frame = df.withColumns(
            {struct: F.from_json(listed, whole, options), shown: F.make_valid_utf8(text)}
        )
        documents, corrupt = F.col(struct)[_ALL], F.col(struct)[_CORRUPT]
        document = F.get(documents, F.lit(0))
        values = self._values(document)
        is_wrong = document.isNull() | corrupt.isNotNull() | (F.size(documents) != 2)
        for each, value in zip(self._read, values, strict=True):
            is_wrong |= self._is_other(document[each.name], value, each, F.col(shown))
        kind = self._form.simpleString()
        words = f"the {self._column} is not a JSON document of {kind}; found '"
        reason = F.concat(F.lit(words), F.substring(shown, 1, 100), F.lit("'"))
        frame = with_reason(frame, F.when(F.col(self._column).isNotNull() & is_wrong, reason))
        frame = with_struct(frame, self._column, F.struct(*values))
        return frame.drop(struct, shown)

    def _is_other(self, read: Column, value: Column, field: StructField, text: Column) -> Column:
        """Return whether the value of a field is another one than the document has."""
        from pyspark.sql import functions as F

        is_beyond = _is_beyond(field.dataType, text)
        is_other = F.lit(False) if is_beyond is None else F.coalesce(is_beyond(read), F.lit(False))
        if field.dataType != self.fields[field.name].dataType:
            back = value.cast(field.dataType)
            if field.dataType.typeName() in {"array", "map", "struct"}:  # maps cannot be compared
                read, back = read.cast("string"), back.cast("string")
            is_other |= ~read.eqNullSafe(back)
        return is_other

    def _values(self, document: Column) -> list[Column]:
        """Return the fields of a decoded document; a number too large for its field is null."""
        return [
            document[each.name].try_cast(each.dataType).alias(each.name)
            if each.dataType != self._read[each.name].dataType
            else document[each.name].alias(each.name)
            for each in self.fields
        ]


def _widened(kind: DataType, *, with_decimals: bool) -> DataType:
    """Return a type with room for what Spark's parser would not refuse, but change.

    That is 200 as a `tinyint`, and a decimal with more digits than its type has after the point. A
    decimal of 38 digits can have no more.
    """
    from pyspark.sql import types as T

    def wide(part: DataType) -> DataType:
        return _widened(part, with_decimals=with_decimals)

    if isinstance(kind, T.ByteType):
        return T.ShortType()
    if isinstance(kind, T.DecimalType) and with_decimals:
        return T.DecimalType(38, 38 - kind.precision + kind.scale)
    if isinstance(kind, T.ArrayType):
        return T.ArrayType(wide(kind.elementType), kind.containsNull)
    if isinstance(kind, T.MapType):
        return T.MapType(kind.keyType, wide(kind.valueType), kind.valueContainsNull)
    if isinstance(kind, T.StructType):
        return T.StructType([T.StructField(f.name, wide(f.dataType), f.nullable) for f in kind])
    return kind


def _is_beyond(kind: DataType, text: Column) -> Callable[[Column], Column] | None:
    """Return what tells whether a number or a time in a value is too large; None if none can be.

    Spark's parser takes infinity for such a number, unless the document says so itself. It takes
    such a time for one in a year that no target has.
    """
    from pyspark.sql import functions as F
    from pyspark.sql import types as T

    if isinstance(kind, (T.FloatType, T.DoubleType)):
        return lambda value: (F.abs(value) == float("inf")) & ~text.rlike(_INFINITE)
    if isinstance(kind, (T.DateType, T.TimestampType, T.TimestampNTZType)):
        return lambda value: ~is_in_years(value, kind)
    if isinstance(kind, T.ArrayType):
        each = _is_beyond(kind.elementType, text)
        return None if each is None else lambda value: F.exists(value, each)
    if isinstance(kind, T.MapType):
        entry = _is_beyond(kind.valueType, text)
        return None if entry is None else lambda value: F.exists(F.map_values(value), entry)
    parts = {}
    if isinstance(kind, T.StructType):
        found = {each.name: _is_beyond(each.dataType, text) for each in kind}
        parts = {name: is_beyond for name, is_beyond in found.items() if is_beyond is not None}
    if not parts:
        return None
    return lambda value: reduce(
        or_, [F.coalesce(of_field(value[name]), F.lit(False)) for name, of_field in parts.items()]
    )
