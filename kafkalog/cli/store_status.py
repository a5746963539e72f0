"""`kafkalog status` of a log in an object store: its commit, its objects, its partitions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kafkalog.cli.status_rows import partition_rows, status_rows, writer_rows
from kafkalog.cli.terminal.output import json_row, print_line, print_table

if TYPE_CHECKING:
    from kafkalog.cleaner.objects.object_moment import ObjectMoment
    from kafkalog.cleaner.shelf import Moment


def rows_of(path: str, moment: Moment, topic: str | None) -> list[dict[str, Any]]:
    """Return what `kafkalog status --json` prints of a log of either kind, in its order."""
    from kafkalog.cleaner.directory.directory_moment import DirectoryMoment
    from kafkalog.cleaner.objects.object_moment import ObjectMoment

    if isinstance(moment, ObjectMoment):
        return _store_rows(moment, topic)
    assert isinstance(moment, DirectoryMoment)
    return status_rows(path, moment, topic)


def _store_rows(moment: ObjectMoment, topic: str | None) -> list[dict[str, Any]]:
    """Return what `--json` prints of a moment, in its order: log, writers, partitions.

    The requests are all those that the log has sent since it was opened.
    """
    from kafkalog.cleaner.objects.regroup_plan import price_of
    from kafkalog.cleaner.report.status import statuses
    from kafkalog.cleaner.report.store_figures import store_figures

    found = store_figures(moment)
    requests = dict(moment.log.client.counts)
    row = {
        "type": "log",
        "path": moment.root,
        "owner": "kafkalog",
        "commit": moment.store.number,
        **json_row(found, "objects", "bytes", "fresh_objects", "fresh_bytes", "oldest_fresh_ms"),
        **json_row(found, "dead_objects", "deleted_from_ms", "read_requests", "read_price"),
        "readAmplification": round(found.read_amplification, 3),
        "writeAmplification": round(found.write_amplification, 3),
        "regroup": "due" if found.regroup.is_due else "not due",
        "regroupReason": found.regroup.reason,
        "regroupFigures": dict(found.regroup.figures),
        "requests": requests,
        "requestsPrice": price_of(requests),
    }
    partitions = partition_rows(statuses(moment, topic), moment.state)
    for each in partitions:
        topic_id = moment.state.topic(each["topic"]).topic_id
        each["extents"] = len(moment.store.extents(topic_id, each["partition"]))
    return [row, *writer_rows(moment.state), *partitions]


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
