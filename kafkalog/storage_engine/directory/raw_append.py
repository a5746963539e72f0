"""Append whole batches unchanged, as a follower does with its leader's, or the import of a backup.

Offsets, producer ids, sequence numbers, timestamps and leader epochs stay. Gaps stay too, and are
listed (`gaps`). Only the place in the files is new. Everything is one commit: readers see all of it
or nothing, and a refused source leaves no byte.

Like a follower of Kafka, it checks only what could make the log unreadable. These are checksums,
ascending offsets from the log end on, inconsistent headers, and batches that no broker could load
(`Producers.refusal`). It does not look at records. A compacted topic thus accepts records without a
key (the cleaner drops them), and a producer's duplicates stay.

The source is read in pieces of 1 MiB, even if a batch is larger. The checksum of such a batch is
computed while it is written; bytes before the commit are invisible.

Kafka: UnifiedLog.appendAsFollower, UnifiedLog.analyzeAndValidateRecords.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import uuid
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING

from kafkalog.errors import CorruptBatchError, InvalidInputError, KafkaLogError, StorageError
from kafkalog.storage_engine.format import layout
from kafkalog.storage_engine.format.batch import BatchHeader, parse_header
from kafkalog.storage_engine.format.checksum import crc32c
from kafkalog.storage_engine.fs import files, locks
from kafkalog.storage_engine.log.log import Source
from kafkalog.storage_engine.log.results import CommitResult
from kafkalog.storage_engine.segment.segments import list_segments
from kafkalog.storage_engine.segment.swaps import retire
from kafkalog.storage_engine.transactions.control_record import read_control_record
from kafkalog.storage_engine.transactions.producer_snapshot import sweep_snapshots

if TYPE_CHECKING:
    from kafkalog.storage_engine.directory.appender import Appender
    from kafkalog.storage_engine.directory.readable_directory import ReadableDirectory
    from kafkalog.storage_engine.metadata.state import PartitionState
    from kafkalog.storage_engine.writing.copied_run import CopiedRun

_PIECE_SIZE = 1 << 20
_PRODUCERS_MAX = 100_000
"""With more producers than this, the append drops expired ones while it runs."""
_logger = logging.getLogger(__name__)


def append_raw(
    log: ReadableDirectory, topic: str, partition: int, source: Source, *, now_ms: int
) -> CommitResult:
    """Append every batch of `source` to a partition; see `DirectoryLog.append_raw`."""
    with _opened(log.root, source) as reader:
        if reader.remaining == 0:
            return CommitResult(skipped=False, rows=0)
        with log.transaction() as transaction:
            appender = transaction.appender(topic, partition, now_ms)
            start = appender.state.high_watermark
            try:
                rows = _Follower(appender, reader, now_ms, f"{topic}-{partition}").append_all()
            except KafkaLogError:
                transaction.undo(topic, partition, now_ms)
                raise
            transaction.sync_on_publish()
            end = transaction.publish(now_ms, rows=rows).topic(topic).partitions[partition]
            _tidy(appender, end)
    return CommitResult(False, rows, {(topic, partition): (start, end.high_watermark)})


def append_copied(log: ReadableDirectory, runs: Sequence[CopiedRun], *, now_ms: int) -> int:
    """Append runs of several partitions in one commit; return the number of records.

    Raises StorageError for a run that does not follow its partition's log, CorruptBatchError.
    """
    rows = 0
    with log.transaction() as transaction:
        appenders: list[tuple[CopiedRun, Appender]] = []
        for run in runs:
            run.continued(transaction.state)
            appender = transaction.appender(run.topic, run.partition, now_ms)
            reader = _RequestReader(run.source, len(run.data), io.BytesIO(run.data))
            follower = _Follower(appender, reader, now_ms, run.name)
            rows += follower.append_run(run)
            appender.raise_log_start(run.log_start)
            appender.note_deletions_gone(run.deletions_gone_to)
            appenders.append((run, appender))
        transaction.sync_on_publish()
        state = transaction.publish(now_ms, rows=rows)
        for run, appender in appenders:
            _tidy(appender, state.topic(run.topic).partitions[run.partition])
    return rows


def _tidy(appender: Appender, state: PartitionState) -> None:
    """Drop what the commit replaced. Raise nothing, because the commit has succeeded."""
    try:
        appender.write_epochs()
        with locks.SegmentsLock(appender.directory).exclusive():
            if appender.lost_snapshot not in (-1, state.producer_snapshot):
                retire(appender.directory, [appender.lost_snapshot], suffixes=(layout.SNAPSHOT,))
            live = [segment.base_offset for segment in list_segments(appender.directory)]
            sweep_snapshots(appender.directory, {*live, state.producer_snapshot})
    except OSError as fault:
        files.pass_on(fault)
        _logger.warning("%s: old producer snapshots remain: %s", appender.directory, fault)


class _RequestReader:
    def __init__(self, name: str, size: int, stream: IO[bytes]) -> None:
        self.name = name
        self.remaining = size
        self._stream = stream

    def read(self, size: int) -> bytes:
        try:
            piece = self._stream.read(min(size, self.remaining))
        except OSError as fault:
            files.pass_on(fault)
            raise StorageError(f"{self.name}: cannot be read: {fault.strerror}") from fault
        self.remaining = self.remaining - len(piece) if piece else 0
        return piece


@contextlib.contextmanager
def _opened(root: Path, source: Source) -> Iterator[_RequestReader]:
    """Open a source before any lock is taken.

    A stream runs the caller's code, so it is copied into the root first. If this process dies, the
    sweep of staged files removes the copy.
    """
    if isinstance(source, bytes | bytearray | memoryview):
        data = bytes(source)
        yield _RequestReader("the given bytes", len(data), io.BytesIO(data))
    elif isinstance(source, str | Path):
        with _open_file(Path(source)) as stream:
            yield _RequestReader(str(source), os.fstat(stream.fileno()).st_size, stream)
    else:
        name = getattr(source, "name", None)
        copy = root / (layout.staged_file(f"raw_{uuid.uuid4().hex}", 0, 0, 0, 0) + layout.STAGED)
        try:
            _copy(source, copy)
            with files.open_stream(copy) as stream:
                size = os.fstat(stream.fileno()).st_size
                yield _RequestReader(
                    name if isinstance(name, str) else "the given stream", size, stream
                )
        finally:
            files.remove(copy)


def _open_file(path: Path) -> IO[bytes]:
    if path.exists() and not path.is_file():
        raise InvalidInputError(f"{path}: expected a file of record batches, found another kind")
    try:
        return files.open_stream(path)
    except OSError as fault:
        files.pass_on(fault)
        raise InvalidInputError(f"{path}: cannot be read: {fault.strerror}") from None


def _copy(source: IO[bytes], target: Path) -> None:
    with files.closing(files.open_empty(target, exclusive=True)) as fd:
        position = 0
        while piece := source.read(_PIECE_SIZE):
            if not isinstance(piece, bytes | bytearray | memoryview):
                raise InvalidInputError("the stream to append gives text: open it in binary mode")
            files.write_at(fd, piece, position)
            position += len(piece)


class _Follower:
    def __init__(
        self, appender: Appender, reader: _RequestReader, now_ms: int, partition: str
    ) -> None:
        self._appender = appender
        self._reader = reader
        self._now_ms = now_ms
        self._partition = partition
        self._first_offset = self._next_offset = appender.state.high_watermark
        self._producers = appender.producers()
        self._producers.expire(now_ms)
        self._epochs: list[tuple[int, int]] = []
        self._gaps = array("q")
        self._rows = 0
        self._buffer = bytearray()
        self._position = 0

    def append_all(self) -> int:
        """Append all batches; return the number of their records."""
        self._append_batches()
        return self._note(stable=layout.INT64_MAX)

    def append_run(self, run: CopiedRun) -> int:
        """Append the batches of a run, and what its source knows beyond them, as `append_all`."""
        self._append_batches()
        if run.end > self._next_offset:
            self._gaps.extend((self._next_offset, run.end))
            self._appender.end_at(run.end)
        if run.producers is not None:
            self._producers.take_over(run.producers)
        return self._note(stable=run.stable)

    def _append_batches(self) -> None:
        while piece := self._reader.read(_PIECE_SIZE):
            self._buffer += piece
            self._append_buffer()
        if self._buffer:
            raise self._corrupt(0, "a whole record batch", f"its first {len(self._buffer)} bytes")

    def _note(self, *, stable: int) -> int:
        self._appender.note_epochs(self._epochs)
        self._appender.note_producers(stable=stable)
        self._appender.note_gaps(self._gaps)
        return self._rows

    def _append_buffer(self) -> None:
        start = position = 0  # of the slice not yet written, and of the next batch
        buffer = self._buffer
        with memoryview(buffer) as view:
            while (header := self._check(view, position)) is not None:
                end = position + header.size
                if end > len(buffer):
                    break
                with view[position + layout.ATTRIBUTES_POSITION : end] as covered:
                    self._check_crc(header, crc32c(covered), position)
                with view[start:position] as pending:
                    is_new = self._place(header, position, pending)
                start = position if is_new else start
                position = end
            with view[start:position] as pending:
                self._appender.write(pending, self._next_offset)
        del buffer[:position]
        self._position += position
        if header is not None and header.size > _PIECE_SIZE:
            self._append_large(header)

    def _append_large(self, header: BatchHeader) -> None:
        """Append a batch whose beginning is in the buffer, and check it while writing."""
        if header.is_control:
            raise self._corrupt(0, "a control batch of a few bytes", f"one of {header.size}")
        self._place(header, 0, memoryview(b""))
        piece = bytes(self._buffer)
        crc = crc32c(piece[layout.ATTRIBUTES_POSITION :])
        remaining = header.size - len(piece)
        self._buffer.clear()
        while True:
            self._appender.write(memoryview(piece), self._next_offset)
            if not remaining:
                break
            piece = self._reader.read(min(_PIECE_SIZE, remaining))
            crc = crc32c(piece, crc)
            remaining -= len(piece)
            if not piece:
                raise self._corrupt(0, f"a record batch of {header.size} bytes", "a shorter one")
        self._check_crc(header, crc, 0)
        self._position += header.size

    def _place(self, header: BatchHeader, position: int, pending: memoryview) -> bool:
        """Place a batch; return whether it began a new segment, and `pending` was written."""
        is_new = self._appender.place(header, pending)
        if header.base_offset != self._next_offset:
            self._gaps.extend((self._next_offset, header.base_offset))
        self._next_offset = header.next_offset
        control = read_control_record(
            self._buffer,
            position,
            header,
            path=self._reader.name,
            file_position=self._position + position,
        )
        refusal = self._producers.refusal(header, control)
        if refusal is not None:
            raise InvalidInputError(
                f"{self._reader.name}: at byte {self._position + position}: {refusal}; "
                "no broker could load such a log, so it is not appended"
            )
        aborted = self._producers.append(header, control)
        if aborted is not None:
            self._appender.active.add_aborted(aborted)
        epoch = header.leader_epoch
        last_epoch = self._epochs[-1][0] if self._epochs else self._appender.last_epoch
        if epoch >= 0 and epoch != last_epoch:
            self._epochs.append((epoch, header.base_offset))
        if not header.is_control:
            self._rows += header.records_count
        if len(self._producers) > _PRODUCERS_MAX and is_new:
            self._producers.expire(self._now_ms)
        return is_new

    def _check(self, buffer: memoryview, position: int) -> BatchHeader | None:
        """Return the header at `position`, or None if the buffer lacks a part of it."""
        held = len(buffer) - position
        magic = buffer[position + layout.MAGIC_POSITION] if held > layout.MAGIC_POSITION else None
        if magic is not None and magic < layout.MAGIC:
            raise InvalidInputError(
                f"{self._reader.name}: at byte {self._position + position}: only batches of format "
                f"v2 can be appended as they are (found a message of format v{magic}). Append its "
                "records: `kafkalog read`, then `kafkalog append`."
            )
        if magic is not None and magic > layout.MAGIC:
            raise self._corrupt(position, f"magic {layout.MAGIC}", f"magic {magic}")
        if held < layout.BATCH_OVERHEAD:
            return None
        header = parse_header(buffer, position)
        left = min(held + self._reader.remaining, layout.INT32_MAX)
        if not layout.BATCH_OVERHEAD <= header.size <= left:
            expected = f"a record batch of {layout.BATCH_OVERHEAD} to {left} bytes"
            raise self._corrupt(position, expected, f"one of {header.size} bytes")
        self._check_offsets(header, position)
        if header.codec not in layout.CODEC_NAMES:
            raise self._corrupt(position, "a codec from 0 to 4", f"codec {header.codec}")
        room = header.last_offset_delta + 1
        if not 0 <= header.records_count <= room:
            raise self._corrupt(position, f"0 to {room} records", header.records_count)
        return header

    def _check_offsets(self, header: BatchHeader, position: int) -> None:
        next_offset = self._next_offset
        if header.last_offset_delta < 0 or header.next_offset > layout.INT64_MAX:
            raise self._corrupt(
                position,
                f"a last offset from {header.base_offset} on",
                f"{header.base_offset}{header.last_offset_delta:+}",
            )
        if header.base_offset >= next_offset:
            return
        if next_offset > self._first_offset:
            raise self._corrupt(
                position, f"offsets from {next_offset} on", f"a batch from {header.base_offset}"
            )
        raise InvalidInputError(
            f"{self._reader.name}: at byte {self._position + position}: the batch begins at offset "
            f"{header.base_offset}, below the log end {next_offset} of {self._partition}; leave "
            "out what is appended already"
        )

    def _check_crc(self, header: BatchHeader, found: int, position: int) -> None:
        if found != header.crc:
            raise self._corrupt(position, f"checksum {header.crc:#010x}", f"checksum {found:#010x}")

    def _corrupt(self, position: int, expected: object, found: object) -> CorruptBatchError:
        return CorruptBatchError(self._reader.name, self._position + position, expected, found)
