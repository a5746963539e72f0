"""`kafkalog status` of a log in an object store: its commit, its objects, its partitions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from kafkalog.cli.status_rows import partition_row, writer_rows
from kafkalog.cli.terminal.output import json_row, print_line, print_table

if TYPE_CHECKING:
    from kafkalog.cleaner.report.status import PartitionStatus
    from kafkalog.storage_engine.object_store.object_log import ObjectLog
    from kafkalog.storage_engine.object_store.store_state import StoreState


def store_rows(
    log: ObjectLog, state: StoreState, topic: str | None, now_ms: int
) -> list[dict[str, Any]]:
    """Return what `--json` prints of a state of the log, in its order: log, writers, partitions.

    The requests are all those that the log has sent since it was opened.
    """
    from kafkalog.cleaner.report.reported_store import ReportedStore
    from kafkalog.cleaner.report.status import status_of
    from kafkalog.cleaner.report.store_report import report
    from kafkalog.storage_engine.object_store.prices import S3_STANDARD

    found = report(state, now_ms)
    reported = ReportedStore(log, state, now_ms)
    statuses = status_of(reported, topic)
    requests = dict(log.client.counts)
    row = {
        "type": "log",
        "path": log.root,
        "owner": "kafkalog",
        "commit": state.number,
        **json_row(found, "objects", "bytes", "fresh_objects", "fresh_bytes", "oldest_fresh_ms"),
        **json_row(found, "dead_objects", "deleted_from_ms", "read_requests", "read_price"),
        "readAmplification": round(found.read_amplification, 3),
        "writeAmplification": round(found.write_amplification, 3),
        "regroup": "due" if found.regroup.is_due else "not due",
        "regroupReason": found.regroup.reason,
        "regroupFigures": dict(found.regroup.figures),
        "requests": requests,
        "requestsPrice": S3_STANDARD.of(requests),
    }
    return [row, *writer_rows(state.log), *_partitions(state, statuses)]


def _partitions(state: StoreState, statuses: Sequence[PartitionStatus]) -> Iterator[dict[str, Any]]:
    for status in statuses:
        known = state.log.topic(status.topic)
        extents = state.extents(known.topic_id, status.partition)
        row = partition_row(status, known.partitions[status.partition])
        yield {**row, "extents": len(extents)}


def print_store(rows: list[dict[str, Any]]) -> None:
    """Print the rows for people."""
    log = rows[0]
    requests = ", ".join(f"{kind} {count}" for kind, count in sorted(log["requests"].items()))
    print_line(
        f"{log['path']}  commit: {log['commit']}  objects: {log['objects']}  bytes: "
        f"{log['bytes']}  requests of this status: {requests} ({log['requestsPrice']:.2g} $)"
    )
    print_line(
        f"fresh: {log['freshObjects']} objects, {log['freshBytes']} bytes  dead: "
        f"{log['deadObjects']}  one read: {log['readRequests']} GETs, {log['readPrice']:.2g} $  "
        f"amplification: read {log['readAmplification']:.2f}, write at least "
        f"{log['writeAmplification']:.2f}"
    )
    print_line(f"regroup: {log['regroup']}. {log['regroupReason']}")
    print_line("")
    names = ["logStartOffset", "lastStableOffset", "highWatermark", "extents", "bytes"]
    names += ["dirtyRatio", "state"]
    print_table(
        [
            *("topic", "partition", "log start", "last stable", "high watermark", "extents"),
            *("bytes", "dirty ratio", "state", "reason"),
        ],
        [
            [
                *(row["topic"], row["partition"], *(row[name] for name in names)),
                row["reasonCode"] or row["reason"],
            ]
            for row in rows
            if row["type"] == "partition"
        ],
    )
