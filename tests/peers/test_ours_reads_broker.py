"""kafkalog reads the segments that a real broker wrote, and gets what a Kafka consumer gets."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from confluent_kafka import Consumer, Producer, TopicPartition

from kafkalog.schema import changelog_schema
from kafkalog.storage_engine.log_view import LogView
from kafkalog.storage_engine.segments import list_segments
from kafkalog.storage_engine.state import PartitionState
from tests.peers.kafka import KafkaBroker
from tests.peers.record import Record, consumed, of_kafkalog

pytestmark = [pytest.mark.peers, pytest.mark.slow]

CODECS = ("none", "gzip", "snappy", "lz4", "zstd")
NOW_MS = 1_700_000_000_000
CREATE, STAMPED, ABORTED, COMPACTED = "by-producer", "by-broker", "in-transactions", "compacted"
TOPICS = {
    CREATE: {"cleanup.policy": "delete"},
    STAMPED: {"cleanup.policy": "delete", "message.timestamp.type": "LogAppendTime"},
    ABORTED: {"cleanup.policy": "delete"},
    COMPACTED: {"cleanup.policy": "compact", "min.cleanable.dirty.ratio": "0"},
}
SCHEMA = changelog_schema(include_headers=True)


def producer_of(broker: KafkaBroker, **settings: object) -> Producer:
    return Producer({"bootstrap.servers": broker.bootstrap, "linger.ms": 5, **settings})


def produce(producer: Producer, draw: random.Random, topic: str, now_ms: int) -> None:
    """Send records of every shape: no key, no value, empty, large, headers, times out of order."""
    for _ in range(draw.randrange(20, 120)):
        is_keyed = topic == COMPACTED or draw.random() < 0.8
        names = draw.choices(("a", "b", "ü"), k=draw.choice((0, 0, 2)))
        producer.produce(
            topic,
            value=draw.choice((None, b"", draw.randbytes(20), b"text " * draw.randrange(400))),
            key=b"key-%d" % draw.randrange(30) if is_keyed else None,
            partition=0,
            timestamp=now_ms + draw.randrange(-1000, 1000),
            headers=[(name, draw.choice((None, b"", b"\0\xff"))) for name in names],
        )
    assert producer.flush(30) == 0


@pytest.fixture(scope="module")
def written(kafka: KafkaBroker) -> KafkaBroker:
    """The topics are written, by producers of all kinds, in several segments."""
    draw = random.Random(8)
    common = {"segment.ms": "60000", "retention.ms": "-1", "index.interval.bytes": "500"}
    for topic, config in TOPICS.items():
        kafka.create_topic(topic, 1, {**common, **config})
    for number in range(3):
        for codec in CODECS:
            idempotence = {"enable.idempotence": number != 1}
            producer = producer_of(kafka, **{"compression.type": codec}, **idempotence)
            for topic in (CREATE, STAMPED, COMPACTED):
                # The times of two rounds are further apart than `segment.ms`.
                produce(producer, draw, topic, NOW_MS + 120_000 * number)
    plain = producer_of(kafka)
    for number, codec in enumerate(CODECS * 2):
        settings = {"compression.type": codec, "transactional.id": f"id-{number}"}
        producer = producer_of(kafka, **settings)
        producer.init_transactions(30)
        producer.begin_transaction()
        produce(producer, draw, ABORTED, NOW_MS)
        produce(plain, draw, ABORTED, NOW_MS)
        end = producer.abort_transaction if number % 3 == 1 else producer.commit_transaction
        end(30)
    # The cleaner leaves alone only the active segment.
    active = active_base(kafka, COMPACTED)
    kafka.wait_until(lambda: cleaned_to(kafka) >= active)
    return kafka


def cleaned_to(broker: KafkaBroker) -> int:
    path = broker.log_dir / "cleaner-offset-checkpoint"
    entries = [line.split() for line in path.read_text().splitlines()] if path.exists() else []
    return next((int(entry[2]) for entry in entries if entry[:2] == [COMPACTED, "0"]), -1)


def directory_of(broker: KafkaBroker, topic: str) -> Path:
    return broker.log_dir / f"{topic}-0"


def active_base(broker: KafkaBroker, topic: str) -> int:
    return max(int(path.stem) for path in directory_of(broker, topic).glob("*.log"))


@pytest.fixture
def consumer(written: KafkaBroker) -> Iterator[Consumer]:
    with closing(Consumer({"bootstrap.servers": written.bootstrap, "group.id": "tests"})) as client:
        yield client


def open_view(broker: KafkaBroker, topic: str, consumer: Consumer) -> LogView:
    """Open a view with the state that the broker tells; its directory is not written to."""
    low, high = consumer.get_watermark_offsets(TopicPartition(topic, 0), 30)
    directory = directory_of(broker, topic)
    segments = list_segments(directory)
    state = PartitionState(
        high_watermark=high,
        active_base=segments[-1].base_offset,
        active_size=segments[-1].log.stat().st_size,
        log_start_offset=low,
        last_stable_offset=high,
    )
    return LogView(directory, topic, 0, state, segments)


def read(view: LogView, start: int | None = None, *, committed: bool = True) -> list[Record]:
    first = view.state.log_start_offset if start is None else start
    end = view.state.high_watermark
    return of_kafkalog(view.read(first, end, schema=SCHEMA, read_committed=committed))


def test_the_broker_wrote_what_is_to_be_read(written: KafkaBroker, consumer: Consumer) -> None:
    for topic in TOPICS:
        with open_view(written, topic, consumer) as view:
            assert len(view.segments) >= (2 if topic in {CREATE, COMPACTED} else 1)
            chunks = list(view.chunks(0, view.state.high_watermark))
            attributes = [int(a) for chunk in chunks for a in chunk.table.attributes]
            ids = {int(i) for chunk in chunks for i in chunk.table.producer_ids}
        assert {a & 0x07 for a in attributes} == set(range(5))
        assert len(ids) > 3
        assert any(a & 0x20 for a in attributes) == (topic == ABORTED)
        assert any(a & 0x08 for a in attributes) == (topic == STAMPED)
        assert any(a & 0x40 for a in attributes) == (topic == COMPACTED), "no delete horizon"


@pytest.mark.parametrize("committed", [True, False])
@pytest.mark.parametrize("topic", TOPICS)
def test_every_record_is_read(
    written: KafkaBroker, consumer: Consumer, topic: str, committed: bool
) -> None:
    expected = consumed(written.bootstrap, topic, 0, committed=committed)
    assert len(expected) > 100
    with open_view(written, topic, consumer) as view:
        assert read(view, committed=committed) == expected


def test_transactions_that_were_aborted_are_left_out(written: KafkaBroker) -> None:
    all_records = consumed(written.bootstrap, ABORTED, 0, committed=False)
    committed = consumed(written.bootstrap, ABORTED, 0)
    assert len(committed) < len(all_records)


@pytest.mark.parametrize("topic", TOPICS)
def test_reading_may_begin_anywhere(written: KafkaBroker, consumer: Consumer, topic: str) -> None:
    expected = consumed(written.bootstrap, topic, 0)
    with open_view(written, topic, consumer) as view:
        for start in range(0, view.state.high_watermark, 41):
            assert read(view, start) == [record for record in expected if record.offset >= start]


@pytest.mark.parametrize("topic", TOPICS)
def test_offsets_for_times_are_the_same(
    written: KafkaBroker, consumer: Consumer, topic: str
) -> None:
    records = consumed(written.bootstrap, topic, 0, committed=False)
    times = sorted({record.timestamp + step for record in records[::17] for step in (-1, 0, 1)})
    with open_view(written, topic, consumer) as view:
        for timestamp in [0, *times]:
            (found,) = consumer.offsets_for_times([TopicPartition(topic, 0, timestamp)], 30)
            offset = None if found.offset < 0 else found.offset
            assert offset == view.offset_for_time(timestamp), timestamp


def test_what_a_killed_broker_wrote_is_read(written: KafkaBroker, consumer: Consumer) -> None:
    expected = {topic: consumed(written.bootstrap, topic, 0) for topic in TOPICS}
    states = {}
    for topic in TOPICS:
        with open_view(written, topic, consumer) as view:
            states[topic] = view.state
    written.kill()
    try:
        for topic, state in states.items():
            directory = directory_of(written, topic)
            with LogView(directory, topic, 0, state, list_segments(directory)) as view:
                assert read(view) == expected[topic]
    finally:
        written.start()
