"""The log directories of a real broker, opened as they are: live, stopped, and killed.

kafkalog must yield what a Kafka consumer gets: for both isolation levels, from every offset, and by
timestamp. The consumer asks the broker before it is stopped; of a killed broker's directories, it
asks the broker that has recovered them, of which kafkalog sees only a copy made before.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import IsolationLevel, KafkaError, KafkaException, TopicPartition
from confluent_kafka.admin import OffsetSpec

import kafkalog
from kafkalog.errors import InvalidInputError
from kafkalog.log import KafkaLog
from kafkalog.storage_engine.place import directory_log_of
from tests.conformance import traffic
from tests.conformance.clients import Partition, Sender
from tests.conformance.kafka import KafkaBroker
from tests.conformance.record import Record, consumed_all, of_kafkalog
from tests.conformance.traffic import COMPACTED, OPEN, SHAPES, TRANSACTIONS, TRIMMED, Traffic

pytestmark = [pytest.mark.peers, pytest.mark.slow]

LEVELS = ("read_committed", "read_uncommitted")
STAGES = ("terminated", "killed")
LATEST, EARLIEST, MAX_TIMESTAMP = -1, -2, -3
INTERNAL = [("__transaction_state", 0)]
Answer = tuple[int, int, int] | None
"""Offset, timestamp and leader epoch that the broker gives for a time; None: nothing so late."""


@dataclass
class Seen:
    """What Kafka's clients got, of every partition."""

    records: dict[str, dict[Partition, list[Record]]]
    offsets: dict[Partition, tuple[int, int]]
    answers: dict[str, dict[Partition, dict[int, Answer]]]
    """By isolation level, partition and time asked for."""


def look(broker: KafkaBroker, *, internal: bool = True) -> Seen:
    """Ask for all; a broker that has recovered has already written to its internal topics."""
    places = [*traffic.partitions(), *(INTERNAL if internal else ())]
    starts, ends = (
        {place: answer[0] for place, answer in found.items()}
        for found in (
            listed(broker, dict.fromkeys(places, OffsetSpec.earliest())),
            listed(broker, dict.fromkeys(places, OffsetSpec.latest())),
        )
    )
    records = {
        level: consumed_all(broker.bootstrap, starts, committed=level == "read_committed")
        for level in LEVELS
    }
    return Seen(
        records,
        {place: (starts[place], ends[place]) for place in places},
        {level: answers(broker, records["read_uncommitted"], level) for level in LEVELS},
    )


def listed(
    broker: KafkaBroker, specs: dict[Partition, OffsetSpec], level: str = "read_uncommitted"
) -> dict[Partition, tuple[int, int, int]]:
    """Ask the broker for offsets, again if it has just started; offset, timestamp, leader epoch."""
    deadline = time.monotonic() + 120
    while True:
        try:
            return _listed(broker, specs, level)
        except KafkaException as fault:
            error = fault.args[0]
            # The controller has told the client of a leader epoch before it told the broker.
            is_passing = error.retriable() or error.code() == KafkaError.UNKNOWN_LEADER_EPOCH
            if not is_passing or time.monotonic() > deadline:
                raise
            time.sleep(0.05)


def _listed(
    broker: KafkaBroker, specs: dict[Partition, OffsetSpec], level: str
) -> dict[Partition, tuple[int, int, int]]:
    futures = broker.admin.list_offsets(
        {TopicPartition(*place): spec for place, spec in specs.items()},
        isolation_level=IsolationLevel[level.upper()],
        request_timeout=120,
    )
    results = {(place.topic, place.partition): f.result(120) for place, f in futures.items()}
    return {
        place: (
            result.offset,
            result.timestamp,
            -1 if result.leader_epoch is None else result.leader_epoch,
        )
        for place, result in results.items()
    }


def wait_for_markers(broker: KafkaBroker) -> None:
    """A transaction has ended before its markers are written: wait until no more of them come.

    A broker that is killed in between writes them after its next start.
    """
    latest = dict.fromkeys(traffic.partitions(), OffsetSpec.latest())
    looks = [listed(broker, latest)]
    while len(looks) < 4 or any(ends != looks[-1] for ends in looks[-4:]):
        time.sleep(0.5)
        looks.append(listed(broker, latest))


def answers(
    broker: KafkaBroker, records: dict[Partition, list[Record]], level: str
) -> dict[Partition, dict[int, Answer]]:
    found: dict[Partition, dict[int, Answer]] = {place: {} for place in records}
    times = {}
    for place, some in records.items():
        stamps = sorted(record.timestamp for record in some)
        sample = stamps[:: max(1, len(stamps) // 12)] + stamps[-1:]
        times[place] = sorted({0, *(t + step for t in sample for step in (-1, 0, 1))})
    # One request asks for one time of every partition.
    for number in range(max(map(len, times.values()))):
        asked = {place: each[number] for place, each in times.items() if number < len(each)}
        specs = {place: OffsetSpec.for_timestamp(at_ms) for place, at_ms in asked.items()}
        for place, answer in listed(broker, specs, level).items():
            found[place][asked[place]] = None if answer[0] < 0 else answer
    for number, spec in ((EARLIEST, OffsetSpec.earliest()), (LATEST, OffsetSpec.latest())):
        for place, answer in listed(broker, dict.fromkeys(records, spec), level).items():
            found[place][number] = answer
    specs = dict.fromkeys(records, OffsetSpec.max_timestamp())
    for place, answer in listed(broker, specs, level).items():
        found[place][MAX_TIMESTAMP] = None if answer[0] < 0 else answer
    return found


@pytest.fixture(scope="module")
def broker(peers: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[KafkaBroker]:
    directory = tmp_path_factory.mktemp("directories")
    settings = {
        "replica.high.watermark.checkpoint.interval.ms": "100",
        "log.flush.start.offset.checkpoint.interval.ms": "100",
        # What lies below a log's start goes: until then the broker finds no time there, nor above.
        "log.retention.check.interval.ms": "100",
        "log.initial.task.delay.ms": "100",
    }
    with KafkaBroker(directory, log_dirs=2, settings=settings) as broker:
        traffic.create_topics(broker)
        yield broker


@pytest.fixture(scope="module")
def producers(broker: KafkaBroker) -> Traffic:
    """The topics are written, in several segments, and one transaction is open."""
    producers = Traffic(broker, seed=8)
    for _ in range(3):
        producers.round()
    producers.trim()
    producers.leave_open("open-from-the-first")
    # The cleaner leaves alone only the active segment.
    broker.wait_until(lambda: cleaned_to(broker) >= active_base(broker))
    broker.wait_until(lambda: not first_segment(broker, TRIMMED).exists())
    return producers


@pytest.fixture(scope="module")
def stages(
    broker: KafkaBroker, producers: Traffic, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, tuple[list[Path], Seen]]:
    """The log directories as a SIGTERM leaves them, and then a SIGKILL; and what clients got."""
    copies = tmp_path_factory.mktemp("copies")
    terminated = look(broker)
    broker.stop()
    stages = {"terminated": (copied(broker, copies / "terminated"), terminated)}
    broker.start()
    producers.round()
    producers.leave_open("open-from-the-second")
    wait_for_markers(broker)
    broker.kill()
    killed = copied(broker, copies / "killed")
    broker.start()
    stages["killed"] = killed, look(broker, internal=False)
    return stages


def copied(broker: KafkaBroker, target: Path) -> list[Path]:
    roots = [target / root.name for root in broker.log_dirs]
    for source, root in zip(broker.log_dirs, roots, strict=True):
        shutil.copytree(source, root)
    return roots


@pytest.fixture(params=STAGES)
def stage(
    request: pytest.FixtureRequest, stages: dict[str, tuple[list[Path], Seen]]
) -> Iterator[tuple[KafkaLog, Seen]]:
    roots, seen = stages[request.param]
    with kafkalog.open(roots) as log:
        yield log, seen


def directory_of(broker: KafkaBroker, topic: str) -> Path:
    found = [root / f"{topic}-0" for root in broker.log_dirs]
    return next(directory for directory in found if directory.exists())


def first_segment(broker: KafkaBroker, topic: str) -> Path:
    return directory_of(broker, topic) / f"{0:020d}.log"


def cleaned_to(broker: KafkaBroker) -> int:
    path = directory_of(broker, COMPACTED).parent / "cleaner-offset-checkpoint"
    entries = [line.split() for line in path.read_text().splitlines()] if path.exists() else []
    return next((int(entry[2]) for entry in entries if entry[:2] == [COMPACTED, "0"]), -1)


def active_base(broker: KafkaBroker) -> int:
    return max(int(path.stem) for path in directory_of(broker, COMPACTED).glob("*.log"))


def read(log: KafkaLog, place: Partition, level: str, start: int | None = None) -> list[Record]:
    batches = log.read(*place, start, include_headers=True, isolation_level=level)
    return of_kafkalog(batches)


def listing(roots: list[Path]) -> dict[Path, tuple[int, int]]:
    paths = [path for root in roots for path in root.rglob("*")]
    return {path: (path.stat().st_size, path.stat().st_mtime_ns) for path in paths}


# --- while the broker runs -----------------------------------------------------------------------


def test_a_running_brokers_log_is_read_up_to_its_checkpoint(
    broker: KafkaBroker, producers: Traffic
) -> None:
    expected = look(broker)
    with kafkalog.open(broker.log_dirs) as log:
        broker.wait_until(lambda: known_offsets(log) == expected.offsets)
        for level in LEVELS:
            for place in traffic.partitions():
                assert read(log, place, level) == expected.records[level][place], place


def known_offsets(log: KafkaLog) -> dict[Partition, tuple[int, int]]:
    return {place: log.offsets(place[0])[place[1]] for place in [*traffic.partitions(), *INTERNAL]}


def test_a_running_broker_writes_while_its_log_is_read(
    broker: KafkaBroker, producers: Traffic
) -> None:
    sender = Sender(broker, compression_type="lz4", acks="all")
    place = SHAPES, 2
    with kafkalog.open(broker.log_dirs) as log:
        first = log.offsets(SHAPES)[2][1]
        ends = [0]
        for number in range(4000):
            sender.send(SHAPES, b"%d" % number, partition=2, timestamp=traffic.NOW_MS + 500_000)
            if number % 800 == 799:  # a hundred at least were not seen yet
                seen = first + ends[-1]
                broker.wait_until(lambda seen=seen: log.offsets(SHAPES)[2][1] > seen)
            if number % 100 == 0:
                sender.poke(0.02)
                found = [int(r.value or b"") for r in read(log, place, "read_uncommitted", first)]
                assert found == list(range(len(found)))
                assert len(found) >= ends[-1], "what was there once stays"
                ends.append(len(found))
        sender.flush()
        broker.wait_until(lambda: log.offsets(SHAPES)[2][1] == first + 4000)
        found = [int(r.value or b"") for r in read(log, place, "read_committed", first)]
        assert found == list(range(4000))
    assert len(set(ends)) > 4


def test_a_running_brokers_log_is_not_written(broker: KafkaBroker, producers: Traffic) -> None:
    with kafkalog.open(broker.log_dirs) as log:
        with pytest.raises(InvalidInputError, match="adopt"):
            log.append(SHAPES, [(b"key", b"value")])
        with pytest.raises(InvalidInputError, match="adopt"):
            log.create_topic("ours")


# --- once it is stopped --------------------------------------------------------------------------


def test_the_broker_wrote_what_is_to_be_read(stage: tuple[KafkaLog, Seen]) -> None:
    log, seen = stage
    records = seen.records["read_uncommitted"]
    assert sum(map(len, records.values())) > 3000
    attributes, horizons = set(), 0
    for topic in traffic.TOPICS:
        for number in range(traffic.PARTITIONS.get(topic, 1)):
            with directory_log_of(log).snapshot(topic, number) as snapshot:
                start, end = snapshot.state.log_start_offset, snapshot.state.high_watermark
                assert (topic not in {SHAPES, TRANSACTIONS, TRIMMED}) or len(snapshot.segments) >= 2
                for chunk in snapshot.chunks(start, end):
                    attributes |= {int(a) for a in chunk.table.attributes}
                    horizons += sum(bool(int(a) & 0x40) for a in chunk.table.attributes)
    assert {a & 0x07 for a in attributes} == set(range(5))
    assert any(a & 0x08 for a in attributes)
    assert any(a & 0x20 for a in attributes)
    assert horizons > 0
    assert seen.offsets[TRIMMED, 0][0] > 0
    committed = seen.records["read_committed"]
    for topic in (TRANSACTIONS, OPEN):
        assert 0 < len(committed[topic, 0]) < len(records[topic, 0])


def test_a_stopped_brokers_topics_and_offsets_are_known(stage: tuple[KafkaLog, Seen]) -> None:
    log, seen = stage
    assert set(traffic.TOPICS) <= set(log.topics())
    found = {place: log.offsets(place[0])[place[1]] for place in seen.offsets}
    assert found == seen.offsets


@pytest.mark.parametrize("level", LEVELS)
def test_a_stopped_brokers_records_are_what_a_consumer_got(
    stage: tuple[KafkaLog, Seen], level: str
) -> None:
    log, seen = stage
    for place, expected in seen.records[level].items():
        assert read(log, place, level) == expected, place


@pytest.mark.parametrize("level", LEVELS)
def test_reading_a_stopped_brokers_log_may_begin_anywhere(
    stage: tuple[KafkaLog, Seen], level: str
) -> None:
    log, seen = stage
    for place in traffic.partitions():
        expected = seen.records[level][place]
        first, end = seen.offsets[place]
        step = 1 if place[0] == OPEN else max(1, (end - first) // 40)
        for start in range(first, end + 1, step):
            found = read(log, place, level, start)
            assert found == [record for record in expected if record.offset >= start], start


@pytest.mark.parametrize("level", LEVELS)
def test_offsets_for_times_are_the_brokers(stage: tuple[KafkaLog, Seen], level: str) -> None:
    log, seen = stage
    for (topic, number), expected in seen.answers[level].items():
        for at_ms, answer in expected.items():
            found: Any = log.offset_for_time(topic, at_ms, isolation_level=level)[number]
            # Of an end the epoch is that of the broker's last start, which the log may not know.
            width = 2 if at_ms in {EARLIEST, LATEST} else 3
            assert (found and found[:width]) == (answer and answer[:width]), (topic, number, at_ms)


def test_reading_changes_nothing_of_a_brokers_log(
    stages: dict[str, tuple[list[Path], Seen]],
) -> None:
    for roots, seen in stages.values():
        before = listing(roots)
        with kafkalog.open(roots) as log:
            for place in traffic.partitions():
                assert read(log, place, "read_committed") == seen.records["read_committed"][place]
        assert listing(roots) == before


def data_of(cell: bytearray | None) -> bytes | None:
    return None if cell is None else bytes(cell)


@pytest.mark.spark
def test_spark_reads_a_brokers_log(spark: Any, stages: dict[str, tuple[list[Path], Seen]]) -> None:
    roots, seen = stages["killed"]
    frame = (
        spark.read.format("kafkalog")
        .option("path", ",".join(map(str, roots)))
        .option("subscribePattern", "[a-z].*")
        .option("includeHeaders", "true")
        .load()
    )
    found: dict[Partition, list[Record]] = {place: [] for place in traffic.partitions()}
    for row in sorted(frame.collect(), key=lambda row: row["offset"]):
        headers = tuple((h["key"], data_of(h["value"])) for h in row["headers"] or ())
        found[row["topic"], row["partition"]].append(
            Record(
                row["offset"],
                round(row["timestamp"].timestamp() * 1000),
                row["timestampType"],
                data_of(row["key"]),
                data_of(row["value"]),
                headers,
            )
        )
    assert found == {p: seen.records["read_committed"][p] for p in traffic.partitions()}
