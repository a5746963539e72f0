"""Framed values, each decoded with the schema that it was written with, into one reader's schema.

There is one `from_avro` per schema, and the schema id in the first five bytes chooses it. Spark's
plan is fixed, so the ids are asked for before: those that a batch has, or those that the registry
knows when a stream begins. A value with another id stops the query. It is never decoded with the
schema of another.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from kafkalog.errors import (
    InvalidInputError,
    SchemaClashError,
    SchemaNotFoundError,
    SchemaRegistryError,
)
from kafkalog.values.avro_schema import AvroType, clashes, is_same_record, name_of
from kafkalog.values.bad_values import found, raised, with_reason, with_struct
from kafkalog.values.framing import checksum, checksum_of_id, head_of, id_of, is_framed
from kafkalog.values.spark_avro import (
    are_flat,
    check_readable,
    decoded,
    ends,
    marked,
    names_of,
    row_of,
    schema_of,
    value_of,
    with_decoded,
    with_marker,
)

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

    from kafkalog.values.registered_schema import RegisteredSchema
    from kafkalog.values.schema_registry import SchemaRegistry

MISSES_MAX: Final = 100
"""Ids that a registry does not have, for which it is asked at a time."""
_REMEMBERED: Final = 10_000
"""Such ids that are remembered: another time they are asked for last."""
_BRANCHES: Final = 16
"""Schemas in one step of the plan. A step is a method in Java, which is slow beyond 8,000 bytes."""


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
        self._missing: dict[int, None] = {}
        """Ids that the registry did not have, in the order in which it was asked."""
        self._missing_now: dict[int, str] = {}
        """Those of the last asking, and what the registry said."""
        self._has_asked_all = True
        """Whether the last asking was for all ids."""
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

    def ask(
        self,
        ids: Collection[int],
        topics: Collection[str] = (),
        place: Callable[[int], str] = lambda _: "",
    ) -> None:
        """Ask the registry for schemas, and for the latest one of the topics if one is new.

        Ids that were not missing before are asked for first, the lowest first, because a registry
        counts. After `MISSES_MAX` that it does not have, it is not asked for the others: they are
        those of values that are not framed but look so.

        `place` says where an id is, for an error of the registry. Raises SchemaRegistryError.
        """
        new = set(ids) - self._schemas.keys()
        missed = [number for number in self._missing if number in new]
        waiting = deque([*sorted(new.difference(missed)), *missed])
        self._missing_now.clear()
        while waiting and len(self._missing_now) < MISSES_MAX:
            number = waiting.popleft()
            self._missing.pop(number, None)
            try:
                self._schemas[number] = self._registry.schema(number)
            except SchemaNotFoundError as fault:
                self._missing_now[number] = str(fault)
                self._missing[number] = None
            except (SchemaRegistryError, InvalidInputError) as fault:
                raise type(fault)(f"{place(number)}{fault}") from fault
        self._has_asked_all = not waiting
        for number in [*self._missing][: max(0, len(self._missing) - _REMEMBERED)]:
            del self._missing[number]
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
        is_flat = are_flat([reader, *[writer for writer, _ in branches]])
        text = marked(reader, is_flat=is_flat)
        options = {**self._options, "avroSchema": text}
        column = F.col(self._column).cast("binary")
        struct = f"kl_{self._column}"
        whole, number = f"{struct}_marked", f"{struct}_id"

        def chosen(part: Sequence[tuple[Any, list[int]]], is_first: bool) -> Column:
            value: Any = F
            for writer, ids in part:
                its = marked(writer, is_flat=is_flat, has_head=True)
                value = value.when(_is_any(number, ids), decoded(F.col(whole), its, options))
            if not part:
                value = decoded(F.lit(None).cast("binary"), text, {})
            so_far = F.lit(None) if is_first else F.col(struct)
            return F.when(so_far.isNull(), value).otherwise(so_far)

        # Columns, so that Spark makes them once for all branches.
        frame = df.withColumns({whole: with_marker(column), number: checksum_of_id(column)})
        for start in range(0, max(1, len(branches)), _BRANCHES):
            part = branches[start : start + _BRANCHES]
            frame = with_decoded(frame, struct, partial(chosen, part, start == 0))
        frame = with_reason(frame, self._reason(frame, column, ends(F.col(struct)), strangers))
        value = value_of(F.col(struct), reader, self._column, is_flat=is_flat)
        return with_struct(frame, self._column, value).drop(struct, whole, number)

    def _branches(self, reader: Any) -> tuple[list[tuple[Any, list[int]]], dict[int, str]]:
        """Return (schema, ids) of writers that share bytes, and why other ids have no branch.

        Raises InvalidInputError for schemas that clash with the reader's.
        """
        ours = AvroType(reader)
        forms: dict[str, tuple[Any, list[int]]] = {}
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
            form = theirs.bytes_form()
            forms.setdefault(form, (schema_of(schema.text), []))[1].append(number)
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
        told |= {n: f"{it} has the schema id {n}: {said}" for n, said in self._missing_now.items()}
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
        if not self._has_asked_all:
            many = f"the registry was not asked after {MISSES_MAX} others that it does not have"
            words = F.format_string(f"{it} has the schema id %s, for which {many}", number)
        reason = reason.when(~_is_any(f"kl_{self._column}_id", known), words)
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


def _is_any(column: str, ids: Iterable[int]) -> Column:
    """Return whether a column of checksums stands for one of these ids."""
    from pyspark.sql import functions as F

    return F.coalesce(F.col(column).isin(*map(checksum, ids)), F.lit(False))


def _listed(ids: Collection[int]) -> str:
    named = ", ".join(map(str, sorted(ids)[-10:]))
    return named if len(ids) <= 10 else f"{len(ids)} ids, the last of them {named}"
