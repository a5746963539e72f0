"""Kafka's broker as a peer: as its own start scripts run it.

The broker of the tests is small and quick to start; this one has what Kafka gives it, the JVM
settings of its start scripts (a heap of 1 GiB, G1 with a pause of 20 ms at most, all compilers)
and as many threads as by default. What is left of the tests' settings is one node that keeps
single copies, and a session of 2 s in place of 9, which lets it come back sooner after a kill.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final

from tests import class_archives
from tests.conformance import kafka
from tests.conformance.installation import Installation, Program
from tests.conformance.jars import Jars

__all__ = ["Server", "full_size", "installation"]

_JVM: Final = (
    "-Xms1G", "-Xmx1G", "-server", "-XX:+UseG1GC", "-XX:MaxGCPauseMillis=20",
    "-XX:InitiatingHeapOccupancyPercent=35", "-XX:+ExplicitGCInvokesConcurrent",
    "-XX:MaxInlineLevel=15", "-Djava.awt.headless=true",
)  # fmt: skip
"""KAFKA_HEAP_OPTS and KAFKA_JVM_PERFORMANCE_OPTS of Kafka's start scripts."""
_THREADS: Final = {"num.io.threads": "8", "num.network.threads": "3"}
"""Kafka's defaults, of which the tests have fewer."""


class Server(Jars):
    """Kafka's jars with the JVM settings of its start scripts."""

    def _command(self, program: Program, arguments: tuple[str, ...]) -> list[str]:
        command = super()._command(program, arguments)
        if program is not Program.SERVER:
            return command
        archive = class_archives.options(class_archives.BROKER)
        kept = [word for word in command[1:] if not word.startswith(("-Xm", "-XX:", "-Xshare"))]
        return [command[0], *_JVM, *archive, *kept]


def installation() -> Installation | None:
    """Return the jars as `Server`; None where a container is chosen, which has its own settings."""
    return Server.find() if isinstance(kafka.chosen().installation, Jars) else None


def full_size(directory: Path, *, settings: Mapping[str, str] | None = None) -> kafka.KafkaBroker:
    """Return a broker, not yet started, that keeps everything in `directory`."""
    return kafka.KafkaBroker(
        directory, settings={**_THREADS, **(settings or {})}, installation=installation()
    )
