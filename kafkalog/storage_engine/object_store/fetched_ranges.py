"""The ranges of objects that one task reads: joined where they touch, fetched ahead, and kept.

A task names all extents that it may read. Extents that touch each other in an object are fetched
together, in ranges of at most 8 MiB. Therefore a task that reads neighbouring partitions sends one
request for each object, and not one for each extent. Ranges stay in memory up to a budget, so the
second pass of `view=latest` over a small partition sends no request.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Final, NamedTuple, Self

if TYPE_CHECKING:
    from kafkalog.storage_engine.object_store.client import ObjectReader
    from kafkalog.storage_engine.object_store.store_state import PlacedExtent

RANGE_SIZE: Final = 8 << 20
AHEAD: Final = 4
"""Ranges that are fetched while their reader is busy with the one before."""
KEPT_SIZE: Final = 64 << 20
"""Bytes of ranges in memory; more than those of a range and of the ones ahead."""


class ObjectRange(NamedTuple):
    """A range of an object."""

    object_name: str
    position: int
    size: int


class FetchedRanges:
    """The ranges that some extents need; `close` it, or use it in a `with`. Thread-safe."""

    def __init__(
        self, client: ObjectReader, extents: Iterable[PlacedExtent], *, kept_size: int = KEPT_SIZE
    ) -> None:
        """Send no request yet."""
        self.client = client
        self._kept_size = kept_size
        self._ranges = _joined(extents)
        self._kept: OrderedDict[ObjectRange, Future[memoryview]] = OrderedDict()
        self._size = 0
        self._lock = threading.Lock()
        self._pool: ThreadPoolExecutor | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Forget all ranges, and wait for no request."""
        with self._lock:
            self._kept.clear()
            self._size = 0
            pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown(wait=False, cancel_futures=True)

    def ranges_of(self, placed: PlacedExtent) -> Sequence[ObjectRange]:
        """Return the ranges that hold an extent, ascending."""
        ranges, extent = self._ranges[placed.object_name], placed.extent
        first = bisect_right(ranges, extent.position, key=lambda each: each.position) - 1
        end = extent.position + extent.size
        stop = first
        while stop < len(ranges) and ranges[stop].position < end:
            stop += 1
        return ranges[first:stop]

    def fetch(self, wanted: ObjectRange, ahead: Iterable[ObjectRange] = ()) -> memoryview:
        """Return the bytes of a range; begin to fetch those ahead. Raises StorageError."""
        mine, found = None, None
        with self._lock:
            found = self._take(wanted)
            if found is None:
                found = mine = self._keep(wanted, Future())
            for each in ahead:
                if self._take(each) is None:
                    if self._pool is None:
                        self._pool = ThreadPoolExecutor(AHEAD, "kafkalog-fetch")
                    self._keep(each, self._pool.submit(self.client.fetch, *each))
            self._drop_oldest()
        if mine is not None:
            try:
                mine.set_result(self.client.fetch(*wanted))
            except BaseException as fault:
                mine.set_exception(fault)
        try:
            return found.result()
        except BaseException:
            self._forget(wanted)
            raise

    def _take(self, wanted: ObjectRange) -> Future[memoryview] | None:
        found = self._kept.get(wanted)
        if found is not None:
            self._kept.move_to_end(wanted)
        return found

    def _keep(self, wanted: ObjectRange, made: Future[memoryview]) -> Future[memoryview]:
        self._kept[wanted] = made
        self._size += wanted.size
        return made

    def _drop_oldest(self) -> None:
        while self._size > self._kept_size and len(self._kept) > AHEAD + 1:
            dropped, _ = self._kept.popitem(last=False)
            self._size -= dropped.size

    def _forget(self, failed: ObjectRange) -> None:
        """Let the next reader of a range that failed try again."""
        with self._lock:
            if self._kept.pop(failed, None) is not None:
                self._size -= failed.size


def _joined(extents: Iterable[PlacedExtent]) -> dict[str, Sequence[ObjectRange]]:
    """Return the ranges of each object that extents need; extents that touch are joined."""
    spans: dict[str, list[tuple[int, int]]] = {}
    for name, extent in extents:
        spans.setdefault(name, []).append((extent.position, extent.position + extent.size))
    return {name: tuple(_cut(name, found)) for name, found in spans.items()}


def _cut(name: str, spans: Iterable[tuple[int, int]]) -> Iterator[ObjectRange]:
    """Yield ranges of at most RANGE_SIZE over the spans (start, end) of one object."""
    joined: list[tuple[int, int]] = []
    for start, end in sorted(spans):
        if joined and start <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(end, joined[-1][1])
        else:
            joined.append((start, end))
    for start, end in joined:
        for position in range(start, end, RANGE_SIZE):
            yield ObjectRange(name, position, min(RANGE_SIZE, end - position))
