"""A schema registry of the tests' own: Apicurio Registry, which has Confluent's API.

`make peers` fetches it. It keeps its schemas in memory, listens on loopback, and ends with the
process that started it.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import ROOT
from tests.object_store_server import BECOME

__all__ = ["SchemaRegistryServer", "fault", "schema_registry"]

PROGRAM = ROOT / ".peers" / "registry"
START_SECONDS = 90


def fault() -> str | None:
    """Return why there is no registry to be had; None when there is one."""
    if next(PROGRAM.glob("*-runner.jar"), None) is None:
        return f"{PROGRAM.relative_to(ROOT)} has no schema registry: run `make peers`"
    if shutil.which("java") is None:
        return "Java is missing, which runs the schema registry"
    return None


class SchemaRegistryServer:
    """A running registry without schemas; a context manager."""

    def __init__(self, parent: Path | None = None) -> None:
        """`parent` is where its directory is made."""
        self.directory = Path(tempfile.mkdtemp(prefix="kafkalog-registry-", dir=parent))
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self._port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{self._port}/apis/ccompat/v7"

    def __enter__(self) -> SchemaRegistryServer:
        jar = next(PROGRAM.glob("*-runner.jar"))
        log = self.directory / "log"
        options = ["-Xmx512m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1"]
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-I", "-c", BECOME),
                    *(shutil.which("java") or "java", *options, "-jar", str(jar)),
                ],
                cwd=self.directory,
                env={
                    **{n: v for n, v in os.environ.items() if n != "JAVA_TOOL_OPTIONS"},
                    "QUARKUS_HTTP_HOST": "127.0.0.1",
                    "QUARKUS_HTTP_PORT": str(self._port),
                },
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )
        deadline = time.monotonic() + START_SECONDS
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > deadline:
                text = log.read_text(errors="replace")[-3000:]
                self.__exit__()
                raise RuntimeError(f"the schema registry did not start: {text}")
            time.sleep(0.05)
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        shutil.rmtree(self.directory, ignore_errors=True)

    def stop(self) -> None:
        """End it; its schemas are gone."""
        self._process.kill()
        self._process.wait(120)

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/subjects", timeout=5) as answer:
                return bool(answer.status == 200)
        except (urllib.error.URLError, OSError):
            return False


@pytest.fixture
def schema_registry() -> Iterator[SchemaRegistryServer]:
    """Yield a running registry; without one skip, or fail if this is CI."""
    reason = fault()
    if reason and os.environ.get("CI"):
        pytest.fail(reason)
    if reason:
        pytest.skip(reason)
    with SchemaRegistryServer() as server:
        yield server
