"""A log in a directory at one time."""

from __future__ import annotations

import contextlib
from functools import cached_property
from typing import TYPE_CHECKING, Final

from kafkalog.cleaner.dedup.presence import is_being_cleaned, is_cleaner_running, may_clean
from kafkalog.cleaner.directory.log_to_clean import live_segments, log_to_clean
from kafkalog.cleaner.directory.pause import is_paused
from kafkalog.cleaner.plan import BROKERS, COPY, OURS, closing_min
from kafkalog.cleaner.shelf import Moment, Piece
from kafkalog.cleaner.state.notes import DirectoryNotes
from kafkalog.errors import StorageError
from kafkalog.storage_engine.directory.pins import LivePins
from kafkalog.storage_engine.format import layout
from kafkalog.storage_engine.fs import files
from kafkalog.storage_engine.metadata.config import TopicConfig
from kafkalog.storage_engine.metadata.directory_signs import is_copy
from kafkalog.storage_engine.segment.segments import (
    SegmentFiles,
    glance_at_segments,
    list_segments,
)

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from kafkalog.cleaner.plan import Plan
    from kafkalog.storage_engine.directory.directory_log import DirectoryLog
    from kafkalog.storage_engine.metadata.state import PartitionState, TopicState
    from kafkalog.storage_engine.reading.partition_snapshot import PartitionSnapshot


class DirectoryMoment(Moment):
    """The state and the pins at one time, and what the files say after it."""

    def __init__(self, log: DirectoryLog, now_ms: int) -> None:
        """Load the state."""
        super().__init__(str(log.root), log.state(), now_ms)
        self.log: Final = log
        self._segments: dict[tuple[str, int], Sequence[SegmentFiles]] = {}

    @cached_property
    def _pins(self) -> LivePins:
        return LivePins(self.log.root, self.now_ms)

    @cached_property
    def owner(self) -> str:
        """OURS, BROKERS or COPY."""
        if is_copy(self.log.root):
            return COPY
        return OURS if (self.log.root / layout.COMMIT).exists() else BROKERS

    @cached_property
    def is_cleaner_running(self) -> bool | None:
        """Whether any process cleans it in the background; None if that cannot be known."""
        return is_cleaner_running(self.log.root)

    def has_topic(self, name: str, topic_id: str) -> bool:
        """Return whether a topic exists still."""
        return self.log.has_topic(name, topic_id)

    def notes(self, topic: str, partition: int) -> DirectoryNotes:
        """Return what the cleanings of a partition have left."""
        return DirectoryNotes(self._directory(topic, partition))

    def is_paused(self, topic: str, partition: int) -> bool:
        """Return whether a process keeps cleaners away."""
        return is_paused(self._directory(topic, partition))

    def is_being_cleaned(self, topic: str, partition: int) -> bool:
        """Return whether a process is known to clean it now."""
        return is_being_cleaned(self._directory(topic, partition))

    def may_clean(self, topic: str, partition: int) -> bool:
        """Return whether this process may clean it."""
        return may_clean(self._directory(topic, partition))

    def snapshot(self, topic: str, partition: int, start: int) -> PartitionSnapshot:
        """Open a snapshot of a partition, to read from an offset on."""
        return self.log.snapshot(topic, partition, start=start)

    def pieces(self, plan: Plan) -> Sequence[Piece]:
        """Return the files that hold a partition's records, ascending."""
        state, segments = plan.state, self._segments[plan.topic, plan.partition]
        ends = [*(segment.base_offset for segment in segments[1:]), state.high_watermark]
        # Bytes after the committed ones are garbage, or belong to a running commit.
        return [
            Piece(base, end, state.active_size if base == state.active_base else segment.size)
            for segment, end in zip(segments, ends, strict=False)  # there may be no segment
            for base in [segment.base_offset]
        ]

    def leftovers(self, topic: str, partition: int) -> tuple[int, int]:
        """Return the bytes of `.cleaned` and `.swap` files, and those of `.deleted` ones.

        A cleaning has written the former. Readers may still use the latter.
        """
        directory = self._directory(topic, partition)
        cleaned = retired = 0
        with files.ignoring():
            for name in files.list_names(directory):
                parsed = layout.parse_segment_file(name)
                if parsed is None or not parsed[2]:
                    continue
                size = 0
                with files.ignoring():
                    size = files.size_of(directory / name)
                if parsed[2] == layout.DELETED:
                    retired += size
                else:
                    cleaned += size
        return cleaned, retired

    def _directory(self, topic: str, partition: int) -> Path:
        return self.log.partition_directory(topic, partition)

    def _plan(self, topic: str, partition: int) -> Plan:
        """Plan from the state at the beginning and a listing without a lock.

        If the two do not fit each other, plan from a listing under the lock and its state.
        """
        known = self.state.topics.get(topic)
        directory = self._directory(topic, partition)
        if known is not None and partition < len(known.partitions):
            with contextlib.suppress(FileNotFoundError):
                segments = glance_at_segments(directory)
                if segments is not None and _has_active(segments, known.partitions[partition]):
                    return self._planned(known, partition, directory, segments)
        return self._plan_locked(topic, partition, directory)

    def _plan_locked(self, topic: str, partition: int, directory: Path) -> Plan:
        """Plan from a listing and a state that fit each other.

        Raises StorageError if the active segment has committed bytes and is missing, except in a
        broker's.
        """
        with self.log.listing_lock(directory):
            described = self.log.describe(topic)
            segments = list_segments(directory)
        state = described.partitions[partition]
        if state.active_size and not _has_active(segments, state) and not self.log.is_brokers:
            raise StorageError(
                f"{directory}: the segment of offset {state.active_base} is missing; committed "
                "records are lost"
            )
        return self._planned(described, partition, directory, segments)

    def _planned(
        self, known: TopicState, partition: int, directory: Path, segments: Sequence[SegmentFiles]
    ) -> Plan:
        state = known.partitions[partition]
        self._segments[known.name, partition] = live_segments(segments, state)
        return log_to_clean(
            known.name,
            partition,
            directory=directory,
            config=TopicConfig.parse(known.config),
            state=state,
            segments=segments,
            now_ms=self.now_ms,
            pinned=self._pins.holder(known.name, known.topic_id, partition),
            is_awaited=self._pins.has_changelog,
            closing_min=(lambda: self.closing_min) if self.owner == OURS else None,
        )

    @cached_property
    def closing_min(self) -> int:
        """The least bytes for which the cleaner closes an active segment."""
        total = count = 0
        for name, known in self.state.topics.items():
            for number, state in known.present():
                total += state.active_size + self._closed_bytes(name, number, state)
                count += 1
        return closing_min(total, count)

    def _closed_bytes(self, topic: str, partition: int, state: PartitionState) -> int:
        found: Sequence[SegmentFiles] = ()
        with files.ignoring():  # its own row says what is wrong with it
            found = glance_at_segments(self._directory(topic, partition)) or ()
        return sum(each.size for each in found if each.base_offset < state.active_base)


def _has_active(segments: Sequence[SegmentFiles], state: PartitionState) -> bool:
    return any(segment.base_offset == state.active_base for segment in segments)
