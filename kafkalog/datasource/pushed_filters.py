"""What a query's filters allow a batch read to leave out.

Spark pushes filters only with `spark.sql.python.filterPushdown.enabled`, and then to a reader that
says it takes some. We give all of them back, so Spark looks at every row again and the filters here
only prune: topics and partitions, pieces by their offsets, batches by their time, rows by time and
key. What cannot be used, such as a filter of a kind unknown here, is passed over.

A view of the newest records is pruned by topic, partition and key alone: a filter by offset or time
must not hide from it that a record is superseded.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from pyspark.sql.datasource import (
    EqualNullSafe,
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    IsNotNull,
    IsNull,
    LessThan,
    LessThanOrEqual,
    Not,
    StringContains,
    StringEndsWith,
    StringStartsWith,
)

from kafkalog.datasource.offset_range import OffsetRange
from kafkalog.datasource.offsets import TopicPartition
from kafkalog.storage_engine.layout import INT64_MAX
from kafkalog.storage_engine.murmur2 import partition_of
from kafkalog.storage_engine.record_filter import RecordFilter

__all__ = ["PushedFilters", "are_pushed"]

_WORKER: Final = "pyspark.sql.worker.data_source_pushdown_filters"
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_TESTS: Final[dict[type[Filter], Callable[[Any, Any], bool]]] = {
    EqualTo: lambda found, value: bool(found == value),
    EqualNullSafe: lambda found, value: bool(found == value),
    GreaterThan: lambda found, value: bool(found > value),
    GreaterThanOrEqual: lambda found, value: bool(found >= value),
    LessThan: lambda found, value: bool(found < value),
    LessThanOrEqual: lambda found, value: bool(found <= value),
    In: lambda found, value: found in value,
    StringStartsWith: lambda found, value: bool(found.startswith(value)),
    StringEndsWith: lambda found, value: bool(found.endswith(value)),
    StringContains: lambda found, value: value in found,
}
"""What a filter of a column without nulls says of a value."""
_PLACES: Final = {"topic": str, "partition": int}


def are_pushed() -> bool:
    """Tell whether this process is the one in which Spark pushes filters.

    Only there may a reader define `pushFilters`: elsewhere Spark refuses the read for it, unless
    the user has switched pushing on.
    """
    main = getattr(sys.modules.get("__main__"), "__spec__", None)
    return _WORKER in sys.modules or getattr(main, "name", None) == _WORKER


@dataclass(frozen=True, slots=True)
class PushedFilters:
    """The filters of a query, as far as they can be used; plain data, sent to the tasks.

    Rows below `start` or at or above `end` are not wanted.
    """

    places: tuple[Filter, ...] = ()
    """Those on topic and partition."""
    start: int = 0
    end: int = INT64_MAX
    records: RecordFilter = RecordFilter()  # noqa: RUF009 - it is immutable

    @classmethod
    def of(cls, filters: Iterable[Filter]) -> PushedFilters:
        """Return what the filters, all of which hold for a wanted row, say together."""
        known = cls()
        for filter_ in filters:
            known = known._and(filter_)
        return known

    @property
    def of_view(self) -> PushedFilters:
        """What may prune a view of the newest records."""
        records = RecordFilter(keys=self.records.keys, has_key=self.records.has_key)
        return PushedFilters(self.places, records=records)

    def wants(self, partition: TopicPartition, partition_count: int, partitioner: str) -> bool:
        """Tell whether a partition may have wanted rows.

        With the partitioner `murmur2` a key is in one of the topic's `partition_count` partitions.
        """
        if not all(_holds(filter_, partition) for filter_ in self.places):
            return False
        keys = self.records.keys
        if keys is None or partitioner != "murmur2":
            return True
        return any(partition_of(key, partition_count) == partition.partition for key in keys)

    def wants_range(self, piece: OffsetRange) -> bool:
        """Tell whether a range may have wanted rows, now or when its open end has moved on."""
        if 0 <= piece.end <= self.start:
            return False
        return max(piece.start, 0) < self.end

    def _and(self, filter_: Filter) -> PushedFilters:
        name = _column(filter_)
        if name in _PLACES:
            return replace(self, places=(*self.places, filter_))
        values = _values(filter_)
        if name == "offset" and values and all(type(value) is int for value in values):
            return self._and_offset(filter_, min(values), max(values))
        if name == "timestamp" and values and all(_is_instant(value) for value in values):
            times = [(value - _EPOCH) // timedelta(microseconds=1) for value in values]
            return self._and_timestamp(filter_, min(times), max(times))
        if name in {"key", "value"}:
            return self._and_bytes(filter_, name, values)
        return self

    def _and_offset(self, filter_: Filter, least: int, most: int) -> PushedFilters:
        start, end = self.start, self.end
        if isinstance(filter_, EqualTo | EqualNullSafe | In | GreaterThanOrEqual):
            start = max(start, least)
        if isinstance(filter_, GreaterThan):
            start = max(start, least + 1)
        if isinstance(filter_, EqualTo | EqualNullSafe | In | LessThanOrEqual):
            end = min(end, most + 1)
        if isinstance(filter_, LessThan):
            end = min(end, most)
        return replace(self, start=start, end=end)

    def _and_timestamp(self, filter_: Filter, least: int, most: int) -> PushedFilters:
        """Take a filter by microseconds; records have milliseconds."""
        records = self.records
        first, last = records.min_timestamp, records.max_timestamp
        if not isinstance(filter_, LessThan | LessThanOrEqual):
            is_above = isinstance(filter_, GreaterThan)
            bound = least // 1000 + 1 if is_above else -(-least // 1000)
            first = bound if first is None else max(first, bound)
        if not isinstance(filter_, GreaterThan | GreaterThanOrEqual):
            bound = -(-most // 1000) - 1 if isinstance(filter_, LessThan) else most // 1000
            last = bound if last is None else min(last, bound)
        return replace(self, records=replace(records, min_timestamp=first, max_timestamp=last))

    def _and_bytes(self, filter_: Filter, name: str, values: list[Any]) -> PushedFilters:
        records = self.records
        if isinstance(filter_, IsNull | IsNotNull):
            has = isinstance(filter_, IsNotNull)
            if name == "key":
                return replace(self, records=replace(records, has_key=has))
            return replace(self, records=replace(records, has_value=has))
        is_equal = isinstance(filter_, EqualTo | EqualNullSafe | In)
        values = [bytes(value) for value in values if isinstance(value, bytes | bytearray)]
        if name != "key" or not is_equal or len(values) < len(_values(filter_)) or not values:
            return self
        keys = frozenset(values) if records.keys is None else records.keys & frozenset(values)
        return replace(self, records=replace(records, keys=keys))


def _column(filter_: Filter) -> str:
    """Return the name of the column a filter is about; empty for none that can be used."""
    inner = filter_.child if isinstance(filter_, Not) else filter_
    attribute: tuple[str, ...] = getattr(inner, "attribute", ())
    name = attribute[0] if len(attribute) == 1 else ""
    if isinstance(filter_, Not) and name not in _PLACES:
        return ""
    return name


def _values(filter_: Filter) -> list[Any]:
    if isinstance(filter_, In):
        return [value for value in filter_.value if value is not None]
    value = getattr(filter_, "value", None)
    return [] if value is None else [value]


def _is_instant(value: object) -> bool:
    return isinstance(value, datetime) and value.tzinfo is not None


def _holds(filter_: Filter, partition: TopicPartition) -> bool:
    """Tell whether a filter on topic or partition may hold; it does where it is not understood."""
    inner = filter_.child if isinstance(filter_, Not) else filter_
    name = _column(filter_)
    if isinstance(inner, IsNull | IsNotNull):
        return isinstance(inner, IsNotNull) != isinstance(filter_, Not)
    test = _TESTS.get(type(inner))
    value: Any = getattr(inner, "value", None)
    parts = value if isinstance(inner, In) else (value,)
    if test is None or not all(type(part) is _PLACES[name] for part in parts):
        return True
    found: Any = partition.topic if name == "topic" else partition.partition
    return test(found, value) != isinstance(filter_, Not)
