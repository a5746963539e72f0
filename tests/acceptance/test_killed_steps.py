"""A process dies at each step of a commit, or at each statement of an upsert: exactly once anyway.

KAFKALOG_STEPS=every (`make kill-test`) dies before and after every durable act of the sink, and
each statement of the upserts, not only where a step is complete or a statement writes. With
KAFKALOG_STEPS=once (`make nfs-test`) the sink dies at one of those moments of it that are alike.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.acceptance.killed_steps import STEPS

pytestmark = pytest.mark.slow
STEPS_MET = os.environ.get("KAFKALOG_STEPS")
EVERY = ["--every"] if STEPS_MET == "every" else []
OF_SINK = ["--once"] if STEPS_MET == "once" else EVERY


def deaths(program: str, directory: Path, *arguments: str) -> list[Any]:
    """Run a program that dies again and again; return the lines that it has printed."""
    command = [sys.executable, "-m", f"tests.acceptance.{program}", str(directory), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1800, check=False)
    assert done.returncode == 0, done.stderr[-8000:]
    found = [json.loads(line) for line in done.stdout.splitlines()]
    beside = {"deaths within a commit or an upsert": len(found)}
    print(f"\n{program}: {len(found)} deaths", json.dumps({"beside": beside}), sep="\n", flush=True)
    return found


@pytest.mark.parametrize(
    ("lost", "steps"),
    [
        (["driver"], STEPS),
        (["driver", "--adopted"], STEPS),
        (["task"], STEPS[:1]),
        (["commit"], STEPS[1:]),
    ],
    ids=["driver", "driver, adopted", "task", "commit"],
)
def test_a_death_at_any_step_of_a_commit_loses_and_doubles_nothing(
    tmp_path: Path, lost: list[str], steps: list[str]
) -> None:
    found = {step for _, step in deaths("killed_steps", tmp_path, *lost, *OF_SINK)}
    assert found - {""} == set(steps)


def test_a_death_at_any_statement_of_a_sqlite_upsert_is_made_good_by_the_retry(
    tmp_path: Path,
) -> None:
    found = {(moment, done) for _, moment, done in deaths("killed_statements", tmp_path, *EVERY)}
    assert ("before COMMIT", False) in found
    assert any(moment.startswith('before INSERT INTO "stock"') for moment, _ in found)
    assert {moment for moment, is_there in found if is_there} == {"after COMMIT"}


WAYS = {"by the driver": [], "by tasks": ["--staged"]}


@pytest.mark.parametrize("way", WAYS)
def test_a_death_at_any_statement_of_a_postgres_upsert_is_made_good_by_the_retry(
    tmp_path: Path, postgres: str, way: str
) -> None:
    found = deaths("killed_statements", tmp_path, "--postgres", postgres, *WAYS[way], *EVERY)
    moments = " ".join(moment for _, moment, _ in found)
    # Whatever it was that died, the table was as before or as after; both were met.
    assert {is_there for *_, is_there in found} == {False, True}
    for statement in ("INSERT INTO", "DELETE FROM", "FOR UPDATE", "pg_advisory_xact_lock"):
        assert statement in moments
