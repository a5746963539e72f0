"""Work is shared by processes of which none is left, and nothing that they have written."""

from __future__ import annotations

import argparse
import faulthandler
import itertools
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from tests.torture import Tally, block_device, kills
from tests.torture import scratch as scratches
from tests.torture.scratch import memory_disk, scratch
from tests.torture.workers import WorkerDied, Workers

pytestmark = pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")  # it forks


def die_at_three(number: int) -> int:
    if number == 3:
        faulthandler.disable()
        os.kill(os.getpid(), signal.SIGSEGV)
    return number


@pytest.mark.parametrize("jobs", [1, 2])
def test_every_task_is_done_once(jobs: int) -> None:
    with Workers(jobs) as workers:
        assert sorted(workers.results(abs, range(-20, 0))) == list(range(1, 21))
    assert not multiprocessing.active_children()


def test_tasks_that_are_not_wanted_any_more_are_not_begun() -> None:
    with Workers(1) as workers:
        found = workers.results(abs, itertools.count())
        assert [next(found) for _ in range(5)] == [0, 1, 2, 3, 4]


def test_the_death_of_a_process_is_told_with_its_task() -> None:
    with Workers(1) as workers, pytest.raises(WorkerDied, match=r"one of \[3\]"):
        list(workers.results(die_at_three, range(5)))
    assert not multiprocessing.active_children()


def test_the_death_of_a_process_is_a_violation(capsys: pytest.CaptureFixture[str]) -> None:
    tally = Tally("kills", "kills", argparse.Namespace(quick=True, only=None, seed=7, json=False))
    with tally.deaths(), Workers(1) as workers:
        list(workers.results(die_at_three, range(5)))
    assert tally.violations == 1
    assert "--seed 7 --quick --only '3'" in capsys.readouterr().err


def die(tasks: list[int]) -> None:
    raise WorkerDied(tasks)


def test_each_task_of_a_process_that_may_have_died_is_named_with_a_command(
    capsys: pytest.CaptureFixture[str],
) -> None:
    tally = Tally("kills", "kills", argparse.Namespace(quick=True, only=None, seed=7, json=False))
    with tally.deaths():
        die([3, 5])
    told = capsys.readouterr().err
    assert tally.violations == 1 and "--only '3'" in told and "--only '5'" in told


def test_processes_end_in_the_middle_of_their_work() -> None:
    with Workers(2) as workers, pytest.raises(ZeroDivisionError):
        for _ in workers.results(time.sleep, [0, 600]):
            raise ZeroDivisionError
    assert not multiprocessing.active_children()


ENDED = """
import signal, sys
from tests.torture.scratch import scratch
from tests.torture.workers import Workers

def write(directory):
    number = 0
    while True:
        number = (number + 1) % 100  # not ever more: a disk in memory is small
        (directory / f"{number}").write_text("x")

# Who runs the tests may have it ignored, as nohup has; then a program goes on ignoring it.
signal.signal(int(sys.argv[1]), signal.SIG_DFL)
with scratch("test") as directory, Workers(2) as workers:
    print(directory, flush=True)
    list(workers.results(write, [directory, directory]))
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_program_that_is_told_to_end_leaves_nothing(tmp_path: Path, number: int) -> None:
    program = tmp_path / "ended.py"
    program.write_text(ENDED)
    with subprocess.Popen(
        [sys.executable, str(program), str(int(number))],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        text=True,
    ) as process:
        assert process.stdout is not None
        directory = Path(process.stdout.readline().strip())
        while not any(directory.iterdir()):
            time.sleep(0.001)
        process.send_signal(number)
        assert process.wait() == 128 + number
    assert not directory.exists()


def test_who_ends_programs_has_his_own_way_again_afterwards() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with scratch("test") as directory:
        assert directory.is_dir()
        assert signal.getsignal(signal.SIGTERM) is not before
    assert signal.getsignal(signal.SIGTERM) is before
    assert not directory.exists()


def test_who_is_told_to_end_while_he_removes_ends_when_it_is_gone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    removes = scratches._remove

    def told(directory: Path) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        removes(directory)

    monkeypatch.setattr(scratches, "_remove", told)
    with pytest.raises(SystemExit, match=f"{128 + signal.SIGTERM}"), scratch("test") as directory:
        assert directory.is_dir()
    assert not directory.exists()


def test_who_kills_is_prepared_for_his_own_end_before_he_does_anything(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def told() -> None:
        assert signal.getsignal(signal.SIGTERM) is scratches._end
        raise WorkerDied([])

    monkeypatch.setattr(kills, "warm", told)
    with pytest.raises(WorkerDied):
        next(kills.outcomes(seed=1, lives=[0], kills=1, jobs=1))


@pytest.mark.slow
@pytest.mark.parametrize("after_s", [0.0, 2.0])
@pytest.mark.parametrize("name", ["kills", "power_cuts"])
def test_kills_and_power_cuts_that_are_told_to_end_leave_nothing(name: str, after_s: float) -> None:
    if name == "power_cuts" and (why := block_device.refusal()):
        pytest.skip(f"power cuts: {why}")
    parent = memory_disk() or Path(tempfile.gettempdir())
    command = [sys.executable, "-m", f"tests.torture.{name}"]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as process:
        while not list(parent.glob(f"kafkalog-*-{process.pid}-*")):
            time.sleep(0.001)
        time.sleep(after_s)  # another moment of its life
        process.terminate()
        assert process.wait() == 128 + signal.SIGTERM
    assert not list(parent.glob(f"kafkalog-*-{process.pid}-*"))
