"""Builds logs through kafkalog itself: topics, commits, segments, cleanings, staged records."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Self

import pyarrow as pa

import kafkalog
from kafkalog.cleaner import CleanerConfig, CleanerStats
from kafkalog.cleaner.schedule.manager import clean, clean_filthiest
from kafkalog.log import KafkaLog
from kafkalog.storage_engine.directory.directory_log import DirectoryLog
from kafkalog.storage_engine.log.results import CommitResult
from kafkalog.storage_engine.metadata.writer import Writer, writer_slug
from kafkalog.storage_engine.writing.staged_message import StagedMessage
from kafkalog.storage_engine.writing.staging import StagedWriter
from tests.builders.batch_builder import BuiltBatch, joined

__all__ = ["NOW_MS", "LogBuilder"]

NOW_MS = 1_700_000_000_000
Pair = tuple[str | bytes | None, str | bytes | None]


class LogBuilder:
    """A log, and what a test does to it; an act without another result returns the builder.

    Acts on records are about the topic that was created last, `t` at first. `now_ms` is the time of
    every act that names no other. A `with` gives what `kafkalog.open` returns, and closes it.
    """

    def __init__(self, log: Path | str | DirectoryLog | KafkaLog, *, now_ms: int = NOW_MS) -> None:
        """Open a directory, or go on with a log that is open."""
        self._opened = kafkalog.open(log) if isinstance(log, Path | str) else log
        self._now_ms = now_ms
        self._topic = "t"

    @property
    def engine(self) -> DirectoryLog:
        """The engine of the log; in an object store it can do less."""
        opened = self._opened
        return opened._engine if isinstance(opened, KafkaLog) else opened

    @property
    def log(self) -> KafkaLog:
        """What `kafkalog.open` returned."""
        assert isinstance(self._opened, KafkaLog)
        return self._opened

    def topic(
        self,
        name: str = "t",
        partitions: int = 1,
        *,
        policy: str | None = None,
        exist_ok: bool = False,
        **config: object,
    ) -> Self:
        """Create a topic with Kafka's configs, `_` for `.`; `policy` is its `cleanup.policy`."""
        self._topic = name
        settings = {key.replace("_", "."): str(value) for key, value in config.items()}
        if policy is not None:
            settings["cleanup.policy"] = policy
        self.engine.create_topic(name, partitions, settings, exist_ok=exist_ok, now_ms=self._now_ms)
        return self

    def to(self, topic: str) -> Self:
        """Go on with a topic that exists."""
        self._topic = topic
        return self

    def append(
        self,
        *records: Pair,
        partition: int | Sequence[int] | None = None,
        timestamp_ms: int | None = None,
        now_ms: int | None = None,
        **options: Any,
    ) -> Self:
        """Append records in one commit; to a partition, or to one for each record.

        Without either the partitioner chooses. Without `timestamp_ms` their time is that of the
        commit.
        """
        is_plain = partition is None and timestamp_ms is None
        rows = list(records) if is_plain else _table(records, partition, timestamp_ms)
        self.engine.append(self._topic, rows, now_ms=self._time(now_ms), **options)
        return self

    def append_each(self, *records: Pair, **options: Any) -> Self:
        """Append each record in a commit of its own."""
        return self.commits(([record] for record in records), **options)

    def commits(self, commits: Iterable[Iterable[Pair]], **options: Any) -> Self:
        """Append lists of records, each in a commit of its own."""
        for records in commits:
            self.append(*records, **options)
        return self

    def fill(
        self, count: int = 1, *, key: str = "key", value: str = "v" * 20, **options: Any
    ) -> Self:
        """Append one record so many times, each in a commit of its own."""
        return self.append_each(*[(key, value)] * count, **options)

    def rounds(
        self,
        count: int,
        keys: Iterable[str],
        *,
        value: Callable[[int], str] = str,
        **options: Any,
    ) -> Self:
        """Write all keys again and again, a commit for each round; a value is of its round."""
        names = [*keys]
        rounds = ([(key, value(number)) for key in names] for number in range(count))
        return self.commits(rounds, **options)

    def random_commits(
        self,
        rng: random.Random,
        count: int,
        *,
        keys: int,
        rows_max: int,
        tombstones: float = 0.2,
        **options: Any,
    ) -> Self:
        """Append commits of up to so many records of drawn keys, a share of them tombstones."""
        for number in range(count):
            records = [
                (
                    f"k{rng.randrange(keys)}",
                    None if rng.random() < tombstones else f"value {number} of row {row}",
                )
                for row in range(rng.randrange(1, rows_max + 1))
            ]
            self.append(*records, **options)
        return self

    def append_raw(self, *batches: BuiltBatch, partition: int = 0) -> Self:
        """Append finished batches, as a follower does."""
        data = joined(batches)
        self.engine.append_raw(self._topic, partition, data, now_ms=self._now_ms)
        return self

    def roll(self, partition: int = 0) -> Self:
        """Begin a new segment."""
        with self.engine.transaction() as transaction:
            transaction.roll(self._topic, partition, self._now_ms)
            transaction.publish(self._now_ms)
        return self

    def clean(self, *, now_ms: int | None = None, **options: Any) -> Self:
        """Clean the topic by force; no partition may fail."""
        now_ms = self._time(now_ms)
        found = clean(self.engine, self._topic, force=True, now_ms=now_ms, **options)
        assert found and [stats.error for stats in found] == [None] * len(found)
        return self

    def one_round(
        self, now_ms: int | None = None, config: CleanerConfig | None = None, **options: Any
    ) -> CleanerStats | None:
        """Clean one round of the filthiest partition that is due; None if none is."""
        chosen = CleanerConfig() if config is None else config
        return clean_filthiest(self.engine, now_ms=self._time(now_ms), config=chosen, **options)

    def set_state(self, **fields: int) -> Self:
        """Record other fields of partition 0 in the journal."""
        with self.engine.transaction() as transaction:
            transaction.change_partition(self._topic, 0, **fields)
            transaction.publish(self._now_ms)
        return self

    def stage(
        self,
        *records: Pair,
        partition: int | None = None,
        in_memory: bool = False,
        **options: Any,
    ) -> StagedMessage:
        """Stage records as a task does; a commit has to follow."""
        return self.stage_tables([_table(records, partition)], in_memory=in_memory, **options)

    def stage_tables(
        self, tables: Iterable[pa.RecordBatch], *, in_memory: bool = False, **options: Any
    ) -> StagedMessage:
        """Stage Arrow batches as a task does; where that fails, discard what it has staged."""
        place = None if in_memory else self.engine
        writer = StagedWriter(place, self.engine.state(), now_ms=lambda: self._now_ms, **options)
        try:
            for rows in tables:
                writer.append(self._topic, rows)
            return writer.finish()
        except BaseException:
            writer.discard()
            raise

    def commit(
        self, *records: Pair, writer: Writer, now_ms: int | None = None, **staging: Any
    ) -> CommitResult:
        """Stage records, and commit them as a batch of a writer; return what came of it."""
        slug = writer_slug(writer.id, writer.target)
        staged = self.stage(*records, writer_slug=slug, batch_id=writer.batch_id, **staging)
        return self.engine.commit([staged], writer=writer, now_ms=self._time(now_ms))

    def close(self) -> Path:
        """Close the log; return its directory."""
        self._opened.close()
        return self.engine.root

    def __enter__(self) -> KafkaLog:
        return self.log

    def __exit__(self, *_: object) -> None:
        self._opened.close()

    def _time(self, now_ms: int | None) -> int:
        return self._now_ms if now_ms is None else now_ms


def _table(
    records: Sequence[Pair],
    partition: int | Sequence[int] | None = None,
    timestamp_ms: int | None = None,
) -> pa.RecordBatch:
    """Return records as Arrow columns, with partitions and a timestamp where they are given."""
    count = len(records)
    columns = {
        "key": pa.array([_bytes(key) for key, _ in records], pa.binary()),
        "value": pa.array([_bytes(value) for _, value in records], pa.binary()),
    }
    if partition is not None:
        numbers = [partition] * count if isinstance(partition, int) else [*partition]
        columns["partition"] = pa.array(numbers, pa.int32())
    if timestamp_ms is not None:
        columns["timestamp"] = pa.array([timestamp_ms] * count, pa.timestamp("ms", "UTC"))
    return pa.RecordBatch.from_pydict(columns)


def _bytes(text: str | bytes | None) -> bytes | None:
    return text.encode() if isinstance(text, str) else text
