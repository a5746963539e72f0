"""`failed_calls` finds what is planted, and nothing where nothing is."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kafkalog.storage_engine.directory.earlier_work import EarlierWork
from kafkalog.storage_engine.fs import file_system, files
from kafkalog.storage_engine.metadata import checkpoints
from kafkalog.storage_engine.metadata.journal import Journal
from tests.torture import memory
from tests.torture.calls import READS, Calls, DiedError, Disturbed
from tests.torture.failed_calls import Deaths, Plan, after_death, cases, followed_by_death
from tests.torture.trial import DEAD, NEW, SAME, Bench, Case, Workload
from tests.torture.workloads import small_files

SYNCS = ("fsync", "fdatasync")
BOTH = (SAME, NEW)


@pytest.fixture(autouse=True)
def small() -> Iterator[None]:
    with small_files():
        yield


def faults(
    scratch: Path,
    workload: str,
    plant: Callable[[], None],
    names: tuple[str, ...] = SYNCS,
    kind: str = "EIO",
    who: tuple[str, ...] = (SAME,),
) -> list[str]:
    """Let each call of those names fail once, up to a case in which something is wrong."""
    chosen, bench = Workload.parse(workload), Bench(scratch)
    course = bench.course(chosen)
    plant()
    for n, name in enumerate(course.calls, 1):
        for process in who if name in names else ():
            tried = bench.try_case(Case(chosen, n, kind, process), course)
            if tried.faults:
                return tried.faults
    return []


def nothing() -> None:
    """Plant nothing."""


@pytest.mark.parametrize("workload", ["append@plain", "alter@lz4", "close@full"])
def test_a_sync_that_fails_is_survived(tmp_path: Path, workload: str) -> None:
    assert faults(tmp_path, workload, nothing, who=BOTH) == []


def test_a_sync_whose_failure_nobody_is_told_of_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def silent(fd: int) -> None:
        with contextlib.suppress(OSError):
            file_system.current.fsync(fd)

    found = faults(
        tmp_path, "commit@plain", lambda: monkeypatch.setattr(files, "sync_file", silent)
    )
    assert any("power cut" in fault and "lost" in fault for fault in found), found


def test_a_sync_that_is_repeated_on_the_same_pages_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stubborn(fd: int) -> None:
        try:
            file_system.current.fsync(fd)
        except OSError:
            file_system.current.fsync(fd)

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
        monkeypatch.setattr(EarlierWork, "write_again", lambda *_: None)

    assert any("power cut" in fault for fault in faults(tmp_path, workload, plant))


@pytest.mark.parametrize("planted", [False, True], ids=["mended", "old"])
@pytest.mark.parametrize("workload", ["relaxed+alter@plain", "relaxed+append@plain"])
@pytest.mark.parametrize("kind", ["ENOSPC+", "EIO+"])
def test_relaxed_commits_that_could_not_be_written_again_are_so_before_the_next_sync(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, planted: bool, workload: str, kind: str
) -> None:
    """Found by this program: the disk refused that, and another process trusted the pages."""

    begin = Journal.begin_syncs

    def plant() -> None:
        if planted:
            monkeypatch.setattr(Journal, "begin_syncs", lambda self: begin(self) or True)

    found = faults(tmp_path, workload, plant, ("fsync",), kind, BOTH)
    assert planted == any("power cut" in fault for fault in found), found


def test_a_small_file_whose_reading_fails_with_an_error_of_no_type_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = checkpoints._read

    def unkind(path: Path) -> Iterator[tuple[int, list[Any]]]:
        try:
            return iter([*real(path)])
        except OSError:
            raise KeyError(path.name) from None

    def plant() -> None:
        monkeypatch.setattr(checkpoints, "_read", unkind)

    found = faults(tmp_path, "checkpoint@plain", plant, ("open",))
    assert any("KeyError" in fault for fault in found), found


def test_all_calls_that_look_are_tried(tmp_path: Path) -> None:
    assert {*Bench(tmp_path).course(Workload.parse("clean@plain")).calls} >= {*READS}


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


@pytest.mark.parametrize("workload", ["checkpoint+clean@plain", "retain@plain"])
def test_an_error_without_a_type_that_is_only_logged_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workload: str
) -> None:
    """A cleaner and retention go on with the next partition, and what they tell is a text."""

    def plant() -> None:
        rename = files.rename

        def unkind(source: Path, target: Path) -> None:
            try:
                rename(source, target)
            except OSError as fault:
                raise KeyError("name") from fault

        monkeypatch.setattr(files, "rename", unkind)

    found = faults(tmp_path, workload, plant, ("replace",))
    assert any("logged KeyError" in fault for fault in found), found


def test_what_a_process_remembers_of_a_failure_helps_no_other_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A failed sync that is noted in memory alone is mended by that process alone."""
    noted: set[Path] = set()
    monkeypatch.setattr(memory, "_memories", lambda: [noted])
    begin = Journal.begin_syncs

    def begin_syncs(self: Journal) -> bool:
        is_first = begin(self) is not None and self.path not in noted
        noted.add(self.path)
        return is_first

    def plant() -> None:
        monkeypatch.setattr(Journal, "begin_syncs", begin_syncs)

    workload = "relaxed+alter@plain"
    assert faults(tmp_path, workload, plant, ("fsync",), "ENOSPC+", (SAME,)) == []
    assert faults(tmp_path, workload, plant, ("fsync",), "ENOSPC+", (NEW,)) != []


def test_unsynced_commits_may_go_back_as_a_whole_and_no_further(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a power cut may take is a matter of the log's state, not of the operation's name."""
    workload = "alter+relaxed+relaxed@plain"
    assert faults(tmp_path, workload, nothing, ("pwrite", "pread")) == []
    monkeypatch.setattr(Journal, "append", unsynced(Journal.append))
    found = faults(tmp_path, workload, nothing, ("pwrite", "pread"))
    assert any("power cut" in fault for fault in found), found


def unsynced(append: Callable[..., Any]) -> Callable[..., Any]:
    """Believe that a record was synced, whatever was done."""
    return lambda self, change, **how: append(self, change, **{**how, "sync": True})


def test_a_broken_disk_takes_no_data_any_more_and_gives_what_it_has(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"data")
    calls = Calls(2, "EIO+")
    with Disturbed(tmp_path, calls):
        calls.is_armed = True
        fd = files.open_to_write(tmp_path / "a")
        for refused in (
            files.sync_file,
            files.sync_file,
            lambda fd: files.write_at(fd, b"more", 0),
        ):
            with pytest.raises(OSError, match="Input/output error"):
                refused(fd)
        assert files.read_at(fd, 4, 0) == b"data"
        calls.is_armed = False
        files.write_at(fd, b"more", 0)
        os.close(fd)
    assert calls.names == ["open", "fsync", "fsync", "pwrite", "pread"]


@pytest.mark.parametrize(
    ("death", "position", "size", "written"),
    [(0, 64, 36, 18), (2, 64, 36, None), (3, 64, 36, 18), (2, 500, 36, 12), (2, 0, 2000, 512)],
)
def test_a_short_write_that_a_death_leaves_ends_at_a_sector(
    death: int, position: int, size: int, written: int | None
) -> None:
    calls = Calls(1, "SHORT", death)
    calls.is_armed = True
    assert calls("pwrite", (3, bytes(size), position)) == written
    assert bool(calls.failed) == (written is not None)


def test_cases_name_each_call_and_fit_it() -> None:
    names = ["create", "fsync", "pwrite", "open"]
    plan = Plan(Workload.parse("clean+topic@lz4"))
    everything = cases(plan, names, 1)
    tried = {(case.n, case.kind) for case in everything}
    assert tried >= {(1, "EMFILE"), (2, "EIO+"), (3, "SHORT")} and (2, "SHORT") not in tried
    assert {case.who for case in everything} == {SAME, NEW}
    assert [case.n for case in everything].count(4) == 1  # it changes nothing
    assert [case.n for case in cases(replace(plan, kinds=1), names, 1)] == [1, 2, 3, 4]
    assert {case.n for case in cases(replace(plan, reads=10**9), names, 1)} == {1, 2, 3}
    assert len(cases(replace(plan, most=2), names, 1)) == 2
    assert str(everything[0]) == "clean+topic@lz4:1:EIO:" + everything[0].who
    assert Case.parse(str(everything[0])) == everything[0]


@pytest.mark.parametrize("workload", ["append@plain", "commit@relaxed", "clean@lz4"])
def test_a_process_that_dies_after_a_call_has_failed_is_survived(
    tmp_path: Path, workload: str
) -> None:
    chosen, bench = Workload.parse(workload), Bench(tmp_path)
    course = bench.course(chosen)
    plan = Plan(chosen, deaths=Deaths(after=6))
    tried = [bench.try_case(case, course) for case in followed_by_death(plan, course.calls, seed=1)]
    assert [each.faults for each in tried if each.faults] == []
    assert "DiedError" in {each.raised for each in tried if each.has_fired}


@pytest.mark.parametrize("workload", ["append@plain", "topic@full", "release_adopt@plain"])
def test_a_call_that_fails_after_a_process_has_died_is_survived(
    tmp_path: Path, workload: str
) -> None:
    chosen, bench = Workload.parse(workload), Bench(tmp_path)
    course = bench.course(chosen)
    plan = Plan(chosen, deaths=Deaths(before=2, of_each=3))
    fired = 0
    for below in after_death(plan, course.calls, seed=1):
        of_next = bench.course(below.workload, course)
        for case in cases(below, of_next.calls, 1):
            tried = bench.try_case(case, of_next)
            assert tried.faults == []
            fired += tried.has_fired
    assert fired >= 3


def test_a_death_takes_the_process_before_its_call_and_all_later_ones(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"data")
    calls = Calls(1, "EIO", death=2)
    with Disturbed(tmp_path, calls):
        fd = files.open_to_write(tmp_path / "a")
        with calls.dying(2):
            files.write_at(fd, b"one", 0)
            files.write_at(fd, b"two", 0)
        assert (calls.names, calls.failed, calls.has_died) == ([], [], False)
        calls.is_armed = True
        with pytest.raises(OSError, match="Input/output error"):
            files.write_at(fd, b"three", 0)
        for _ in range(2):
            with pytest.raises(DiedError):
                files.write_at(fd, b"four", 0)
        calls.is_armed = False
        os.close(fd)
    assert calls.has_died and len(calls.failed) == 1
    assert (tmp_path / "a").read_bytes() == b"onea"


@pytest.mark.parametrize(("death", "who"), [(0, f"{DEAD}1"), (9, SAME)])
def test_what_the_next_process_does_not_sync_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, death: int, who: str
) -> None:
    chosen, bench = Workload(("append",), death=death), Bench(tmp_path)
    course = bench.course(chosen)
    monkeypatch.setattr(files, "sync_file", lambda _: None)
    for n in range(1, len(course.calls)):
        if found := bench.try_case(Case(chosen, n, "EIO", who), course).faults:
            break
    assert any("power cut" in fault for fault in found), found


def test_cases_with_deaths_are_read_by_their_names() -> None:
    case = Case(Workload(("append",), "lz4", death=7), 3, "EIO", SAME)
    assert str(case) == "append@lz4!7:3:EIO:same" and Case.parse(str(case)) == case
    assert case.death == 0
    case = Case(Workload(("append", "clean")), 3, "EIO", f"{DEAD}5")
    assert str(case) == "append+clean@plain:3:EIO:dead5" and Case.parse(str(case)) == case
    assert case.death == 8


def test_a_process_dies_once_it_has_changed_something() -> None:
    names = ["open", "pread", "pwrite", "fsync", "open"]
    plan = Plan(Workload.parse("append"), deaths=Deaths(after=9, before=9))
    assert {below.workload.death for below in after_death(plan, names, 1)} == {4, 5}
    assert {case.n for case in followed_by_death(plan, names, 1)} == {3, 4}
    assert not [*after_death(plan, [], 1), *followed_by_death(plan, [], 1)]


def test_the_name_of_an_emptied_segment_is_synced(tmp_path: Path) -> None:
    """Found by this program: a full disk refuses the file that replaces a removed one."""
    found = faults(tmp_path, "roll+append@lz4", nothing, ("pwrite",), "ENOSPC+")
    assert not found, found


def test_an_empty_segment_that_could_not_be_made_anew_is_not_damage(tmp_path: Path) -> None:
    """Found by this program: `verify` said of no bytes at all that they were lost."""
    assert faults(tmp_path, "roll+refuse@plain", nothing, ("create",), "EINTR") == []
