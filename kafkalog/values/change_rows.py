"""The rows of change events: which event gives one, which deletes one, and which is bad."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from hashlib import md5
from typing import TYPE_CHECKING, Final, TypeAlias
from uuid import UUID

from kafkalog.values.bad_values import BAD, with_reason
from kafkalog.values.connect_types import Conversion, converted

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame
    from pyspark.sql.types import DataType


_UNAVAILABLE: Final = "kl_unavailable"
_ROW: Final = "kl_row"
_OPERATIONS: Final = ("r", "c", "u", "d")

Typed: TypeAlias = "Callable[[Column, Column | None], Conversion]"
"""From what is written, and what the event says of it, to the value of a column."""


@dataclass(frozen=True)
class RowField:
    """A field of a row: as the event has it, and as the column of a table has it.

    `written` is the field in the event, of the type `kind`, and `about` what the event's schema
    says of it. `hint` turns that into words for the reason of a bad record.
    """

    name: str
    written: Column
    kind: DataType
    typed: Typed
    about: Column | None = None
    hint: Callable[[Column, Column | None], Column] | None = None


@dataclass(frozen=True)
class ChangeRows:
    """The row of a record, as expressions.

    `document` is null for a tombstone, and `op` for a row that is in no event. `has_after` is
    whether the event has a row after the change. A row that is in no event may have `__op` and
    `__deleted`: `marked_op` and `marked_deleted` are their text.
    """

    document: Column
    fields: Sequence[RowField]
    op: Column
    has_after: Column
    marked_op: Column
    marked_deleted: Column
    placeholder: bytes
    added: dict[str, Column] = field(default_factory=dict)
    unavailable_column: str | None = None
    foreign: Column | None = None
    """Why a document without any value in the fields is no row; None if it always is one."""

    def applied(self, df: DataFrame, column: str) -> DataFrame:
        """Return `df` with the row in a column, null for none, and with reasons in `kl_bad`.

        A row that has the placeholder is bad, unless the names of such fields get a column.
        """
        from pyspark.sql import functions as F

        before = df.columns
        df, fields, missing = self._measured(df)
        df, typed = converted(df, [each.typed(each.written, each.about) for each in fields])
        pairs = list(zip(fields, missing, strict=True))
        values = {f.name: F.when(~m, t) for (f, m), t in zip(pairs, typed, strict=True)}
        names = F.array(*[F.when(m, F.lit(f.name)) for f, m in pairs])
        absent = F.filter(names, lambda name: name.isNotNull())
        df = df.withColumn(_UNAVAILABLE, F.when(F.size(absent) > 0, absent))
        values |= self.added
        if self.unavailable_column is not None:
            values[self.unavailable_column] = F.col(_UNAVAILABLE)
        row = F.struct(*[value.alias(name) for name, value in values.items()])
        is_row = self.document.isNotNull() & ~self._is_deleted()
        df = df.withColumn(_ROW, F.when(is_row, row))
        reasons = [self._fault_of_event(fields), F.when(is_row, _misfit(fields, missing))]
        if self.unavailable_column is None:
            reasons.append(F.when(is_row & F.col(_UNAVAILABLE).isNotNull(), _unavailable()))
        df = with_reason(df, F.when(self.document.isNotNull(), F.coalesce(*reasons)))
        df = df.withColumn(column, F.when(F.col(BAD).isNull(), F.col(_ROW)))
        return df.select(*dict.fromkeys([*before, BAD]))

    def _measured(self, df: DataFrame) -> tuple[DataFrame, list[RowField], list[Column]]:
        """Return `df` with columns of what is written, and whether it is the placeholder."""
        from pyspark.sql import functions as F

        made: dict[str, Column] = {}
        fields: list[RowField] = []
        for number, each in enumerate(self.fields):
            written, about = f"kl_written_{number}", f"kl_about_{number}"
            made[written] = each.written
            known: Column | None = None
            if each.about is not None:
                made[about], known = each.about, F.col(about)
            fields.append(replace(each, written=F.col(written), about=known))
        df = df.withColumns(made)
        is_missing = {
            f"kl_missing_{number}": _is_placeholder(each.written, each.kind, self.placeholder)
            for number, each in enumerate(fields)
        }
        return df.withColumns(is_missing), fields, [F.col(name) for name in is_missing]

    def _is_deleted(self) -> Column:
        from pyspark.sql import functions as F

        is_deletion = F.when(self.op.isNull(), F.lower(self.marked_deleted) == "true")
        is_deletion |= F.coalesce(self.op, self.marked_op) == "d"
        return F.coalesce(is_deletion, F.lit(False))

    def _fault_of_event(self, fields: Sequence[RowField]) -> Column:
        """Return why a document says nothing of one row; null if it does."""
        from pyspark.sql import functions as F

        is_nothing = F.lit(True)
        for each in fields:
            is_nothing &= each.written.isNull()
        op = F.coalesce(self.op, self.marked_op)
        is_marked = self.op.isNull() & ~F.lower(self.marked_deleted).isin("true", "false")
        return (
            F.when(
                op == "t",
                "the table was truncated (op t), and no key says which rows are gone. Delete all "
                "of them, or let the connector leave truncations out (skipped.operations)",
            )
            .when(
                ~op.isin(*_OPERATIONS),
                F.format_string("op %s changes no row (expected r, c, u or d)", op),
            )
            .when(
                is_marked,
                F.format_string("__deleted is %s (expected true or false)", self.marked_deleted),
            )
            .when(
                (self.op != "d") & ~self.has_after,
                F.format_string("the event of op %s has no row after the change", self.op),
            )
            .when(
                is_nothing & ~self._is_deleted(),
                F.lit(None).cast("string") if self.foreign is None else self.foreign,
            )
        )


def _unavailable() -> Column:
    """Return why a row is bad that has the placeholder."""
    from pyspark.sql import functions as F

    return F.format_string(
        "the event has no value of %s, which is large and did not change: Debezium put its "
        "placeholder there",
        F.array_join(_UNAVAILABLE, ", "),
    )


def _misfit(fields: Sequence[RowField], missing: Sequence[Column]) -> Column:
    """Return which field was written and has no value in its column."""
    from pyspark.sql import functions as F

    reason = F.lit(None).cast("string")
    for each, is_missing in zip(fields, missing, strict=True):
        is_lost = each.written.isNotNull() & F.col(_ROW)[each.name].isNull()
        found = F.substring(each.written.cast("string"), 1, 40)
        hint = F.lit("") if each.hint is None else each.hint(each.written, each.about)
        name = each.name.replace("%", "%%")
        words = f"the field {name} does not fit its column (found %s%s)"
        told = F.when(is_lost & ~is_missing, F.format_string(words, found, hint))
        reason = F.coalesce(reason, told)
    return reason


def _is_placeholder(value: Column, kind: DataType, content: bytes) -> Column:
    """Return whether a value stands for one that the database did not give.

    Its forms by type are those of Debezium's UnchangedToastedPlaceholder; JSON has bytes in base64.
    """
    from pyspark.sql import functions as F
    from pyspark.sql import types as T

    text = content.decode(errors="replace")
    found: Column | None = None
    if isinstance(kind, T.StringType):
        found = (value == text) | (value == F.base64(F.lit(content)))
    elif isinstance(kind, T.BinaryType):
        found = value == F.lit(content)
    elif isinstance(kind, T.MapType) and isinstance(kind.keyType, T.StringType):
        found = F.map_keys(value) == F.array(F.lit(text))
    elif isinstance(kind, T.ArrayType):
        element = kind.elementType
        if isinstance(element, T.StringType):
            uuid = UUID(bytes=md5(content, usedforsecurity=False).digest(), version=3)
            forms = F.array(F.lit(text)), F.array(F.lit(str(uuid)))
            found = (value == forms[0]) | (value == forms[1])
        elif isinstance(element, T.BinaryType):
            found = value == F.array(F.lit(content))
        elif isinstance(element, (T.IntegerType, T.LongType)):
            numbers = [each - 256 if each > 127 else each for each in content]
            found = value == F.array(*[F.lit(number).cast(element) for number in numbers])
    return F.lit(False) if found is None else F.coalesce(found, F.lit(False))
