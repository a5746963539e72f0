"""A real Kafka broker that serves the very files of a log of ours, or a copy of them."""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final
from unittest import mock

from confluent_kafka import Consumer, KafkaException, Producer, TopicPartition
from confluent_kafka.admin import NewTopic

import kafkalog
from bench.broker import full_size
from bench.memory import peak_mib
from kafkalog.storage_engine.format import layout
from kafkalog.storage_engine.fs.clock import now_ms
from kafkalog.storage_engine.ownership.release import release
from tests.conformance import kafka

__all__ = ["KilledBroker", "broker_of"]

SECONDS_MAX: Final = 600
"""A thousand partitions take their time."""


@contextmanager
def broker_of(root: Path, topics: Mapping[str, int], scratch: Path) -> Iterator[kafka.KafkaBroker]:
    """Run a broker on a copy of the log `root`, which nobody writes; `topics`: their partitions.

    It learns the topics first, stops, finds the copy under their ids in the place of what it had,
    and loads it as after a clean shutdown.
    """
    with full_size(scratch / "kafka") as broker:
        for topic, count in topics.items():
            # Nothing is deleted or cleaned while it is read.
            broker.create_topic(topic, count, {"cleanup.policy": "delete", "retention.ms": "-1"})
        broker.stop()
        place, copy = broker.log_dir, scratch / "released"
        shutil.copytree(root, copy)
        ids = {topic: _topic_id(place / f"{topic}-0") for topic in topics}
        release(
            copy, topic_ids=ids, meta_properties=place / layout.META_PROPERTIES, now_ms=now_ms()
        )
        shutil.rmtree(place)
        copy.rename(place)
        broker.start()
        yield broker


def _topic_id(directory: Path) -> str:
    lines = (directory / "partition.metadata").read_text().splitlines()
    return next(line.removeprefix("topic_id: ") for line in lines if line.startswith("topic_id"))


class KilledBroker:
    """A broker with a copy of the only topic, `t`, of a log; it starts after SIGKILL, repeatedly.

    Closed segments are links to those of the log, as nobody changes them.
    """

    def __init__(self, directory: Path, root: Path, partitions: int) -> None:
        self.directory = directory
        self.broker = full_size(directory, settings={"log.retention.ms": "-1"})
        with self.broker:  # it makes the directories, and is killed
            self._create_topic(partitions)
        points = []
        with kafkalog.open(root, read_only=True) as log:
            self._ends = {number: end for number, (_, end) in log.offsets("t").items()}
        for number in range(partitions):
            source = root / layout.partition_directory("t", number)
            target = self.broker.log_dir / layout.partition_directory("t", number)
            *closed, active = sorted(source.glob(f"*{layout.LOG}"))
            for path in target.glob("0*"):
                path.unlink()
            for path in closed:
                (target / path.name).hardlink_to(path)
            shutil.copyfile(active, target / active.name)
            for path in (*closed, active):
                for suffix in (layout.INDEX, layout.TIME_INDEX):
                    shutil.copy(path.with_suffix(suffix), target)
            points.append(f"t {number} {int(active.stem)}")
        self._points = "\n".join(["0", str(len(points)), *points, ""])

    def _create_topic(self, partitions: int) -> None:
        topic = NewTopic("t", partitions, 1)
        for future in self.broker.admin.create_topics([topic], request_timeout=60).values():
            future.result(60)
        names = [layout.partition_directory("t", number) for number in range(partitions)]
        self.broker.wait_until(
            lambda: all(self.broker.has_directory(name) for name in names), SECONDS_MAX
        )

    def start(self) -> dict[str, Any]:
        """Start it, kill it, and return how long it took until all partitions had a leader.

        That is what it tells clients; it serves them a little later, which is not counted.
        """
        broker = self.broker
        (broker.log_dir / layout.RECOVERY_POINT_CHECKPOINT).write_text(self._points)
        said = broker.output.stat().st_size
        try:
            with mock.patch.object(kafka, "START_SECONDS", SECONDS_MAX):
                started = time.perf_counter()
                broker.start()
                seconds = time.perf_counter() - started
            peak = None if broker.pid is None else peak_mib(broker.pid)
            self._check()
        finally:
            broker.kill()
        output = broker.output.read_text(errors="replace")[said:]
        assert "Recovering unflushed segment" in output, output[-2000:]
        loading = re.findall(r"Loaded \d+ logs in (\d+) ?ms", output)
        return {"seconds": seconds, "peak_mib": peak, "loading": sum(map(int, loading)) / 1000}

    def _check(self) -> None:
        """End the program if it lost anything; write a record."""
        consumer = Consumer({"bootstrap.servers": self.broker.bootstrap, "group.id": "check"})
        for number in (0, max(self._ends)):
            end = _end_of(consumer, number)
            if end < self._ends[number]:
                raise SystemExit(f"the broker has {end} records of {self._ends[number]}")
        consumer.close()
        producer = Producer({"bootstrap.servers": self.broker.bootstrap})
        producer.produce("t", b"value", b"key", 0)
        if producer.flush(60):
            raise SystemExit("the broker takes no record")


def _end_of(consumer: Consumer, partition: int) -> int:
    """Return a partition's high watermark, once the broker leads it."""
    deadline = time.monotonic() + SECONDS_MAX
    while True:
        try:
            _, end = consumer.get_watermark_offsets(TopicPartition("t", partition), timeout=60)
        except KafkaException:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)
        else:
            return int(end)
