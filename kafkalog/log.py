"""A log with its cleaner: what `kafkalog.open` returns; here engine and cleaner meet."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING
from weakref import WeakSet

from kafkalog.errors import InvalidInputError
from kafkalog.storage_engine.engine import Engine
from kafkalog.storage_engine.fs import clock

if TYPE_CHECKING:
    import pyarrow as pa

    from kafkalog.cleaner.config import CleanerConfig
    from kafkalog.cleaner.key_index.key_lookup import Record
    from kafkalog.cleaner.report.explain import Explanation
    from kafkalog.cleaner.schedule.thread import CleanerThread
    from kafkalog.cleaner.state.stats import CleanerStats, PartitionStatus
    from kafkalog.erasure.erase import Erasure, Progress
    from kafkalog.erasure.occurrences import Occurrences
    from kafkalog.storage_engine.writing.record_producer import Producer


class KafkaLog(Engine):
    """A log directory, with cleaning, key-latest reads and, if wanted, a background cleaner."""

    def __init__(
        self,
        path: str | Path | Sequence[str | Path],
        *,
        cleaner: bool | CleanerConfig = False,
        read_only: bool = False,
        create: bool = True,
    ) -> None:
        from kafkalog.cleaner.config import CleanerConfig

        if not isinstance(cleaner, bool | CleanerConfig):
            raise InvalidInputError(
                f"cleaner: expected True, False or a CleanerConfig, found {cleaner!r}"
            )
        if cleaner and read_only:
            raise InvalidInputError("a log opened read-only cannot run a cleaner: drop one of both")
        super().__init__(path, read_only=read_only, create=create)
        if cleaner:
            self._check_cleanable()
        self._is_shut = False
        self._producers: WeakSet[Producer] = WeakSet()
        self._config = CleanerConfig() if isinstance(cleaner, bool) else cleaner
        self.cleaner: CleanerThread | None = None
        """The background cleaner, which counts its cleanings and failures."""
        if cleaner:
            from kafkalog.cleaner.schedule.thread import CleanerThread

            self.cleaner = CleanerThread(self, self._config, clock=clock.now_ms)
            self.cleaner.start()

    def producer(self, topic: str, *, batch_size: int = 1 << 20, linger_ms: float = 5) -> Producer:
        """Return a producer of single records, a context manager: it commits many of them at once.

        It commits when what was sent takes `batch_size` bytes (0: each record alone), when the
        first of it has waited for `linger_ms`, and when it is flushed or closed. Kafka's linger.ms
        is the same; its batch.size of 16 KiB is that of a batch of one partition, which costs no
        sync. A producer left open is closed with the log. Raises UnknownTopicError, and
        InvalidInputError where the log is only read.
        """
        from kafkalog.storage_engine.writing.record_producer import Producer

        self.check_writable()
        producer = Producer(self, topic, batch_size=batch_size, linger_ms=linger_ms)
        self._producers.add(producer)
        return producer

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

        `partition` names one, and `progress` is told how much of each is done, and of how much.
        """
        from kafkalog.cleaner.key_index import latest_view
        from kafkalog.schema import changelog_schema

        schema = changelog_schema(include_headers=include_headers)
        budget = self._config.dedupe_buffer_size if budget_bytes is None else budget_bytes
        present = [number for number, _ in self.describe(topic).present()]
        for number in present if partition is None else [partition]:
            with self.snapshot(topic, number, whole=True) as snapshot:
                end = snapshot.state.high_watermark
                yield from latest_view.latest(
                    snapshot, end, budget_bytes=budget, schema=schema, progress=progress
                )

    def lookup(
        self, topic: str, key: bytes | str, *, partition: int | None = None
    ) -> Record | None:
        """Return the latest record of a key; None where there is none, or it is a tombstone.

        Cleaned segments are asked through their key indexes, the others are scanned. The key (text
        is UTF-8) is looked for where Kafka's default partitioner sends it, or in `partition`. For
        many lookups `kafkalog.KTable` keeps the files open.
        """
        from kafkalog.cleaner.key_index.key_lookup import KeyLookup

        with KeyLookup(self, topic) as lookup:
            return lookup.get(key, partition=partition)

    def clean(
        self,
        topic: str | None = None,
        *,
        force: bool = False,
        now_ms: int | None = None,
        progress: Callable[[CleanerStats], None] = lambda _: None,
    ) -> list[CleanerStats]:
        """Clean a topic, or all, in this thread, and return what each partition's cleaning did.

        Without `force` only what Kafka would clean now; with it the active segment is rolled first,
        and everything committed is cleaned. Then retention takes what it does not keep of the
        topics cleaned: old segments where `cleanup.policy` is compact,delete, and what lies wholly
        below the log start. `progress` is shown the growing figures of the partition at work.
        """
        from kafkalog.cleaner.schedule import manager

        self._check_cleanable()
        now = clock.now_ms() if now_ms is None else now_ms
        results = manager.clean(
            self,
            topic,
            force=force,
            now_ms=now,
            clock=clock.now_ms if now_ms is None else None,
            config=self._config,
            progress=progress,
        )
        manager.retain(self, topic, now_ms=now)
        return results

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
        """Delete keys, clean by force, and look through every file for what is left of them.

        Of a compacted topic; text is UTF-8. Unless `now`, a deletion stays for its
        `delete.retention.ms`, and is found: then erase again, which writes nothing anew. With `now`
        a follower that has not read it by then keeps the key for good. Replaced files stay for
        `file.delete.delay.ms`: `wait` is called with the time until which, and returns then;
        without it they are found, unless `now`. `strict` takes records of other keys that mention
        one for traces. Raises InvalidInputError, UnknownTopicError, StorageError.
        """
        from kafkalog.cleaner.rewrite.erased_keys import ErasedKeys
        from kafkalog.erasure.erase import erase

        self._check_cleanable()
        return erase(
            self,
            topic,
            ErasedKeys(keys),
            now=now,
            is_strict=strict,
            clock=_clock(now_ms),
            wait=wait,
            config=self._config,
            progress=progress,
        )

    def traces(
        self,
        topic: str,
        keys: Iterable[bytes | str],
        *,
        strict: bool = False,
        now_ms: int | None = None,
        progress: Callable[[int, int], None] = lambda done, of: None,
    ) -> Occurrences:
        """Look through every file of a topic for what there is of keys, and change nothing."""
        from kafkalog.cleaner.rewrite.erased_keys import ErasedKeys
        from kafkalog.erasure.occurrences import find_occurrences

        self._check_open()
        return find_occurrences(
            self,
            topic,
            ErasedKeys(keys),
            clock=_clock(now_ms),
            is_strict=strict,
            progress=progress,
        )

    def status(self, *, now_ms: int | None = None) -> list[PartitionStatus]:
        """Return, per partition, its offsets, clean and dirty bytes, dirty ratio and state."""
        self._check_open()
        from kafkalog.cleaner.report.status import status

        return status(self, clock.now_ms() if now_ms is None else now_ms)

    def explain(self, topic: str, *, now_ms: int | None = None) -> list[Explanation]:
        """Say of each partition, in sentences, why it is or is not being cleaned."""
        self._check_open()
        from kafkalog.cleaner.report.explain import explain

        return explain(self, topic, clock.now_ms() if now_ms is None else now_ms)

    def close(self) -> None:
        """Close producers that are open, stop the background cleaner, then close the log."""
        with contextlib.ExitStack() as last:
            last.callback(self._shut)  # also where a producer raises what it could not commit
            for producer in list(self._producers):
                last.callback(producer.close)

    def _shut(self) -> None:
        if self.cleaner is not None:
            self.cleaner.stop()
            self.cleaner = None
        super().close()
        self._is_shut = True

    def _check_open(self) -> None:
        if self._is_shut:
            raise InvalidInputError(f"{self.root}: the log is closed: open it again to ask")

    def _check_cleanable(self) -> None:
        from kafkalog.cleaner.schedule.manager import check_disk

        self.check_writable()
        check_disk(self)


def _clock(now_ms: int | None) -> Callable[[], int]:
    return clock.now_ms if now_ms is None else lambda: now_ms
