"""What a Spark task does: read one range of a partition as Arrow batches.

Only here is the log opened for its records, so only here numba is loaded.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from pyspark.sql.datasource import InputPartition

from kafkalog.datasource.columns import arrow_schema
from kafkalog.datasource.data_loss import report_data_loss
from kafkalog.datasource.offset_range import OffsetRange
from kafkalog.datasource.offsets import EARLIEST, LATEST
from kafkalog.datasource.options import SourceOptions
from kafkalog.errors import InvalidInputError
from kafkalog.storage_engine.engine import Engine

if TYPE_CHECKING:
    import pyarrow as pa

    from kafkalog.storage_engine.log_view import LogView
    from kafkalog.storage_engine.state import PartitionState

__all__ = ["OffsetRangePartition", "RangeReader"]

_VIEW_BUDGET: Final = 128 << 20
"""Bytes of the map that finds the newest record of each key, as the cleaner's default."""


class OffsetRangePartition(InputPartition):
    """One task's range, as Spark carries it to the executor."""

    def __init__(self, range_: OffsetRange) -> None:
        super().__init__(range_)
        self.range = range_


@dataclass(frozen=True, slots=True)
class RangeReader:
    """Reads ranges with the same options and columns; plain data."""

    options: SourceOptions
    columns: tuple[str, ...]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yield the records of a range in batches of bounded size.

        Spark hands over `InputPartition(None)` when there was nothing to plan. Raises
        DataLossError when a part of the range is gone and `failOnDataLoss` is true.
        """
        if not isinstance(partition, OffsetRangePartition):
            return
        wanted = partition.range
        topic, number = wanted.partition
        with Engine(self.options.directories, read_only=True, create=False) as engine:
            try:
                # A view of the newest records needs one moment of the whole partition.
                view = engine.view(
                    topic, number, whole=self.options.latest_view, known_end=wanted.end
                )
            except InvalidInputError as error:
                report_data_loss(
                    "PARTITIONS_DELETED",
                    f"partition {wanted.partition} is gone: {error}",
                    fail=self.options.fail_on_data_loss,
                )
                return
            with view:
                if self.options.latest_view:
                    yield from self._latest(view, wanted)
                else:
                    yield from self._records(view, wanted)

    def _records(self, view: LogView, wanted: OffsetRange) -> Iterator[pa.RecordBatch]:
        start, end = self._available(view.state, wanted)
        if start < end:
            yield from view.read(
                start,
                end,
                schema=arrow_schema(self.columns),
                read_committed=self.options.read_committed,
            )

    def _latest(self, view: LogView, wanted: OffsetRange) -> Iterator[pa.RecordBatch]:
        from kafkalog.cleaner.survivors import latest

        start, end = self._available(view.state, wanted)
        if start < end:
            schema = arrow_schema(self.columns)
            yield from latest(view, end, budget_bytes=_VIEW_BUDGET, schema=schema)

    def _available(self, state: PartitionState, wanted: OffsetRange) -> tuple[int, int]:
        """Look up -2 and -1, and fit the range to what the partition holds.

        A range that reaches beyond it is data loss; a gap inside is not (the cleaner made it).
        Raises InvalidInputError for one that reaches into open transactions with read_committed:
        less than it would be a loss once they are committed. (Spark waits there, then fails too.)
        """
        first, last = state.log_start_offset, state.high_watermark
        start = first if wanted.start == EARLIEST else wanted.start
        end = self.options.latest_offset(state) if wanted.end == LATEST else wanted.end
        if wanted.size and not first <= start <= end <= last:
            report_data_loss(
                "COULD_NOT_READ_OFFSET_RANGE",
                f"topic {wanted.partition.topic} partition {wanted.partition.partition}: wanted "
                f"the offsets [{start}, {end}), available are [{first}, {last})",
                fail=self.options.fail_on_data_loss,
            )
            start, end = max(start, first), min(end, last)
        if start < end and end > self.options.latest_offset(state):
            raise InvalidInputError(
                f"{wanted.partition}: the offsets [{start}, {end}) reach into transactions that "
                f"are still open from offset {state.last_stable_offset} on; end there, or read "
                "with kafka.isolation.level=read_uncommitted"
            )
        return start, end
