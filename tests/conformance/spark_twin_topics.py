"""The topics that both formats read, and what producers write to them in two rounds.

All is drawn from a seed but the clock: no timestamp is the broker's, and nothing ages.
"""

from __future__ import annotations

import random

from confluent_kafka import TopicPartition

from tests.conformance.clients import Sender, transaction
from tests.conformance.kafka import KafkaBroker

NOW_MS = 1_700_000_000_000
MINUTE_MS = 60_000
ORDERS, PAYMENTS, USERS, SHAPES, TRANSFERS, TRIMMED, EMPTY = TOPICS = (
    "orders",
    "payments",
    "users",
    "shapes",
    "transfers",
    "trimmed",
    "empty",
)
LATE = "orders-late"
"""A topic of the second round."""
PARTITIONS = {ORDERS: 3, PAYMENTS: 2, USERS: 1, SHAPES: 2, TRANSFERS: 2, TRIMMED: 1, EMPTY: 2}
USER_COUNT = 12
_FOREVER = {"cleanup.policy": "delete", "retention.ms": "-1"}
_COMPACTED = {
    "cleanup.policy": "compact",
    "min.cleanable.dirty.ratio": "0",
    "segment.ms": str(MINUTE_MS),
    "delete.retention.ms": "0",
}
_SIZES = (60, 21, 3), (40, 0, 17)
"""Orders of each partition in each round: shares of a limit are rounded down, and up."""


class Rounds:
    """The producers; each round is later than the one before by more than a segment may last."""

    def __init__(self, broker: KafkaBroker) -> None:
        self._broker = broker
        self._draw = random.Random(11)
        self._sender = Sender(broker)
        self._payer = Sender(
            broker, transactional_id="payer", transaction_timeout_ms=600_000, linger_ms=0
        )
        self._lingerer = Sender(broker, transactional_id="lingerer", transaction_timeout_ms=600_000)
        for topic in TOPICS:
            config = _COMPACTED if topic == USERS else _FOREVER
            broker.create_topic(topic, PARTITIONS[topic], config)

    def first(self) -> None:
        """Write to all topics, and leave a transaction open with others behind its start."""
        self._write(0)
        for future in self._broker.admin.delete_records([TopicPartition(TRIMMED, 0, 30)]).values():
            future.result(120)
        self._lingerer.begin()
        self._transfer(self._lingerer, 5, "lingering", partition=1)
        self._lingerer.flush()
        with transaction(self._payer):
            self._transfer(self._payer, 5, "behind", partition=1)

    def second(self) -> None:
        """Write to all topics and a new one, and end the open transaction."""
        self._lingerer.commit()
        self._broker.create_topic(LATE, 1, _FOREVER)
        self._write(1)
        for number in range(20):
            self._order(LATE, 0, 1000 + number, NOW_MS + 30 * MINUTE_MS)
        self._sender.flush()

    def _write(self, number: int) -> None:
        now_ms = NOW_MS + 20 * MINUTE_MS * number
        for partition, count in enumerate(_SIZES[number]):
            for order in range(count):
                self._order(ORDERS, partition, 300 * number + order, now_ms)
        for order in range(40):
            value = b'{"order":%d,"paid":%d}' % (300 * number + order, self._draw.randrange(9))
            at_ms = now_ms + 1000 * order
            self._sender.send(PAYMENTS, value, partition=order % 2, timestamp=at_ms)
        for generation in range(3):
            # Whoever sends at once sends one batch: a batch is in one segment.
            for user in range(USER_COUNT - generation):
                self._user(user, number, generation, now_ms + 3 * MINUTE_MS * generation)
            self._sender.flush()
        for partition in range(PARTITIONS[SHAPES]):
            for _ in range(25):
                self._shape(partition, now_ms)
        for order in range(50):
            self._sender.send(TRIMMED, b"%d" % order, timestamp=now_ms + order)
        self._sender.flush()
        for aborts in (False, True, False, True):
            with transaction(self._payer, abort=aborts):
                for partition in range(2):
                    word = "aborted" if aborts else "committed"
                    self._transfer(self._payer, 4, word, partition=partition)
            self._sender.send(TRANSFERS, b"of no transaction", timestamp=now_ms)
            self._sender.flush()

    def _order(self, topic: str, partition: int, order: int, now_ms: int) -> None:
        user = self._draw.randrange(USER_COUNT)
        # Some come twice, for whoever drops duplicates.
        value = b'{"order":%d,"amount":%d}' % (order - order % 5 // 4, self._draw.randrange(100))
        self._sender.send(
            topic,
            value,
            b"user-%d" % user,
            partition=partition,
            timestamp=now_ms + 2000 * (order % 300) + self._draw.randrange(-900, 900),
        )

    def _user(self, user: int, number: int, generation: int, now_ms: int) -> None:
        gone = generation == 2 and user % 5 == 0
        value = None if gone else b"name %d.%d of %d" % (number, generation, user)
        self._sender.send(USERS, value, b"user-%d" % user, timestamp=now_ms + user)

    def _shape(self, partition: int, now_ms: int) -> None:
        draw = self._draw
        names = draw.choices(("a", "b", "ü"), k=draw.choice((0, 0, 1, 3)))
        self._sender.send(
            SHAPES,
            draw.choice((None, b"", draw.randbytes(20), "größer".encode())),
            draw.choice((None, b"", b"key", draw.randbytes(4))),
            partition=partition,
            timestamp=now_ms + draw.randrange(-5000, 5000),
            headers=[(name, draw.choice((None, b"", b"\0\xff"))) for name in names],
        )

    def _transfer(self, sender: Sender, count: int, word: str, *, partition: int) -> None:
        for number in range(count):
            value = f"{word} {number}".encode()
            sender.send(TRANSFERS, value, partition=partition, timestamp=NOW_MS + number)
