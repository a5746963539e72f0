"""The older releases of Spark do what the newest does, and go on where another one stopped."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyspark
import pytest

from tests import ROOT, spark_peers
from tests.spark_home import make_spark_home

pytestmark = [pytest.mark.spark, pytest.mark.slow]
NEWEST = pyspark.__version__.rpartition(".")[0]
RELEASES = ["4.0", "4.1", "4.2", NEWEST, "4.0"]
"""Whose turn it is: the first one comes back."""
PATIENCE_S = 300


def visit(scratch: Path, release: str, number: int) -> dict[str, Any]:
    """Let a release of Spark do all that `release_visit` does; return what it found."""
    environment = dict(os.environ)
    if release != NEWEST:
        environment = spark_peers.environment(release)
        home = scratch / f"spark-{number}"
        environment["SPARK_HOME"] = str(make_spark_home(home, spark_peers.package(release)))
    ended = subprocess.run(
        [sys.executable, str(ROOT / "tests/spark/release_visit.py"), str(scratch), str(number)],
        check=False,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert ended.returncode == 0, f"{release}: {ended.stdout[-2000:]}{ended.stderr[-6000:]}"
    found: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
    assert found.pop("pyspark").startswith(f"{release}.")
    return found


@pytest.mark.parametrize("releases", [RELEASES], ids=" ".join)
def test_releases_take_turns_at_one_log_and_every_change_lands_once(
    tmp_path: Path, releases: list[str]
) -> None:
    for release in set(releases) - {NEWEST}:
        spark_peers.require(release)
    written = 0
    for number, release in enumerate(releases, 1):
        found = visit(tmp_path, release, number)
        written += 2 if number == 1 else 3
        table = [[f"of {number}", number], ["of all", number]]
        values = [[key, f'{{"n": {n}}}'] for key, n in table]
        left = found.pop("latest")
        assert [row for row in left if row[1] is not None] == values
        refusal = found.pop("limited")
        if release in {"4.0", "4.1"}:
            assert f"expected Spark 4.2 or later, found {release}." in refusal
        else:
            assert refusal.endswith("of at most 4")
            assert int(refusal.split()[0]) > 1
        tombstones = found.pop("cleaned") - len(table)
        assert 0 <= tombstones < number
        assert found == {"copied": written, "upserted": table, "view": table, "ktable": values}
