"""Framed values, each decoded with the schema that it was written with, into one reader's schema.

There is one `from_avro` per schema, and the schema id in the first five bytes chooses it. Spark's
plan is fixed, so the ids are asked for before: those that a batch has, or those that the registry
knows when a stream begins. A value with another id stops the query. It is never decoded with the
schema of another.
"""

from __future__ import annotations

import contextlib
import functools
import operator
from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from kafkalog.errors import InvalidInputError, SchemaClashError, SchemaNotFoundError
from kafkalog.values.avro_schema import AvroType, clashes, is_same_record, name_of
from kafkalog.values.bad_values import found, raised, with_reason, with_struct
from kafkalog.values.framing import head, head_of, id_of, is_framed
from kafkalog.values.spark_avro import (
    check_readable,
    decoded,
    ends,
    marked,
    names_of,
    row_of,
    schema_of,
    value_of,
    with_decoded,
)

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

    from kafkalog.values.registered_schema import RegisteredSchema
    from kafkalog.values.schema_registry import SchemaRegistry


class FramedAvro:
    """The framed documents in a `column`, whose schemas `registry` has.

    The reader's schema is `reader`, or the latest one of `subject`, by default of
    `<topic>-<column>`. Without such a subject, it is the schema in use with the highest id.
    `options` are those of `from_avro`.
    """

    def __init__(
        self,
        registry: SchemaRegistry,
        column: str = "value",
        *,
        reader: str | None = None,
        subject: str | None = None,
        options: Mapping[str, str] | None = None,
    ) -> None:
        self._registry = registry
        self._column = column
        self._subject = subject
        self._given = None if reader is None else row_of(schema_of(reader))
        self._options = dict(options or {})
        self._schemas: dict[int, RegisteredSchema] = {}
        self._missing: dict[int, str] = {}
        """Ids that the registry does not have, and what it says."""
        self._latest: RegisteredSchema | None = None
        self._is_expecting = False
        """Whether schemas are known that no value may have."""

    @property
    def needs_topic(self) -> bool:
        """Whether the subject depends on the topic."""
        return self._given is None and self._subject is None and self._registry.has_subjects

    def head(self) -> Column:
        """Return the first five bytes of the column if it is framed, else null."""
        from pyspark.sql import functions as F

        column = F.col(self._column).cast("binary")
        return F.when(is_framed(column), head_of(column))

    def ask(self, ids: Collection[int], topics: Collection[str] = ()) -> None:
        """Ask the registry for schemas, and for the latest one of the topics if one is new."""
        new = set(ids) - self._schemas.keys()
        for number in sorted(new):
            try:
                self._schemas[number] = self._registry.schema(number)
                self._missing.pop(number, None)
            except SchemaNotFoundError as fault:
                self._missing[number] = str(fault)
        if self._given is None and (self._latest is None or new & self._schemas.keys()):
            self._latest = self._latest_of(topics) or self._latest

    def expect(self, topics: Collection[str]) -> bool:
        """Ask the registry for all schemas that values of the topics may have, before they come.

        Return whether there are any: somebody has to say which subject that is.
        """
        found = set(self._registry.ids())
        self._is_expecting = True
        for subject in self._subjects(topics):
            with contextlib.suppress(SchemaNotFoundError):
                found.update(each.id for each in self._registry.versions(subject))
        self.ask(found, topics)
        return bool(self._schemas)

    def expects_all(self, topics: Collection[str]) -> bool:
        """Return whether the schemas of a batch are known without its ids; the registry is asked.

        They are unknown if one clashes with the reader's, because no value may have it.
        """
        if not self.knows_reader(topics) or not self.expect(topics):
            return False
        try:
            self._branches(self.reader())
        except SchemaClashError:
            self._schemas.clear()
            return False
        return True

    def unexpected(self, topics: Collection[str]) -> InvalidInputError:
        """Return the error for a stream without a known schema."""
        named = " or ".join(self._subjects(topics)) or "of its topic"
        return InvalidInputError(
            f"framed {self._column}s of a stream: the registry has no subject {named} (expected "
            f"the schemas before the values). Give {self._prefix}subject=, or decode each "
            "micro-batch in foreachBatch."
        )

    def names(self) -> list[str]:
        """Return the fields of the structs; the registry has been asked."""
        return names_of(self.reader(), self._column)

    def knows_reader(self, topics: Collection[str]) -> bool:
        """Return whether the reader's schema is known before any value; the registry is asked."""
        if self._given is None and self._latest is None:
            self._latest = self._latest_of(topics)
        return self._given is not None or self._latest is not None

    def _subjects(self, topics: Collection[str]) -> list[str]:
        """Return the subjects by Confluent's TopicNameStrategy, or the given one."""
        if self._subject is not None:
            return [self._subject]
        return [f"{topic}-{self._column}" for topic in sorted(topics)]

    def _latest_of(self, topics: Collection[str]) -> RegisteredSchema | None:
        if self._registry.has_subjects:
            for subject in self._subjects(topics):
                with contextlib.suppress(SchemaNotFoundError):
                    return self._registry.latest(subject)
        return None

    def reader(self) -> Any:
        """Return the reader's schema; raises InvalidInputError if it is not known."""
        if self._given is not None:
            return self._given
        if self._latest is not None and self._latest.kind == "AVRO":
            return row_of(schema_of(self._latest.text))
        known = {n: each for n, each in self._schemas.items() if each.kind == "AVRO"}
        if not known:
            raise InvalidInputError(
                f"framed {self._column}s: no schema is known that they could be read as (expected "
                f"one of the registry's). Give {self._prefix}subject= or {self._prefix}reader=."
            )
        names = sorted({name_of(_type_of(each)) for each in known.values()})
        if self._is_expecting and len(names) > 1:
            raise InvalidInputError(
                f"framed {self._column}s: the registry has no subject for them, and schemas of "
                f"{' and '.join(names)}. Give {self._prefix}reader=, which says what they are "
                "read as."
            )
        return row_of(schema_of(known[max(known)].text))

    @property
    def _prefix(self) -> str:
        """The beginning of the names of arguments for this column."""
        return "" if self._column == "value" else f"{self._column}_"

    def decoded(self, df: DataFrame) -> DataFrame:
        """Return `df` with structs in the column, and with reasons in `kl_bad`.

        Raises InvalidInputError for schemas that Avro would read as other values, and for one that
        Spark cannot read.
        """
        from pyspark.sql import functions as F

        reader = self.reader()
        check_readable(reader, df, self._options)
        branches, strangers = self._branches(reader)
        options = {**self._options, "avroSchema": marked(reader)}
        column = F.col(self._column).cast("binary")
        struct = f"kl_{self._column}"

        def chosen() -> Column:
            value: Any = F
            for text, ids in branches:
                value = value.when(_is_any(column, ids), decoded(column, text, options))
            return value if branches else decoded(F.lit(None).cast("binary"), marked(reader), {})

        frame = with_decoded(df, struct, chosen)
        frame = with_reason(frame, self._reason(frame, column, ends(F.col(struct)), strangers))
        frame = with_struct(frame, self._column, value_of(F.col(struct), reader, self._column))
        return frame.drop(struct)

    def _branches(self, reader: Any) -> tuple[list[tuple[str, list[int]]], dict[int, str]]:
        """Return (schema, ids) of writers that share bytes, and why other ids have no branch.

        Raises InvalidInputError for schemas that clash with the reader's.
        """
        ours = AvroType(reader)
        forms: dict[str, tuple[str, list[int]]] = {}
        strangers: dict[int, str] = {}
        for number, schema in sorted(self._schemas.items(), reverse=True):
            if schema.kind != "AVRO":
                strangers[number] = f"a schema of {schema.kind}, expected one of Avro"
                continue
            theirs = _type_of(schema)
            if not is_same_record(theirs, ours):
                strangers[number] = f"the schema of {name_of(theirs)}, expected {name_of(ours)}"
                continue
            if fault := clashes(theirs, ours):
                raise SchemaClashError(
                    f"schema {number} of the {self._column}: {'; '.join(fault)}. Avro would give "
                    "other values without an error. Give a reader= that has what was written."
                )
            text = marked(schema_of(schema.text), has_head=True)
            forms.setdefault(theirs.bytes_form(), (text, []))[1].append(number)
        return list(forms.values()), strangers

    def _reason(
        self, df: DataFrame, column: Column, is_whole: Column, strangers: Mapping[int, str]
    ) -> Column:
        """Return why a value is not decoded; one of an unknown schema fails the query."""
        from pyspark.sql import functions as F

        it, number = f"the {self._column}", id_of(column)
        reason = F.when(column.isNull() | is_whole, F.lit(None).cast("string")).when(
            ~is_framed(column),
            F.format_string(
                f"{it} is not framed (expected a zero byte and a schema id before Avro, found %s)",
                found(column),
            ),
        )
        told = {each: f"{it} has the id {each}: {words}" for each, words in strangers.items()}
        lacks = "which the registry does not have"
        told |= {each: f"{it} has the schema id {each}, {lacks}" for each in self._missing}
        if told:
            pairs = [F.lit(str(part)) for each in sorted(told.items()) for part in each]
            words = F.try_element_at(F.create_map(*pairs), number)
            reason = reason.when(words.isNotNull(), words)
        unknown = (
            f"{it} has the schema id %s, which was not known when the query was made (expected one "
            f"of {_listed(self._schemas)}). Start the query again: it then asks the "
            f"registry. If the id is of another subject, give {self._prefix}subject=."
        )
        known = [number for number in self._schemas if number not in strangers]
        # Schemas that are given by their ids will not become more.
        words = F.format_string(f"{it} has the schema id %s, which is not given", number)
        if self._registry.has_subjects:
            words = raised(df, F.format_string(unknown, number)).cast("string")
        reason = reason.when(~_is_any(column, known), words)
        return reason.otherwise(
            F.format_string(
                f"{it} is not Avro of its schema %s, read as {name_of(AvroType(self.reader()))} "
                "(expected one that ends where the schema does, found %s)",
                number,
                found(column),
            )
        )


def _type_of(schema: RegisteredSchema) -> AvroType:
    return AvroType(schema_of(schema.text))


def _is_any(column: Column, ids: Iterable[int]) -> Column:
    """Return whether bytes are framed with one of these ids."""
    from pyspark.sql import functions as F

    are = [F.startswith(column, head(number)) for number in ids]
    return functools.reduce(operator.or_, are) if are else F.lit(False)


def _listed(ids: Collection[int]) -> str:
    named = ", ".join(map(str, sorted(ids)[-10:]))
    return named if len(ids) <= 10 else f"{len(ids)} ids, the last of them {named}"
