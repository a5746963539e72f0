"""Values of 100 MB and of 1 KB in one log: a Spark worker holds a few of the large ones at most.

In everyday runs the large ones have 8 MiB and are compressed; `KAFKALOG_LARGE=full` takes 100 MiB,
with compression and without, in a session that has the memory for the rows Spark makes of them.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.acceptance.large_values import CODECS, measure

pytestmark = [pytest.mark.spark, pytest.mark.slow]

IS_FULL = os.environ.get("KAFKALOG_LARGE") == "full"
ALLOWANCE = 48 << 20
"""Bytes beside the values: what is read ahead, and what allocators keep."""


def check(figures: dict[str, Any]) -> None:
    assert figures["peak"] - figures["peak_small"] <= 3 * figures["value"] + ALLOWANCE, figures


@pytest.mark.skipif(IS_FULL, reason="KAFKALOG_LARGE=full")
def test_large_values_among_small_ones_do_not_fill_a_worker(spark: Any, tmp_path: Path) -> None:
    check(measure(spark, tmp_path, 8 << 20, "zstd"))


@pytest.mark.skipif(not IS_FULL, reason="KAFKALOG_LARGE is not full")
def test_values_of_100_mib_among_small_ones_do_not_fill_a_worker() -> None:
    command = [sys.executable, "-m", "tests.acceptance.large_values", "100", "6g"]
    done = subprocess.run(command, check=True, capture_output=True, text=True)

    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert len(lines) == len(CODECS)
    for figures in lines:
        print(figures)
        check(figures)
