"""JSON documents of given fields, decoded by Spark's `from_json`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from kafkalog.values.bad_values import with_reason, with_struct
from kafkalog.values.framing import body_of, is_framed

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame
    from pyspark.sql.types import DataType, StructType


_CORRUPT: Final = "kl_corrupt"


class JsonDocuments:
    """The JSON documents of `fields` in a `column`; `options` are those of `from_json`.

    The five bytes that Confluent's serializers put before a document are passed over. A document
    cannot begin with a zero byte.

    With `is_strict` false, a document that does not parse gives what Spark makes of it: nulls, or
    the fields before the fault. It is then never bad. Reasons name `form`, by default the fields.
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
        self._read: Any = _widened(fields)
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
        from pyspark.sql.types import StructType

        text = self.text()
        if not self._is_strict:
            # Spark Connect refuses an empty map.
            document = F.from_json(text, self._read, self._options or None)
            frame = with_reason(df, F.lit(None).cast("string")).withColumn(self._column, document)
            if self._read != self.fields:
                frame = with_struct(frame, self._column, F.struct(*self._values(self._column)))
            return frame
        whole = StructType(list(self._read.fields)).add(_CORRUPT, "string")
        # Spark's parser would put U+FFFD for bytes that are no UTF-8.
        options = {**self._options, "columnNameOfCorruptRecord": _CORRUPT, "mode": "PERMISSIVE"}
        document = F.from_json(F.try_validate_utf8(text), whole, options)
        struct, begin = f"kl_{self._column}", f"kl_{self._column}_text"
        # Each step is its own projection, so that Spark parses once, not once per field.
        frame = df.withColumns(
            {struct: document, begin: F.substring(F.make_valid_utf8(text), 1, 100)}
        )
        is_wrong = F.col(struct).isNull() | F.col(struct)[_CORRUPT].isNotNull()
        for each, value in zip(self._read, self._values(struct), strict=True):
            if each.dataType != self.fields[each.name].dataType:
                read = F.col(struct)[each.name].cast("string")
                is_wrong |= ~read.eqNullSafe(value.cast("string"))
        kind = self._form.simpleString()
        words = f"the {self._column} is not a JSON document of {kind}; found '"
        reason = F.concat(F.lit(words), F.col(begin), F.lit("'"))
        frame = with_reason(frame, F.when(F.col(self._column).isNotNull() & is_wrong, reason))
        frame = with_struct(frame, self._column, F.struct(*self._values(struct)))
        return frame.drop(struct, begin)

    def _values(self, struct: str) -> list[Column]:
        """Return the fields of decoded structs; a number too large for its field is null."""
        from pyspark.sql import functions as F

        return [
            F.col(struct)[each.name].try_cast(each.dataType).alias(each.name)
            if each.dataType != self._read[each.name].dataType
            else F.col(struct)[each.name].alias(each.name)
            for each in self.fields
        ]


def _widened(kind: DataType) -> DataType:
    """Return a type with `smallint` for `tinyint`: Spark's parser makes -56 of 200."""
    from pyspark.sql import types as T

    if isinstance(kind, T.ByteType):
        return T.ShortType()
    if isinstance(kind, T.ArrayType):
        return T.ArrayType(_widened(kind.elementType), kind.containsNull)
    if isinstance(kind, T.StructType):
        return T.StructType(
            [T.StructField(each.name, _widened(each.dataType), each.nullable) for each in kind]
        )
    return kind
