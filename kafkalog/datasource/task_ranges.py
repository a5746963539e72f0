"""The ranges of a read, divided among Spark's tasks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kafkalog.datasource.byte_splits import split_by_bytes
from kafkalog.datasource.offset_range import OffsetRange, split_ranges

if TYPE_CHECKING:
    from kafkalog.datasource.options import SourceOptions
    from kafkalog.storage_engine.store import Store

__all__ = ["task_ranges"]


def task_ranges(
    store: Store, options: SourceOptions, ranges: list[OffsetRange]
) -> list[OffsetRange]:
    """Split resolved ranges: by the options, as in Spark, or else by bytes."""
    if options.min_partitions is None and options.max_records_per_partition is None:
        return [piece for range_ in ranges for piece in split_by_bytes(store, range_)]
    return split_ranges(ranges, options.min_partitions, options.max_records_per_partition)
