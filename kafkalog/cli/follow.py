"""The records of a topic as they are committed, without end, for `read --follow`.

One small read of the journal tells whether there are new records. If retention deletes records
before they are printed, a message says so, and the next records follow.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, NoReturn

from kafkalog.cli.terminal.output import note
from kafkalog.errors import DataLossError, OffsetOutOfRangeError, UnknownTopicError
from kafkalog.storage_engine.reading import time_offsets

if TYPE_CHECKING:
    import pyarrow as pa

    from kafkalog.cli.changelog import Changelog
    from kafkalog.storage_engine.metadata.state import TopicState


def follow(
    changelog: Changelog,
    starts: Mapping[int, int],
    topic_id: str,
    *,
    wait: Callable[[], None],
    is_all: bool = False,
) -> Iterator[pa.RecordBatch]:
    """Yield records from `starts` {partition: offset} on, in the order of commits.

    `wait` is called when there is nothing new. With `is_all`, partitions that the topic gets later
    are followed too. Raises DataLossError if the topic is deleted, even if another one has its
    name, CorruptBatchError and StorageError.
    """
    following = dict(starts)
    seen = None
    while True:
        state = changelog.log.state()
        if state is seen:
            wait()
            continue
        seen = state
        topic = state.topics.get(changelog.topic)
        if topic is None or topic.topic_id != topic_id:
            _raise_gone(changelog)
        for number, held in topic.present():
            if is_all:
                following.setdefault(number, held.log_start_offset)
            if number in following and not _is_read(changelog, topic, number, following[number]):
                try:
                    yield from _new_records(changelog, number, following)
                except UnknownTopicError:
                    _raise_gone(changelog)


def _raise_gone(changelog: Changelog) -> NoReturn:
    raise DataLossError(
        f"{changelog.log.root}: topic {changelog.topic!r} was deleted while it was followed"
    )


def _is_read(changelog: Changelog, topic: TopicState, number: int, offset: int) -> bool:
    held = topic.partitions[number]
    end = time_offsets.end_offset(held, changelog.isolation_level)
    return held.log_start_offset <= offset <= held.high_watermark and end <= offset


def _new_records(
    changelog: Changelog, number: int, following: dict[int, int]
) -> Iterator[pa.RecordBatch]:
    """Yield the visible records, and move `following` behind them."""
    start = following[number]
    try:
        with changelog.log.snapshot(changelog.topic, number, start=start) as snapshot:
            first = snapshot.state.log_start_offset
            if start < first:
                _tell_lost(changelog, number, start, first)
                start = following[number] = first
            end = max(start, time_offsets.end_offset(snapshot.state, changelog.isolation_level))
            for batch in changelog.of_snapshot(snapshot, start, end, lambda _: None):
                following[number] = batch["offset"][-1].as_py() + 1
                yield batch
            following[number] = end
    except OffsetOutOfRangeError as fault:
        # Retention deleted it while it was read, in a log with very many segments.
        if not following[number] <= fault.offset < fault.log_start:
            raise
        _tell_lost(changelog, number, fault.offset, fault.log_start)
        following[number] = fault.log_start
        yield from _new_records(changelog, number, following)


def _tell_lost(changelog: Changelog, number: int, start: int, end: int) -> None:
    note(
        f"kafkalog: {changelog.topic}-{number}: offsets {start} to {end - 1} were deleted before "
        "they were read"
    )
