"""Find out from the names in a directory who owns it; no file is opened or written.

`meta.properties` is a broker's, `commit` is ours. Without either, other names show its history. It
is a released log, a log that lost its journal, a copy of a broker's partitions (only read), or a
foreign directory, which kafkalog must not touch. To find the log that was meant by a path one level
off, call `nearby`.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Final

from kafkalog.errors import InvalidInputError, StorageError
from kafkalog.storage_engine.format import layout
from kafkalog.storage_engine.fs import files
from kafkalog.storage_engine.metadata.other_systems import other_system

_LOST_AND_FOUND = "lost+found"
_LOOKED_AT: Final = 1000
_SHOWN: Final = 5
_OWNED = (layout.META_PROPERTIES, layout.META_ASIDE, layout.COMMIT, layout.COMMIT_RELEASED)
"""Files that occur only in a broker's directory or in one of ours."""
TO_CREATE = "kafkalog.open(path), or by writing to it"
_BEGUN = (layout.META_ASIDE, layout.GUARD, layout.COMMIT, layout.COMMIT_RELEASED)
"""Files which show that the directory was ours, or that an adoption is under way."""


def partitions_to_adopt(root: Path) -> list[tuple[str, int]]:
    """Return (topic, partition) of every directory that an adoption takes, sorted.

    In a directory without another sign of a broker or of us, a directory with a partition's name
    counts only if it has a segment or our canary. Raises InvalidInputError if there is nothing to
    adopt, StorageError for a link or a number that no partition or segment can have.
    """
    names = set(files.list_names(root))
    is_owned = not names.isdisjoint(_OWNED)
    found = []
    for name in names:
        key = layout.parse_partition_directory(name)
        directory = root / name
        if key is None or key[0] in layout.INTERNAL_TOPICS or not directory.is_dir():
            continue
        has_segment = layout.base_offsets(files.list_names(directory), layout.LOG)
        if is_owned or has_segment or (directory / layout.CANARY).exists():
            _check_can_be_taken(directory, key[1])
            found.append(key)
    if found or not names.isdisjoint(_BEGUN):
        return sorted(found)
    if layout.META_PROPERTIES in names:
        raise InvalidInputError(
            f"{root}: there is nothing to adopt: it has {layout.META_PROPERTIES}, but no partition "
            "of an ordinary topic (a controller's metadata and internal topics stay with Kafka)"
        )
    raise InvalidInputError(
        f"{root}: this is not a broker's log directory: it has no {layout.META_PROPERTIES}, and no "
        f"directory of a partition (topic-0) with a segment (such as "
        f"{layout.segment_file(0, layout.LOG)}){nearby(root)}"
    )


def _check_can_be_taken(directory: Path, partition: int) -> None:
    if directory.is_symlink():
        raise StorageError(
            f"{directory}: the partition is a link to another place, and a log of ours lies in one "
            "directory: move the files here"
        )
    if partition >= layout.PARTITIONS_MAX:
        raise StorageError(
            f"{directory}: the name is that of a partition above {layout.PARTITIONS_MAX}: if it is "
            "none, move the directory away"
        )
    for name in files.list_names(directory):
        parsed = layout.parse_segment_file(name)
        if parsed is not None and parsed[0] > layout.LOG_START_MAX:
            raise StorageError(
                f"{directory / name}: the name is that of a segment above all offsets: move the "
                "file away"
            )


def is_copy(root: Path) -> bool:
    """Return whether a directory has partitions with segments, and no file of any owner.

    It was rescued from a broker's disk, or copied: only `partition-0/*.log` may be there.
    """
    if not root.is_dir() or any((root / name).exists() for name in _OWNED):
        return False
    found = [
        files.list_names(root / name)
        for name in files.list_names(root)
        if layout.parse_partition_directory(name) and (root / name).is_dir()
    ]
    if any(layout.CANARY in below for below in found):
        return False  # a log of ours that has lost its journal
    return any(layout.base_offsets(below, layout.LOG) for below in found)


def nearby(path: Path) -> str:
    """Return which log was meant by a path without one, as the end of a message; or ''.

    It is the log that the path lies in, as a partition, a file or below those, or the logs one
    level below. Only names are read, of the first 1000 directories below. For a directory of
    another system with Kafka's protocol, the message says whose it is.
    """
    above = log_above(path)
    if above is not None:
        log, inner = above
        return meant(inner, str(log), is_at=path.name == inner)
    if below := _logs_below(path):
        together = " (those of a cluster are given together, with commas between)"
        return meant("", None, [*map(str, below)]) + (together if len(below) > 1 else "")
    with files.ignoring():
        if path.is_dir() and layout.base_offsets(files.list_names(path), layout.LOG):
            return (
                "; it has the segments of a partition, and a log has directories of partitions: "
                "copy it to a directory named as one, such as rescued/topic-0, and give `rescued`"
            )
    return other_system(path)


def meant(inner: str, above: str | None, below: Sequence[str] = (), *, is_at: bool = False) -> str:
    """Return which log was meant by an address without one, as the end of a message; or ''.

    `above` is the log that the address lies in, below the name `inner`; `is_at`: it is that name.
    `below` are the logs one level below.
    """
    if above is not None:
        what = "this lies in"
        if layout.parse_partition_directory(inner) is not None:
            what = f"this {'is' if is_at else 'lies in'} the partition {inner} of"
        return f"; {what} the log in {above}: give {above}"
    if len(below) == 1:
        return f"; the log is one level below: give {below[0]}"
    if not below:
        return ""
    shown = ", ".join(below[:_SHOWN])
    more = f" and {len(below) - _SHOWN} more" if len(below) > _SHOWN else ""
    return f"; logs are one level below: give one of {shown}{more}"


def check_is_no_file(root: Path) -> None:
    """Raise InvalidInputError for a file; it names the log that was meant. None need be there."""
    if root.exists() and not root.is_dir():
        raise InvalidInputError(f"{root}: a log is a directory, this is a file{nearby(root)}")


def check_is_directory(root: Path) -> None:
    """Raise InvalidInputError for what isn't a directory; it names the log that was meant."""
    check_is_no_file(root)
    if not root.is_dir():
        raise InvalidInputError(f"{root}: there is no such directory{nearby(root)}")


def log_above(path: Path) -> tuple[Path, str] | None:
    """Return the log that a path lies in, up to two levels above, and its name there."""
    for place in (path, Path(os.path.realpath(path))):
        for inner in (place, place.parent):
            is_partition = layout.parse_partition_directory(inner.name) is not None
            with files.ignoring():
                if (inner == place or is_partition) and _has_log(inner.parent):
                    return inner.parent, inner.name
    return None


def _logs_below(path: Path) -> list[Path]:
    found = []
    with files.ignoring():
        with files.scan(path) as entries:
            names = [
                entry.name for entry in islice(entries, _LOOKED_AT) if files.is_directory(entry)
            ]
        for name in sorted(names):
            with files.ignoring():
                if _has_log(path / name):
                    found.append(path / name)
    return found


def _has_log(root: Path) -> bool:
    return any((root / name).is_file() for name in _OWNED) or is_copy(root)


def check_journal_is_not_lost(root: Path) -> None:
    """Raise InvalidInputError for a directory without `commit` that is or was a log of ours."""
    if not root.is_dir() or (root / layout.COMMIT).exists():
        return
    where = shlex.quote(str(root))
    was_released = (root / layout.COMMIT_RELEASED).exists()
    for name in sorted(files.list_names(root)):
        if layout.parse_partition_directory(name) and (root / name / layout.CANARY).exists():
            if (root / layout.COMMIT).exists():
                return  # another process has just created the log
            unless = (
                f" (or finish a release with: kafkalog release {where})" if was_released else ""
            )
            raise InvalidInputError(
                f"{root}: the journal `{layout.COMMIT}` is missing, although partitions of "
                f"kafkalog are here ({name}): restore it from a copy, or take the files as a "
                f"broker would, with: kafkalog adopt {where}{unless}"
            )
    if was_released:
        raise InvalidInputError(
            f"{root}: the log was released, for a broker to have it (it has "
            f"{layout.COMMIT_RELEASED}); to take it back run: kafkalog adopt {where}"
        )


def check_is_log(root: Path, creating: str = TO_CREATE) -> None:
    """Raise InvalidInputError if the path has no log of ours; `creating` says how to create one.

    For a path inside a log, or one level above, the error names the log instead.
    """
    if (root / layout.COMMIT).exists():
        return
    check_journal_is_not_lost(root)
    advice = nearby(root) or f"; create one with {creating}"
    raise InvalidInputError(f"{root}: no log here (it has no `{layout.COMMIT}` file){advice}")


def check_is_free(root: Path) -> None:
    """Raise InvalidInputError if no log may be created at `root`, which need not exist.

    A log must not lie inside another log directory. Its directory may contain only our own files,
    hidden files and `lost+found`.
    """
    if log_above(root) is not None:
        raise InvalidInputError(
            f"{root}: no log is created inside of a log directory{nearby(root)}"
        )
    if not root.is_dir():
        return
    foreign = sorted(
        name
        for name in files.list_names(root)
        if not name.startswith((".", layout.OURS)) and name != _LOST_AND_FOUND
    )
    if foreign and not (root / layout.COMMIT).exists():
        raise InvalidInputError(
            f"{root}: the directory is not empty (it has {foreign[0]!r}) and is not a log"
            f"{nearby(root) or '; choose an empty or a new directory'}"
        )
