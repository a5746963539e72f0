"""A server of Azure's blobs of the tests' own: azurite, which keeps them in memory.

`make peers` gets it from npm. It listens on loopback, with an account that it is told.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import http.client
import os
import secrets
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from email.utils import formatdate

import pytest

from kafkalog.storage_engine.object_store.address import StoreAddress
from tests import ROOT
from tests.object_store_proxy import StoreProxy
from tests.object_store_server import BECOME

__all__ = ["AzureServer", "azure_address", "azure_proxy"]

PROGRAM = ROOT / ".peers" / "azurite" / "node_modules" / ".bin" / "azurite-blob"
CONTAINER = "container"


def fault() -> str | None:
    """Return why there is no server to be had; None when there is one."""
    if not PROGRAM.exists():
        return f"{PROGRAM.relative_to(ROOT)} is missing: run `make peers`, which needs npm for it"
    if shutil.which("node") is None:
        return "node is missing, which runs azurite: install Node.js"
    return None


class AzureServer:
    """A running azurite with one container; a context manager."""

    def __init__(self) -> None:
        self.account = f"kafkalog{secrets.token_hex(4)}"
        self.key = base64.b64encode(secrets.token_bytes(32)).decode()
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port: int = probe.getsockname()[1]

    def __enter__(self) -> AzureServer:
        self._process = subprocess.Popen(
            [
                *(sys.executable, "-I", "-c", BECOME, shutil.which("node") or "node", str(PROGRAM)),
                *("--blobHost", "127.0.0.1", "--blobPort", str(self.port)),
                *("--inMemoryPersistence", "--skipApiVersionCheck", "--silent"),
                "--disableTelemetry",
            ],
            env={**os.environ, "AZURITE_ACCOUNTS": f"{self.account}:{self.key}"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
        )
        deadline = time.monotonic() + 60
        while True:
            try:
                self._create_container()
                return self
            except OSError as refused:
                if self._process.poll() is not None or time.monotonic() > deadline:
                    self.__exit__()
                    raise RuntimeError("azurite did not start") from refused
                time.sleep(0.05)

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait(120)

    def _create_container(self) -> None:
        """Send the one request that a store's client has no call for, signed by the key."""
        path = f"/{self.account}/{CONTAINER}"
        headers = {"x-ms-date": formatdate(usegmt=True), "x-ms-version": "2021-08-06"}
        named = "".join(f"{name}:{value}\n" for name, value in sorted(headers.items()))
        text = f"PUT{12 * chr(10)}{named}/{self.account}{path}\nrestype:container"
        key = base64.b64decode(self.key)
        signed = base64.b64encode(hmac.digest(key, text.encode(), hashlib.sha256)).decode()
        headers["Authorization"] = f"SharedKey {self.account}:{signed}"
        headers["Content-Length"] = "0"
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        try:
            connection.request("PUT", f"{path}?restype=container", headers=headers)
            answer = connection.getresponse()
            if answer.status != http.client.CREATED:
                raise RuntimeError(f"azurite made no container: {answer.status} {answer.read()!r}")
        finally:
            connection.close()


@pytest.fixture(scope="session")
def _azure_server() -> Iterator[AzureServer]:
    """Yield a running server; without one skip, or fail if this is CI."""
    reason = fault()
    if reason and os.environ.get("CI"):
        pytest.fail(reason)
    if reason:
        pytest.skip(reason)
    with AzureServer() as server:
        yield server


@pytest.fixture
def azure_proxy(_azure_server: AzureServer) -> Iterator[StoreProxy]:
    """Yield a proxy before the server."""
    with StoreProxy(_azure_server.port) as proxy:
        yield proxy


@pytest.fixture
def azure_address(
    _azure_server: AzureServer, azure_proxy: StoreProxy, monkeypatch: pytest.MonkeyPatch
) -> StoreAddress:
    """Return a prefix of the test's own in the container, reached through the proxy."""
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", _azure_server.account)
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", _azure_server.key)
    return StoreAddress.parse(
        f"az://{CONTAINER}/{secrets.token_hex(8)}",
        {
            "store.endpoint": f"http://127.0.0.1:{azure_proxy.port}/{_azure_server.account}",
            "store.allow_http": "true",
        },
    )
