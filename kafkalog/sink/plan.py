"""The plan of a micro-batch, which Spark writes into the checkpoint and does not sync.

A power cut may take the plan of a micro-batch whose rows the log keeps. Spark would then plan it
again with newer records, and the sink would skip those as a repetition. The commit therefore syncs
the plan before it publishes the rows. The checkpoint must be on a local file system.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from kafkalog.errors import StorageError
from kafkalog.sink.query import checkpoint_directory, end_offsets
from kafkalog.spark_offset_log import NO_OFFSET, OffsetLogEntry, listed_files
from kafkalog.storage_engine.fs import files
from kafkalog.storage_engine.metadata.writer import MicroBatchPlan

_SYNCED_MAX = 64
_synced: dict[Path, tuple[int, ...]] = {}
"""The files that Spark writes once per query, and their identity when this process synced them."""
_SETTLED_NS = 2_000_000_000
"""A file that changed less than this long ago may change again within the same timestamp."""


def read_plan(
    location: str | None, batch_id: int, *, is_every_one_written: bool
) -> MicroBatchPlan | None:
    """Return what a checkpoint says of a micro-batch; None if it cannot be read here.

    `is_every_one_written`: the sink gets all micro-batches of the query.
    """
    directory = checkpoint_directory(location)
    entry = None if directory is None else _entry(directory, batch_id)
    ends = None if directory is None else _ends(directory, entry)
    if directory is None or ends is None:
        return None
    before = _entry(directory, batch_id - 1)
    return MicroBatchPlan(
        ends=ends,
        ends_before=_ends(directory, before),
        before_ms=None if before is None else before.planned_ms,
        is_every_one_written=is_every_one_written,
    )


def other_ends(location: str | None, batch_id: int) -> str | None:
    """Return a digest of where those sources of a micro-batch end that aren't Kafka logs.

    None without such sources, or if the checkpoint cannot be read here.
    """
    directory = checkpoint_directory(location)
    entry = None if directory is None else _entry(directory, batch_id)
    if directory is None or entry is None:
        return None
    others = {
        name: end
        for name, end in entry.sources.items()
        if end != NO_OFFSET and not end_offsets([end])
    }
    return _ends(directory, entry._replace(sources=others)) if others else None


def _entry(directory: Path, batch_id: int) -> OffsetLogEntry | None:
    try:
        return OffsetLogEntry.parse(files.read_file(directory / "offsets" / str(batch_id)).decode())
    except (OSError, ValueError) as raised:
        files.pass_on(raised)
        return None


def _ends(directory: Path, entry: OffsetLogEntry | None) -> str | None:
    """Return the ends of a micro-batch; None if a part of them is gone or unknown."""
    if entry is None:
        return None
    lists: dict[str, str] = {}
    for name, number in entry.file_sources.items():
        if number < 0:
            continue
        listed = _list(directory / "sources" / name, number)
        if listed is None:  # Spark removes old lists that it has compacted
            return None
        lists[name] = listed
    return entry.ends(lists)


def _list(log: Path, number: int) -> str | None:
    for name in (str(number), f"{number}.compact"):
        with files.ignoring(ValueError):
            return listed_files(files.read_file(log / name).decode(), number)
    return None


def sync_plan(location: str | None, batch_id: int) -> None:
    """Sync what the checkpoint says of a micro-batch: its offsets and input files.

    Missing files are skipped. The query's id and the directories are synced once per process.
    Raises StorageError if the disk refuses a sync, and OSError if a file cannot be opened.
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
    """Sync a file or directory, unless this process has done so since its last change."""
    try:
        found = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return
    # Inode numbers are used again, so the times must be equal too.
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
    """Sync a file, if it exists.

    After a failed sync the kernel may count unwritten pages as clean, and the next sync would write
    nothing. Writing the same bytes again makes them dirty.
    """
    try:
        fd = files.open_to_read(path)
    except (FileNotFoundError, NotADirectoryError):
        return
    try:
        files.sync_file(fd)
    except OSError as fault:
        files.pass_on(fault)
        with files.ignoring():
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
        files.pass_on(fault)
        raise _refused(path, fault) from fault


def _refused(path: Path, fault: OSError) -> StorageError:
    return StorageError(
        f"{path}: the disk refused to make the plan of the micro-batch durable ({fault.strerror}); "
        "nothing is committed, run the batch again"
    )


@contextmanager
def syncing_plan(location: str | None, batch_id: int) -> Iterator[None]:
    """Sync the plan in a thread while a task works, so that the commit's sync finds it written.

    The commit still syncs the plan itself. If the disk refuses a sync, the task fails, since the
    disk may report that fault only once. A file that cannot be opened is left to the commit.
    """
    faults: list[StorageError] = []

    def sync() -> None:
        try:
            sync_plan(location, batch_id)
        except StorageError as fault:
            faults.append(fault)
        except OSError as raised:
            files.pass_on(raised)

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
