"""Keep cleaners away from a partition: abort a running cleaning, and let none begin.

A pauser holds `kl-cleaning-paused.lock` of the partition shared, then waits until the cleaner lock
is free. A cleaner checks the first lock after it has taken the second, and again with every chunk.
If the partition is paused, it aborts and leaves the log as it was after its last swap. Several
processes may pause at once. The pause of a process ends with it.

It is for users who want the files of a partition to stay as they are. Unlike Kafka, kafkalog needs
no pauses: retention takes the cleaner lock, and a cleaning notices a topic that was deleted or is
no longer compacted.

Kafka: LogCleanerManager.abortAndPauseCleaning, resumeCleaning (rules C120 to C123).
"""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from kafkalog.errors import InvalidInputError
from kafkalog.storage_engine.format import layout
from kafkalog.storage_engine.fs import locks
from kafkalog.storage_engine.place import directory_log_of

if TYPE_CHECKING:
    from kafkalog.storage_engine.directory.directory_log import DirectoryLog
    from kafkalog.storage_engine.place import OpenedLog

_TRIES = 3
_PAUSE_S = 0.002


@contextlib.contextmanager
def abort_and_pause(log: DirectoryLog | OpenedLog, topic: str, partition: int) -> Iterator[None]:
    """Abort a cleaning of the partition, wait until it has ended, and let no other begin meanwhile.

    `log` is what `kafkalog.open` returned. This holds for cleaners of every process, and for forced
    cleanings. It may be nested. Raises UnknownTopicError, and InvalidInputError for a missing
    partition or a read-only log.
    """
    directory_log = directory_log_of(log)
    known = directory_log.describe(topic)
    if directory_log.read_only:
        raise InvalidInputError(f"{directory_log.root}: the log is only read, so it is not cleaned")
    if not known.is_here(partition):
        raise InvalidInputError(
            f"topic {topic!r} has no partition {partition} here: it has {len(known.partitions)}"
        )
    directory = directory_log.partition_directory(topic, partition)
    with locks.FileLock(directory / layout.CLEANING_PAUSED).shared():
        with locks.FileLock(directory / layout.CLEANER_LOCK).exclusive():
            pass  # the earlier holder has ended, and the next one checks our lock first
        yield


def is_paused(directory: Path) -> bool:
    """Return whether cleaners are kept away from a partition; never waits for long.

    Two processes that ask at the same time see each other's lock, so a yes is checked again.
    """
    lock = locks.FileLock(directory / layout.CLEANING_PAUSED)
    if not lock.path.exists():
        return False
    for attempt in range(_TRIES):
        if not lock.is_held():
            return False
        if attempt < _TRIES - 1:
            time.sleep(random.uniform(0.5, 1.5) * _PAUSE_S)
    return True
