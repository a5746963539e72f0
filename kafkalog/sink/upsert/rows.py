"""From the records of a micro-batch to the rows of a table.

In addition to the table's columns, each row says whether it is a deletion and which record it comes
from. Targets find the newer of two rows by it, and name the record that does not fit.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Unpack

from kafkalog.errors import InvalidInputError
from kafkalog.sink.upsert.kept_values import KEPT, filled
from kafkalog.sink.upsert.latest import latest_per_key, latest_rows, with_keys
from kafkalog.values.bad_values import BAD
from kafkalog.values.record_form import (
    DocumentArguments,
    RecordForm,
    document_arguments,
    names_in,
)
from kafkalog.values.row_marks import check_mark, deletion_column, is_bad, marks_deletion
from kafkalog.values.row_version import check_has_no_events, check_version, lacks_version
from kafkalog.values.spark_sql import fields_of, quoted

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame
    from pyspark.sql.types import DataType, StructType


DELETED = "kl_deleted"
RECORD = {
    "kl_topic": ("topic", "string"),
    "kl_partition": ("partition", "int"),
    "kl_offset": ("offset", "bigint"),
    "kl_timestamp": ("timestamp", "timestamp"),
}
"""The columns that name a row's record: (the source's column, its type)."""
REASON = "kl_reason"
"""The column that says why a record makes no row; null for one that does."""
REMEDY = (
    "Shape the rows with select or schema, change the table, or give "
    'on_bad_record="skip" or "deadletter:<topic>".'
)
"""What to do about a record that does not fit."""
_RAW = ("key", "value", "topic", "partition", "offset")


@dataclass(frozen=True, slots=True)
class UpsertRows:
    """Rows for a target."""

    frame: DataFrame
    """`kl_deleted` (boolean, never null), `kl_topic`, `kl_partition`, `kl_offset`, `kl_timestamp`
    (null where a `select` function drops them), `kl_kept` of change events, then the table's
    columns."""
    names: list[str]
    """The table's columns, the keys among them."""
    types: list[DataType]
    keys: list[str]
    """The columns of the table's key."""
    version: str | None = None
    """The column with the rows' versions, if they have any."""

    @property
    def keeps(self) -> bool:
        """Whether a row may lack values that the table keeps: the frame has a column `KEPT`."""
        return KEPT in self.frame.columns


class RowShape:
    """How records become rows.

    - By default the columns are `key` and `value` (binary), `topic`, `partition`, `offset`.
    - `schema` ("count int, name string", or a StructType): values are JSON documents of these
      fields; the columns are `key` and the fields. A missing field is null. Spark's `from_json`
      ignores text behind the document, and reads the escape of half a surrogate pair as "?".
    - `json`, `avro`: values are documents of these fields, see `kafkalog.value_columns`; the
      columns are `key` and the fields. With `key_json` or `key_avro` the keys are documents too,
      and their fields are columns of the table's key. A field of the value with the name of one of
      the key is left out.
    - `select` as a list of SQL expressions or Columns is evaluated for each record.
    - `select` as a function from DataFrame to DataFrame gets the latest record of each key.

    `key` names the columns of the table's key: by default `key`, or all fields of documents in the
    keys. With `schema` and other columns than `key`, the records' keys are JSON documents of those
    fields, and the values of the others.

    `select` must return the columns of the key, without nulls. The rows of a list are reduced to
    the latest per returned key. A function gets records reduced by the record's key, so its keys
    must be one-to-one with those. A row is a deletion if its boolean column `deleted` (any letter
    case) is true; that column is not stored. Without it, a row is a deletion if `value` is null:
    the record's value, or with a function the value in its result. A row is bad if its boolean
    column `bad` (any letter case) is true; that column is not stored either.

    `key_type` "string" reads the record's key as UTF-8 text; it goes without `select`.

    `version` names a column of the rows: the row with the larger version wins, whatever the order
    in which they come. Equal versions go by the higher offset. The column has whole numbers, or
    dates or timestamps of the years 1 to 9999. A row whose version is null is bad, also a deletion.
    A plain tombstone lacks a version, so let `select` make one, for example of the record's
    timestamp. `select` is then a list, without `envelope`.

    A record is bad if its value, or its key, is not a document of the fields, or if a field of the
    key is null. It is also bad if `select` says so, or makes a null key. It fails the micro-batch,
    and the error names the record. With `leaves_out_bad` it makes no row, and an earlier record of
    its key counts as the latest.
    """

    def __init__(
        self,
        *,
        select: Callable[[DataFrame], DataFrame] | Sequence[str | Column] | None = None,
        schema: StructType | str | None = None,
        key_type: str = "binary",
        key: str | Sequence[str] = "key",
        leaves_out_bad: bool = False,
        version: str | None = None,
        **documents: Unpack[DocumentArguments],
    ) -> None:
        if isinstance(key, (str, list, tuple)):
            self._keys = [key] if isinstance(key, str) else list(key)
        else:
            self._keys = []
        self._documents = document_arguments(documents)
        self._form: RecordForm | None = None
        if (select is not None) + (schema is not None) + bool(self._documents) > 1:
            raise InvalidInputError(
                "an upsert takes select or schema, not both, and json or avro without them"
            )
        if isinstance(select, str):
            raise InvalidInputError(f"select is a list of expressions or a function: [{select!r}]")
        if key_type not in {"binary", "string"}:
            raise InvalidInputError(f'key_type is "binary" or "string", not {key_type!r}')
        if select is not None and key_type != "binary":
            raise InvalidInputError("key_type goes without select, which makes the key itself")
        self._has_key_documents = not self._documents.keys().isdisjoint({"key_json", "key_avro"})
        if self._has_key_documents and key_type != "binary":
            raise InvalidInputError("key_type goes without key_json and key_avro")
        are_names = all(isinstance(name, str) and name for name in self._keys)
        lowered = {name.lower() for name in self._keys if isinstance(name, str)}
        if not are_names or not 0 < len(self._keys) == len(lowered):
            raise InvalidInputError(f"key names one or more different columns, not {key!r}")
        makes_key = select is not None or self._has_key_documents
        if not self._has_own_key and not makes_key and (schema is None or key_type != "binary"):
            raise InvalidInputError(
                f"key={self._keys} needs select, or schema without key_type, or key_json or "
                "key_avro, to make these columns"
            )
        if leaves_out_bad and callable(select):
            raise InvalidInputError(
                'a select function leaves out bad records itself (expected on_bad_record="fail"). '
                "Filter them in the function, or give select as a list."
            )
        if version is not None and callable(select):
            raise InvalidInputError(
                "a select function gets the latest record by offset (expected a list with version, "
                "found a function). Give select as a list."
            )
        check_has_no_events(version, has_events=self._has_events)
        self.version = version
        self._select = select
        self._schema = schema
        self._key = "key" if key_type == "binary" else "cast(key as string) as key"
        self._leaves_out_bad = leaves_out_bad
        if schema is not None and (not isinstance(schema, str) or _can_parse()):
            self._fields()
        elif self._documents and _can_parse():
            self._record_form()

    @property
    def keys(self) -> list[str]:
        """The columns of the table's key; a registry has been asked for those of its schemas."""
        form = self._form
        if form is None or form.key is None:
            return self._keys
        names = form.key.names()
        if self._keys == ["key"]:
            return names
        if missing := [name for name in self._keys if name not in names]:
            raise InvalidInputError(
                f"key names the column {missing[0]} (expected a field of the records' keys, found "
                f"{', '.join(names)})"
            )
        return self._keys

    @property
    def _has_own_key(self) -> bool:
        """Whether the table's key is a column `key`, which without `select` is the record's."""
        return self._keys == ["key"] and not self._has_key_documents

    def ask_for(self, df: DataFrame, topics: Collection[str]) -> None:
        """Ask registries for the schemas of a micro-batch's records, before its rows are made."""
        if form := self._record_form():
            form.ask_for(df, topics)

    def knows_columns(self, topics: Collection[str]) -> bool:
        """Return whether the rows' columns are known before any record; registries are asked."""
        form = self._record_form()
        return form is None or form.knows_columns(topics)

    def _record_form(self) -> RecordForm | None:
        """Return how the records' documents are decoded; None with `select`, or without any."""
        if self._form is None and self._schema is not None:
            fields = self._fields()
            if self._has_own_key:
                self._form = RecordForm.of(json=fields)
            else:
                others, own = _without(fields, self._keys), _only(fields, self._keys)
                self._form = RecordForm.of(json=others, key_json=own, refuses_null_keys=True)
        elif self._form is None and self._documents:
            self._form = RecordForm.of(
                **self._documents, refuses_null_keys=True, unavailable_column=KEPT
            )
        return self._form

    @property
    def is_row_by_row(self) -> bool:
        """Whether `rows` works with `latest=False`."""
        return not callable(self._select)

    @property
    def needs_latest_alone(self) -> bool:
        """Whether the latest record of each key in each partition makes the rows of all records.

        The expressions of a `select` list may give one row's key to records of several keys. An
        earlier record counts if the latest one is bad and left out.
        """
        if self._leaves_out_bad or self._has_events or self.version is not None:
            return False
        return self._select is None or callable(self._select)

    @property
    def _has_events(self) -> bool:
        """Whether the records are change events, whose values may be those of earlier ones."""
        return "envelope" in self._documents

    def rows(self, df: DataFrame, *, latest: bool, parts: int | None = None) -> UpsertRows:
        """Return the rows of a micro-batch's records; records without a key make none.

        With `latest` Spark reduces them to the latest per key, in `parts` tasks (default: Spark's
        own number). Without it the target must do so, which a `select` function does not allow.
        Rows with versions are always reduced.
        Raises InvalidInputError if columns are missing.
        """
        from pyspark.sql import functions as F

        if callable(self._select):
            if not latest:
                raise InvalidInputError(
                    "rows that are not the latest of their key, and a select function"
                )
            shaped = self._select(latest_per_key(df, parts))
            reason = F.coalesce(_bad(shaped), self._null_key(shaped.columns))
            names = [name for name in shaped.columns if not is_bad(name)]
            return self._checked(shaped, _deletion(shaped), _record_of(shaped), reason, names)
        latest = latest or self.version is not None
        # Other keys than the records' are made, and bad records left out, before the reduction.
        is_before = latest and self._has_own_key and self.needs_latest_alone
        marked = self._marked(latest_per_key(df, parts) if is_before else with_keys(df))
        record = [*RECORD, KEPT] if KEPT in marked.columns else list(RECORD)
        names = list(marked.columns)[len(record) + 2 :]
        if self._leaves_out_bad:
            marked = marked.where(F.col(REASON).isNull())
        has_own = self._select is not None and deletion_column(names) is not None
        rows = self._checked(
            marked.select(DELETED, *record, REASON, *map(column_of, names)),
            _deletion(marked.select(*map(column_of, names))) if has_own else DELETED,
            record,
            F.col(REASON),
            names,
        )
        if not latest or is_before:
            return rows
        reduced = latest_rows(rows.frame, list(RECORD), parts, self.keys, self.version)
        return replace(rows, frame=reduced)

    def bad_records(self, df: DataFrame) -> DataFrame:
        """Return the bad records of a micro-batch, with the columns of `df` and `kl_reason`."""
        from pyspark.sql import functions as F

        marked = self._marked(with_keys(df), F.struct("*").alias("kl_record"))
        return marked.where(F.col(REASON).isNotNull()).select("kl_record.*", REASON)

    def _marked(self, records: DataFrame, *more: Column) -> DataFrame:
        """Return `kl_deleted`, the record's columns, `more`, `kl_reason`, then the row's own."""
        from pyspark.sql import functions as F

        marked = self._shaped(records, *more)
        if self.version is None:
            return marked
        own = marked.columns[marked.columns.index(REASON) + 1 :]
        check_version(self.version, own, marked.schema)
        reason = lacks_version(self.version, marked.schema[self.version].dataType)
        return marked.withColumn(REASON, F.coalesce(REASON, reason))

    def _shaped(self, records: DataFrame, *more: Column) -> DataFrame:
        from pyspark.sql import functions as F

        if form := self._record_form():
            return self._parsed(records, form, more)
        wanted = self._select if self._select is not None else [self._key, *_RAW[1:]]
        assert not callable(wanted), "a function's rows do not say which records they are from"
        first = [*_of_record(F.col("value")), *more]
        shaped = records.select(*first, *map(_expression, wanted))
        names = list(shaped.columns)[len(first) :]
        _check_names(names)
        head = list(shaped.columns)[: len(first)]
        reason = F.coalesce(_bad(shaped.select(*map(column_of, names))), self._null_key(names))
        return shaped.select(
            *head, reason.alias(REASON), *[column_of(name) for name in names if not is_bad(name)]
        )

    def _parsed(self, records: DataFrame, form: RecordForm, more: Sequence[Column]) -> DataFrame:
        """Return the fields of documents, and the record's own key if its table has that."""
        from pyspark.sql import functions as F

        kept = records.select("*", *more)
        added = kept.columns[len(records.columns) :]
        decoded = form.decoded(kept)
        named = {"key": F.expr(self._key)}
        if form.key is not None:
            named = {name: F.col("key")[name] for name in names_in(decoded, "key")}
        if form.value is None:
            named["value"] = F.col("value")
        else:
            for name in names_in(decoded, "value"):
                # The key's field goes first, because a tombstone has no other.
                named.setdefault(name, F.col("value")[name])
        if self._schema is not None and not self._has_own_key:
            named = {name: named[name] for name in self._fields().names}
        lacking = [] if KEPT not in named else [named.pop(KEPT)]
        _check_names(list(named))
        rows = decoded.select(
            *_of_record(F.col("value")),
            *added,
            BAD,
            *[column.alias(KEPT) for column in lacking],
            *[column.alias(name) for name, column in named.items()],
        )
        if lacking:
            rows = filled(rows, list(named), self.keys, deleted=DELETED)
        first = rows.columns.index(BAD)
        return rows.select(
            *rows.columns[:first],
            F.col(BAD).alias(REASON),
            *map(column_of, rows.columns[first + 1 :]),
        )

    def _fields(self) -> StructType:
        """Return the fields of `schema`; raises InvalidInputError."""
        assert self._schema is not None
        fields = fields_of(self._schema, "schema")
        if missing := [n for n in self._keys if not self._has_own_key and n not in fields.names]:
            raise InvalidInputError(
                f"key names the column {missing[0]} (expected a field of schema, found "
                f"{', '.join(fields.names)}). Add it to schema."
            )
        _check_names(["key", *fields.names] if self._has_own_key else fields.names)
        return fields

    def _null_key(self, names: Sequence[str]) -> Column:
        """Return why a row of these columns has no key; null if it has one."""
        from pyspark.sql import functions as F

        missing = [name for name in self.keys if name not in names]
        if missing:
            raise InvalidInputError(
                f"select gives no column '{missing[0]}'; its columns are: "
                f"{', '.join(names) or 'none'}"
            )
        is_null = [column_of(name).isNull() for name in self.keys]
        return F.when(functools.reduce(operator.or_, is_null), "select makes the key null")

    def _checked(
        self,
        shaped: DataFrame,
        deleted: Column | str,
        record: Sequence[Column | str],
        reason: Column,
        given: Sequence[str] | None = None,
    ) -> UpsertRows:
        """Return rows; one with a `reason` fails the micro-batch."""
        from pyspark.sql import functions as F

        given = list(shaped.columns) if given is None else given
        _check_names(given)
        dropped = None if isinstance(deleted, str) else deletion_column(given)
        names = [name for name in given if name != dropped]
        marked = shaped.select(
            deleted, *record, reason.alias(REASON), *[column_of(name) for name in names]
        )
        fault = record_fault(F.col(REASON))
        first = self.keys[0]
        checked = F.when(F.col(REASON).isNotNull(), fault).otherwise(column_of(first)).alias(first)
        leading = marked.columns[: marked.columns.index(REASON)]
        frame = marked.select(
            *leading, *[checked if name == first else column_of(name) for name in names]
        )
        types = [field.dataType for field in frame.schema.fields[len(leading) :]]
        return UpsertRows(frame, names, types, self.keys, self.version)


def _can_parse() -> bool:
    """Return whether there's a session, because Spark reads a schema in DDL with it."""
    from pyspark.sql import SparkSession

    return SparkSession.getActiveSession() is not None


def _expression(given: str | Column) -> Column:
    from pyspark.sql import functions as F

    return F.expr(given) if isinstance(given, str) else given


def _of_record(value: Column) -> list[Column]:
    from pyspark.sql import functions as F

    origin = [F.col(source).cast(kind).alias(name) for name, (source, kind) in RECORD.items()]
    return [value.isNull().alias(DELETED), *origin]


def _record_of(shaped: DataFrame) -> list[Column | str]:
    """Return the record's columns, null for those that a `select` function dropped."""
    from pyspark.sql import functions as F

    types = {field.name: field.dataType.simpleString() for field in shaped.schema.fields}
    return [
        F.col(source).alias(name)
        if types.get(source) == kind
        else F.lit(None).cast(kind).alias(name)
        for name, (source, kind) in RECORD.items()
    ]


def _bad(shaped: DataFrame) -> Column:
    """Return why a row is bad, as its column `bad` says; null if it is not."""
    from pyspark.sql import functions as F

    none = F.lit(None).cast("string")
    for field in shaped.schema.fields:
        if is_bad(field.name):
            check_mark(field.name, field.dataType, "are bad")
            return F.when(F.col(field.name), F.lit("select says that it is bad"))
    return none


def _deletion(shaped: DataFrame) -> Column:
    from pyspark.sql import functions as F

    if (marked := marks_deletion(shaped.schema)) is not None:
        return marked.alias(DELETED)
    if "value" not in shaped.columns:
        raise InvalidInputError(
            "select gives neither 'deleted' nor 'value', one of which marks deletions; "
            'add "value is null as deleted"'
        )
    return F.col("value").isNull().alias(DELETED)


def _only(fields: StructType, names: Sequence[str]) -> StructType:
    from pyspark.sql.types import StructType

    return StructType([field for field in fields if field.name in names])


def _without(fields: StructType, names: Sequence[str]) -> StructType:
    from pyspark.sql.types import StructType

    return StructType([field for field in fields if field.name not in names])


def record_fault(reason: Column | str) -> Column:
    """Return an expression that fails the micro-batch and names the record."""
    from pyspark.sql import functions as F

    columns = [F.col(name) for name in list(RECORD)[:3]]
    found = F.lit(reason) if isinstance(reason, str) else reason
    return F.raise_error(F.format_string(f"%s-%s offset %s: %s. {REMEDY}", *columns, found))


def _check_names(names: Sequence[str]) -> None:
    lowered = [name.lower() for name in names]
    taken = [name for name in names if name.lower().startswith("kl_")]
    doubled = sorted({name for name in lowered if lowered.count(name) > 1})
    if taken:
        raise InvalidInputError(f"columns whose names begin with kl_ are taken: {', '.join(taken)}")
    if doubled:
        raise InvalidInputError(f"an upsert's columns need different names: {', '.join(doubled)}")


def column_of(name: str) -> Column:
    """Return the column with exactly this name, whatever characters it has."""
    from pyspark.sql import functions as F

    return F.col(quoted(name))
