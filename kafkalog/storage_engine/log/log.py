"""The acts of a log that are the same wherever it lies, made of a few that are not.

`DirectoryLog` and `ObjectLog` add those few: `change`, `commit`, `abort` and retention.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, TypeAlias, TypeVar

from kafkalog.errors import InvalidInputError
from kafkalog.storage_engine.format import layout
from kafkalog.storage_engine.format.whole_number import whole_number
from kafkalog.storage_engine.fs import clock
from kafkalog.storage_engine.log.readable_log import ReadableLog
from kafkalog.storage_engine.log.results import CommitResult, RetentionStats
from kafkalog.storage_engine.metadata.log_change import LogChange
from kafkalog.storage_engine.metadata.new_topic import NewTopic
from kafkalog.storage_engine.metadata.state import EMPTY, TopicState
from kafkalog.storage_engine.metadata.writer import Writer
from kafkalog.storage_engine.reading import time_offsets
from kafkalog.storage_engine.records.record_batches import record_batches
from kafkalog.storage_engine.writing.staged_message import StagedMessage
from kafkalog.storage_engine.writing.staging import BATCH_SIZE, StagedWriter

if TYPE_CHECKING:
    import pyarrow as pa

    from kafkalog.storage_engine.reading.time_offsets import TimeOffset
    from kafkalog.storage_engine.writing.copied_run import CopiedRun

Source: TypeAlias = Path | str | IO[bytes] | bytes | bytearray | memoryview
"""Whole record batches: a file, a stream, or their bytes."""
_Result = TypeVar("_Result")


class Log(ReadableLog):
    """A log with all that can be done to it; a context manager."""

    @abstractmethod
    def change(self, work: Callable[[LogChange], _Result], *, now_ms: int) -> _Result:
        """Make the changes that `work` drafts, in one commit; return what it returns.

        `work` may be called again, upon a later state.
        """

    @abstractmethod
    def commit(
        self,
        staged: Sequence[StagedMessage],
        *,
        writer: Writer | None = None,
        create: NewTopic | None = None,
        reset_writer: bool = False,
        now_ms: int | None = None,
    ) -> CommitResult:
        """Append what tasks have staged, at once or not at all.

        A batch that its writer has committed already is skipped. `create` says how to create topics
        that do not exist; without it they are an error. Raises CommitConflictError for an
        older batch (`reset_writer` lets it pass), and StorageError for staged files that are not
        what their tasks said. Raises CommitInDoubtError when only the next holder can tell.
        """

    @abstractmethod
    def abort(
        self,
        staged: Sequence[StagedMessage | None],
        *,
        writer: Writer | None = None,
        prefix: str | None = None,
        run: int | None = None,
        now_ms: int | None = None,
    ) -> bool:
        """Remove what a failed batch staged; returns False, and keeps all, when it is published."""

    def append_raw(
        self, topic: str, partition: int, source: Source, *, now_ms: int | None = None
    ) -> CommitResult:
        """Append whole record batches as they are, in one atomic, synced commit.

        `KafkaLog.append_raw` says what `source` is, and when nothing is appended. Raises
        InvalidInputError and CorruptBatchError.
        """
        raise only_in_directory(self.root)

    @abstractmethod
    def append_copied(self, runs: Sequence[CopiedRun], *, now_ms: int) -> int:
        """Append runs of another log, of several partitions, in one commit; return their records.

        Raises StorageError for a run that does not follow its partition's log.
        """

    @abstractmethod
    def sweep_staged(self, *, now_ms: int) -> int:
        """Remove what is staged and so old that no living query can name it; return how many."""

    @abstractmethod
    def sync(self, *, now_ms: int | None = None) -> None:
        """Make durable what relaxed commits (`flush.messages`, `flush.ms`) have left unsynced."""

    @abstractmethod
    def apply_retention(
        self,
        topic: str | None = None,
        *,
        now_ms: int | None = None,
        skips: Collection[tuple[str, int]] = (),
    ) -> list[RetentionStats]:
        """With the policy delete: delete what `retention.ms` and `retention.bytes` do not keep.

        The partitions `skips`, as (topic, partition), are left alone. Returns one entry per
        partition that lost records, or could not.
        """

    @abstractmethod
    def neglect(self, topic: str, now_ms: int) -> str | None:
        """Say that no cleaner works on a topic, and what to do; None without a sign of it.

        Called after each commit, so it sends no request. Raises StorageError, OSError.
        """

    @abstractmethod
    def delete_records(
        self, topic: str, partition: int, before: int, *, now_ms: int | None = None
    ) -> int:
        """Let a partition begin at offset `before` (-1: at its end); returns where it begins.

        Raises InvalidInputError unless `cleanup.policy` has delete, and OffsetOutOfRangeError.
        """

    def create_topic(
        self,
        name: str,
        partitions: int = 1,
        config: Mapping[str, str] | None = None,
        *,
        exist_ok: bool = False,
        now_ms: int | None = None,
    ) -> TopicState:
        """Create a topic with Kafka's topic configs; `cleanup.policy` is `compact` unless given.

        Raises InvalidInputError for a name Kafka forbids, an unknown config, or an existing topic;
        with `exist_ok` an existing topic is returned as it is.
        """
        if exist_ok and (known := self.state().topics.get(name)) is not None:
            return known

        def create(change: LogChange) -> TopicState:
            if exist_ok and name in change.state.topics:
                return change.state.topics[name]
            return change.create_topic(name, NewTopic.of(partitions, config or {}))

        return self.change(create, now_ms=now_of(now_ms))

    def topics(self) -> list[str]:
        """Return the names of all topics, sorted."""
        return sorted(self.state().topics)

    def alter_topic(
        self,
        name: str,
        config: Mapping[str, str | None] = EMPTY,
        partitions: int | None = None,
        *,
        keys_may_move: bool = False,
        now_ms: int | None = None,
    ) -> TopicState:
        """Set or delete (None) configs of a topic, and add partitions; the rest stays."""

        def alter(change: LogChange) -> TopicState:
            return change.alter_topic(name, config, partitions, keys_may_move=keys_may_move)

        return self.change(alter, now_ms=now_of(now_ms))

    def delete_topic(self, name: str, *, now_ms: int | None = None) -> None:
        """Delete a topic; one of the same name can be created at once.

        `KafkaLog.delete_topic` says when its records go. Raises UnknownTopicError.
        """
        at_ms = now_of(now_ms)
        self.change(lambda change: change.delete_topic(name, at_ms), now_ms=at_ms)

    def offsets(self, topic: str) -> dict[int, tuple[int, int]]:
        """Return {partition: (log start offset, high watermark)}."""
        present = self.describe(topic).present()
        return {n: (p.log_start_offset, p.high_watermark) for n, p in present}

    def append(
        self,
        topic: str,
        records: Any,
        *,
        drop_extra: bool = False,
        now_ms: int | None = None,
        batch_size: int = BATCH_SIZE,
    ) -> CommitResult:
        """Append records in one atomic, synced commit: all of them, or none.

        `KafkaLog.append` lists the forms of `records`. Raises InvalidInputError for any other form,
        and for a record that the topic does not take.
        """
        writer = StagedWriter(
            None, self.state(), now_ms=lambda: now_of(now_ms), batch_size=batch_size
        )
        for rows in record_batches(records, drop_extra=drop_extra):
            writer.append(topic, rows)
        return self.commit([writer.finish()], now_ms=now_ms)

    def read(
        self,
        topic: str,
        partition: int,
        start: int | None = None,
        end: int | None = None,
        *,
        include_headers: bool = False,
        columns: Sequence[str] | None = None,
        isolation_level: str = time_offsets.READ_COMMITTED,
    ) -> Iterator[pa.RecordBatch]:
        """Yield the records of `[start, end)`, by default from log start to the last stable offset.

        Nothing at or above that is read, nor are aborted transactions; with read_uncommitted both
        are, up to the high watermark. Raises OffsetOutOfRangeError, which names the valid range,
        and StorageError for records that are gone.
        """
        from kafkalog.schema import chosen_columns

        schema = chosen_columns(columns, include_headers=include_headers)
        start = None if start is None else whole_number("start", start)
        end = None if end is None else whole_number("end", end)
        with self.snapshot(topic, partition, start=start) as snapshot:
            first = snapshot.state.log_start_offset if start is None else start
            snapshot.check_not_lost(first, snapshot.state.high_watermark if end is None else end)
            visible = time_offsets.end_offset(snapshot.state, isolation_level)
            last = max(first, visible) if end is None else end
            if first <= last <= snapshot.state.high_watermark:
                last = max(first, min(last, visible))
            is_committed = isolation_level == time_offsets.READ_COMMITTED
            yield from snapshot.read(first, last, schema=schema, read_committed=is_committed)

    def offset_for_time(
        self, topic: str, ms: int, *, isolation_level: str = time_offsets.READ_COMMITTED
    ) -> dict[int, TimeOffset | None]:
        """Return per partition the offset and timestamp of the first record since `ms`, or None.

        `KafkaLog.offset_for_time` lists the meanings of a negative `ms`.
        """
        ms = whole_number("ms", ms)
        return {
            partition: time_offsets.offset_for_time(self, topic, partition, ms, isolation_level)
            for partition in self.describe(topic).numbers()
        }


def only_in_directory(root: Path | str) -> InvalidInputError:
    """Return the error of a log in an object store that is asked for what only a directory has."""
    return InvalidInputError(
        f"{root}: a log in an object store cannot do this (expected a log directory). "
        "Use it for topics, records, cleaning, status and verify."
    )


def now_of(now_ms: int | None) -> int:
    """Return a given time, or the clock's. Raises InvalidInputError if no commit can have it."""
    if now_ms is None:
        return clock.now_ms()
    if not 0 <= (given := whole_number("now_ms", now_ms)) <= layout.INT64_MAX:
        raise InvalidInputError(
            f"now_ms: expected epoch milliseconds from 0 to {layout.INT64_MAX}, found {given}"
        )
    return given
