"""`full_disk` finds a table, a position and dead letters that do not change together."""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from kafkalog.errors import StorageError
from tests.acceptance.mounts import Disk
from tests.torture import full_disk
from tests.torture.full_disk import Life, Record, Upsert


class Roomy(Disk):
    """A directory that is never full: what is refused is planted."""

    def __init__(self, directory: Path) -> None:
        super().__init__("self", directory)

    def leave(self, blocks: int) -> None:
        pass


def faults(directory: Path) -> list[str]:
    life = Life(Roomy(directory), 1, 1)
    life.run()
    return life.faults


def refusing(monkeypatch: pytest.MonkeyPatch, told: str, *, first: bool) -> None:
    """Let each micro-batch be refused once, before it is applied or right after."""
    take, refused = Upsert.take_records, set[int]()

    def refuse(self: Upsert, number: int, records: Sequence[Record]) -> bool:
        if number in refused:
            return take(self, number, records)
        refused.add(number)
        if not first:
            take(self, number, records)
        raise StorageError(told)

    monkeypatch.setattr(Upsert, "take_records", refuse)


def test_upserts_that_are_refused_as_a_whole_and_land_later_pass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refusing(monkeypatch, f"{tmp_path}: full", first=True)
    assert faults(tmp_path) == []


def test_a_table_that_has_changed_although_it_refused_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refusing(monkeypatch, f"{tmp_path}: full", first=False)
    assert any("the table or its position has changed" in fault for fault in faults(tmp_path))


def test_an_error_that_names_no_file_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refusing(monkeypatch, "full", first=True)
    assert faults(tmp_path) == ["the error is not one line that names a file: 'full'"]


@pytest.mark.parametrize("times", [0, 2])
def test_dead_letters_that_are_lost_or_come_twice_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, times: int
) -> None:
    write, numbers = Upsert.leave_out_refused, itertools.count()
    monkeypatch.setattr(full_disk, "plan_number", lambda *_: next(numbers))

    def written(self: Upsert, *given: Any) -> None:
        for _ in range(times):
            write(self, *given)

    monkeypatch.setattr(Upsert, "leave_out_refused", written)
    assert any(fault.startswith("it landed: dead letters: ") for fault in faults(tmp_path))


def test_a_disk_that_cannot_be_mounted_is_said_and_no_violation(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "platform", "none")
    full_disk.main(["--json"])
    told = json.loads(capsys.readouterr().out)
    assert told["count"] == 0 and told["skipped"].startswith("needs root")


@pytest.mark.slow
def test_an_upsert_lands_after_a_full_disk_has_refused_each_of_its_writes(tmp_path: Path) -> None:
    found = full_disk.refused_upserts(tmp_path, 1, 1)
    assert found["faults"] == [] and found["refused"] >= 30 and found["letters"] >= 1
