"""A PostgreSQL server of the tests' own: the distribution's, in a temporary directory, on loopback.

It runs as an unprivileged user (root's tests become `nobody`), with PostgreSQL's own defaults, so
with fsync, and ends with the process that started it, however that ends.
"""

from __future__ import annotations

import os
import pwd
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Any

import pytest

__all__ = ["PostgresServer", "fault", "postgres", "postgres_server", "query"]

_BECOME = """
import ctypes, os, signal, sys
uid, gid = int(sys.argv[1]), int(sys.argv[2])
if os.getuid() == 0:
    os.setgroups([])
    os.setgid(gid)
    os.setuid(uid)
if sys.argv[3] == "dies":
    # PR_SET_PDEATHSIG; after setuid, which clears it
    ctypes.CDLL(None).prctl(1, int(signal.SIGINT))
os.execv(sys.argv[4], sys.argv[4:])
"""
"""Become that user, then the program, which ends when the thread that started it does."""


@cache
def _programs() -> Path | None:
    """Return the directory of the latest installed server's programs."""
    found = sorted(
        Path("/usr/lib/postgresql").glob("*/bin/initdb"),
        key=lambda path: [int(part) for part in path.parts[4].split(".") if part.isdigit()],
    )
    on_path = shutil.which("initdb")
    candidates = [*found, *([Path(on_path)] if on_path else [])]
    usable = [path.parent for path in candidates if (path.parent / "postgres").exists()]
    return usable[-1] if usable else None


def fault() -> str | None:
    """Return why there is no server to be had; None when there is one."""
    try:
        import psycopg  # noqa: F401
    except ImportError as missing:
        return f"{missing}; the extra `test` of the package has it"
    if _programs() is None:
        return "no PostgreSQL server in /usr/lib/postgresql/*/bin nor on PATH: install `postgresql`"
    return None


def query(conninfo: str, statement: str, *values: Any) -> list[Any]:
    """Run one statement on a connection of its own and commit; return its rows, if it has any."""
    import psycopg

    with psycopg.connect(conninfo, autocommit=True) as connection:
        found = connection.execute(statement.encode(), values or None)
        return [] if found.description is None else found.fetchall()


class PostgresServer:
    """A server that is started and stopped at will, always at the same address."""

    def __init__(self, **settings: str) -> None:
        programs = _programs()
        assert programs is not None, fault()
        self.programs = programs
        self.settings = settings
        self.directory = Path(tempfile.mkdtemp(prefix="kafkalog-postgres-"))
        account = pwd.getpwnam("nobody") if os.getuid() == 0 else pwd.getpwuid(os.getuid())
        self._user = [str(account.pw_uid), str(account.pw_gid)]
        if os.getuid() == 0:
            os.chown(self.directory, account.pw_uid, account.pw_gid)
        self.log = self.directory / "log"
        self._password = secrets.token_hex(8)
        self._process: subprocess.Popen[bytes] | None = None
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]

    @property
    def conninfo(self) -> str:
        """The connection string of libpq, as the superuser."""
        return (
            f"host=127.0.0.1 port={self.port} user=keeper password={self._password} "
            "dbname=postgres connect_timeout=10"
        )

    def _command(self, program: str, *arguments: str, dies: bool = False) -> list[str]:
        end = "dies" if dies else "stays"
        become = [sys.executable, "-I", "-c", _BECOME, *self._user, end]
        return [*become, str(self.programs / program), *arguments]

    def create(self) -> None:
        """Make the database cluster: passwords are asked for, and files are synced as they are."""
        secret = self.directory / "password"
        secret.write_text(self._password)
        secret.chmod(0o644)  # the directory above is for its user alone
        command = self._command(
            "initdb",
            *("-D", str(self.directory / "data"), "-U", "keeper", "--pwfile", str(secret)),
            *("-A", "scram-sha-256", "-E", "UTF8", "--locale", "C.UTF-8", "--no-sync"),
        )
        subprocess.run(command, check=True, capture_output=True, cwd="/", timeout=120)
        secret.unlink()

    def start(self, timeout_s: float = 60.0) -> None:
        """Start it, and return once it answers."""
        import psycopg

        assert self._process is None
        settings = {
            "listen_addresses": "127.0.0.1",
            "port": str(self.port),
            "unix_socket_directories": "",
            **self.settings,
        }
        arguments = [part for item in settings.items() for part in ("-c", "=".join(item))]
        command = self._command(
            "postgres", "-D", str(self.directory / "data"), *arguments, dies=True
        )
        with self.log.open("ab") as output:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, cwd="/"
            )
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                psycopg.connect(self.conninfo).close()
            except psycopg.OperationalError as refused:
                is_late = time.monotonic() > deadline
                if self._process.poll() is not None or is_late:
                    raise RuntimeError(f"PostgreSQL did not start: {self.log.read_text()}") from (
                        refused
                    )
                time.sleep(0.05)
            else:
                return

    def stop(self, how: signal.Signals = signal.SIGINT) -> None:
        """End it: SIGINT in good order, SIGQUIT as a crash does; then it recovers at its start."""
        if self._process is not None:
            self._process.send_signal(how)
            self._process.wait(60)
            self._process = None

    def remove(self) -> None:
        """End it and delete its directory."""
        self.stop(signal.SIGQUIT)
        shutil.rmtree(self.directory, ignore_errors=True)

    def query(self, statement: str, *values: Any) -> list[Any]:
        """Run one statement and commit; return its rows, none where it has none."""
        return query(self.conninfo, statement, *values)

    def __enter__(self) -> PostgresServer:
        """Make the cluster and start it."""
        try:
            self.create()
            self.start()
            self.query(f"CREATE ROLE plain LOGIN PASSWORD '{self._password}'")
            self.query("GRANT CREATE ON DATABASE postgres TO plain")
        except BaseException:
            self.remove()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """End it and delete its directory."""
        self.remove()


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[PostgresServer]:
    """Yield a running server; without one skip, or fail if this is CI."""
    reason = fault()
    if reason and os.environ.get("CI"):
        pytest.fail(reason)
    if reason:
        pytest.skip(reason)
    with PostgresServer() as server:
        yield server


@pytest.fixture
def postgres(postgres_server: PostgresServer) -> Iterator[str]:
    """Yield what connects an ordinary user to an empty schema, which is dropped after the test."""
    from psycopg.conninfo import make_conninfo

    schema = f"test_{secrets.token_hex(4)}"
    postgres_server.query(f"CREATE SCHEMA {schema} AUTHORIZATION plain")
    settings = f"-c search_path={schema}"
    yield make_conninfo(postgres_server.conninfo, user="plain", options=settings)
    postgres_server.query(f"DROP SCHEMA {schema} CASCADE")
