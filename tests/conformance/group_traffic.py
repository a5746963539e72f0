"""What groups of every type leave in a broker's own topics, drawn from a seed."""

from __future__ import annotations

import random
from typing import Any, Final, NamedTuple

from confluent_kafka import Consumer, Producer, ShareConsumer, TopicPartition

from tests.conformance.kafka import KafkaBroker

PARTITIONS: Final = 3
_METADATA: Final = ("", "note", "späte Grüße", "x" * 300)
_SECONDS: Final = 30


def topic_of(seed: int) -> str:
    """Return the topic of a seed."""
    return f"topic-{seed}"


class Written(NamedTuple):
    """What groups have read, by name, as (partition, offset), and transactions still open."""

    read: dict[str, list[tuple[int, int]]]
    open_producers: list[Producer]


def write_groups(broker: KafkaBroker, seed: int) -> Written:
    """Let groups of each type commit."""
    draw = random.Random(seed)
    topic = topic_of(seed)
    broker.create_topic(topic, PARTITIONS)
    broker.create_topic(f"gone-{seed}", 1)
    producer = Producer(_client(broker))
    for number in range(draw.randrange(30, 90)):
        producer.produce(topic, b"v%d" % number, partition=draw.randrange(PARTITIONS))
    producer.flush(_SECONDS)
    read = {
        f"{kind}-{seed}": _joined(broker, draw, f"{kind}-{seed}", topic, kind)
        for kind in ("classic", "consumer")
    }
    for number in range(3):
        _simple(broker, draw, f"simple-{seed}-{number}", topic)
    _simple(broker, draw, f"deleted-{seed}", topic)
    for future in broker.admin.delete_consumer_groups([f"deleted-{seed}"]).values():
        future.result(_SECONDS)
    with_gone = Consumer(_client(broker, **{"group.id": f"simple-{seed}-0"}))
    with_gone.commit(offsets=[TopicPartition(f"gone-{seed}", 0, 0)], asynchronous=False)
    with_gone.close()
    for future in broker.admin.delete_topics([f"gone-{seed}"]).values():
        future.result(_SECONDS)
    open_producers = _transactions(broker, draw, seed, topic)
    _shared(broker, draw, f"share-{seed}", topic)
    return Written(read, open_producers)


def _client(broker: KafkaBroker, **more: Any) -> dict[str, Any]:
    return {"bootstrap.servers": broker.bootstrap, "log_level": 0, **more}


def _position(draw: random.Random, topic: str, partition: int) -> TopicPartition:
    return TopicPartition(
        topic, partition, draw.randrange(10), draw.choice(_METADATA), draw.choice((-1, 0))
    )


def _simple(broker: KafkaBroker, draw: random.Random, group: str, topic: str) -> None:
    """Commit positions without a member, some of them again and again."""
    consumer = Consumer(_client(broker, **{"group.id": group, "enable.auto.commit": False}))
    for _ in range(draw.randrange(1, 6)):
        partitions = draw.sample(range(PARTITIONS), draw.randrange(1, PARTITIONS + 1))
        positions = [_position(draw, topic, partition) for partition in partitions]
        consumer.commit(offsets=positions, asynchronous=False)
    consumer.close()


def _joined(
    broker: KafkaBroker, draw: random.Random, group: str, topic: str, protocol: str
) -> list[tuple[int, int]]:
    """Read as the only member of a group, and commit what was read; return that."""
    settings = {
        "group.id": group,
        "group.protocol": protocol,
        "auto.offset.reset": "earliest",
        "enable.auto.commit": False,
    }
    consumer = Consumer(_client(broker, **settings))
    consumer.subscribe([topic])
    read = []
    for _ in range(draw.randrange(3, 12)):
        message = consumer.poll(_SECONDS)
        assert message is not None and message.error() is None
        consumer.commit(message, asynchronous=False)
        read.append((message.partition() or 0, message.offset() or 0))
    consumer.close()
    return read


def _transactions(
    broker: KafkaBroker, draw: random.Random, seed: int, topic: str
) -> list[Producer]:
    """Commit positions in transactions that end in each way, with plain commits among them."""
    still_open = []
    for number, end in enumerate(("commit", "abort", "open", "overtaken", "commit")):
        group = f"exactly-once-{seed}-{number % 4}"
        settings = {"group.id": group, "enable.auto.commit": False}
        consumer = Consumer(_client(broker, **settings))
        producer = Producer(_client(broker, **{"transactional.id": f"id-{seed}-{number}"}))
        producer.init_transactions(_SECONDS)
        if draw.random() < 0.7:
            consumer.commit(offsets=[_position(draw, topic, 0)], asynchronous=False)
        producer.begin_transaction()
        positions = [_position(draw, topic, partition) for partition in (0, 1)]
        metadata = consumer.consumer_group_metadata()
        producer.send_offsets_to_transaction(positions, metadata, _SECONDS)
        producer.produce(topic, b"in a transaction", partition=2)
        producer.flush(_SECONDS)
        if end == "overtaken":
            consumer.commit(offsets=[_position(draw, topic, 0)], asynchronous=False)
        if end == "abort":
            producer.abort_transaction(_SECONDS)
        elif end == "open":
            still_open.append(producer)
        else:
            producer.commit_transaction(_SECONDS)
        if draw.random() < 0.5:
            consumer.commit(offsets=[_position(draw, topic, 2)], asynchronous=False)
        consumer.close()
    return still_open


def _shared(broker: KafkaBroker, draw: random.Random, group: str, topic: str) -> None:
    """Acknowledge some records of a share group."""
    from confluent_kafka.admin import AlterConfigOpType, ConfigEntry, ConfigResource, ResourceType

    change = ConfigEntry(
        "share.auto.offset.reset", "earliest", incremental_operation=AlterConfigOpType.SET
    )
    resource = ConfigResource(ResourceType.GROUP, group, incremental_configs=[change])
    for future in broker.admin.incremental_alter_configs([resource]).values():
        future.result(_SECONDS)
    consumer = ShareConsumer(_client(broker, **{"group.id": group}))
    consumer.subscribe([topic])
    seen = 0
    while seen < 5:
        seen += len(consumer.poll(_SECONDS))
    consumer.commit_sync()
    consumer.close()
