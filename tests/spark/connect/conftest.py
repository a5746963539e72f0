"""Sessions of Spark Connect. They run in processes of their own, apart from the classic session."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.acceptance.cluster import kill_session
from tests.postgres_server import fault
from tests.spark.connect.cells import LOCAL_CELLS, SERVER_CELLS, SETTINGS
from tests.spark_home import make_spark_home

SERVER = "org.apache.spark.sql.connect.service.SparkConnectServer"
START_S, PROGRAM_S = 240, 1800


@pytest.fixture(scope="session")
def conninfo(request: pytest.FixtureRequest) -> str:
    """Return the address of a PostgreSQL server; "" if there is none to be had."""
    if fault() and not os.environ.get("CI"):
        return ""
    return str(request.getfixturevalue("postgres_server").conninfo)


@pytest.fixture(scope="session")
def local_outcomes(tmp_path_factory: pytest.TempPathFactory, conninfo: str) -> dict[str, str]:
    """Return what each cell gave with a server that the client's process has started."""
    scratch = tmp_path_factory.mktemp("local")
    # Spark then takes any free port for the server.
    variables = {"KAFKALOG_POSTGRES": conninfo, "SPARK_TESTING": "1"}
    return outcomes("local[2]", scratch, *LOCAL_CELLS, **variables)


@pytest.fixture(scope="session")
def server_outcomes(tmp_path_factory: pytest.TempPathFactory, conninfo: str) -> dict[str, str]:
    """Return what each cell gave with a server that was started before."""
    scratch = tmp_path_factory.mktemp("server")
    with started_server(scratch) as remote:
        return outcomes(remote, scratch, *SERVER_CELLS, KAFKALOG_POSTGRES=conninfo)


def outcomes(remote: str, scratch: Path, *cells: str, **variables: str) -> dict[str, str]:
    printed = run_program("cells", remote, scratch / "cells", scratch, *cells, **variables)
    found = [json.loads(line) for line in printed.splitlines() if line.startswith('{"feature"')]
    return {each["feature"]: each["outcome"] for each in found}


def run_program(
    name: str, remote: str, directory: Path, scratch: Path, *arguments: str, **variables: str
) -> str:
    """Run a program of this folder in a process of its own; return what it prints."""
    home = make_spark_home(scratch / "client")
    module = f"tests.spark.connect.{name}"
    command = [sys.executable, "-m", module, remote, str(directory), *arguments]
    with (scratch / "errors").open("wb") as errors:
        program = subprocess.Popen(
            command,
            env={**os.environ, "SPARK_HOME": str(home), **variables},
            stdout=subprocess.PIPE,
            stderr=errors,
            start_new_session=True,
            text=True,
        )
    try:
        printed, _ = program.communicate(timeout=PROGRAM_S)
    finally:
        kill_session(program)
    assert program.returncode == 0, (scratch / "errors").read_text()[-4000:]
    return printed


def with_jar(scratch: Path, jar: str) -> dict[str, str]:
    """Return the environment of a process whose Spark has a package on its class path."""
    (scratch / "spark-defaults.conf").write_text(f"spark.driver.extraClassPath {jar}\n")
    return {"SPARK_CONF_DIR": str(scratch)}


@contextmanager
def started_server(scratch: Path, **variables: str) -> Iterator[str]:
    """Start a server as `sbin/start-connect-server.sh` does; yield its address."""
    home = make_spark_home(scratch / "home")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    settings = {**SETTINGS, "spark.connect.grpc.binding.port": str(port)}
    words = [word for pair in settings.items() for word in ("--conf", "=".join(pair))]
    command = [str(home / "bin" / "spark-submit"), "--class", SERVER, "--master", "local[2]"]
    log = scratch / "server"
    with log.open("wb") as output:
        server = subprocess.Popen(
            [*command, *words],
            cwd=scratch,
            env={**os.environ, "SPARK_HOME": str(home), **variables},
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    try:
        until = time.monotonic() + START_S
        while not answers(port):
            assert server.poll() is None, log.read_text()[-4000:]
            assert time.monotonic() < until, log.read_text()[-4000:]
            time.sleep(0.2)
        yield f"sc://127.0.0.1:{port}"
    finally:
        kill_session(server)


def answers(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
