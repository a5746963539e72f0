"""The present ends of a streaming query's partitions, all at one point of the journal."""

from __future__ import annotations

import contextlib
import logging
import time
from typing import TYPE_CHECKING, Final

from kafkalog.datasource.data_loss import report_data_loss
from kafkalog.datasource.micro_batch import held_partition, report_deleted
from kafkalog.datasource.offsets import Offsets, TopicPartition
from kafkalog.datasource.options import SourceOptions
from kafkalog.errors import InvalidInputError

if TYPE_CHECKING:
    from kafkalog.storage_engine.log.readable_log import ReadableLog
    from kafkalog.storage_engine.metadata.state import State

_LOGGER = logging.getLogger(__name__)

_WAIT_S: Final = 120.0
"""The time that a task of Spark waits for its broker (`kafkaConsumer.pollTimeoutMs`)."""
_PAUSE_S: Final = 0.1


class LatestEnds:
    """Looks up the ends; costs one small read while nothing is committed."""

    def __init__(self, store: ReadableLog, options: SourceOptions) -> None:
        self._store = store
        self._options = options
        self._state: State | None = None
        self._ends: Offsets = {}
        self._missing: list[str] = []
        self._ids: dict[str, str] = {}
        """The ids of the topics that were subscribed to."""
        self._recreated: set[str] = set()
        """Those that have another id now, until they are reported."""

    def of(self, known: Offsets) -> Offsets:
        """Return the end of each subscribed partition; `known` are offsets seen before.

        Raises DataLossError for a topic that was subscribed to, read, and deleted;
        UnknownTopicError.
        """
        state, options = self._store.state(), self._options
        if state is not self._state:
            subscription = options.subscription
            missing = subscription.missing_topics(state)
            if missing:
                gone = [(p, offset) for p, offset in known.items() if p.topic in missing]
                report_deleted(gone, fail=options.fail_on_data_loss)
                if not options.fail_on_data_loss:
                    subscription = subscription.without(missing)
                    if missing != self._missing:
                        _LOGGER.warning("going on without missing topics: %s", ", ".join(missing))
            self._ends = options.latest_offsets(subscription, state)
            ids = {name: state.topics[name].topic_id for name in {p.topic for p in self._ends}}
            was = {} if self._store.is_brokers else self._ids  # a broker's id may come late
            self._recreated |= {name for name in ids if was.get(name, ids[name]) != ids[name]}
            self._ids |= ids
            self._missing = missing
            self._state = state
        ends = self._ends
        behind = [p for p, end in ends.items() if end < known.get(p, 0)]
        return ends | self._at_least(known, behind, state) if behind else ends

    def report_recreated(self, known: Offsets) -> None:
        """Report topics that were deleted and created again between calls of `of`.

        Other checks report a topic that ends below the known offsets, or has fewer partitions.
        Raises DataLossError, or warns. A query that starts again does not know the ids any more.
        """
        behind = {p.topic for p, offset in known.items() if self._ends.get(p, -1) < offset}
        recreated = self._recreated & {partition.topic for partition in known}
        self._recreated = recreated & behind  # what these checks do not report is left
        for name in sorted(recreated - behind):
            report_data_loss(
                "PARTITIONS_DELETED",
                f"topic {name!r} was deleted and created again",
                fail=self._options.fail_on_data_loss,
            )

    def are_of(self, ends: Offsets, state: State) -> bool:
        """Return whether an answer of `of` holds as long as the state does."""
        return ends is self._ends and state is self._state

    def wait_for(self, ends: Offsets) -> None:
        """Wait until a live broker reports at least these ends, which were seen before.

        A broker that has just started reports an old high watermark, and the checkpoint of the
        query may know a later one. After two minutes the query continues anyway.
        """
        if not self._store.is_brokers or not self._is_behind(ends):
            return
        _LOGGER.warning("waiting for the broker, whose checkpoint is older than the query's")
        deadline = time.monotonic() + _WAIT_S
        while self._is_behind(ends) and time.monotonic() < deadline:
            time.sleep(_PAUSE_S)

    def _is_behind(self, ends: Offsets) -> bool:
        state = self._store.state()
        return any(
            self._options.latest_offset(held) < end and self._store.is_live(*partition)
            for partition, end in ends.items()
            if (held := held_partition(partition, state)) is not None
        )

    def check_starts(self, starts: Offsets) -> None:
        """Report offsets of `startingOffsets` that are beyond the end of their partition.

        Raises DataLossError, or warns (Spark: KafkaOffsetReaderConsumer.fetchSpecificOffsets).
        """
        ends = self.of(starts)
        for partition, offset in sorted(starts.items()):
            end = ends.get(partition, offset)
            if end < offset:
                report_data_loss(
                    "START_OFFSET_RESET",
                    f"startingOffsets: {partition} is to start at {offset} and ends at {end}; give "
                    f"an offset up to {end}, or -1 for the end",
                    fail=self._options.fail_on_data_loss,
                )

    def _at_least(self, known: Offsets, behind: list[TopicPartition], state: State) -> Offsets:
        """Return the ends of partitions whose known end is beyond the reported one.

        A reader of uncommitted records, like Spark's own source by default, was beyond the last
        stable offset of an open transaction; what it has read stays read. A live broker reports its
        end with a delay, so a reader of the broker itself may know a later end; the log's own files
        decide then.
        """
        found: Offsets = {}
        for partition in behind:
            held = held_partition(partition, state)
            if held is not None and held.high_watermark >= known[partition]:
                found[partition] = known[partition]
                continue
            # If the partition is gone, the next trigger reports it.
            with (
                contextlib.suppress(InvalidInputError),
                self._store.snapshot(*partition, known_end=known[partition]) as snapshot,
            ):
                found[partition] = min(snapshot.state.high_watermark, known[partition])
        return found
