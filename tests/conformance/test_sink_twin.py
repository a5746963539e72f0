"""The same rows written with Spark's own Kafka connector and with kafkalog, in one session.

The connector writes to a running broker, whose records a consumer of Kafka's reads; kafkalog to a
directory with the same topics. Key, value, headers, partition and order must be the same, and what
one refuses the other refuses too.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import pytest
from confluent_kafka import IsolationLevel
from confluent_kafka.admin import NewTopic

import kafkalog
from examples.mirror_kafka import copy_directory
from tests.conformance import spark_twin_session
from tests.conformance.clients import Sender, transaction
from tests.conformance.kafka import KafkaBroker
from tests.conformance.record import Record, consumed_all, of_kafkalog
from tests.conformance.spark_twin_sink import FILES, JOBS, KAFKA, OURS, ROWS, Same
from tests.conformance.spark_twin_sink_errors import (
    ACCEPTED,
    ACCEPTING,
    CASES,
    PARTITIONS,
    REFUSING,
    TOPIC,
)
from tests.conformance.spark_twin_sink_session import Said, SinkSession
from tests.conformance.spark_twin_topics import NOW_MS
from tests.conformance.test_spark_twin import listed, parameters

pytestmark = [pytest.mark.peers, pytest.mark.spark, pytest.mark.slow]

_FOREVER = {"cleanup.policy": "delete", "retention.ms": "-1"}
_SETTINGS = {"replica.high.watermark.checkpoint.interval.ms": "100"}
_BEFORE_ANY_TASK = {"AnalysisException", "IllegalArgumentException"}
Written = tuple[bytes | None, bytes | None, tuple[tuple[str, bytes | None], ...]]
Topics = dict[str, list[list[Written]]]
"""By topic, the records of each partition in their order."""


class Twins(NamedTuple):
    session: SinkSession
    records: dict[str, Topics]
    """By format."""
    refusals: dict[str, dict[str, Said]]


class World(NamedTuple):
    broker: KafkaBroker
    session: SinkSession
    directory: Path


@pytest.fixture(scope="module")
def world(peers: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """Start a broker and a session."""
    reason = spark_twin_session.fault()
    if reason and os.environ.get("CI"):
        pytest.fail(reason)
    if reason:
        pytest.skip(reason)
    directory = tmp_path_factory.mktemp("sinks")
    with (
        KafkaBroker(directory / "kafka", settings=_SETTINGS) as broker,
        SinkSession(directory / "spark") as session,
    ):
        yield World(broker, session, directory)


@pytest.fixture(scope="module")
def twins(world: World, request: pytest.FixtureRequest) -> Twins:
    """Make all writes of which a test was selected, and read what they left."""
    asked = parameters(request)
    jobs = [name for name in JOBS if name in asked]
    cases = [name for name in CASES if name in asked]
    topics = {TOPIC: PARTITIONS, ACCEPTING: 1, **dict.fromkeys(REFUSING, 1)}
    for name in jobs:
        topics |= JOBS[name].topics
    ours = world.directory / "ours"
    create(world.broker, ours, topics)
    addresses = {
        KAFKA: {"kafka.bootstrap.servers": world.broker.bootstrap},
        OURS: {"path": str(ours)},
    }
    world.session.write(jobs, addresses)
    refusals = world.session.refusals(cases, addresses)
    records = {KAFKA: of_broker(world.broker, topics), OURS: of_directory(ours, topics)}
    return Twins(world.session, records, refusals)


def create(broker: KafkaBroker, ours: Path, topics: dict[str, int]) -> None:
    config = {name: {**_FOREVER, **REFUSING.get(name, {})} for name in topics}
    new = [NewTopic(name, count, 1, config=config[name]) for name, count in topics.items()]
    for future in broker.admin.create_topics(new).values():
        future.result(120)
    places = [f"{name}-{n}" for name, count in topics.items() for n in range(count)]
    broker.wait_until(lambda: all(broker.has_directory(place) for place in places))
    with kafkalog.open(ours) as log:
        for name, count in topics.items():
            log.create_topic(name, count, config[name])


def of_broker(broker: KafkaBroker, topics: dict[str, int]) -> Topics:
    starts = {(name, n): 0 for name, count in topics.items() for n in range(count)}
    found = consumed_all(broker.bootstrap, starts)
    return {name: [written(found[name, n]) for n in range(count)] for name, count in topics.items()}


def of_directory(root: Path, topics: dict[str, int]) -> Topics:
    with kafkalog.open(root, read_only=True) as log:
        return {
            name: [
                written(of_kafkalog(log.read(name, n, include_headers=True))) for n in range(count)
            ]
            for name, count in topics.items()
        }


def written(records: Sequence[Record]) -> list[Written]:
    """Return what was written of records, which are numbered without gaps."""
    assert [record.offset for record in records] == list(range(len(records)))
    return [(record.key, record.value, record.headers) for record in records]


@pytest.mark.parametrize("job", [name for name, job in JOBS.items() if job.same is Same.ALL])
def test_records_are_those_of_sparks_connector(twins: Twins, job: str) -> None:
    assert twins.session.written(job, OURS) == twins.session.written(job, KAFKA)
    for topic in JOBS[job].topics:
        assert twins.records[OURS][topic] == twins.records[KAFKA][topic]
        assert any(twins.records[OURS][topic])


@pytest.mark.parametrize("job", [name for name, job in JOBS.items() if job.same is Same.KEYS])
def test_records_of_a_key_are_those_of_sparks_connector(twins: Twins, job: str) -> None:
    twins.session.written(job, OURS), twins.session.written(job, KAFKA)
    for topic in JOBS[job].topics:
        found, expected = (by_key(twins.records[way][topic]) for way in (OURS, KAFKA))
        assert found == expected
        assert found


@pytest.mark.parametrize("job", [name for name, job in JOBS.items() if job.same is Same.VALUES])
def test_records_without_a_key_are_spread_as_widely_as_by_sparks_connector(
    twins: Twins, job: str
) -> None:
    twins.session.written(job, OURS), twins.session.written(job, KAFKA)
    for topic in JOBS[job].topics:
        found, expected = twins.records[OURS][topic], twins.records[KAFKA][topic]
        assert Counter(chain.from_iterable(found)) == Counter(chain.from_iterable(expected))
        assert sum(map(bool, found)) >= sum(map(bool, expected)) > 1
        keyed, keyed_there = ([p for p in map(with_key, each) if p] for each in (found, expected))
        assert list(map(Counter, keyed)) == list(map(Counter, keyed_there))


def by_key(partitions: list[list[Written]]) -> dict[tuple[int, bytes | None], list[Written]]:
    """Return by partition and key the records in their order."""
    found: dict[tuple[int, bytes | None], list[Written]] = {}
    for number, records in enumerate(partitions):
        for record in records:
            found.setdefault((number, record[0]), []).append(record)
    return found


def with_key(records: list[Written]) -> list[Written]:
    return [record for record in records if record[0] is not None]


@pytest.mark.parametrize("job", ["a_micro_batch_that_is_repeated"])
def test_a_repeated_micro_batch_is_written_again_by_sparks_connector_alone(
    twins: Twins, job: str
) -> None:
    # Spark counts the rows that tasks have written, whatever the commit makes of them.
    rows = [ROWS] * (FILES + 1)
    assert twins.session.written(job, OURS) == twins.session.written(job, KAFKA) == rows
    once = values(ROWS * FILES)
    assert twins.records[OURS]["repeated"] == [once]
    assert twins.records[KAFKA]["repeated"] == [once + once[-ROWS:]]


@pytest.mark.parametrize("job", ["a_checkpoint_of_the_connector"])
def test_a_stream_changes_over_from_sparks_connector_with_its_checkpoint(
    twins: Twins, job: str
) -> None:
    assert twins.session.written(job, OURS) == twins.session.written(job, KAFKA) == [ROWS] * FILES
    (ours,), (theirs,) = (twins.records[way]["handed-over"] for way in (OURS, KAFKA))
    assert len(theirs) == ROWS * FILES
    assert ours == theirs[-ROWS:]


def values(count: int) -> list[Written]:
    return [(None, b"%d" % number, ()) for number in range(count)]


@pytest.mark.parametrize("name", [name for name in CASES if name not in ACCEPTED])
def test_what_is_wrong_is_said_in_the_words_of_sparks_connector(twins: Twins, name: str) -> None:
    case, said = CASES[name], twins.refusals[name]
    for format, own in ((KAFKA, case.theirs), (OURS, case.ours)):
        assert said[format].kind
        for words in (*case.words, own):
            assert words.lower() in said[format].message.lower(), said[format].message[:2000]
    if said[KAFKA].kind in _BEFORE_ANY_TASK:
        assert said[OURS].kind in _BEFORE_ANY_TASK


@pytest.mark.parametrize("name", [name for name in CASES if name in ACCEPTED])
def test_what_only_one_of_the_two_takes(twins: Twins, name: str) -> None:
    case, said = CASES[name], twins.refusals[name]
    other, words = (OURS, case.ours) if case.accepted_by == KAFKA else (KAFKA, case.theirs)
    assert said[case.accepted_by] == Said("", "")
    assert words in said[other].message, said[other].message[:2000]


def test_nothing_is_written_of_what_is_refused(twins: Twins) -> None:
    for topic in (TOPIC, *REFUSING):
        assert not any(twins.records[OURS][topic])


# --- a mirror ------------------------------------------------------------------------------------


class Mirrored(NamedTuple):
    """A topic of the broker's, as the example has copied it in two rounds."""

    by_spark: Path
    by_bytes: Path
    committed: list[list[Record]]
    """Of the broker's partitions, and"""
    uncommitted: list[list[Record]]
    """with what was aborted."""


MIRRORED = "mirrored"
_NUMBERS = range(3)
_UNLIMITED = {"message.timestamp.after.max.ms": str((1 << 63) - 1), "max.message.bytes": "4000000"}
_CENTURY_MS = 4_102_444_800_000
"""2100-01-01: far ahead of the mirror's clock."""


@pytest.fixture(scope="module")
def mirrored(world: World) -> Mirrored:
    broker, directory = world.broker, world.directory
    broker.create_topic(MIRRORED, len(_NUMBERS), {**_FOREVER, **_UNLIMITED})
    by_spark, by_bytes = directory / "by-spark", directory / "by-bytes"
    sizes = {**dict.fromkeys(range(30), 1), 8: 300_000}  # times of a value; one is above 1 MiB
    payer = Sender(broker, transactional_id="payer", linger_ms=0, message_max_bytes=4 << 20)
    for round_ in range(2):
        for is_aborted in (False, True, False):
            with transaction(payer, abort=is_aborted):
                for number in range(30):
                    payer.send(
                        MIRRORED,
                        None if number % 5 == 0 else b"%d of %d" % (number, round_) * sizes[number],
                        b"key %d" % (number % 4) if number % 3 else None,
                        partition=number % 2,  # one has nothing
                        timestamp=_CENTURY_MS if number == 9 else NOW_MS + 1000 * number,
                        headers=[("round", b"%d" % round_)] if number % 2 else [],
                    )
        broker.wait_until(lambda: has_all_on_disk(broker))
        world.session.mirror(broker.bootstrap, MIRRORED, by_spark)
        copy_directory(broker.log_dir, [MIRRORED], by_bytes)
    return Mirrored(
        by_spark,
        by_bytes,
        *(consumed_partitions(broker, is_committed) for is_committed in (True, False)),
    )


def has_all_on_disk(broker: KafkaBroker) -> bool:
    """Whether no transaction is open any more and the files have what the broker has.

    The broker answers a commit before its markers are in the partitions.
    """
    levels = (IsolationLevel.READ_COMMITTED, IsolationLevel.READ_UNCOMMITTED)
    stable, ends = (
        [end for _, end in listed(broker, MIRRORED, len(_NUMBERS), level)] for level in levels
    )
    with kafkalog.open(broker.log_dir, read_only=True) as log:
        on_disk = [end for _, (_, end) in sorted(log.offsets(MIRRORED).items())]
    return stable == ends == on_disk


def consumed_partitions(broker: KafkaBroker, is_committed: bool) -> list[list[Record]]:
    starts = {(MIRRORED, number): 0 for number in _NUMBERS}
    found = consumed_all(broker.bootstrap, starts, committed=is_committed)
    return [found[place] for place in starts]


def copied(root: Path, level: str = "read_committed") -> list[list[Record]]:
    with kafkalog.open(root, read_only=True) as log:
        return [
            of_kafkalog(log.read(MIRRORED, n, include_headers=True, isolation_level=level))
            for n in log.offsets(MIRRORED)
        ]


def test_a_mirror_by_spark_has_the_committed_records_in_their_partitions(
    mirrored: Mirrored,
) -> None:
    found = copied(mirrored.by_spark)
    assert [len(records) for records in found] == [60, 60, 0]
    for records, expected in zip(found, mirrored.committed, strict=True):
        assert [record.offset for record in records] == list(range(len(records)))
        assert [record[1:] for record in records] == [record[1:] for record in expected]


def test_a_mirror_by_bytes_has_all_records_at_their_offsets(mirrored: Mirrored) -> None:
    assert copied(mirrored.by_bytes) == mirrored.committed
    assert copied(mirrored.by_bytes, "read_uncommitted") == mirrored.uncommitted
    assert len(mirrored.uncommitted[0]) > len(mirrored.committed[0])
