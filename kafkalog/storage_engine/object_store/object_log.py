"""A log in an object store: its topics, its commits, its reads.

All processes are alike, without locks: any number of them, on any hosts, read and write the log. A
commit records where the batches are, and copies none. `commit_log.CommitLog` decides who commits.

Invariants:

- An object is written before the commit that names it, and belongs to that commit alone.
- An object that a commit names is deleted by a collector alone, never by the writer of it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, TypeVar

from kafkalog.errors import CommitInDoubtError, InvalidInputError, KafkaLogError, StorageError
from kafkalog.storage_engine.format import layout
from kafkalog.storage_engine.log.log import Log, now_of
from kafkalog.storage_engine.log.results import CommitResult, RetentionStats
from kafkalog.storage_engine.metadata.new_topic import NewTopic
from kafkalog.storage_engine.metadata.state import State, TopicState
from kafkalog.storage_engine.metadata.writer import Writer, is_committed, is_new
from kafkalog.storage_engine.object_store.address import StoreAddress
from kafkalog.storage_engine.object_store.client import ObjectClient, Outcome
from kafkalog.storage_engine.object_store.commit_log import CommitLog
from kafkalog.storage_engine.object_store.mixed_object import Batches, MixedObjects
from kafkalog.storage_engine.object_store.object_retention import apply_retention
from kafkalog.storage_engine.object_store.staged_objects import StagedObjects
from kafkalog.storage_engine.object_store.store_draft import StoreDraft
from kafkalog.storage_engine.object_store.store_state import StoreState
from kafkalog.storage_engine.writing.staged_message import StagedMessage

if TYPE_CHECKING:
    from kafkalog.storage_engine.object_store.object_snapshot import ObjectSnapshot
    from kafkalog.storage_engine.object_store.segment_object import SegmentObject
    from kafkalog.storage_engine.transactions.producers import Producers
    from kafkalog.storage_engine.writing.copied_run import CopiedRun
    from kafkalog.storage_engine.writing.staging_target import AttemptName, StagingTarget

_Result = TypeVar("_Result")
_logger = logging.getLogger(__name__)
_CLAIM_MS: Final = 600_000
APPEND: Final = "append"
"""The attempt in the names of objects that no task wrote, but the committer itself."""
FRESH_WARNED: Final = 512
"""Fresh objects that show that no cleaner is at work."""
FRESH_MAX: Final = 4_096
"""Fresh objects at which a commit regroups them itself, lest reads get slower for ever."""


class ObjectLog(Log):
    """A log in an object store with all that can be done to it; a context manager.

    It is pickled as its address, and opened again where it is unpickled. Raises InvalidInputError
    for an address without a log that may not get one, and StorageError.
    """

    is_brokers = False

    def __init__(
        self,
        path: str | StoreAddress,
        *,
        read_only: bool = False,
        create: bool = True,
        options: Mapping[str, str] | None = None,
    ) -> None:
        """`options` are those named `store.*`."""
        self.address = path if isinstance(path, StoreAddress) else StoreAddress.parse(path, options)
        self.root: str = str(self.address)
        self.read_only = read_only
        self.client = ObjectClient(self.address)
        self.collected_ms: int | None = None
        """When a cleaner of this process has last collected what nobody needs (epoch ms)."""
        self._is_closed = False
        if create and not read_only:
            CommitLog.create(self.client)
        self._log = CommitLog(self.client)

    def __reduce__(self) -> tuple[Any, ...]:
        return _opened, (self.address, self.read_only)

    def __repr__(self) -> str:
        return f"ObjectLog({self.root})"

    @property
    def is_replaced(self) -> bool:
        """Whether another log was found at the address: this one is gone."""
        return self._log.is_replaced

    def state(self) -> State:
        """Return the newest state; one GET when nothing has changed."""
        return self.store_state().log

    def store_state(self) -> StoreState:
        """Return the newest state with the objects; one GET when nothing has changed."""
        return self._log.poll()

    @property
    def known_state(self) -> StoreState:
        """The last known state with the objects; no request."""
        return self._log.state

    def snapshot(
        self,
        topic: str,
        partition: int,
        *,
        whole: bool = False,
        start: int | None = None,
        known_end: int = 0,
        check: Callable[[TopicState], None] = lambda topic: None,
    ) -> ObjectSnapshot:
        """Open a snapshot of a partition; `whole`, `start` and `known_end` have no effect here."""
        from kafkalog.storage_engine.object_store.object_snapshot import open_snapshot

        return open_snapshot(self.client, self.store_state(), topic, partition, check=check)

    def size_of(self, topic: str, partition: int) -> int:
        """Return the bytes of a partition's committed batches."""
        state = self.store_state()
        found = state.extents(state.log.topic(topic).topic_id, partition)
        return sum(extent.size for _, extent in found)

    def leader_epoch_at(self, topic: str, partition: int, offset: int) -> int:
        """Return the leader epoch of the partition, which never changes; -1 before a record."""
        known = self.describe(topic).partitions[partition]
        return known.leader_epoch if known.high_watermark else -1

    def producers(self, topic: str, partition: int) -> Producers:
        """Return the producers at a partition's high watermark; a request if there are any."""
        from kafkalog.storage_engine.object_store.stored_producers import recorded_producers

        return recorded_producers(self.client, self.known_state, topic, partition)

    def staging_target(self, name: AttemptName) -> StagingTarget:
        """Return where a task attempt writes: mixed objects."""
        return StagedObjects(self.client, self._log.state.number, name)

    def check_writable(self) -> None:
        """Raise InvalidInputError where the log is read-only, or closed."""
        if self.read_only:
            raise InvalidInputError(f"{self.root}: the log was opened read-only")
        if self._is_closed:
            raise InvalidInputError(f"{self.root}: the log is closed: open it again to write")

    def change(self, work: Callable[[StoreDraft], _Result], *, now_ms: int) -> _Result:
        """Make the changes that `work` drafts, in one commit; return what it returns."""
        self.check_writable()
        results = []

        def prepare(state: StoreState) -> Mapping[str, Any] | None:
            draft = StoreDraft(state)
            results.append(work(draft))
            return draft.record(now_ms) if draft.is_changed else None

        self._log.commit(prepare)
        return results[-1]

    def commit(
        self,
        staged: Sequence[StagedMessage],
        *,
        writer: Writer | None = None,
        create: NewTopic | None = None,
        reset_writer: bool = False,
        now_ms: int | None = None,
    ) -> CommitResult:
        """Append what tasks have written, at once or not at all, by one PUT and one GET.

        Batches that messages carry are written to an object first, one PUT per message.
        """

        at_ms = now_of(now_ms)
        rows = sum(message.rows for message in staged)
        ordered = sorted(staged, key=lambda message: message.spark_partition)
        _check_names(ordered)
        written: list[StagedMessage] = []

        def append(draft: StoreDraft) -> CommitResult:
            if not is_new(draft.state, writer, rows, at_ms, reset_writer=reset_writer):
                return CommitResult(skipped=True, rows=0)
            if _are_committed(draft.store, ordered) or self._are_forgotten(draft.store, ordered):
                return CommitResult(skipped=True, rows=0)
            if rows == 0:
                if writer is not None and writer.is_recorded_without_rows:
                    draft.record_writer(writer.name, writer.batch_id, 0, at_ms, writer.ends)
                return CommitResult(skipped=False, rows=0)
            draft.refuse_gone_topics(ordered)
            draft.match_topics(ordered, create)
            for message in ordered[len(written) :]:
                written.append(self._with_objects(message, draft))
            offsets = draft.append(written)
            if writer is not None:
                draft.record_writer(writer.name, writer.batch_id, rows, at_ms, writer.ends)
            return CommitResult(skipped=False, rows=rows, offsets=offsets)

        try:
            result = self.change(append, now_ms=at_ms)
        except CommitInDoubtError:
            raise
        except KafkaLogError:
            self._discard(message for message in written if message not in ordered)
            raise
        if result.skipped or rows == 0:
            self._discard([*ordered, *written])  # another attempt has committed the batch
        elif self.known_state.fresh >= FRESH_MAX:
            self._regroup(at_ms)
        return result

    def append_copied(self, runs: Sequence[CopiedRun], *, now_ms: int) -> int:
        """Append runs of another log in one commit, as segment objects; return their records."""
        from kafkalog.storage_engine.object_store.copied_segments import CopiedSegments

        copied = CopiedSegments(self.client, self.known_state, runs, now_ms)
        try:
            copied.put()
            self.swap([], copied.outputs, now_ms=now_ms, work=copied.end_partitions)
        except Exception as fault:
            self.discard_segments(copied.outputs, fault)
            raise
        return copied.rows

    def _regroup(self, now_ms: int) -> None:
        """Regroup fresh objects after a commit, which is made; a failure is only logged."""
        from kafkalog.storage_engine.object_store.regroup import fresh_objects, regroup

        try:
            regroup(self, fresh_objects(self.known_state), now_ms=now_ms)
        except KafkaLogError as fault:
            _logger.warning(
                "%s: has %d objects that no cleaner regroups, and regrouping them failed: %s",
                self.root,
                self.known_state.fresh,
                fault,
            )

    def swap(
        self,
        sources: Sequence[str],
        outputs: Sequence[SegmentObject],
        *,
        now_ms: int,
        work: Callable[[StoreDraft], bool] = lambda draft: True,
    ) -> bool:
        """Replace objects by segment objects, in one commit.

        `work` drafts what belongs to the swap, and returns False if that must not be made. Returns
        whether the commit is made: it is not if a source is gone. Raises CommitInDoubtError, and
        StorageError if it is not made.
        """
        return self.change(
            lambda draft: work(draft) and draft.swap(sources, outputs), now_ms=now_ms
        )

    @contextlib.contextmanager
    def claim(self, work: str, *, now_ms: int) -> Iterator[bool]:
        """Yield whether no other process is known to do some work, and keep others from it.

        A claim is for ten minutes, and ends with the block. It spares double work and decides
        nothing: of two processes that do the same, the commit log takes one.
        """
        name = layout.stored_claim(work, now_ms // _CLAIM_MS)
        is_mine = self.client.create(name, b"") is not Outcome.EXISTS
        try:
            yield is_mine
        finally:
            if is_mine:
                self._delete([name])

    def discard_segments(
        self, outputs: Iterable[SegmentObject], fault: Exception | None = None
    ) -> None:
        """Delete those segment objects that no commit names; a failure is only logged.

        Nothing is deleted after a `fault` that leaves a commit in doubt.
        """
        if not isinstance(fault, CommitInDoubtError):
            unnamed = {*_unnamed(self._log.state, [each.name for each in outputs])}
            self._delete([name for each in outputs if each.name in unnamed for name in each.names])

    def _are_forgotten(self, state: StoreState, staged: Iterable[StagedMessage]) -> bool:
        """Return whether objects of messages are gone: they were committed and replaced long ago.

        A commit that was in doubt may be tried again so late. One request for each object that is
        as old as one that was forgotten; no commit has named it if it is still there.
        """
        names = [file.name for message in staged for file in message.files]
        old = [n for n in names if state.swept < layout.seen_by_stored(n) <= state.forgotten]
        return any(self.client.head(name) is None for name in old)

    def _with_objects(self, message: StagedMessage, draft: StoreDraft) -> StagedMessage:
        """Return a message whose batches are in objects: write those that it carries."""
        if not message.data:
            return message
        objects = MixedObjects(self.client, draft.store.number, APPEND)
        data = memoryview(bytearray(message.data))
        objects.write(
            Batches(
                message.topic_ids[run.topic],
                run.topic,
                run.partition,
                [data[run.position : run.position + run.size]],
            )
            for run in message.runs
        )
        return dataclasses.replace(
            message, files=tuple(objects.files), runs=tuple(objects.runs), data=b""
        )

    def _discard(self, messages: Iterable[StagedMessage | None]) -> None:
        """Delete the objects of messages that no commit names; a failure is only logged."""
        names = [file.name for message in messages if message for file in message.files]
        self._delete(_unnamed(self._log.state, names))

    def _delete(self, names: Sequence[str]) -> None:
        try:
            self.client.delete(names)
        except StorageError as fault:
            _logger.warning("%s: objects were left, which a sweep deletes: %s", self.root, fault)

    def abort(
        self,
        staged: Sequence[StagedMessage | None],
        *,
        writer: Writer | None = None,
        prefix: str | None = None,
        run: int | None = None,
        now_ms: int | None = None,
    ) -> bool:
        """Delete what a failed batch wrote; return False, and keep all, when it is committed.

        The commit may be under way in a process that is about to die; it cannot land after this.
        The arguments `prefix` and `run` have no effect: what a killed task wrote is named by no
        message, and a sweep deletes it.
        """
        self.check_writable()
        _check_names(staged)
        at_ms = now_of(now_ms)

        def is_there(state: StoreState) -> bool:
            is_last = writer is not None and is_committed(state.log, writer, at_ms)
            return is_last or _are_committed(state, staged)

        is_undone = self._log.abort(is_there)
        if is_undone:
            self._discard(staged)
        return is_undone

    def sync(self, *, now_ms: int | None = None) -> None:
        """Do nothing: a store keeps what it has answered for."""

    def delete_records(
        self, topic: str, partition: int, before: int, *, now_ms: int | None = None
    ) -> int:
        """Let a partition begin at offset `before`, as `Log` says; return where it begins."""
        self.check_partition(topic, partition)
        return self.change(
            lambda change: change.delete_records(topic, partition, before), now_ms=now_of(now_ms)
        )

    def apply_retention(
        self,
        topic: str | None = None,
        *,
        now_ms: int | None = None,
        skips: Collection[tuple[str, int]] = (),
    ) -> list[RetentionStats]:
        """Delete what retention does not keep, in one commit, but of the partitions `skips`."""
        at_ms = now_of(now_ms)

        def retain(draft: StoreDraft) -> list[RetentionStats]:
            if topic is not None:
                draft.topic(topic)
            return apply_retention(draft, topic, now_ms=at_ms, skips=skips)

        return self.change(retain, now_ms=at_ms)

    def neglect(self, topic: str, now_ms: int) -> str | None:
        """Say that nobody regroups the objects, which a cleaner does every minute."""
        fresh = self.known_state.fresh
        if fresh < FRESH_WARNED:
            return None
        return (
            f"{self.root} has {fresh} objects that no cleaner has regrouped, and each read fetches "
            f"them all; run: kafkalog cleaner {self.root} (at {FRESH_MAX} objects a commit "
            "regroups them, and takes long)"
        )

    def sweep_staged(self, *, now_ms: int) -> int:
        """Delete objects that no commit names and that are seven days old; return how many."""
        from kafkalog.storage_engine.object_store.collector import sweep

        return sweep(self, now_ms=now_ms)

    def boundary(self) -> int:
        """Return up to which number commits may have been deleted; one GET."""
        return self._log.boundary()

    def move_boundary(self, number: int) -> None:
        """Announce that commits up to a number may be deleted. Raises StorageError."""
        self._log.move_boundary(number)

    def close(self) -> None:
        """Refuse writes from now on."""
        self._is_closed = True


def _opened(address: StoreAddress, read_only: bool) -> ObjectLog:
    return ObjectLog(address, read_only=read_only, create=False)


def _unnamed(state: StoreState, names: Iterable[str]) -> list[str]:
    """Return the objects that no commit names."""
    return [name for name in names if name not in state.objects and name not in state.dropped]


def _are_committed(state: StoreState, staged: Iterable[StagedMessage | None]) -> bool:
    """Return whether a commit names the objects of messages: then it is a retry without writer."""
    return any(
        file.name in state.objects or file.name in state.dropped
        for message in staged
        if message
        for file in message.files
    )


def _check_names(staged: Iterable[StagedMessage | None]) -> None:
    """Refuse messages that name other objects than tasks write. Raises InvalidInputError."""
    for message in staged:
        for file in message.files if message else ():
            try:
                layout.seen_by_stored(file.name)
            except ValueError:
                raise InvalidInputError(
                    f"{file.name!r} is not an object of records (expected a message of a task that "
                    "writes to this log). Run the batch again."
                ) from None
