"""Planners of a read's tasks: one for log directories, one for logs in object stores.

Nothing else that plans reads asks where a log lies.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from kafkalog.datasource.micro_batch import held_partition
from kafkalog.datasource.range_reader import OffsetRangePartition
from kafkalog.datasource.snapshot import HeldViews, is_unread, split_off_snapshots
from kafkalog.datasource.stored_partition import stored_partitions
from kafkalog.datasource.task_ranges import task_ranges

if TYPE_CHECKING:
    from pyspark.sql.datasource import InputPartition

    from kafkalog.datasource.offset_range import OffsetRange
    from kafkalog.datasource.offsets import Offsets
    from kafkalog.datasource.options import SourceOptions
    from kafkalog.storage_engine.directory.readable_directory import ReadableDirectory
    from kafkalog.storage_engine.log.readable_log import ReadableLog
    from kafkalog.storage_engine.metadata.state import State
    from kafkalog.storage_engine.object_store.polled_log import PolledLog


class ReadPlanner(Protocol):
    """Plans the tasks of the reads of one open log."""

    @property
    def log(self) -> ReadableLog:
        """The log, only to be read."""

    def poll(self, ends: Offsets | None = None) -> None:
        """Take the newest state; with `ends`, only if the known one does not go up to them."""

    def hold_views(self, begin: Offsets, ends: Offsets) -> bool:
        """Keep the ends of the views with which a micro-batch from `begin` starts.

        Returns False if a cleaner has passed one of them.
        """

    def batch(self, ranges: Sequence[OffsetRange], state: State) -> Sequence[InputPartition]:
        """Divide the ranges of a batch read, which were resolved with a state, among tasks."""

    def micro_batch(self, begin: Offsets, ranges: list[OffsetRange]) -> Sequence[InputPartition]:
        """Divide the ranges of a micro-batch from `begin` among tasks, and those of its views."""

    def close(self) -> None:
        """Close the log, and let its views go."""


def planner_of(options: SourceOptions) -> ReadPlanner:
    """Open the log of a read; raises InvalidInputError if the path has no log, and StorageError."""
    if options.store is None:
        from kafkalog.storage_engine.directory.readable_directory import ReadableDirectory

        return _DirectoryPlanner(
            ReadableDirectory(options.directories, read_only=True, create=False), options
        )
    from kafkalog.storage_engine.object_store.polled_log import PolledLog

    return _StorePlanner(PolledLog.shared(options.store), options)


class _DirectoryPlanner:
    def __init__(self, log: ReadableDirectory, options: SourceOptions) -> None:
        self.log = log
        self._options = options
        self._views = HeldViews()

    def poll(self, ends: Offsets | None = None) -> None:
        """Do nothing: each look at the state is a new one."""

    def hold_views(self, begin: Offsets, ends: Offsets) -> bool:
        self._views.hold(self.log, begin, ends)
        return not self._views.are_passed

    def batch(self, ranges: Sequence[OffsetRange], state: State) -> Sequence[InputPartition]:
        pieces = [*ranges]
        # A view takes a partition whole: the latest record of a key may be anywhere in it.
        if not self._options.latest_view:
            # One with an open end and nothing to read now is for what arrives later.
            empty = [range_ for range_ in pieces if range_.to_latest and range_.size == 0]
            pieces = sorted(
                [*task_ranges(self.log, self._options, pieces), *empty],
                key=lambda piece: piece.partition,
            )
        planned = [OffsetRangePartition(piece) for piece in pieces]
        if not self._options.subscription.assigned:
            last = {each.range.partition.topic: each for each in planned if each.range.to_latest}
            for topic, each in last.items():
                each.known = frozenset(state.topic(topic).numbers())
        return planned

    def micro_batch(self, begin: Offsets, ranges: list[OffsetRange]) -> Sequence[InputPartition]:
        views: Sequence[InputPartition] = []
        if self._options.latest_view:
            views, ranges = split_off_snapshots(self.log, self._views, begin, ranges)
        pieces = task_ranges(self.log, self._options, ranges)
        return [*views, *(OffsetRangePartition(piece) for piece in pieces)]

    def close(self) -> None:
        self._views.release()
        self.log.close()


class _StorePlanner:
    """Plans by the state of the last poll. Objects are immutable, so views need no pin."""

    def __init__(self, log: PolledLog, options: SourceOptions) -> None:
        self.log = log
        self._options = options

    def poll(self, ends: Offsets | None = None) -> None:
        if ends is None or not _is_known(ends, self.log.state()):
            self.log.poll()

    def hold_views(self, begin: Offsets, ends: Offsets) -> bool:
        return True

    def batch(self, ranges: Sequence[OffsetRange], state: State) -> Sequence[InputPartition]:
        changes, views = ((), ranges) if self._options.latest_view else (ranges, ())
        return stored_partitions(self.log.store_state(), self._options, changes, views)

    def micro_batch(self, begin: Offsets, ranges: list[OffsetRange]) -> Sequence[InputPartition]:
        changes: list[OffsetRange] = []
        views: list[OffsetRange] = []
        for each in ranges:
            is_view = self._options.latest_view and is_unread(each.partition, begin)
            (views if is_view else changes).append(each)
        return stored_partitions(self.log.store_state(), self._options, changes, views)

    def close(self) -> None:
        self.log.close()


def _is_known(ends: Offsets, state: State) -> bool:
    """Return whether a state has all records below these ends."""
    held = {partition: held_partition(partition, state) for partition in ends}
    return all(
        known is not None and known.high_watermark >= ends[partition]
        for partition, known in held.items()
    )
