"""The work of a Spark task: read one range of a partition as Arrow batches."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from pyspark.sql.datasource import InputPartition

from kafkalog.datasource.columns import arrow_schema
from kafkalog.datasource.data_loss import report_data_loss
from kafkalog.datasource.offset_range import OffsetRange
from kafkalog.datasource.offsets import EARLIEST, LATEST, TopicPartition
from kafkalog.datasource.options import SourceOptions
from kafkalog.datasource.pin import as_pinned, held_pin, refuse_passed, renewed
from kafkalog.datasource.stored_partition import StoredPartition, StoredRange, planned_again
from kafkalog.errors import InvalidInputError, MomentPassedError
from kafkalog.plain_errors import plain

if TYPE_CHECKING:
    import pyarrow as pa

    from kafkalog.storage_engine.directory.pin_file import Pin
    from kafkalog.storage_engine.directory.readable_directory import ReadableDirectory
    from kafkalog.storage_engine.metadata.state import PartitionState
    from kafkalog.storage_engine.reading.partition_snapshot import PartitionSnapshot

_VIEW_BUDGET: Final = 128 << 20
"""Bytes of the map that finds the latest record of each key; the cleaner's default."""
_CLEANER_WAIT_S: Final = 10.0
_CLEANER_PAUSE_S: Final = 0.02


class OffsetRangePartition(InputPartition):
    """One task's range, as Spark carries it to the executor."""

    def __init__(self, range_: OffsetRange) -> None:
        super().__init__(range_)
        self.range = range_
        self.known: frozenset[int] | None = None
        """The topic's partitions in planning. The task also reads those that came since.

        Only the task of a topic's last range has them, and only if its end is open."""


class SnapshotPartition(OffsetRangePartition):
    """The latest record of each key of a partition, also a tombstone, at a micro-batch's end."""

    def __init__(self, range_: OffsetRange, pin: Path | None, is_passed: bool) -> None:
        super().__init__(range_)
        self.pin = pin
        """The pin that keeps cleaners from passing that end, if there is one."""
        self.is_passed = is_passed
        """Whether a cleaner had passed it in planning: keys with later records are missing."""

    def check(self, state: PartitionState) -> None:
        """Raise MomentPassedError if a cleaner has passed the end since it was planned."""
        if state.is_cleaned_beyond(self.range.end) and not self.is_passed:
            raise MomentPassedError(
                f"{self.range.partition}: the view is as of offset {self.range.end}, and by now "
                f"the log is cleaned up to offset {state.cleaned_to}; start the query again"
            )


@plain
@dataclass(frozen=True, slots=True)
class RangeReader:
    """Reads ranges with the same options and columns; plain data."""

    options: SourceOptions
    columns: tuple[str, ...]
    driver: str = ""
    """The application that planned the read; see `pin.driver_name`. Streams need none."""

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yield the records of a range in batches of bounded size.

        Spark passes `InputPartition(None)` if there was nothing to plan. Raises DataLossError if a
        part of the range is gone and `failOnDataLoss` is true.
        """
        if isinstance(partition, StoredPartition):
            yield from self._stored(partition.ranges, is_stream=not self.driver)
        if not isinstance(partition, OffsetRangePartition):
            return
        from kafkalog.storage_engine.directory.readable_directory import ReadableDirectory

        with contextlib.ExitStack() as opened:
            log = ReadableDirectory(
                self.options.directories, read_only=True, create=False, is_task=True
            )
            opened.enter_context(log)
            if self.options.completes is not None:
                self.options.completes.check_log(log.state())
            pin = None
            if isinstance(partition, SnapshotPartition):
                opened.enter_context(renewed(partition.pin))
            elif partition.range.to_latest:
                is_changelog = not self.options.latest_view
                pin = opened.enter_context(held_pin(log, self.driver, is_changelog=is_changelog))
            yield from self._read_range(log, partition.range, pin, partition)
            for range_ in _added(log, partition, pin, self.options):
                yield from self._read_range(log, range_, pin, partition)

    def _read_range(
        self,
        log: ReadableDirectory,
        range_: OffsetRange,
        pin: Pin | None,
        partition: OffsetRangePartition,
    ) -> Iterator[pa.RecordBatch]:
        """Yield the records of a range in a directory, as of the pin."""
        is_snapshot = isinstance(partition, SnapshotPartition)
        with contextlib.ExitStack() as opened:
            try:
                wanted = as_pinned(log, range_, pin, self.options)
                if wanted is None:
                    return
                snapshot = opened.enter_context(self._snapshot(log, wanted, pin, is_snapshot))
            except MomentPassedError:
                raise
            except InvalidInputError as error:
                report_data_loss(
                    "PARTITIONS_DELETED",
                    f"partition {range_.partition} is gone: {error}",
                    fail=self.options.fail_on_data_loss,
                )
                return
            if isinstance(partition, SnapshotPartition):
                partition.check(snapshot.state)
                if snapshot.state.log_start_offset > wanted.end:  # the view is lost as a whole
                    wanted = replace(wanted, from_earliest=False)
            if is_snapshot or self.options.latest_view:
                yield from self._latest(snapshot, wanted, is_of_stream=is_snapshot)
            else:
                yield from self._records(snapshot, wanted)

    def _stored(
        self, ranges: Sequence[StoredRange], *, is_stream: bool
    ) -> Iterator[pa.RecordBatch]:
        """Yield the records of ranges in an object store, which one task reads.

        If an object is gone, the rest is read from where its records are by now. It is planned
        again too if a marker lies beyond the extents of the plan. Raises MomentPassedError if the
        records are nowhere, or not as they were at the moment of the read.
        """
        from kafkalog.storage_engine.object_store.failure import (
            ObjectMissingError,
            UnplannedExtentError,
        )

        left = [*ranges]
        while left:
            try:
                yield from self._fetched(left, is_stream=is_stream)
            except UnplannedExtentError as error:
                left[:1] = self._planned_again(left[:1], error, is_stream=is_stream)
            except ObjectMissingError as error:
                left = self._planned_again(left, error, is_stream=is_stream)

    def _planned_again(
        self, left: Sequence[StoredRange], error: Exception, *, is_stream: bool
    ) -> list[StoredRange]:
        """Return what is left of ranges as the log has it now; the first one failed.

        A view of the latest records, and a batch read, are of the moment at which they were
        planned: no cleaning since may have removed records. A view is never planned again.
        """
        from kafkalog.storage_engine.object_store.failure import ObjectMissingError
        from kafkalog.storage_engine.object_store.polled_log import PolledLog

        assert self.options.store is not None
        remedy = "start the query" if is_stream else "load the DataFrame, and run the action"
        passed = MomentPassedError(f"{error} In Spark, {remedy} again.")
        if any(one.is_view for one in left):
            raise passed
        state = PolledLog.shared(self.options.store).store_state()
        found = planned_again(state, self.options, left)
        before = {one.range.partition: one for one in reversed(left)}
        if not is_stream and any(before[n.range.partition].is_cleaned_in(n) for n in found):
            raise passed
        first = next((n for n in found if n.range.partition == left[0].range.partition), None)
        is_missing = isinstance(error, ObjectMissingError)
        if is_missing and first is not None and left[0].object_names <= first.object_names:
            raise passed  # the log has it in the same objects
        return found

    def _fetched(self, left: list[StoredRange], *, is_stream: bool) -> Iterator[pa.RecordBatch]:
        """Yield the records of ranges; at each moment `left` has those that were not yielded."""
        from kafkalog.storage_engine.object_store.client import shared_client
        from kafkalog.storage_engine.object_store.fetched_ranges import KEPT_SIZE, FetchedRanges
        from kafkalog.storage_engine.object_store.object_snapshot import ObjectSnapshot

        assert self.options.store is not None
        client = shared_client(self.options.store)
        extents = (each for one in left for each in (*one.extents, *one.later))
        is_read_once = len(left) == 1 and not left[0].is_view
        with FetchedRanges(client, extents, kept_size=0 if is_read_once else KEPT_SIZE) as fetched:
            for one in tuple(left):
                place = one.range.partition
                known = (*one.extents, *one.later)
                snapshot = ObjectSnapshot(fetched, *place, one.state, known, is_part=one.is_part)
                if one.is_view:
                    yield from self._latest(snapshot, one.range, is_of_stream=is_stream)
                else:
                    for batch in self._records(snapshot, one.range, "offset"):
                        left[0] = one.after(batch.column("offset")[-1].as_py())
                        yield batch.select(self.columns)
                del left[0]

    def _snapshot(
        self, log: ReadableDirectory, wanted: OffsetRange, pin: Pin | None, is_snapshot: bool
    ) -> PartitionSnapshot:
        """Open the partition; a view of the latest records needs a snapshot of the whole partition.

        A cleaner that is about to pass a pin checks it once more and goes back, so this waits for
        it.
        """
        topic, number = wanted.partition
        is_whole = is_snapshot or self.options.latest_view
        deadline = time.monotonic() + (_CLEANER_WAIT_S if is_whole else 0)
        while True:
            try:
                return log.snapshot(
                    topic,
                    number,
                    whole=is_whole,
                    start=max(wanted.start, 0) or None,
                    known_end=max(wanted.end, wanted.high_watermark),
                    check=refuse_passed(wanted, pin, self.options),
                )
            except MomentPassedError:
                state = log.describe(topic).partitions[number]
                is_at_work = state.cleaning_offset > state.first_dirty_offset
                if not is_at_work or time.monotonic() >= deadline:
                    raise
            time.sleep(_CLEANER_PAUSE_S)

    def _records(
        self, snapshot: PartitionSnapshot, wanted: OffsetRange, *more: str
    ) -> Iterator[pa.RecordBatch]:
        """Yield the records of a range, with the columns and `more`."""
        from kafkalog.storage_engine.records.chosen_keys import ChosenKeys

        keys = self.options.keys
        start, end = self._available(snapshot, wanted)
        if start < end:
            yield from snapshot.read(
                start,
                end,
                schema=arrow_schema(dict.fromkeys((*self.columns, *more))),
                read_committed=self.options.read_committed,
                keys=None if keys is None else ChosenKeys(keys),
            )

    def _latest(
        self, snapshot: PartitionSnapshot, wanted: OffsetRange, *, is_of_stream: bool
    ) -> Iterator[pa.RecordBatch]:
        from kafkalog.cleaner.key_index.latest_view import latest

        start, end = self._available(snapshot, wanted)
        moment = self.options.completes
        since = None if moment is None else moment.start(snapshot.partition, start)
        if start >= end or (since is not None and since >= end):
            return
        yield from latest(
            snapshot,
            end,
            since=since,
            budget_bytes=_VIEW_BUDGET,
            schema=arrow_schema(self.columns),
            keys=self.options.keys,
            with_tombstones=is_of_stream or moment is not None,
            with_obsolete=self.options.with_obsolete,
            may_be_passed=is_of_stream,
        )

    def _available(self, snapshot: PartitionSnapshot, wanted: OffsetRange) -> tuple[int, int]:
        """Resolve -2 and -1, and fit the range to the partition's offsets.

        A range outside them is data loss, and so are records that have vanished from the disk. Gaps
        inside are not, since the cleaner makes them; nor is a deletion by retention, if the range
        starts at the earliest offset. Raises InvalidInputError for a range that reaches into open
        transactions with read_committed: skipping their records would lose them once they are
        committed. (Spark waits there, then fails too.)
        """
        state = snapshot.state
        first, last = state.log_start_offset, state.high_watermark
        start = first if wanted.start == EARLIEST else wanted.start
        end = self.options.latest_offset(state) if wanted.end == LATEST else wanted.end
        if wanted.from_earliest:
            start, end = max(start, first), max(end, first)
        if wanted.start != wanted.end and not first <= start <= end <= last:
            report_data_loss(
                "COULD_NOT_READ_OFFSET_RANGE",
                f"topic {wanted.partition.topic} partition {wanted.partition.partition}: wanted "
                f"the offsets [{start}, {end}), available are [{first}, {last})",
                fail=self.options.fail_on_data_loss,
            )
            start, end = max(start, first), min(end, last)
        wants_all = end == self.options.latest_offset(state)
        for loss in snapshot.losses(start, last if wants_all else end):
            report_data_loss(
                "COULD_NOT_READ_OFFSET_RANGE", f"{loss}", fail=self.options.fail_on_data_loss
            )
            if loss.start <= start:
                start = min(loss.end, end)
            elif loss.end >= end:
                end = min(end, loss.start)
        snapshot.lost = ()
        if start < end and end > self.options.latest_offset(state):
            raise InvalidInputError(
                f"{wanted.partition}: the offsets [{start}, {end}) reach into transactions that "
                f"are still open from offset {state.last_stable_offset} on; end there, or read "
                "with kafka.isolation.level=read_uncommitted"
            )
        return start, end


def _added(
    log: ReadableDirectory, partition: OffsetRangePartition, pin: Pin | None, options: SourceOptions
) -> Iterator[OffsetRange]:
    """Yield the ranges of partitions that a topic got after the read was planned, as of the pin.

    Raises InvalidInputError unless the options say that they are read from the earliest offset.
    Raises it with `partitioner=murmur2` too: the plan chose partitions by their old count.
    """
    name = partition.range.partition.topic
    if partition.known is None or (topic := log.state().topics.get(name)) is None:
        return
    for number in topic.numbers():
        added = TopicPartition(name, number)
        is_later = pin is not None and pin.partition(name, topic.topic_id, number) is None
        if number in partition.known or is_later or not options.ends_at_latest(added):
            continue
        if options.is_partitioned or not options.starts_at_earliest(added):
            raise InvalidInputError(
                f"topic {name!r} has got partition {number} since this read was planned. Load the "
                "DataFrame, or create the view, again."
            )
        yield OffsetRange(added, EARLIEST, LATEST, from_earliest=True, to_latest=True)
