"""Kafka's topic configs for the log and the cleaner: names, defaults and ranges.

The ranges are those of the latest Kafka, except that `segment.bytes` may be as small as it once
could (14), because small logs need small segments. Kafka 4 uses `internal.segment.bytes` for that;
it overrides `segment.bytes` here too. A Kafka config without effect here (replication and tiered
storage need a cluster) is refused with that reason.

Kafka: org.apache.kafka.storage.internals.log.LogConfig.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType
from typing import Any

from kafkalog.errors import InvalidInputError
from kafkalog.storage_engine.format import layout

_MAX = layout.INT64_MAX


def _whole(low: int, high: int = _MAX) -> Callable[[str], int]:
    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise ValueError(f"a whole number in [{low}, {high}]") from None
        if not low <= value <= high:
            raise ValueError(f"a whole number in [{low}, {high}]")
        return value

    return parse


def _ratio(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0.0 <= value <= 1.0:
        raise ValueError("a number in [0, 1]")
    return value


def _one_of(*choices: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text not in choices:
            raise ValueError("one of " + ", ".join(choices))
        return text

    return parse


def _policy(text: str) -> frozenset[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not set(names) <= {"compact", "delete"} or len(set(names)) != len(names):
        raise ValueError("compact, delete, compact,delete, or nothing (no cleanup at all)")
    return frozenset(names)


def _bool(text: str) -> bool:
    value = text.strip().lower()
    if value not in ("true", "false"):
        raise ValueError("true or false")
    return value == "true"


def _gzip_level(text: str) -> int:
    value = _whole(-1, 9)(text)
    if value == 0:
        raise ValueError("-1 or a whole number in [1, 9]")
    return value


@dataclass(frozen=True, slots=True)
class TopicConfig:
    """A topic's settings; each field is Kafka's config with `_` for `.`, in Kafka's unit.

    Fields that begin with `kafkalog` are ours. The default policy is Kafka's (`delete`); the sink
    and `DirectoryLog.create_topic` set their own.
    """

    cleanup_policy: frozenset[str] = frozenset({"delete"})
    segment_bytes: int = 1 << 30
    has_segment_bytes: bool = False
    """Whether the topic sets it; see `closes_by_itself`."""
    segment_ms: int = 604_800_000
    segment_jitter_ms: int = 0
    segment_index_bytes: int = 10_485_760
    index_interval_bytes: int = 4096
    retention_ms: int = 604_800_000
    """With the policy delete: remove segments whose latest record is older; -1 for never."""
    retention_bytes: int = -1
    """With the policy delete: remove the oldest segments while this many bytes remain; -1: never.
    """
    flush_messages: int = _MAX
    """Unset: sync every commit. Set: sync once this many rows are unsynced (see `is_relaxed`)."""
    flush_ms: int = _MAX
    """Unset: sync every commit. Set: the first commit after this time syncs."""
    max_message_bytes: int = 1_048_588
    delete_retention_ms: int = 86_400_000
    min_compaction_lag_ms: int = 0
    max_compaction_lag_ms: int = _MAX
    min_cleanable_dirty_ratio: float = 0.5
    file_delete_delay_ms: int = 60_000
    compression_type: str = "producer"
    compression_gzip_level: int = -1
    compression_lz4_level: int = 9
    compression_zstd_level: int = 3
    message_timestamp_type: str = "CreateTime"
    message_timestamp_before_max_ms: int = _MAX
    """How far a row's own timestamp may lie before the writer's clock."""
    message_timestamp_after_max_ms: int = 3_600_000
    """How far it may lie after the writer's clock (Kafka 4's default; Kafka 3 had no limit)."""
    preallocate: bool = False
    """Allocate `segment_bytes` of disk for the active segment at once; trim it on closing."""
    kafkalog_cleaner_merge_batches: bool = True
    """Ours: the cleaner merges the remains of small batches into larger ones. False: it filters
    every batch in place, as Kafka does."""

    @property
    def is_deleted(self) -> bool:
        """Whether retention removes old segments, by time and by size."""
        return "delete" in self.cleanup_policy

    @property
    def is_compacted(self) -> bool:
        """Whether the cleaner keeps only the latest record per key."""
        return "compact" in self.cleanup_policy

    @property
    def closes_by_itself(self) -> bool:
        """Whether the cleaner closes the active segment once a cleaning with it is due.

        A topic that sets segment.bytes leaves that to its writers, as in Kafka.
        """
        return self.is_compacted and not self.has_segment_bytes

    @property
    def needs_keys(self) -> bool:
        """Whether every record needs a key: a cleaning would delete those without one (C53)."""
        return self.is_compacted

    @property
    def segment_lifetime_ms(self) -> int:
        """How far a batch may be from a segment's first one, in ms, less the jitter (R2)."""
        if not self.is_compacted:
            return self.segment_ms
        return min(self.segment_ms, self.max_compaction_lag_ms)

    @property
    def is_relaxed(self) -> bool:
        """Whether a commit may be acknowledged before it is synced."""
        return self.flush_messages != _MAX or self.flush_ms != _MAX

    @classmethod
    def parse(cls, config: Mapping[str, str]) -> TopicConfig:
        """Parse Kafka's names and texts; raises InvalidInputError with the config and its range."""
        return _parse(tuple(sorted((str(k), str(v)) for k, v in config.items())))


_PARSERS: Mapping[str, Callable[[str], Any]] = MappingProxyType(
    {
        "cleanup.policy": _policy,
        "segment.bytes": _whole(14, layout.INT32_MAX),
        "segment.ms": _whole(1),
        "segment.jitter.ms": _whole(0),
        "internal.segment.bytes": _whole(14, layout.INT32_MAX),
        "segment.index.bytes": _whole(4, layout.INT32_MAX),
        "index.interval.bytes": _whole(0, layout.INT32_MAX),
        "retention.ms": _whole(-1),
        "retention.bytes": _whole(-_MAX - 1),
        "flush.messages": _whole(1),
        "flush.ms": _whole(0),
        "max.message.bytes": _whole(0, layout.INT32_MAX),
        "delete.retention.ms": _whole(0),
        "min.compaction.lag.ms": _whole(0),
        "max.compaction.lag.ms": _whole(1),
        "min.cleanable.dirty.ratio": _ratio,
        "file.delete.delay.ms": _whole(0),
        "compression.type": _one_of("uncompressed", "gzip", "snappy", "lz4", "zstd", "producer"),
        "compression.gzip.level": _gzip_level,
        "compression.lz4.level": _whole(1, 17),
        "compression.zstd.level": _whole(-131_072, 22),
        "message.timestamp.type": _one_of("CreateTime", "LogAppendTime"),
        "message.timestamp.before.max.ms": _whole(0),
        "message.timestamp.after.max.ms": _whole(0),
        "preallocate": _bool,
        "kafkalog.cleaner.merge.batches": _bool,
    }
)
NAMES = tuple(_PARSERS)
"""The configs that a topic accepts."""

_REPLICATION = "a log directory has no replicas and elects no leader"
_TIERED = "there is no tiered storage here, all segments are in the directory"
_WITHOUT_EFFECT: Mapping[str, str] = MappingProxyType(
    {
        "min.insync.replicas": _REPLICATION,
        "unclean.leader.election.enable": _REPLICATION,
        "leader.replication.throttled.replicas": _REPLICATION,
        "follower.replication.throttled.replicas": _REPLICATION,
        "remote.storage.enable": _TIERED,
        "local.retention.ms": _TIERED,
        "local.retention.bytes": _TIERED,
        "remote.log.copy.disable": _TIERED,
        "remote.log.delete.on.disable": _TIERED,
        "remote.copy.lag.ms": _TIERED,
        "remote.copy.lag.bytes": _TIERED,
        "max.decompressed.message.bytes": (
            "whatever a record claims, no batch is decompressed past 256 MiB, which bounds memory"
        ),
        "message.format.version": "batches are always written in format v2, as Kafka 4 does",
        "message.downconversion.enable": "batches are always read as they are, as Kafka 4 does",
        "message.timestamp.difference.max.ms": (
            "Kafka 4 has message.timestamp.before.max.ms and message.timestamp.after.max.ms instead"
        ),
    }
)
"""Kafka's other topic configs, and why they are refused."""


def check_mapping(config: object) -> None:
    """Raise InvalidInputError for what a caller gives as topic configs that isn't a mapping."""
    if not isinstance(config, Mapping):
        raise InvalidInputError(
            f"config: expected a mapping, such as {{'retention.ms': '60000'}}, found {config!r}"
        )


def as_texts(config: Mapping[str, object]) -> dict[str, str]:
    """Return configs as Kafka keeps them, as texts: a number in digits, `true`, `false`."""
    return {
        name: str(value).lower() if isinstance(value, bool) else str(value)
        for name, value in config.items()
    }


def usable(config: Mapping[str, str]) -> dict[str, str]:
    """Return those of a broker's topic configs that have an effect here."""
    found = {}
    for name, text in config.items():
        with contextlib.suppress(InvalidInputError):
            TopicConfig.parse({name: text})
            found[name] = text
    return found


@lru_cache(maxsize=1024)
def _parse(config: tuple[tuple[str, str], ...]) -> TopicConfig:
    values: dict[str, Any] = {}
    for name, text in config:
        parse = _PARSERS.get(name)
        if name in _WITHOUT_EFFECT:
            raise InvalidInputError(
                f"topic config {name} has no effect here: {_WITHOUT_EFFECT[name]}; leave it out"
            )
        if parse is None:
            import difflib

            near = difflib.get_close_matches(name, NAMES, 3)
            hint = f"did you mean {' or '.join(near)}?" if near else "known: " + ", ".join(NAMES)
            raise InvalidInputError(f"unknown topic config {name!r}; {hint}")
        try:
            values[name.replace(".", "_")] = parse(text)
        except ValueError as fault:
            raise InvalidInputError(
                f"topic config {name}: expected {fault}, found {text!r}"
            ) from None
    if "internal_segment_bytes" in values:
        values["segment_bytes"] = values.pop("internal_segment_bytes")
    parsed = TopicConfig(**values, has_segment_bytes="segment_bytes" in values)
    if parsed.min_compaction_lag_ms > parsed.max_compaction_lag_ms:
        raise InvalidInputError(
            f"topic config min.compaction.lag.ms ({parsed.min_compaction_lag_ms}) must not exceed "
            f"max.compaction.lag.ms ({parsed.max_compaction_lag_ms})"
        )
    return parsed
