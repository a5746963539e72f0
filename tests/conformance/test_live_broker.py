"""A real broker's directories are read and followed while it writes.

What it writes are batches of one record, which its index may list each, and larger ones, in
transactions and out of them; its segments roll all the time, one topic is compacted, records are
deleted. Of what was read nothing may go back, change or fail, and nothing aborted be shown; and a
stream of Spark gets each committed record once, though the broker is killed and started meanwhile.
"""

from __future__ import annotations

import itertools
import random
import threading
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import KafkaError, KafkaException, TopicPartition

import kafkalog
from kafkalog.log import KafkaLog
from tests.conformance.clients import Follower, Partition, Sender
from tests.conformance.kafka import KafkaBroker
from tests.conformance.record import of_kafkalog

pytestmark = [pytest.mark.peers, pytest.mark.slow]

PLAIN, LARGE, MIXED, COMPACTED = "plain", "large", "mixed", "compacted"
PLACES = [(PLAIN, 0), (PLAIN, 1), (LARGE, 0), (MIXED, 0), (MIXED, 1), (COMPACTED, 0)]
LEVELS = ("read_committed", "read_uncommitted")
ACTS = 1500

_SETTINGS = {
    "replica.high.watermark.checkpoint.interval.ms": "100",
    "log.flush.start.offset.checkpoint.interval.ms": "100",
    "log.retention.check.interval.ms": "100",
    "log.initial.task.delay.ms": "100",
    "log.segment.delete.delay.ms": "200",
}
_CONFIG = {
    "retention.ms": "-1",
    "index.interval.bytes": "64",
    "segment.ms": "1500",
    "min.cleanable.dirty.ratio": "0",
    "delete.retention.ms": "1000",
}


@pytest.fixture
def broker(peers: None, tmp_path: Path) -> Iterator[KafkaBroker]:
    with KafkaBroker(tmp_path, log_dirs=2, settings=_SETTINGS) as broker:
        for topic in (PLAIN, LARGE, MIXED, COMPACTED):
            policy = "compact" if topic == COMPACTED else "delete"
            count = sum(place[0] == topic for place in PLACES)
            broker.create_topic(topic, count, {**_CONFIG, "cleanup.policy": policy})
        yield broker


class Writers:
    """Producers that do what is drawn. Each value begins with a number of its own."""

    def __init__(self, broker: KafkaBroker, seed: int) -> None:
        self._broker = broker
        self._draw = random.Random(seed)
        self._numbers = itertools.count()
        self._plain = [Sender(broker, compression_type=codec) for codec in ("none", "zstd")]
        self._in_transactions = [Sender(broker, transactional_id=f"id-{n}") for n in range(3)]
        self._open: dict[int, list[bytes]] = {}
        self.aborted: set[bytes] = set()
        """Values of transactions that were, or are just being, aborted."""

    def act(self) -> None:
        """Send a few records, or begin, go on with or end a transaction, or delete records."""
        chance = self._draw.random()
        if chance < 0.5:
            sender = self._draw.choice(self._plain)
            for _ in range(self._draw.choice((1, 1, 1, 2, 50))):
                self._send(sender, self._draw.choice(PLACES))
            if self._draw.random() < 0.8:
                sender.flush()
        elif chance < 0.99:
            number = self._draw.randrange(len(self._in_transactions))
            if number in self._open and self._draw.random() < 0.3:
                self._end(number, aborts=self._draw.random() < 0.5)
            else:
                self._go_on(number)
        else:
            self._delete_records((PLAIN, self._draw.randrange(2)))

    def _send(self, sender: Sender, place: Partition) -> bytes:
        number = next(self._numbers)
        size = self._draw.choice((0, 100, 5000)) if place[0] == LARGE else 0
        value = b"%d " % number + size * b"x"
        sender.send(place[0], value, b"key-%d" % (number % 30), partition=place[1])
        return value

    def _go_on(self, number: int) -> None:
        sender = self._in_transactions[number]
        if number not in self._open:
            sender.begin()
            self._open[number] = []
        for _ in range(self._draw.choice((1, 1, 3))):
            place = self._draw.choice([place for place in PLACES if place[0] in (MIXED, COMPACTED)])
            self._open[number].append(self._send(sender, place))
        sender.flush()

    def _end(self, number: int, *, aborts: bool) -> None:
        values = self._open.pop(number)
        if aborts:
            self.aborted.update(values)
            self._in_transactions[number].abort()
        else:
            self._in_transactions[number].commit()

    def _delete_records(self, place: Partition) -> None:
        offsets = sorted(self.committed()[place])
        if not offsets:
            return
        request = [TopicPartition(*place, self._draw.choice(offsets))]
        for future in self._broker.admin.delete_records(request).values():
            try:
                future.result(120)
            except KafkaException as fault:  # an earlier one has gone further
                if fault.args[0].code() != KafkaError.OFFSET_OUT_OF_RANGE:
                    raise

    def rest(self) -> None:
        """End what is open, and wait until all is acknowledged."""
        for number in list(self._open):
            self._end(number, aborts=self._draw.random() < 0.5)
        for sender in self._plain:
            sender.flush()

    def close_with(self, places: Iterable[Partition]) -> dict[Partition, int]:
        """Send a last record to each partition, out of transactions; return their offsets."""
        for place in places:
            self._send(self._plain[0], place)
        self._plain[0].flush()
        return {place: max(self._plain[0].acknowledged[place]) for place in places}

    def committed(self, *, outside: bool | None = None) -> dict[Partition, dict[int, bytes | None]]:
        """Return the value at each offset that the broker has acknowledged and committed.

        `outside` chooses records out of transactions (True), or in them (False).
        """
        senders = [] if outside is False else list(self._plain)
        senders += [] if outside else self._in_transactions
        found: dict[Partition, dict[int, bytes | None]] = defaultdict(dict)
        for sender in senders:
            for place, sent in sender.acknowledged.items():
                found[place].update({offset: record.value for offset, record in sent.items()})
        return found


class Reader(threading.Thread):
    """Looks at one partition after the other, and holds it against what it has seen before."""

    def __init__(self, broker: KafkaBroker, writers: Writers, seed: int) -> None:
        super().__init__(daemon=True)
        self._roots = broker.log_dirs
        self._writers = writers
        self._draw = random.Random(seed)
        self._values: dict[Partition, dict[int, bytes | None]] = defaultdict(dict)
        self.stop = threading.Event()
        self.fault: BaseException | None = None
        self.ends: dict[Partition, set[int]] = {place: set() for place in PLACES}

    def run(self) -> None:
        known = dict.fromkeys(PLACES, (0, 0))
        try:
            while not self.stop.is_set():
                with kafkalog.open(self._roots) as log:
                    for _ in range(30):
                        place = self._draw.choice(PLACES)
                        known[place] = self._look(log, place, *known[place])
        except BaseException as fault:
            self.fault = fault

    def has_seen_enough(self) -> bool:
        return self.fault is not None or all(len(ends) > 5 for ends in self.ends.values())

    def _look(self, log: KafkaLog, place: Partition, start: int, end: int) -> tuple[int, int]:
        new_start, new_end = log.offsets(place[0])[place[1]]
        assert new_start >= start and new_end >= end, f"{place} went back from {start}, {end}"
        self.ends[place].add(new_end)
        level = self._draw.choice(LEVELS)
        batches = log.read(*place, include_headers=True, isolation_level=level)
        found = {record.offset: record.value for record in of_kafkalog(batches)}
        if level == "read_committed":
            assert not self._writers.aborted & set(found.values()), f"{place}: aborted records"
        if place[0] == COMPACTED:
            return new_start, new_end
        seen = self._values[place]
        assert all(seen.get(offset, value) == value for offset, value in found.items())
        seen.update(found)
        if level == "read_uncommitted":
            first, _ = log.offsets(place[0])[place[1]]  # records are deleted meanwhile
            there = {offset for offset in seen if first <= offset < new_end}
            assert there <= found.keys(), f"{place}: {sorted(there - found.keys())[:5]} are gone"
        return new_start, new_end


def test_what_is_read_of_a_running_broker_stays(broker: KafkaBroker) -> None:
    writers = Writers(broker, seed=1)
    readers = [Reader(broker, writers, seed) for seed in (2, 3)]
    for reader in readers:
        reader.start()
    for number in itertools.count():
        writers.act()
        # A reader that is slow has not seen much yet; one that has failed sees no more.
        if number >= ACTS and all(reader.has_seen_enough() for reader in readers):
            break
    writers.rest()
    committed = writers.committed()
    with kafkalog.open(broker.log_dirs) as log:
        for topic, number in PLACES:
            last = max(committed[topic, number])
            broker.wait_until(lambda t=topic, n=number, last=last: log.offsets(t)[n][1] > last)
        for reader in readers:
            reader.stop.set()
            reader.join()
            if reader.fault is not None:
                raise reader.fault
            assert reader.has_seen_enough()
        for place in PLACES:
            assert_is_read(log, place, committed[place])


def assert_is_read(log: KafkaLog, place: Partition, committed: dict[int, bytes | None]) -> None:
    """What was deleted and compacted away apart, it is the committed records and nothing else."""
    records = of_kafkalog(log.read(*place, include_headers=True, isolation_level="read_committed"))
    found = {record.offset: record.value for record in records}
    start, _ = log.offsets(place[0])[place[1]]
    wanted = {offset: value for offset, value in committed.items() if offset >= start}
    if place[0] != COMPACTED:
        assert found == wanted
        return
    assert found.items() <= wanted.items()
    latest = {int(value.split()[0]) % 30: value for _, value in sorted(wanted.items()) if value}
    assert {record.key: record.value for record in records} == {
        b"key-%d" % number: value for number, value in latest.items()
    }


def values_at(
    places: list[Partition], committed: dict[Partition, dict[int, bytes | None]]
) -> set[tuple[str, int, int, bytes]]:
    return {
        (*place, offset, value or b"")
        for place in places
        for offset, value in committed[place].items()
    }


def what_a_consumer_gets(broker: KafkaBroker, writers: Writers) -> set[tuple[str, int, int, bytes]]:
    """Return every committed record of two topics, as Kafka's own consumer gets them.

    The consumer is the judge of transactions. A broker that starts after a kill drops the markers
    of a partition whose leader it does not know yet: TransactionMarkerChannelManager takes the
    partition for deleted. The next end of that transactional id, commit or abort, then takes the
    records along. Only records out of transactions are sure to be there.
    """
    places = [place for place in PLACES if place[0] in (LARGE, MIXED)]
    last_offsets = writers.close_with(places)
    follower = Follower(broker, places)
    follower.catch_up(last_offsets)
    follower.close()
    found = {
        (*place, record.offset, record.value or b"")
        for place, records in follower.records.items()
        for record in records
    }
    outside, inside = writers.committed(outside=True), writers.committed(outside=False)
    assert found >= values_at(places, outside)
    assert found & values_at(places, inside), "transactions are committed too"
    return found


@pytest.mark.spark
def test_a_stream_follows_a_broker_that_is_killed_and_started(
    broker: KafkaBroker, spark: Any, tmp_path: Path
) -> None:
    writers = Writers(broker, seed=4)
    found: dict[str, list[tuple[str, int, int, bytes]]] = {level: [] for level in LEVELS}
    queries = []
    for level in LEVELS:

        def collect(rows: Any, _: int, level: str = level) -> None:
            wanted = rows.select("topic", "partition", "offset", "value")
            found[level] += [(*row[:3], bytes(row[3])) for row in wanted.collect()]

        stream = spark.readStream.format("kafkalog").options(
            **{
                "path": ",".join(map(str, broker.log_dirs)),
                "subscribe": f"{LARGE},{MIXED}",
                "startingOffsets": "earliest",
                "kafka.isolation.level": level,
            }
        )
        writer = stream.load().writeStream.foreachBatch(collect)
        place = str(tmp_path / f"checkpoint-{level}")
        writer = writer.option("checkpointLocation", place).trigger(
            processingTime="100 milliseconds"
        )
        queries.append(writer.start())
    try:
        for end in (broker.kill, broker.stop, None):
            for _ in range(ACTS // 3):
                writers.act()
            writers.rest()
            if end is not None:
                end()
                broker.start()
        wanted = what_a_consumer_gets(broker, writers)
        for query, level in zip(queries, LEVELS, strict=True):
            broker.wait_until(
                lambda q=query, n=level: not q.isActive or wanted <= set(found[n]), seconds=60
            )
            assert query.exception() is None
    finally:
        for query in queries:
            query.stop()
    assert all(len(rows) == len(set(rows)) for rows in found.values()), "each comes once"
    assert set(found["read_committed"]) == wanted
    assert wanted < set(found["read_uncommitted"])
