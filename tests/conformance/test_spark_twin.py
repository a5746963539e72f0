"""The same jobs with Spark's own Kafka connector and with kafkalog, in one session.

The connector asks a running broker; kafkalog reads that broker's directory, and a copy of it that
was adopted. Rows must be the same, of a stream in every batch, and so must the offsets that the
checkpoint has of every batch. Then checkpoints change hands. Each job runs on one of the two
directories, with KAFKALOG_TWIN=full on both (`make twin-test`).
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from confluent_kafka import IsolationLevel, TopicPartition
from confluent_kafka.admin import OffsetSpec

import kafkalog
from kafkalog.storage_engine.ownership.adopt import adopt
from tests.conformance import spark_twin_session
from tests.conformance.kafka import KafkaBroker
from tests.conformance.spark_twin_errors import CASES
from tests.conformance.spark_twin_jobs import JOBS, Job
from tests.conformance.spark_twin_session import Outcome, Query, TwinSession, Ways
from tests.conformance.spark_twin_topics import LATE, PARTITIONS, TRIMMED, USERS, Rounds

IS_FULL = os.environ.get("KAFKALOG_TWIN") == "full"
pytestmark = [pytest.mark.peers, pytest.mark.spark, pytest.mark.slow]

KAFKA, BROKER, OURS = "kafka", "broker", "ours"
"""The connector; kafkalog on the broker's directory; kafkalog on one of its own."""
HALF_WAY = "limited_offsets"
PAIRS = [
    (name, way)
    for number, name in enumerate(JOBS)
    for way in (BROKER, OURS)
    if IS_FULL or name == HALF_WAY or way == (BROKER, OURS)[number % 2]
]
"""The jobs that run, and on whose directory: each on one, but HALF_WAY, whose checkpoints change
hands. What a job asks for has nothing to do with whose directory it is."""
STREAMS = [(name, way) for name, way in PAIRS if JOBS[name].is_stream]
_SETTINGS = {
    "replica.high.watermark.checkpoint.interval.ms": "100",
    "log.flush.start.offset.checkpoint.interval.ms": "100",
    "log.initial.task.delay.ms": "100",
}


class Twins(NamedTuple):
    session: TwinSession
    messages: dict[str, dict[str, str]]
    """By the name of a case, what each format says of it."""

    def outcome(self, job: str, way: str) -> Outcome:
        return self.session.outcome(f"{job}-{way}")


@pytest.fixture(scope="module")
def twins(
    peers: None, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Twins]:
    """Run everything: two rounds of writing, after each of them the jobs of that round.

    Of the jobs and cases only those run of which a test was selected.
    """
    reason = spark_twin_session.fault()
    if reason and os.environ.get("CI"):
        pytest.fail(reason)
    if reason:
        pytest.skip(reason)
    directory = tmp_path_factory.mktemp("twins")
    asked = parameters(request)
    jobs = [job for name, job in JOBS.items() if name in asked or name == HALF_WAY]
    cases = {name: case for name, case in CASES.items() if name in asked}
    with (
        KafkaBroker(directory / "kafka", settings=_SETTINGS) as broker,
        TwinSession(directory / "spark") as session,
    ):
        rounds = Rounds(broker)
        rounds.first()
        session.run(queries(jobs, 1), ways(broker, directory / "ours-1"))
        rounds.second()
        second = ways(broker, directory / "ours-2")
        session.run(queries(jobs, 2), second)
        hand_over(session, second)
        messages = session.messages(
            [(case.is_stream, case.options) for case in cases.values()],
            {name: second[name] for name in (KAFKA, BROKER)},
        )
    yield Twins(session, dict(zip(cases, messages, strict=True)))


def parameters(request: pytest.FixtureRequest) -> set[Any]:
    """Return the parameters of all tests of this file that are to run."""
    items = [item for item in request.session.items if item.path == request.path]
    return {
        value
        for item in items
        if isinstance(item, pytest.Function) and hasattr(item, "callspec")
        for value in item.callspec.params.values()
    }


def queries(jobs: Iterable[Job], number: int) -> list[Query]:
    return [
        Query(job.name, way, f"{job.name}-{way}")
        for job in jobs
        if number in job.rounds
        for way in (KAFKA, BROKER, OURS)
        if way == KAFKA or (job.name, way) in PAIRS
    ]


def ways(broker: KafkaBroker, ours: Path) -> Ways:
    """Wait until the directory says what the broker says, and adopt a copy of it."""
    settle(broker)
    # A broker that runs renames some of its files, and removes others.
    passing = shutil.ignore_patterns(".lock", "*.tmp", "*.deleted")
    shutil.copytree(broker.log_dir, ours, ignore=passing)
    adopt(ours, config={}, now_ms=round(time.time() * 1000))
    return {
        KAFKA: ("kafka", {"kafka.bootstrap.servers": broker.bootstrap}),
        BROKER: ("kafkalog", {"path": str(broker.log_dir)}),
        OURS: ("kafkalog", {"path": str(ours)}),
    }


def settle(broker: KafkaBroker) -> None:
    """Wait until the cleaner has done what it can, and the broker's checkpoints are up to date."""
    users = broker.log_dir / f"{USERS}-0"

    def is_cleaned() -> bool:
        path = broker.log_dir / "cleaner-offset-checkpoint"
        lines = path.read_text().splitlines() if path.exists() else []
        cleaned = [int(line.split()[2]) for line in lines if line.startswith(f"{USERS} ")]
        return cleaned == [max(int(path.stem) for path in users.glob("*.log"))]

    broker.wait_until(is_cleaned)
    with kafkalog.open(broker.log_dir) as log:
        known: list[Any] = []

        def is_known() -> bool:
            topics = [*PARTITIONS, *([LATE] if LATE in log.topics() else ())]
            ours = [log.offsets(topic) for topic in topics]
            known.append(ours)
            # A transaction has ended before its markers are written.
            quiet = known[-10:] == [ours] * 10
            return quiet and all(
                listed(broker, topic, len(found)) == [found[n] for n in sorted(found)]
                for topic, found in zip(topics, ours, strict=True)
            )

        broker.wait_until(is_known)
        assert log.offsets(TRIMMED)[0][0] > 0


def listed(
    broker: KafkaBroker,
    topic: str,
    count: int,
    level: IsolationLevel = IsolationLevel.READ_UNCOMMITTED,
) -> list[tuple[int, int]]:
    """Return the first offset and the end (high watermark, or last stable offset) by partition."""
    ends = []
    for spec in (OffsetSpec.earliest(), OffsetSpec.latest()):
        asked = {TopicPartition(topic, number): spec for number in range(count)}
        answers = broker.admin.list_offsets(asked, isolation_level=level)
        ends.append([answers[place].result(120).offset for place in asked])
    return list(zip(*ends, strict=True))


# --- the jobs ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("job", "way"), PAIRS)
def test_rows_are_those_of_sparks_connector(twins: Twins, job: str, way: str) -> None:
    expected, found = twins.outcome(job, KAFKA), twins.outcome(job, way)

    assert found.rows == expected.rows
    assert any(expected.rows)


@pytest.mark.parametrize(("job", "way"), STREAMS)
def test_offsets_in_the_checkpoint_are_those_of_sparks_connector(
    twins: Twins, job: str, way: str
) -> None:
    expected, found = twins.outcome(job, KAFKA), twins.outcome(job, way)

    assert found.offsets == expected.offsets
    assert found.watermarks == expected.watermarks
    assert found.input_rows == expected.input_rows


@pytest.mark.parametrize(("job", "way"), STREAMS)
def test_a_query_is_as_far_behind_as_with_sparks_connector(
    twins: Twins, job: str, way: str
) -> None:
    assert twins.outcome(job, way).lags == twins.outcome(job, KAFKA).lags


# --- checkpoints change hands --------------------------------------------------------------------


def hand_over(session: TwinSession, ways: Ways) -> None:
    """Stop a query half way, and let the other format go on with its checkpoint."""
    first = {name: ways[way] for name, way in (("kafka", KAFKA), ("kafkalog", BROKER))}
    pairs = [("kafka", "kafkalog"), ("kafkalog", "kafka")]
    session.run(
        [Query(HALF_WAY, one, f"{one}-to-{other}", stop_after=2) for one, other in pairs], first
    )
    for one, other in pairs:
        take_back(session.directory, f"{one}-to-{other}")
    for suffix in ("checkpoint", "out"):
        kept = session.directory / f"{HALF_WAY}-{KAFKA}.{suffix}"
        shutil.copytree(kept, session.directory / f"done-by-kafka.{suffix}")
    session.run(
        [
            *(Query(HALF_WAY, other, f"{one}-to-{other}") for one, other in pairs),
            Query(HALF_WAY, "kafkalog", "done-by-kafka"),
        ],
        first,
    )


def take_back(directory: Path, name: str) -> None:
    """Make the last batch of a query one that was planned, and not committed."""
    commits = directory / f"{name}.checkpoint" / "commits"
    last = max(int(path.name) for path in commits.iterdir() if path.name.isdigit())
    for parent in (commits, directory / f"{name}.out" / "_spark_metadata"):
        for path in (parent / str(last), parent / f".{last}.crc"):
            path.unlink(missing_ok=True)


@pytest.mark.parametrize("name", ["kafka-to-kafkalog", "kafkalog-to-kafka"])
def test_the_other_format_goes_on_with_a_checkpoint(twins: Twins, name: str) -> None:
    expected, found = twins.outcome(HALF_WAY, KAFKA), twins.session.outcome(name)

    assert len(expected.rows) > 3
    assert found.rows == expected.rows
    assert found.offsets == expected.offsets


def test_a_checkpoint_of_sparks_connector_with_nothing_left_yields_nothing(twins: Twins) -> None:
    expected, found = twins.outcome(HALF_WAY, KAFKA), twins.session.outcome("done-by-kafka")

    count = len(expected.rows)
    assert found.rows[:count] == expected.rows
    assert not any(found.rows[count:])
    # Spark compares offsets as text, and Python's has blanks: it takes them for new, once.
    assert found.offsets[count:] in ([], expected.offsets[-1:])


# --- what is wrong -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CASES)
def test_what_is_wrong_is_said_in_the_words_of_sparks_connector(twins: Twins, name: str) -> None:
    said = {way: message.lower() for way, message in twins.messages[name].items()}

    for words in CASES[name].words:
        assert words.lower() in said[KAFKA], said[KAFKA][:2000]
        assert words.lower() in said[BROKER], said[BROKER][:2000]
