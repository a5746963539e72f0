"""Random topics of a real broker, cleaned by the broker and, as copies, by us.

The broker's cleaner leaves a topic alone while its `min.cleanable.dirty.ratio` is 1. So both get
the same log; then the topics are cleaned on all sides, and compared; then producers write on. What
they write afterwards is appended to the copies batch by batch, with the broker's segments.
"""

from __future__ import annotations

import dataclasses
import random
import shutil
import time
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from confluent_kafka.admin import (
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    NewTopic,
    ResourceType,
)

import kafkalog
from kafkalog.cleaner.config import CleanerConfig
from kafkalog.cleaner.report.status import status
from kafkalog.cleaner.schedule import manager
from kafkalog.cleaner.shelves import moment_of
from kafkalog.log import KafkaLog
from kafkalog.storage_engine.metadata.checkpoints import read_offset_checkpoint
from kafkalog.storage_engine.ownership.adopt import adopt
from kafkalog.storage_engine.place import directory_log_of
from tests.conformance.clients import Sender
from tests.conformance.kafka import KafkaBroker
from tests.conformance.twin_segments import (
    HORIZON,
    Segment,
    differences,
    read_segments,
    record_differences,
)

CODECS = ("none", "gzip", "snappy", "lz4", "zstd")
LARGE_SEGMENTS = str(1 << 30)
_LINGERING = 0
"""Number of the producer whose transaction stays open."""
CHECKPOINT = "cleaner-offset-checkpoint"


def now_ms() -> int:
    return round(time.time() * 1000)


@dataclass(frozen=True)
class Topic:
    """What a topic's records are like."""

    name: str
    config: dict[str, str]
    codecs: tuple[str, ...]
    keys: int
    is_skewed: bool
    tombstones: float
    value_size_max: int
    lingers: bool
    """Whether a transaction may stay open in it while it is cleaned."""


def draw_topic(draw: random.Random, name: str) -> Topic:
    # Where sizes may differ they must decide nothing: two libraries do not compress alike, and a
    # record's timestamp is a difference to the delete horizon, which may take a byte less.
    codecs = draw.choice((("none",), ("none",), (draw.choice(CODECS),), CODECS))
    delete_retention_ms = draw.choice(("0", "86400000"))
    is_exact = codecs == ("none",) and delete_retention_ms != "0"
    size = draw.choice(("5000", "16000")) if is_exact else LARGE_SEGMENTS
    config = {
        "cleanup.policy": "compact",
        "min.cleanable.dirty.ratio": "1",
        "internal.segment.bytes": size,
        "segment.ms": draw.choice(("100", "1000")),
        "index.interval.bytes": draw.choice(("0", "200", "4096")),
        "delete.retention.ms": delete_retention_ms,
        "message.timestamp.type": draw.choice(("CreateTime", "CreateTime", "LogAppendTime")),
    }
    return Topic(
        name,
        config,
        codecs,
        draw.choice((1, 5, 40)),
        draw.random() < 0.5,
        draw.choice((0.0, 0.1, 0.6)),
        draw.choice((3, 60, 500)),
        draw.random() < 0.25,
    )


class Producers:
    """Producers of every kind, which all topics share: their transactions span topics."""

    def __init__(self, broker: KafkaBroker, draw: random.Random, topics: list[Topic]) -> None:
        self._draw = draw
        self._topics = topics
        self._plain = {codec: Sender(broker, compression_type=codec) for codec in CODECS}
        self._idempotent = {
            codec: Sender(broker, compression_type=codec, enable_idempotence=True)
            for codec in CODECS
        }
        self._transactional = [
            (
                codec,
                Sender(
                    broker,
                    transactional_id=f"id-{number}",
                    compression_type=codec,
                    transaction_timeout_ms=800_000,
                ),
            )
            for number, codec in enumerate(("none", "none", "none", *CODECS[1:]))
        ]
        self._open: set[int] = set()

    def write(self, steps: int) -> None:
        """Let them write; one transaction stays open at the end, in some of the topics."""
        for _ in range(steps):
            time.sleep(0.1)
            for number, (_, sender) in enumerate(self._transactional):
                if number not in self._open and self._draw.random() < 0.6:
                    sender.begin()
                    self._open.add(number)
            for topic in self._topics:
                if self._draw.random() < 0.6:
                    self._send(topic)
            for sender in self._senders():
                sender.flush()
            self._end_transactions(0.4)
        self._end_transactions(1.0)

    def _senders(self) -> list[Sender]:
        opened = [sender for n, (_, sender) in enumerate(self._transactional) if n in self._open]
        return [*self._plain.values(), *self._idempotent.values(), *opened]

    def _end_transactions(self, share: float) -> None:
        for number in sorted(self._open):
            is_to_stay = number == _LINGERING and share == 1.0
            if not is_to_stay and self._draw.random() < share:
                sender = self._transactional[number][1]
                if self._draw.random() < 0.5:
                    sender.abort()
                else:
                    sender.commit()
                self._open.discard(number)

    def _send(self, topic: Topic) -> None:
        draw = self._draw
        codec = draw.choice(topic.codecs)
        choices = [self._plain[codec], self._idempotent[codec]]
        choices += [
            sender
            for number, (own, sender) in enumerate(self._transactional)
            if own in topic.codecs
            and number in self._open
            and (number != _LINGERING or topic.lingers)
        ]
        sender = draw.choice(choices)
        for _ in range(draw.randint(1, 6)):
            number = draw.randrange(topic.keys)
            if topic.is_skewed:
                number = int(topic.keys ** draw.random()) - 1
            value = None
            if draw.random() >= topic.tombstones:
                value = b"v" * draw.randrange(topic.value_size_max)
            sender.send(
                topic.name,
                value,
                b"key-%d" % number,
                headers=draw.choice(((), (), (("name", b"header"),))),
            )


class Copy:
    """A copy of the broker's directory, adopted and cleaned by us."""

    def __init__(self, broker: KafkaBroker, root: Path, config: CleanerConfig) -> None:
        shutil.copytree(broker.log_dir, root, ignore=shutil.ignore_patterns(".lock"))
        adopt(root, metadata=broker.directory / "metadata", now_ms=now_ms())
        self._config = config
        self._theirs = broker.log_dir
        self.log: KafkaLog = kafkalog.open(root)

    def follow(self, topic: str) -> None:
        """Append what the broker has and this copy has not, and roll where the broker did."""
        for path in sorted((self._theirs / f"{topic}-0").glob("*.log")):
            end = self.log.offsets(topic)[0][1]
            if int(path.stem) >= end and self._active_base(topic) != int(path.stem):
                with directory_log_of(self.log).transaction() as transaction:
                    transaction.roll(topic, 0, now_ms())
                    transaction.publish(now_ms())
            self.log.append_raw(topic, 0, _from(path.read_bytes(), end), now_ms=now_ms())

    def _active_base(self, topic: str) -> int:
        return self.log.describe(topic).partitions[0].active_base

    def clean(self, topics: Collection[str]) -> dict[str, int]:
        """Clean what the broker's cleaner finds dirty; returns where each topic's ends."""
        ends = {}
        for known in status(moment_of(directory_log_of(self.log), now_ms())):
            if known.topic in topics and known.dirty_bytes:
                (stats,) = manager.clean(
                    directory_log_of(self.log), known.topic, now_ms=now_ms(), config=self._config
                )
                assert stats.error is None, stats.error
                ends[known.topic] = stats.end_offset
        return ends

    def segments(self, topic: str) -> list[Segment]:
        return read_segments(directory_log_of(self.log).partition_directory(topic, 0))


def _from(data: bytes, offset: int) -> bytes:
    """Leave out the batches below an offset, and the room behind the last one."""
    position = first = 0
    while position + 12 <= len(data):
        base = int.from_bytes(data[position : position + 8], "big")
        size = int.from_bytes(data[position + 8 : position + 12], "big")
        if size == 0:
            break
        position += 12 + size
        if base < offset:
            first = position
    return data[first:position]


class BrokerTwin:
    """A broker's topics and two copies: one cleaned as Kafka does, one whose batches we merge."""

    def __init__(self, broker: KafkaBroker, directory: Path, seed: int, count: int) -> None:
        draw = random.Random(seed)
        self._broker = broker
        self._directory = directory
        self.topics = [draw_topic(draw, f"twin-{seed}-{count}-{number}") for number in range(count)]
        new = [NewTopic(topic.name, 1, 1, config=topic.config) for topic in self.topics]
        for future in broker.admin.create_topics(new).values():
            future.result(60)
        wanted = [f"{topic.name}-0" for topic in self.topics]
        broker.wait_until(lambda: all(map(broker.has_directory, wanted)), 60)
        self._producers = Producers(broker, draw, self.topics)
        self._copies: list[Copy] = []
        self.cleaned = 0

    def round(self, steps: int) -> list[str]:
        """Write, clean on all sides, and say how the logs differ."""
        self._producers.write(steps)
        self._broker.wait_until(self._is_written)
        if self._copies:
            for topic in self.topics:
                for copy in self._copies:
                    copy.follow(topic.name)
        else:
            plain = CleanerConfig(merge_batches=False, spill=False)
            for name, config in (("plain", plain), ("merged", CleanerConfig())):
                self._copies.append(Copy(self._broker, self._directory / name, config))
        ratio = [("min.cleanable.dirty.ratio", "0")]
        for copy in self._copies:
            for topic in self.topics:
                copy.log.alter_topic(topic.name, {**topic.config, **dict(ratio)})
        names = {topic.name for topic in self.topics}
        ends = [copy.clean(names) for copy in self._copies]
        assert ends[0] == ends[1]
        self.cleaned += len(ends[0])
        self._let_broker_clean(ends[0])
        return [line for topic in self.topics for line in self._compare(topic)]

    def _is_written(self) -> bool:
        """Whether all markers of ended transactions are there: nothing grows any more."""
        before = self._sizes()
        for _ in range(4):
            time.sleep(0.25)
            if self._sizes() != before:
                return False
        return True

    def _sizes(self) -> list[int]:
        paths = (self._broker.log_dir / f"{topic.name}-0" for topic in self.topics)
        return [log.stat().st_size for path in paths for log in sorted(path.glob("*.log"))]

    def _let_broker_clean(self, ends: dict[str, int]) -> None:
        """Wait until the broker's cleaner has come as far as ours, then keep it away again."""
        self._alter("0")

        def is_done() -> bool:
            found = self._checkpoint()
            return all(found.get((topic, 0), 0) >= end for topic, end in ends.items())

        self._broker.wait_until(is_done, 120)
        self._alter("1")
        found = self._checkpoint()
        assert {topic: found[topic, 0] for topic in ends} == ends

    def _checkpoint(self) -> dict[tuple[str, int], int]:
        path = self._broker.log_dir / CHECKPOINT
        return read_offset_checkpoint(path) if path.exists() else {}

    def _alter(self, ratio: str) -> None:
        entry = ConfigEntry(
            "min.cleanable.dirty.ratio", ratio, incremental_operation=AlterConfigOpType.SET
        )
        resources = [
            ConfigResource(ResourceType.TOPIC, topic.name, incremental_configs=[entry])
            for topic in self.topics
        ]
        for future in self._broker.admin.incremental_alter_configs(resources).values():
            future.result(60)

    def _compare(self, topic: Topic) -> list[str]:
        theirs = read_segments(self._broker.log_dir / f"{topic.name}-0")
        plain, merged = (copy.segments(topic.name) for copy in self._copies)
        found = differences(without_horizons(theirs), without_horizons(plain))
        found += [f"merged: {line}" for line in record_differences(theirs, merged)]
        return [f"{topic.name} {topic.config}: {line}" for line in found]


def without_horizons(segments: list[Segment]) -> list[Segment]:
    """Leave the delete horizons out, as they come from the clock; and indexes beside them."""
    return [_without_horizons(segment) for segment in segments]


def _without_horizons(segment: Segment) -> Segment:
    has_horizon = [bool(batch.attributes & HORIZON) for batch in segment.batches]
    batches = tuple(
        dataclasses.replace(batch, base_timestamp=0) if has else batch
        for batch, has in zip(segment.batches, has_horizon, strict=True)
    )
    index = () if any(has_horizon) else segment.index
    return dataclasses.replace(segment, batches=batches, index=index)
