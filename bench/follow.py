"""How soon a service has a record that another process commits, while a cleaner works.

    python -m bench.follow [--quick] [--json] [--path DIR] [--rounds N]

A process commits one record after the other, of 100 keys, into a compacted topic. A second process
follows them through `log.follow`. A third one, `kafkalog cleaner`, looks for work every second, and
closes the active segment when it is due. The peer is a Kafka broker as Kafka's start scripts run it
(bench/broker.py). Its producer waits for each record (acks=all, no linger); the consumer is, like
it, of librdkafka. Its own cleaner looks for work as often, and its segments have 1 MiB, the least
that it allows. The delay of a record is the time from the beginning of its commit until the
following process has it. The commit's own time (p50) is told too. Our commit syncs the
disk; Kafka's broker syncs nothing.

The two take turns, round by round: 100,000 commits in all on each side, 400 with --quick. The first
round warms up and is not counted. A ratio is the median of the rounds' ratios of their medians
(p50), or of their 99th percentiles. Each side must have had each record once, in order of its
commits, and our cleaner must have cleaned. Memory is that of the process that follows.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final

import kafkalog
from bench import Claim, compare_figures, in_turn, leave_out, program, report
from bench.broker import full_size
from bench.following_process import MOMENT, TOPIC, FollowingProcess
from kafkalog.log import KafkaLog
from tests.conformance import kafka

KEYS: Final = 100
ROUNDS: Final = 10
RECORD: Final = b"x" * 92
CONFIG: Final = {
    "cleanup.policy": "compact",
    "min.cleanable.dirty.ratio": "0.1",
    "file.delete.delay.ms": "1000",
}
KAFKA_CONFIG: Final = {**CONFIG, "segment.bytes": "1048576"}
Send = Callable[[bytes, bytes], object]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the benchmark and print its figures."""
    parser = program("follow", __doc__, quick="few commits")
    parser.add_argument("--rounds", type=int, help="rounds that count")
    options = parser.parse_args(arguments)
    rounds = options.rounds or (1 if options.quick else ROUNDS)
    commits = 400 if options.quick else 100_000 // ROUNDS
    with tempfile.TemporaryDirectory(prefix="kafkalog-bench-", dir=options.path) as scratch:
        for claim in measure(Path(scratch), rounds, commits):
            report(claim, as_json=options.json)


def measure(scratch: Path, rounds: int, commits: int) -> list[Claim]:
    """Let both sides follow `commits` in turn, `rounds` times and once to warm up."""
    with ExitStack() as opened:
        log = opened.enter_context(kafkalog.open(scratch / "log"))
        log.create_topic(TOPIC, config=CONFIG)
        opened.enter_context(cleaner(scratch / "log"))
        sides = {"ours": (Follower("log", str(scratch / "log")), log_sender(log))}
        if fault := kafka.fault():
            leave_out("a consumer of a Kafka broker", fault)
        else:
            settings = {"log.cleaner.backoff.ms": "1000"}
            broker = opened.enter_context(full_size(scratch / "broker", settings=settings))
            broker.create_topic(TOPIC, config=KAFKA_CONFIG)
            sides["kafka"] = (
                Follower("kafka", broker.bootstrap),
                kafka_sender(broker.bootstrap),
            )
        for follower, _ in sides.values():
            opened.enter_context(follower.process)
        for turn in range(rounds + 1):
            for _, (follower, send) in in_turn(turn, list(sides.items())):
                follower.follow(send, commits, is_counted=turn > 0)
        check_cleaned(log, (rounds + 1) * commits)
    return claims({name: follower for name, (follower, _) in sides.items()}, rounds * commits)


class Follower:
    """A process that follows, and the ms of its rounds, and of the commits of these."""

    def __init__(self, way: str, place: str) -> None:
        self.process = FollowingProcess(way, place)
        self.rounds: list[list[float]] = []
        self.commits: list[float] = []
        self.mib = 0.0

    def follow(self, send: Send, commits: int, *, is_counted: bool) -> None:
        """Commit so many records while the process follows them."""
        took = []
        with ThreadPoolExecutor(1) as asking:
            asked = asking.submit(self.process.follow, commits)
            for number in range(commits):
                began = time.monotonic_ns()
                send(b"%04d" % (number % KEYS), MOMENT.pack(began) + RECORD)
                took.append((time.monotonic_ns() - began) / 1e6)
            ms, mib = asked.result()
        if len(ms) != commits or min(ms) < 0:
            raise SystemExit(f"wrong: expected {commits} records, found {len(ms)}")
        self.mib = max(self.mib, mib)
        if is_counted:
            self.rounds.append(ms)
            self.commits += took


@contextmanager
def cleaner(path: Path) -> Iterator[None]:
    """Run the command `kafkalog cleaner` on a log, in a process of its own."""
    command = [sys.executable, "-m", "kafkalog", "cleaner", str(path), "--backoff-ms", "1000"]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as running:
        try:
            yield
        finally:
            running.terminate()


def log_sender(log: KafkaLog) -> Send:
    """Return what commits a record to our log."""
    return lambda key, value: log.append(TOPIC, [(key, value)])


def kafka_sender(server: str) -> Send:
    """Return what sends a record to a broker, and waits until it has it."""
    from confluent_kafka import Producer

    settings = {"acks": "all", "linger.ms": 0, "log_level": 0}
    producer = Producer({"bootstrap.servers": server, **settings})

    def send(key: bytes, value: bytes) -> None:
        producer.produce(TOPIC, value, key)
        if producer.flush(60):
            raise SystemExit("the broker did not take a record")

    return send


def check_cleaned(log: KafkaLog, commits: int) -> None:
    """End the program unless the log has each commit, and the cleaner has removed records."""
    end = log.offsets(TOPIC)[0][1]
    kept = sum(batch.num_rows for batch in log.read(TOPIC, 0))
    if end != commits or kept == commits:
        raise SystemExit(f"wrong: {end} of {commits} commits, of which {kept} were left")


def claims(sides: Mapping[str, Follower], commits: int) -> list[Claim]:
    """Return the delays; nothing without a peer."""
    if "kafka" not in sides:
        return []
    ours, peer = sides["ours"], sides["kafka"]
    made = []
    for name, figure in (("p50", statistics.median), ("p99", p99)):
        made.append(
            compare_figures(
                f"delay of a record that is followed, {name} of {commits:,} commits in a row",
                [figure(ms) for ms in ours.rounds],
                [figure(ms) for ms in peer.rounds],
                unit="ms",
                peer_name="a consumer of a Kafka broker",
                is_time=True,
                ours_mib=ours.mib,
                peer_mib=peer.mib,
            ).told(
                commit_ms=round(statistics.median(ours.commits), 3),
                peer_commit_ms=round(statistics.median(peer.commits), 3),
            )
        )
    return made


def p99(ms: Sequence[float]) -> float:
    """Return what 99 of 100 delays stay below."""
    return statistics.quantiles(ms, n=100)[-1]


if __name__ == "__main__":
    main()
