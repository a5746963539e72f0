"""A copy of the log of the model test, in an object store, and a copy of that in a directory.

What a cleaner of the store does to it, and Spark's tasks that read parts of it, are tried there.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pyarrow as pa

from kafkalog.cleaner import CleanerConfig
from kafkalog.cleaner.key_index.key_lookup import KeyLookup
from kafkalog.cleaner.key_index.latest_view import latest
from kafkalog.cleaner.schedule import manager
from kafkalog.datasource import stored_partition
from kafkalog.datasource.source import KafkaLogDataSource
from kafkalog.inspection.verify_store import verify_store
from kafkalog.schema import changelog_schema
from kafkalog.storage_engine.copying import copied_batches
from kafkalog.storage_engine.copying.copy import copy
from kafkalog.storage_engine.directory.directory_log import DirectoryLog
from kafkalog.storage_engine.log.log import Log
from kafkalog.storage_engine.metadata.state import PartitionState
from kafkalog.storage_engine.object_store.object_log import ObjectLog
from kafkalog.storage_engine.transactions.producers import ProducerEntry
from tests.torture.model_draws import EVERY_KEY
from tests.torture.model_log import Row, Topic
from tests.torture.scratch import memory_disk
from tests.unit.storage_engine.store_log import new_object_log

__all__ = ["CopiedLog", "copied_log", "copy_back", "rows_of"]


class CopiedLog:
    """A copy of a log, and what it holds."""

    def __init__(self, log: Log) -> None:
        self.log = log

    def states(self, topic: str) -> Sequence[PartitionState]:
        """Return the states of a topic's partitions."""
        return self.log.describe(topic).partitions

    def rows(self, topic: str, partition: int, *, committed: bool = False) -> list[Row]:
        """Return all records of a partition."""
        level = "read_committed" if committed else "read_uncommitted"
        return rows_of(self.log.read(topic, partition, isolation_level=level))

    def task_rows(self, topic: str, partition: int, start: int, end: int) -> list[Row]:
        """Return the committed records of a range, as Spark's tasks read them."""
        offsets = f'{{"{topic}":{{"{partition}":%d}}}}'
        options = {
            "path": str(self.log.root),
            "assign": f'{{"{topic}":[{partition}]}}',
            "startingOffsets": offsets % start,
            "endingOffsets": offsets % end,
        }
        source = KafkaLogDataSource(options=options)
        reader = source.reader(source.schema())
        return [row for task in reader.partitions() for row in rows_of(reader.read(task))]

    def latest(self, topic: str, partition: int, budget: int) -> list[Row]:
        """Return the latest record of every key."""
        with self.log.snapshot(topic, partition, whole=True) as snapshot:
            end = snapshot.state.high_watermark
            found = latest(snapshot, end, budget_bytes=budget, schema=changelog_schema())
            return rows_of(found)

    def lookups(self, topic: str, keys: Sequence[bytes], partition: int) -> dict[bytes, Row]:
        """Return the latest record of each key that has one, looked up all at once."""
        with KeyLookup(self.log, topic) as lookup:
            found = lookup.get_many(keys, partition=partition)
        return {
            one.key: Row(one.offset, one.timestamp_ms, one.key, one.value)
            for one in found.values()
            if one is not None
        }

    def producers(self, topic: str, partition: int) -> dict[int, ProducerEntry]:
        """Return the producers at a partition's end."""
        found = self.log.producers(topic, partition)
        return {} if found is None else found.entries

    def clean(self, config: CleanerConfig, now_ms: int, *, force: bool) -> None:
        """Regroup, merge and clean what is due, or with `force` everything."""
        assert isinstance(self.log, ObjectLog)
        for stats in manager.clean(self.log, now_ms=now_ms, config=config, force=force):
            assert stats.error is None, stats.error

    def check(self, topics: Mapping[str, Topic], start: int, end: int, budget: int) -> None:
        """Hold a store against the model; tasks read from eighth `start` to eighth `end`."""
        for name, topic in topics.items():
            states = self.states(name)
            for number, (part, state) in enumerate(zip(topic.parts, states, strict=True)):
                stable = state.last_stable_offset
                part.check_offsets((state.log_start_offset, stable, state.high_watermark))
                everything = self.rows(name, number)
                for row in everything:
                    assert row == part.written.get(row.offset), f"nobody wrote {row}"
                committed = self.rows(name, number, committed=True)
                part.check_read(committed, everything, part.log_start, part.end)
                span = stable - part.log_start
                first, last = sorted(part.log_start + span * eighth // 8 for eighth in (start, end))
                found = self.task_rows(name, number, first, last)
                part.check_read(found, everything, first, last)
                expected = part.latest()
                rows = self.latest(name, number, budget)
                assert {row.key: row for row in rows} == expected, f"{expected}, found {rows}"
                many = self.lookups(name, EVERY_KEY, number)
                assert many == expected, f"lookups: expected {expected}, found {many}"
        assert isinstance(self.log, ObjectLog)
        damage = [str(one) for one in verify_store(self.log, deep=True) if one.is_damage]
        assert not damage, damage


@contextmanager
def copied_log(log: Log, commit_bytes: int, later: int, now_ms: int) -> Iterator[CopiedLog]:
    """Copy a log into a new store in memory, with commits of about so many bytes.

    Spark's tasks know `later` segment objects after their ranges.
    """
    with (
        mock.patch.object(copied_batches, "COMMIT_BYTES", commit_bytes),
        mock.patch.object(stored_partition, "LATER", later),
        mock.patch.object(stored_partition, "SPLIT_BYTES", 1000),
    ):
        store = new_object_log()
        copy(log, store, now_ms=now_ms)
        yield CopiedLog(store)


@contextmanager
def copy_back(store: CopiedLog, now_ms: int) -> Iterator[CopiedLog]:
    """Copy a store's log into a new directory."""
    root = Path(tempfile.mkdtemp(prefix="kafkalog-model-", dir=memory_disk()))
    try:
        with DirectoryLog(root) as log:
            copy(store.log, log, now_ms=now_ms)
            yield CopiedLog(log)
    finally:
        shutil.rmtree(root, ignore_errors=True)


def rows_of(batches: Iterator[pa.RecordBatch]) -> list[Row]:
    """Return the records of some batches."""
    found: list[Row] = []
    for rows in batches:
        times = rows["timestamp"].cast(pa.int64()).to_pylist()
        columns: Any = (rows[name].to_pylist() for name in ("offset", "key", "value"))
        found += [
            Row(offset, time // 1000, key, value)
            for time, (offset, key, value) in zip(times, zip(*columns, strict=True), strict=True)
        ]
    return found
