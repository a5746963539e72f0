"""Rows from Debezium's change events.

Debezium: "Data change events" of the connectors' documentation, and "Event flattening" for the rows
that its transformation ExtractNewRecordState has unwrapped.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from kafkalog.errors import InvalidInputError
from kafkalog.values.avro_schema import AvroType
from kafkalog.values.bad_values import with_reason
from kafkalog.values.change_rows import ChangeRows, RowField
from kafkalog.values.connect_types import (
    BYTES_AS_TEXT,
    CONNECT,
    DEBEZIUM,
    LITERALS,
    Meaning,
    as_it_is,
    from_avro,
    from_text,
    is_encoded,
    needs_meaning,
)

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame
    from pyspark.sql.types import DataType, StructField, StructType


PLACEHOLDER: Final = "__debezium_unavailable_value"
_STRUCTS: Final = ("source", "transaction")
"""Structs of an event; an added field is one of `source` unless it names the struct."""
_OF_EVENT: Final = frozenset({"op", "after", *_STRUCTS, "payload", "schema"})
"""Fields of an event; a row that is in no event is not looked for under these names."""
_AT_TOP: Final = frozenset({"op", "ts_ms", "ts_us", "ts_ns"})
_LONGS: Final = frozenset(
    {"ts_ms", "ts_us", "ts_ns", "lsn", "xmin", "pos", "row", "server_id", "thread"}
)
"""Fields of an event that are numbers; the others are text. Oracle's `txId` is text."""
_EVENT: Final = "kl_event"
_DELETED: Final = "__deleted"
_MARKS: Final[tuple[str, ...]] = ("__op", _DELETED)
"""What a row in no event says of itself."""
_FIELD: Final = "field string, name string, type string, parameters map<string,string>"
_SCHEMA: Final = f"fields array<struct<{_FIELD}, fields array<struct<{_FIELD}>>>>"
"""What is read of the schema that Connect's JsonConverter puts next to a payload."""


@dataclass(frozen=True)
class Debezium:
    """How rows are taken from change events.

    An event may have `schema` and `payload` around it, as Connect's JsonConverter writes it, or
    not; a row may be in an event, or be unwrapped by ExtractNewRecordState. Each record is taken as
    what it is. Inserts, updates and reads of a snapshot (`c`, `u`, `r`) give the row after the
    change. A deletion (`d`, `__deleted`, a tombstone) gives none. A truncation (`t`) is a bad
    record, because no key says which rows are gone. All else that changes no row is bad too. The
    `__op` of an unwrapped row counts as the `op` of an event.

    In JSON a field's type in Connect is in the event's `schema`, where it has one. Else a COMMENT
    of the column says it: `at timestamp_ntz COMMENT 'io.debezium.time.MicroTimestamp'`; for
    decimals also `string` or `double`, for bytes `hex` or `base64-url-safe`, as the connector's
    handling modes are called. Decimals and moments inside of arrays and structs are refused:
    declare them as what is written there.

    Args:
        add_fields: Fields of the event that become columns, as ExtractNewRecordState's `add.fields`
            makes them: `op` becomes `__op`, `lsn` becomes `__lsn`, `source.ts_ms` becomes
            `__source_ts_ms`, and `transaction.id` becomes `__transaction_id`. An unwrapped row has
            them if the connector added them.
        placeholder: The connector's `unavailable.value.placeholder`, which stands for a value that
            the database did not give: it is large, and did not change. An upsert keeps the value
            of the row before. Elsewhere a record with one is bad.
        unavailable_column: The name of a further column. A record with such values is then not bad:
            the values are null, and this column has the names of their fields, null for none.
    """

    add_fields: Sequence[str] = ()
    placeholder: str = PLACEHOLDER
    unavailable_column: str | None = None

    def __post_init__(self) -> None:
        if isinstance(self.add_fields, str):
            raise InvalidInputError(
                f"Debezium: expected a list as add_fields, found the text {self.add_fields!r}"
            )
        for given in self.add_fields:
            if given not in _AT_TOP and _place_of(given)[0] not in _STRUCTS:
                raise InvalidInputError(
                    f"Debezium: add_fields has {given!r} (expected op, ts_ms, ts_us, ts_ns, or a "
                    "field of source or transaction, as in transaction.id)"
                )

    def added_names(self) -> list[str]:
        """Return the names of the added columns."""
        names = [_added_name(given) for given in self.add_fields]
        return names if self.unavailable_column is None else [*names, self.unavailable_column]

    def avro_names(self, reader: Any, *, is_key: bool = False) -> list[str]:
        """Return the fields of the rows that `avro_rows` or `avro_keys` makes."""
        kind = AvroType(reader)
        if is_key:
            return list(_avro_key(kind))
        of_event = _avro_fields(kind, kind.record())
        if {"op", "after"} <= of_event.keys():
            return [*_avro_fields(kind, of_event["after"]), *self.added_names()]
        names = [name for name in of_event if name != _DELETED]
        return names if self.unavailable_column is None else [*names, self.unavailable_column]

    def json_schema(self, row: StructType, *, is_key: bool = False) -> StructType:
        """Return the schema with which `from_json` decodes documents, given that of their rows."""
        from pyspark.sql.types import StringType, StructField, StructType

        _check_nested(row)
        fields = [StructField(each.name, _kind_in_json(each.dataType)) for each in row]
        body = fields
        if not is_key:
            event = [StructField("op", StringType()), StructField("after", StructType(fields))]
            event += self._event_fields()
            taken = {each.name for each in event} | _OF_EVENT
            marks = [*_MARKS, *map(_added_name, self.add_fields)]
            marks = [each for each in dict.fromkeys(marks) if each not in row.fieldNames()]
            body = [*event, *[each for each in fields if each.name not in taken]]
            body += [StructField(each, _kind_of_added(each)) for each in marks]
        schema = StructType([*body, StructField("payload", StructType(body))])
        if any(needs_meaning(each.dataType) for each in row):
            schema.add("schema", StructType.fromDDL(_SCHEMA))
        return schema

    def json_rows(
        self, df: DataFrame, row: StructType, text: str, column: str = "value"
    ) -> DataFrame:
        """Return `df` with rows in a column of documents that `json_schema` has decoded.

        `text` is the column with the documents themselves. `df` has the reasons of bad records in
        `kl_bad`, and gets more. A row is null for a deletion and for a bad record.
        """
        from pyspark.sql import functions as F

        schema = self.json_schema(row)
        df = _body(df, schema, column)
        event = F.col(_EVENT)
        op, after = event["op"], event["after"]
        said = F.col(column)["schema"]["fields"] if "schema" in schema.fieldNames() else None
        fields: list[RowField] = []
        for each in row:
            written = F.when(op.isNotNull(), after[each.name])
            if each.name in schema.fieldNames() and each.name not in _OF_EVENT:
                written = written.otherwise(event[each.name])
            about = None
            if said is not None:
                inside = F.when(op.isNotNull(), _in_after(said, each.name))
                about = inside.otherwise(_of_schema(said, each.name))
            fields.append(_json_field(each, written, about))
        added: dict[str, Column] = {}
        for given in self.add_fields:
            inside = F.when(op.isNotNull(), _in_event(event, given))
            added[_added_name(given)] = inside.otherwise(event[_added_name(given)])
        df = with_reason(df, _hidden(row, F.col(text), op))
        rows = self._rows(
            event,
            fields,
            op=op,
            has_after=after.isNotNull(),
            marks={name: event[name] for name in _MARKS},
            added=added,
            foreign=_foreign(row, F.col(text), op),
        )
        return rows.applied(df, column).drop(_EVENT)

    def json_keys(
        self, df: DataFrame, row: StructType, text: str, column: str = "key"
    ) -> DataFrame:
        """Return `df` with the fields of keys, which are in no event, as `json_rows` has them."""
        from pyspark.sql import functions as F

        schema = self.json_schema(row, is_key=True)
        df = _body(df, schema, column)
        event, no = F.col(_EVENT), F.lit(False)
        said = F.col(column)["schema"]["fields"] if "schema" in schema.fieldNames() else None
        fields = [
            _json_field(
                each, event[each.name], None if said is None else _of_schema(said, each.name)
            )
            for each in row
        ]
        rows = self._rows(
            event,
            fields,
            op=_nothing(),
            has_after=no,
            is_key=True,
            foreign=_foreign(row, F.col(text), None),
        )
        return rows.applied(df, column).drop(_EVENT)

    def avro_rows(self, df: DataFrame, reader: Any, column: str = "value") -> DataFrame:
        """Return `df` with rows in a column that was decoded into the reader's Avro schema.

        The schema, as JSON's values, is an event's, or an unwrapped row's. Else as `json_rows`.
        Raises InvalidInputError for another schema.
        """
        from pyspark.sql import functions as F

        kind = AvroType(reader)
        document, no = F.col(column), F.lit(False)
        of_event = _avro_fields(kind, kind.record())
        if not of_event:
            raise InvalidInputError(
                f"envelope=: expected the Avro schema of change events or of rows, found {reader!r}"
            )
        decoded: Any = df.schema[column].dataType
        if {"op", "after"} <= of_event.keys():
            for given in self.add_fields:
                _check_in_avro(kind, of_event, given)
            after = document["after"]
            of_row = _avro_fields(kind, of_event["after"])
            fields = _avro_row(after, of_row, decoded["after"].dataType)
            added = {_added_name(each): _in_event(document, each) for each in self.add_fields}
            rows = self._rows(
                document,
                fields,
                op=document["op"],
                has_after=after.isNotNull(),
                added=added,
            )
            return rows.applied(df, column)
        of_row = {name: node for name, node in of_event.items() if name != _DELETED}
        fields = _avro_row(document, of_row, decoded)
        marks = {name: document[name] for name in _MARKS if name in of_event}
        rows = self._rows(document, fields, op=_nothing(), has_after=no, marks=marks)
        return rows.applied(df, column)

    def avro_keys(self, df: DataFrame, reader: Any, column: str = "key") -> DataFrame:
        """Return `df` with the fields of keys, which are in no event, as `avro_rows` has them."""
        from pyspark.sql import functions as F

        kind = AvroType(reader)
        document, no = F.col(column), F.lit(False)
        decoded: Any = df.schema[column].dataType
        fields = _avro_row(document, _avro_key(kind), decoded)
        rows = self._rows(document, fields, op=_nothing(), has_after=no, is_key=True)
        return rows.applied(df, column)

    def _rows(
        self,
        document: Column,
        fields: Sequence[RowField],
        *,
        op: Column,
        has_after: Column,
        marks: Mapping[str, Column] | None = None,
        added: Mapping[str, Column] | None = None,
        is_key: bool = False,
        foreign: Column | None = None,
    ) -> ChangeRows:
        content = self.placeholder.encode()
        if self.placeholder.startswith("hex:"):
            content = bytes.fromhex(self.placeholder.removeprefix("hex:"))
        marked_op, marked_deleted = (
            (marks or {}).get(name, _nothing()).cast("string") for name in _MARKS
        )
        return ChangeRows(
            document,
            fields,
            op,
            has_after,
            marked_op,
            marked_deleted,
            content,
            dict(added or {}),
            None if is_key else self.unavailable_column,
            foreign,
        )

    def _event_fields(self) -> list[StructField]:
        """Return the fields that have to be decoded for the added columns."""
        from pyspark.sql.types import StructField, StructType

        top = [each for each in self.add_fields if each in _AT_TOP - {"op"}]
        fields = [StructField(each, _kind_of_added(each)) for each in top]
        inside = dict.fromkeys(_place_of(each) for each in self.add_fields if each not in _AT_TOP)
        for struct in _STRUCTS:
            names = [name for where, name in inside if where == struct]
            if names:
                its = [StructField(name, _kind_of_added(name)) for name in names]
                fields.append(StructField(struct, StructType(its)))
        return fields


def _body(df: DataFrame, schema: StructType, column: str) -> DataFrame:
    """Return `df` with the event, or the row, out of its payload."""
    from pyspark.sql import functions as F

    document = F.col(column)
    names = [each for each in schema.fieldNames() if each not in {"payload", "schema"}]
    bare = F.struct(*[document[each].alias(each) for each in names])
    body = F.when(document["payload"].isNotNull(), document["payload"]).otherwise(bare)
    return df.withColumn(_EVENT, F.when(document.isNotNull(), body))


def _json_field(field: StructField, written: Column, about: Column | None) -> RowField:
    """Return a field of a row; Connect's schema says what it means, and without it the COMMENT."""
    from pyspark.sql import functions as F
    from pyspark.sql.types import DecimalType

    kind = field.dataType
    if not is_encoded(kind):
        return RowField(field.name, written, kind, lambda value, _: as_it_is(value))
    is_variant = isinstance(kind, DecimalType)
    if is_variant:
        written = F.when(~F.is_variant_null(written), written)
    comment = (field.metadata or {}).get("comment")
    is_name = isinstance(comment, str) and comment.startswith((DEBEZIUM, CONNECT))
    name = F.lit(comment if is_name else None).cast("string")
    literal = F.lit(comment if comment in LITERALS else None).cast("string")

    def meaning(value: Column, about: Column | None) -> Meaning:
        is_quoted = F.schema_of_variant(value) == "STRING" if is_variant else F.lit(True)
        if about is None:  # of a date, which says itself what it is
            return Meaning(name, literal, F.lit(None).cast("int"), is_quoted)
        of_schema = about["type"]
        is_open = of_schema.isNull()
        # A number may be a time to its reader alone, and text may have bytes in several ways.
        its_name = F.when(is_open | of_schema.startswith("int"), name)
        its_literal = F.when(is_open, literal)
        if comment in BYTES_AS_TEXT:
            its_literal = F.when(is_open | (of_schema == "string"), literal)
        return Meaning(
            F.coalesce(about["name"], its_name),
            F.coalesce(its_literal, of_schema),
            about["scale"].try_cast("int"),
            is_quoted,
        )

    def hint(value: Column, about: Column | None) -> Column:
        known = meaning(value, about)
        unknown = F.lit("unknown in Connect: give the column a COMMENT that says it")
        its_type = F.concat(F.lit(", its type is "), F.coalesce(known.name, known.literal, unknown))
        return F.when(known.is_quoted, its_type).otherwise("")

    return RowField(
        field.name,
        written,
        _kind_in_json(kind),
        lambda value, about: from_text(value.cast("string"), kind, meaning(value, about)),
        about if needs_meaning(kind) else None,
        hint if needs_meaning(kind) else None,
    )


def _foreign(row: StructType, text: Column, op: Column | None) -> Column:
    """Return why a JSON document without any value is not a row: no field has a column's name.

    `op` is that of its event; None for a key. Letter case counts, as in JSON.
    """
    from pyspark.sql import functions as F

    def part(path: str) -> Column:
        return F.get_json_object(text, path)

    alone = F.coalesce(part("$.payload"), text)
    body, words = alone, F.lit("the key has")
    if op is not None:
        in_event = F.coalesce(part("$.payload.after"), part("$.after"))
        body = F.when(op.isNotNull(), in_event).otherwise(alone)
        words = F.when(op.isNotNull(), "the row in the event has").otherwise(
            "the value is neither a change event nor a row: it has"
        )
    names = F.coalesce(F.json_object_keys(body), F.array().cast("array<string>"))
    listed = ", ".join(row.fieldNames())
    reason = F.format_string(
        "%s none of the columns (expected a field of %s, found %s)",
        words,
        F.lit(listed if len(listed) <= 200 else f"{listed[:200]}..."),
        F.when(F.size(names) > 0, F.substring(F.array_join(names, ", "), 1, 200)).otherwise("none"),
    )
    return F.when(~F.arrays_overlap(names, F.array(*map(F.lit, row.fieldNames()))), reason)


def _hidden(row: StructType, text: Column, op: Column) -> Column:
    """Return why a row in no event is bad: a field of it has the name of one of an event."""
    from pyspark.sql import functions as F

    body = F.coalesce(F.get_json_object(text, "$.payload"), text)
    reason = F.lit(None).cast("string")
    for name in row.fieldNames():
        if name in _OF_EVENT:
            words = f"the row is in no event, where a field {name} would be one of the event"
            is_there = op.isNull() & F.get_json_object(body, f"$.{name}").isNotNull()
            reason = F.coalesce(reason, F.when(is_there, f"{words}. Let the connector wrap it"))
    return reason


def _check_nested(row: StructType) -> None:
    """Raise InvalidInputError for types inside of others whose values say not what they mean."""
    from pyspark.sql import types as T

    def parts(kind: DataType) -> list[DataType]:
        if isinstance(kind, T.ArrayType):
            return [kind.elementType]
        if isinstance(kind, T.MapType):
            return [kind.keyType, kind.valueType]
        return [each.dataType for each in kind] if isinstance(kind, T.StructType) else []

    for field in row:
        waiting = parts(field.dataType)
        while waiting:
            kind = waiting.pop()
            waiting += parts(kind)
            if needs_meaning(kind) and not isinstance(kind, T.BinaryType):
                found = kind.simpleString()
                raise InvalidInputError(
                    f"envelope=: the column {field.name} has a {found} inside (expected text or "
                    f"numbers there, found {field.dataType.simpleString()}). Debezium writes it as "
                    "such, and only the top of a row is converted. Declare what is written."
                )


def _of_schema(schema: Column, name: str) -> Column:
    """Return what a list of Connect's fields says of one: its name, type and parameters."""
    from pyspark.sql import functions as F

    found = F.get(F.filter(schema, lambda each: each["field"] == name), F.lit(0))
    scale = found["parameters"]["scale"]
    return F.struct(found["name"].alias("name"), found["type"].alias("type"), scale.alias("scale"))


def _in_after(schema: Column, name: str) -> Column:
    from pyspark.sql import functions as F

    after = F.get(F.filter(schema, lambda each: each["field"] == "after"), F.lit(0))
    return _of_schema(after["fields"], name)


def _kind_in_json(kind: DataType) -> DataType:
    """Return the type of what is written: text, if JSON has no form for the type."""
    from pyspark.sql.types import DecimalType, StringType, VariantType

    if isinstance(kind, DecimalType):
        return VariantType()  # which keeps whether there are quotes
    return StringType() if is_encoded(kind) else kind


def _avro_fields(kind: AvroType, node: Any) -> dict[str, Any]:
    """Return the types of a record's fields by name; {} for another type."""
    record = _not_null(kind, node)
    if not isinstance(record, Mapping):
        return {}
    return {each["name"]: _not_null(kind, each["type"]) for each in record.get("fields", ())}


def _avro_key(kind: AvroType) -> dict[str, Any]:
    """Return the types of a key's fields; a key that is not a record is one, called `key`."""
    return _avro_fields(kind, kind.record()) or {"key": _not_null(kind, kind.tree)}


def _check_in_avro(kind: AvroType, event: Mapping[str, Any], given: str) -> None:
    """Raise InvalidInputError for an added field that an event's schema does not have."""
    fields, name = event, given
    if given not in _AT_TOP:
        struct, name = _place_of(given)
        fields = _avro_fields(kind, event.get(struct))
    if name not in fields:
        raise InvalidInputError(
            f"Debezium: add_fields has {given!r}, which the events' schema has not (found "
            f"{', '.join(fields) or 'no such struct'})"
        )


def _not_null(kind: AvroType, node: Any) -> Any:
    """Return a type, or the one that a union has next to null."""
    if isinstance(node, list):
        others = [each for each in node if each != "null"]
        return kind.of(others[0]) if len(others) == 1 else node
    return kind.of(node)


def _avro_row(body: Column, nodes: Mapping[str, Any], decoded: Any) -> list[RowField]:
    return [
        _avro_field(
            name,
            body[name],
            decoded[name].dataType,
            node.get("connect.name", "") if isinstance(node, Mapping) else "",
        )
        for name, node in nodes.items()
    ]


def _avro_field(name: str, written: Column, kind: DataType, meaning: str) -> RowField:
    return RowField(name, written, kind, lambda value, _: from_avro(value, kind, meaning))


def _in_event(event: Column, given: str) -> Column:
    if given in _AT_TOP:
        return event[given]
    struct, name = _place_of(given)
    return event[struct][name]


def _place_of(given: str) -> tuple[str, str]:
    """Return the struct and the name of an added field."""
    struct, _, name = given.rpartition(".")
    return struct or "source", name


def _added_name(given: str) -> str:
    return "__" + given.replace(".", "_")


def _kind_of_added(name: str) -> DataType:
    from pyspark.sql.types import LongType, StringType

    bare = name.removeprefix("__").removeprefix("source_")
    return LongType() if bare in _LONGS else StringType()


def _nothing() -> Column:
    from pyspark.sql import functions as F

    return F.lit(None).cast("string")
