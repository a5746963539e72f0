"""Copy topics from one log to another, and later continue where the last copy ended.

The destination's log ends are the position: nothing else says what is copied. A commit of the
destination takes batches of several partitions, up to 64 MiB. A copy that dies between two commits
leaves a beginning of the source, which a later copy continues.

The copy is of one moment: what the source gets meanwhile comes with the next one. A cleaner of the
source may pass that moment meanwhile. Then the copy of that partition continues to its end. The
time of the copy is noted as that of a writer of each topic (`continuation` needs it).

Kafka has no counterpart; MirrorMaker copies records, not batches, and not their offsets.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from kafkalog.errors import (
    CorruptLogError,
    InvalidInputError,
    KafkaLogError,
    OffsetOutOfRangeError,
    StorageError,
)
from kafkalog.storage_engine.copying import continuation
from kafkalog.storage_engine.copying.copied_batches import (
    COMMIT_BYTES,
    CopiedMoment,
    PartitionToCopy,
    copied_runs,
    deletions_stay_ms,
)
from kafkalog.storage_engine.log.log import Log
from kafkalog.storage_engine.metadata.config import TopicConfig
from kafkalog.storage_engine.metadata.log_change import LogChange
from kafkalog.storage_engine.metadata.state import State, TopicState, WriterState
from kafkalog.storage_engine.metadata.writer import Writer
from kafkalog.storage_engine.writing.copied_run import CopiedRun

WRITER_ID: Final = "kafkalog-copy"
"""The writer that notes a copy; its batch id is the time (epoch ms) at which the copy began."""


@dataclass(frozen=True, slots=True)
class CopiedPartition:
    """The records that a copy has added to a partition."""

    topic: str
    partition: int
    start_offset: int
    """Where the copy went on."""
    end_offset: int
    """The log end now."""
    bytes: int


def copy(
    source: Log,
    destination: Log,
    topics: Collection[str] | None = None,
    *,
    now_ms: int,
    config: Mapping[str, Mapping[str, str]] | None = None,
    progress: Callable[[int, int], None] = lambda done, of: None,
    refusals: dict[str, KafkaLogError] | None = None,
) -> list[CopiedPartition]:
    """Copy topics, by default all; return what was added to each of their partitions.

    `config` has the configs that a broker's topics had, by topic, or by `*` for all. The cluster's
    metadata counts more than `*`, and less than a topic's own configs. A call of `progress` says
    how many offsets are done, and of how many. Raises InvalidInputError for a destination that is
    not a beginning of the source, UnknownTopicError, CorruptBatchError, StorageError,
    CommitInDoubtError. The commits before the error stay; a later call continues. `refusals` takes
    the errors of topics that can't be copied, by topic, and the other topics are copied all the
    same. Without it the first one is raised.
    """
    destination.check_writable()
    if source.root == destination.root:
        raise InvalidInputError(f"{source.root}: a log cannot be copied to itself. Name another.")
    given = config or {}
    if given and not source.is_brokers:
        raise InvalidInputError(
            f"{source.root}: the configs of this log are known (expected none for a log of "
            "kafkalog). Leave them out."
        )
    found, new, wanted = _planned(
        source, destination, topics, given=given, now_ms=now_ms, refusals=refusals
    )
    _create(destination, new, wanted, now_ms)
    copied = _Copying(source, destination, now_ms, progress, refusals).run(wanted)
    _note(destination, [topic for topic in found if topic.name not in (refusals or {})], now_ms)
    return copied


@contextlib.contextmanager
def _refusal(topic: str, refusals: dict[str, KafkaLogError] | None) -> Iterator[None]:
    """Keep the error of a topic and copy the others; raise it if nobody takes it."""
    try:
        yield
    except (InvalidInputError, CorruptLogError, StorageError) as fault:
        if refusals is None:
            raise
        refusals[topic] = fault


def _planned(
    source: Log,
    destination: Log,
    topics: Collection[str] | None,
    *,
    given: Mapping[str, Mapping[str, str]],
    now_ms: int,
    refusals: dict[str, KafkaLogError] | None,
) -> tuple[list[TopicState], list[TopicState], list[PartitionToCopy]]:
    """Return the topics to copy, those that the destination lacks, and the checked partitions."""
    if isinstance(topics, str):
        raise InvalidInputError(f"topics: expected several names, found the text {topics!r}")
    while True:
        state = source.state()
        names = sorted({*(state.topics if topics is None else topics)})
        for name in given.keys() - {"*"}:
            state.topic(name)
        found = [_with_configs(state.topic(name), given) for name in names]
        held = destination.state()
        new: list[TopicState] = []
        wanted: list[PartitionToCopy] = []
        if refusals is not None:
            refusals.clear()
        try:
            for topic in found:
                with _refusal(topic.name, refusals):
                    known = continuation.check_topic(source, topic, destination)
                    wanted += [*_wanted(source, destination, topic, held, now_ms=now_ms)]
                    if known is None:
                        new.append(topic)
        except OffsetOutOfRangeError:
            if (source.state().number, destination.state().number) == (state.number, held.number):
                raise
            continue  # a log start has risen since
        return found, new, wanted


def _with_configs(topic: TopicState, given: Mapping[str, Mapping[str, str]]) -> TopicState:
    """Return a topic with the configs that a caller knows of it; raises InvalidInputError."""
    if not given:
        return topic
    known = {name: text for name, text in topic.config.items() if text}
    config = {"cleanup.policy": "", **given.get("*", {}), **known, **given.get(topic.name, {})}
    TopicConfig.parse(config)
    return replace(topic, config=config)


def _wanted(
    source: Log, destination: Log, topic: TopicState, held: State, *, now_ms: int
) -> Iterator[PartitionToCopy]:
    """Yield the partitions of a topic, checked, with what the destination lacks of each."""
    known = held.topics.get(topic.name)
    copied = held.writers.get(Writer(WRITER_ID, topic.name, 0).name)
    for number, state in topic.present():
        if known is not None:
            start = known.partitions[number].high_watermark
        else:
            start = min(state.high_watermark, _first_offset(source, topic.name, number))
        each = PartitionToCopy(
            topic.name,
            topic.topic_id,
            number,
            start,
            state.high_watermark,
            state.log_start_offset,
            CopiedMoment.of(state),
            _copied_ms(known, number, copied, now_ms),
            deletions_stay_ms(topic, known),
        )
        if known is not None:
            continuation.check_partition(
                source, topic, destination, known, each, copied=copied, now_ms=now_ms
            )
        yield each


def _copied_ms(
    known: TopicState | None, number: int, copied: WriterState | None, now_ms: int
) -> int:
    """Return how long ago the last copy of a partition began; -1 without records of it."""
    if known is None:
        return -1
    held = known.partitions[number]
    if held.high_watermark == held.log_start_offset:
        return -1
    return max(0, now_ms - (0 if copied is None else copied.batch_id))


def _first_offset(source: Log, topic: str, partition: int) -> int:
    """Return an offset that is not above the source's first batch, nor above its log start."""
    with source.snapshot(topic, partition) as snapshot:
        start, end = snapshot.state.log_start_offset, snapshot.state.high_watermark
        for segment in snapshot.open_segments(start, end):
            return min(start, segment.base_offset)
    return start


def _create(
    destination: Log, topics: Sequence[TopicState], wanted: Sequence[PartitionToCopy], now_ms: int
) -> None:
    """Create the topics that the destination does not have, and note that their copy began."""
    starts: dict[str, dict[int, int]] = {}
    for each in wanted:
        starts.setdefault(each.topic, {})[each.partition] = each.start

    def create(change: LogChange) -> None:
        for topic in topics:
            change.copy_topic(topic, starts.get(topic.name, {}))
            _note_copy(change, topic, now_ms)

    if topics:
        destination.change(create, now_ms=now_ms)


def _note(destination: Log, topics: Sequence[TopicState], now_ms: int) -> None:
    """Note that topics are copied as they were at a time."""

    def note(change: LogChange) -> None:
        for topic in topics:
            known = change.state.topics.get(topic.name)
            if known is not None and known.topic_id == topic.topic_id:
                _note_copy(change, topic, now_ms)

    if topics:
        destination.change(note, now_ms=now_ms)


def _note_copy(change: LogChange, topic: TopicState, now_ms: int) -> None:
    change.record_writer(Writer(WRITER_ID, topic.name, now_ms).name, now_ms, 0, now_ms)


class _Copying:
    """The runs of one copy that wait for their commit, and what was committed."""

    def __init__(
        self,
        source: Log,
        destination: Log,
        now_ms: int,
        progress: Callable[[int, int], None],
        refusals: dict[str, KafkaLogError] | None,
    ) -> None:
        self._source = source
        self._destination = destination
        self._now_ms = now_ms
        self._progress = progress
        self._refusals = refusals
        self._waiting: list[CopiedRun] = []
        self._size = self._done = self._total = 0

    def run(self, wanted: Sequence[PartitionToCopy]) -> list[CopiedPartition]:
        """Copy the partitions, one after the other."""
        self._total = sum(each.end - each.start for each in wanted)
        log_starts = self._log_starts()
        copied = []
        for each in wanted:
            size, end = 0, each.start
            if each.start < each.end or each.log_start > log_starts[each.topic, each.partition]:
                for run, is_last in self._runs(each):
                    size += len(run.data)
                    self._total += max(0, run.end - max(end, each.end))  # a cleaner has passed it
                    end = run.end
                    self._add(run, is_whole=not is_last)
            copied.append(CopiedPartition(each.topic, each.partition, each.start, end, size))
        self._commit()
        return copied

    def _runs(self, wanted: PartitionToCopy) -> Iterator[tuple[CopiedRun, bool]]:
        """Yield the runs of a partition up to one that can't be read."""
        with _refusal(wanted.topic, self._refusals):
            yield from copied_runs(self._source, wanted, lambda: COMMIT_BYTES - self._size)

    def _log_starts(self) -> Mapping[tuple[str, int], int]:
        return {
            (topic.name, number): partition.log_start_offset
            for topic in self._destination.state().topics.values()
            for number, partition in topic.present()
        }

    def _add(self, run: CopiedRun, *, is_whole: bool) -> None:
        """Take a run; commit once it would not fit any more."""
        self._waiting.append(run)
        self._size += len(run.data)
        if is_whole or self._size >= COMMIT_BYTES:
            self._commit()

    def _commit(self) -> None:
        if not self._waiting:
            return
        self._destination.append_copied(self._waiting, now_ms=self._now_ms)
        self._done += sum(run.end - run.start for run in self._waiting)
        self._waiting, self._size = [], 0
        self._progress(self._done, self._total)
