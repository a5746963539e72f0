"""The scan and the erasure of a log of either kind: the only module of erasure that asks which."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from kafkalog.erasure.directory_erasure import DirectoryErasure
from kafkalog.erasure.store_erasure import StoreErasure
from kafkalog.erasure.store_scan import StoreScan
from kafkalog.erasure.topic_scan import TopicScan
from kafkalog.storage_engine.object_store.object_log import ObjectLog
from kafkalog.storage_engine.place import directory_log_of

if TYPE_CHECKING:
    from kafkalog.cleaner.rewrite.erased_keys import ErasedKeys
    from kafkalog.erasure.file_occurrences import FileOccurrences
    from kafkalog.storage_engine.log.log import Log


def scan_of(
    log: Log,
    topic: str,
    keys: ErasedKeys,
    names: Sequence[bytes],
    progress: Callable[[int, int], None],
) -> TopicScan | StoreScan:
    """Return a scan of all that holds a topic's records; see `KeyScan`."""
    if isinstance(log, ObjectLog):
        return StoreScan(log, topic, keys, names, progress)
    return TopicScan(directory_log_of(log), topic, keys, names, progress)


def erasure_of(
    log: Log, topic: str, before: Sequence[FileOccurrences], *, clock: Callable[[], int]
) -> DirectoryErasure | StoreErasure:
    """Return the steps of an erasure; `before` are the occurrences that were found first."""
    if isinstance(log, ObjectLog):
        return StoreErasure(log, topic, before, clock=clock)
    return DirectoryErasure(directory_log_of(log), topic, before, clock=clock)
