"""The activity on a log: its writers and staged files, snapshot pins, and cleaners.

Each function returns the rows of one kind for `--json`.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from kafkalog.storage_engine.engine import Engine
    from kafkalog.storage_engine.metadata.state import State, WriterState


def writer_rows(state: State, topic: str | None = None) -> list[dict[str, Any]]:
    """Return the writers, optionally only of one topic."""
    from kafkalog.storage_engine.writing.writers import writers

    return [writer_row(*one) for one in writers(state, None, topic).items()]


def writer_row(writer: tuple[str, str], last: WriterState) -> dict[str, Any]:
    """Return a writer (id, target) with its last batch."""
    return {
        "type": "writer",
        "writer": writer[0],
        "topic": writer[1],
        "batchId": last.batch_id,
        "rows": last.rows,
        "timeMs": last.time_ms if last.time_ms > 0 else None,
    }


def pin_rows(root: Path, now_ms: int) -> list[dict[str, Any]]:
    """Return the live snapshot pins: no cleaning passes them."""
    from kafkalog.storage_engine.reading.pins import LEASE_MS, live_pins

    return [
        {
            "type": "pin",
            "pin": found.path.name,
            "record": found.number,
            "read": found.is_held,
            "renewedMs": found.renewed_ms,
            "leasedUntilMs": found.renewed_ms + LEASE_MS,
        }
        for found in live_pins(root, now_ms)
    ]


def staged_rows(root: Path, state: State, now_ms: int) -> list[dict[str, Any]]:
    """Return the staged files: batches that are being written, or were never committed."""
    from kafkalog.storage_engine.format.layout import parse_staged
    from kafkalog.storage_engine.writing.commit import STAGED_RETENTION_MS, staged_paths
    from kafkalog.storage_engine.writing.writer import writer_slug
    from kafkalog.storage_engine.writing.writers import writers

    known = {writer_slug(*writer): writer for writer in writers(state)}
    rows = []
    for path in sorted(staged_paths(root, state, lambda _: True)):
        with contextlib.suppress(FileNotFoundError):  # committed meanwhile
            stat = path.stat()
            modified_ms = stat.st_mtime_ns // 1_000_000
            parsed = parse_staged(path.name)
            slug = None if parsed is None else parsed[0]
            writer_id, topic = known.get(slug or "", (slug, None))
            rows.append(
                {
                    "type": "staged",
                    "file": str(path.relative_to(root)),
                    "writer": writer_id,
                    "topic": topic,
                    "batchId": None if parsed is None else parsed[1],
                    "bytes": stat.st_size,
                    "modifiedMs": modified_ms,
                    "ageMs": max(now_ms - modified_ms, 0),
                    "keptUntilMs": modified_ms + STAGED_RETENTION_MS,
                }
            )
    return rows


def cleaner_row(log: Engine) -> dict[str, Any]:
    """Return whether a background cleaner runs (None: unknown), and what is being cleaned."""
    from kafkalog.cleaner.dedup.presence import is_cleaner_running

    return {
        "type": "cleaner",
        "running": is_cleaner_running(log.root),
        "cleaning": list(_being_cleaned(log)),
    }


def _being_cleaned(log: Engine) -> Iterator[dict[str, Any]]:
    from kafkalog.cleaner.dedup.presence import is_being_cleaned

    for topic in log.state().topics.values():
        for number, _ in topic.present():
            if is_being_cleaned(log.partition_directory(topic.name, number)):
                yield {"topic": topic.name, "partition": number}
