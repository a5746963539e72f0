"""The task's part of a write: finished batches in a staged file, and a small message.

A task encodes and compresses. The commit, in another process, verifies and appends. A batch lacks
only its base offset and leader epoch, which its checksum does not cover; in a run the base offsets
count from 0.

A task has **one** staged file in the root, with a run per log partition. A run that is large enough
to become a segment gets its own file in its partition's directory, with its indexes. The task syncs
that file, since the commit renames it. The commit syncs what it copies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from kafkalog.storage_engine.format import layout
from kafkalog.storage_engine.metadata.config import TopicConfig
from kafkalog.storage_engine.metadata.new_topic import NewTopic
from kafkalog.storage_engine.metadata.state import State, TopicState
from kafkalog.storage_engine.writing.staged_file import PendingRun, StagedFile, StagedFileWriter
from kafkalog.storage_engine.writing.staged_topic import StagedTopic

if TYPE_CHECKING:
    from concurrent.futures import Future, ThreadPoolExecutor

    import pyarrow as pa

BATCH_SIZE: Final = 65_536
"""Bytes of records, before compression, in a full batch (Kafka's producer: batch.size)."""
_GATHER_SIZE_MIN, _GATHER_SIZE = 4 << 20, 16 << 20
_GATHER_SIZE_OF_PARTITION = 1 << 20
"""Bytes of rows to collect before encoding, so that batches fill up. More would fall out of the
processor's caches and be read again."""
_SMALL_SIZE = 64 << 10
_WRITE_SIZE = 1 << 20
"""Bytes of runs to write at once; a task may have a few for each of many partitions."""
_PENDING_SIZE = 128 << 20
"""Memory of a task's unwritten batches."""
SEGMENT_RUN_SIZE = 64 << 20
"""A run of this size becomes a segment, if `segment.bytes` allows it."""


class Run(NamedTuple):
    """Finished batches of one log partition: a range of a staged file, or of the message's data.

    A tuple, because a commit may have many thousands.
    """

    topic: str
    partition: int
    file: int
    """Number of the file in `StagedMessage.files`; -1 for `StagedMessage.data`."""
    position: int
    size: int
    rows: int
    is_segment: bool = False
    """The file has only this run, and is renamed to become a segment."""
    max_timestamp: int = layout.NO_TIMESTAMP
    """The largest timestamp in epoch ms, which the commit of an object records; else -1."""


@dataclass(frozen=True, slots=True)
class StagedMessage:
    """A task's message to the commit; small, and picklable."""

    spark_partition: int = 0
    topic_ids: Mapping[str, str] = field(default_factory=dict)
    """The topics written to, each with the id that the task saw; '' for a topic to create."""
    files: tuple[StagedFile, ...] = ()
    runs: tuple[Run, ...] = ()
    rows: int = 0
    keyless: frozenset[str] = frozenset()
    """Topics that got rows with a null key."""
    data: bytes = b""


class StagedWriter:
    """Stage the rows of one task attempt, or with `root=None` small appends in memory.

    Rows of one log partition keep their order. Raises InvalidInputError for a partition out of
    range, a missing key on a compacted topic, and a record above `max.message.bytes`.
    """

    def __init__(
        self,
        root: Path | None,
        state: State,
        *,
        now_ms: Callable[[], int],
        writer_slug: str = "",
        batch_id: int = 0,
        spark_partition: int = 0,
        attempt: int = 0,
        new_topic: NewTopic | None = None,
        batch_size: int = BATCH_SIZE,
        codec: str | None = None,
    ) -> None:
        self._root = root
        self._state = state
        self._now_ms = now_ms
        self._name = (writer_slug, batch_id, spark_partition, attempt)
        self._new_topic = new_topic
        self._batch_size = batch_size
        self._codec = codec
        self._topics: dict[str, StagedTopic] = {}
        self._gathered: dict[str, list[pa.RecordBatch]] = {}
        self._gathered_size = 0
        self._gather_size = _GATHER_SIZE_MIN
        self._encoder: ThreadPoolExecutor | None = None
        self._under_way: Future[None] | None = None
        self._spark_partition = spark_partition
        self._shared: StagedFileWriter | None = None
        self._large: dict[tuple[str, int], StagedFileWriter] = {}
        self._files: list[StagedFileWriter] = []
        self._runs: list[Run] = []
        self._rows = 0

    def append(self, topic: str, rows: pa.RecordBatch) -> None:
        """Add rows: a column value, and optionally key, headers, timestamp, partition."""
        if rows.num_rows == 0:
            return
        self._topic(topic)
        self._gathered.setdefault(topic, []).append(rows)
        self._gathered_size += _size_of(rows)
        self._rows += rows.num_rows
        if self._gathered_size >= self._gather_size:
            gathered, self._gathered, self._gathered_size = self._gathered, {}, 0
            self._encode_meanwhile(gathered)

    def _encode_meanwhile(self, gathered: Mapping[str, list[pa.RecordBatch]]) -> None:
        """Encode rows in a thread while the caller collects the next ones, in order.

        Raises the error of the previous call's encoding.
        """
        if self._root is None:
            self._encode(gathered)
            return
        self._wait()
        try:
            if self._encoder is None:
                from concurrent.futures import ThreadPoolExecutor

                self._encoder = ThreadPoolExecutor(1, "kafkalog-staging")
            self._under_way = self._encoder.submit(self._encode, gathered)
        except RuntimeError:  # no more threads, as the interpreter is about to end
            self._encode(gathered)

    def _wait(self) -> None:
        under_way, self._under_way = self._under_way, None
        if under_way is not None:
            under_way.result()

    def finish(self) -> StagedMessage:
        """Encode the rest, sync what the commit will rename, and return the message for it."""
        self._wait()
        self._end_encoder()
        self._encode(self._gathered)
        data = bytearray()
        for name, topic in self._topics.items():
            if self._root is not None:
                self._spill(name, sorted(topic.pending))
                continue
            for partition in sorted(topic.pending):
                run = topic.pending[partition]
                self._runs.append(Run(name, partition, -1, len(data), run.size, run.rows))
                for part in run.parts:
                    data += part.data
        staged = tuple(writer.finish() for writer in self._files)
        return StagedMessage(
            self._spark_partition,
            {name: topic.topic_id for name, topic in self._topics.items()},
            staged,
            tuple(self._runs),
            self._rows,
            frozenset(name for name, topic in self._topics.items() if topic.keyless),
            bytes(data),
        )

    def discard(self) -> None:
        """Remove the staged files of a failed attempt."""
        self._end_encoder()
        for writer in self._files:
            writer.discard()

    def _end_encoder(self) -> None:
        if self._encoder is not None:
            self._encoder.shutdown(cancel_futures=True)
            self._encoder = None

    def _topic(self, name: str) -> StagedTopic:
        topic = self._topics.get(name)
        if topic is None:
            topic = self._topics[name] = self._open_topic(name)
            wished = sum(each.partition_count for each in self._topics.values())
            wished *= _GATHER_SIZE_OF_PARTITION
            self._gather_size = min(max(_GATHER_SIZE_MIN, wished), _GATHER_SIZE)
        return topic

    def _open_topic(self, name: str) -> StagedTopic:
        known = self._state.topics.get(name)
        if known is not None:
            config = TopicConfig.parse(known.config)
            count, first = len(known.partitions), partial(self._first_keyless, known)
            return StagedTopic(
                name, known.topic_id, count, config, self._codec, first_keyless=first
            )
        new = self._new_topic
        if new is None:
            self._state.topic(name)  # raises UnknownTopicError
            raise AssertionError
        new.check(name)
        config, first = TopicConfig.parse(new.config), partial(self._first_keyless, None)
        return StagedTopic(name, "", new.partitions, config, self._codec, first_keyless=first)

    def _first_keyless(self, topic: TopicState | None) -> int:
        """Return the first partition; otherwise all small tasks would use partition 0."""
        written = sum(state.high_watermark for _, state in topic.present()) if topic else 0
        return self._spark_partition + written

    def _encode(self, gathered: Mapping[str, list[pa.RecordBatch]]) -> None:
        for name, batches in gathered.items():
            for batch in _joined(batches):
                self._topics[name].encode(batch, self._batch_size, self._now_ms())
        if self._root is None:
            return
        topics = list(self._topics.items())  # the caller may add one at the same time
        for name, topic in topics:
            for partition, run in topic.pending.items():
                is_open = (name, partition) in self._large
                if is_open or (
                    run.size >= SEGMENT_RUN_SIZE
                    and topic.config.segment_bytes >= SEGMENT_RUN_SIZE
                    and topic.topic_id
                ):
                    self._spill_large(name, partition)
        if sum(topic.held_size for _, topic in topics) > _PENDING_SIZE:
            for name, topic in topics:
                self._spill(name, sorted(topic.pending))
                topic.held_size = 0

    def _spill(self, name: str, partitions: Iterable[int]) -> None:
        pending = self._topics[name].pending
        small: list[tuple[int, PendingRun]] = []
        for partition in partitions:
            run = pending[partition]
            if (name, partition) in self._large:
                self._spill_large(name, partition)
            elif run.size:
                small.append((partition, run))
        if not small:
            return
        if self._shared is None:
            self._shared = self._open(layout.staged_file(*self._name, 0))
        number = self._files.index(self._shared)
        parts: list[memoryview] = []
        position = self._shared.size
        for partition, run in small:
            self._runs.append(Run(name, partition, number, position, run.size, run.rows))
            position += run.size
            parts += [part.data for part in run.parts]
            run.clear()
            if position - self._shared.size >= _WRITE_SIZE:
                self._shared.append(parts)
                parts = []
        self._shared.append(parts)

    def _spill_large(self, name: str, partition: int) -> None:
        """Move a pending run to a file that becomes a segment, or to several."""
        topic = self._topics[name]
        run = topic.pending[partition]
        run.is_segment = True
        for part in run.parts:
            position = 0
            while position < len(part.positions):
                writer = self._large.get((name, partition)) or self._open_large(name, partition)
                position, rows = writer.append_batches(part, position)
                number = self._files.index(writer)
                index = next(i for i, known in enumerate(self._runs) if known.file == number)
                rows += self._runs[index].rows
                self._runs[index] = Run(
                    name, partition, number, 0, writer.size, rows, is_segment=True
                )
                if position < len(part.positions):
                    del self._large[name, partition]
        run.clear()

    def _open_large(self, name: str, partition: int) -> StagedFileWriter:
        file = layout.staged_file(*self._name, len(self._files) + 1)
        directory = layout.partition_directory(name, partition)
        writer = self._large[name, partition] = self._open(f"{directory}/{file}")
        writer.begin_segment(self._topics[name].config)
        self._runs.append(Run(name, partition, len(self._files) - 1, 0, 0, 0, is_segment=True))
        return writer

    def _open(self, name: str) -> StagedFileWriter:
        assert self._root is not None
        writer = StagedFileWriter(self._root, name)
        self._files.append(writer)
        return writer


def _size_of(rows: pa.RecordBatch) -> int:
    """Return the bytes of rows; for a few rows, which is faster, those of their buffers."""
    size = rows.get_total_buffer_size()
    return int(size if size <= _SMALL_SIZE else rows.nbytes)


def _joined(batches: list[pa.RecordBatch]) -> list[pa.RecordBatch]:
    import pyarrow as pa

    if len(batches) == 1:
        return batches
    return list(pa.Table.from_batches(batches).combine_chunks().to_batches())
