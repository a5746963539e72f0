"""A server of an object store of the tests' own: versitygw over a temporary directory.

`make peers` builds it. It listens on loopback, and ends with the process that started it.
"""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kafkalog.storage_engine.object_store.address import StoreAddress
from tests import ROOT
from tests.object_store_proxy import StoreProxy

__all__ = ["StoreServer", "fault", "s3_address", "s3_url", "store_proxy", "store_server"]

PROGRAM = ROOT / ".peers" / "versitygw" / "versitygw"
BUCKET = "bucket"
BECOME = """
import ctypes, os, sys
ctypes.CDLL(None).prctl(1, 9)  # PR_SET_PDEATHSIG, SIGKILL
os.execv(sys.argv[1], sys.argv[1:])
"""
"""Become the server, which ends when the thread that started it does."""


def fault() -> str | None:
    """Return why there is no server to be had; None when there is one."""
    if not PROGRAM.exists():
        return f"{PROGRAM.relative_to(ROOT)} is missing: run `make peers`"
    return None


class StoreServer:
    """A running versitygw with one bucket; a context manager."""

    def __init__(self, parent: Path | None = None) -> None:
        """`parent` is where its directory is made."""
        self.access_key = os.environ["AWS_ACCESS_KEY_ID"]
        self.secret = os.environ["AWS_SECRET_ACCESS_KEY"]
        self.directory = Path(tempfile.mkdtemp(prefix="kafkalog-store-", dir=parent))
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]

    def __enter__(self) -> StoreServer:
        root = self.directory / "buckets"
        (root / BUCKET).mkdir(parents=True)
        environment = {
            **os.environ,
            "ROOT_ACCESS_KEY": self.access_key,
            "ROOT_SECRET_KEY": self.secret,
        }
        with (self.directory / "log").open("wb") as output:
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-I", "-c", BECOME),
                    *(str(PROGRAM), "--port", f"127.0.0.1:{self.port}"),
                    *("--quiet", "--keep-alive", "posix", str(root)),
                ],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )
        deadline = time.monotonic() + 60
        while True:
            try:
                socket.create_connection(("127.0.0.1", self.port), timeout=1).close()
                return self
            except OSError as refused:
                if self._process.poll() is not None or time.monotonic() > deadline:
                    log = (self.directory / "log").read_text()
                    self.__exit__()
                    raise RuntimeError(f"versitygw did not start: {log}") from refused
                time.sleep(0.02)

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait(120)
        shutil.rmtree(self.directory, ignore_errors=True)

    @property
    def pid(self) -> int:
        """The process."""
        return self._process.pid

    @property
    def environment(self) -> dict[str, str]:
        """The variables that give a process the server's secret."""
        return {"AWS_ACCESS_KEY_ID": self.access_key, "AWS_SECRET_ACCESS_KEY": self.secret}


@pytest.fixture(scope="session")
def store_server() -> Iterator[StoreServer]:
    """Yield a running server; without one skip, or fail if this is CI."""
    reason = fault()
    if reason and os.environ.get("CI"):
        pytest.fail(reason)
    if reason:
        pytest.skip(reason)
    with StoreServer() as server:
        yield server


@pytest.fixture(scope="session")
def _proxy(store_server: StoreServer) -> Iterator[StoreProxy]:
    with StoreProxy(store_server.port) as proxy:
        yield proxy


@pytest.fixture
def store_proxy(_proxy: StoreProxy) -> StoreProxy:
    """Return the proxy before the server, with nothing counted."""
    _proxy.reset()
    _proxy.victim = lambda: None
    return _proxy


@pytest.fixture
def s3_address(store_proxy: StoreProxy) -> StoreAddress:
    """Return a prefix of the test's own in the server's bucket, reached through the proxy."""
    return StoreAddress.parse(
        f"s3://{BUCKET}/{secrets.token_hex(8)}",
        {
            "store.endpoint": f"http://127.0.0.1:{store_proxy.port}",
            "store.region": "us-east-1",
            "store.allow_http": "true",
        },
    )


@pytest.fixture
def s3_url(s3_address: StoreAddress, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the URL of that prefix; the environment gives the rest of its address."""
    assert s3_address.endpoint is not None
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3_address.endpoint)
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    monkeypatch.setenv("AWS_ALLOW_HTTP", "true")
    return str(s3_address)
