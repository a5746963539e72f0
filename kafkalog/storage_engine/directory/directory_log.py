"""A log directory: its topics, its commits, its reads.

Files are the truth, and no process is special: any number of processes may open the same root, read
it, and take turns at writing. Opening reads one small file and scans nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from kafkalog.errors import CorruptLogError, LockedByBrokerError, LogMovedError, StorageError
from kafkalog.storage_engine.broker import owner
from kafkalog.storage_engine.directory import commit, retention, topic_deletion
from kafkalog.storage_engine.directory.readable_directory import ReadableDirectory
from kafkalog.storage_engine.format import layout
from kafkalog.storage_engine.fs import files
from kafkalog.storage_engine.log.log import Log, Source, now_of
from kafkalog.storage_engine.log.results import CommitResult, RetentionStats
from kafkalog.storage_engine.metadata import checkpoints
from kafkalog.storage_engine.metadata.log_change import LogChange
from kafkalog.storage_engine.metadata.new_topic import NewTopic
from kafkalog.storage_engine.metadata.writer import Writer, is_committed
from kafkalog.storage_engine.writing.staged_message import StagedMessage

if TYPE_CHECKING:
    from kafkalog.storage_engine.writing.copied_run import CopiedRun

_Result = TypeVar("_Result")
_logger = logging.getLogger(__name__)


class DirectoryLog(ReadableDirectory, Log):
    """A log directory with all that can be done to it; a context manager.

    Raises what `ReadableDirectory` raises.
    """

    def __init__(
        self,
        path: str | Path | Sequence[str | Path],
        *,
        read_only: bool = False,
        create: bool = True,
    ) -> None:
        super().__init__(path, read_only=read_only, create=create)
        if self._brokers is not None:
            owner.note_copies(self._brokers)
        if not read_only and not self.is_brokers and self.state().deleting:
            topic_deletion.try_deletions(self, now_ms=now_of(None))

    def change(self, work: Callable[[LogChange], _Result], *, now_ms: int) -> _Result:
        """Make the changes that `work` drafts, in one commit; return what it returns."""

        def changed() -> _Result:
            with self.transaction() as transaction:
                result = work(transaction)
                if transaction.is_changed:
                    transaction.publish(now_ms)
                return result

        return topic_deletion.with_directories_away(self, changed, now_ms=now_ms)

    def delete_topic(self, name: str, *, now_ms: int | None = None) -> None:
        """Delete a topic, as `Log` says, and what of its directories can go at once."""
        super().delete_topic(name, now_ms=now_ms)
        topic_deletion.try_deletions(self, now_ms=now_of(now_ms), wait_for=name)

    def append_raw(
        self, topic: str, partition: int, source: Source, *, now_ms: int | None = None
    ) -> CommitResult:
        """Append whole record batches as they are: see `Log`."""
        from kafkalog.storage_engine.directory import raw_append

        self.check_writable()
        self.check_partition(topic, partition)
        return raw_append.append_raw(self, topic, partition, source, now_ms=now_of(now_ms))

    def append_copied(self, runs: Sequence[CopiedRun], *, now_ms: int) -> int:
        """Append runs of another log in one commit, as raw batches; return their records."""
        from kafkalog.storage_engine.directory import raw_append

        return raw_append.append_copied(self, runs, now_ms=now_ms)

    def commit(
        self,
        staged: Sequence[StagedMessage],
        *,
        writer: Writer | None = None,
        create: NewTopic | None = None,
        reset_writer: bool = False,
        now_ms: int | None = None,
    ) -> CommitResult:
        """Append what tasks have staged, as `Log` says, and remove the staged files."""
        now_ms = now_of(now_ms)

        def work() -> CommitResult:
            return commit.commit_staged(
                self, staged, writer=writer, create=create, reset_writer=reset_writer, now_ms=now_ms
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
            if writer is not None and is_committed(transaction.state, writer, now_of(now_ms)):
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
                transaction.publish(now_of(now_ms))

    def apply_retention(
        self,
        topic: str | None = None,
        *,
        now_ms: int | None = None,
        skips: Collection[tuple[str, int]] = (),
    ) -> list[RetentionStats]:
        """Delete what retention does not keep; with any policy what lies below the log start."""
        self.check_writable()
        return retention.apply_retention(self, topic, now_ms=now_of(now_ms), skips=skips)

    def neglect(self, topic: str, now_ms: int) -> str | None:
        """Say that closed segments have been dirty for long, and that nobody cleans them."""
        from kafkalog.storage_engine.directory.neglect import neglect

        return neglect(self, topic, now_ms)

    def delete_records(
        self, topic: str, partition: int, before: int, *, now_ms: int | None = None
    ) -> int:
        """Let a partition begin at offset `before`, as `Log` says; return where it begins."""
        self.check_partition(topic, partition)
        return retention.delete_records(self, topic, partition, before, now_ms=now_of(now_ms))

    def close(self) -> None:
        """Sync what relaxed commits left, and write Kafka's checkpoint files; no writes after."""
        if self._is_closed or self.read_only:
            return
        try:
            self.check_is_here()
        except LogMovedError as fault:  # an error here would hide the one that ended the work
            _logger.warning("%s", fault)
            super().close()
            return
        if not (self.root / layout.COMMIT).exists():
            return
        try:
            with self.transaction() as transaction:
                if transaction.state.unsynced:
                    transaction.publish(now_of(None))
                checkpoints.write_root_checkpoints(self.root, transaction.state)
        except (StorageError, CorruptLogError, LockedByBrokerError, OSError) as fault:
            files.pass_on(fault)
            _logger.warning("%s: checkpoints were not written at close: %s", self.root, fault)
        super().close()
