"""Kafka's own cleaner as a peer: a broker that is given copies of a log, and cleans one when told.

The broker runs with Kafka's own JVM settings (`broker`), one cleaner thread and no throttle. Its
I/O buffers are as large as ours: it divides `log.cleaner.io.buffer.size` between reading and
writing. Each copy is a topic of its own, held back by `min.cleanable.dirty.ratio` until it is its
turn, so that all of them are cleaned by one warm JVM, in the rounds of the benchmark. Closed
segments are links to the same bytes, which lie in the same page cache for both sides.

How long a cleaning took is what its own lines in the broker's log say ("MB of log processed in ...
seconds", to a tenth), all rounds until the log is clean taken together.
"""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from confluent_kafka.admin import AlterConfigOpType, ConfigEntry, ConfigResource, ResourceType

from bench.broker import full_size
from bench.memory import peak_mib, reset_peak
from kafkalog.storage_engine.format import layout
from tests.conformance import kafka

__all__ = ["NAME", "KafkasCleaner", "KafkasCleaning", "fault"]

NAME: Final = "Kafka's LogCleaner 4.4.0"
SECONDS_MAX: Final = 3600
_LINE: Final = re.compile(
    r"cleaned log (?P<name>\S+) \(dirty section = \[(?P<start>\d+), (?P<end>\d+)\]\)\s+"
    r"(?P<mb>[\d,.]+) MB of log processed in (?P<seconds>[\d,.]+) seconds"
)
_THREAD: Final = "kafka-log-clean"
"""The part of its name that the system shows."""
_HELD_BACK: Final = {"min.cleanable.dirty.ratio": "1"}


def fault() -> str | None:
    """Say why there is no such peer here; None when there is."""
    return kafka.fault()


@dataclass(frozen=True, slots=True)
class KafkasCleaning:
    """The costs of one cleaning, and the place of its result."""

    topic: str
    directory: Path
    seconds: float
    rounds: int
    processed_mb: float
    cpu_seconds: float
    """The processor time of the cleaner's thread; 0 if it cannot be seen."""
    mib: float | None
    """The most memory that the JVM had resident meanwhile."""
    end: int
    """The offset up to which the log is clean."""
    is_cut_short: bool = False
    """Whether it went on when the figures were taken; `seconds` are those since it began."""


class KafkasCleaner:
    """A broker that holds copies of partitions; a context manager.

    `sources` are the directories of partitions, the offset at which the active segment of each
    begins, which is empty, and its topic's config; what is in it twice is cleaned twice.
    `buffer_size` are the bytes of the offset map, until `resize` gives it others.
    """

    def __init__(
        self,
        scratch: Path,
        sources: Sequence[tuple[Path, int, Mapping[str, str]]],
        *,
        buffer_size: int,
        io_buffer_size: int = 1 << 20,
    ) -> None:
        self._copies = [(f"copy-{number}", *source) for number, source in enumerate(sources)]
        self._stack = ExitStack()
        settings = {
            "log.cleaner.threads": "1",
            "log.cleaner.dedupe.buffer.size": str(buffer_size),
            "log.cleaner.io.buffer.size": str(2 * io_buffer_size),
            "log.cleaner.backoff.ms": "100",
            "log.initial.task.delay.ms": "600000000",
        }
        self.broker = full_size(scratch, settings=settings)

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            broker = stack.enter_context(self.broker)
            for topic, _, _, config in self._copies:
                broker.create_topic(topic, config={**config, **_HELD_BACK})
            broker.stop()
            for topic, source, _, _ in self._copies:
                _put(source, broker.log_dir / f"{topic}-0")
            _raise_offsets(broker.log_dir, {topic: end for topic, _, end, _ in self._copies})
            broker.start()
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._stack.close()

    def clean(self, *, limit_s: float = SECONDS_MAX) -> KafkasCleaning:
        """Let it clean the next copy until nothing of it is dirty, or for so many seconds.

        A broker that was cut short goes on, so it is of no use any more.
        """
        broker, (topic, _, end, _) = self.broker, self._copies.pop(0)
        begin = broker.output.stat().st_size
        if broker.pid is not None:
            reset_peak(broker.pid)
        spent = _cpu_seconds(broker.pid)
        _alter(broker, topic, {"min.cleanable.dirty.ratio": "0"})
        began = time.monotonic()
        broker.wait_until(
            lambda: self._cleaned_to(topic) >= end or time.monotonic() - began >= limit_s,
            limit_s + 60,
        )
        elapsed, is_cut_short = time.monotonic() - began, self._cleaned_to(topic) < end
        if not is_cut_short:
            broker.wait_until(lambda: self._logged_to(begin, topic) >= end)
        lines = self._lines(begin, topic)
        _alter(broker, topic, _HELD_BACK)
        return KafkasCleaning(
            topic,
            broker.log_dir / f"{topic}-0",
            elapsed if is_cut_short else sum(_number(line["seconds"]) for line in lines),
            len(lines),
            sum(_number(line["mb"]) for line in lines),
            _cpu_seconds(broker.pid) - spent,
            None if broker.pid is None else peak_mib(broker.pid),
            end=max(self._cleaned_to(topic), 0),
            is_cut_short=is_cut_short,
        )

    def resize(self, buffer_size: int) -> None:
        """Give the offset map other bytes."""
        name = "log.cleaner.dedupe.buffer.size"
        entries = [_entry(name, buffer_size)]
        resource = ConfigResource(ResourceType.BROKER, "1", incremental_configs=entries)
        begin = self.broker.output.stat().st_size
        for future in self.broker.admin.incremental_alter_configs([resource]).values():
            future.result(30)
        self.broker.wait_until(lambda: "Starting the log cleaner" in self._output(begin), 60)

    def _output(self, begin: int) -> str:
        with self.broker.output.open(errors="replace") as output:
            output.seek(begin)
            return output.read()

    def _cleaned_to(self, topic: str) -> int:
        path = self.broker.log_dir / "cleaner-offset-checkpoint"
        entries = [line.split() for line in path.read_text().splitlines()] if path.exists() else []
        return next((int(entry[2]) for entry in entries if entry[:2] == [topic, "0"]), -1)

    def _logged_to(self, begin: int, topic: str) -> int:
        return max((int(line["end"]) for line in self._lines(begin, topic)), default=-1)

    def _lines(self, begin: int, topic: str) -> list[re.Match[str]]:
        """Return the line of every cleaning of a topic that the broker has logged."""
        found = _LINE.finditer(self._output(begin))
        return [line for line in found if line["name"] == f"{topic}-0"]


def _put(source: Path, directory: Path) -> None:
    """Replace a topic's empty segment by a source's segments."""
    for path in directory.iterdir():
        if path.suffix in layout.SEGMENT_SUFFIXES or path.suffix == layout.SNAPSHOT:
            path.unlink()
    for path in source.iterdir():
        if path.suffix == layout.LOG and path.stat().st_size:
            os.link(path, directory / path.name)
        elif path.suffix in layout.SEGMENT_SUFFIXES:
            shutil.copy(path, directory)


def _cpu_seconds(pid: int | None) -> float:
    """Return the processor time of the cleaner's thread, user's and system's."""
    ticks = 0
    for task in Path(f"/proc/{pid}/task").glob("*/stat") if pid is not None else ():
        name, _, fields = task.read_text().partition("(")[2].rpartition(")")
        if name.startswith(_THREAD):
            ticks += sum(map(int, fields.split()[11:13]))
    return ticks / os.sysconf("SC_CLK_TCK")


def _number(text: str) -> float:
    return float(text.replace(",", ""))


def _entry(name: str, value: str | int) -> ConfigEntry:
    return ConfigEntry(name, str(value), incremental_operation=AlterConfigOpType.SET)


def _alter(broker: kafka.KafkaBroker, topic: str, config: Mapping[str, str]) -> None:
    entries = [_entry(name, value) for name, value in config.items()]
    resource = ConfigResource(ResourceType.TOPIC, topic, incremental_configs=entries)
    for future in broker.admin.incremental_alter_configs([resource]).values():
        future.result(30)


def _raise_offsets(directory: Path, ends: Mapping[str, int]) -> None:
    """Tell a broker's checkpoints where these topics end."""
    for name in ("recovery-point-offset-checkpoint", "replication-offset-checkpoint"):
        path = directory / name
        lines = path.read_text().splitlines()[2:] if path.exists() else []
        kept = [line for line in lines if line.split()[0] not in ends]
        entries = [*kept, *(f"{topic} 0 {end}" for topic, end in ends.items())]
        path.write_text("\n".join(["0", str(len(entries)), *entries, ""]))
