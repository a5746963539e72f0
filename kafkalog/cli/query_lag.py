"""Prints how far a streaming query lags behind the log, from its checkpoint, even while it runs.

For each partition it prints the query's next offset, after its last committed batch. It counts the
offsets from there to the last stable offset, where `read_committed` ends, and to the high
watermark, where `read_uncommitted` ends. It also says whether records that the query needs are
gone: the query will then fail, unless its `failOnDataLoss` is false.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kafkalog.cli.terminal.output import print_json, print_line, print_table

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kafkalog.datasource.checkpoint import QueryCheckpoint
    from kafkalog.datasource.offsets import TopicPartition
    from kafkalog.storage_engine.log.log import Log
    from kafkalog.storage_engine.metadata.state import State


def print_query_lag(
    log: Log, directory: str, topic: str | None, *, is_live: bool, json: bool
) -> None:
    """Print a query's lag; `is_live`: a live broker's checkpoints report old ends."""
    from kafkalog.datasource.checkpoint import read_checkpoint

    checkpoint = read_checkpoint(directory)
    # Read the log after the checkpoint, so that it shows all that a running query has read.
    state = log.state()
    rows = [row for row in _rows(checkpoint, state, is_live) if topic in (None, row["topic"])]
    query = {
        "type": "query",
        "checkpoint": directory,
        "queryId": checkpoint.query_id,
        "committedBatch": _batch(checkpoint.committed_batch),
        "plannedBatch": _batch(checkpoint.planned_batch),
    }
    if json:
        for row in (query, *rows):
            print_json(row)
        return
    running = checkpoint.planned_batch > checkpoint.committed_batch
    print_line(
        f"query {checkpoint.query_id or 'without an id'}  last batch: "
        f"{_batch(checkpoint.committed_batch) if checkpoint.committed_batch >= 0 else 'none'}"
        + (f"  begun: {checkpoint.planned_batch}" if running else "")
    )
    print_line("")
    columns = ["source", "topic", "partition", "next offset", "last stable", "high watermark"]
    names = ["source", "topic", "partition", "nextOffset", "lastStableOffset", "highWatermark"]
    print_table(
        [*columns, "lag", "state"],
        [[row[name] for name in (*names, "lag", "state")] for row in rows],
    )


def _rows(checkpoint: QueryCheckpoint, state: State, is_live: bool) -> Iterator[dict[str, Any]]:
    for source in sorted(checkpoint.planned.keys() | checkpoint.committed.keys()):
        committed = checkpoint.committed.get(source, {})
        planned = checkpoint.planned.get(source, {})
        read = sorted(committed.keys() | planned.keys())
        for partition in (*read, *_unread(read, state)):
            yield {
                "type": "lag",
                "source": source,
                "topic": partition.topic,
                "partition": partition.partition,
                "nextOffset": committed.get(partition),
                "plannedOffset": planned.get(partition),
                **_behind(partition, committed.get(partition), state, is_live),
            }


def _unread(read: list[TopicPartition], state: State) -> list[TopicPartition]:
    """Return the partitions of the same topics that the query has not read yet."""
    from kafkalog.datasource.offsets import TopicPartition

    topics = sorted({partition.topic for partition in read} & state.topics.keys())
    present = (TopicPartition(name, n) for name in topics for n in state.topics[name].numbers())
    return [partition for partition in present if partition not in read]


def _behind(
    partition: TopicPartition, offset: int | None, state: State, is_live: bool
) -> dict[str, Any]:
    from kafkalog.datasource.micro_batch import held_partition

    held = held_partition(partition, state)
    row: dict[str, Any] = dict.fromkeys(
        ("logStartOffset", "lastStableOffset", "highWatermark", "lag", "uncommittedLag")
    )
    if held is None:
        return {**row, "state": "gone"}
    # A query starts a partition that it has not read yet at the first record.
    start = held.log_start_offset if offset is None else offset
    if start > held.high_watermark:
        found = "ahead of the checkpointed end" if is_live else "beyond the end"
    elif start < held.log_start_offset:
        found = f"records lost below {held.log_start_offset}"
    else:
        found = "unread" if offset is None else "behind"
        found = "up to date" if start >= held.last_stable_offset else found
    return {
        "logStartOffset": held.log_start_offset,
        "lastStableOffset": held.last_stable_offset,
        "highWatermark": held.high_watermark,
        "lag": max(held.last_stable_offset - start, 0),
        "uncommittedLag": max(held.high_watermark - start, 0),
        "state": found,
    }


def _batch(number: int) -> int | None:
    return number if number >= 0 else None
