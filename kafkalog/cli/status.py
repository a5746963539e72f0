"""Prints the owner of a log, its locks, the processes at work on it, and its partitions.

It lists the writers with their last batches, the staged files that are not committed yet, and until
when they are kept. It also lists snapshot pins of readers, and the cleaners.

For each partition it prints the offsets, the bytes of its .log files, the dirty ratio, tombstones
that wait for their delete horizon, and the last cleaning. The state is clean (nothing is dirty),
dirty (the cleaner will come), not due or uncleanable with the reason, paused, not compacted, or
policy unknown (a broker's topic). For more, run `kafkalog explain`. A partition that cannot be read
has a line with the reason. No records are read.

--html writes one page instead, which has all of this, the segments to scale, and the findings of
`explain`. It replaces the file. To count obsolete records, it reads the log; --no-count leaves that
out. They are not counted in an object store.

--checkpoint prints instead how far the streaming query with that checkpoint lags, per source and
partition, even while it runs.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from kafkalog.cli.app.arguments import any_topic_argument, readable_path_argument
from kafkalog.cli.app.opened import open_readable
from kafkalog.cli.query_lag import print_query_lag
from kafkalog.cli.status_rows import log_row, status_rows
from kafkalog.cli.terminal.output import (
    check_outside,
    counted,
    note,
    print_json,
    print_line,
    print_table,
    progress,
)
from kafkalog.cli.terminal.time_text import utc_text
from kafkalog.errors import InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kafkalog.cli.terminal.colours import Style
    from kafkalog.storage_engine.log.log import Log

EXAMPLES: Final = (
    "kafkalog status /data/shop",
    "kafkalog status /data/shop stock --json",
    "kafkalog status /data/shop --html shop.html",
)
_STYLES: Final[dict[str, Style]] = {"clean": "green", "dirty": "yellow", "uncleanable": "red"}


@readable_path_argument
@any_topic_argument
@click.option(
    "--checkpoint", metavar="DIR", help="How far the streaming query with this checkpoint lags."
)
@click.option(
    "--html",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Write the picture of `kafkalog ui` to a file.",
)
@click.option(
    "--count/--no-count",
    default=None,
    show_default="count in a directory",
    help="Whether the picture counts obsolete bytes.",
)
@click.option(
    "--json",
    is_flag=True,
    help="One JSON object per log, cleaner, writer, staged file, pin, partition.",
)
def command(
    path: str,
    topic: str | None,
    checkpoint: str | None,
    html: Path | None,
    count: bool | None,
    json: bool,
) -> None:
    """Print the status."""
    from kafkalog.cleaner.shelves import moment_of
    from kafkalog.cli.picture.counts import is_counting
    from kafkalog.storage_engine.fs import clock
    from kafkalog.storage_engine.metadata import address
    from kafkalog.storage_engine.object_store.address import is_store_url

    if html is not None and (json or checkpoint is not None):
        raise InvalidInputError(
            f"--html writes a page and {'--json' if json else '--checkpoint'} prints: give one of "
            "them"
        )
    if html is None and count is not None:
        raise InvalidInputError(
            f"--{'count' if count else 'no-count'} is about the picture: it goes with --html FILE"
        )
    with open_readable(path) as opened:
        if topic is not None:
            opened.describe(topic)
        if html is not None:
            roots = [] if is_store_url(path) else address.directories(path)
            check_outside(html, roots, "a picture", "--html")
            _write_picture(path, opened, html, topic, counts_obsolete=is_counting(path, count))
            return
        if checkpoint is not None:
            roots = [] if is_store_url(path) else address.directories(path)
            is_live = any(log_row(root, opened.state())["running"] for root in roots)
            print_query_lag(opened, checkpoint, topic, is_live=is_live, json=json)
            return
        found = status_rows(path, moment_of(opened, clock.now_ms()), topic)
    if not json:
        _print(found)
    for row in found if json else ():
        print_json(row)


def _write_picture(
    path: str, log: Log, file: Path, topic: str | None, *, counts_obsolete: bool
) -> None:
    from kafkalog.cli.picture.counts import Counts
    from kafkalog.cli.picture.figures import figures
    from kafkalog.cli.picture.page import page
    from kafkalog.storage_engine.fs import clock

    counts = Counts()
    if counts_obsolete:
        with progress("counting what is obsolete", lambda: len(log.topics())) as advance:
            for name in log.topics() if topic is None else [topic]:
                counts.count(log, name)
                advance(1)
    found = figures(path, log, counts, clock.now_ms(), topic)
    _write(file, page(found, is_live=False))
    note(f"{file}: the picture of {counted(len(found['partitions']), 'partition')}")


def _write(file: Path, content: bytes) -> None:
    """Write the whole file, or leave the old one in place; raises StorageError."""
    from kafkalog.errors import StorageError
    from kafkalog.storage_engine.format import layout
    from kafkalog.storage_engine.fs import files

    place = file.resolve()
    temporary = place.with_name(place.name + layout.TEMPORARY)
    try:
        if place.exists() and not place.is_file():  # a pipe, or a device
            place.write_bytes(content)
            return
        try:
            files.write_atomically(place, content, temporary_name=temporary.name)
        except BaseException:
            files.remove(temporary)
            raise
    except OSError as fault:
        files.pass_on(fault)
        raise StorageError(f"{file}: {fault.strerror or fault}") from fault


def _print(found: list[dict[str, Any]]) -> None:
    kinds: dict[str, list[dict[str, Any]]] = {}
    for row in found:
        kinds.setdefault(row["type"], []).append(row)
    cleaner = "".join(f"  cleaner: {_cleaner(row)}" for row in kinds.get("cleaner", ()))
    for row in kinds["log"]:
        for line in _store_lines(row) if "objects" in row else [f"{_directory_line(row)}{cleaner}"]:
            print_line(line)
    if "writer" in kinds:
        print_line("")
        print_writers(kinds["writer"])
    if "staged" in kinds:
        print_line("")
        _print_staged(kinds["staged"])
    if "pin" in kinds:
        print_line("")
        _print_pins(kinds["pin"])
    print_line("")
    _print_partitions(kinds.get("partition", []))


def _directory_line(row: dict[str, Any]) -> str:
    running = "running" if row["running"] else None
    owner = ", ".join(text for text in (row["owner"], row["ownerDetail"], running) if text)
    return f"{row['path']}  owner: {owner}  locks: {'work' if row['locks'] else row['locksReason']}"


def _store_lines(log: dict[str, Any]) -> Iterator[str]:
    requests = ", ".join(f"{kind} {count}" for kind, count in sorted(log["requests"].items()))
    yield (
        f"{log['path']}  commit: {log['commit']}  objects: {log['objects']}  bytes: "
        f"{log['bytes']}  requests of this status: {requests} ({log['requestsPrice']:.2g} $)"
    )
    yield (
        f"fresh: {log['freshObjects']} objects, {log['freshBytes']} bytes  dropped: "
        f"{log['droppedObjects']}  one read: {log['readRequests']} GETs, {log['readPrice']:.2g} $  "
        f"amplification: read {log['readAmplification']:.2f}, write at least "
        f"{log['writeAmplification']:.2f}"
    )
    yield f"regroup: {log['regroup']}. {log['regroupReason']}"


def _cleaner(row: dict[str, Any]) -> str:
    text = {True: "runs", False: "none", None: "unknown"}[row["running"]]
    cleaned = ", ".join(f"{one['topic']}-{one['partition']}" for one in row["cleaning"])
    return f"{text}  cleaning now: {cleaned}" if cleaned else text


def print_writers(found: list[dict[str, Any]]) -> None:
    """Print rows of writers as a table."""
    print_table(
        ["writer", "topic", "last batch", "rows", "time"],
        [[w["writer"], w["topic"], w["batchId"], w["rows"], _time(w["timeMs"])] for w in found],
    )


def _print_staged(found: list[dict[str, Any]]) -> None:
    from kafkalog.cleaner.report.explain import duration

    print_table(
        ["staged file", "writer", "topic", "batch", "bytes", "age", "kept until"],
        [
            [
                *(row[name] for name in ("file", "writer", "topic", "batchId", "bytes")),
                duration(row["ageMs"]),
                _time(row["keptUntilMs"]),
            ]
            for row in found
        ],
    )


def _print_pins(found: list[dict[str, Any]]) -> None:
    print_table(
        ["pin", "record", "read now", "leased until"],
        [
            [row["pin"], row["record"], "yes" if row["read"] else "no", _time(row["leasedUntilMs"])]
            for row in found
        ],
    )


def _print_partitions(partitions: list[dict[str, Any]]) -> None:
    columns = {
        "topic": "topic",
        "partition": "partition",
        "log start": "logStartOffset",
        "first dirty": "firstDirtyOffset",
        "last stable": "lastStableOffset",
        "high watermark": "highWatermark",
        "extents": "extents",
        "bytes": "bytes",
        "dirty ratio": "dirtyRatio",
        "tombstones": "tombstonesWaiting",
        "cleaned": "cleaned",
        "state": "state",
        "reason": "shown",
    }
    for row in partitions:
        last = row["lastCleaning"]
        row["cleaned"] = _time(last["endedMs"]) if last else None
        row["shown"] = row["reasonCode"] or row["reason"]
    if not any(row["lastCleaning"] for row in partitions):
        del columns["tombstones"], columns["cleaned"]
    if not any("extents" in row for row in partitions):
        del columns["extents"]
    print_table(
        [*columns], [[row[name] for name in columns.values()] for row in partitions], _STYLES
    )


def _time(time_ms: int | None) -> str | None:
    return None if time_ms is None else utc_text(time_ms)
