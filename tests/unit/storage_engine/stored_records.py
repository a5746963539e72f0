"""Records in an object store for tests: each append is an object, and the commit that adds it."""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa

from kafkalog.storage_engine.object_store.client import ObjectClient
from kafkalog.storage_engine.object_store.commit_log import CommitLog
from kafkalog.storage_engine.object_store.store_state import Extent, StoreChange, StoreState
from kafkalog.storage_engine.records.records import scan_batches
from kafkalog.storage_engine.writing.staging import StagedWriter

NOW_MS = 1_700_000_000_000


def append(
    log: CommitLog, client: ObjectClient, rows: pa.RecordBatch, topic: str = "t", **options: Any
) -> StoreState:
    """Append rows in one commit."""
    writer = StagedWriter(None, log.poll().log, now_ms=lambda: NOW_MS, **options)
    writer.append(topic, rows)
    message = writer.finish()
    name = f"data/{log.state.number}/{secrets.token_hex(8)}.mixed"
    client.put_unique(name, message.data)

    def prepare(state: StoreState) -> Mapping[str, Any]:
        change, extents = StoreChange(), []
        known = state.log.topic(topic)
        for run in sorted(message.runs, key=lambda run: run.partition):
            before = known.partitions[run.partition]
            end = before.high_watermark + run.rows
            after = dataclasses.replace(before, high_watermark=end, last_stable_offset=end)
            change.partition(topic, run.partition, after)
            table, _, _ = scan_batches(message.data[run.position : run.position + run.size])
            newest = int(np.max(table.max_timestamps))
            numbers = (run.position, run.size, before.high_watermark, end, before.leader_epoch)
            given = (known.topic_id, run.partition, *numbers, newest)
            extents.append(Extent(*given[: len(Extent.__slots__)]))
        change.add(name, len(message.data), extents)
        return change.record(NOW_MS)

    return log.commit(prepare)


def rows_of(
    count: int, partitions: int = 1, *, first: int = 0, timestamp_ms: int = NOW_MS, size: int = 10
) -> pa.RecordBatch:
    """Return rows that go to each partition in turn."""
    numbers = range(first, first + count)
    return pa.RecordBatch.from_pydict(
        {
            "key": pa.array([b"k%d" % (number % 7) for number in numbers], pa.binary()),
            "value": pa.array([b"%0*d" % (size, number) for number in numbers], pa.binary()),
            "partition": pa.array([number % partitions for number in numbers], pa.int32()),
            "timestamp": pa.array(
                [timestamp_ms + number for number in numbers], pa.timestamp("ms", "UTC")
            ),
        }
    )
