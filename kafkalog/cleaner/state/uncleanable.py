"""The mark of a partition that could not be cleaned: why, since when, and when to try again.

The note `kl-uncleanable` survives a restart, so that a broken disk is not tried again and again. A
change of the topic's configs, or a forced cleaning, tries at once. Success removes the mark. If the
disk refuses the mark, this process remembers it until another one cleans or marks the partition.
Kafka keeps its marks in memory only (C131, C132).
"""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

from kafkalog.cleaner.plan import Uncleanable
from kafkalog.cleaner.state.notes import VERSION, packed, unpacked
from kafkalog.storage_engine.format import layout
from kafkalog.storage_engine.fs import files

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kafkalog.cleaner.shelf import PartitionNotes


def read_uncleanable(notes: PartitionNotes) -> Uncleanable | None:
    """Return a partition's mark, or None. An unreadable mark is a mark too."""
    path = f"{notes.place}/{layout.UNCLEANABLE}"
    try:
        text = notes.read(layout.UNCLEANABLE)
    except OSError as fault:
        files.pass_on(fault)
        return Uncleanable(f"{path}: {fault.strerror}")
    if text is None:
        return None
    unsound = Uncleanable(
        f"{path}: expected a mark of the cleaner, found another text; a cleaning with --force "
        "replaces it"
    )
    try:
        content = unpacked(text)
        if content.pop("version") != VERSION:
            return Uncleanable(f"{path}: written by a newer release; use that one")
        mark = Uncleanable(**content)
    except (TypeError, KeyError):
        return unsound
    numbers = (mark.failures, mark.since_ms, mark.retry_at_ms)
    is_sound = isinstance(mark.reason, str) and all(isinstance(n, int) for n in numbers)
    return mark if is_sound and isinstance(mark.config, dict | None) else unsound


def mark_uncleanable(
    notes: PartitionNotes,
    fault: Exception,
    config: Mapping[str, str],
    *,
    now_ms: int,
    reason: str | None = None,
) -> Uncleanable:
    """Mark a partition, or count another failure; `config` is that of its topic.

    `reason` says more than the fault does.
    """
    mark = Uncleanable.after(
        read_uncleanable(notes),
        fault_reason(fault) if reason is None else reason,
        config,
        now_ms=now_ms,
        is_disk_fault=isinstance(fault, OSError) or isinstance(fault.__cause__, OSError),
    )
    notes.write(layout.UNCLEANABLE, packed(asdict(mark)), or_remember=True)
    return mark


def fault_reason(fault: Exception) -> str:
    """Return the message of an error, in one line."""
    if isinstance(fault, OSError) and fault.filename and fault.strerror:
        return f"{fault.filename}: {fault.strerror}"
    if isinstance(fault, OSError) and fault.strerror:
        return fault.strerror
    text = " ".join(str(fault).split())
    return text if text else type(fault).__name__
