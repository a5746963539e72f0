"""The public surface of a log: what `kafkalog.open` returns.

A `KafkaLog` owns a `Log`, the producers that it made and, if wanted, the background cleaner. Each
method hands its work to a room below.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FunctionType, MappingProxyType
from typing import TYPE_CHECKING, Any, NoReturn, Self, TypeVar, cast
from weakref import WeakSet

from kafkalog.errors import InvalidInputError, KafkaLogError
from kafkalog.storage_engine.fs import clock, files
from kafkalog.storage_engine.log.log import now_of, only_in_directory
from kafkalog.storage_engine.place import open_log
from kafkalog.storage_engine.reading import time_offsets

if TYPE_CHECKING:
    import pyarrow as pa

    from kafkalog.cleaner.config import CleanerConfig
    from kafkalog.cleaner.key_index.key_lookup import KeptLookups, Record
    from kafkalog.cleaner.report.explain import Explanation
    from kafkalog.cleaner.report.status import PartitionStatus
    from kafkalog.cleaner.schedule.thread import CleanerThread
    from kafkalog.cleaner.state.stats import CleanerStats
    from kafkalog.erasure.erase import Erasure, Progress
    from kafkalog.erasure.occurrences import Occurrences
    from kafkalog.storage_engine.log.followed_topic import FollowedTopic
    from kafkalog.storage_engine.log.log import Source
    from kafkalog.storage_engine.log.results import CommitResult
    from kafkalog.storage_engine.metadata.state import TopicState
    from kafkalog.storage_engine.reading.time_offsets import TimeOffset
    from kafkalog.storage_engine.writing.record_producer import Producer

__all__ = ["KafkaLog"]

_Function = TypeVar("_Function", bound=Callable[..., Any])
_Kind = TypeVar("_Kind", bound=type)


def _with_errors_of_ours(kind: _Kind) -> _Kind:
    """Decorate a class whose public methods raise a StorageError where the disk fails."""
    for name, method in list(vars(kind).items()):
        if isinstance(method, FunctionType) and not name.startswith("_"):
            setattr(kind, name, _told(method))
    return kind


def _told(method: _Function) -> _Function:
    """Decorate a method of a log, and the iterator that it returns."""

    def iterated(log: KafkaLog, found: Iterator[Any]) -> Iterator[Any]:
        with log._told_faults():
            yield from found

    @functools.wraps(method)
    def called(log: KafkaLog, *arguments: Any, **named: Any) -> Any:
        with log._told_faults():
            result = method(log, *arguments, **named)
        return iterated(log, result) if isinstance(result, Iterator) else result

    return cast("_Function", called)


@_with_errors_of_ours
class KafkaLog:
    """A log: its topics, records, latest records and cleaner; a context manager.

    It is in a directory, or in an object store. Raw appends need a directory, and raise
    InvalidInputError in an object store.

    Offsets are ints, a range `[start, end)` leaves its end out, and times are epoch milliseconds.
    `now_ms` is the time of an act: by default the clock's. One that is negative, or no whole number
    of 64 bits, raises InvalidInputError. Every method raises StorageError where the disk fails.
    Methods that write raise InvalidInputError where the log is only read or closed, and
    LockedByBrokerError where a broker holds it. All raise LogMovedError where the directory was
    moved or removed since it was opened.
    """

    def __init__(
        self,
        path: str | Path | Sequence[str | Path],
        *,
        cleaner: bool | CleanerConfig = False,
        read_only: bool = False,
        create: bool = True,
        options: Mapping[str, str] | None = None,
    ) -> None:
        from kafkalog.cleaner.config import CleanerConfig

        if not isinstance(cleaner, bool | CleanerConfig):
            raise InvalidInputError(
                f"cleaner: expected True, False or a CleanerConfig, found {cleaner!r}"
            )
        if cleaner and read_only:
            raise InvalidInputError("a log opened read-only cannot run a cleaner: drop one of both")
        self._log = open_log(path, read_only=read_only, create=create, options=options)
        self._is_closed = False
        self._producers: WeakSet[Producer] = WeakSet()
        self._followed: WeakSet[FollowedTopic] = WeakSet()
        self._lookups: KeptLookups | None = None
        self._config = CleanerConfig() if isinstance(cleaner, bool) else cleaner
        self._cleaner: CleanerThread | None = None
        if cleaner:
            from kafkalog.cleaner.schedule.thread import CleanerThread
            from kafkalog.cleaner.shelves import shelf_of

            shelf_of(self._log).check_cleanable()
            self._cleaner = CleanerThread(self._log, self._config, clock=clock.now_ms)
            self._cleaner.start()

    @property
    def root(self) -> Path:
        """The log's directory, the first one where a broker has several.

        Raises InvalidInputError for a log in an object store.
        """
        root = self._log.root
        if not isinstance(root, Path):
            raise only_in_directory(root)
        return root

    @property
    def cleaner(self) -> CleanerThread | None:
        """The background cleaner, which counts its cleanings and failures; None without one."""
        return self._cleaner

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

        With `exist_ok` an existing topic is returned as it is. Raises InvalidInputError for a name
        that Kafka forbids, an unknown config, or an existing topic. Kafka: Admin.createTopics.
        """
        return self._log.create_topic(name, partitions, config, exist_ok=exist_ok, now_ms=now_ms)

    def topics(self) -> list[str]:
        """Return the names of all topics, sorted."""
        return self._log.topics()

    def describe(self, name: str) -> TopicState:
        """Return a topic's id, config and partitions.

        Raises UnknownTopicError. Kafka: Admin.describeTopics.
        """
        return self._log.describe(name)

    def alter_topic(
        self,
        name: str,
        config: Mapping[str, str | None] = MappingProxyType({}),
        partitions: int | None = None,
        *,
        keys_may_move: bool = False,
        now_ms: int | None = None,
    ) -> TopicState:
        """Set configs of a topic (None: delete it, for its default) and add partitions.

        `partitions` is their new number. Old records stay where they are, and later ones go where
        murmur2 sends their keys among all partitions. A compacted topic therefore refuses it,
        unless `keys_may_move`. Running streams and sinks take up the new partitions. Raises
        UnknownTopicError, and InvalidInputError for an unknown config or value, and for a number
        that does not grow. Kafka: Admin.incrementalAlterConfigs, Admin.createPartitions.
        """
        return self._log.alter_topic(
            name, config, partitions, keys_may_move=keys_may_move, now_ms=now_ms
        )

    def delete_topic(self, name: str, *, now_ms: int | None = None) -> None:
        """Delete a topic; one of the same name can be created at once.

        Its directories are removed `file.delete.delay.ms` later, by the next process that opens the
        log for writing, or by the cleaner. The call waits until a cleaning of the topic lets go.
        Raises UnknownTopicError. Kafka: Admin.deleteTopics.
        """
        self._log.delete_topic(name, now_ms=now_ms)

    def offsets(self, topic: str) -> dict[int, tuple[int, int]]:
        """Return {partition: (log start offset, high watermark)}; raises UnknownTopicError."""
        return self._log.offsets(topic)

    def append(
        self, topic: str, records: Any, *, drop_extra: bool = False, now_ms: int | None = None
    ) -> CommitResult:
        """Append records in one atomic, synced commit: all of them, or none.

        `records` are tuples or dicts, also mixed, or pyarrow record batches, or a pyarrow table:

            log.append("stock", [("k1", "v1"), ("k2", None)])  # None is a tombstone
            log.append("stock", [("k3", b"v3", [("by", b"ann")], 1_700_000_000_000)])
            log.append("stock", [{"key": "k4", "value": json.dumps({"n": 1})}])
            log.append("stock", [{"value": "v5", "headers": {"by": "ann"}, "timestamp": 0}])
            log.append("stock", pyarrow.table({"key": ["k6"], "value": ["v6"]}))

        A tuple is (key, value[, headers, timestamp]); a dict and a table have these names. Keys and
        values are bytes or text (UTF-8); a value of None is a tombstone. Dicts and tables need a
        value alone: no key is a null key, no timestamp is now. headers: (text, bytes) pairs, or a
        mapping; timestamp: epoch ms, or a datetime with a time zone. A table may have a column
        partition. `drop_extra` drops other columns, such as the `offset` of what `read` yields.
        Raises UnknownTopicError, and InvalidInputError for any other form, for a column or field
        that a record doesn't have, and for a record that the topic doesn't take.
        """
        return self._log.append(topic, records, drop_extra=drop_extra, now_ms=now_ms)

    def append_raw(
        self, topic: str, partition: int, source: Source, *, now_ms: int | None = None
    ) -> CommitResult:
        """Append whole record batches as they are, in one atomic, synced commit.

        `source` is a `.log` file, a binary stream or bytes: batches v2, whose offsets, producers,
        transactions and leader epochs stay; offsets may have gaps. An empty one appends nothing.
        Raises InvalidInputError for a batch below the log end and for messages v0 and v1. Raises
        CorruptBatchError, which names the position, for bytes that aren't a batch. Nothing is
        appended then. Kafka: UnifiedLog.appendAsFollower.
        """
        return self._log.append_raw(topic, partition, source, now_ms=now_ms)

    def producer(self, topic: str, *, batch_size: int = 1 << 20, linger_ms: float = 5) -> Producer:
        """Return a producer of single records, a context manager: it commits many of them at once.

        It commits when the records sent take `batch_size` bytes (0: each record alone), or when
        the first of them has waited for `linger_ms`. It commits too when it is flushed or closed.
        Kafka's linger.ms is the same. Kafka's batch.size of 16 KiB is that of one partition's
        batch, which costs no sync. A producer left open is closed with the log. Raises
        UnknownTopicError, and InvalidInputError where the log is only read.
        """
        from kafkalog.storage_engine.writing.record_producer import Producer

        self._log.check_writable()
        producer = Producer(self._log, topic, batch_size=batch_size, linger_ms=linger_ms)
        self._producers.add(producer)
        return producer

    def delete_records(
        self, topic: str, partition: int, before: int, *, now_ms: int | None = None
    ) -> int:
        """Let a partition begin at offset `before` (-1: at its end); return where it begins.

        It never begins earlier than it did. Segments that lie wholly below go at the next
        retention. Raises InvalidInputError unless `cleanup.policy` has delete, and
        OffsetOutOfRangeError, which names the valid range. Kafka: Admin.deleteRecords.
        """
        return self._log.delete_records(topic, partition, before, now_ms=now_ms)

    def read(
        self,
        topic: str,
        partition: int | None = None,
        start: int | None = None,
        end: int | None = None,
        *,
        include_headers: bool = False,
        columns: Sequence[str] | None = None,
        isolation_level: str = time_offsets.READ_COMMITTED,
    ) -> Iterator[pa.RecordBatch]:
        """Yield the records of `[start, end)`, by default from log start to the last stable offset.

        Without a partition it yields those of all partitions, in turn, as of one moment. The
        batches have the columns of `kafkalog.schema`, or those named; without records, one empty
        batch has them. Nothing at or above the last stable offset is read, nor are aborted
        transactions; with `read_uncommitted` both are, up to the high watermark. Raises
        UnknownTopicError, CorruptBatchError, and OffsetOutOfRangeError, which names the valid
        range; and InvalidInputError for offsets without a partition. Kafka: isolation.level.
        """
        import pyarrow as pa

        from kafkalog.schema import chosen_columns

        ends: dict[int, int | None]
        if partition is not None:
            ends = {partition: end}
        else:
            if (start, end) != (None, None):
                raise InvalidInputError(
                    "start, end: offsets of no partition (expected a partition, found None). "
                    "Name the partition."
                )
            held = self._log.describe(topic).present()
            ends = {each: time_offsets.end_offset(of, isolation_level) for each, of in held}
        is_empty = True
        for number, last in ends.items():
            for batch in self._log.read(
                topic,
                number,
                start,
                last,
                include_headers=include_headers,
                columns=columns,
                isolation_level=isolation_level,
            ):
                is_empty = False
                yield batch
        if is_empty:
            schema = chosen_columns(columns, include_headers=include_headers)
            yield pa.RecordBatch.from_pylist([], schema)

    def follow(
        self,
        topic: str,
        start: str | Mapping[int, int] = "latest",
        *,
        include_headers: bool = False,
        isolation_level: str = time_offsets.READ_COMMITTED,
        poll_s: float = 0.2,
    ) -> FollowedTopic:
        """Return the records of all partitions as they are committed: `for`, or `async for`.

        `start` is "latest", "earliest" or {partition: offset}, in which a partition that isn't
        named begins with its first record. The batches have the columns of `kafkalog.schema`, and
        within a partition ascending offsets. On Linux a commit of this host wakes the iteration;
        elsewhere, and in an object store, it looks every `poll_s` seconds. It ends once it is
        closed, or the log. Raises UnknownTopicError, OffsetOutOfRangeError for a start that isn't
        there, and InvalidInputError when the log is closed. The iteration raises DataLossError for
        records that retention deleted before they were read, or if the topic is deleted; and
        CorruptBatchError. Kafka: KafkaConsumer.
        """
        from kafkalog.storage_engine.log.followed_topic import FollowedTopic

        self._check_open()
        followed = FollowedTopic(
            self._log,
            topic,
            start,
            include_headers=include_headers,
            isolation_level=isolation_level,
            poll_s=poll_s,
            faults=self._told_faults,
        )
        self._followed.add(followed)
        return followed

    def table(
        self, topic: str, *, partition: int | None = None, include_headers: bool = False
    ) -> pa.Table:
        """Return the latest record of every key as an Arrow table, tombstones left out.

        `latest` yields the same, batch by batch, and says what it raises.
        """
        import pyarrow as pa

        from kafkalog.schema import changelog_schema

        batches = self.latest(topic, partition=partition, include_headers=include_headers)
        return pa.Table.from_batches(batches, changelog_schema(include_headers=include_headers))

    def latest(
        self,
        topic: str,
        *,
        partition: int | None = None,
        include_headers: bool = False,
        budget_bytes: int | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> Iterator[pa.RecordBatch]:
        """Yield the latest record of every key, tombstones left out, partition by partition.

        `partition` names one. The offset map takes `budget_bytes` of memory, by default those of
        the cleaner. `progress` is called with how much of a partition is done, and of how much.
        Raises UnknownTopicError, CorruptBatchError.
        """
        from kafkalog.cleaner.key_index import latest_view

        budget = self._config.dedupe_buffer_size
        if budget_bytes is not None:
            budget = latest_view.checked_budget(budget_bytes)
        return latest_view.latest_of_topic(
            self._log,
            topic,
            partition=partition,
            include_headers=include_headers,
            budget_bytes=budget,
            progress=None if progress is None else files.users_call(progress),
        )

    def lookup(
        self, topic: str, key: bytes | str, *, partition: int | None = None
    ) -> Record | None:
        """Return the latest record of a key; None for an unknown key, or where it is a tombstone.

        Works as `kafkalog.KTable.lookup`. The key (text is UTF-8) is looked for where Kafka's
        default partitioner sends it, or in `partition`. The files of the 16 topics asked last stay
        open until `close`, so those that a cleaning replaces take room until the next lookup.
        Raises UnknownTopicError, CorruptBatchError.
        """
        from kafkalog.cleaner.key_index.key_lookup import KeptLookups

        self._lookups = self._lookups or KeptLookups(lambda: self._log)
        return self._lookups.ask(topic, lambda lookup: lookup.get(key, partition=partition))

    def offset_for_time(
        self, topic: str, ms: int, *, isolation_level: str = time_offsets.READ_COMMITTED
    ) -> dict[int, TimeOffset | None]:
        """Return per partition the offset and timestamp of the first record since `ms`, or None.

        `ms` is in epoch milliseconds, or -1 for the latest offset, -2 for the earliest one, -3 for
        the record with the largest timestamp. A record that readers of the isolation level do not
        see yet gives None. Raises UnknownTopicError. Kafka: Admin.listOffsets, KIP-734.
        """
        return self._log.offset_for_time(topic, ms, isolation_level=isolation_level)

    def clean(
        self,
        topic: str | None = None,
        *,
        force: bool = False,
        now_ms: int | None = None,
        progress: Callable[[CleanerStats], None] = lambda _: None,
    ) -> list[CleanerStats]:
        """Clean a topic, or all, in this thread, and return what each partition's cleaning did.

        Without `force` the call cleans what Kafka would clean now. With it the active segment is
        rolled first, and everything committed is cleaned. Retention follows, of every topic if none
        is given: it takes segments wholly below the log start, and old ones of the policy delete. A
        call without a topic is therefore one turn of the background cleaner. The growing figures of
        the partition at work go to `progress`. A partition that cannot be cleaned has an `error` in
        its entry. Raises UnknownTopicError, and InvalidInputError for a topic that is not
        compacted. Kafka: LogCleaner.
        """
        from kafkalog.cleaner.schedule import manager

        return manager.clean_and_retain(
            self._log,
            topic,
            force=force,
            now_ms=now_ms,
            config=self._config,
            progress=files.users_call(progress),
        )

    def status(self, *, now_ms: int | None = None) -> list[PartitionStatus]:
        """Return, per partition, its offsets, clean and dirty bytes, dirty ratio and state.

        Raises InvalidInputError when the log is closed.
        """
        self._check_open()
        from kafkalog.cleaner.report.status import status
        from kafkalog.cleaner.shelves import moment_of

        return status(moment_of(self._log, _clock(now_ms)()))

    def explain(self, topic: str | None = None, *, now_ms: int | None = None) -> list[Explanation]:
        """Say in sentences why each partition, of a topic or of all, is or is not being cleaned.

        Raises UnknownTopicError, and InvalidInputError when the log is closed.
        """
        self._check_open()
        from kafkalog.cleaner.report.explain import explain
        from kafkalog.cleaner.shelves import moment_of

        return explain(moment_of(self._log, _clock(now_ms)()), topic)

    def erase(
        self,
        topic: str,
        keys: Iterable[bytes | str],
        *,
        now: bool = False,
        strict: bool = False,
        wait: Callable[[int], None] | None = None,
        now_ms: int | None = None,
        progress: Progress = lambda step, done, of: None,
    ) -> Erasure:
        """Delete keys of a compacted topic, clean by force, and search every file for what is left.

        Text is UTF-8. Unless `now`, a tombstone stays for its `delete.retention.ms`, and is found.
        Erase again later: that writes nothing more. With `now` a follower that has not read the
        tombstone by then keeps the key for good. Replaced files, or dropped objects of an object
        store, stay for `file.delete.delay.ms`: `wait` is called with the time until which they
        stay, and returns then. Without `wait` they are found, unless `now`. `strict` counts records
        of other keys that mention one. Raises InvalidInputError, UnknownTopicError, StorageError.
        """
        from kafkalog.cleaner.rewrite.erased_keys import ErasedKeys
        from kafkalog.erasure.erase import erase

        self._check_open()
        return erase(
            self._log,
            topic,
            ErasedKeys(keys),
            now=now,
            is_strict=strict,
            clock=_clock(now_ms),
            wait=None if wait is None else files.users_call(wait),
            config=self._config,
            progress=files.users_call(progress),
        )

    def occurrences(
        self,
        topic: str,
        keys: Iterable[bytes | str],
        *,
        strict: bool = False,
        now_ms: int | None = None,
        progress: Callable[[int, int], None] = lambda done, of: None,
    ) -> Occurrences:
        """Search every file or object of a topic for what there is of keys, and change nothing.

        `progress` is called with how many bytes are done, and of how many. Raises
        UnknownTopicError, and InvalidInputError when the log is closed.
        """
        from kafkalog.cleaner.rewrite.erased_keys import ErasedKeys
        from kafkalog.erasure.occurrences import find_occurrences

        self._check_open()
        return find_occurrences(
            self._log,
            topic,
            ErasedKeys(keys),
            clock=_clock(now_ms),
            is_strict=strict,
            progress=files.users_call(progress),
        )

    def close(self) -> None:
        """Close what follows topics and producers, stop the background cleaner, close the log.

        Raises what a producer raises that could not commit; the log is closed all the same.
        """
        for followed in list(self._followed):
            followed.close()
        with contextlib.ExitStack() as last:
            last.callback(self._close)  # also where a producer raises what it could not commit
            for producer in list(self._producers):
                last.callback(producer.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _close(self) -> None:
        if self._cleaner is not None:
            self._cleaner.stop()
            self._cleaner = None
        if self._lookups is not None:
            self._lookups.close()
        self._log.close()
        self._is_closed = True

    def __reduce__(self) -> NoReturn:
        raise InvalidInputError(
            f"{self._log.root}: an open log cannot be pickled or copied (expected its path). "
            "Give the path to the task or process, and call kafkalog.open(path) there."
        )

    @contextlib.contextmanager
    def _told_faults(self) -> Iterator[None]:
        """Raise a StorageError for an error of the system, and say so where the log is gone."""
        try:
            with files.disk_faults(Path(self._log.root)):
                yield
        except KafkaLogError as fault:
            try:
                self._log.check_is_here()
            except KafkaLogError as gone:
                raise gone from fault
            raise

    def _check_open(self) -> None:
        if self._is_closed:
            raise InvalidInputError(f"{self._log.root}: the log is closed: open it again to ask")


def _clock(now_ms: int | None) -> Callable[[], int]:
    given = now_of(now_ms)
    return clock.now_ms if now_ms is None else lambda: given
