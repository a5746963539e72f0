"""The task's part of a write: finished batches where the log wants them, and a small message.

A task encodes and compresses. The commit, in another process, appends. A batch lacks only its base
offset and leader epoch, which its checksum does not cover; in a run the base offsets count from 0.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Final

from kafkalog.storage_engine.metadata.config import TopicConfig
from kafkalog.storage_engine.metadata.new_topic import NewTopic
from kafkalog.storage_engine.metadata.state import State, TopicState
from kafkalog.storage_engine.writing.staged_message import StagedMessage
from kafkalog.storage_engine.writing.staged_topic import StagedTopic
from kafkalog.storage_engine.writing.staging_target import AttemptName, MessageTarget, StagingPlace

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


class StagedWriter:
    """Stage the rows of one task attempt in a log, or small appends in the message (None).

    Rows of one log partition keep their order. Raises InvalidInputError for a partition out of
    range, a missing key on a compacted topic, and a record above `max.message.bytes`.
    """

    def __init__(
        self,
        place: StagingPlace | None,
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
        self._state = state
        self._now_ms = now_ms
        name = AttemptName(writer_slug, batch_id, spark_partition, attempt)
        self._target = MessageTarget() if place is None else place.staging_target(name)
        self._is_small = place is None
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
        if self._is_small:
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
        """Encode and write the rest, and return the message for the commit."""
        self._wait()
        self._end_encoder()
        self._encode(self._gathered)
        staged = self._target.take_rest(list(self._topics.values()))
        return StagedMessage(
            self._spark_partition,
            {name: topic.topic_id for name, topic in self._topics.items()},
            tuple(staged.files),
            tuple(staged.runs),
            self._rows,
            frozenset(name for name, topic in self._topics.items() if topic.keyless),
            staged.data,
        )

    def discard(self) -> None:
        """Remove what a failed attempt has written."""
        self._end_encoder()
        self._target.discard()

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
        self._target.take_excess(list(self._topics.values()))  # the caller may add one meanwhile


def _size_of(rows: pa.RecordBatch) -> int:
    """Return the bytes of rows; for a few rows, which is faster, those of their buffers."""
    size = rows.get_total_buffer_size()
    return int(size if size <= _SMALL_SIZE else rows.nbytes)


def _joined(batches: list[pa.RecordBatch]) -> list[pa.RecordBatch]:
    import pyarrow as pa

    if len(batches) == 1:
        return batches
    return list(pa.Table.from_batches(batches).combine_chunks().to_batches())
