"""A log directory: its topics, its commits, its reads.

Files are the truth, and no process is special: any number of processes may open the same root, read
it, and take turns at writing. Opening reads one small file and scans nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from kafkalog.errors import LockedByBrokerError, StorageError
from kafkalog.storage_engine.format import layout
from kafkalog.storage_engine.fs import clock
from kafkalog.storage_engine.metadata import checkpoints
from kafkalog.storage_engine.metadata.new_topic import NewTopic
from kafkalog.storage_engine.metadata.state import TopicState
from kafkalog.storage_engine.metadata.writer import Writer, last_batch
from kafkalog.storage_engine.reading import time_offsets
from kafkalog.storage_engine.records.record_batches import record_batches
from kafkalog.storage_engine.store import Store
from kafkalog.storage_engine.writing import commit, retention, topic_deletion
from kafkalog.storage_engine.writing.commit import CommitResult
from kafkalog.storage_engine.writing.retention import RetentionStats
from kafkalog.storage_engine.writing.staging import BATCH_SIZE, StagedMessage, StagedWriter

if TYPE_CHECKING:
    import pyarrow as pa

    from kafkalog.storage_engine.reading.time_offsets import TimeOffset
    from kafkalog.storage_engine.writing.raw_append import Source

__all__ = [
    "CommitResult",
    "Engine",
    "OpenedLog",
    "RetentionStats",
    "Writer",
    "engine_of",
]

_logger = logging.getLogger(__name__)


class Engine(Store):
    """A log directory with all that can be done to it; a context manager.

    Raises what `Store` raises.
    """

    def __init__(
        self,
        path: str | Path | Sequence[str | Path],
        *,
        read_only: bool = False,
        create: bool = True,
    ) -> None:
        super().__init__(path, read_only=read_only, create=create)
        if not read_only and not self.is_brokers and self.state().deleting:
            topic_deletion.try_deletions(self, now_ms=_now(None))

    # --- topics ----------------------------------------------------------------------------------

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
        if exist_ok and name in self.state().topics:
            return self.state().topics[name]

        def create() -> TopicState:
            with self.transaction() as transaction:
                if exist_ok and name in transaction.state.topics:
                    return transaction.state.topics[name]
                transaction.create_topic(name, NewTopic.of(partitions, config or {}))
                return transaction.publish(_now(now_ms)).topics[name]

        return topic_deletion.with_directories_away(self, create, now_ms=_now(now_ms))

    def topics(self) -> list[str]:
        """Return the names of all topics, sorted."""
        return sorted(self.state().topics)

    def alter_topic(
        self, name: str, config: Mapping[str, str], *, now_ms: int | None = None
    ) -> TopicState:
        """Set configs of a topic; the others stay."""
        with self.transaction() as transaction:
            transaction.alter_topic(name, {**transaction.topic(name).config, **config})
            return transaction.publish(_now(now_ms)).topics[name]

    def delete_topic(self, name: str, *, now_ms: int | None = None) -> None:
        """Delete a topic; one of the same name can be created at once.

        `KafkaLog.delete_topic` says when its directories go. Raises UnknownTopicError.
        """
        with self.transaction() as transaction:
            transaction.delete_topic(name, _now(now_ms))
            transaction.publish(_now(now_ms))
        topic_deletion.try_deletions(self, now_ms=_now(now_ms), wait_for=name)

    def offsets(self, topic: str) -> dict[int, tuple[int, int]]:
        """Return {partition: (log start offset, high watermark)}."""
        present = self.describe(topic).present()
        return {n: (p.log_start_offset, p.high_watermark) for n, p in present}

    # --- writing ---------------------------------------------------------------------------------

    def append(
        self,
        topic: str,
        records: Any,
        *,
        now_ms: int | None = None,
        batch_size: int = BATCH_SIZE,
    ) -> CommitResult:
        """Append records in one atomic, synced commit: all of them, or none.

        `KafkaLog.append` lists the forms of `records`. Raises InvalidInputError for any other form,
        and for a record that the topic does not take.
        """
        writer = StagedWriter(
            None, self.state(), now_ms=lambda: _now(now_ms), batch_size=batch_size
        )
        for rows in record_batches(records):
            writer.append(topic, rows)
        return self.commit([writer.finish()], now_ms=now_ms)

    def append_raw(
        self, topic: str, partition: int, source: Source, *, now_ms: int | None = None
    ) -> CommitResult:
        """Append whole record batches as they are, in one atomic, synced commit.

        `KafkaLog.append_raw` says what `source` is, and when nothing is appended. Raises
        InvalidInputError and CorruptBatchError.
        """
        from kafkalog.storage_engine.writing import raw_append

        self.check_writable()
        self.check_partition(topic, partition)
        return raw_append.append_raw(self, topic, partition, source, now_ms=_now(now_ms))

    def commit(
        self,
        staged: Sequence[StagedMessage],
        *,
        writer: Writer | None = None,
        create: NewTopic | None = None,
        reset_writer: bool = False,
        now_ms: int | None = None,
    ) -> CommitResult:
        """Append what tasks have staged, at once or not at all, and remove the staged files.

        A batch that its writer has committed already is skipped. `create` says how to create topics
        that do not exist; without it they are an error. Raises CommitConflictError for an
        older batch (`reset_writer` lets it pass), and StorageError for staged files that are not
        what their tasks said. Raises CommitInDoubtError when only the next holder can tell.
        """
        now_ms = _now(now_ms)

        def work() -> CommitResult:
            return commit.commit_staged(
                self,
                staged,
                writer=writer,
                create=create,
                reset_writer=reset_writer,
                now_ms=now_ms,
            )

        return topic_deletion.with_directories_away(self, work, now_ms=now_ms)

    def abort(
        self,
        staged: Sequence[StagedMessage | None],
        *,
        writer: Writer | None = None,
        prefix: str | None = None,
        run: int | None = None,
        now_ms: int | None = None,
    ) -> bool:
        """Remove what a failed batch staged; returns False, and keeps all, when it is published.

        Spark calls abort also after a commit that failed. The journal is therefore read first,
        and decides a commit in doubt. `prefix` names the staged files of a batch without writer,
        `run` those of one run (`layout.parse_staged`). The files of other runs stay.
        """
        with self.transaction() as transaction:
            if writer is not None:
                known = last_batch(transaction.state, writer, _now(now_ms))
                if known is not None and known.batch_id == writer.batch_id:
                    return False
            commit.remove_aborted(self.root, transaction.state, staged, writer, prefix, run=run)
            return True

    def sweep_staged(self, *, now_ms: int) -> int:
        """Remove staged files so old that no living query can name them; returns how many."""
        return commit.sweep_staged(self.root, self.state(), now_ms=now_ms)

    def sync(self, *, now_ms: int | None = None) -> None:
        """Make durable what relaxed commits (`flush.messages`, `flush.ms`) have left unsynced."""
        with self.transaction() as transaction:  # settles a rewrite that died unsynced, too
            if transaction.state.unsynced:
                transaction.publish(_now(now_ms))

    # --- deleting --------------------------------------------------------------------------------

    def apply_retention(
        self, topic: str | None = None, *, now_ms: int | None = None
    ) -> list[RetentionStats]:
        """With the policy delete: delete what `retention.ms` and `retention.bytes` do not keep.

        With any policy segments wholly below the log start go. The background cleaner does the
        same. Returns one entry per partition that lost segments, or could not.
        """
        self.check_writable()
        return retention.apply_retention(self, topic, now_ms=_now(now_ms))

    def delete_records(
        self, topic: str, partition: int, before: int, *, now_ms: int | None = None
    ) -> int:
        """Let a partition begin at offset `before` (-1: at its end); returns where it begins.

        Raises InvalidInputError unless `cleanup.policy` has delete, and OffsetOutOfRangeError.
        """
        self.check_partition(topic, partition)
        return retention.delete_records(self, topic, partition, before, now_ms=_now(now_ms))

    # --- reading ---------------------------------------------------------------------------------

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
        are, up to the high watermark. Raises OffsetOutOfRangeError, which names the valid range.
        """
        from kafkalog.schema import chosen_columns

        schema = chosen_columns(columns, include_headers=include_headers)
        with self.snapshot(topic, partition, start=start) as snapshot:
            first = snapshot.state.log_start_offset if start is None else start
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
        return {
            partition: time_offsets.offset_for_time(self, topic, partition, ms, isolation_level)
            for partition, _ in self.describe(topic).present()
        }

    def close(self) -> None:
        """Sync what relaxed commits left, and write Kafka's checkpoint files; no writes after."""
        if self._is_closed or self.read_only or not (self.root / layout.COMMIT).exists():
            return
        try:
            with self.transaction() as transaction:
                if transaction.state.unsynced:
                    transaction.publish(_now(None))
                checkpoints.write_root_checkpoints(self.root, transaction.state)
        except (StorageError, LockedByBrokerError, OSError) as fault:
            _logger.warning("%s: checkpoints were not written at close: %s", self.root, fault)
        super().close()


class OpenedLog(Protocol):
    """The log that `kafkalog.open` returns, as the rooms below it see it."""

    @property
    def _engine(self) -> Engine: ...


def engine_of(log: Engine | OpenedLog) -> Engine:
    """Return the engine of a log that `kafkalog.open` returned; an engine is its own."""
    return log if isinstance(log, Engine) else log._engine


def _now(now_ms: int | None) -> int:
    return clock.now_ms() if now_ms is None else now_ms
