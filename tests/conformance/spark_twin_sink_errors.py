"""Writes that are wrong, and the words of the connector's error that kafkalog's has too.

Where a task fails the words are those of Kafka's client or broker, and beside them stand ours. Some
writes only one of the two takes, by Spark's rules for sinks in Python or on purpose.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from tests.conformance.spark_twin_sink import KAFKA, OURS

TOPIC, PARTITIONS = "refused", 3
"""A topic to which nothing is written."""
COMPACTED, SMALL = "refused-compacted", "refused-small"
REFUSING = {COMPACTED: {"cleanup.policy": "compact"}, SMALL: {"max.message.bytes": "500"}}
"""Others, and their configs."""
ACCEPTING = "accepting"
"""The topic of the writes that one of the two takes."""


class Case(NamedTuple):
    """Rows made of `id`, and how they are written."""

    columns: tuple[str, ...]
    words: tuple[str, ...] = ()
    """What both say."""
    theirs: str = ""
    """What the connector says, and"""
    ours: str = ""
    """what kafkalog says instead."""
    options: Mapping[str, str] = MappingProxyType({})
    mode: str | None = "append"
    """Of a batch how it saves, of a stream what it puts out."""
    is_stream: bool = False
    accepted_by: str = ""
    """The format that finds nothing wrong."""


KEY, VALUE = "CAST(id AS string) AS key", "CAST(id AS string) AS value"
_TO = {"topic": TOPIC}


def _both(name: str, case: Case) -> dict[str, Case]:
    """The case in batch and in a stream."""
    return {name: case, f"{name}, streamed": case._replace(is_stream=True)}


def _column(column: str, found: str, wanted: str) -> Case:
    name = column.rsplit(" ", 1)[1]
    words = f"{name} attribute unsupported type {found}. {name} must be a(n) {wanted}"
    columns = (column,) if name == "value" else (column, VALUE)
    return Case(columns, (words,), options={} if name == "topic" else _TO)


CASES: dict[str, Case] = {
    **_both(
        "no topic",
        Case(
            (KEY, VALUE),
            (
                "topic option required when no 'topic' attribute is present. "
                "Use the topic option for setting a topic.",
            ),
        ),
    ),
    **_both("no value", Case((KEY,), ("Required attribute 'value' not found",), options=_TO)),
    "value in another letter case": Case(
        ("'v' AS Value",), ("Required attribute 'value' not found",), options=_TO
    ),
    **_both("topic is a number", _column("5 AS topic", "int", "string")),
    **_both("key is a number", _column("id AS key", "bigint", "string or binary")),
    **_both("value is a number", _column("1.5D AS value", "double", "string or binary")),
    "value is a struct": _column(
        "named_struct('a', 1, 'b', array('x')) AS value",
        "struct<a:int,b:array<string>>",
        "string or binary",
    ),
    "key is of no type": _column("NULL AS key", "void", "string or binary"),
    **_both("partition is a long", _column("id AS partition", "bigint", "int")),
    "partition is a text": _column("'1' AS partition", "string", "int"),
    **_both(
        "headers are a map",
        _column(
            "map('a', X'00') AS headers",
            "map<string,binary>",
            "array<struct<key:string,value:binary>>",
        ),
    ),
    "headers have other names": _column(
        "array(named_struct('k', 'a', 'v', X'00')) AS headers",
        "array<struct<k:string,v:binary>>",
        "array<struct<key:string,value:binary>>",
    ),
    "headers are texts": _column(
        "array(named_struct('key', 'a', 'value', 'b')) AS headers",
        "array<struct<key:string,value:string>>",
        "array<struct<key:string,value:binary>>",
    ),
    "overwritten": Case(
        (VALUE,), ("Save mode Overwrite not allowed for Kafka",), options=_TO, mode="overwrite"
    ),
    "ignored": Case(
        (VALUE,),
        theirs="Save mode Ignore not allowed for Kafka",
        ours='"Ignore" mode',
        options=_TO,
        mode="ignore",
    ),
    **{
        case_name: case
        for kind in ("key", "value")
        for case_name, case in _both(
            f"{kind} serializer",
            Case(
                (VALUE,),
                (f"Kafka option '{kind}.serializer' is not supported",),
                options={**_TO, f"kafka.{kind}.serializer": "foo"},
            ),
        ).items()
    },
    **_both(
        "topic is null",
        Case(
            (f"IF(id = 2, NULL, '{TOPIC}') AS topic", VALUE),
            (
                "The Kafka message data sent to the producer contains a null topic. "
                "Use the `topic` option for setting a default topic.",
            ),
        ),
    ),
    "topic has a slash": Case(
        ("'a/b' AS topic", VALUE),
        theirs="InvalidTopicException",
        ours="topic name 'a/b' is not allowed",
    ),
    "topic of the option has a slash": Case(
        (VALUE,),
        theirs="InvalidTopicException",
        ours="topic name 'a/b' is not allowed",
        options={"topic": "a/b"},
    ),
    **_both(
        "partition beyond the last",
        Case(
            (f"{PARTITIONS} AS partition", VALUE),
            theirs=f"Partition 3 of topic {TOPIC} with partition count 3 is not present",
            ours=f"3 is out of range, topic '{TOPIC}' has partitions 0 to 2",
            options={**_TO, "kafka.max.block.ms": "4000"},
        ),
    ),
    "partition below zero": Case(
        ("-1 AS partition", VALUE),
        theirs="Invalid partition: -1. Partition number should always be non-negative or null",
        ours=f"-1 is out of range, topic '{TOPIC}' has partitions 0 to 2",
        options=_TO,
    ),
    "record too large": Case(
        ("repeat('x', 2000000) AS value",),
        theirs="is 2000088 bytes when serialized which is larger than",
        ours="max.message.bytes",
        options=_TO,
    ),
    "header without a name": Case(
        ("array(named_struct('key', CAST(NULL AS string), 'value', X'00')) AS headers", VALUE),
        theirs="null",
        ours="header",
        options=_TO,
    ),
    "header that is null": Case(
        ("array(IF(id = 1, NULL, named_struct('key', 'a', 'value', X'00'))) AS headers", VALUE),
        theirs="null",
        ours="header",
        options=_TO,
    ),
    "record without a key for a compacted topic": Case(
        (VALUE,),
        theirs="Compacted topic cannot accept message without key",
        ours=f"topic '{COMPACTED}' is compacted",
        options={"topic": COMPACTED},
    ),
    "null key for a compacted topic": Case(
        ("IF(id = 0, NULL, 'k') AS key", VALUE),
        theirs="Compacted topic cannot accept message without key",
        ours=f"topic '{COMPACTED}' is compacted (cleanup.policy has compact) and 1 of 3 rows have",
        options={"topic": COMPACTED},
    ),
    "record too large for its topic": Case(
        ("repeat('x', 1000) AS value",),
        theirs="larger than the max message size the server will accept",
        ours="expected at most 500 bytes",
        # A batch of several the client would cut up and send again, for ever.
        options={"topic": SMALL, "kafka.batch.size": "1"},
    ),
    "key of another collation": Case(
        ("collate('a', 'UTF8_LCASE') AS key", VALUE),
        theirs="key attribute unsupported type string collate UTF8_LCASE",
        options={"topic": ACCEPTING},
        accepted_by=OURS,
    ),
    "timestamp is a text": Case(
        ("'now' AS timestamp", VALUE),
        ours="timestamp attribute unsupported type string. timestamp must be a(n) timestamp",
        options={"topic": ACCEPTING},
        accepted_by=KAFKA,
    ),
    **_both(
        "topic that is missing",
        Case(
            (KEY, VALUE),
            theirs="not present in metadata after 3000 ms",
            options={"topic": "missing", "kafka.max.block.ms": "3000"},
            accepted_by=OURS,
        ),
    ),
    "no save mode": Case(
        (VALUE,),
        ours='cannot be written in the "ErrorIfExists" mode',
        options={"topic": ACCEPTING},
        mode=None,
        accepted_by=KAFKA,
    ),
    "two columns of one name": Case(
        (VALUE, "'second' AS value"),
        ours="[DUPLICATED_FIELD_NAME_IN_ARROW_STRUCT]",
        options={"topic": ACCEPTING},
        accepted_by=KAFKA,
    ),
    "output mode update": Case(
        (VALUE,),
        ours="does not support Update mode",
        options={"topic": ACCEPTING},
        mode="update",
        is_stream=True,
        accepted_by=KAFKA,
    ),
}
ACCEPTED = [name for name, case in CASES.items() if case.accepted_by]
"""What one of the two takes."""
