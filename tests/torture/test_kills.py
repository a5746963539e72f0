"""Kills see a step that is lost, one that lands twice, and a lock that a dead process still has."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from typing import Any

import pytest

from kafkalog.storage_engine import commit, locks, staging
from tests.torture import kills, roles
from tests.torture.kills import Outcome
from tests.torture.oracle import ACKNOWLEDGED

pytestmark = pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")  # it forks


@pytest.fixture(autouse=True)
def _warmed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compile before a fault is planted, which would be one there too."""
    monkeypatch.setattr(staging, "SEGMENT_RUN_SIZE", staging.SEGMENT_RUN_SIZE)  # it is set there
    kills.warm()


def outcomes(lives: Sequence[int], count: int) -> list[Outcome]:
    """Live in processes of their own; a fault that was planted here is one there."""
    found = list(kills.outcomes(1, lives, count, 1))
    for outcome in found:
        if outcome.kept:
            shutil.rmtree(outcome.kept)
    return found


def test_a_log_outlives_its_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kills, "CHILDREN", 0.5)
    (outcome,) = outcomes([0], 25)
    assert outcome.violation is None
    assert outcome.kills >= 25 and outcome.steps > 0 and outcome.verifications >= 1
    assert outcome.children_left > 0


def test_a_writer_that_acknowledges_before_it_commits_is_found_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    send = roles.Writer.send

    def hasty(self: roles.Writer, step: Any) -> None:
        self._notes.write(ACKNOWLEDGED, step.number)
        send(self, step)

    monkeypatch.setattr(roles.Writer, "send", hasty)
    assert "expected the state after one of the steps" in violation_of(outcomes([0, 1], 25))


def test_a_batch_that_lands_twice_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commit, "is_committed", lambda *_: False)
    told = violation_of(outcomes([0, 1], 25))
    assert "was committed twice" in told or "expected" in told


def test_a_child_that_keeps_the_locks_of_its_parent_is_found_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Forgetful(set[int]):
        def add(self, fd: int) -> None:
            pass

    monkeypatch.setattr(locks, "_descriptors", Forgetful())
    monkeypatch.setattr(kills, "CHILDREN", 1.0)
    monkeypatch.setattr(kills, "STUCK_S", 2.0)
    assert "nothing was committed for 2.0 s" in violation_of(outcomes([0, 1], 25))


def violation_of(found: list[Outcome]) -> str:
    """Return the first violation; there is one."""
    told = [outcome.violation for outcome in found if outcome.violation is not None]
    assert told
    return told[0]
