"""`kafkalog status` of a log in an object store: its commit, its objects, its partitions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from kafkalog.cli.status_rows import writer_rows
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
    from kafkalog.cleaner.report.store_report import report, status_store
    from kafkalog.storage_engine.object_store.prices import S3_STANDARD

    found = report(state, now_ms)
    statuses = {(each.topic, each.partition): each for each in status_store(state, now_ms)}
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
    return [row, *writer_rows(state.log), *_partitions(state, topic, statuses)]


def _partitions(
    state: StoreState, wanted: str | None, statuses: Mapping[tuple[str, int], PartitionStatus]
) -> Iterator[dict[str, Any]]:
    for name, topic in sorted(state.log.topics.items()):
        for number, held in topic.present() if wanted in (None, name) else ():
            status = statuses[name, number]
            extents = [extent for _, extent in state.extents(topic.topic_id, number)]
            yield {
                "type": "partition",
                "topic": name,
                "partition": number,
                "logStartOffset": held.log_start_offset,
                "lastStableOffset": held.last_stable_offset,
                "highWatermark": held.high_watermark,
                "extents": len(extents),
                "bytes": sum(extent.size for extent in extents),
                **json_row(status, "first_dirty_offset", "clean_bytes", "dirty_bytes"),
                "uncleanableBytes": status.uncleanable_bytes,
                "dirtyRatio": round(status.dirty_ratio, 6),
                **json_row(status, "state", "reason"),
            }


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
    names += ["dirtyRatio", "state", "reason"]
    print_table(
        [
            *("topic", "partition", "log start", "last stable", "high watermark", "extents"),
            *("bytes", "dirty ratio", "state", "reason"),
        ],
        [
            [row["topic"], row["partition"], *(row[name] for name in names)]
            for row in rows
            if row["type"] == "partition"
        ],
    )
