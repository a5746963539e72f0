"""The text of values for which a database has no type of its own: JSON documents and instants.

The text says all of the value, whatever the time zone of the session. It cuts no digit of a time,
and a null in a struct is a member. Two values never share one text.
"""

from __future__ import annotations

import functools
import operator
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from pyspark.sql import Column
    from pyspark.sql.types import DataType


JSON_TYPES: Final = frozenset({"array", "map", "struct", "variant"})
"""The types that become JSON documents, by their names in Spark."""
_OF_JSON: Final = {
    *("boolean", "byte", "short", "integer", "long", "float", "double", "decimal"),
    *("string", "varchar", "char", "binary", "date", "timestamp", "timestamp_ntz", "variant"),
    "void",
}
"""Parts of which Spark's JSON says everything, with the options below; binary in base64."""
_UTC: Final = {"timeZone": "UTC", "timestampFormat": "yyyy-MM-dd HH:mm:ss.SSSSSS'Z'"}
_WHOLE: Final = {
    "timeZone": "UTC",
    "timestampFormat": "yyyy-MM-dd'T'HH:mm:ss.SSSSSS'Z'",
    "timestampNTZFormat": "yyyy-MM-dd'T'HH:mm:ss.SSSSSS",
    "ignoreNullFields": "false",
}
_NOT_TEXT: Final = b"\xff"
"""Bytes that no target takes for text, so that it refuses the row and names its record."""


def instant_text(column: Column) -> Column:
    """Return timestamps as text in UTC with six decimals, as in `2024-11-03 05:30:00.000000Z`.

    SQLite's date functions read it, and its order is that of the instants. A cast would give the
    session's local time, which two instants share where a clock is put back.
    """
    from pyspark.sql import functions as F

    return F.when(column.isNotNull(), F.to_csv(F.struct(column), _UTC))


def document_text(column: Column, kind: DataType) -> Column:
    """Return values of one of `JSON_TYPES` as JSON documents.

    Times are in ISO 8601 with six decimals, instants in UTC with `Z`. Keys of maps are the texts of
    their values. A document with text that is not UTF-8 becomes text that is not UTF-8.
    """
    from pyspark.sql import functions as F

    text = F.to_json(_with_json_parts(column, kind), _WHOLE)
    valid = _is_valid(column, kind)
    if valid is None:
        return text
    return F.when(column.isNull() | valid, text).otherwise(F.lit(_NOT_TEXT).cast("string"))


def _with_json_parts(column: Column, kind: DataType) -> Column:
    """Return a value whose parts, and the keys of its maps, JSON can say."""
    from pyspark.sql import functions as F
    from pyspark.sql.types import ArrayType, MapType, StructType

    if _is_of_json(kind):
        return column
    if isinstance(kind, StructType):
        fields = [_with_json_parts(column[f.name], f.dataType).alias(f.name) for f in kind]
        return F.when(column.isNotNull(), F.struct(*fields))
    if isinstance(kind, ArrayType):
        return F.transform(column, lambda each: _with_json_parts(each, kind.elementType))
    if isinstance(kind, MapType):
        named = F.transform_keys(column, lambda key, _: _name_text(key, kind.keyType))
        return F.transform_values(named, lambda _, each: _with_json_parts(each, kind.valueType))
    return column.cast("string")


def _is_of_json(kind: DataType) -> bool:
    from pyspark.sql.types import ArrayType, MapType, StructType

    if isinstance(kind, StructType):
        return all(_is_of_json(field.dataType) for field in kind)
    if isinstance(kind, ArrayType):
        return _is_of_json(kind.elementType)
    if isinstance(kind, MapType):
        return kind.keyType.typeName() == "string" and _is_of_json(kind.valueType)
    return kind.typeName() in _OF_JSON


def _name_text(key: Column, kind: DataType) -> Column:
    """Return the key of a map as the name of a member."""
    from pyspark.sql import functions as F

    name = kind.typeName()
    if name in JSON_TYPES:
        return F.to_json(_with_json_parts(key, kind), _WHOLE)
    if name == "binary":
        return F.base64(key)
    if name in {"timestamp", "timestamp_ntz"}:
        # The text between the brackets and quotes of a list of one.
        listed = F.to_json(F.array(key), _WHOLE)
        return F.substring(listed, F.lit(3), F.length(listed) - 4)
    return key.cast("string")


def _is_valid(column: Column, kind: DataType) -> Column | None:
    """Return whether all text of a value is UTF-8, true or null if so; None if it has no text."""
    from pyspark.sql import functions as F
    from pyspark.sql.types import ArrayType, MapType, StructType

    if isinstance(kind, StructType):
        fields = [_is_valid(column[field.name], field.dataType) for field in kind]
        known = [F.coalesce(each, F.lit(True)) for each in fields if each is not None]
        return functools.reduce(operator.and_, known) if known else None
    if isinstance(kind, ArrayType):
        return _are_valid(column, kind.elementType)
    if isinstance(kind, MapType):
        sides = [
            _are_valid(F.map_keys(column), kind.keyType),
            _are_valid(F.map_values(column), kind.valueType),
        ]
        known = [each for each in sides if each is not None]
        return functools.reduce(operator.and_, known) if known else None
    return F.is_valid_utf8(column) if kind.typeName() in {"string", "varchar", "char"} else None


def _are_valid(values: Column, kind: DataType) -> Column | None:
    from pyspark.sql import functions as F

    if _is_valid(F.lit(None), kind) is None:
        return None

    def is_valid(each: Column) -> Column:
        found = _is_valid(each, kind)
        assert found is not None
        return F.coalesce(found, F.lit(True))

    return F.coalesce(F.forall(values, is_valid), F.lit(True))
