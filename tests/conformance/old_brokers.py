"""Remake the directories that brokers of old releases leave: `tests/unit/storage_engine/brokers`.

`python -m tests.conformance.old_brokers 0.11.0.3 2.8.2 ...` fetches the jars of each release with
Maven, and starts two brokers on the loopback. Producers of many kinds write to topics with two
replicas: small segments, compaction, retention, transactions, times out of order, messages v0 and
v1. Broker 2 is killed and comes back, so that it follows. Then both are shut down, started, and
killed. Releases before 3.9 need ZooKeeper, which is among their jars.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tarfile
import tempfile
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, Self

from confluent_kafka import Consumer, KafkaException, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic

from tests import ROOT
from tests.conformance.kafka import free_ports

TARGET: Final = ROOT / "tests/unit/storage_engine/brokers"
NAMES: Final = ("stopped-1", "stopped-2", "killed-1")
BROKERS: Final = (1, 2)
NOW_MS: Final = 1_700_000_000_000
_PACKAGES: Final = ("java.lang", "java.nio", "sun.nio.ch", "java.util", "java.io", "java.net")
_JVM: Final = (
    *("-Xmx300m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1"),
    *(f"--add-opens=java.base/{package}=ALL-UNNAMED" for package in _PACKAGES),
)
_POM: Final = """<project xmlns="http://maven.apache.org/POM/4.0.0">
<modelVersion>4.0.0</modelVersion><groupId>x</groupId><artifactId>x</artifactId><version>1</version>
<dependencies>{}</dependencies></project>"""
_JAR: Final = (
    "<dependency><groupId>{}</groupId><artifactId>{}</artifactId><version>{}</version></dependency>"
)
_SETTINGS: Final = {
    "default.replication.factor": "2",
    "offsets.topic.replication.factor": "2",
    "offsets.topic.num.partitions": "1",
    "transaction.state.log.replication.factor": "2",
    "transaction.state.log.num.partitions": "1",
    "transaction.state.log.min.isr": "1",
    "auto.create.topics.enable": "false",
    "delete.topic.enable": "true",
    "log.cleaner.enable": "true",
    "log.cleaner.backoff.ms": "200",
    "log.cleaner.dedupe.buffer.size": str(8 << 20),
    "log.retention.check.interval.ms": "500",
    "log.initial.task.delay.ms": "500",
    "log.segment.delete.delay.ms": "500",
    "log.flush.offset.checkpoint.interval.ms": "1000",
    "log.flush.start.offset.checkpoint.interval.ms": "1000",
    "replica.high.watermark.checkpoint.interval.ms": "500",
    "log.index.size.max.bytes": "8192",
}


class OldCluster:
    """Two brokers of one release, with the topics of these tests; a context manager."""

    def __init__(self, release: str, work: Path) -> None:
        self.release = tuple(map(int, release.split(".")))
        self.work = work
        self.jars = _jars(release, self.release, work / "jars")
        self._is_kraft = self.release >= (3, 9)
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self.control, *self.ports = free_ports(1 + len(BROKERS))
        self._keeper: subprocess.Popen[bytes] | None = None
        self.bootstrap = ",".join(f"127.0.0.1:{port}" for port in self.ports)

    def __enter__(self) -> Self:
        cluster_id = base64.urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("=")
        if not self._is_kraft:
            self._start_keeper()
        for number in BROKERS:
            properties = self.work / f"{number}.properties"
            lines = [f"{name}={value}\n" for name, value in self.settings(number).items()]
            properties.write_text("".join(lines))
            if self._is_kraft:
                tool = "kafka.tools.StorageTool", "format", f"--cluster-id={cluster_id}"
                assert self.java(*tool, f"--config={properties}").wait() == 0
        for number in BROKERS:
            self.start(number)
        wait(self.are_up)
        time.sleep(1)
        return self

    def are_up(self) -> bool:
        """Return whether both brokers are known in the cluster."""
        with contextlib.suppress(KafkaException):
            return len(AdminClient(self.client()).list_topics(timeout=3).brokers) == len(BROKERS)
        return False

    def __exit__(self, *_: object) -> None:
        for number in list(self._processes):
            self.stop(number, signal.SIGKILL)
        if self._keeper is not None:
            self._keeper.kill()
            self._keeper.wait()

    def java(self, *arguments: str) -> subprocess.Popen[bytes]:
        """Start a program of the release."""
        quiet = {name: value for name, value in os.environ.items() if name != "JAVA_TOOL_OPTIONS"}
        with (self.work / "out").open("ab") as output:
            return subprocess.Popen(
                ["java", *_JVM, "-cp", f"{self.jars}/*", *arguments],
                cwd=self.work,
                env=quiet,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    def _start_keeper(self) -> None:
        config = self.work / "zoo.cfg"
        config.write_text(
            f"dataDir={self.work / 'keeper'}\nclientPort={self.control}\ntickTime=1000\n"
            "clientPortAddress=127.0.0.1\nmaxClientCnxns=0\nadmin.enableServer=false\n"
        )
        (self.work / "keeper").mkdir()
        main = "org.apache.zookeeper.server.quorum.QuorumPeerMain"
        self._keeper = self.java(main, str(config))
        wait(lambda: _listens(self.control))

    def settings(self, number: int) -> dict[str, str]:
        """Return a broker's configs."""
        here = f"PLAINTEXT://127.0.0.1:{self.ports[number - 1]}"
        found = {**_SETTINGS, "log.dirs": str(self.log_dir(number)), "advertised.listeners": here}
        if not self._is_kraft:
            return found | {
                "broker.id": str(number),
                "listeners": here,
                "zookeeper.connect": f"127.0.0.1:{self.control}",
                "zookeeper.session.timeout.ms": "4000",
            }
        controller = f"127.0.0.1:{self.control}"
        return found | {
            "process.roles": "broker,controller" if number == 1 else "broker",
            "node.id": str(number),
            "controller.listener.names": "CONTROLLER",
            "listener.security.protocol.map": "PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT",
            "controller.quorum.voters": f"1@{controller}",
            "listeners": f"{here},CONTROLLER://{controller}" if number == 1 else here,
            "broker.session.timeout.ms": "3000",
            "broker.heartbeat.interval.ms": "500",
        }

    def log_dir(self, number: int) -> Path:
        """The directory of a broker."""
        return self.work / f"log-{number}"

    def start(self, number: int) -> None:
        """Start a broker, and wait until it listens."""
        process = self.java("kafka.Kafka", str(self.work / f"{number}.properties"))
        self._processes[number] = process
        wait(lambda: process.poll() is not None or _listens(self.ports[number - 1]))
        assert process.poll() is None, (self.work / "out").read_text(errors="replace")[-3000:]

    def stop(self, number: int, how: signal.Signals = signal.SIGTERM) -> None:
        """Stop a broker, and wait for its end."""
        process = self._processes.pop(number)
        process.send_signal(how)
        process.wait(60)

    def client(self, **more: object) -> dict[str, Any]:
        """Return the settings of a client."""
        return {"bootstrap.servers": self.bootstrap, "log_level": 0, **more}

    def create(self, topic: str, config: dict[str, str]) -> None:
        """Create a topic with two replicas."""
        admin = AdminClient(self.client())
        for future in admin.create_topics([NewTopic(topic, 1, 2, config=config)]).values():
            future.result(60)


def _listens(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
        return True
    return False


def wait(condition: Callable[[], bool], seconds: float = 90) -> None:
    """Wait until something is so."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not after {seconds} s"
        time.sleep(0.1)


def _jars(release: str, version: tuple[int, ...], target: Path) -> Path:
    """Fetch the jars of a release, and what Java 17 and its ZooKeeper lack."""
    scala = "2.11" if version < (2,) else "2.13"
    wanted = [("org.apache.kafka", f"kafka_{scala}", release)]
    wanted.append(("javax.xml.bind", "jaxb-api", "2.3.1"))
    wanted.append(("log4j", "log4j", "1.2.17"))
    return fetched(wanted, target)


def fetched(wanted: Sequence[tuple[str, str, str]], target: Path) -> Path:
    """Fetch jars, by group, artifact and version, with what they need; return their directory."""
    target.mkdir(parents=True)
    pom = target / "pom.xml"
    pom.write_text(_POM.format("".join(_JAR.format(*jar) for jar in wanted)))
    goal = "dependency:copy-dependencies", f"-DoutputDirectory={target}"
    subprocess.run(["mvn", "--batch-mode", "--quiet", "-f", str(pom), *goal], check=True)
    return target


# --- what is written -----------------------------------------------------------------------------


def topics(release: tuple[int, ...]) -> dict[str, dict[str, str]]:
    """Return the topics that a release can have, with their configs."""
    size = "internal.segment.bytes" if release >= (4,) else "segment.bytes"
    small = {size: "2500", "index.interval.bytes": "100"}
    kept = {**small, "retention.ms": "-1"}
    cleaned = {"min.cleanable.dirty.ratio": "0.01", "delete.retention.ms": "100"}
    found: dict[str, dict[str, str]] = {
        "plain": kept,
        "table": {**small, **cleaned, "cleanup.policy": "compact"},
        "both": {**kept, **cleaned, "cleanup.policy": "compact,delete"},
        "expired": {**small, "retention.ms": "3000"},
        "short": {**kept, "retention.bytes": "6000"},
        "stamped": {**kept, "message.timestamp.type": "LogAppendTime"},
        "gone": {},
        "idle": {},
    }
    if release >= (0, 11):
        found |= {"trans": kept, "trimmed": kept}
    if release < (3,):
        found["old0"] = {**kept, "message.format.version": "0.9.0"}
        found["old1"] = {**kept, "message.format.version": "0.10.0"}
    return found


def write(cluster: OldCluster, rounds: int, seed: int) -> None:
    """Write to every topic but the idle one."""
    draw, now_ms = random.Random(seed), NOW_MS + seed * 10**6
    codecs = ["none", "gzip", "snappy", "lz4", *(["zstd"] if cluster.release >= (2, 1) else [])]
    producers: dict[tuple[str, bool], Producer] = {}
    for _ in range(rounds):
        now_ms += 60_000
        for codec in codecs:
            for topic in topics(cluster.release).keys() - {"idle", "trans"}:
                is_old = topic.startswith("old")
                if is_old and codec == "zstd":
                    continue
                is_idempotent = cluster.release >= (0, 11) and not is_old and draw.random() < 0.4
                key = codec, is_idempotent
                if key not in producers:
                    how = {"compression.type": codec, "linger.ms": draw.choice((0, 20))}
                    settings = cluster.client(**how, **{"enable.idempotence": is_idempotent})
                    producers[key] = Producer(settings)
                _send(producers[key], draw, topic, 0 if topic == "expired" else now_ms)
        for producer in producers.values():
            assert producer.flush(60) == 0
    if cluster.release >= (0, 11):
        _write_transactions(cluster, draw, rounds, seed, now_ms)


def _send(producer: Producer, draw: random.Random, topic: str, now_ms: int) -> None:
    for _ in range(draw.randrange(3, 12)):
        is_keyed = topic != "short" or draw.random() < 0.5
        producer.produce(
            topic,
            value=draw.choice((None, b"", b"v" * draw.randrange(100), b"text " * 9)),
            key=b"key-%d" % draw.randrange(25) if is_keyed else None,
            partition=0,
            timestamp=now_ms and now_ms + draw.randrange(-50_000, 50_000),
        )
        producer.poll(0)


def _write_transactions(
    cluster: OldCluster, draw: random.Random, rounds: int, seed: int, now_ms: int
) -> None:
    """Write transactions that lie across one another, every second one aborted."""
    producers = [
        Producer(cluster.client(**{"transactional.id": f"{seed}-{number}"})) for number in range(3)
    ]
    for producer in producers:
        producer.init_transactions(60)
    for turn in range(rounds + 1):
        for producer in producers:
            producer.begin_transaction()
        for _ in range(3):
            for producer in producers:
                for topic in ("trans", *(["table"] if draw.random() < 0.5 else [])):
                    key = b"key-%d" % draw.randrange(9)
                    producer.produce(topic, value=b"t", key=key, partition=0, timestamp=now_ms)
                producer.flush(60)
        for number, producer in enumerate(producers):
            if (number + turn) % 2:
                producer.abort_transaction(60)
            else:
                producer.commit_transaction(60)


def consumed(cluster: OldCluster, level: str) -> dict[str, list[tuple[int, int]]]:
    """Return the offset and the time of each record that a consumer gets, by topic."""
    found: dict[str, list[tuple[int, int]]] = {}
    for topic in topics(cluster.release).keys() - {"gone"}:
        how = {"group.id": "g", "enable.partition.eof": True, "isolation.level": level}
        consumer = Consumer(cluster.client(**how, **{"enable.auto.commit": False}))
        consumer.assign([TopicPartition(topic, 0, -2)])
        found[topic] = []
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            message = consumer.poll(1)
            if message is None:
                continue
            if message.error() is not None:
                break
            found[topic].append((message.offset() or 0, message.timestamp()[1]))
        consumer.close()
    return found


# --- the directories -----------------------------------------------------------------------------


def make(release: str, work: Path) -> None:
    """Write the archive of a release."""
    made = work / "made"
    with OldCluster(release, work) as cluster:
        for topic, config in topics(cluster.release).items():
            cluster.create(topic, config)
        time.sleep(2)
        write(cluster, 2, 1)
        if cluster.release >= (0, 11):
            admin = AdminClient(cluster.client())
            for future in admin.delete_records([TopicPartition("trimmed", 0, 12)]).values():
                future.result(60)
        time.sleep(3)
        cluster.stop(2, signal.SIGKILL)
        write(cluster, 1, 2)
        cluster.start(2)
        time.sleep(8)
        write(cluster, 1, 3)
        time.sleep(4)
        levels = ["uncommitted", *(["committed"] if cluster.release >= (0, 11) else [])]
        records = {level: consumed(cluster, f"read_{level}") for level in levels}
        for number in reversed(BROKERS):
            cluster.stop(number)
            shutil.copytree(cluster.log_dir(number), made / f"stopped-{number}")
        for number in BROKERS:
            cluster.start(number)
        time.sleep(6)
        write(cluster, 1, 4)
        time.sleep(3)
        for number in BROKERS:
            cluster.stop(number, signal.SIGKILL)
        shutil.copytree(cluster.log_dir(1), made / "killed-1")
    (made / "records.json").write_text(json.dumps(records, separators=(",", ":")))
    archive(release, made)


def archive(release: str, made: Path) -> None:
    """Write the archive of what was made."""
    path = TARGET / f"{release}.tar.xz"
    TARGET.mkdir(exist_ok=True)
    with tarfile.open(path, "w:xz") as archive:
        for name in (*NAMES, "records.json"):
            archive.add(made / name, name, filter=_without_metadata)
    print(release, path.stat().st_size, "bytes")


def _without_metadata(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
    is_left_out = "__cluster_metadata-0" in member.name or member.name.endswith("/.lock")
    member.uid = member.gid = 0
    member.uname = member.gname = ""
    return None if is_left_out else member


def main(make: Callable[[str, Path], None]) -> None:
    """Make the archives of the releases that the command line names."""
    for release in sys.argv[1:]:
        with tempfile.TemporaryDirectory() as work:
            make(release, Path(work))


if __name__ == "__main__":
    main(make)
