"""What a sink task leaves for the commit: finished batches in a staged file, and a small message.

A task encodes, compresses and syncs; the commit, in another process, verifies and appends. A batch
lacks only its base offset and leader epoch, which lie outside its checksum: in a run the base
offsets count from 0.

A task has **one** staged file in the root, with a run per log partition. Only where a run grows
large enough to become a segment, it gets a file of its own in its partition's directory, with its
indexes beside it, and the commit renames it into place.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from kafkalog.errors import InvalidInputError
from kafkalog.storage_engine import layout
from kafkalog.storage_engine.config import TopicConfig
from kafkalog.storage_engine.staged_file import PendingRun, StagedFile, StagedFileWriter
from kafkalog.storage_engine.state import State, TopicState

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import pyarrow as pa

BATCH_SIZE = 65_536
"""Bytes of records, before compression, that fill a batch (Kafka's producer: batch.size)."""
_GATHER_SIZE = 16 << 20
"""Bytes of rows that are gathered before they are encoded, so that batches fill up."""
_PENDING_SIZE = 128 << 20
"""Bytes of finished batches that a task keeps in memory."""
SEGMENT_RUN_SIZE = 64 << 20
"""A run of so many bytes becomes a segment, where `segment.bytes` allows one so large."""
LARGE_BATCH_SIZE = 256 << 10
"""Bytes that fill a batch of a run on its way to that size: fewer batches are fewer to stamp."""


@dataclass(frozen=True, slots=True)
class NewTopic:
    """How to create a topic that does not exist yet."""

    partitions: int
    config: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Run:
    """Finished batches of one log partition: a range of a staged file, or of the message's data."""

    topic: str
    partition: int
    file: int
    """Number of the file in `StagedMessage.files`; -1 for `StagedMessage.data`."""
    position: int
    size: int
    rows: int
    is_segment: bool = False
    """The file is this run alone, and is renamed into place."""


@dataclass(frozen=True, slots=True)
class StagedMessage:
    """What a task tells the commit; small, and picklable."""

    spark_partition: int = 0
    topic_ids: Mapping[str, str] = field(default_factory=dict)
    """The topics written to, each with the id the task saw; '' for one to be created."""
    files: tuple[StagedFile, ...] = ()
    runs: tuple[Run, ...] = ()
    rows: int = 0
    keyless: frozenset[str] = frozenset()
    """Topics that got rows with a null key."""
    data: bytes = b""


def writer_slug(writer_id: str, target: str) -> str:
    """Return the 32 hex digits that stand for a writer in file names."""
    return hashlib.blake2b(f"{writer_id}\0{target}".encode(), digest_size=16).hexdigest()


class StagedWriter:
    """Stages the rows of one task attempt; with `root=None` it stages in memory, for small appends.

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
        new_topics: Mapping[str, NewTopic] = {},
        batch_size: int = BATCH_SIZE,
        codec: str | None = None,
    ) -> None:
        self._root = root
        self._state = state
        self._now_ms = now_ms
        self._name = (writer_slug, batch_id, spark_partition, attempt)
        self._new_topics = new_topics
        self._batch_size = batch_size
        self._codec = codec
        self._topics: dict[str, _Topic] = {}
        self._gathered: dict[str, list[pa.RecordBatch]] = {}
        self._gathered_size = 0
        self._spark_partition = spark_partition
        self._shared: StagedFileWriter | None = None
        self._large: dict[tuple[str, int], StagedFileWriter] = {}
        self._files: list[StagedFileWriter] = []
        self._runs: list[Run] = []
        self._rows = 0

    def append(self, topic: str, rows: pa.RecordBatch) -> None:
        """Add rows: columns value and, if there are, key, headers, timestamp, partition."""
        if rows.num_rows == 0:
            return
        self._topic(topic)
        self._gathered.setdefault(topic, []).append(rows)
        self._gathered_size += rows.nbytes
        self._rows += rows.num_rows
        if self._gathered_size >= _GATHER_SIZE:
            self._encode()

    def finish(self) -> StagedMessage:
        """Encode what is left, sync, and return the message for the commit."""
        self._encode()
        data = bytearray()
        for name, topic in self._topics.items():
            for partition in sorted(topic.pending):
                if self._root is None:
                    run = topic.pending[partition]
                    size = len(run.data)
                    self._runs.append(Run(name, partition, -1, len(data), size, run.rows))
                    data += run.data
                else:
                    self._spill(name, partition)
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
        """Remove what was staged: the attempt has failed."""
        for writer in self._files:
            writer.discard()

    def _topic(self, name: str) -> _Topic:
        topic = self._topics.get(name)
        if topic is None:
            topic = self._topics[name] = self._open_topic(name)
        return topic

    def _open_topic(self, name: str) -> _Topic:
        known = self._state.topics.get(name)
        if known is not None:
            config = TopicConfig.parse(known.config)
            count, first = len(known.partitions), partial(self._first_keyless, known)
            return _Topic(name, known.topic_id, count, config, self._codec, first_keyless=first)
        new = self._new_topics.get(name) or self._new_topics.get("*")
        if new is None:
            self._state.topic(name)  # raises UnknownTopicError
            raise AssertionError
        fault = layout.topic_name_fault(name)
        if fault:
            raise InvalidInputError(fault)
        config, first = TopicConfig.parse(new.config), partial(self._first_keyless, None)
        return _Topic(name, "", new.partitions, config, self._codec, first_keyless=first)

    def _first_keyless(self, topic: TopicState | None) -> int:
        """Tasks and commits of few rows each would else all begin at partition 0."""
        written = sum(state.high_watermark for _, state in topic.present()) if topic else 0
        return self._spark_partition + written

    def _encode(self) -> None:
        """Turn the gathered rows into finished batches, and spill them when they are many."""
        import pyarrow as pa

        for name, batches in self._gathered.items():
            rows = pa.Table.from_batches(batches).combine_chunks().to_batches()
            for batch in rows:
                self._topics[name].encode(batch, self._batch_size, self._now_ms())
        self._gathered.clear()
        self._gathered_size = 0
        if self._root is None:
            return
        for name, topic in self._topics.items():
            for partition, run in topic.pending.items():
                is_open = (name, partition) in self._large
                if is_open or (
                    len(run.data) >= SEGMENT_RUN_SIZE
                    and topic.config.segment_bytes >= SEGMENT_RUN_SIZE
                    and topic.topic_id
                ):
                    self._spill_large(name, partition)
        if sum(topic.pending_size for topic in self._topics.values()) > _PENDING_SIZE:
            for name, topic in self._topics.items():
                for partition in sorted(topic.pending):
                    self._spill(name, partition)

    def _spill(self, name: str, partition: int) -> None:
        """Move a pending run to the file that all runs of this task share."""
        topic = self._topics[name]
        run = topic.pending[partition]
        if not run.data:
            return
        if (name, partition) in self._large:
            self._spill_large(name, partition)
            return
        if self._shared is None:
            self._shared = self._open(Path(layout.staged_file(*self._name, 0)))
        number = self._files.index(self._shared)
        position = self._shared.append(run.data)
        self._runs.append(Run(name, partition, number, position, len(run.data), run.rows))
        run.clear()

    def _spill_large(self, name: str, partition: int) -> None:
        """Move a pending run to a file that becomes a segment; a full one has a successor."""
        topic = self._topics[name]
        run = topic.pending[partition]
        run.is_segment = True
        writer = self._large.get((name, partition))
        position = 0
        while position < len(run.positions):
            if writer is None:
                directory = Path(layout.partition_directory(name, partition))
                file = layout.staged_file(*self._name, len(self._files) + 1)
                writer = self._open(directory / file)
                writer.begin_segment(topic.config)
                self._large[name, partition] = writer
                number = len(self._files) - 1
                self._runs.append(Run(name, partition, number, 0, 0, 0, is_segment=True))
            position, rows = writer.append_batches(run, position)
            number = self._files.index(writer)
            index = next(i for i, known in enumerate(self._runs) if known.file == number)
            known = self._runs[index]
            self._runs[index] = Run(
                name, partition, number, 0, writer.size, known.rows + rows, is_segment=True
            )
            if position < len(run.positions):
                writer = None
        run.clear()

    def _open(self, name: Path) -> StagedFileWriter:
        assert self._root is not None
        writer = StagedFileWriter(self._root, name)
        self._files.append(writer)
        return writer


class _Topic:
    """One topic a task writes to."""

    def __init__(
        self,
        name: str,
        topic_id: str,
        partitions: int,
        config: TopicConfig,
        codec: str | None,
        *,
        first_keyless: Callable[[], int],
    ) -> None:
        self.name = name
        self.topic_id = topic_id
        self.partition_count = partitions
        self.config = config
        self.pending: dict[int, PendingRun] = {}
        self.keyless = 0
        self._first_keyless, self._first = first_keyless, 0
        named = config.compression_type
        if named == "producer":
            named = codec or "none"
        self._codec = layout.CODECS["none" if named == "uncompressed" else named]

    @property
    def pending_size(self) -> int:
        return sum(len(run.data) for run in self.pending.values())

    def encode(self, rows: pa.RecordBatch, batch_size: int, now_ms: int) -> None:
        """Partition and encode rows; the order within a partition is the order given."""
        import numpy as np

        from kafkalog.storage_engine import batch, records

        config = self.config
        columns = {name: rows.column(name) for name in rows.schema.names}
        partitions = self._partitions(columns, rows.num_rows)
        if self.partition_count == 1:
            order, starts = np.arange(rows.num_rows), np.array([0, rows.num_rows])
            numbers = [0]
        else:
            order = np.argsort(partitions, kind="stable")
            found, first = np.unique(partitions[order], return_index=True)
            numbers, starts = found.tolist(), np.append(first, rows.num_rows)
        timestamps = _timestamps(columns.get("timestamp"), rows.num_rows, now_ms)
        type_ = layout.CREATE_TIME
        if config.message_timestamp_type == "CreateTime":
            self._check_times(timestamps, now_ms)
        if config.message_timestamp_type == "LogAppendTime":
            type_, timestamps = layout.LOG_APPEND_TIME, np.full(rows.num_rows, now_ms, np.int64)
        level = {
            layout.CODEC_GZIP: config.compression_gzip_level,
            layout.CODEC_LZ4: config.compression_lz4_level,
            layout.CODEC_ZSTD: config.compression_zstd_level,
        }.get(self._codec)
        for index, partition in enumerate(numbers):
            run = self.pending.setdefault(partition, PendingRun())
            is_large = run.is_segment or len(run.data) >= SEGMENT_RUN_SIZE // 4
            try:
                encoded = records.encode(
                    columns.get("key"),
                    columns["value"],
                    columns.get("headers"),
                    timestamps,
                    order[starts[index] : starts[index + 1]].astype(np.int64),
                    batch_size=max(batch_size, LARGE_BATCH_SIZE) if is_large else batch_size,
                    codec=self._codec,
                    level=level,
                    timestamp_type=type_,
                    max_message_bytes=config.max_message_bytes,
                )
            except InvalidInputError as fault:
                raise InvalidInputError(f"topic {self.name!r}: {fault}") from None
            data = encoded.data
            if run.rows:
                for position, count_before in zip(
                    encoded.positions, _running(encoded.counts, run.rows), strict=True
                ):
                    layout.STAMP_OFFSET.pack_into(data, position, count_before)
            shift = len(run.data)
            run.data += data
            run.positions.extend(shift + position for position in encoded.positions)
            run.counts.extend(encoded.counts)
            run.timestamps.extend(
                batch.parse_header(data, position).max_timestamp for position in encoded.positions
            )
            run.rows += encoded.rows

    def _check_times(self, timestamps: npt.NDArray[np.int64], now_ms: int) -> None:
        """Refuse rows whose own time is too far from the clock (R9)."""
        before = self.config.message_timestamp_before_max_ms
        after = self.config.message_timestamp_after_max_ms
        for found, name, is_wrong in (
            (int(timestamps.min()), "before", now_ms - int(timestamps.min()) > before),
            (int(timestamps.max()), "after", int(timestamps.max()) - now_ms > after),
        ):
            if is_wrong:
                raise InvalidInputError(
                    f"column timestamp: {found} ms is out of range for topic {self.name!r}: its "
                    f"config message.timestamp.{name}.max.ms allows "
                    f"[{max(0, now_ms - before)}, {now_ms + after}]"
                )

    def _partitions(self, columns: Mapping[str, pa.Array], row_count: int) -> npt.NDArray[np.int32]:
        import numpy as np
        import pyarrow.compute as pc

        from kafkalog.storage_engine import records

        key = columns.get("key")
        null_count = row_count if key is None else key.null_count
        if null_count and self.config.is_compacted:
            raise InvalidInputError(
                f"topic {self.name!r} is compacted (cleanup.policy has compact) and {null_count} "
                f"of {row_count} rows have a null key: give every row a key, or create the topic "
                "with topic.cleanup.policy=delete"
            )
        if key is None:
            chosen = np.full(row_count, -1, np.int32)
        else:
            chosen = records.murmur2_partitions(key, self.partition_count)
        keyless = np.flatnonzero(chosen < 0)
        if len(keyless):
            if self.keyless == 0:  # a walk over all partitions, of which few topics need one
                self._first = self._first_keyless()
            first = self._first + self.keyless
            spread = (first + np.arange(len(keyless))) % self.partition_count
            chosen = chosen.copy()
            chosen[keyless] = spread
            self.keyless += len(keyless)
        given = columns.get("partition")
        if given is not None and given.null_count < row_count:
            wanted = pc.fill_null(given, -1).to_numpy(zero_copy_only=False)
            is_given = pc.is_valid(given).to_numpy(zero_copy_only=False)
            wrong = is_given & ((wanted < 0) | (wanted >= self.partition_count))
            if wrong.any():
                raise InvalidInputError(
                    f"column partition: {int(wanted[wrong][0])} is out of range, topic "
                    f"{self.name!r} has partitions 0 to {self.partition_count - 1}"
                )
            chosen = np.where(is_given, wanted, chosen).astype(np.int32)
        return chosen


def _running(counts: list[int], start: int) -> list[int]:
    offsets = []
    for count in counts:
        offsets.append(start)
        start += count
    return offsets


def _timestamps(column: pa.Array | None, row_count: int, now_ms: int) -> npt.NDArray[np.int64]:
    """Return epoch milliseconds; a missing or null timestamp is now, as a producer's would be."""
    import numpy as np
    import pyarrow as pa
    import pyarrow.compute as pc

    if column is None:
        return np.full(row_count, now_ms, np.int64)
    if pa.types.is_timestamp(column.type):
        column = column.cast(pa.timestamp("ms", column.type.tz), safe=False).cast(pa.int64())
    filled: npt.NDArray[np.int64] = pc.fill_null(column, now_ms).to_numpy(zero_copy_only=False)
    if len(filled) and filled.min() < 0:
        raise InvalidInputError(
            f"column timestamp: {int(filled.min())} ms is before 1970; Kafka's records have none "
            "such: expected null (for now) or a later time"
        )
    return filled.astype(np.int64)
