"""The records of a topic that `read` prints: offsets and key, and where it begins."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Self

from kafkalog.cli.terminal.output import note
from kafkalog.cli.terminal.time_text import epoch_ms
from kafkalog.errors import InvalidInputError
from kafkalog.storage_engine.fs import clock
from kafkalog.storage_engine.log.following import Following
from kafkalog.storage_engine.reading import time_offsets

if TYPE_CHECKING:
    import pyarrow as pa

    from kafkalog.storage_engine.log.log import Log
    from kafkalog.storage_engine.metadata.state import State
    from kafkalog.storage_engine.reading.partition_snapshot import PartitionSnapshot
    from kafkalog.storage_engine.records.chosen_keys import ChosenKeys

_SPAN: Final = 1 << 20
"""Offsets that are read at once, since a span may have no records of the key."""


@dataclass(frozen=True, slots=True)
class Changelog:
    """Partitions of a topic, and the records of them that are wanted."""

    log: Log
    topic: str
    partitions: tuple[int, ...]
    isolation_level: str
    key: bytes | None = None
    """Only records with this key."""

    @property
    def is_committed(self) -> bool:
        """Whether only records of committed transactions are wanted."""
        return self.isolation_level == time_offsets.READ_COMMITTED

    def beginnings(self, state: State) -> dict[int, int]:
        """Return the first offset of each partition."""
        held = state.topic(self.topic).partitions
        return {number: held[number].log_start_offset for number in self.partitions}

    def ends(self, state: State) -> dict[int, int]:
        """Return the offset after the last visible record of each partition."""
        held = state.topic(self.topic).partitions
        level = self.isolation_level
        return {number: time_offsets.end_offset(held[number], level) for number in self.partitions}

    def ends_after(
        self, starts: Mapping[int, int], state: State, wanted: int | None
    ) -> dict[int, int]:
        """Return where to stop: at the end, or before offset `wanted` if that comes first.

        A range outside the partition stays as it is, so that reading it raises the error.
        """
        visible = self.ends(state)
        if wanted is None:
            return {number: max(start, visible[number]) for number, start in starts.items()}
        held = state.topic(self.topic).partitions
        return {
            number: max(start, min(wanted, visible[number]))
            if start <= wanted <= held[number].high_watermark
            else wanted
            for number, start in starts.items()
        }

    def since(self, ms: int, state: State) -> dict[int, int]:
        """Return the offset of the first record at or after `ms` (epoch ms), or the end."""
        found = self.ends(state)
        level = self.isolation_level
        for number, end in found.items():
            first = time_offsets.offset_for_time(self.log, self.topic, number, ms, level)
            if first is not None and first.offset < end:
                found[number] = first.offset
        return found

    def last(self, count: int, state: State) -> dict[int, int]:
        """Return the offset of each partition's record with so many from it to the end."""
        firsts, ends = self.beginnings(state), self.ends(state)
        return {
            number: self._last(number, count, firsts[number], end) for number, end in ends.items()
        }

    def _last(self, number: int, count: int, first: int, end: int) -> int:
        span = count
        while True:  # a compacted partition has fewer records than offsets
            start = max(first, end - span)
            level = self.isolation_level
            found = self.log.read(
                self.topic, number, start, end, columns=["offset"], isolation_level=level
            )
            offsets = [offset for batch in found for offset in batch["offset"].to_pylist()]
            if len(offsets) >= count:
                return int(offsets[-count])
            if start == first:
                return first
            span *= 8

    def latest(self, number: int, key: bytes) -> Iterator[pa.RecordBatch]:
        """Yield the latest record of a key in a partition; nothing for a tombstone or no record."""
        from kafkalog.cleaner.key_index.key_lookup import KeyLookup

        while True:
            with KeyLookup(self.log, self.topic) as lookup:
                found = lookup.get(key, partition=number)
            if found is None:
                return
            batches = list(
                self.log.read(
                    self.topic, number, found.offset, found.offset + 1, include_headers=True
                )
            )
            if batches:  # else the record became obsolete and was cleaned away
                yield from batches
                return

    def read(
        self, starts: Mapping[int, int], ends: Mapping[int, int], passed: Callable[[int], None]
    ) -> Iterator[pa.RecordBatch]:
        """Yield the records of each partition's [start, end); `passed` gets numbers of offsets."""
        for number in self.partitions:
            start, end = starts[number], ends[number]
            with self.log.snapshot(self.topic, number, start=start) as snapshot:
                yield from self.of_snapshot(snapshot, start, end, passed)

    def of_snapshot(
        self, snapshot: PartitionSnapshot, start: int, end: int, passed: Callable[[int], None]
    ) -> Iterator[pa.RecordBatch]:
        """Yield the records of [start, end) of an open snapshot; raises like `read`."""
        from kafkalog.storage_engine.records.chosen_keys import ChosenKeys

        if self.key is None:
            done = start
            for batch in self._batches(snapshot, start, end, None):
                yield batch
                following = batch["offset"][-1].as_py() + 1
                passed(following - done)
                done = following
            passed(end - done)
            return
        keys = ChosenKeys([self.key])
        self._batches(snapshot, start, end, keys)  # checks the whole range
        for first in range(start, end, _SPAN):
            last = min(first + _SPAN, end)
            yield from self._batches(snapshot, first, last, keys)
            passed(last - first)

    def following(self, state: State, wait: Callable[[], bool]) -> Following:
        """Return who follows the topic, and says what was deleted before it was read."""

        def lose(number: int, start: int, end: int) -> None:
            note(
                f"kafkalog: {self.topic}-{number}: offsets {start} to {end - 1} were deleted "
                "before they were read"
            )

        def read(snapshot: PartitionSnapshot, start: int, end: int) -> Iterator[pa.RecordBatch]:
            return self.of_snapshot(snapshot, start, end, lambda _: None)

        topic = state.topic(self.topic)
        return Following(self.log, topic, self.isolation_level, read, wait, lose)

    def _batches(
        self, snapshot: PartitionSnapshot, start: int, end: int, keys: ChosenKeys | None
    ) -> Iterator[pa.RecordBatch]:
        from kafkalog.schema import changelog_schema

        schema = changelog_schema(include_headers=True)
        return snapshot.read(start, end, schema=schema, read_committed=self.is_committed, keys=keys)


@dataclass(frozen=True, slots=True)
class Beginning:
    """The start that the options choose."""

    options: tuple[str, ...]
    """The options that were given: one, or none."""
    since_ms: int | None
    start: int | None
    """An offset, or the negative of how many offsets are left to the end."""
    records: int | None = None
    """How many records are left to the end of each partition."""

    @classmethod
    def of(cls, *, from_beginning: bool, from_time: str | None, start: int | None) -> Self:
        """Parse the options; raises InvalidInputError for two of them, or for an invalid time."""
        given = {
            "--from-beginning": from_beginning,
            "--from-time": from_time is not None,
            "--start": start is not None,
        }
        options = tuple(name for name, is_given in given.items() if is_given)
        if len(options) > 1:
            raise InvalidInputError(f"{' and '.join(options)}: give one of them")
        since_ms = None
        if from_time is not None:
            since_ms = epoch_ms(from_time, now_ms=clock.now_ms(), option="--from-time")
        return cls(options, since_ms, start)

    def offsets(self, changelog: Changelog, state: State, *, at_end: bool) -> dict[int, int]:
        """Return each partition's start; without options its end (`at_end`) or its first record."""
        if self.records is not None:
            return changelog.last(self.records, state)
        if self.start is not None and self.start < 0:
            first, ends = changelog.beginnings(state), changelog.ends(state)
            return {n: max(first[n], end + self.start) for n, end in ends.items()}
        if self.start is not None:
            return dict.fromkeys(changelog.partitions, self.start)
        if self.since_ms is not None:
            return changelog.since(self.since_ms, state)
        if at_end and not self.options:
            return changelog.ends(state)
        return changelog.beginnings(state)
