"""`kafkalog status` of a log in an object store: its commit, its objects, its partitions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from kafkalog.cli.status_rows import writer_rows
from kafkalog.cli.terminal.output import print_line, print_table

if TYPE_CHECKING:
    from kafkalog.storage_engine.object_store.object_log import ObjectLog
    from kafkalog.storage_engine.object_store.store_state import StoreState


def store_rows(log: ObjectLog, topic: str | None) -> list[dict[str, Any]]:
    """Return what `--json` prints, in its order: log, writers, partitions."""
    state = log.store_state()
    row = {
        "type": "log",
        "path": log.root,
        "owner": "kafkalog",
        "commit": state.number,
        "objects": len(state.objects),
        "bytes": sum(each.size for each in state.objects.values()),
        "deadObjects": len(state.dead),
        "requests": dict(log.client.counts),
    }
    return [row, *writer_rows(state.log), *_partitions(state, topic)]


def _partitions(state: StoreState, wanted: str | None) -> Iterator[dict[str, Any]]:
    for name, topic in sorted(state.log.topics.items()):
        for number, held in topic.present() if wanted in (None, name) else ():
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
            }


def print_store(rows: list[dict[str, Any]]) -> None:
    """Print the rows for people."""
    log = rows[0]
    requests = ", ".join(f"{kind} {count}" for kind, count in sorted(log["requests"].items()))
    print_line(
        f"{log['path']}  commit: {log['commit']}  objects: {log['objects']}  bytes: "
        f"{log['bytes']}  requests of this status: {requests}"
    )
    print_line("")
    names = ["logStartOffset", "lastStableOffset", "highWatermark", "extents", "bytes"]
    print_table(
        ["topic", "partition", "log start", "last stable", "high watermark", "extents", "bytes"],
        [
            [row["topic"], row["partition"], *(row[name] for name in names)]
            for row in rows
            if row["type"] == "partition"
        ],
    )
