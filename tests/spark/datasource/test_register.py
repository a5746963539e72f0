"""`kafkalog.register`: nothing is exported, and `python3` is a Python without kafkalog."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import venv
from pathlib import Path

import pytest

from tests.acceptance.cluster import PATIENCE_S
from tests.spark_home import make_spark_home

pytestmark = [pytest.mark.spark, pytest.mark.slow]
PROGRAM = str(Path(__file__).with_name("registered_session.py"))
MASTERS = ["local[2]", "connect local[2]", "local-cluster[1,1,1024]"]
SPARK_ITSELF = {"PYSPARK_PYTHON", "PYSPARK_DRIVER_PYTHON", "PYTHONPATH", "SPARK_HOME"}


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """An environment in which `python3` is a Python of this version, without any package."""
    place = tmp_path_factory.mktemp("bare")
    venv.create(place / "venv", symlinks=True)
    kept = {name: value for name, value in os.environ.items() if name not in SPARK_ITSELF}
    return {
        **kept,
        "PATH": f"{place / 'venv' / 'bin'}{os.pathsep}{kept['PATH']}",
        "SPARK_HOME": str(make_spark_home(place / "spark")),
        "SPARK_CONNECT_AUTHENTICATE_TOKEN": "token",
    }


def run(environment: dict[str, str], *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, PROGRAM, *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=2 * PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("master", MASTERS)
def test_a_registered_session_reads_and_writes_by_this_python(
    master: str, bare: dict[str, str], tmp_path: Path
) -> None:
    if master.startswith("connect"):
        pytest.importorskip("grpc", reason="pyspark[connect] is not installed")
    # By this variable a local server of Spark Connect takes a free port.
    printed = run({**bare, "SPARK_TESTING": "1"}, "run", master, str(tmp_path))
    three = ["1", "2", "3"]
    assert json.loads(printed.splitlines()[-1]) == {
        "read": three[:2],
        "written": three,
        "streamed": three,
        "in foreachBatch": sorted(2 * three),
        "in another session": three,
    }


def test_neither_a_failed_call_nor_an_ended_session_leaves_anything_behind(
    bare: dict[str, str], tmp_path: Path
) -> None:
    printed = run(bare, "end", "local[1]", str(tmp_path))
    assert json.loads(printed.splitlines()[-1]) == {
        "refused": True,
        "python": True,
        "variable": None,
        "active": True,
        "kept": False,
    }


def test_a_server_that_was_started_elsewhere_is_answered_with_what_to_set(
    bare: dict[str, str], tmp_path: Path
) -> None:
    pytest.importorskip("grpc", reason="pyspark[connect] is not installed")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    with subprocess.Popen(
        [sys.executable, PROGRAM, "serve", port, str(tmp_path)],
        env=bare,
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as server:
        deadline = time.monotonic() + PATIENCE_S
        while not (tmp_path / "ready").exists():
            assert server.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.1)
        (said,) = run(bare, "meet", f"sc://localhost:{port}/;token=token", "").splitlines()
        assert server.stdin is not None
        server.stdin.close()
        server.wait(PATIENCE_S)
    assert said.startswith("register: Spark's workers cannot run kafkalog")
    assert "No module named" in said
    assert "set PYSPARK_PYTHON" in said
