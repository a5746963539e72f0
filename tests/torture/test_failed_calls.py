"""`failed_calls` finds what is planted, and nothing where nothing is."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kafkalog.storage_engine import files, partition_directory
from kafkalog.storage_engine.active_segment import ActiveSegment
from kafkalog.storage_engine.transaction import Transaction
from tests.torture.failed_calls import Bench, Plan, Workload, cases
from tests.torture.workloads import small_files

SYNCS = ("fsync", "fdatasync")


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    logging.disable(logging.CRITICAL)
    with small_files():
        yield
    logging.disable(logging.NOTSET)


def faults(
    scratch: Path,
    workload: str,
    plant: Callable[[], None],
    names: tuple[str, ...] = SYNCS,
    kind: str = "EIO",
) -> list[str]:
    """Let each call of those names fail once; return what was wrong."""
    chosen, bench = Workload.parse(workload), Bench(scratch)
    calls, after = bench.calls_of(chosen)
    plant()
    found: list[str] = []
    for n, name in enumerate(calls, 1):
        if name in names:
            found += bench.try_case(chosen, n, kind, after).faults
    return found


def nothing() -> None:
    """Plant nothing."""


@pytest.mark.parametrize("workload", ["append@plain", "alter@lz4", "close@full"])
def test_a_sync_that_fails_is_survived(tmp_path: Path, workload: str) -> None:
    assert faults(tmp_path, workload, nothing) == []


def test_a_sync_whose_failure_nobody_is_told_of_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def silent(fd: int) -> None:
        with contextlib.suppress(OSError):
            os.fsync(fd)

    found = faults(
        tmp_path, "commit@plain", lambda: monkeypatch.setattr(files, "sync_file", silent)
    )
    assert any("power cut" in fault and "lost" in fault for fault in found), found


def test_a_sync_that_is_repeated_on_the_same_pages_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stubborn(fd: int) -> None:
        try:
            os.fsync(fd)
        except OSError:
            os.fsync(fd)

    def plant() -> None:
        monkeypatch.setattr(files, "sync_file", stubborn)

    found = faults(tmp_path, "append@plain", plant)
    assert any("power cut" in fault for fault in found), found


def test_relaxed_commits_whose_pages_are_not_written_again_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    workload = "relaxed+relaxed+relaxed@plain"
    assert faults(tmp_path, workload, nothing) == []

    def plant() -> None:
        monkeypatch.setattr(Transaction, "_write_unsynced_again", lambda self: None)

    assert any("power cut" in fault for fault in faults(tmp_path, workload, plant))


@pytest.mark.parametrize("planted", [False, True], ids=["mended", "old"])
def test_relaxed_commits_that_could_not_be_written_again_are_so_before_the_next_sync(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, planted: bool
) -> None:
    """Found by this program: a full disk refused that, and the retry trusted the pages."""

    def plant() -> None:
        if planted:
            monkeypatch.setattr(partition_directory, "_suspect", NeverIn())

    found = faults(tmp_path, "relaxed+alter@plain", plant, ("fsync",), "ENOSPC+")
    assert planted == any("power cut" in fault for fault in found), found


class NeverIn(set[Path]):
    """Forgets what it is told."""

    def add(self, item: Path) -> None:
        """Forget it."""


def test_an_error_that_is_not_of_those_that_are_promised_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def plant() -> None:
        write_at = files.write_at

        def unkind(fd: int, data: files.Buffer, position: int) -> None:
            try:
                write_at(fd, data, position)
            except OSError as fault:
                raise KeyError("fd") from fault

        monkeypatch.setattr(files, "write_at", unkind)

    found = faults(tmp_path, "alter@plain", plant, ("pwrite",))
    assert any("raised KeyError" in fault for fault in found), found


def test_cases_name_each_call_and_fit_it() -> None:
    names = ["open", "fsync", "pwrite"]
    plan = Plan(Workload.parse("clean+topic@lz4"))
    everything = cases(plan, names, 1)
    assert (1, "EMFILE") in everything and (3, "SHORT") in everything
    assert (2, "SHORT") not in everything
    assert [n for n, _ in cases(replace(plan, kinds=1), names, 1)] == [1, 2, 3]
    assert {n for n, _ in cases(replace(plan, reads=10**9), names, 1)} == {2, 3}
    assert len(cases(replace(plan, most=2), names, 1)) == 2
    assert str(plan.workload) == "clean+topic@lz4"


@pytest.mark.parametrize("planted", [False, True], ids=["mended", "old"])
def test_an_emptied_segment_whose_name_is_not_synced_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, planted: bool
) -> None:
    """Found by this program: the file is removed, to be made anew, which a full disk refuses."""
    opened = ActiveSegment.__init__

    def forgetful(self: ActiveSegment, *args: Any, **kwargs: Any) -> None:
        opened(self, *args, **kwargs)
        self.has_new_name = False

    def plant() -> None:
        if planted:
            monkeypatch.setattr(ActiveSegment, "__init__", forgetful)

    found = faults(tmp_path, "roll+append@lz4", plant, ("pwrite",), "ENOSPC+")
    assert planted == any("committed records are lost" in fault for fault in found), found
