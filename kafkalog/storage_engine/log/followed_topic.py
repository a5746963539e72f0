"""The record batches that `KafkaLog.follow` returns, for `for` and `async for`."""

from __future__ import annotations

import asyncio
import functools
import math
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Final, NoReturn, Self

from kafkalog.errors import DataLossError, InvalidInputError
from kafkalog.storage_engine.format.whole_number import whole_number
from kafkalog.storage_engine.log.following import Following
from kafkalog.storage_engine.reading import time_offsets

if TYPE_CHECKING:
    import pyarrow as pa

    from kafkalog.storage_engine.log.readable_log import ReadableLog
    from kafkalog.storage_engine.metadata.state import TopicState
    from kafkalog.storage_engine.reading.partition_snapshot import PartitionSnapshot

EARLIEST: Final = "earliest"
LATEST: Final = "latest"


class FollowedTopic:
    """The record batches of a topic as they are committed; a context manager.

    It ends when it is closed, or the log. One thread, or one task of asyncio, iterates at a time.
    Another iteration continues where the last one stopped.
    """

    def __init__(
        self,
        log: ReadableLog,
        topic: str,
        start: str | Mapping[int, int],
        *,
        include_headers: bool,
        isolation_level: str,
        poll_s: float,
        faults: Callable[[], AbstractContextManager[None]],
    ) -> None:
        """`faults` is entered while records are read; `KafkaLog.follow` has the others."""
        from kafkalog.schema import changelog_schema

        is_number = isinstance(poll_s, (int, float)) and not isinstance(poll_s, bool)
        if not is_number or not 0 < poll_s < math.inf:
            raise InvalidInputError(f"poll_s: expected seconds above 0, found {poll_s!r}")
        schema = changelog_schema(include_headers=include_headers)
        is_committed = isolation_level == time_offsets.READ_COMMITTED

        def read(snapshot: PartitionSnapshot, begin: int, end: int) -> Iterator[pa.RecordBatch]:
            return snapshot.read(begin, end, schema=schema, read_committed=is_committed)

        def lose(number: int, begin: int, end: int) -> NoReturn:
            raise DataLossError(
                f"{topic}-{number}: offsets {begin} to {end - 1} were deleted before they were "
                f"read. Follow the topic again from {{{number}: {end}}}, without them."
            )

        known = log.describe(topic)
        self._signal = log.change_signal()
        following = Following(
            log, known, isolation_level, read, lambda: self._signal.wait(poll_s), lose
        )
        starts = _starts(known, start, isolation_level)
        self._batches = self._until_closed(following.batches(starts, is_all=True), faults)

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        return self._batches

    async def __aiter__(self) -> AsyncIterator[pa.RecordBatch]:
        # A thread of its own: those of asyncio.to_thread are few, and waiting would use them up.
        thread = ThreadPoolExecutor(1, "kafkalog-follow")
        wait = functools.partial(
            asyncio.get_running_loop().run_in_executor, thread, next, self._batches, None
        )
        try:
            while (batch := await wait()) is not None:
                yield batch
        except asyncio.CancelledError:
            self.close()  # or the thread that waits would keep the process from ending
            raise
        finally:
            thread.shutdown(wait=False)

    def close(self) -> None:
        """End the iteration within the time of a poll; may be called by any thread."""
        self._signal.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _until_closed(
        self,
        batches: Iterator[pa.RecordBatch],
        faults: Callable[[], AbstractContextManager[None]],
    ) -> Iterator[pa.RecordBatch]:
        with self._signal, faults():
            for batch in batches:
                if self._signal.is_closed:
                    return
                yield batch


def _starts(
    topic: TopicState, start: str | Mapping[int, int], isolation_level: str
) -> dict[int, int]:
    """Return where each partition begins: one that `start` doesn't name, with its first record."""
    ends = {
        number: time_offsets.end_offset(held, isolation_level) for number, held in topic.present()
    }
    firsts = {number: held.log_start_offset for number, held in topic.present()}
    if start == LATEST:
        return ends
    if start == EARLIEST:
        return firsts
    if not isinstance(start, Mapping):
        raise InvalidInputError(
            f"start: expected {EARLIEST!r}, {LATEST!r} or a dict {{partition: offset}}, "
            f"found {start!r}"
        )
    offset_of = "start: the offset of partition"
    given = {
        whole_number("start: a partition", number): whole_number(f"{offset_of} {number}", offset)
        for number, offset in start.items()
    }
    return firsts | given
