"""The obsolete records of each segment, counted in the background and kept while current."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from kafkalog.errors import InvalidInputError, KafkaLogError
from kafkalog.storage_engine.fs import files
from kafkalog.storage_engine.metadata.config import TopicConfig
from kafkalog.storage_engine.object_store.address import is_store_url

if TYPE_CHECKING:
    from collections.abc import Callable

    from kafkalog.cleaner.dedup.census import SegmentCensus
    from kafkalog.storage_engine.log.readable_log import ReadableLog
    from kafkalog.storage_engine.reading.partition_snapshot import PartitionSnapshot

_BUDGET_BYTES: Final = 64 << 20
_REST: Final = 10
"""The next count of a partition waits this many times as long as the last one took."""


def is_counting(path: str, wanted: bool | None) -> bool:
    """Tell whether obsolete records are counted: in a directory, unless that is not wanted.

    Raises InvalidInputError if they are wanted of an object store.
    """
    if wanted and is_store_url(path):
        raise InvalidInputError(
            f"{path}: --count reads the whole log (expected a directory, found an object store). "
            "Leave it out."
        )
    return wanted is not False and not is_store_url(path)


@dataclass(slots=True)
class _Counted:
    identity: tuple[tuple[int, int], ...]
    """Base offset and size of each segment when it was counted, and the partition's ends."""
    segments: dict[int, SegmentCensus]
    due: float
    """When it may be counted again, by the monotonic clock (s)."""


@dataclass(slots=True)
class Counts:
    """The last counts of a log's partitions; many threads may read them, one counts."""

    _counted: dict[tuple[str, int], _Counted] = field(default_factory=dict)

    def of(self, topic: str, partition: int) -> dict[int, SegmentCensus]:
        """Return the last count, by base offset; {} before the first."""
        known = self._counted.get((topic, partition))
        return {} if known is None else known.segments

    def count(
        self,
        log: ReadableLog,
        topic: str | None = None,
        check_abort: Callable[[], None] = lambda: None,
    ) -> None:
        """Count each compacted partition, or those of a topic, that has changed and has rested.

        A partition that cannot be read keeps no count; `status` and `explain` say why. A topic that
        is not compacted has no obsolete records.
        """
        places = [
            (name, number)
            for name, known in sorted(log.state().topics.items())
            if topic in (None, name) and TopicConfig.parse(known.config).is_compacted
            for number, _ in known.present()
        ]
        for gone in self._counted.keys() - set(places) if topic is None else ():
            del self._counted[gone]
        for place in places:
            check_abort()
            try:
                self._count(log, place, check_abort)
            except (OSError, KafkaLogError) as raised:
                files.pass_on(raised)
                self._counted.pop(place, None)

    def _count(
        self, log: ReadableLog, place: tuple[str, int], check_abort: Callable[[], None]
    ) -> None:
        known = self._counted.get(place)
        started = time.monotonic()
        if known is not None and started < known.due:
            return
        with log.snapshot(*place, whole=True) as snapshot:
            identity = _identity(snapshot)
            if known is not None and known.identity == identity:
                return
            segments = count_partition(snapshot, check_abort)
        now = time.monotonic()
        due = now + _REST * (now - started)
        self._counted[place] = _Counted(identity, segments, due)


def count_partition(
    snapshot: PartitionSnapshot, check_abort: Callable[[], None] = lambda: None
) -> dict[int, SegmentCensus]:
    """Return the obsolete records of each segment of a snapshot, by base offset."""
    from kafkalog.cleaner.dedup.census import census

    found = census(snapshot, budget_bytes=_BUDGET_BYTES, check_abort=check_abort)
    return {one.base_offset: one for one in found}


def _identity(snapshot: PartitionSnapshot) -> tuple[tuple[int, int], ...]:
    state = snapshot.state
    sizes = [
        (each.base_offset, each.limit)
        for each in snapshot.whole_segments()
        if each.base_offset < state.active_base
    ]
    ends = (
        (state.active_base, state.active_size),
        (state.log_start_offset, state.last_stable_offset),
    )
    return (*sizes, *ends)
