"""What an attempt that died has left is cut off for good: no power cut brings any of it back."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

import pytest

from kafkalog.errors import StorageError
from kafkalog.storage_engine.directory.directory_log import DirectoryLog
from kafkalog.storage_engine.format import layout
from kafkalog.storage_engine.format.batch import iterate_headers
from kafkalog.storage_engine.fs import files
from kafkalog.storage_engine.metadata.journal import Journal
from tests.builders.batch_builder import ABORT, COMMIT, at_times, marker
from tests.builders.log_builder import LogBuilder
from tests.builders.log_contents import damage, offsets
from tests.torture.acts import Write
from tests.torture.disk import Disk
from tests.torture.recorder import Recorder
from tests.torture.repeatable import booted
from tests.unit.storage_engine.faults import Died

NOW_MS = 1_700_000_000_000
PRODUCER = 5
Work: TypeAlias = Callable[[DirectoryLog], None]


def one(ms: int, size: int = 20, count: int = 1) -> Work:
    """Append so many batches of one record each in one commit, at a time."""
    batches = [at_times(3 + n, (NOW_MS + ms,), value_size=size) for n in range(count)]
    return lambda engine: LogBuilder(engine).append_raw(*batches)


def transaction(kind: int) -> Work:
    """Append a transaction that ends so."""
    data = at_times(3, (NOW_MS,), producer_id=PRODUCER, transactional=True)
    return lambda engine: LogBuilder(engine).append_raw(
        data, marker(4, kind, PRODUCER, timestamp=NOW_MS)
    )


def own(engine: DirectoryLog) -> None:
    engine.append("t", [("k", "v")] * 2, now_ms=NOW_MS)


def begun(root: Path) -> None:
    batches = (at_times(n, (NOW_MS + n,), value_size=20) for n in range(3))
    log = LogBuilder(root).topic(index_interval_bytes=0, segment_bytes=1000)
    log.append_raw(*batches).close()


def aborted_before(root: Path) -> None:
    data = at_times(0, (NOW_MS, NOW_MS), producer_id=PRODUCER, transactional=True)
    end = marker(2, ABORT, PRODUCER, timestamp=NOW_MS)
    LogBuilder(root).topic().append_raw(data, end).close()


def dies(engine: DirectoryLog, work: Work) -> None:
    """Do all of a commit but the record."""

    def die(*args: object, **kwargs: object) -> None:
        raise Died

    with pytest.MonkeyPatch.context() as patch, pytest.raises(Died):
        patch.setattr(Journal, "append", die)
        work(engine)


@pytest.mark.parametrize(
    ("before", "attempt", "retry"),
    [
        pytest.param(begun, one(5_000), one(1_000), id="another clock"),
        pytest.param(begun, one(5_000, 90, 2), one(1_000, count=5), id="other sizes"),
        pytest.param(begun, one(5_000, 90, 12), one(1_000, count=5), id="after a roll"),
        pytest.param(begun, transaction(ABORT), own, id="the only abort"),
        pytest.param(
            aborted_before, transaction(ABORT), transaction(COMMIT), id="the second abort"
        ),
    ],
)
def test_no_power_cut_brings_back_what_an_attempt_that_died_has_left(
    tmp_path: Path, before: Callable[[Path], None], attempt: Work, retry: Work
) -> None:
    root, cut = tmp_path / "log", tmp_path / "cut"
    before(root)
    with Recorder(root) as recorder:
        dies(DirectoryLog(root), attempt)
        tried = len(recorder.acts)
        retry(DirectoryLog(root))
    disk = Disk(recorder.begin)
    for act in recorder.acts:
        disk.apply(act)
    # All that the attempt did had reached the disk by itself; of the retry what was synced.
    left = {number: None for number, _ in disk.unsynced() if number < tried}
    disk.state("the attempt's", left).write(cut)
    check(cut, offsets(root))


def check(cut: Path, expected: list[int]) -> None:
    with booted("after the cut"):
        assert offsets(cut) == expected
        assert damage(cut) == []
        DirectoryLog(cut).append("t", [("k", "v")], now_ms=NOW_MS + 2_000)
        assert damage(cut) == []


def begun_far(root: Path) -> None:
    """Leave a transaction open whose marker comes at offset 260, an entry of other halves."""
    data = at_times(250, (NOW_MS,), producer_id=PRODUCER, transactional=True)
    before, after = at_times(0, (NOW_MS,) * 250), at_times(251, (NOW_MS,) * 9)
    LogBuilder(root).topic().append_raw(before, data, after).close()


def ends(kind: int) -> Work:
    """End the transaction that `begun_far` has left open."""
    return lambda engine: LogBuilder(engine).append_raw(
        marker(260, kind, PRODUCER, timestamp=NOW_MS)
    )


@pytest.mark.slow
@pytest.mark.parametrize("before", [begun_far, aborted_before])
def test_half_an_entry_of_an_abort_that_died_does_not_count(
    tmp_path: Path, before: Callable[[Path], None]
) -> None:
    root, cut = tmp_path / "log", tmp_path / "cut"
    before(root)
    (path,) = list(root.glob("t-0/*.txnindex")) or [root / "t-0" / f"{0:020}.txnindex"]
    earlier = path.read_bytes() if path.exists() else b""
    is_far = before is begun_far
    dies(DirectoryLog(root), ends(ABORT) if is_far else transaction(ABORT))
    entry = path.read_bytes().removeprefix(earlier)
    assert len(entry) == 34
    for size in range(len(entry) + 1):
        lost = bytes(len(entry) - size)
        for torn in (entry[:size], entry[:size] + lost, lost + entry[len(lost) :]):
            shutil.rmtree(cut, ignore_errors=True)
            shutil.copytree(root, cut)
            (cut / "t-0" / path.name).write_bytes(earlier + torn)
            assert damage(cut) == []
            expected = offsets(root)
            assert offsets(cut) == expected
            (ends(COMMIT) if is_far else transaction(COMMIT))(DirectoryLog(cut))
            check(cut, [*expected, *([*range(250, 260)] if is_far else [3])])
            left = cut / "t-0" / path.name
            assert (left.read_bytes() if left.exists() else b"") == earlier


@pytest.mark.parametrize("byte", [0, 7, 8, 11, 16, 22, 23, 26, 43, 50])
@pytest.mark.parametrize("follows", [True, False])
@pytest.mark.parametrize("batch", [0, 1], ids=["aborted", "marker"])
def test_an_entry_stays_whose_marker_damage_hides(
    tmp_path: Path, batch: int, byte: int, *, follows: bool
) -> None:
    aborted_before(tmp_path)
    if follows:
        own(DirectoryLog(tmp_path))
    (path,) = tmp_path.glob("t-0/*.txnindex")
    entries, log = path.read_bytes(), path.with_suffix(layout.LOG)
    data = bytearray(log.read_bytes())
    data[[position for position, _ in iterate_headers(data)][batch] + byte] ^= 0xFF
    log.write_bytes(data)
    own(DirectoryLog(tmp_path))
    assert path.read_bytes() == entries


class Refused:
    """The disk, which does not sync files with this ending, so many times."""

    def __init__(self, ending: str, times: int) -> None:
        self.ending, self.times = ending, times
        self._sync = files.sync_file

    def __call__(self, fd: int) -> None:
        if self.times and os.readlink(f"/proc/self/fd/{fd}").endswith(self.ending):
            self.times -= 1
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        self._sync(fd)


@pytest.mark.parametrize(
    ("before", "attempt", "retry", "ending"),
    [
        pytest.param(begun, one(5_000), one(1_000), ".timeindex", id="times"),
        pytest.param(begun, one(5_000, 90, 2), one(1_000, count=5), ".index", id="positions"),
        pytest.param(
            aborted_before, transaction(ABORT), transaction(COMMIT), ".txnindex", id="aborts"
        ),
    ],
)
def test_a_cut_whose_sync_failed_is_made_again(
    tmp_path: Path, before: Callable[[Path], None], attempt: Work, retry: Work, ending: str
) -> None:
    root, cut = tmp_path / "log", tmp_path / "cut"
    before(root)
    with Recorder(root) as recorder, pytest.MonkeyPatch.context() as patch:
        dies(DirectoryLog(root), attempt)
        tried = len(recorder.acts)
        patch.setattr(files, "sync_file", Refused(ending, 1))
        with pytest.raises(StorageError, match="the disk refused"):
            retry(DirectoryLog(root))
        retry(DirectoryLog(root))
    disk = Disk(recorder.begin)
    for act in recorder.acts:
        disk.apply(act)
    left = {number: None for number, _ in disk.unsynced() if number < tried}
    disk.state("the attempt's", left).write(cut)
    check(cut, offsets(root))


def test_a_log_that_a_failed_sync_left_is_cut_until_a_sync_succeeds(tmp_path: Path) -> None:
    root, cut = tmp_path / "log", tmp_path / "cut"
    with DirectoryLog(root) as engine:
        engine.create_topic("t", 1, now_ms=NOW_MS)
        own(engine)
    refused = Refused(".log", 2)
    with Recorder(root) as recorder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "sync_file", refused)
        engine = DirectoryLog(root)
        opened = len(os.listdir("/proc/self/fd"))
        for _ in range(2):  # the commit's own sync, and that of its cut
            with pytest.raises(StorageError, match="the disk refused"):
                own(engine)
        assert len(os.listdir("/proc/self/fd")) <= opened
        own(engine)
    disk = Disk(recorder.begin)
    for act in recorder.acts:
        disk.apply(act)
    # What failed syncs have left in doubt: the dead bytes are there, their cut is not.
    left = {number: None for number, act in disk.unsynced() if isinstance(act, Write)}
    disk.state("the dead bytes", left).write(cut)
    check(cut, offsets(root))
