"""A cleaner of a log in an object store: one pass over all that is due."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kafkalog.cleaner.config import CleanerConfig
from kafkalog.cleaner.schedule import store_manager
from kafkalog.cleaner.schedule.partition_cleaner import never

if TYPE_CHECKING:
    from kafkalog.cleaner.state.stats import CleanerStats
    from kafkalog.storage_engine.object_store.object_log import ObjectLog
    from kafkalog.storage_engine.object_store.regroup import Regrouped
    from kafkalog.storage_engine.writing.retention import RetentionStats


@dataclass(frozen=True, slots=True)
class StorePass:
    """What one pass did."""

    regrouped: Sequence[Regrouped]
    cleaned: Sequence[CleanerStats]
    retained: Sequence[RetentionStats]


@dataclass(frozen=True, slots=True)
class StoreCleaner:
    """Regroups, cleans and retains a log in an object store."""

    log: ObjectLog
    config: CleanerConfig = field(default_factory=CleanerConfig)

    def run_once(
        self,
        now_ms: int,
        *,
        topic: str | None = None,
        force: bool = False,
        check_abort: Callable[[], None] = never,
    ) -> StorePass:
        """Do all that is due at a time (epoch ms), or with `force` all that can be done.

        A partition that cannot be cleaned has an `error` in its entry. Raises CorruptBatchError for
        a fresh object that is damaged, StorageError, and CommitInDoubtError.
        """
        regrouped = store_manager.regroup_due(
            self.log, now_ms=now_ms, force=force, check_abort=check_abort
        )
        cleaned = store_manager.clean(
            self.log,
            topic,
            force=force,
            now_ms=now_ms,
            config=self.config,
            check_abort=check_abort,
        )
        retained = store_manager.retain(self.log, topic, now_ms=now_ms)
        return StorePass(regrouped, cleaned, retained)
