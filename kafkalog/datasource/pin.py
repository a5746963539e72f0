"""The snapshot pin of one read: all tasks of a Spark action read the log as of one moment.

Tasks look up an open end, and each would find another one. They agree by a pin (`reading.pins`)
named after the action: the id of Spark's SQL execution, which all stages, joins, subqueries and
retries of one action share. Without an execution, as for `df.rdd`, it is the stage. The application
is known by the directory that Spark makes for its driver, as not every task knows the application's
id.

A thread renews the pin's lease while a task reads. Finding the latest records of a large partition
may take longer than the lease, before the first batch is returned.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import threading
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Final

from kafkalog.datasource.micro_batch import held_partition
from kafkalog.datasource.offsets import EARLIEST, LATEST, Offsets, TopicPartition
from kafkalog.errors import InvalidInputError, MomentPassedError, StorageError
from kafkalog.storage_engine.directory.pin_file import Pin
from kafkalog.storage_engine.directory.pins import Action, hold, hold_changelog, pin, renew
from kafkalog.storage_engine.format import layout
from kafkalog.storage_engine.fs import clock

if TYPE_CHECKING:
    from kafkalog.datasource.offset_range import OffsetRange
    from kafkalog.datasource.options import SourceOptions
    from kafkalog.storage_engine.directory.readable_directory import ReadableDirectory
    from kafkalog.storage_engine.metadata.state import State, TopicState

_RENEWAL_S: Final = 60.0
_OF_ONE_DRIVER: Final = "blockmgr-"
"""The start of that directory's name, before an id that is unique."""


def driver_name() -> str:
    """Name this application, for all readers that its driver plans; call it where they are planned.

    A process outside Spark gets a unique name.
    """
    directories = os.environ.get("SPARK_LOCAL_DIRS", "")
    # A directory that Spark did not make for this driver may belong to other applications too.
    return directories if _OF_ONE_DRIVER in directories else uuid.uuid4().hex


@contextlib.contextmanager
def held_pin(
    log: ReadableDirectory, driver: str, *, is_changelog: bool = False
) -> Iterator[Pin | None]:
    """Yield the pin of the action that this task belongs to, and hold it.

    Yields None outside a Spark task, in a root that is not writable, and in a broker's directory.
    Raises StorageError and CorruptLogError.
    """
    action = _action(driver)
    if action is None or not (log.root / layout.COMMIT).exists():
        yield None
        return
    with contextlib.ExitStack() as held:
        if is_changelog:
            hold_changelog(log.root, held)
        found = pin(log.root, action, log.state, clock.now_ms(), held=held)
        held.enter_context(renewed(None if found is None else found.path))
        yield found


def pin_ends(log: ReadableDirectory, ends: Offsets, held: contextlib.ExitStack) -> Path | None:
    """Pin the log at the given ends for later tasks, and hold the pin until `held` is closed.

    Returns None if the root is not writable or a cleaner has passed all ends.
    """
    if not (log.root / layout.COMMIT).exists() or not _not_passed(log.state(), ends):
        return None
    action = Action(driver_name(), f"ends {uuid.uuid4().hex}")
    with contextlib.suppress(StorageError):
        found = pin(log.root, action, lambda: _as_of(log.state(), ends), clock.now_ms(), held=held)
        return None if found is None else found.path
    return None


def as_pinned(
    log: ReadableDirectory, wanted: OffsetRange, pin: Pin | None, options: SourceOptions
) -> OffsetRange | None:
    """Return a range with an open end as of the pin; None if the partition did not exist then.

    It starts no earlier and ends no later than the log at the pin, so records that retention
    deletes later are a loss. Without a pin the range stays as it is. Raises UnknownTopicError, and
    InvalidInputError for a topic that was deleted and created again.
    """
    if pin is None:
        return wanted
    topic, number = wanted.partition
    topic_id = log.describe(topic).topic_id
    held = pin.partition(topic, topic_id, number)
    if held is None:
        if pin.topics.get(topic, (topic_id,))[0] != topic_id:
            raise InvalidInputError(f"topic {topic!r} was deleted and created again: read again")
        return None
    start, end, first = wanted.start, wanted.end, held.log_start_offset
    is_stable = options.latest_view or options.read_committed
    last = held.last_stable_offset if is_stable else held.high_watermark
    if options.latest_view:
        start, end = first, last
    if start == EARLIEST or wanted.from_earliest:
        start = max(start, first)
    end = last if end == LATEST else min(end, last)
    return dataclasses.replace(wanted, start=min(start, end), end=end, from_earliest=False)


def refuse_passed(
    wanted: OffsetRange, pin: Pin | None, options: SourceOptions
) -> Callable[[TopicState], None]:
    """Return a check that refuses a state whose log may lack records of the pinned moment.

    A view of the latest records needs that no cleaning has passed its end. A changelog needs all
    records, so it refuses any swap since the pin. Without a pin nothing is refused. A log start
    beyond the end is data loss, which the read reports. The log must still complete a materialized
    table whose moment the options have.
    """
    topic, number = wanted.partition

    def check(state: TopicState) -> None:
        if options.completes is not None:
            options.completes.check_partition(state, number)
        if pin is None:
            return
        held = pin.partition(topic, state.topic_id, number)
        if held is None:
            raise InvalidInputError(f"topic {topic!r} was deleted and created again: read again")
        now = state.partitions[number]
        is_passed = (
            now.is_cleaned_beyond(wanted.end)
            if options.latest_view
            else now.swapped_at > pin.number
        )
        if is_passed:
            raise MomentPassedError(
                f"{wanted.partition}: this read is of the moment at which the partition ended at "
                f"offset {held.last_stable_offset}, and by now the log is cleaned up to offset "
                f"{now.cleaned_to}; run the action again"
            )

    return check


@contextlib.contextmanager
def renewed(path: Path | None) -> Iterator[None]:
    """Hold a pin, and renew its lease every minute, while the block runs.

    A pin of another user that cannot be opened keeps its lease.
    """
    if path is None:
        yield
        return
    is_over = threading.Event()

    def keep() -> None:
        while not is_over.wait(_RENEWAL_S):
            renew(path, clock.now_ms())

    with contextlib.ExitStack() as held:
        with contextlib.suppress(PermissionError):
            hold(path, held, clock.now_ms())
        threading.Thread(target=keep, name="kafkalog-pin", daemon=True).start()
        try:
            yield
        finally:
            is_over.set()


def _action(driver: str) -> Action | None:
    """Return the action of this task; None outside Spark's tasks."""
    from pyspark import TaskContext

    context = TaskContext.get()
    if context is None:
        return None
    execution = context.getLocalProperty("spark.sql.execution.id")
    batch = context.getLocalProperty("streaming.sql.batchId")
    return Action(
        driver,
        f"execution {execution}" if execution else f"stage {context.stageId()}",
        query=context.getLocalProperty("sql.streaming.queryId"),
        batch=int(batch) if batch and batch.isdecimal() else None,
    )


def are_passed(state: State, ends: Offsets) -> bool:
    """Return whether a cleaner has passed one of the ends, or announced that it will."""
    return any(
        (held := held_partition(partition, state)) is not None and end < held.cleaned_to
        for partition, end in ends.items()
    )


def _not_passed(state: State, ends: Offsets) -> Offsets:
    """Return the ends of present partitions that no cleaner has passed."""
    return {
        partition: end
        for partition, end in ends.items()
        if (held := held_partition(partition, state)) is not None and end >= held.cleaned_to
    }


def _as_of(state: State, ends: Offsets) -> State:
    """Return a state in which no partition's last stable offset is above its end."""
    ends = _not_passed(state, ends)
    topics = dict(state.topics)
    for name in {partition.topic for partition in ends} & topics.keys():
        topics[name] = dataclasses.replace(
            topics[name],
            partitions=tuple(
                dataclasses.replace(
                    held,
                    last_stable_offset=min(
                        held.last_stable_offset,
                        ends.get(TopicPartition(name, number), held.last_stable_offset),
                    ),
                )
                for number, held in enumerate(topics[name].partitions)
            ),
        )
    return dataclasses.replace(state, topics=topics)
