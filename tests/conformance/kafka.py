"""A real Kafka beside the tests: one broker in KRaft mode, and Kafka's own reader of log files.

Where they come from is chosen in installation.py; `fault()` says why they cannot be had.
"""

from __future__ import annotations

import base64
import contextlib
import os
import signal
import socket
import subprocess
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

from confluent_kafka import KafkaException
from confluent_kafka.admin import AdminClient, NewTopic, PartitionMetadata

from tests.conformance.installation import Installation, Process, Program, UnavailableError, chosen

CLEAN_SHUTDOWN = ".kafka_cleanshutdown"
START_SECONDS = 90
STOP_SECONDS = 60
DUMP_SECONDS = 300

_SETTINGS = {
    "process.roles": "broker,controller",
    "node.id": "1",
    "controller.listener.names": "CONTROLLER",
    "listener.security.protocol.map": "PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT",
    "auto.create.topics.enable": "false",
    "offsets.topic.replication.factor": "1",
    "offsets.topic.num.partitions": "1",
    "transaction.state.log.replication.factor": "1",
    "transaction.state.log.num.partitions": "1",
    "transaction.state.log.min.isr": "1",
    "share.coordinator.state.topic.replication.factor": "1",
    "share.coordinator.state.topic.min.isr": "1",
    "group.initial.rebalance.delay.ms": "0",
    # A broker that was killed may come back once its session is over.
    "broker.session.timeout.ms": "2000",
    "broker.heartbeat.interval.ms": "250",
    # One machine, few records: what waits for load would only make the tests wait.
    "log.cleaner.backoff.ms": "100",
    "log.cleaner.dedupe.buffer.size": str(8 << 20),
    "num.network.threads": "2",
    "num.io.threads": "2",
}


def fault() -> str | None:
    """Say why there is no Kafka to test with, each way of having one; None when there is."""
    try:
        chosen()
    except UnavailableError as reasons:
        return str(reasons)
    return None


def dump_log_segments(paths: Iterable[Path], *arguments: str) -> str:
    """Return what kafka.tools.DumpLogSegments prints of these files, faults included."""
    paths = list(paths)
    directory = Path(os.path.commonpath([path.parent for path in paths]))
    files = ",".join(map(str, paths))
    result = chosen().installation.run(
        Program.DUMP_LOG_SEGMENTS,
        *("--files", files, *arguments),
        directory=directory,
        timeout=DUMP_SECONDS,
    )
    assert result.status == 0, result.output[-2000:] + result.errors[-2000:]
    # The tool's findings are on the standard error, among the lines of its logger.
    return result.output + result.errors


@contextlib.contextmanager
def killed_if_it_fails(kill: Callable[[], None]) -> Iterator[None]:
    """Kill what a block starts if it fails; an interrupt, too, ends what it would leave."""
    try:
        yield
    except BaseException:
        kill()
        raise


class KafkaBroker:
    """One broker, its own controller, on free ports of the loopback; a context manager.

    It keeps its ports over restarts, so clients survive them. `log_dirs` hold the topics alone, as
    the controller's own log lies apart. Settings are the broker's configs. The installation is the
    chosen one, unless another is given.
    """

    def __init__(
        self,
        directory: Path,
        *,
        log_dirs: int = 1,
        settings: Mapping[str, str] | None = None,
        installation: Installation | None = None,
    ) -> None:
        self.directory = directory
        self._installation = installation or chosen().installation
        self.log_dirs = [directory / f"log-{number}" for number in range(log_dirs)]
        client, controller = free_ports(2)
        self.bootstrap = f"127.0.0.1:{client}"
        self.output = directory / "broker.out"
        self._properties = directory / "server.properties"
        self._process: Process | None = None
        self._admin: AdminClient | None = None
        self._settings = {
            **_SETTINGS,
            "listeners": f"PLAINTEXT://{self.bootstrap},CONTROLLER://127.0.0.1:{controller}",
            "advertised.listeners": f"PLAINTEXT://{self.bootstrap}",
            "controller.quorum.bootstrap.servers": f"127.0.0.1:{controller}",
            "log.dirs": ",".join(map(str, self.log_dirs)),
            "metadata.log.dir": str(directory / "metadata"),
            **(settings or {}),
        }

    @property
    def pid(self) -> int | None:
        """The broker's process, where it is one of ours and runs; None in a container."""
        return getattr(self._process, "pid", None)

    @property
    def log_dir(self) -> Path:
        """The first of `log_dirs`, for whoever has one."""
        return self.log_dirs[0]

    def __enter__(self) -> Self:
        self._format()
        with killed_if_it_fails(self.kill):
            self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._admin = None
        self.kill()

    def _format(self) -> None:
        """Give every directory its `meta.properties`, and the controller its first records."""
        for directory in [self.directory / "metadata", *self.log_dirs]:
            directory.mkdir(parents=True, exist_ok=True)
        lines = [f"{name}={value}\n" for name, value in self._settings.items()]
        self._properties.write_text("".join(lines))
        tool = ["format", *self._quorum(), f"--config={self._properties}"]
        result = self._installation.run(
            Program.STORAGE_TOOL, *tool, directory=self.directory, timeout=START_SECONDS
        )
        assert result.status == 0, result.output + result.errors

    def _quorum(self) -> list[str]:
        """Return what `format` is told of the cluster."""
        # With "=": one id in 64 begins with "-", and would be taken for an option.
        return ["--standalone", f"--cluster-id={new_id()}"]

    def _is_led(self, partition: PartitionMetadata) -> bool:
        return bool(partition.leader == 1)

    def start(self) -> None:
        """Start the broker, and return when every partition of every topic has its leader."""
        assert self._process is None
        self._process = self._installation.start(
            Program.SERVER, str(self._properties), directory=self.directory, output=self.output
        )
        deadline = time.monotonic() + START_SECONDS
        while not self._answers():
            status = self._process.poll()
            if status is not None:
                self._process = None
                raise AssertionError(f"the broker ended with {status}: {self._tail()}")
            if time.monotonic() > deadline:
                self.kill()
                raise AssertionError(f"no broker after {START_SECONDS} s: {self._tail()}")
            time.sleep(0.05)

    def _answers(self) -> bool:
        # The port alone says nothing: a client that is turned away waits before it tries again.
        host, port = self.bootstrap.split(":")
        with contextlib.suppress(OSError), socket.create_connection((host, int(port)), 1):
            try:
                known = self.admin.list_topics(timeout=2)
            except KafkaException:
                return False
            partitions = [p for topic in known.topics.values() for p in topic.partitions.values()]
            return bool(known.brokers) and all(map(self._is_led, partitions))
        return False

    def _tail(self) -> str:
        return self.output.read_text(errors="replace")[-3000:]

    def stop(self) -> None:
        """Stop the broker in good order (SIGTERM); it leaves its log marked as cleanly shut."""
        self._end(signal.SIGTERM)

    def kill(self) -> None:
        """Kill the broker (SIGKILL); does nothing when it is stopped."""
        if self._process is not None:
            self._end(signal.SIGKILL)

    def pause(self) -> None:
        """Stop the broker in its tracks (SIGSTOP) until `resume`."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Let the broker go on (SIGCONT)."""
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def _end(self, number: signal.Signals) -> None:
        process = self._process
        assert process is not None
        process.send_signal(number)
        try:
            process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
            process.wait(STOP_SECONDS)
            raise AssertionError(f"the broker did not stop: {self._tail()}") from None
        finally:
            self._process = None

    @property
    def admin(self) -> AdminClient:
        """A client for topics and configs."""
        if self._admin is None:
            quiet = {"log_level": 0, "socket.timeout.ms": 5000, "reconnect.backoff.max.ms": 200}
            self._admin = AdminClient({"bootstrap.servers": self.bootstrap, **quiet})
        return self._admin

    def create_topic(
        self, name: str, partitions: int = 1, config: Mapping[str, str] | None = None
    ) -> None:
        """Create a topic, and return when its directories are there and its partitions are led."""
        topic = NewTopic(name, partitions, 1, config=dict(config or {}))
        for future in self.admin.create_topics([topic]).values():
            future.result(120)
        wanted = [f"{name}-{number}" for number in range(partitions)]
        self.wait_until(lambda: all(self.has_directory(directory) for directory in wanted))
        self.wait_until(self._answers)

    def has_directory(self, partition: str) -> bool:
        """Whether a partition (`topic-number`) has its directory, complete with the topic's id."""
        return any((d / partition / "partition.metadata").exists() for d in self.log_dirs)

    def wait_until(self, condition: Callable[[], bool], seconds: float = 30) -> None:
        """Wait for a condition that the broker brings about; fails with its last output."""
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, f"not after {seconds} s: {self._tail()}"
            time.sleep(0.05)


def new_id() -> str:
    """Return a new id, as Kafka writes one."""
    return base64.urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("=")


def free_ports(count: int) -> list[int]:
    """Return ports that nobody listens on, all different."""
    with contextlib.ExitStack() as stack:
        ports = []
        for _ in range(count):
            listener = stack.enter_context(socket.socket())
            listener.bind(("127.0.0.1", 0))
            ports.append(listener.getsockname()[1])
        return ports
