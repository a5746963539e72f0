"""A log with its cleaner: what `kafkalog.open` returns; here engine and cleaner meet."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kafkalog.errors import InvalidInputError
from kafkalog.storage_engine import clock
from kafkalog.storage_engine.engine import Engine

if TYPE_CHECKING:
    import pyarrow as pa

    from kafkalog.cleaner.config import CleanerConfig
    from kafkalog.cleaner.explain import Explanation
    from kafkalog.cleaner.stats import CleanerStats, PartitionStatus
    from kafkalog.cleaner.thread import CleanerThread


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

        if cleaner and read_only:
            raise InvalidInputError("a log opened read-only cannot run a cleaner: drop one of both")
        super().__init__(path, read_only=read_only, create=create)
        if cleaner:
            self._check_writable()
        self._config = CleanerConfig() if isinstance(cleaner, bool) else cleaner
        self.cleaner: CleanerThread | None = None
        """The background cleaner, which counts its cleanings and failures."""
        if cleaner:
            from kafkalog.cleaner.thread import CleanerThread

            self.cleaner = CleanerThread(self, self._config, clock=clock.now_ms)
            self.cleaner.start()

    def latest(
        self, topic: str, *, include_headers: bool = False, budget_bytes: int | None = None
    ) -> Iterator[pa.RecordBatch]:
        """Yield the newest record of every key, tombstones left out, partition by partition."""
        from kafkalog.cleaner import survivors
        from kafkalog.schema import changelog_schema

        schema = changelog_schema(include_headers=include_headers)
        budget = self._config.dedupe_buffer_size if budget_bytes is None else budget_bytes
        for partition, _ in self.describe(topic).present():
            with self.view(topic, partition, whole=True) as view:
                end = view.state.high_watermark
                yield from survivors.latest(view, end, budget_bytes=budget, schema=schema)

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
        from kafkalog.cleaner import manager

        self._check_writable()
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

    def status(self, *, now_ms: int | None = None) -> list[PartitionStatus]:
        """Return, per partition, its offsets, clean and dirty bytes, dirty ratio and state."""
        from kafkalog.cleaner.status import status

        return status(self, clock.now_ms() if now_ms is None else now_ms)

    def explain(self, topic: str, *, now_ms: int | None = None) -> list[Explanation]:
        """Say of each partition, in sentences, why it is or is not being cleaned."""
        from kafkalog.cleaner.explain import explain

        return explain(self, topic, clock.now_ms() if now_ms is None else now_ms)

    def close(self) -> None:
        """Stop the background cleaner, then close the log."""
        if self.cleaner is not None:
            self.cleaner.stop()
            self.cleaner = None
        super().close()
