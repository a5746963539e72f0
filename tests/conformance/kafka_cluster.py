"""Three brokers that are controllers too (KRaft), under traffic, killed and started again."""

from __future__ import annotations

import contextlib
import io
import random
import shutil
import socket
import struct
import threading
import time
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from aiokafka.protocol.api import RequestHeader_v1
from aiokafka.protocol.commit import OffsetCommitRequest_v2
from aiokafka.protocol.coordination import FindCoordinatorRequest_v0
from confluent_kafka import KafkaException, Producer
from confluent_kafka.admin import NewTopic, PartitionMetadata

from tests.conformance.clients import Partition
from tests.conformance.kafka import KafkaBroker, free_ports, killed_if_it_fails, new_id

BROKERS: Final = 3
PLAIN, FAST, COMPACTED, SINGLE, GROUP = "plain", "fast", "compacted", "single", "readers"
_FOREVER: Final = {"retention.ms": "-1", "cleanup.policy": "delete"}
_CONFIG: Final[Mapping[str, tuple[int, Mapping[str, str]]]] = {
    PLAIN: (3, {**_FOREVER, "min.insync.replicas": "2"}),
    FAST: (3, _FOREVER),
    COMPACTED: (
        3,
        {
            "cleanup.policy": "compact",
            "min.cleanable.dirty.ratio": "0",
            "segment.ms": "500",
            "min.insync.replicas": "2",
        },
    ),
    SINGLE: (1, _FOREVER),
}
"""The replication factor and the configs of each topic."""
PARTITIONS: Final = 3
_SETTINGS: Final = {
    "offsets.topic.replication.factor": "3",
    "transaction.state.log.replication.factor": "3",
    "transaction.state.log.min.isr": "2",
    "offsets.topic.num.partitions": "3",
    "replica.lag.time.max.ms": "1500",
    "replica.high.watermark.checkpoint.interval.ms": "300",
    "controller.quorum.election.timeout.ms": "500",
    "controller.quorum.fetch.timeout.ms": "1000",
    "transaction.abort.timed.out.transaction.cleanup.interval.ms": "3600000",
    "num.recovery.threads.per.data.dir": "1",
}
_PATIENT: Final = {"log_level": 0, "socket.timeout.ms": 3000, "reconnect.backoff.max.ms": 200}


class Node(KafkaBroker):
    """One broker of a cluster."""

    def __init__(self, directory: Path, number: int, ports: list[tuple[int, int]], quorum: str):
        client, controller = ports[number - 1]
        voters = ",".join(f"{n}@127.0.0.1:{port}" for n, (_, port) in enumerate(ports, 1))
        super().__init__(
            directory,
            settings={
                **_SETTINGS,
                "node.id": str(number),
                "controller.quorum.bootstrap.servers": "",
                "controller.quorum.voters": voters,
                "listeners": f"PLAINTEXT://127.0.0.1:{client},CONTROLLER://127.0.0.1:{controller}",
                "advertised.listeners": f"PLAINTEXT://127.0.0.1:{client}",
            },
        )
        self.bootstrap = f"127.0.0.1:{client}"
        self._cluster_id = quorum

    def _quorum(self) -> list[str]:
        return [f"--cluster-id={self._cluster_id}"]

    def _is_led(self, partition: PartitionMetadata) -> bool:
        return True  # the cluster waits for leaders

    @property
    def disks(self) -> list[Path]:
        """Its log directory, and the controller's."""
        return [self.log_dir, self.directory / "metadata"]


class KafkaCluster:
    """Three brokers; a context manager."""

    def __init__(self, directory: Path) -> None:
        numbers = free_ports(2 * BROKERS)
        ports = [*zip(numbers[::2], numbers[1::2], strict=True)]
        cluster_id = new_id()
        self.directory = directory
        self.nodes = {
            number: Node(directory / f"broker-{number}", number, ports, cluster_id)
            for number in range(1, BROKERS + 1)
        }
        self.bootstrap = ",".join(node.bootstrap for node in self.nodes.values())

    def __enter__(self) -> Self:
        with killed_if_it_fails(lambda: self.kill(self.nodes)):
            self._each(self.nodes, lambda node: node._format())
            self.start(self.nodes)
            admin = self.nodes[1].admin
            topics = [
                NewTopic(name, PARTITIONS, factor, config=dict(config))
                for name, (factor, config) in _CONFIG.items()
            ]
            for future in admin.create_topics(topics).values():
                future.result(60)
            # Who asks for a coordinator makes the broker create the groups' topic.
            self.nodes[1].wait_until(self._has_coordinator, 90)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.kill(self.nodes)

    def _has_coordinator(self) -> bool:
        host, port = self.nodes[1].bootstrap.split(":")
        answer = _ask(host, int(port), FindCoordinatorRequest_v0(GROUP))
        return bool(answer.error_code == 0)

    def _each(self, numbers: Any, act: Any) -> None:
        with ThreadPoolExecutor(BROKERS) as threads:
            for future in [threads.submit(act, self.nodes[number]) for number in numbers]:
                future.result()

    def start(self, numbers: Collection[int], seconds: float = 60) -> set[Partition]:
        """Start brokers; return the partitions that have no leader after some seconds."""
        self._each(numbers, lambda node: node.start())
        deadline = time.monotonic() + seconds
        while (unled := self._unled(self.nodes[min(numbers)])) and time.monotonic() < deadline:
            time.sleep(0.1)
        return unled

    def _unled(self, node: Node) -> set[Partition]:
        topics = node.admin.list_topics(timeout=10).topics.values()
        return {
            (topic.topic, number)
            for topic in topics
            for number, partition in topic.partitions.items()
            if partition.leader < 1
        }

    def kill(self, numbers: Any) -> None:
        """Kill brokers (SIGKILL) at once."""
        self._each(numbers, lambda node: node.kill())

    def kill_ahead_of(self, number: int, behind: int, seconds: float = 0.3) -> None:
        """Kill a broker while another one has stood still, so that only the third follows it."""
        self.nodes[behind].pause()
        time.sleep(seconds)
        self.kill([number])
        self.nodes[behind].resume()

    def wait_for_election(self, seconds: float) -> bool:
        """Wait until a broker has noted a new leader epoch; return whether one has in time."""

        def noted() -> dict[Path, int]:
            logs = [node.log_dir for node in self.nodes.values()]
            found = (p for log in logs for p in log.glob("*/leader-epoch-checkpoint"))
            return {path: path.stat().st_size for path in found}

        before, deadline = noted(), time.monotonic() + seconds
        while noted() == before:
            if time.monotonic() > deadline:
                return False
        return True

    def copy_disks(self, target: Path) -> dict[int, list[Path]]:
        """Copy the disks of the stopped brokers; return where the copies are."""
        copied = {}
        for number, node in self.nodes.items():
            copied[number] = [target / f"{number}-{disk.name}" for disk in node.disks]
            for disk, copy in zip(node.disks, copied[number], strict=True):
                shutil.copytree(disk, copy)
        return copied


class Traffic:
    """Producers of all kinds and a group, in threads, from `start` until the brokers die.

    What was acknowledged by all in-sync replicas must be on the disks.
    """

    def __init__(self, cluster: KafkaCluster, seed: int) -> None:
        self._bootstrap = cluster.bootstrap
        self._seed = seed
        self.acknowledged: dict[Partition, dict[int, bytes]] = {}
        self.positions: dict[Partition, int] = {}
        """What the group has committed, acknowledged."""
        self.tried: dict[Partition, set[int]] = {}
        """That, and what the group has tried to commit since."""
        self.aborted: set[bytes] = set()
        """Values in transactions that were aborted, or may have been."""
        self.transactions = 0
        self._guard = threading.Lock()
        self._end = threading.Event()
        acts = (self._plain, self._fast, self._in_transactions, self._compacted, self._group)
        self._threads = [
            threading.Thread(target=self._acting, args=(act, number), daemon=True)
            for number, act in enumerate(acts)
        ]

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Write and read until the block ends, by when the brokers are dead."""
        for thread in self._threads:
            thread.start()
        try:
            yield
        finally:
            self._end.set()
            for thread in self._threads:
                thread.join(60)
                assert not thread.is_alive()

    def has_begun(self) -> bool:
        """Return whether every kind of writer has come through."""
        topics = {topic for topic, _ in list(self.acknowledged)}
        return topics == {PLAIN, SINGLE, COMPACTED} and bool(self.transactions and self.positions)

    def _acting(self, act: Any, number: int) -> None:
        draw = random.Random(f"{self._seed} {number}")
        while not self._end.is_set():
            with contextlib.suppress(KafkaException):  # the brokers go away
                act(draw)
            self._end.wait(0.05)

    def _producer(self, **settings: Any) -> Producer:
        return Producer(
            {
                "bootstrap.servers": self._bootstrap,
                "message.timeout.ms": 4000,
                "linger.ms": 1,
                **_PATIENT,
                **settings,
            }
        )

    def _send(self, producer: Producer, draw: random.Random, topic: str, *, counts: bool) -> bytes:
        value = b"%d-%s" % (self._seed, draw.randbytes(draw.choice((5, 100, 2000))).hex().encode())

        def delivered(error: Any, message: Any) -> None:
            if error is None and counts:
                with self._guard:
                    place = message.topic(), message.partition()
                    self.acknowledged.setdefault(place, {})[message.offset()] = value

        key = b"key-%d" % draw.randrange(20)
        with contextlib.suppress(BufferError):
            producer.produce(
                topic, value, key, partition=draw.randrange(PARTITIONS), on_delivery=delivered
            )
        producer.poll(0)
        return value

    def _writing(self, draw: random.Random, topics: list[str], **settings: Any) -> None:
        producer = self._producer(**settings)
        while not self._end.is_set():
            for _ in range(draw.randrange(1, 30)):
                counts = settings["acks"] == "all"
                self._send(producer, draw, draw.choice(topics), counts=counts)
            producer.poll(draw.random() / 50)
        producer.purge()
        producer.flush(1)

    def _plain(self, draw: random.Random) -> None:
        self._writing(draw, [PLAIN, SINGLE], acks="all", **{"enable.idempotence": True})

    def _fast(self, draw: random.Random) -> None:
        self._writing(draw, [FAST], acks="1", **{"compression.type": "lz4"})

    def _compacted(self, draw: random.Random) -> None:
        self._writing(draw, [COMPACTED], acks="all", **{"compression.type": "zstd"})

    def _in_transactions(self, draw: random.Random) -> None:
        name = f"id-{self._seed}-{draw.randrange(1 << 30)}"
        settings = {"transactional.id": name, "transaction.timeout.ms": 600_000}
        producer = self._producer(**settings)
        producer.init_transactions(3)
        while not self._end.is_set():
            producer.begin_transaction()
            values = [
                self._send(producer, draw, draw.choice((PLAIN, COMPACTED)), counts=False)
                for _ in range(draw.randrange(1, 20))
            ]
            if draw.random() < 0.3:
                self.aborted.update(values)
                producer.abort_transaction(3)
            else:
                producer.commit_transaction(3)
            self.transactions += 1

    def _group(self, draw: random.Random) -> None:
        addresses = [each.rsplit(":", 1) for each in self._bootstrap.split(",")]
        while not self._end.is_set():
            with self._guard:
                known = {place: max(each) for place, each in self.acknowledged.items()}
            for place, offset in known.items():
                position = draw.randrange(offset + 1)
                self.tried.setdefault(place, set()).add(position)
                if any(_commit(host, int(port), place, position) for host, port in addresses):
                    self.positions[place] = position
                    self.tried[place] = {position}
            time.sleep(0.02)


def _commit(host: str, port: int, place: Partition, offset: int) -> bool:
    """Commit a position by hand; return whether the broker is the coordinator and has taken it."""
    topic, partition = place
    wanted = [(topic, [(partition, offset, "")])]
    with contextlib.suppress(OSError, struct.error):
        answer = _ask(host, port, OffsetCommitRequest_v2(GROUP, -1, "", -1, wanted))
        return bool(answer.topics[0][1][0][1] == 0)
    return False


def _ask(host: str, port: int, request: Any) -> Any:
    """Return a broker's answer; a client by hand gives up when its broker dies."""
    data = RequestHeader_v1(request, 1, "by-hand").encode() + request.encode()
    with socket.create_connection((host, port), 5) as connection:
        connection.sendall(struct.pack(">i", len(data)) + data)
        with connection.makefile("rb") as answers:
            (size,) = struct.unpack(">i", answers.read(4))
            return request.RESPONSE_TYPE.decode(io.BytesIO(answers.read(size)[4:]))
