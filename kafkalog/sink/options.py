"""The options of a write, parsed from Spark's strings.

Names are those of Spark's Kafka sink if it has them; letter case does not matter, as in Spark. An
unknown name is an error: a misspelt `txnVersion` would otherwise silently lose the exactly-once
guarantee.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from kafkalog.errors import InvalidInputError
from kafkalog.spark_options import OF_A_READ, OF_A_WRITE, are_for_both
from kafkalog.storage_engine.format import layout
from kafkalog.storage_engine.metadata.address import log_directory, resolved
from kafkalog.storage_engine.metadata.config import TopicConfig
from kafkalog.storage_engine.metadata.new_topic import NewTopic
from kafkalog.storage_engine.object_store.address import StoreAddress, store_address
from kafkalog.storage_engine.writing.staging import BATCH_SIZE

_TOPIC_PREFIX = "topic."
_CLIENT_PREFIX = "kafka."
_BY_LOWER_CASE = {name.lower(): name for name in OF_A_WRITE}
_READ_BY_LOWER_CASE = {name.lower(): name for name in OF_A_READ}
_FORBIDDEN = ("kafka.key.serializer", "kafka.value.serializer")
_SPARKS_OWN = frozenset(
    {
        "checkpointlocation",
        "queryname",
        "outputmode",
        "mergeschema",
        # The reserved properties of a table, which saveAsTable adds.
        "provider",
        "owner",
        "comment",
        "collation",
        "external",
        "location",
        "is_managed_location",
        "table_type",
    }
)
_SPARKS_PREFIXES = ("option.", "_async", "asyncprogress", "spark.")


@dataclass(frozen=True, slots=True, kw_only=True)
class SinkOptions:
    """The parsed options of a write; the option's name is in brackets."""

    root: Path | StoreAddress
    """The directory of the log, or its address in an object store [path, store.*]."""
    topic: str | None = None
    """The topic of every row, whatever a `topic` column says [topic]; None: the column decides."""
    new_topic: NewTopic = field(default_factory=partial(NewTopic.of, 1, {}))
    """A topic that the write creates [numPartitions, topic.<config>]."""
    given_for_topics: Mapping[str, str] = field(default_factory=dict)
    """Those of the last two options that the user gave; they do not change an existing topic."""
    txn_app_id: str | None = None
    """Names the writer of a batch write, so that a repeated one is skipped [txnAppId]."""
    txn_version: int | None = None
    """Number of the batch write, rising with each new one of its writer [txnVersion]."""
    codec: str | None = None
    """none, gzip, snappy, lz4, zstd [kafka.compression.type]; None: the topic's config decides."""
    batch_size: int = BATCH_SIZE
    """Bytes at which a record batch is closed [batch.size, kafka.batch.size]."""
    reset_writer: bool = False
    """Accept a batch id below the last committed one [resetWriter]."""
    creates: bool = True
    """Whether a log or a topic that is missing is created [create]."""
    checkpoint: str | None = None
    """The stream's checkpoint, if it was given as an option [checkpointLocation]."""
    query_name: str | None = None
    """The stream's name [queryName], which is that of its checkpoint in the session's directory."""
    ignored: tuple[str, ...] = ()
    """Options of Kafka's client, which have no effect without a broker."""

    @property
    def place(self) -> str:
        """The one name of the log: two spellings of a directory are one."""
        return str(resolved(self.root) if isinstance(self.root, Path) else self.root)

    @property
    def target(self) -> str:
        """The topic of a writer's batch ids; `*` when each row names its own."""
        return self.topic if self.topic is not None else "*"

    @property
    def created(self) -> NewTopic | None:
        """How the commit creates the rows' topics; None if the driver does it, or nobody may."""
        return self.new_topic if self.topic is None and self.creates else None

    @classmethod
    def parse(cls, options: Mapping[str, str]) -> SinkOptions:
        """Parse the strings; raises InvalidInputError that names the option and its values."""
        given = {str(name).lower(): str(value) for name, value in options.items()}
        ignored = _check_names(given)
        topic = given.get("topic")
        if topic is not None:
            topic = topic.strip()
            fault = layout.topic_name_fault(topic)
            if fault:
                raise InvalidInputError(f"option topic: {fault}")
        app_id, version = _transaction(given)
        return cls(
            root=store_address(given) or log_directory(given),
            topic=topic,
            new_topic=_new_topic(given),
            given_for_topics=_given_for_topics(given),
            txn_app_id=app_id,
            txn_version=version,
            codec=_codec(given),
            batch_size=_batch_size(given),
            reset_writer=_flag(given, "resetWriter", "false"),
            creates=_flag(given, "create", "true"),
            checkpoint=given.get("checkpointlocation"),
            query_name=given.get("queryname"),
            ignored=ignored,
        )


def _check_names(given: Mapping[str, str]) -> tuple[str, ...]:
    """Refuse unknown names; return the options of Kafka's client, which are ignored."""
    ignored = []
    reads = are_for_both(given)
    for name in given:
        if name in _FORBIDDEN:
            raise InvalidInputError(
                f"Kafka option '{name.removeprefix(_CLIENT_PREFIX)}' is not supported: "
                "keys and values are written as the bytes they are"
            )
        if name in _BY_LOWER_CASE or name in _SPARKS_OWN or name.startswith(_SPARKS_PREFIXES):
            continue
        if name.startswith(_TOPIC_PREFIX):
            continue
        if name.startswith(_CLIENT_PREFIX):
            ignored.append(name)
            continue
        if name in _READ_BY_LOWER_CASE:
            if reads:
                continue
            raise InvalidInputError(
                f"option {_READ_BY_LOWER_CASE[name]} is an option of a read, and this is a write: "
                f"leave it out; a write takes: {', '.join(OF_A_WRITE)}"
            )
        import difflib

        near = difflib.get_close_matches(name, [*_BY_LOWER_CASE, "checkpointlocation"], 2, 0.7)
        hint = " or ".join(_BY_LOWER_CASE.get(match, "checkpointLocation") for match in near)
        question = f"did you mean {hint}? " if near else ""
        raise InvalidInputError(
            f"unknown option {name!r} of a write; {question}known: {', '.join(OF_A_WRITE)}, "
            "and kafka.* options, which are ignored"
        )
    return tuple(sorted(ignored))


def _transaction(given: Mapping[str, str]) -> tuple[str | None, int | None]:
    app_id = given.get("txnappid")
    if (app_id is None) != ("txnversion" not in given):
        alone, missing = ("txnAppId", "txnVersion") if app_id else ("txnVersion", "txnAppId")
        raise InvalidInputError(
            f"option {alone} is given without {missing}: a write is exactly once by both together"
        )
    if app_id is None:
        return None, None
    if not app_id.strip():
        raise InvalidInputError("option txnAppId: expected a name, found an empty text")
    return app_id, _whole(given, "txnVersion", 0, 0)


def _new_topic(given: Mapping[str, str]) -> NewTopic:
    config = {
        name.removeprefix(_TOPIC_PREFIX): value
        for name, value in given.items()
        if name.startswith(_TOPIC_PREFIX)
    }
    TopicConfig.parse(config)
    partitions = _whole(given, "numPartitions", 1, 1, layout.PARTITIONS_MAX)
    return NewTopic.of(partitions, config)


def _given_for_topics(given: Mapping[str, str]) -> dict[str, str]:
    found = {name: text for name, text in given.items() if name.startswith(_TOPIC_PREFIX)}
    if "numpartitions" in given:
        found["numPartitions"] = given["numpartitions"]
    return found


def _codec(given: Mapping[str, str]) -> str | None:
    codec = given.get("kafka.compression.type")
    if codec is None:
        return None
    codec = codec.strip().lower()
    if codec not in layout.CODECS:
        raise InvalidInputError(
            f"option kafka.compression.type: expected one of {', '.join(layout.CODECS)}, "
            f"found {codec!r}"
        )
    return codec


def _batch_size(given: Mapping[str, str]) -> int:
    name = "batch.size" if "batch.size" in given else "kafka.batch.size"
    return _whole(given, name, 1, BATCH_SIZE, layout.INT32_MAX)


def _whole(
    given: Mapping[str, str], name: str, low: int, default: int, high: int = layout.INT64_MAX
) -> int:
    text = given.get(name.lower())
    if text is None:
        return default
    try:
        value = int(text)
    except ValueError:
        value = low - 1
    if not low <= value <= high:
        raise InvalidInputError(
            f"option {name}: expected a whole number from {low} to {high}, found {text!r}"
        )
    return value


def _flag(given: Mapping[str, str], name: str, default: str) -> bool:
    text = given.get(name.lower(), default).strip().lower()
    if text not in {"true", "false"}:
        raise InvalidInputError(f"option {name}: expected true or false, found {text!r}")
    return text == "true"
