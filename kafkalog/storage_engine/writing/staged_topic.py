"""One topic of a staging task: distribute its rows to partitions and encode them into runs."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from kafkalog.errors import InvalidInputError
from kafkalog.storage_engine.format import layout
from kafkalog.storage_engine.metadata.config import TopicConfig
from kafkalog.storage_engine.writing.pending_run import PendingRun, RunPart

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import pyarrow as pa

    from kafkalog.storage_engine.records.encoding import Encoded

    Integers: TypeAlias = npt.NDArray[np.int64]

LARGE_RUN_SIZE = 16 << 20
"""From this size on, a run will probably become a segment."""
LARGE_BATCH_SIZE = 256 << 10
"""Bytes of a full batch in such a run: fewer batches are faster to stamp."""


class StagedTopic:
    """One topic that a task writes to, with the unwritten runs of its partitions."""

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
        self.held_size = 0
        """Memory of the pending runs, which share it; set to zero once all of them are written."""
        self.keyless = 0
        self._first_keyless = first_keyless
        self._first: int | None = None
        named = config.compression_type
        if named == "producer":
            named = codec or "none"
        self._codec = layout.CODECS["none" if named == "uncompressed" else named]
        self._level = {
            layout.CODEC_GZIP: config.compression_gzip_level,
            layout.CODEC_LZ4: config.compression_lz4_level,
            layout.CODEC_ZSTD: config.compression_zstd_level,
        }.get(self._codec)

    def encode(self, rows: pa.RecordBatch, batch_size: int, now_ms: int) -> None:
        """Distribute and encode rows; a partition keeps the given order."""
        import numpy as np

        from kafkalog.storage_engine.records import records

        config = self.config
        columns = dict(zip(rows.schema.names, rows.columns, strict=True))
        partitions = self._partitions(columns, rows.num_rows)
        order, numbers, counts = _by_partition(partitions, self.partition_count)
        given = columns.get("timestamp")
        timestamps = _timestamps(given, rows.num_rows, now_ms)
        type_ = layout.CREATE_TIME
        if given is not None and config.message_timestamp_type == "CreateTime":
            self._check_times(timestamps, now_ms)
        if config.message_timestamp_type == "LogAppendTime":
            type_, timestamps = layout.LOG_APPEND_TIME, np.full(rows.num_rows, now_ms, np.int64)
        parts = self._by_batch_size(batch_size, order, numbers, counts)
        for size, chosen, of_these, starts in parts:
            try:
                encoded = records.encode(
                    columns.get("key"),
                    columns["value"],
                    columns.get("headers"),
                    timestamps,
                    chosen,
                    batch_size=size,
                    codec=self._codec,
                    level=self._level,
                    timestamp_type=type_,
                    max_message_bytes=config.max_message_bytes,
                    groups=starts,
                )
            except InvalidInputError as fault:
                raise InvalidInputError(f"topic {self.name!r}: {fault}") from None
            first = starts.tolist()
            ends = [*first[1:], len(chosen)]
            self._add(encoded, of_these, list(map(operator.sub, ends, first)))

    def _by_batch_size(
        self, batch_size: int, order: Integers, numbers: list[int], counts: Integers
    ) -> Iterator[tuple[int, Integers, list[int], Integers]]:
        """Yield (batch size, rows, their partitions, the first row of each partition).

        Uses large batches for partitions with a segment in progress, which are seldom many. order:
        int64 (n,), rows partition by partition; counts: int64 (p,), of each of `numbers`
        """
        import numpy as np

        starts = np.cumsum(counts) - counts if len(numbers) > 1 else np.zeros(1, np.int64)
        is_large = [self._is_large(partition) for partition in numbers]
        for size, wanted in ((batch_size, False), (max(batch_size, LARGE_BATCH_SIZE), True)):
            if wanted not in is_large:
                continue
            if (not wanted) not in is_large:
                yield size, order, numbers, starts
                continue
            is_chosen = np.array(is_large) == wanted
            some = np.flatnonzero(is_chosen)
            yield (
                size,
                order[np.repeat(is_chosen, counts)],
                [numbers[place] for place in some],
                np.cumsum(counts[some]) - counts[some],
            )

    def _is_large(self, partition: int) -> bool:
        run = self.pending.get(partition)
        return run is not None and (run.is_segment or run.size >= LARGE_RUN_SIZE)

    def _add(self, encoded: Encoded, partitions: list[int], rows: list[int]) -> None:
        first = 0
        starts = [*encoded.positions, len(encoded.data)]
        for partition, count, end in zip(partitions, rows, encoded.ends, strict=True):
            start = starts[first]
            positions = [0] if end - first == 1 else [at - start for at in starts[first:end]]
            part = RunPart(encoded.data[start : starts[end]], positions, encoded.counts[first:end])
            run = self.pending.get(partition)
            if run is None:
                run = self.pending[partition] = PendingRun()
            run.add(part, count)
            first = end
        if not all(self.pending[partition].is_segment for partition in partitions):
            self.held_size += len(encoded.data)  # runs of segments are written at once

    def _check_times(self, timestamps: npt.NDArray[np.int64], now_ms: int) -> None:
        """Refuse rows whose timestamp is too far from the clock (R9)."""
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

        from kafkalog.storage_engine.records import records

        key = columns.get("key")
        null_count = row_count if key is None else key.null_count
        if null_count and self.config.needs_keys:
            raise InvalidInputError(
                f"topic {self.name!r} is compacted (cleanup.policy has compact) and {null_count} "
                f"of {row_count} rows have a null key: give every row a key, or create the topic "
                "with cleanup.policy=delete (config={'cleanup.policy': 'delete'} in Python, "
                "Spark's option topic.cleanup.policy=delete, the command line's --config "
                "cleanup.policy=delete)"
            )
        given = columns.get("partition")
        if given is not None and given.null_count == 0:
            self.keyless += null_count
            wanted: npt.NDArray[np.integer[Any]] = given.to_numpy()
            self._check_given(wanted)
            return wanted.astype(np.int32, copy=False)
        if key is None:
            chosen = np.full(row_count, -1, np.int32)
        else:
            chosen = records.murmur2_partitions(key, self.partition_count)
        keyless = np.flatnonzero(chosen < 0)
        if len(keyless):
            if self._first is None:  # visits all partitions, so only on demand
                self._first = self._first_keyless()
            first = self._first + self.keyless
            spread = (first + np.arange(len(keyless))) % self.partition_count
            chosen = chosen.copy()
            chosen[keyless] = spread
            self.keyless += len(keyless)
        if given is not None and given.null_count < row_count:
            import pyarrow.compute as pc  # a tenth of a second

            wanted = pc.fill_null(given, -1).to_numpy(zero_copy_only=False)
            is_given = pc.is_valid(given).to_numpy(zero_copy_only=False)
            self._check_given(wanted, is_given)
            chosen = np.where(is_given, wanted, chosen).astype(np.int32)
        return chosen

    def _check_given(
        self,
        wanted: npt.NDArray[np.integer[Any]],
        is_given: npt.NDArray[np.bool_] | Literal[True] = True,
    ) -> None:
        if wanted.min() >= 0 and wanted.max() < self.partition_count:
            return
        wrong = is_given & ((wanted < 0) | (wanted >= self.partition_count))
        if wrong.any():
            raise InvalidInputError(
                f"column partition: {int(wanted[wrong][0])} is out of range, topic "
                f"{self.name!r} has partitions 0 to {self.partition_count - 1}"
            )


def _by_partition(
    partitions: npt.NDArray[np.int32], partition_count: int
) -> tuple[Integers, list[int], Integers]:
    """Return the rows sorted by partition (stable), the partitions, and their numbers of rows.

    int64 (n,); those with rows, ascending; int64, as many
    """
    import numpy as np

    count = len(partitions)
    if partition_count == 1 or (partitions == partitions[0]).all():
        return np.arange(count), [int(partitions[0])], np.array([count])
    # NumPy sorts 16-bit keys by counting, several times as fast.
    keys = partitions.astype(np.uint16) if partition_count <= 1 << 16 else partitions
    order = np.argsort(keys, kind="stable")
    counts = np.bincount(partitions)
    numbers = np.flatnonzero(counts)
    return order, numbers.tolist(), counts[numbers]


def _timestamps(column: pa.Array | None, row_count: int, now_ms: int) -> npt.NDArray[np.int64]:
    """Return epoch milliseconds; a missing or null timestamp is now, like a producer's."""
    import numpy as np
    import pyarrow as pa

    if column is None:
        return np.full(row_count, now_ms, np.int64)
    import pyarrow.compute as pc  # a tenth of a second

    if pa.types.is_timestamp(column.type):
        is_coarser = column.type.unit == "s"  # finer units lose digits
        milliseconds = pa.timestamp("ms", column.type.tz)
        try:
            column = column.cast(milliseconds, safe=is_coarser).cast(pa.int64())
        except pa.ArrowInvalid as fault:
            raise InvalidInputError(f"column timestamp: {fault}") from fault
    filled: npt.NDArray[np.int64] = pc.fill_null(column, now_ms).to_numpy(zero_copy_only=False)
    if len(filled) and filled.min() < 0:
        raise InvalidInputError(
            f"column timestamp: {int(filled.min())} ms is before 1970; Kafka's records have none "
            "such: expected null (for now) or a later time"
        )
    return filled.astype(np.int64)
