"""The rules for continuing a copy: the destination must have what the source had.

- The topic has the same id and the same number of partitions on both sides.
- The destination does not end above the source.
- The destination's last batch is the source's. After a cleaning the batches differ; then records of
  equal offsets are equal.
- A deletion was not cleaned away before it was copied: the source's log knows up to which offset
  some are gone (`PartitionState.deletions_gone_to`). A broker's log does not know it, and no log
  knows it of markers. These stay for `delete.retention.ms`. Later than that after the last copy, a
  cleaned section that is not copied yet may lack some. The source may have had a smaller value
  before, so that of the destination, which came with the first copy, counts too. A broker's default
  is in no log directory: where the topic does not set it, it is not known, and has to be given.

The last rule is Kafka's for a follower, and for every reader of a compacted topic.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from kafkalog.errors import InvalidInputError
from kafkalog.storage_engine.copying.copied_batches import GIVE_RETENTION

if TYPE_CHECKING:
    from kafkalog.storage_engine.copying.copied_batches import PartitionToCopy
    from kafkalog.storage_engine.log.log import Log
    from kafkalog.storage_engine.metadata.state import TopicState, WriterState

_WINDOW: Final = 4096
"""Offsets at the destination's end whose records are compared, if the last batches differ."""


def check_topic(source: Log, found: TopicState, destination: Log) -> TopicState | None:
    """Return the destination's topic of that name, or None; raises InvalidInputError."""
    known = destination.state().topics.get(found.name)
    if known is None:
        return None
    place = f"{destination.root}: topic {found.name!r}"
    if known.topic_id != found.topic_id:
        raise InvalidInputError(
            f"{place} is not a copy of that of {source.root} (expected the topic id "
            f"{found.topic_id}, found {known.topic_id}). Copy to a new destination."
        )
    counts = len(found.partitions), len(known.partitions)
    if counts[0] != counts[1]:
        raise InvalidInputError(
            f"{place} has another number of partitions than that of {source.root} (expected "
            f"{counts[0]}, found {counts[1]}). Add the missing ones (topics alter --partitions "
            f"{counts[0]} --keys-may-move), or copy to a new destination."
        )
    missing = sorted(known.absent - found.absent)
    if missing:
        raise InvalidInputError(
            f"{place} lacks partition {missing[0]}, which {source.root} has. Copy to a new "
            "destination."
        )
    return known


def check_partition(
    source: Log,
    found: TopicState,
    destination: Log,
    known: TopicState,
    wanted: PartitionToCopy,
    *,
    copied: WriterState | None,
    now_ms: int,
) -> None:
    """Raise InvalidInputError unless the copy of a partition can continue.

    `copied` has the time of the last whole copy of the topic (its batch id). Raises
    OffsetOutOfRangeError if a log start has risen since `wanted` was found out.
    """
    held = known.partitions[wanted.partition]
    place = f"{destination.root}: {wanted.name}"
    if held.high_watermark > wanted.end:
        raise InvalidInputError(
            f"{place} ends above the log of {source.root} (expected at most {wanted.end}, found "
            f"{held.high_watermark}). Copy to a new destination."
        )
    first = max(held.log_start_offset, wanted.log_start)
    if wanted.start == wanted.end or first >= wanted.start:
        return
    cleaned_to = source.cleaned_to(found.name, wanted.partition)
    gone_to = source.deletions_gone_to(found.name, wanted.partition)
    if not source.is_brokers and gone_to > wanted.start:
        raise InvalidInputError(
            f"{place} ends at offset {wanted.start}, and deletions up to {gone_to} are gone from "
            f"{source.root}, so that deletions may be missing between (expected a copy before a "
            "cleaning removes them, after delete.retention.ms). Copy to a new destination."
        )
    is_open = held.last_stable_offset < held.high_watermark
    if source.is_brokers or is_open:
        _check_times(
            source,
            found,
            wanted,
            place=place,
            cleaned_to=cleaned_to,
            copied=copied,
            now_ms=now_ms,
        )
    _check_end(source, destination, wanted, first, is_cleaned=cleaned_to > first)


def _check_times(
    source: Log,
    found: TopicState,
    wanted: PartitionToCopy,
    *,
    place: str,
    cleaned_to: int,
    copied: WriterState | None,
    now_ms: int,
) -> None:
    """Raise InvalidInputError if the last copy is too long ago for deletions, or for markers."""
    retention_ms = wanted.deletions_ms
    if cleaned_to > wanted.start and retention_ms is None:
        raise InvalidInputError(
            f"{place} ends at offset {wanted.start}, and the broker may have cleaned {source.root} "
            f"up to {cleaned_to}, so that deletions may be missing between (expected to know the "
            f"topic's delete.retention.ms). {GIVE_RETENTION.format(found.name)}"
        )
    if cleaned_to > wanted.start and (
        copied is None or retention_ms is None or now_ms - copied.batch_id >= retention_ms
    ):
        raise InvalidInputError(
            f"{place} ends at offset {wanted.start}, and the log of {source.root} is cleaned up to "
            f"{cleaned_to}, so that deletions may be missing between (expected a copy every "
            f"{retention_ms} ms, which is the smaller delete.retention.ms of both logs). Copy to a "
            "new destination."
        )


def _check_end(
    source: Log, destination: Log, wanted: PartitionToCopy, first: int, *, is_cleaned: bool
) -> None:
    """Compare what both have at the destination's end, from offset `first` on."""
    ours, theirs = (_last_batch(log, wanted) for log in (destination, source))
    if ours == theirs is not None:
        return
    start = max(first, wanted.start - _WINDOW)
    rows, others = (_records(log, wanted, start) for log in (destination, source))
    shared = rows.keys() & others.keys()
    wrong = min((offset for offset in shared if rows[offset] != others[offset]), default=None)
    if wrong is None and not shared and not is_cleaned and (rows or others):
        wrong = min({*rows, *others})
    if wrong is not None:
        raise InvalidInputError(
            f"{destination.root}: {wanted.name} has another record at offset {wrong} than "
            f"{source.root} (expected a copy, to which nobody else writes). Copy to a new "
            "destination."
        )


def _last_batch(log: Log, wanted: PartitionToCopy) -> tuple[int, int] | None:
    """Return base offset and checksum of the batch before the copy's start; None for a gap."""
    start = wanted.start
    with log.snapshot(wanted.topic, wanted.partition, start=start - 1) as snapshot:
        for chunk in snapshot.chunks(start - 1, start):
            return int(chunk.table.base_offsets[-1]), int(chunk.table.crcs[-1])
    return None


def _records(log: Log, wanted: PartitionToCopy, start: int) -> dict[int, tuple[Any, ...]]:
    """Return the columns of all records from `start` on, by their offsets."""
    import pyarrow as pa

    found: dict[int, tuple[Any, ...]] = {}
    for rows in log.read(
        wanted.topic,
        wanted.partition,
        start,
        wanted.start,
        include_headers=True,
        isolation_level="read_uncommitted",
    ):
        # Compare epoch ms: datetime cannot hold every Kafka timestamp.
        columns = [
            (each.cast(pa.int64()) if pa.types.is_timestamp(each.type) else each).to_pylist()
            for each in rows.columns
        ]
        found.update(
            zip(rows.column("offset").to_pylist(), zip(*columns, strict=True), strict=True)
        )
    return found
