"""The plan of a micro-batch, which Spark writes into the checkpoint and does not sync.

A power cut that took the plan of a micro-batch, but not what the log has of it, would let Spark
plan it anew, with what has come since; and the sink would take that for a repetition. So the commit
makes the plan durable before its own rows are. Only in a checkpoint on a local file system.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from kafkalog.errors import StorageError
from kafkalog.sink.query import checkpoint_directory
from kafkalog.storage_engine.fs import files

__all__ = ["sync_plan", "syncing_plan"]

_SYNCED_MAX = 64
_synced: dict[Path, tuple[int, ...]] = {}
"""What this process has synced of the part that is written once per query, as it was then.

Whatever it stood for, a process outlives no power cut.
"""
_SETTLED_NS = 2_000_000_000
"""What changed later than so long ago may change once more without another time to show for it."""


def sync_plan(location: str | None, batch_id: int) -> None:
    """Make durable what the checkpoint says of a micro-batch: its offsets, its input files.

    What is not there is left out. What a query writes once, its id and the directories, is synced
    once per process. Raises StorageError where the disk refuses a sync, and OSError where a file
    cannot be opened.
    """
    directory = checkpoint_directory(location)
    if directory is None:
        return
    sources = directory / "sources"
    inputs: list[Path] = []
    with suppress(FileNotFoundError):
        inputs = [sources / name for name in files.list_names(sources)]
    plans = [directory / "offsets", *inputs]
    names = (str(batch_id), f".{batch_id}.crc", f"{batch_id}.compact", f".{batch_id}.compact.crc")
    for plan in plans:
        for name in names:
            _sync_file(plan / name)
    for plan in plans:
        _sync_directory(plan)
    for name in ("metadata", ".metadata.crc"):
        _sync_once(directory / name, _sync_file)
    for parent in (sources, directory):
        _sync_once(parent, _sync_directory)


def _sync_once(path: Path, sync: Callable[[Path], None]) -> None:
    """Sync a file or a directory, unless this process has since it was changed last."""
    try:
        found = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return
    # Numbers of files are used again, so its times have to be the same too.
    times = found.st_mtime_ns, found.st_ctime_ns
    identity = (found.st_dev, found.st_ino, found.st_size, *times)
    if _synced.get(path) == identity:
        return
    sync(path)
    if time.time_ns() - max(times) > _SETTLED_NS:
        if len(_synced) >= _SYNCED_MAX:
            _synced.clear()
        _synced[path] = identity


def _sync_file(path: Path) -> None:
    """Sync a file, if it is there.

    The pages of one whose sync failed may only pretend to be clean, and the next sync would write
    nothing and succeed: so its bytes are written once more, the same in place.
    """
    try:
        fd = files.open_to_read(path)
    except (FileNotFoundError, NotADirectoryError):
        return
    try:
        files.sync_file(fd)
    except OSError as fault:
        with suppress(OSError):
            _write_again(path)
        raise _refused(path, fault) from fault
    finally:
        os.close(fd)


def _write_again(path: Path) -> None:
    fd = files.open_to_write(path)
    try:
        files.write_at(fd, files.read_at(fd, os.fstat(fd).st_size, 0), 0)
    finally:
        os.close(fd)


def _sync_directory(path: Path) -> None:
    try:
        files.sync_directory(path)
    except (FileNotFoundError, NotADirectoryError):
        return
    except PermissionError:
        raise
    except OSError as fault:
        raise _refused(path, fault) from fault


def _refused(path: Path, fault: OSError) -> StorageError:
    return StorageError(
        f"{path}: the disk refused to make the plan of the micro-batch durable ({fault.strerror}); "
        "nothing is committed, run the batch again"
    )


@contextmanager
def syncing_plan(location: str | None, batch_id: int) -> Iterator[None]:
    """Sync the plan meanwhile, so that it is written when the commit syncs it, which it does too.

    For a task: nothing is promised. But a sync that the disk refuses, which may refuse it once
    only, fails the task; what cannot be opened is left to the commit.
    """
    faults: list[StorageError] = []

    def sync() -> None:
        try:
            sync_plan(location, batch_id)
        except StorageError as fault:
            faults.append(fault)
        except OSError:
            pass

    if checkpoint_directory(location) is None:
        yield
        return
    meanwhile = threading.Thread(target=sync, name="kafkalog-plan", daemon=True)
    try:
        meanwhile.start()
    except RuntimeError:  # no more threads, as the interpreter is about to end
        yield
        return
    try:
        yield
    finally:
        meanwhile.join()
    if faults:
        raise faults[0]
