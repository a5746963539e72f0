"""A run that tries too little fails, and one that cannot try leaves what was counted before."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest

from tests.torture import Count, Tally, __main__, page
from tests.torture.page import PROGRAMS, Results

MACHINE = {"date": "2026-01-01", "commit": "abc", "library": "def"}


def options(**more: Any) -> argparse.Namespace:
    return argparse.Namespace(**{"quick": False, "only": None, "seed": 1, "json": True, **more})


def counted(tally: Tally, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """Report, and return what was told of it."""
    tally.report()
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_a_full_run_below_its_target_fails_and_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    tally = Tally("kills", "kills", options(), target=10)
    tally.tried(9)
    with pytest.raises(SystemExit, match="1"):
        tally.report()
    assert "BELOW ITS TARGET: 9 of 10 kills" in capsys.readouterr().err
    tally.tried()
    assert counted(tally, capsys)["target"] == 10


@pytest.mark.parametrize("less", [{"quick": True}, {"only": "3"}])
def test_who_asks_for_less_gets_less(
    less: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    tally = Tally("kills", "kills", options(**less), target=10)
    tally.tried()
    assert counted(tally, capsys)["target"] == 0


# --- the page ------------------------------------------------------------------------------------


def row(count: int, **more: Any) -> dict[str, Any]:
    made = {"what": "power cuts", "count": count, "violations": 0, "target": 10, "seed": 1}
    return {**made, "seconds": 1.0, "more": {}, **more}


def page_of(results: Results) -> str:
    return results.pages()[page.PAGE]


def test_what_could_not_be_tried_leaves_the_row_and_says_so() -> None:
    results = Results()
    results.add("power_cuts", [row(12)], MACHINE)
    results.add("power_cuts", [row(0, skipped="needs root")], {**MACHINE, "date": "2026-02-02"})
    (told,) = [line for line in page_of(results).splitlines() if line.startswith("| power cuts")]
    assert "| 12 | 10 |" in told and "2026-01-01" in told
    assert "skipped on 2026-02-02 (abc): needs root" in told
    results.add("power_cuts", [row(11)], MACHINE)
    (told,) = [line for line in page_of(results).splitlines() if line.startswith("| power cuts")]
    assert "| 11 | 10 |" in told and "skipped" not in told


def test_what_was_never_tried_is_on_the_page_as_that() -> None:
    results = Results()
    results.add("power_cuts", [row(0, skipped="needs root")], MACHINE)
    assert "| power cuts | 0 | 10 |" in page_of(results)
    assert "skipped on 2026-01-01 (abc): needs root" in page_of(results)


def test_counts_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page, "COUNTS", tmp_path / "counts.json")
    results = Results()
    results.add("kills", [row(12)], MACHINE)
    results.add("kills", [row(0, skipped="no time")], MACHINE)
    results.save()
    assert Results.load().pages() == results.pages()


def test_what_went_wrong_and_what_was_skipped_is_told_in_the_end(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    outcomes = {
        "kills": ([row(12)], 1),
        "damage": ([row(12)], 0),
        "power_cuts": ([row(0, skipped="needs root")], 0),
    }
    monkeypatch.setattr(__main__.Programs, "run", lambda _, name: outcomes[name])
    with pytest.raises(SystemExit, match=r"broken: kills$"):
        __main__.main([*outcomes])
    assert "skipped: power_cuts: needs root" in capsys.readouterr().err


def test_the_page_tells_of_full_runs_without_a_violation() -> None:
    results = Results.load()
    counted = [result.program for result in results]
    assert counted == [*PROGRAMS]
    for result in results:
        for count in (Count(**told) for told in result.counts):
            assert (count.violations, count.is_enough) == (0, True), count
            assert "missing" not in count.more, count
    for name, text in results.pages().items():
        assert (page.DOCS / name).read_text() == text, name


def test_the_page_has_at_most_150_lines() -> None:
    assert len(page_of(Results.load()).splitlines()) <= 150
