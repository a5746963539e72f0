"""What runs today, of lists that are too long for a day."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests import ROOT
from tests.day import DAY, has_day, todays


@pytest.mark.parametrize("days", [1, 2, 3, 6])
def test_each_case_has_its_turn_once_in_so_many_days(days: int) -> None:
    cases = [*"abcdefgh"]
    turns = [case for day in range(DAY, DAY + days) for case in todays(cases, days, day)]
    assert sorted(turns) == cases


def test_each_day_has_some_cases_of_a_list_that_is_long_enough() -> None:
    assert all(todays("abc", 3, day) for day in range(DAY, DAY + 3))


def test_every_case_runs_if_that_is_asked_for() -> None:
    told = subprocess.run(
        [sys.executable, "-c", "from tests.day import *; print(todays('abcd', 3), DAY)"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "KAFKALOG_DAY": "every"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert told.stdout == "['a', 'b', 'c', 'd'] 0\n"


def test_the_processes_of_a_run_have_the_same_day() -> None:
    told = subprocess.run(
        [sys.executable, "-c", "from tests.day import DAY; print(DAY)"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert int(told.stdout) == DAY


def test_a_case_that_is_known_by_its_name_alone_has_its_turn_within_some_days(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names = [f"test_{number}" for number in range(20)]
    turns = []
    for day in range(DAY, DAY + 2):
        monkeypatch.setattr("tests.day.DAY", day)
        monkeypatch.setattr("tests.day.IS_EVERY", False)
        turns += [name for name in names if has_day(name, 2)]
        assert has_day("test_1", 1)
    assert sorted(turns) == sorted(names)
    monkeypatch.setattr("tests.day.IS_EVERY", True)
    assert all(has_day(name, 2) for name in names)
