"""Names and schemas as the text of Spark's SQL has them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kafkalog.errors import InvalidInputError
from kafkalog.storage_engine.fs import files

if TYPE_CHECKING:
    from pyspark.sql.types import StructType


def quoted(name: str) -> str:
    """Return a column's name as SQL writes it, whatever characters it has."""
    return "`" + name.replace("`", "``") + "`"


def fields_of(schema: StructType | str, argument: str) -> StructType:
    """Return a schema, which may be text in DDL; it has at least one field.

    Errors begin with the name of the `argument`. Raises InvalidInputError.
    """
    from pyspark.sql.types import DataType, StructType

    found: DataType | str = schema
    if isinstance(schema, str):
        try:
            found = StructType.fromDDL(schema)
        except Exception as fault:  # Spark's parser has several kinds
            files.pass_on(fault)
            reason = str(fault).strip().partition("\n")[0]
            raise InvalidInputError(f"{argument}={schema!r} is no schema: {reason}") from None
    if not isinstance(found, StructType) or not found.fields:
        raise InvalidInputError(
            f"{argument}: expected the schema of a struct, as in 'id int, name string', found "
            f"{schema!r}"
        )
    return found
