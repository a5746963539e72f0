"""Where the partitions of a streaming query end now, all as of one point of the journal."""

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
from kafkalog.storage_engine.fs import locks

if TYPE_CHECKING:
    from kafkalog.storage_engine.metadata.state import State
    from kafkalog.storage_engine.store import Store

__all__ = ["LatestEnds"]

_LOGGER = logging.getLogger(__name__)

_WAIT_S: Final = 120.0
"""As long as a task of Spark waits for its broker (`kafkaConsumer.pollTimeoutMs`)."""
_PAUSE_S: Final = 0.1


class LatestEnds:
    """Looks the ends up, at the cost of one small read while nothing is committed."""

    def __init__(self, store: Store, options: SourceOptions) -> None:
        self._store = store
        self._options = options
        self._state: State | None = None
        self._ends: Offsets = {}
        self._missing: list[str] = []

    def of(self, known: Offsets) -> Offsets:
        """Return the end of each partition subscribed to; `known` are offsets seen before.

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
            self._missing = missing
            self._state = state
        ends = self._ends
        behind = [p for p, end in ends.items() if end < known.get(p, 0)]
        return ends | self._at_least(known, behind, state) if behind else ends

    def are_of(self, ends: Offsets, state: State) -> bool:
        """Tell whether an answer of `of` holds as long as the state does."""
        return ends is self._ends and state is self._state

    def wait_for(self, ends: Offsets) -> None:
        """Wait until a live broker tells at least these, which were seen.

        One that has just started tells the high watermark of a while ago, and a query that starts
        with it knows more, from its own checkpoint. After two minutes it goes on as it is.
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
            self._options.latest_offset(held) < end and self._is_live(partition)
            for partition, end in ends.items()
            if (held := held_partition(partition, state)) is not None
        )

    def _is_live(self, partition: TopicPartition) -> bool:
        root = self._store.partition_directory(*partition).parent
        return locks.RootLock(root).is_held_alone()

    def check_starts(self, starts: Offsets) -> None:
        """Report given offsets of `startingOffsets` that lie beyond the end of their partition.

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
        """Return the ends of partitions that were seen to reach further than they are said to.

        A reader of uncommitted records, as Spark's own source is by default, was beyond the last
        stable offset while a transaction was open; what it has read stays read. And a live broker
        tells the end of its log with a delay, and whoever read from the broker itself was there
        before: what the log does hold up to that point counts.
        """
        found: Offsets = {}
        for partition in behind:
            held = held_partition(partition, state)
            if held is not None and held.high_watermark >= known[partition]:
                found[partition] = known[partition]
                continue
            # One that has gone since is looked for at the next trigger.
            with (
                contextlib.suppress(InvalidInputError),
                self._store.snapshot(*partition, known_end=known[partition]) as snapshot,
            ):
                found[partition] = min(snapshot.state.high_watermark, known[partition])
        return found
