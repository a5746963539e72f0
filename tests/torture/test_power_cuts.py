"""Power cuts see a sync that is left out; and what a disk holds after a cut."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import random
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kafkalog.storage_engine.directory import staged_directory
from kafkalog.storage_engine.fs import files
from tests.torture import block_device, kills, power_cuts, roles
from tests.torture.block_device import SECTOR, SIZE, CutDisk
from tests.torture.oracle import FLUSHED, WRITTEN, Note
from tests.torture.power_cuts import Outcome

REFUSAL = block_device.refusal()
needs_disks = pytest.mark.skipif(REFUSAL is not None, reason=f"power cuts: {REFUSAL}")
pytestmark = pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")  # it forks


@pytest.fixture
def kept() -> Iterator[list[Outcome]]:
    """What has come of disks; those that were kept are removed."""
    found: list[Outcome] = []
    yield found
    for outcome in found:
        if outcome.kept:
            shutil.rmtree(outcome.kept)


@pytest.fixture
def _warmed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compile before a fault is planted, which would be one there too."""
    size = staged_directory.SEGMENT_RUN_SIZE
    monkeypatch.setattr(staged_directory, "SEGMENT_RUN_SIZE", size)  # it is set there
    kills.warm()

    monkeypatch.setattr(power_cuts, "WORK_S", 60.0)  # so many steps, however long they take


def cut_until(is_enough: Callable[[], object], kept: list[Outcome]) -> None:
    """Cut one disk after the other, until it is enough or has been tried often enough."""
    with contextlib.closing(power_cuts.outcomes(1, range(10), rounds=1, cuts=20, jobs=1)) as found:
        for outcome in found:
            kept.append(outcome)
            if is_enough():
                return


@needs_disks
@pytest.mark.usefixtures("_warmed")
def test_a_log_outlives_power_cuts(kept: list[Outcome]) -> None:
    def met(name: str) -> bool:
        return any(getattr(outcome, name) for outcome in kept)

    cut_until(lambda: met("mid_step") and met("cached"), kept)
    assert not met("violations")
    assert met("mid_step") and met("cached")
    assert all(outcome.cuts + outcome.repeated == 20 for outcome in kept)


@needs_disks
@pytest.mark.usefixtures("_warmed")
@pytest.mark.parametrize("role", ["write", "clean"])
def test_a_process_that_dies_by_itself_is_found_out(
    monkeypatch: pytest.MonkeyPatch, kept: list[Outcome], role: str
) -> None:
    def die(*_: Any, **__: Any) -> None:
        faulthandler.disable()
        os.kill(os.getpid(), signal.SIGSEGV)

    owner, name = (roles.Writer, "run") if role == "write" else (roles, role)
    monkeypatch.setattr(owner, name, die)
    monkeypatch.setattr(power_cuts, "WORK_S", 1.0)
    cut_until(lambda: True, kept)
    ((told,),) = [outcome.violations for outcome in kept]
    assert f"{role}: a process ended by SIGSEGV" in told


@needs_disks
@pytest.mark.usefixtures("_warmed")
@pytest.mark.parametrize(
    "left_out",
    [
        ("sync_file", "sync_data", "sync_path", "sync_directory"),
        ("sync_data",),
        ("sync_file",),
    ],
    ids=["every", "journal", "content"],
)
def test_a_sync_that_is_left_out_is_found_out(
    monkeypatch: pytest.MonkeyPatch, kept: list[Outcome], left_out: tuple[str, ...]
) -> None:
    def nothing(*_: Any) -> None:
        pass

    for name in left_out:
        monkeypatch.setattr(files, name, nothing)
    # Not where ext4 writes all data into its own journal, and so syncs it with any other file.
    monkeypatch.setattr(power_cuts, "MOUNTS", ("data=ordered",))
    cut_until(lambda: kept[-1].violations, kept)
    found = [outcome for outcome in kept if outcome.violations]
    assert found
    monkeypatch.undo()
    again = list(power_cuts.checked_again([Path(outcome.kept) for outcome in found]))
    assert all(again), "the disk that was kept shows the same"


# --- what a cut leaves ---------------------------------------------------------------------------

WRITES = [Note(WRITTEN, 8192, b"1" * 1024), Note(WRITTEN, 9216, b"2" * 512)]
FIRST, SECOND = (8192, b"1" * 1024), (9216, b"2" * 512)


def survivors(fate: str, *notes: Note) -> set[tuple[tuple[int, bytes], ...]]:
    """Return all that can be left of writes that were not flushed."""
    disk = CutDisk(bytes(SIZE))
    disk.take(notes)
    return {tuple(disk.survivors(fate, random.Random(seed))) for seed in range(100)}


def test_what_was_flushed_stays(tmp_path: Path) -> None:
    disk = CutDisk(bytes(SIZE))
    disk.take([*WRITES, Note(FLUSHED, 0, b"")])
    assert not disk.is_cached
    disk.write_image(tmp_path / "image", disk.survivors("none", random.Random(1)))
    image = (tmp_path / "image").read_bytes()
    assert image[8192:9728] == b"1" * 1024 + b"2" * 512
    assert len(image) == SIZE and image.strip(b"\0") == image[8192:9728]


def test_what_was_not_flushed_goes_in_any_part() -> None:
    assert survivors("none", *WRITES) == {()}
    assert survivors("all", *WRITES) == {(FIRST, SECOND)}
    assert survivors("prefix", *WRITES) == {(), (FIRST,), (FIRST, SECOND)}
    assert survivors("some", *WRITES) == {(), (FIRST,), (SECOND,), (FIRST, SECOND)}


def test_writes_are_torn_at_sectors() -> None:
    found = survivors("torn", *WRITES)
    assert len(found) == 8
    assert {len(data) for parts in found for _, data in parts} == {SECTOR}


def test_equal_disks_have_the_same_digest_and_others_another(tmp_path: Path) -> None:
    def left(*survivors: tuple[int, bytes], flushed: tuple[Note, ...] = ()) -> bytes:
        disk = CutDisk(bytes(SIZE))
        disk.take([*flushed, Note(FLUSHED, 0, b"")])
        return disk.write_image(tmp_path / "image", survivors)

    assert left(FIRST, SECOND) == left(SECOND, FIRST) == left(flushed=(*WRITES,))
    assert left() == left((8192, bytes(512))) == left(flushed=(Note(WRITTEN, 1 << 20, b"\0"),))
    moved = (FIRST[0] + (1 << 20), FIRST[1])
    assert len({left(), left(FIRST), left(SECOND), left(FIRST, SECOND), left(moved)}) == 5


def test_what_was_lost_does_not_come_with_a_later_flush(tmp_path: Path) -> None:
    disk = CutDisk(bytes(SIZE))
    disk.take([Note(FLUSHED, 0, b""), WRITES[0]])
    disk.write_image(tmp_path / "image", [])
    assert (tmp_path / "image").read_bytes() == bytes(SIZE)
    disk.take([WRITES[1], Note(FLUSHED, 0, b"")])
    disk.write_image(tmp_path / "image", [])
    assert (tmp_path / "image").read_bytes()[8192:9728] == b"1" * 1024 + b"2" * 512
