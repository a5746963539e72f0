"""A repository's history as a directory of Parquet files, for `spark.readStream` to read in order.

Each file holds hundreds or thousands of changes: `seq` (numbers all changes), `key` (the path) and
`value` (JSON, or null for a deleted path). Spark's file source orders files by modification time,
so the times are set, and each complete file is renamed into place. All files of a run of the stream
exist before it begins, since a listing during writes could miss an older file.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pyarrow as pa
import pyarrow.parquet as pq
from rich.progress import Progress

from examples.git_history import Change, changes, commit_count

__all__ = ["Feed", "change_value", "write_feed"]

CHANGES_PER_FILE: Final = 1000
FIRST_CHANGES: Final = 200
"""The first files are smaller, so that a short history makes several files too."""
FILES_BEFORE_GROWTH: Final = 50
"""Later files grow with the history, so that a large one makes hundreds of files at most."""
COMMITS_PER_UPDATE: Final = 200
SCHEMA: Final = pa.schema(
    [
        pa.field("seq", pa.int64()),
        pa.field("key", pa.binary()),
        pa.field("value", pa.binary()),
    ]
)


@dataclass(slots=True)
class Feed:
    """The files, and the counts of their changes."""

    directory: Path
    files: int = 0
    commits: int = 0
    changes: int = 0
    deletes: int = 0

    def figures(self) -> dict[str, int]:
        """Return the counts, for the report."""
        return {
            "commits": self.commits,
            "changes": self.changes,
            "upserts": self.changes - self.deletes,
            "deletes": self.deletes,
        }


def write_feed(repository: Path, directory: Path, bars: Progress) -> Feed:
    """Write the whole history into `directory`; raises GitError."""
    directory.mkdir(parents=True)
    feed = Feed(directory)
    bar = bars.add_task("history read from git", total=commit_count(repository))
    started_ms = int(time.time() * 1000)
    pending: list[Change] = []
    for commit in changes(repository):
        feed.commits += 1
        pending += commit
        if len(pending) >= file_size(feed.changes):
            write_file(feed, pending, started_ms)
            pending = []
        if feed.commits % COMMITS_PER_UPDATE == 0:
            bars.update(bar, completed=feed.commits)
    if pending:
        write_file(feed, pending, started_ms)
    bars.update(bar, completed=feed.commits)
    return feed


def file_size(changes_before: int) -> int:
    """Return the least number of changes in a file that follows so many others."""
    smallest = min(max(FIRST_CHANGES, changes_before), CHANGES_PER_FILE)
    return max(smallest, changes_before // FILES_BEFORE_GROWTH)


def write_file(feed: Feed, pending: list[Change], started_ms: int) -> None:
    """Write the next file of a feed, and count its changes."""
    values = [change_value(change) for change in pending]
    table = pa.table(
        [
            pa.array(range(feed.changes, feed.changes + len(pending)), pa.int64()),
            pa.array([change.path for change in pending], pa.binary()),
            pa.array(values, pa.binary()),
        ],
        schema=SCHEMA,
    )
    path = feed.directory / f"{feed.files:08d}.parquet"
    hidden = path.with_name(f".{path.name}")  # Spark's file source skips what begins with a dot
    pq.write_table(table, hidden)
    modified_ns = (started_ms + feed.files) * 1_000_000  # a millisecond apart: strictly in order
    os.utime(hidden, ns=(modified_ns, modified_ns))
    hidden.rename(path)
    feed.files += 1
    feed.changes += len(pending)
    feed.deletes += values.count(None)


def change_value(change: Change) -> bytes | None:
    """Return the JSON of a path's new state; None, a tombstone, when it was deleted."""
    if change.entry is None:
        return None
    value = {
        "mode": change.entry.mode,
        "blob": change.entry.blob,
        "commit": change.commit,
        "time": change.time,
    }
    return json.dumps(value, separators=(",", ":")).encode()
