"""JSON documents of given fields, decoded by Spark's `from_json`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from kafkalog.values.bad_values import with_reason, with_struct
from kafkalog.values.framing import body_of, is_framed

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.types import StructType


_CORRUPT: Final = "kl_corrupt"


class JsonDocuments:
    """The JSON documents of `fields` in a `column`; `options` are those of `from_json`.

    The five bytes that Confluent's serializers put before a document are passed over. A document
    cannot begin with a zero byte.

    With `is_strict` false, a document that does not parse gives what Spark makes of it: nulls, or
    the fields before the fault. It is then never bad.
    """

    def __init__(
        self,
        fields: StructType,
        column: str = "value",
        *,
        options: Mapping[str, str] | None = None,
        is_strict: bool = True,
    ) -> None:
        self.fields = fields
        self._column = column
        self._options = dict(options or {})
        self._is_strict = is_strict

    def names(self) -> list[str]:
        """Return the fields of the structs."""
        return list(self.fields.names)

    def decoded(self, df: DataFrame) -> DataFrame:
        """Return `df` with structs in the column, and with reasons in `kl_bad`."""
        from pyspark.sql import functions as F
        from pyspark.sql.types import StructType

        column = F.col(self._column).cast("binary")
        text = F.when(is_framed(column), body_of(column)).otherwise(column).cast("string")
        if not self._is_strict:
            # Spark Connect refuses an empty map.
            document = F.from_json(text, self.fields, self._options or None)
            return with_reason(df, F.lit(None).cast("string")).withColumn(self._column, document)
        whole = StructType(list(self.fields.fields)).add(_CORRUPT, "string")
        # Spark's parser would put U+FFFD for bytes that are no UTF-8.
        options = {**self._options, "columnNameOfCorruptRecord": _CORRUPT, "mode": "PERMISSIVE"}
        document = F.from_json(F.try_validate_utf8(text), whole, options)
        struct, begin = f"kl_{self._column}", f"kl_{self._column}_text"
        # Each step is its own projection, so that Spark parses once, not once per field.
        frame = df.withColumns(
            {struct: document, begin: F.substring(F.make_valid_utf8(text), 1, 100)}
        )
        is_wrong = F.col(struct).isNull() | F.col(struct)[_CORRUPT].isNotNull()
        kind = self.fields.simpleString()
        words = f"the {self._column} is not a JSON document of {kind}; found '"
        reason = F.concat(F.lit(words), F.col(begin), F.lit("'"))
        frame = with_reason(frame, F.when(F.col(self._column).isNotNull() & is_wrong, reason))
        fields = [F.col(struct)[name].alias(name) for name in self.fields.names]
        frame = with_struct(frame, self._column, F.struct(*fields))
        return frame.drop(struct, begin)
