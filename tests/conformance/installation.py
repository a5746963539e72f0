"""Where the tests find a real Kafka: in a container of a Docker engine, or in jars of its release.

A Docker engine comes first, where one answers. KAFKALOG_PEER=docker or =jars decides otherwise.
"""

from __future__ import annotations

import functools
import os
import signal
from collections.abc import Callable, Mapping
from enum import Enum
from pathlib import Path
from typing import NamedTuple, Protocol

VARIABLE = "KAFKALOG_PEER"
POM = Path(__file__).with_name("pom.xml")


class Program(Enum):
    """A program of Kafka's: the profile of pom.xml that has its jars, its class, JVM options."""

    SERVER = "broker", "kafka.Kafka", "-Dlog4j2.level=INFO"
    STORAGE_TOOL = "broker", "kafka.tools.StorageTool"
    DUMP_LOG_SEGMENTS = "tools", "org.apache.kafka.tools.DumpLogSegments"
    CONSUMER_GROUPS = "tools", "org.apache.kafka.tools.consumer.group.ConsumerGroupCommand"
    SHARE_GROUPS = "tools", "org.apache.kafka.tools.consumer.group.ShareGroupCommand"

    def __init__(self, profile: str, main: str, *options: str) -> None:
        self.profile = profile
        self._main = main
        self._options = options

    def command(self, java: str, class_path: str, *arguments: str) -> list[str]:
        """Return the command line: a small heap, and quick to start."""
        return [
            java,
            *("-Xmx512m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-Xshare:auto"),
            *self._options,
            *("-cp", class_path),
            self._main,
            *arguments,
        ]


class Ended(NamedTuple):
    """What a program left: its status, its standard output, its standard error."""

    status: int
    output: str
    errors: str


class Process(Protocol):
    """A program that runs, in whichever way."""

    def poll(self) -> int | None:
        """Return its status; None while it runs."""

    def send_signal(self, number: signal.Signals, /) -> None:
        """Send a signal; nothing happens when it has ended."""

    def wait(self, timeout: float, /) -> int:
        """Return its status once it has ended; subprocess.TimeoutExpired after so many seconds."""


class Installation(Protocol):
    """A Kafka whose programs see the directory they are given, at the same path as we do.

    Whoever runs there listens on our loopback, and writes files as our user.
    """

    @property
    def name(self) -> str:
        """What it is, for people."""

    def run(self, program: Program, *arguments: str, directory: Path, timeout: float) -> Ended:
        """Run a program to its end; after so many seconds it is killed and an error raised."""

    def start(self, program: Program, *arguments: str, directory: Path, output: Path) -> Process:
        """Start a program in the directory; it appends to the output file, which lies there."""


class UnavailableError(Exception):
    """A Kafka cannot be had in one of the ways, or in any; the message is the reason."""


class Choice(NamedTuple):
    """The installation to use, and why those before it were passed over."""

    installation: Installation
    passed_over: list[str]

    def __str__(self) -> str:
        return "; ".join([self.installation.name, *self.passed_over])


def choose(ways: Mapping[str, Callable[[], Installation]], wanted: str) -> Choice:
    """Return the installation of the way that is wanted or, for "", the first that can be had.

    Raises UnavailableError with the reason of every way that was tried.
    """
    if wanted and wanted not in ways:
        raise UnavailableError(f"{VARIABLE} is {wanted!r}: expected one of {', '.join(ways)}")
    reasons: list[str] = []
    for name in [wanted] if wanted else ways:
        try:
            return Choice(ways[name](), reasons)
        except UnavailableError as fault:
            reasons.append(f"no Kafka from {name}: {fault}")
    raise UnavailableError("; ".join(reasons))


def _docker() -> Installation:
    try:
        from tests.conformance.container import Containers
    except ImportError as fault:
        raise UnavailableError(f"{fault}; the extra `test` of the package has it") from None
    return Containers.find()


def _jars() -> Installation:
    from tests.conformance.jars import Jars

    return Jars.find()


WAYS = {"docker": _docker, "jars": _jars}


@functools.cache
def _decide() -> Choice | UnavailableError:
    try:
        return choose(WAYS, os.environ.get(VARIABLE, ""))
    except UnavailableError as fault:
        return fault


def chosen() -> Choice:
    """Return the choice, which is made once a run; raises UnavailableError."""
    decision = _decide()
    if isinstance(decision, UnavailableError):
        raise decision
    return decision


def decided() -> Choice | None:
    """Return the choice if it was made in this run and found something."""
    if _decide.cache_info().currsize == 0:
        return None
    decision = _decide()
    return decision if isinstance(decision, Choice) else None
