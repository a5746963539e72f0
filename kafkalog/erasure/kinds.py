"""The scan and the erasure of a log of either kind: the only module of erasure that asks which."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

from kafkalog.erasure.directory_erasure import DirectoryErasure
from kafkalog.erasure.store_erasure import StoreErasure
from kafkalog.erasure.store_scan import StoreScan
from kafkalog.erasure.topic_scan import TopicScan
from kafkalog.storage_engine.object_store.object_log import ObjectLog
from kafkalog.storage_engine.place import directory_log_of

if TYPE_CHECKING:
    from kafkalog.cleaner.rewrite.erased_keys import ErasedKeys
    from kafkalog.erasure.file_occurrences import FileOccurrences
    from kafkalog.erasure.key_scan import KeyScan
    from kafkalog.storage_engine.log.log import Log


class PlaceErasure(Protocol):
    """The steps of one erasure that a directory and a store do in their own way."""

    def prepare(self, partitions: Sequence[int]) -> None:
        """Make ready for a cleaning of partitions; raises StorageError."""

    def remove_replaced(
        self, partitions: Sequence[int], *, now: bool, wait: Callable[[int], None] | None
    ) -> None:
        """Remove what had the keys and was replaced: with `now` at once, or after its time.

        `wait` receives the time until which it stays, and returns then; without it it stays.
        """


def scan_of(
    log: Log,
    topic: str,
    keys: ErasedKeys,
    names: Sequence[bytes],
    progress: Callable[[int, int], None],
) -> KeyScan:
    """Return a scan of all that holds a topic's records; see `KeyScan`."""
    if isinstance(log, ObjectLog):
        return StoreScan(log, topic, keys, names, progress)
    return TopicScan(directory_log_of(log), topic, keys, names, progress)


def erasure_of(
    log: Log, topic: str, before: Sequence[FileOccurrences], *, clock: Callable[[], int]
) -> PlaceErasure:
    """Return the steps of an erasure; `before` are the occurrences that were found first."""
    if isinstance(log, ObjectLog):
        return StoreErasure(log, topic, before, clock=clock)
    return DirectoryErasure(directory_log_of(log), topic, before, clock=clock)
