"""Prints who owns a log, whether its file system has locks, its writers, and its partitions.

Of a partition: its offsets, the bytes of its .log files, how much of them is dirty, deletions that
wait for their horizon, its last cleaning, and its state: clean, dirty (the cleaner will come),
uncleanable with the reason, paused, or not compacted; `kafkalog explain` says why. One that cannot
be read is a line with the reason. Names, sizes and the ends of indexes are read, and no records.

With --checkpoint, instead: how far the streaming query with that checkpoint is behind, per source
and partition, also while it runs.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kafkalog.cli.output import PATH_HELP, print_json, print_line, print_table
from kafkalog.cli.query_lag import print_query_lag
from kafkalog.cli.readable import open_readable

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from kafkalog.cleaner.last_cleaning import LastCleaning
    from kafkalog.log import KafkaLog
    from kafkalog.storage_engine.state import State


def command(
    path: Annotated[str, typer.Argument(metavar="PATH", show_default=False, help=PATH_HELP)],
    topic: Annotated[str | None, typer.Argument(metavar="[TOPIC]", show_default=False)] = None,
    checkpoint: Annotated[
        str | None,
        typer.Option(
            metavar="DIR", help="How far the streaming query with this checkpoint is behind."
        ),
    ] = None,
    json: Annotated[
        bool, typer.Option("--json", help="One JSON object per log, writer and partition.")
    ] = False,
) -> None:
    """Print the status."""
    from kafkalog.storage_engine import address

    with open_readable(path) as log:
        if topic is not None:
            log.describe(topic)
        if checkpoint is not None:
            is_live = any(_is_live(root) for root in address.directories(path))
            print_query_lag(log, checkpoint, topic, is_live=is_live, json=json)
            return
        state = log.state()
        roots = [_root(root, state) for root in address.directories(path)]
        writers = list(_writers(state))
        partitions = list(_partitions(log, state, topic))
    if json:
        for row in (*roots, *writers, *partitions):
            print_json(row)
        return
    for row in roots:
        owner = ", ".join(
            text
            for text in (row["owner"], row["ownerDetail"], "running" if row["running"] else None)
            if text
        )
        locks = "work" if row["locks"] else row["locksReason"]
        print_line(f"{row['path']}  owner: {owner}  locks: {locks}")
    if writers:
        print_line("")
        print_table(
            ["writer", "topic", "last batch", "rows", "time"],
            [
                [w["writer"], w["topic"], w["batchId"], w["rows"], _time(w["timeMs"])]
                for w in writers
            ],
        )
    print_line("")
    columns = ["topic", "partition", "log start", "first dirty", "last stable", "high watermark"]
    columns += ["bytes", "dirty ratio", "state", "reason"]
    names = ["topic", "partition", "logStartOffset", "firstDirtyOffset", "lastStableOffset"]
    names += ["highWatermark", "bytes", "dirtyRatio", "state", "reason"]
    rows = [[row[name] for name in names] for row in partitions]
    if any(row["lastCleaning"] for row in partitions):
        columns[-2:-2] = ["tombstones", "cleaned"]
        for cells, row in zip(rows, partitions, strict=True):
            last = row["lastCleaning"]
            cells[-2:-2] = [row["tombstonesWaiting"], _time(last["endedMs"]) if last else None]
    print_table(columns, rows)


def _is_live(root: Path) -> bool:
    """Whether a broker runs on a directory; not where the file system has no locks to tell it."""
    from kafkalog.errors import StorageError
    from kafkalog.storage_engine import layout, locks

    try:
        return not (root / layout.COMMIT).exists() and locks.RootLock(root).is_held_alone()
    except StorageError:
        return False


def _root(root: Path, state: State) -> dict[str, Any]:
    from kafkalog.errors import StorageError
    from kafkalog.storage_engine import layout, locks

    locks_reason = locks.lock_fault(root)
    owner, detail, is_running = "kafkalog", None, False
    if not (root / layout.COMMIT).exists():
        is_released = (root / layout.COMMIT_RELEASED).exists()
        owner = "released" if is_released else "broker"
        detail = "to a broker" if is_released else None
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


def _writers(state: State) -> Iterator[dict[str, Any]]:
    for name, writer in sorted(state.writers.items()):
        writer_id, _, target = name.rpartition(" ")
        yield {
            "type": "writer",
            "writer": writer_id,
            "topic": target,
            "batchId": writer.batch_id,
            "rows": writer.rows,
            "timeMs": _time_ms(writer.time_ms),
        }


def _partitions(log: KafkaLog, state: State, topic: str | None) -> Iterator[dict[str, Any]]:
    for status in log.status():
        known = state.topics.get(status.topic)
        if topic not in (None, status.topic) or known is None:
            continue
        partition = known.partitions[status.partition]
        yield {
            "type": "partition",
            "topic": status.topic,
            "partition": status.partition,
            "logStartOffset": status.log_start_offset,
            "firstDirtyOffset": status.first_dirty_offset,
            "firstUncleanableOffset": status.first_uncleanable_offset,
            "lastStableOffset": partition.last_stable_offset,
            "highWatermark": status.high_watermark,
            "leaderEpoch": partition.leader_epoch,
            "bytes": status.clean_bytes + status.dirty_bytes + status.uncleanable_bytes,
            "cleanBytes": status.clean_bytes,
            "dirtyBytes": status.dirty_bytes,
            "uncleanableBytes": status.uncleanable_bytes,
            "dirtyRatio": round(status.dirty_ratio, 6),
            "tombstonesWaiting": status.tombstones_waiting,
            "earliestDeleteHorizonMs": status.earliest_delete_horizon_ms,
            "lastCleaning": _last_cleaning(status.last_cleaning),
            "state": status.state,
            "reason": status.reason,
        }


def _last_cleaning(last: LastCleaning | None) -> dict[str, int] | None:
    if last is None:
        return None
    return {
        "endedMs": last.ended_ms,
        "elapsedMs": last.elapsed_ms,
        "startOffset": last.start_offset,
        "endOffset": last.end_offset,
        "recordsRead": last.records_read,
        "recordsKept": last.records_kept,
        "bytesRead": last.bytes_read,
        "bytesWritten": last.bytes_written,
    }


def _time_ms(time_ms: int) -> int | None:
    return time_ms if time_ms > 0 else None


def _time(time_ms: int | None) -> str | None:
    if time_ms is None:
        return None
    moment = datetime.fromtimestamp(time_ms / 1000, UTC)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")
