"""What real producers write through a broker: every kind of record, producer and transaction."""

from __future__ import annotations

import random

from confluent_kafka import TopicPartition

from tests.conformance.clients import Partition, Sender, transaction
from tests.conformance.kafka import KafkaBroker

CODECS = ("none", "gzip", "snappy", "lz4", "zstd")
NOW_MS = 1_700_000_000_000
SHAPES, STAMPED, TRANSACTIONS, OPEN, COMPACTED, TRIMMED, EMPTY = TOPICS = (
    "shapes",
    "stamped",
    "transactions",
    "open-transactions",
    "compacted",
    "trimmed",
    "nothing",
)
PARTITIONS = {SHAPES: 3, TRANSACTIONS: 2}
"""How many partitions a topic has; 1 where it says nothing."""

_FOREVER = {"retention.ms": "-1", "index.interval.bytes": "300"}
_SEGMENTS = {**_FOREVER, "segment.ms": "60000"}
_CONFIG = {
    SHAPES: {**_SEGMENTS, "cleanup.policy": "delete"},
    STAMPED: {**_FOREVER, "cleanup.policy": "delete", "message.timestamp.type": "LogAppendTime"},
    TRANSACTIONS: {**_SEGMENTS, "cleanup.policy": "delete"},
    OPEN: {**_FOREVER, "cleanup.policy": "delete"},
    COMPACTED: {**_SEGMENTS, "cleanup.policy": "compact", "min.cleanable.dirty.ratio": "0"},
    TRIMMED: {**_SEGMENTS, "cleanup.policy": "delete"},
    EMPTY: {"cleanup.policy": "delete"},
}


def create_topics(broker: KafkaBroker) -> None:
    for topic in TOPICS:
        broker.create_topic(topic, PARTITIONS.get(topic, 1), _CONFIG[topic])


def partitions() -> list[Partition]:
    return [(topic, n) for topic in TOPICS for n in range(PARTITIONS.get(topic, 1))]


def send_some(
    sender: Sender, draw: random.Random, topic: str, now_ms: int, *, partition: int = 0
) -> None:
    """Send records of every shape: no key, no value, empty, large, headers, times out of order."""
    for _ in range(draw.randrange(5, 40)):
        is_keyed = topic == COMPACTED or draw.random() < 0.8
        names = draw.choices(("a", "b", "ü"), k=draw.choice((0, 0, 2)))
        sender.send(
            topic,
            draw.choice((None, b"", draw.randbytes(20), b"text " * draw.randrange(200))),
            b"key-%d" % draw.randrange(30) if is_keyed else None,
            partition=partition,
            timestamp=now_ms + draw.randrange(-1000, 1000),
            headers=[(name, draw.choice((None, b"", b"\0\xff"))) for name in names],
        )


class Traffic:
    """Producers of all kinds on one broker, which stay while it is stopped and started."""

    def __init__(self, broker: KafkaBroker, seed: int) -> None:
        self._broker = broker
        self._draw = random.Random(seed)
        self._now_ms = NOW_MS
        self._plain = Sender(broker)
        self._by_codec = [
            Sender(broker, compression_type=codec, enable_idempotence=number % 2 == 0)
            for number, codec in enumerate(CODECS)
        ]
        self._in_transactions = [
            Sender(broker, transactional_id=f"id-{number}", compression_type=CODECS[number])
            for number in range(4)
        ]

    def round(self) -> None:
        """Write to every topic; the times of two rounds are further apart than `segment.ms`."""
        self._now_ms += 120_000
        for sender in self._by_codec:
            for topic, partition in partitions():
                if topic in {SHAPES, STAMPED, COMPACTED, TRIMMED}:
                    send_some(sender, self._draw, topic, self._now_ms, partition=partition)
            sender.flush()
        big = self._draw.randbytes(600_000)
        self._plain.send(SHAPES, big, b"big", partition=1, timestamp=self._now_ms)
        self._plain.flush()
        self._interleave()

    def _interleave(self) -> None:
        """Transactions that lie across one another, and records of no transaction among them."""
        senders = self._in_transactions
        for sender in senders:
            sender.begin()
        for _ in range(3):
            for sender in [*senders, self._plain]:
                for partition in range(PARTITIONS[TRANSACTIONS]):
                    send_some(sender, self._draw, TRANSACTIONS, self._now_ms, partition=partition)
                sender.flush()
        send_some(senders[0], self._draw, COMPACTED, self._now_ms)
        send_some(senders[1], self._draw, COMPACTED, self._now_ms)
        for number in self._draw.sample(range(len(senders)), len(senders)):
            if number % 2:
                senders[number].abort()
            else:
                senders[number].commit()
            send_some(self._plain, self._draw, TRANSACTIONS, self._now_ms)
            self._plain.flush()

    def leave_open(self, name: str) -> Sender:
        """Leave a transaction open, with others that end, and plain records, behind its start."""
        sender = Sender(self._broker, transactional_id=name, transaction_timeout_ms=600_000)
        with transaction(self._in_transactions[0]):
            send_some(self._in_transactions[0], self._draw, OPEN, self._now_ms)
        sender.begin()
        send_some(sender, self._draw, OPEN, self._now_ms)
        sender.flush()
        with transaction(self._in_transactions[1], abort=True):
            send_some(self._in_transactions[1], self._draw, OPEN, self._now_ms)
        send_some(self._plain, self._draw, OPEN, self._now_ms)
        self._plain.flush()
        return sender

    def trim(self) -> None:
        """Let TRIMMED begin in the middle of a segment that is not its first."""
        last = max(max(s.acknowledged[TRIMMED, 0]) for s in self._by_codec)
        request = [TopicPartition(TRIMMED, 0, last * 3 // 5)]
        for future in self._broker.admin.delete_records(request).values():
            future.result(120)
