"""The rows of `kafkalog status --json`: logs, who is at work on them, and their partitions."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kafkalog.cli.terminal.output import json_row

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kafkalog.cleaner.objects.object_moment import ObjectMoment
    from kafkalog.cleaner.report.status import PartitionStatus
    from kafkalog.cleaner.shelf import Moment
    from kafkalog.cleaner.state.last_cleaning import LastCleaning
    from kafkalog.storage_engine.metadata.state import PartitionState, State, WriterState


def status_rows(path: str, moment: Moment, topic: str | None = None) -> list[dict[str, Any]]:
    """Return what `--json` prints, in its order, all partitions or those of one topic."""
    from kafkalog.cleaner.report.status import status
    from kafkalog.cleaner.shelves import object_moment_of

    stored = object_moment_of(moment)
    found = [*(_directories(path, moment) if stored is None else _store_rows(stored))]
    for each in status(moment, topic):
        known = moment.state.topics[each.topic]
        row = _partition_row(each, known.state_or_empty(each.partition))
        if stored is not None:
            row["extents"] = len(stored.store.extents(known.topic_id, each.partition))
        found.append(row)
    return found


def _directories(path: str, moment: Moment) -> Iterator[dict[str, Any]]:
    from kafkalog.storage_engine.format import layout
    from kafkalog.storage_engine.metadata import address

    state, root = moment.state, Path(moment.root)
    yield from (log_row(each, state) for each in address.directories(path))
    if (root / layout.COMMIT).exists():  # of a broker's these things are its own
        yield _cleaner_row(moment)
        yield from writer_rows(state)
        yield from staged_rows(root, state, moment.now_ms)
        yield from pin_rows(root, moment.now_ms)


def _store_rows(moment: ObjectMoment) -> Iterator[dict[str, Any]]:
    """Yield the rows of the log and its writers.

    The requests are all those that the log has sent since it was opened.
    """
    from kafkalog.cleaner.objects.regroup_plan import price_of
    from kafkalog.cleaner.report.store_figures import store_figures

    found = store_figures(moment)
    requests = dict(moment.log.client.counts)
    yield {
        "type": "log",
        "path": moment.root,
        "owner": "kafkalog",
        "commit": moment.store.number,
        **json_row(found, "objects", "bytes", "fresh_objects", "fresh_bytes", "oldest_fresh_ms"),
        **json_row(found, "dropped_objects", "deleted_from_ms", "read_requests", "read_price"),
        "readAmplification": round(found.read_amplification, 3),
        "writeAmplification": round(found.write_amplification, 3),
        "regroup": "due" if found.regroup.is_due else "not due",
        "regroupReason": found.regroup.reason,
        "regroupFigures": dict(found.regroup.figures),
        "requests": requests,
        "requestsPrice": price_of(requests),
    }
    yield from writer_rows(moment.state)


def log_row(root: Path, state: State) -> dict[str, Any]:
    """Return a directory with its owner (`running`: a broker that runs on it) and its locks."""
    from kafkalog.errors import StorageError
    from kafkalog.storage_engine.format import layout
    from kafkalog.storage_engine.fs import locks
    from kafkalog.storage_engine.metadata.directory_signs import is_copy

    locks_reason = locks.lock_fault(root)
    owner, detail, is_running = "kafkalog", None, False
    if not (root / layout.COMMIT).exists():
        owner = "broker"
        if is_copy(root):
            owner, detail = "nobody", "a copy of a broker's partitions"
        elif (root / layout.COMMIT_RELEASED).exists():
            owner, detail = "released", "to a broker"
        try:
            is_running = locks.RootLock(root).is_held_alone()
        except StorageError as fault:
            locks_reason = str(fault)
    elif (root / layout.META_ASIDE).exists():
        detail = "adopted from a broker"
    return {
        "type": "log",
        "path": str(root),
        "owner": owner,
        "ownerDetail": detail,
        "running": is_running,
        "locks": locks_reason is None,
        "locksReason": locks_reason,
        "record": state.number,
        "timeMs": _time_ms(state.time_ms),
    }


def _partition_row(status: PartitionStatus, state: PartitionState) -> dict[str, Any]:
    last = status.last_cleaning
    return {
        "type": "partition",
        "topic": status.topic,
        "partition": status.partition,
        **json_row(status, "log_start_offset", "first_dirty_offset"),
        "firstUncleanableOffset": status.first_uncleanable_offset,
        "lastStableOffset": state.last_stable_offset,
        "highWatermark": status.high_watermark,
        "leaderEpoch": state.leader_epoch,
        "bytes": status.clean_bytes + status.dirty_bytes + status.uncleanable_bytes,
        **json_row(status, "clean_bytes", "dirty_bytes", "uncleanable_bytes"),
        "dirtyRatio": round(status.dirty_ratio, 6),
        **json_row(status, "tombstones_waiting", "earliest_delete_horizon_ms"),
        "lastCleaning": None if last is None else cleaning_row(last),
        **json_row(status, "state", "reason", "reason_code", "closed_by", "deletions_gone_to"),
    }


def cleaning_row(last: LastCleaning) -> dict[str, int]:
    """Return the JSON object of a cleaning."""
    names = ("ended_ms", "elapsed_ms", "start_offset", "end_offset", "records_read")
    return json_row(last, *names, "records_kept", "bytes_read", "bytes_written")


def _time_ms(time_ms: int) -> int | None:
    return time_ms if time_ms > 0 else None


# --- who is at work ------------------------------------------------------------------------------


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
    from kafkalog.storage_engine.directory.pins import LEASE_MS, live_pins

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
    from kafkalog.storage_engine.directory.commit import staged_paths
    from kafkalog.storage_engine.format.layout import parse_staged
    from kafkalog.storage_engine.log.results import STAGED_RETENTION_MS
    from kafkalog.storage_engine.metadata.writer import writer_slug
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


def _cleaner_row(moment: Moment) -> dict[str, Any]:
    """Return whether a background cleaner runs (None: unknown), and what is being cleaned."""
    return {
        "type": "cleaner",
        "running": moment.is_cleaner_running,
        "cleaning": [
            {"topic": topic.name, "partition": number}
            for topic in moment.state.topics.values()
            for number in topic.numbers()
            if moment.is_being_cleaned(topic.name, number)
        ],
    }
