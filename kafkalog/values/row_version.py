"""Versions of rows: which of two rows of a key counts, in whatever order they come.

The larger version wins, and of equal ones the row with the higher offset. A deletion has a version
as every row has. It is remembered for a while, so that an older row which comes late does not bring
its key back. A version that is null, or outside of the years 1 to 9999, has no place in this order,
and its record is bad. The merges of SQLite and PostgreSQL say the same in their own SQL.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from kafkalog.errors import InvalidInputError
from kafkalog.storage_engine.format.whole_number import whole_number
from kafkalog.values.connect_types import is_in_years
from kafkalog.values.spark_sql import quoted

if TYPE_CHECKING:
    from pyspark.sql import Column
    from pyspark.sql.types import DataType, StructType

DELETE_RETENTION_MS: Final = 86_400_000
"""How long a deletion is remembered at least, as Kafka's `delete.retention.ms`."""
_ORDERED: Final = {"byte", "short", "integer", "long", "date", "timestamp", "timestamp_ntz"}
"""Types whose values have one order in all targets."""


def check_has_no_events(version: str | None, *, has_events: bool) -> None:
    """Raise InvalidInputError if rows with versions are taken from change events."""
    if version is not None and has_events:
        raise InvalidInputError(
            "change events lack values of the row before, so they count in the order of the "
            "log (expected envelope or version, found both). Leave version out."
        )


def checked_retention(delete_retention_ms: int) -> int:
    """Return how long deletions are remembered (ms); raises InvalidInputError."""
    found = whole_number("delete_retention_ms", delete_retention_ms)
    if found < 0:
        raise InvalidInputError(f"delete_retention_ms: expected 0 or more, found {found}")
    return found


def check_version(name: str, columns: Sequence[str], schema: StructType) -> None:
    """Raise InvalidInputError if rows lack the column of versions, or its values have no order.

    The rows have the `columns` of their schema.
    """
    known = {each: schema[each].dataType for each in columns}
    if name not in known:
        raise InvalidInputError(
            f"version={name!r}: the rows have no such column (expected one of "
            f"{', '.join(known)}). Letter case counts."
        )
    if known[name].typeName() not in _ORDERED:
        raise InvalidInputError(
            f"version={name!r}: its column is {known[name].simpleString()} (expected a whole "
            "number, a date or a timestamp). Cast it with select."
        )


def lacks_version(name: str, kind: DataType) -> Column:
    """Return why a row is bad whose version, of type `kind`, has no place in the order; else null.

    The text of a year that has not four digits, which SQLite compares, has no order.
    """
    from pyspark.sql import functions as F

    version = F.col(quoted(name))
    reason = F.when(version.isNull(), f"its version {name} is null")
    if kind.typeName() not in {"date", "timestamp", "timestamp_ntz"}:
        return reason
    is_told = is_in_years(version, kind)
    return reason.when(~is_told, f"its version {name} is not in the years 1 to 9999")


def newest(version: str | None, offset: str) -> Column:
    """Return what is largest in the row of a key and partition that counts.

    `version` and `offset` name columns. Without a version the offset decides alone.
    """
    from pyspark.sql import functions as F

    order = F.col(quoted(offset))
    return order if version is None else F.struct(F.col(quoted(version)), order)
