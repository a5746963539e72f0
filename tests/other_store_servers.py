"""Servers of S3 that others have written: kafkalog takes gofakes3 and moto, not s3proxy and s3rver.

`make peers` gets them. They listen on loopback, keep a log's objects in memory or in a temporary
directory, and end with the process that started them.
"""

from __future__ import annotations

import http.client
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from tests import ROOT
from tests.object_store_server import BECOME, BUCKET

PEERS: Final = ROOT / ".peers"
_PROGRAMS: Final = {
    "gofakes3": PEERS / "gofakes3" / "gofakes3",
    "moto": PEERS / "moto" / "bin" / "moto_server",
    "s3proxy": PEERS / "s3proxy" / "s3proxy-2.6.0-jar-with-dependencies.jar",
    "s3rver": PEERS / "s3rver" / "node_modules" / "s3rver" / "bin" / "s3rver.js",
}
_S3PROXY: Final = """
s3proxy.endpoint=http://127.0.0.1:{port}
s3proxy.authorization=none
jclouds.provider=transient
jclouds.identity=any
jclouds.credential=any
"""


def fault(name: str) -> str | None:
    """Return why the server is not to be had; None when it is."""
    if not _PROGRAMS[name].exists():
        return f"{_PROGRAMS[name].relative_to(ROOT)} is missing: run `make peers`"
    runner = {"s3proxy": "java", "s3rver": "node"}.get(name)
    return f"{runner} is missing" if runner and shutil.which(runner) is None else None


class OtherStoreServer:
    """A running server with one bucket; a context manager."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._directory = Path(tempfile.mkdtemp(prefix=f"kafkalog-{name}-"))
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port: int = probe.getsockname()[1]

    def __enter__(self) -> OtherStoreServer:
        with (self._directory / "log").open("wb") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-c", BECOME, *self._command()],
                env={**os.environ, "PYTHONPATH": str(PEERS / "moto")},
                cwd=self._directory,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )
        deadline = time.monotonic() + 120
        while True:
            try:
                self._create_bucket()
                return self
            except OSError as refused:
                if self._process.poll() is not None or time.monotonic() > deadline:
                    log = (self._directory / "log").read_text()
                    self.__exit__()
                    raise RuntimeError(f"{self.name} did not start: {log}") from refused
                time.sleep(0.1)

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait(120)
        shutil.rmtree(self._directory, ignore_errors=True)

    def _command(self) -> Sequence[str]:
        program, port, bucket = str(_PROGRAMS[self.name]), str(self.port), BUCKET
        if self.name == "gofakes3":
            return program, "-backend", "memory", "-host", f"127.0.0.1:{port}"
        if self.name == "moto":
            return sys.executable, program, "-H", "127.0.0.1", "-p", port
        if self.name == "s3rver":
            node = shutil.which("node") or "node"
            listening = ("-a", "127.0.0.1", "-p", port, "--configure-bucket", bucket)
            return node, program, "-d", str(self._directory), *listening
        settings = self._directory / "s3proxy.conf"
        settings.write_text(_S3PROXY.format(port=port))
        return shutil.which("java") or "java", "-jar", program, "--properties", str(settings)

    def _create_bucket(self) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            connection.request("PUT", f"/{BUCKET}", headers={"Content-Length": "0"})
            connection.getresponse().read()  # s3rver has it, and declines
        finally:
            connection.close()
