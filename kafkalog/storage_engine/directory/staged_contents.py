"""The contents of staged files for a commit: verified first, then appended in pieces.

The commit verifies everything before it appends anything, so it reads every file twice. Small files
stay in memory after the first read, because each of many tasks may have one. For the others, the
commit keeps each run's checksum and compares it in the second read. It appends what it verified, or
fails. Both reads fill the same memory again and again, which stays in the processor's caches.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from kafkalog.errors import StorageError
from kafkalog.storage_engine.format import batch, layout
from kafkalog.storage_engine.format.checksum import crc32c
from kafkalog.storage_engine.fs import files
from kafkalog.storage_engine.writing.staged_message import Run, StagedFile, StagedMessage

_KEPT_SIZE = 32 << 20
_KEPT_FILE_SIZE = 1 << 20
_PIECE_SIZE = 1 << 20


class StagedContents:
    """The bytes of staged files below a root, during one commit."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._kept: dict[str, bytes] = {}
        self._kept_size = 0
        self._crcs: dict[tuple[str, int, int], int] = {}
        """The checksum of each run that is not kept, by file, position and size."""

    def verify(self, message: StagedMessage) -> None:
        """Compare every staged file's size and checksum with the task's message.

        Raises StorageError for a missing or different file.
        """
        segments = {run.file for run in message.runs if run.is_segment}
        for number, file in enumerate(message.files):
            if number in segments:
                self._verify(file, ())
            elif file.size <= min(_KEPT_FILE_SIZE, _KEPT_SIZE - self._kept_size):
                self._verify(file, None)
            else:
                runs = [(run.position, run.size) for run in message.runs if run.file == number]
                self._verify(file, sorted(runs))

    def _verify(self, file: StagedFile, runs: Sequence[tuple[int, int]] | None) -> None:
        """Verify a file, and note the checksums of `runs`; None keeps the file in memory."""
        path = self._root / file.name
        try:
            fd = files.open_to_read(path)
        except FileNotFoundError:
            raise StorageError(
                f"{path}: the staged file is missing; is the log's directory shared by driver and "
                "executors, and no other run of this writer was committed? run the batch again"
            ) from None
        with files.closing(fd):
            size = os.fstat(fd).st_size
            if runs is None and size == file.size:
                data = files.read_at(fd, size, 0)
                crc = crc32c(data)
                self._kept[file.name] = data
                self._kept_size += size
            else:
                crc = self._checksum(fd, file.name, size, runs or ())
        if (size, crc) != (file.size, file.crc):
            raise StorageError(
                f"{path}: the task staged {file.size} bytes with CRC-32C {file.crc:#010x}, found "
                f"{size} bytes with {crc:#010x}; run the batch again"
            )

    def _checksum(self, fd: int, name: str, size: int, runs: Sequence[tuple[int, int]]) -> int:
        """Return the checksum of a file, and note those of `runs` from the same read."""
        crc = position = 0
        memory = memoryview(bytearray(min(_PIECE_SIZE, size)))
        for start, length in [*runs, (size, 0)]:
            run_crc, end = 0, min(start + length, size)
            while position < end:
                wanted = memory[: end - position]
                piece = wanted[: files.read_into(fd, wanted, position)]
                if not piece:
                    return crc  # it was truncated meanwhile
                crc = crc32c(piece, crc)
                if start:
                    run_crc = crc32c(piece[max(0, start - position) :], run_crc)
                position += len(piece)
            # The first run's checksum is the one of the file so far.
            self._crcs[name, start, length] = run_crc if start else crc
        return crc

    def pieces(self, message: StagedMessage, run: Run) -> Iterable[batch.Buffer]:
        """Return the bytes of a run, in pieces of whole batches as far as possible.

        A piece of a large file is memory that the caller may change, and that the next piece fills
        again. After the last one, the iteration raises StorageError if the bytes differ from the
        verified ones.
        """
        name = message.files[run.file].name if run.file >= 0 else ""
        kept = self._kept.get(name) if name else message.data
        if kept is None:
            return self._read(name, run)
        return (memoryview(kept)[run.position : run.position + run.size],)

    def _read(self, name: str, run: Run) -> Iterator[batch.Buffer]:
        crc = 0
        path = self._root / name
        with files.closing(files.open_to_read(path)) as fd:
            for piece in _read_batches(fd, run.position, run.position + run.size):
                crc = crc32c(piece, crc)
                yield piece
        if crc != self._crcs[name, run.position, run.size]:
            raise StorageError(
                f"{path}: the staged file has changed while it was committed; run the batch again"
            )


def _read_batches(fd: int, position: int, end: int) -> Iterator[memoryview]:
    """Yield `[position, end)` of a file in pieces of whole batches; then what isn't a batch."""
    memory = memoryview(bytearray(min(_PIECE_SIZE, end - position)))
    while position < end:
        wanted = memory[: end - position]
        piece = wanted[: files.read_into(fd, wanted, position)]
        size = _whole_batches(piece)
        needed = _batch_size(piece[size:])
        if not size and len(memory) < needed <= end - position:  # a batch that is larger
            memory = memoryview(bytearray(needed))
            continue
        if not piece:
            return  # it was truncated meanwhile
        yield piece[:size] if size else piece
        position += size or len(piece)


def _whole_batches(piece: memoryview) -> int:
    """Return the bytes of the whole batches that a piece begins with."""
    position = 0
    while 0 < (size := _batch_size(piece[position:])) <= len(piece) - position:
        position += size
    return position


def _batch_size(piece: memoryview) -> int:
    """Return the bytes of the batch that a piece begins with, whole or not; 0 for no batch."""
    if len(piece) < layout.BATCH_OVERHEAD:
        return 0
    _, length, *_ = layout.BATCH_PLACE.unpack_from(piece)
    size = int(length) + layout.LOG_OVERHEAD
    return size if size >= layout.BATCH_OVERHEAD else 0
