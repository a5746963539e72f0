"""The tables of the orders end equal to the log, however often the program is killed.

KAFKALOG_KILLS says how often (1; `make kill-test`: 20), KAFKALOG_SEED repeats the moments.
"""

from __future__ import annotations

import contextlib
import os
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from examples import orders_pipeline
from kafkalog.storage_engine.directory.directory_log import DirectoryLog
from tests import ROOT
from tests.postgres_server import query

KILLS = int(os.environ.get("KAFKALOG_KILLS", "1"))
pytestmark = [pytest.mark.spark, pytest.mark.slow]
ROWS = [("eu", 1, "fig", 3, "ripe"), ("us", 1, "nut", 5, None), ("us", 2, "pear", 4, None)]


def dead_letters(path: Path, name: str) -> list[tuple[Any, Any]]:
    with DirectoryLog(path / "log", read_only=True) as log:
        table = pa.Table.from_batches(log.read(f"orders-bad-{name}", 0))
    return list(zip(*(table.column(name).to_pylist() for name in ("key", "value")), strict=True))


def test_tables_of_a_killed_pipeline_end_equal_to_the_log(tmp_path: Path, postgres: str) -> None:
    command = [sys.executable, "-m", "examples.orders_pipeline", "--path", str(tmp_path)]
    command += ["--postgres", postgres]
    seed = int(os.environ.get("KAFKALOG_SEED", random.SystemRandom().randrange(1 << 32)))
    print(f"\nKAFKALOG_SEED={seed} KAFKALOG_KILLS={KILLS}", flush=True)
    chance = random.Random(seed)
    for _ in range(KILLS):
        with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            with contextlib.closing(process.stdout):
                for _ in range(chance.randrange(6)):
                    process.stdout.readline()
                time.sleep(chance.random())
                process.kill()
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    assert orders_pipeline.rows_of_sqlite(tmp_path) == ROWS
    found = query(postgres, "SELECT region, id, item, n, note FROM orders ORDER BY 1, 2")
    assert found == ROWS
    for name in ("sqlite", "postgres"):
        assert dead_letters(tmp_path, name) == [(b'{"region": "us", "id": 1}', b"no order")]
