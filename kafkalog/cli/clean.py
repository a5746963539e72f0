"""Cleans what the background cleaner would clean now, or with --force everything.

--force rolls the active segment first. Retention follows, of every topic if none is given. The exit
status is 1 if a partition could not be cleaned; `kafkalog status` keeps showing the reason. In an
object store the fresh objects are regrouped first, with --force all of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from kafkalog.cli.app.arguments import AnyTopic, LogPath
from kafkalog.cli.app.opened import open_writable
from kafkalog.cli.terminal.output import json_row, note, print_json, print_table, progress
from kafkalog.storage_engine.directory.pins import LivePins
from kafkalog.storage_engine.fs import clock

if TYPE_CHECKING:
    from kafkalog.cleaner.report.status import PartitionStatus
    from kafkalog.cleaner.state.stats import CleanerStats
    from kafkalog.storage_engine.log.log import Log

EXAMPLES: Final = ("kafkalog clean /data/shop", "kafkalog clean /data/shop stock --force --json")


def command(
    path: LogPath,
    topic: AnyTopic = None,
    force: Annotated[bool, typer.Option("--force", help="Everything that may be cleaned.")] = False,
    json: Annotated[bool, typer.Option("--json", help="One JSON object per partition.")] = False,
) -> int:
    """Print the result of each partition's cleaning."""
    with open_writable(path) as log:
        ends = _stable_ends(log) if force else {}
        results = _clean(log, topic, force=force)
        passed_over = _passed_over(log, topic, results)
        passed_over += _pinned(log, topic, ends) if force else []
    if json:
        for stats in results:
            print_json(json_row(stats, *(field.name for field in fields(stats))))
    elif results:
        _print(results)
    elif not passed_over:
        note("nothing to clean")
    for line in passed_over:
        note(f"kafkalog: {line}")
    failed = [f"{stats.topic}-{stats.partition}" for stats in results if stats.error is not None]
    if failed:
        word = "was" if len(failed) == 1 else "were"
        note(f"kafkalog: {', '.join(failed)} {word} not cleaned, for the reasons above")
    return 1 if failed or passed_over else 0


def _print(results: list[CleanerStats]) -> None:
    columns = ["topic", "partition", "from", "to", "records", "kept", "bytes", "written", "ms"]
    names = ["topic", "partition", "start_offset", "end_offset", "records_read", "records_kept"]
    names += ["bytes_read", "bytes_written"]
    rows = [[*(getattr(s, name) for name in names), round(s.elapsed_ms)] for s in results]
    if any(stats.error is not None for stats in results):
        columns.append("error")
        rows = [[*row, stats.error] for row, stats in zip(rows, results, strict=True)]
    print_table(columns, rows)


def _passed_over(log: Log, topic: str | None, results: list[CleanerStats]) -> list[str]:
    """Return a line for each partition that needs cleaning and was not cleaned."""
    done = {(stats.topic, stats.partition) for stats in results}
    reasons = {
        "paused": "cleaning is paused by another process",
        "dirty": "another cleaner is cleaning it",
        "uncleanable": "it is uncleanable; a cleaner will try again later, and --force now",
    }
    return [
        f"{status.topic}-{status.partition} was skipped: {reasons[status.state]}"
        for status in _statuses(log)
        if topic in (None, status.topic)
        and status.state in reasons
        and (status.topic, status.partition) not in done
    ]


def _statuses(log: Log) -> list[PartitionStatus]:
    from kafkalog.cleaner.report.status import status
    from kafkalog.cleaner.shelves import moment_of

    return status(moment_of(log, clock.now_ms()))


def _stable_ends(log: Log) -> dict[tuple[str, int], int]:
    return {(one.topic, one.partition): one.last_stable_offset for one in _statuses(log)}


def _pinned(log: Log, topic: str | None, ends: Mapping[tuple[str, int], int]) -> list[str]:
    """Return a line for each partition that a snapshot pin kept from being cleaned to `ends`."""
    lines: list[str] = []
    if not isinstance(log.root, Path):
        return lines
    pins = LivePins(log.root, clock.now_ms(), held_only=True)
    for status in _statuses(log):
        if topic in (None, status.topic) and status.state not in (
            "not compacted",
            "policy unknown",
        ):
            topic_id = log.describe(status.topic).topic_id
            offset = pins.limit(status.topic, topic_id, status.partition)
            offset = max(offset, status.first_dirty_offset)
            # Beyond the last stable offset an open transaction stops it.
            end = ends.get((status.topic, status.partition), 0)
            if offset < min(end, status.last_stable_offset):
                lines.append(
                    f"{status.topic}-{status.partition} was cleaned only up to offset "
                    f"{offset}: the snapshot pin of a read holds it; clean again after that read"
                )
    return lines


def _clean(log: Log, topic: str | None, *, force: bool) -> list[CleanerStats]:
    """Clean, and show on a terminal how many of the bytes have been read."""
    from kafkalog.cleaner.schedule.manager import clean_and_retain

    read: dict[tuple[str, int], int] = {}
    with progress("cleaning", lambda: _bytes_to_read(log, topic, force), is_bytes=True) as advance:

        def show(stats: CleanerStats) -> None:
            name, total = (stats.topic, stats.partition), stats.map_bytes_read + stats.bytes_read
            advance(total - read.get(name, 0))
            read[name] = total

        return clean_and_retain(log, topic, force=force, progress=show)


def _bytes_to_read(log: Log, topic: str | None, force: bool) -> int:
    """Return the bytes of the two passes: the dirty section, then all segments to rewrite."""
    total = 0
    for status in _statuses(log):
        if topic in (None, status.topic) and status.state not in (
            "not compacted",
            "policy unknown",
        ):
            if force:
                total += status.clean_bytes + 2 * (status.dirty_bytes + status.uncleanable_bytes)
            elif status.state == "dirty":
                total += status.clean_bytes + 2 * status.dirty_bytes
    return total
