"""The figures of a picture: those of `status --json`, and of each partition its segments.

{"version": 1, "madeMs": ..., "path": "...", "release": "...",
 "status": [the objects of `status --json`],
 "partitions": [{"topic": ..., "partition": ..., "config": {...}, "segments": [...],
                 "cleanedBytes": ..., "retiredBytes": ..., "cleanings": [...],
                 "explanation": {an object of `explain --json`}}]}

Those of a log in an object store are alike; `store_figures` makes them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kafkalog.cleaner.report.explain import explain
from kafkalog.cleaner.report.reported_directory import ReportedDirectory
from kafkalog.cleaner.report.reported_store import ReportedStore
from kafkalog.cleaner.state.last_cleaning import read_cleanings
from kafkalog.cli.picture.partition_row import config_row, partition_row
from kafkalog.cli.picture.store_figures import store_partitions
from kafkalog.cli.status_rows import cleaning_row, status_rows
from kafkalog.cli.store_status import store_rows
from kafkalog.errors import KafkaLogError
from kafkalog.storage_engine.format import layout
from kafkalog.storage_engine.fs import files
from kafkalog.storage_engine.object_store.object_log import ObjectLog
from kafkalog.storage_engine.place import directory_log_of

if TYPE_CHECKING:
    from pathlib import Path

    from kafkalog.cleaner.dedup.census import SegmentCensus
    from kafkalog.cleaner.dedup.log_to_clean import LogToClean
    from kafkalog.cleaner.report.explain import Explanation
    from kafkalog.cli.picture.counts import Counts
    from kafkalog.storage_engine.directory.directory_log import DirectoryLog
    from kafkalog.storage_engine.log.log import Log
    from kafkalog.storage_engine.metadata.state import PartitionState
    from kafkalog.storage_engine.segment.segments import SegmentFiles


def figures(
    path: str, log: Log, counts: Counts, now_ms: int, topic: str | None = None
) -> dict[str, Any]:
    """Return the figures of a log, or of a topic, as JSON objects; no records are read.

    For a log in an object store that is one request, if nothing has changed.
    """
    from kafkalog import __version__

    if isinstance(log, ObjectLog):
        state = log.store_state()
        status = store_rows(log, state, topic, now_ms)
        partitions = store_partitions(ReportedStore(log, state, now_ms), topic)
    else:
        directory = directory_log_of(log)
        plans = ReportedDirectory(directory, now_ms)
        status = status_rows(path, directory, topic, plans)
        partitions = _partitions(directory, counts, plans, topic)
    return {
        "version": 1,
        "madeMs": now_ms,
        "path": path,
        "release": __version__,
        "status": status,
        "partitions": partitions,
    }


def _partitions(
    log: DirectoryLog, counts: Counts, plans: ReportedDirectory, topic: str | None
) -> list[dict[str, Any]]:
    found = []
    for name in log.topics() if topic is None else [topic]:
        try:
            explanations = explain(log, name, plans.now_ms, plans)
        except KafkaLogError:  # it was deleted meanwhile
            continue
        found += [_partition(log, each, counts, plans) for each in explanations]
    return found


def _partition(
    log: DirectoryLog, found: Explanation, counts: Counts, plans: ReportedDirectory
) -> dict[str, Any]:
    topic, partition = found.topic, found.partition
    row = partition_row(found)
    try:
        directory = log.partition_directory(topic, partition)
        planned, state = plans.of(topic, partition)
        row["config"] = config_row(planned.config)
        row["segments"] = segment_rows(
            planned,
            state,
            counts.of(topic, partition),
            is_refused=any(one.code in ("paused", "uncleanable") for one in found.findings),
        )
        row["cleanings"] = [cleaning_row(one) for one in read_cleanings(directory)]
        row["cleanedBytes"], row["retiredBytes"] = leftovers(directory)
    except (OSError, KafkaLogError) as raised:
        files.pass_on(raised)
        # the explanation says why it cannot be read
    return row


def segment_rows(
    log: LogToClean, state: PartitionState, counts: dict[int, SegmentCensus], *, is_refused: bool
) -> list[dict[str, Any]]:
    """Return a row for each segment, with its counts if there are any.

    A segment is `clean`, `cleanable` (the next cleaning takes it), `uncleanable` (a lag, a reader
    or a transaction holds it back, or `is_refused`: a fault or a pause stops cleaners), `active`,
    or `closed` if the topic is not compacted.
    """
    ends = [*(segment.base_offset for segment in log.segments[1:]), state.high_watermark]
    rows = []
    for segment, end in zip(log.segments, ends, strict=False):  # there may be no segment
        is_active = segment.base_offset == state.active_base
        count = counts.get(segment.base_offset)
        rows.append(
            {
                "baseOffset": segment.base_offset,
                "nextOffset": end,
                # Bytes after the committed ones are garbage, or belong to a running commit.
                "bytes": state.active_size if is_active else segment.size,
                "state": "active" if is_active else _word(log, segment, end, is_refused),
                "records": None if count is None else count.records,
                "tombstones": None if count is None else count.tombstones,
                "deadRecords": None if count is None else count.dead_records,
                "deadBytes": None if count is None else count.dead_bytes,
            }
        )
    return rows


def _word(log: LogToClean, segment: SegmentFiles, end: int, is_refused: bool) -> str:
    if not log.config.is_compacted:
        return "closed"
    if end <= log.first_dirty_offset:
        return "clean"
    return "uncleanable" if is_refused or segment.base_offset >= log.end else "cleanable"


def leftovers(directory: Path) -> tuple[int, int]:
    """Return the bytes of files that a cleaning has written so far, and of those it replaced.

    The former are `.cleaned` and `.swap`. The latter are `.deleted`; readers may still use them.
    """
    cleaned = retired = 0
    with files.ignoring():
        for name in files.list_names(directory):
            parsed = layout.parse_segment_file(name)
            if parsed is None or not parsed[2]:
                continue
            size = 0
            with files.ignoring():
                size = (directory / name).stat().st_size
            if parsed[2] == layout.DELETED:
                retired += size
            else:
                cleaned += size
    return cleaned, retired
