"""Kafka's own log and cleaner at our side: one Java process, and the time is what we say it is.

`LogCleanerTwin.java` runs Kafka's classes on a directory, with no broker around them, so what a
round makes of a log can be compared exactly, delete horizons included. It is started from its
source, which takes a JDK.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tests.conformance.installation import UnavailableError
from tests.conformance.jars import Jars

_SOURCE = Path(__file__).with_name("LogCleanerTwin.java")


def fault() -> str | None:
    """Say why Kafka's cleaner cannot be run by itself; None when it can."""
    try:
        Jars.find()
    except UnavailableError as missing:
        return f"no jars of Kafka: {missing}"
    if shutil.which("javac") is None:
        return "no JDK here: Kafka's cleaner is run by a small program that is compiled on the way"
    return None


@dataclass(frozen=True)
class CleanerSettings:
    """What a cleaner is given; the sizes are bytes."""

    map_size: int
    load_factor: float
    buffer_size: int


@dataclass(frozen=True)
class Plan:
    """What Kafka says of a partition before a round."""

    first_dirty_offset: int
    first_uncleanable_offset: int
    clean_bytes: int
    cleanable_bytes: int


@dataclass(frozen=True)
class Round:
    """What became of a round; `end` is None where Kafka would not have done one."""

    plan: Plan
    end: int | None = None
    map_messages_read: int = 0
    messages_read: int = 0
    messages_written: int = 0
    invalid_messages_read: int = 0
    bytes_read: int = 0
    bytes_written: int = 0


class KafkaRefusedError(Exception):
    """Kafka raised an exception; the text has it."""


class KafkaCleaner:
    """The Java process; a context manager. Each log has a name and a directory."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._batches = directory / "batches"
        self._output = directory / "twin.out"

    def __enter__(self) -> Self:
        self._directory.mkdir(parents=True, exist_ok=True)
        command = Jars.find().source_command(_SOURCE)
        command.insert(1, "-Dorg.slf4j.simpleLogger.defaultLogLevel=warn")
        with self._output.open("ab") as output:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=output, text=True
            )
        assert self._line() == "ready", self._tail()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        with self._process:
            assert self._process.stdin is not None
            self._process.stdin.close()

    def create(self, now_ms: int, name: str, directory: Path, config: Mapping[str, str]) -> None:
        self._ask("create", now_ms, name, str(directory), *_pairs(config))

    def configure(self, now_ms: int, name: str, config: Mapping[str, str]) -> None:
        """Replace a log's config."""
        self._ask("configure", now_ms, name, *_pairs(config))

    def append(self, now_ms: int, name: str, data: bytes) -> int:
        """Append whole batches as a follower does; returns the log's end."""
        self._batches.write_bytes(data)
        return int(self._ask("append", now_ms, name, str(self._batches)))

    def roll(self, now_ms: int, name: str) -> int:
        """Begin a new segment; returns its base offset."""
        return int(self._ask("roll", now_ms, name))

    def raise_start(self, now_ms: int, name: str, offset: int) -> int:
        """Delete the records before an offset; returns where the log starts."""
        return int(self._ask("start", now_ms, name, str(offset)))

    def clean(self, now_ms: int, name: str, checkpoint: int, settings: CleanerSettings) -> Round:
        """Do one round, if the log is due."""
        figures = (settings.map_size, settings.load_factor, settings.buffer_size)
        answer = self._ask("clean", now_ms, name, str(checkpoint), *map(str, figures)).split()
        plan = Plan(*map(int, answer[1:5]))
        if answer[0] == "none":
            return Round(plan)
        return Round(plan, int(answer[0]), *map(int, answer[5:]))

    def load(
        self,
        now_ms: int,
        name: str,
        directory: Path,
        config: Mapping[str, str],
        *,
        is_clean: bool,
        log_start: int,
        recovery_point: int,
    ) -> None:
        """Open a directory as a broker does that starts; raises KafkaRefusedError."""
        shutdown = "clean" if is_clean else "killed"
        figures = (str(log_start), str(recovery_point))
        self._ask("load", now_ms, name, str(directory), shutdown, *figures, *_pairs(config))

    def lead(self, now_ms: int, name: str, data: bytes) -> int:
        """Append whole batches as a leader does; returns the log's end."""
        self._batches.write_bytes(data)
        return int(self._ask("lead", now_ms, name, str(self._batches)))

    def retain(self, now_ms: int, name: str) -> int:
        """Delete old segments; returns where the log starts."""
        return int(self._ask("retain", now_ms, name))

    def ages(self, now_ms: int, name: str) -> list[list[int]]:
        """Return by segment: base, size, the age that Kafka believes, its batches', its file's."""
        found: list[list[int]] = json.loads(self._ask("ages", now_ms, name))
        return found

    def show(self, now_ms: int, name: str) -> dict[str, Any]:
        """Return what a broker says of a log, and what its consumers read."""
        shown: dict[str, Any] = json.loads(self._ask("show", now_ms, name))
        return shown

    def times(self, now_ms: int, name: str, times: Iterable[int]) -> dict[str, Any]:
        """Return by time (offset, timestamp, leader epoch), None, or the error's text."""
        found: dict[str, Any] = json.loads(self._ask("times", now_ms, name, *map(str, times)))
        return found

    def close(self, name: str) -> None:
        """Close a log, as a broker does that is stopped."""
        self._ask("close", 0, name)

    def drop(self, name: str) -> None:
        """Let go of a log, whatever state it is in, also of one that was not loaded."""
        self._ask("drop", 0, name)

    def forget(self, name: str) -> None:
        """Let go of a log, which stays on the disk."""
        self._ask("forget", 0, name)

    def _ask(self, verb: str, now_ms: int, name: str, *arguments: str) -> str:
        assert self._process.stdin is not None
        self._process.stdin.write(" ".join((verb, str(now_ms), name, *arguments)) + "\n")
        self._process.stdin.flush()
        word, _, answer = self._line().partition(" ")
        if word == "error":
            raise KafkaRefusedError(f"{verb} {name}: {answer}")
        assert word == "ok", f"{verb} {name}: {answer} {self._tail()}"
        return answer

    def _line(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def _tail(self) -> str:
        return self._output.read_text(errors="replace")[-3000:]


def _pairs(config: Mapping[str, str]) -> list[str]:
    return [f"{name}={value}" for name, value in config.items()]
