"""Erase keys of a compacted topic, and check that nothing of them is left.

A tombstone is written in every partition in which a key occurs, unless its latest record is one
already. Then these partitions are cleaned by force, and replaced files are removed. The tombstones
stay for `delete.retention.ms`: a follower that has not read them keeps the keys. With `now`, the
tombstones of these keys go at once.

In an object store, the partitions are regrouped first. The replaced files are the objects that a
swap has dropped.

The last scan proves that no file has the keys as of a commit, which it names. A writer that writes
a key again, or commits a staged file with it, brings it back.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from kafkalog.cleaner.config import CleanerConfig
from kafkalog.cleaner.schedule import manager
from kafkalog.cleaner.schedule.partition_cleaner import PartitionCleaner
from kafkalog.cleaner.schedule.throttle import Throttler
from kafkalog.cleaner.shelves import shelf_of
from kafkalog.erasure.kinds import erasure_of
from kafkalog.erasure.occurrences import Occurrences, find_occurrences
from kafkalog.erasure.topic_files import LIVE, FileKind
from kafkalog.errors import CorruptLogError, InvalidInputError, KafkaLogError, StorageError
from kafkalog.storage_engine.fs import files
from kafkalog.storage_engine.metadata.config import TopicConfig

if TYPE_CHECKING:
    from kafkalog.cleaner.rewrite.erased_keys import ErasedKeys
    from kafkalog.cleaner.shelf import Moment, Shelf
    from kafkalog.cleaner.state.stats import CleanerStats
    from kafkalog.storage_engine.log.log import Log
    from kafkalog.storage_engine.reading.partition_snapshot import PartitionSnapshot

_NO_RECORD, _DATA, _DELETION = 0, 1, 2
Progress = Callable[[str, int, int], None]
"""Receives the current step, the bytes done, and of how many."""


def _unwatched(step: str, done: int, of: int) -> None:
    pass


@dataclass(frozen=True, slots=True)
class Erasure:
    """The steps of an erasure, and the occurrences before and after."""

    topic: str
    digests: tuple[str, ...]
    """SHA-256 of each key, in the order of its number."""
    before: Occurrences
    deletions: Mapping[int, tuple[int, int]]
    """By partition: the first offset of the tombstones that were written, and the end offset."""
    cleanings: tuple[CleanerStats, ...]
    after: Occurrences

    @property
    def is_erased(self) -> bool:
        """Whether no key occurs any more."""
        return not self.after.residuals


def erase(
    log: Log,
    topic: str,
    keys: ErasedKeys,
    *,
    now: bool = False,
    is_strict: bool = False,
    clock: Callable[[], int],
    wait: Callable[[int], None] | None = None,
    config: CleanerConfig,
    progress: Progress = _unwatched,
) -> Erasure:
    """Erase keys of a topic; see the module.

    `clock` returns epoch ms. `wait` receives the time until which replaced files are kept, and
    returns then; without it these files stay, and are found. With `now`, tombstones and replaced
    files are removed at once. Raises UnknownTopicError, InvalidInputError for a topic that is not
    compacted, StorageError, LockedByBrokerError, OSError.
    """
    shelf = shelf_of(log)
    shelf.check_cleanable()
    policy = TopicConfig.parse(log.describe(topic).config)
    if not policy.is_compacted:
        raise InvalidInputError(
            f"{topic}: its cleanup.policy is {','.join(sorted(policy.cleanup_policy)) or 'empty'}, "
            "and only compaction removes single keys; lower retention.ms, or delete_records up to "
            "the last record of the key, or alter the topic to compact,delete"
        )

    def scan(step: str, *, was_erased: bool = False) -> Occurrences:
        return find_occurrences(
            log,
            topic,
            keys,
            clock=clock,
            is_strict=is_strict,
            was_erased=was_erased,
            progress=lambda done, of: progress(step, done, of),
        )

    before = scan("looking")
    touched = {
        one.file.partition
        for one in before.files
        if one.found and one.file.kind in (*LIVE, FileKind.UNFINISHED)
    }
    partitions = sorted(number for number in touched if number is not None)
    deletions = _delete(log, topic, keys, partitions, now_ms=clock())
    erased = keys if now else None
    place = erasure_of(log, topic, before.files, clock=clock)
    place.prepare(partitions)
    cleanings = _clean(
        shelf, topic, partitions, erased=erased, clock=clock, config=config, progress=progress
    )
    log.sweep_staged(now_ms=clock())
    manager.retain(log, topic, now_ms=clock())
    place.remove_replaced(partitions, now=now, wait=wait)
    after = scan("looking again", was_erased=True)
    return Erasure(topic, tuple(keys.digests), before, deletions, tuple(cleanings), after)


# --- the deletions -------------------------------------------------------------------------------


def _delete(
    log: Log, topic: str, keys: ErasedKeys, partitions: list[int], *, now_ms: int
) -> dict[int, tuple[int, int]]:
    """Write tombstones for the keys whose latest record is not one, in one commit."""
    import pyarrow as pa

    found: list[tuple[bytes, int]] = []
    for number in partitions:
        with contextlib.suppress(CorruptLogError, StorageError):
            with log.snapshot(topic, number, whole=True) as snapshot:
                latest = _latest(snapshot, keys)
            found += [(keys.keys[key], number) for key in np.flatnonzero(latest == _DATA).tolist()]
    if not found:
        return {}
    rows = pa.RecordBatch.from_pydict(
        {
            "key": pa.array([key for key, _ in found], pa.binary()),
            "value": pa.nulls(len(found), pa.binary()),
            "partition": pa.array([number for _, number in found], pa.int32()),
        }
    )
    offsets = log.append(topic, rows, now_ms=now_ms).offsets
    return {number: span for (_, number), span in sorted(offsets.items())}


def _latest(
    snapshot: PartitionSnapshot, keys: ErasedKeys
) -> np.ndarray[tuple[int], np.dtype[np.int8]]:
    """Return for each key whether its latest record has data; open transactions count."""
    latest = np.full(len(keys), _NO_RECORD, dtype=np.int8)
    end = snapshot.state.high_watermark
    segments = snapshot.whole_segments()
    # A segment may begin below the log start, and the cleaner reads those records too.
    start = min([snapshot.state.log_start_offset, *(one.base_offset for one in segments)])
    with snapshot.transaction_outcomes() as outcomes:
        for chunk in snapshot.chunks(start, end):
            is_wanted = ~chunk.table.is_control & ~outcomes.is_aborted(chunk)
            for _, records in chunk.runs(is_wanted):
                rows, numbers = keys.find(records)
                is_deletion = records.value_sizes[rows] < 0
                # The last record of a key overwrites earlier ones.
                latest[numbers] = np.where(is_deletion, _DELETION, _DATA)
    return latest


# --- the cleaning, and what it replaces ----------------------------------------------------------


def _clean(
    shelf: Shelf,
    topic: str,
    partitions: list[int],
    *,
    erased: ErasedKeys | None,
    clock: Callable[[], int],
    config: CleanerConfig,
    progress: Progress,
) -> list[CleanerStats]:
    cleanings: list[CleanerStats] = []
    for number in partitions:
        size = _bytes_to_clean(shelf.moment(clock()), topic, number)
        cleaner = PartitionCleaner(
            shelf=shelf,
            now_ms=clock(),
            clock=clock,
            config=config,
            progress=partial(_tell, progress, size),
            throttler=Throttler(config.io_max_bytes_per_second),
            erased=erased,
            waits=True,
        )
        stats = cleaner.clean(topic, number, force=True, until_clean=True)
        cleanings += [] if stats is None else [stats]
    return cleanings


def _tell(progress: Progress, of: int, stats: CleanerStats) -> None:
    progress("cleaning", stats.map_bytes_read + stats.bytes_read, of)


def _bytes_to_clean(moment: Moment, topic: str, partition: int) -> int:
    try:
        plan = moment.plan(topic, partition)
    except (OSError, KafkaLogError) as raised:
        files.pass_on(raised)
        return 0  # its cleaning reports the reason
    return plan.clean_bytes + 2 * (plan.cleanable_bytes + plan.uncleanable_bytes)
