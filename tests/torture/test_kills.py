"""Kills see a step that is lost, one that lands twice, and a lock that a dead process still has."""

from __future__ import annotations

import faulthandler
import os
import shutil
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from kafkalog.storage_engine.directory import commit, retention, staged_directory
from kafkalog.storage_engine.fs import locks
from tests.torture import kills, roles
from tests.torture.kills import Outcome
from tests.torture.oracle import ACKNOWLEDGED, Wrong

pytestmark = pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")  # it forks


@pytest.fixture(autouse=True)
def _warmed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compile before a fault is planted, which would be one there too."""
    size = staged_directory.SEGMENT_RUN_SIZE
    monkeypatch.setattr(staged_directory, "SEGMENT_RUN_SIZE", size)  # it is set there
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
    monkeypatch.setattr(commit, "is_new", lambda *_, **__: True)
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
    # Without waiting for what will not come: that they have them is seen.
    monkeypatch.setattr(kills.Life, "_wait_for_progress", lambda _: None)
    assert "have left behind hold ['" in violation_of(outcomes([0, 1], 25))


def test_a_log_that_stands_still_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roles.Writer, "run", lambda *_: time.sleep(600))
    monkeypatch.setattr(kills, "STUCK_S", 0.5)
    told = violation_of(outcomes([0], 25))
    assert "nothing was committed for 0.5 s, and all processes slept" in told


def test_a_log_whose_processes_wait_for_a_processor_does_not_stand_still(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(roles.Process, "is_busy", lambda _: True)
    monkeypatch.setattr(kills, "STUCK_S", 0.0)
    assert [outcome.violation for outcome in outcomes([0], 15)] == [None]


def test_a_log_whose_processes_go_round_in_circles_is_found_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(roles.Writer, "run", circle)
    monkeypatch.setattr(kills, "STUCK_S", 5.0)
    monkeypatch.setattr(kills, "CIRCLES_S", 0.5)
    told = violation_of(outcomes([0], 25))
    assert "nothing was committed for 0.5 s, and processes were busy" in told


def test_only_a_process_that_sleeps_is_not_busy(tmp_path: Path) -> None:
    asleep = roles.Process(lambda: time.sleep(600), tmp_path / "asleep.fault")
    busy = roles.Process(circle, tmp_path / "busy.fault")
    try:
        deadline_s = time.monotonic() + 60
        while (asleep.is_busy(), busy.is_busy()) != (False, True):
            assert time.monotonic() < deadline_s
            time.sleep(0.01)
    finally:
        asleep.kill()
        busy.kill()
    assert not busy.is_busy()


def test_retention_that_takes_too_much_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    count = retention.count_expired

    def one_more(segments: Any, state: Any, config: Any, now_ms: int) -> int:
        found = count(segments, state, config, now_ms)
        return min(found + 1, len(segments) - 1) if config.is_deleted else found

    monkeypatch.setattr(retention, "count_expired", one_more)
    assert "not what retention leaves" in violation_of(outcomes([0, 1], 25))


@pytest.mark.parametrize("role", kills.ROLES)
@pytest.mark.parametrize("number", [signal.SIGSEGV, signal.SIGABRT, signal.SIGKILL])
def test_a_process_that_dies_by_itself_is_found_out(
    monkeypatch: pytest.MonkeyPatch, role: str, number: signal.Signals
) -> None:
    def die(*_: Any, **__: Any) -> None:
        faulthandler.disable()
        os.kill(os.getpid(), number)

    owner, name = (roles.Writer, "run") if role == "write" else (roles, role)
    monkeypatch.setattr(owner, name, die)
    monkeypatch.setattr(kills, "CHILDREN", 0.0)
    expected = f"{role}: a process ended by {number.name}: it raised nothing"
    assert expected in violation_of(outcomes([0], 25))


def test_a_process_that_ends_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roles, "read", lambda *_: os._exit(0))
    assert "read: a process ended with status 0" in violation_of(outcomes([0], 25))


def test_only_the_kill_of_a_living_process_counts(tmp_path: Path) -> None:
    alive = roles.Process(lambda: time.sleep(600), tmp_path / "alive.fault")
    assert alive.kill()
    alive.check()
    dead = roles.Process(lambda: os._exit(0), tmp_path / "dead.fault")
    os.waitid(os.P_PID, dead.pid, os.WEXITED | os.WNOWAIT)
    assert not dead.kill()
    with pytest.raises(Wrong, match="dead: a process ended with status 0"):
        dead.check()


def circle(*_: Any) -> None:
    """Work for ever, and get nowhere."""
    while True:
        pass


def violation_of(found: list[Outcome]) -> str:
    """Return the first violation; there is one."""
    told = [outcome.violation for outcome in found if outcome.violation is not None]
    assert told
    return told[0]
