"""Kafka's programs out of the Apache project's image, in containers of a Docker engine.

testcontainers' own KafkaContainer is for another vendor's image: it chooses the settings, keeps the
log inside, and comes back from a restart on another port. Here a container is but a process: the
directory is mounted at its own path, the network is the host's, and the user is ours, so a broker
is told, writes and listens exactly as one out of jars.
"""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Self
from xml.etree import ElementTree

from testcontainers.core.container import DockerContainer
from testcontainers.core.docker_client import DockerClient

from tests.conformance.installation import POM, Ended, Program, UnavailableError

_JARS = "/opt/kafka/libs/*"
_ANSWER_SECONDS = 5
_PROBE_SECONDS = 60
_PROBE = 'cat /proc/sys/kernel/random/boot_id >"$0" && readlink /proc/self/ns/net >>"$0"'
"""Says in a file of ours on which kernel and in which network it runs."""


def _release() -> str:
    """Return the release that pom.xml has the tools of: an image has a broker and tools of one."""
    space = {"m": "http://maven.apache.org/POM/4.0.0"}
    tools = "m:profiles/m:profile[m:id='tools']/m:dependencies"
    version = ElementTree.parse(POM).findtext(
        f"{tools}/m:dependency[m:groupId='org.apache.kafka']/m:version", namespaces=space
    )
    assert version
    return version


class ContainerProcess:
    """A container that runs one program; it is removed as soon as its end is seen."""

    def __init__(self, container: DockerContainer) -> None:
        self._container = container
        self._status: int | None = None
        self.output = self.errors = ""
        try:
            container.start()
        except BaseException:
            container.stop()
            raise

    def poll(self) -> int | None:
        """Return the status; None while it runs."""
        if self._status is None:
            self._container.reload()
            if self._container.status in {"exited", "dead", "stopped"}:
                self._status = self._container.wait()
                logs = self._container.get_logs()
                self.output, self.errors = (log.decode(errors="replace") for log in logs)
                self._container.stop()
        return self._status

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal to the program, the first of its container."""
        if self.poll() is None:
            self._container.get_wrapped_container().kill(signal=number.name)

    def wait(self, timeout: float) -> int:
        """Return the status once it has ended."""
        deadline = time.monotonic() + timeout
        while (status := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(self._container.image, timeout)
            time.sleep(0.02)
        return status

    def remove(self) -> None:
        """Remove the container, and so kill what runs there."""
        if self._status is None:
            self._status = -signal.SIGKILL
            self._container.stop()


class Containers:
    """An installation of Kafka as an image: each program gets a container."""

    def __init__(self, image: str, user: str) -> None:
        self._image = image
        self._user = user
        self.name = f"{image} by Docker"

    @classmethod
    def find(cls) -> Self:
        """Return the image, if an engine answers that runs it on our files and our loopback.

        An engine on another machine, or in a virtual one, does not.
        """
        user = f"{os.getuid()}:{os.getgid()}"
        try:
            docker = DockerClient(timeout=_ANSWER_SECONDS)
            try:
                docker.client.ping()
                options = docker.client.info().get("SecurityOptions") or []
            finally:
                docker.client.close()
            if any("name=rootless" in option for option in options):
                user = "0:0"  # which is who runs the engine
            found = cls(f"apache/kafka:{_release()}", user)
            found._probe()
        except UnavailableError:
            raise
        except Exception as fault:
            # Engines, registries and the library have errors of many kinds; each is a reason.
            line = (str(fault).splitlines() or [""])[0]
            raise UnavailableError(f"{type(fault).__name__}: {line}") from fault
        return found

    def _probe(self) -> None:
        """Pull the image if it is not there, and run it; raises UnavailableError."""
        here = [Path("/proc/sys/kernel/random/boot_id").read_text().strip()]
        here.append(str(Path("/proc/self/ns/net").readlink()))
        with tempfile.TemporaryDirectory(prefix="kafkalog-probe-") as name:
            directory = Path(name)
            seen = directory / "seen"
            ended = self._run(["sh", "-c", _PROBE, str(seen)], directory, _PROBE_SECONDS)
            if ended.status or not seen.exists():
                reason = ended.errors.strip() or f"status {ended.status}"
                raise UnavailableError(f"a container cannot write to our directories: {reason}")
            if seen.read_text().split() != here:
                raise UnavailableError("the engine runs in another network or on another machine")

    def _container(self, command: list[str], directory: Path) -> DockerContainer:
        container = DockerContainer(self._image)
        container.with_volume_mapping(directory, str(directory), "rw")
        container.with_command(command[1:])
        return container.with_kwargs(
            entrypoint=command[:1], network="host", user=self._user, working_dir=str(directory)
        )

    def _run(self, command: list[str], directory: Path, timeout: float) -> Ended:
        process = ContainerProcess(self._container(command, directory))
        try:
            status = process.wait(timeout)
        finally:
            process.remove()
        return Ended(status, process.output, process.errors)

    def run(self, program: Program, *arguments: str, directory: Path, timeout: float) -> Ended:
        """Run a program to its end."""
        return self._run(program.command("java", _JARS, *arguments), directory, timeout)

    def start(
        self, program: Program, *arguments: str, directory: Path, output: Path
    ) -> ContainerProcess:
        """Start a program."""
        command = program.command("java", _JARS, *arguments)
        redirected = ["sh", "-c", 'exec "$@" >>"$0" 2>&1', str(output), *command]
        return ContainerProcess(self._container(redirected, directory))
