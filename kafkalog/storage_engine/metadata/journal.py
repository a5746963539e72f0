"""The `commit` file: a small preallocated journal, and the only truth about the log's content.

It has a header, then numbered records with length and checksum. A record is the JSON of one
commit's changes (`state.Change`). Writing a record and syncing it *is* the commit. Then the writer
moves `published_end` in the header behind it. Readers stop there, so no reader ever sees data that
a power cut could take back.

Invariants
----------
- Records below `published_end` are whole; the numbers have no gaps.
- A writer holds the commit lock. Readers hold nothing.
- A whole record after `published_end` comes from a process that died before it published. It
  counts if the bytes that it speaks of are there (`missing`): the next holder of the lock makes it
  durable and publishes it (`recover`). Its writer had synced them, so they are missing only in a
  copy of a live log. There nobody was told of the commit, and the record goes, with those after it.
- A torn record is ignored.
- A new file is filled with zeros, so that the sync of a record moves no metadata.
- A record marked `unsynced` (relaxed `flush.messages`) counts only while the host runs. After a
  power cut the whole log goes back to the last synced record.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import hashlib
import json
import logging
import os
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeAlias

from kafkalog.errors import (
    CommitInDoubtError,
    CorruptJournalError,
    LockedByBrokerError,
    StorageError,
)
from kafkalog.storage_engine.format import layout
from kafkalog.storage_engine.format.checksum import crc32c
from kafkalog.storage_engine.fs import files, host
from kafkalog.storage_engine.metadata.state import State, merge_change
from kafkalog.storage_engine.metadata.writer import WRITER_RETENTION_MS

Missing: TypeAlias = Callable[[State, State], str | None]
"""Says what files lack of what a record, between two states, has appended; None for nothing."""
_logger = logging.getLogger(__name__)
_READ_TRIES: Final = 200
_READ_PAUSE_S = 0.001
_PIECE_SIZE = 256 << 10
_encode = json.JSONEncoder(separators=(",", ":")).encode
_NO_CHANGE = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError)
"""The errors of a record with a right checksum and a content that no commit writes."""


class _Header(NamedTuple):
    generation: bytes
    published_end: int
    synced_end: int
    is_other_boot: bool
    """The header was written in another boot, of this host or another one."""
    outlived: bool
    """This host has rebooted since the header was written."""


class _Replay(NamedTuple):
    header: _Header
    state: State
    end: int
    synced_state: State
    synced_end: int
    lost: str = ""
    """Why the records from `end` on, which are not published, do not count."""

    def after(self, end: int, number: int, change: Mapping[str, Any]) -> _Replay:
        state = self.state.apply(number, change)
        if "unsynced" in change:
            return _Replay(self.header, state, end, self.synced_state, self.synced_end)
        return _Replay(self.header, state, end, state, end)

    def synced(self) -> _Replay:
        synced = self.synced_state, self.synced_end
        return _Replay(self.header, *synced, *synced, lost=self.lost)


class _Reader:
    """Read an open journal; its published part, which does not change, in large pieces."""

    def __init__(self, fd: int, published_end: int) -> None:
        self.size = os.fstat(fd).st_size
        self._fd = fd
        self._published_end = published_end
        self._piece = b""
        self._position = 0

    def read(self, size: int, position: int) -> bytes:
        """Return `size` bytes at `position`; fewer only at the end of the file."""
        if position + size > self._published_end:
            return files.read_at(self._fd, size, position)
        start = position - self._position
        if not 0 <= start <= len(self._piece) - size:
            wish = max(size, min(_PIECE_SIZE, self._published_end - position))
            self._piece = files.read_at(self._fd, wish, position)
            self._position, start = position, 0
        return self._piece[start : start + size]


class Journal:
    """The `commit` file of a log, as one process uses it.

    The holder of the commit lock may enter it as a context: it then opens the file once.
    """

    def __init__(self, path: Path, missing: Missing = lambda _before, _after: None) -> None:
        """`missing` judges records that are not published; by default their bytes are there."""
        self.path = path
        self._missing = missing
        self._replay: _Replay | None = None
        """The last read of any thread; another thread may have read more."""
        self._inode = 0
        """The file that was read: a copy that was put back may have the same header."""
        self._recovered: _Replay | None = None
        """The base of the next record; only the holder of the commit lock sets it."""
        self._in_doubt = False
        self._fd = -1
        """The file, open to write, while the holder of the commit lock is in the context."""

    def __enter__(self) -> None:
        self._fd = self._open(files.open_to_write)

    def __exit__(self, *_: object) -> None:
        self._close()

    def _close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def published(self) -> State:
        """Return the published state; one small read if nothing has changed.

        Raises CorruptJournalError; StorageError for the format of another release.
        """
        return self._load().state

    def _open(self, open_: Callable[[Path], int] = files.open_to_read) -> int:
        try:
            return open_(self.path)
        except FileNotFoundError as fault:
            if not self.path.with_name(layout.COMMIT_RELEASED).exists():
                raise
            raise LockedByBrokerError(
                f"{self.path.parent}: this log was released to a Kafka broker; open it again to "
                "read it, or take it back with `kafkalog adopt`"
            ) from fault
        except OSError as fault:
            files.pass_on(fault)
            if fault.errno not in {errno.EACCES, errno.EPERM, *files.NOT_OF_A_LOG}:
                raise
            raise StorageError(f"{self.path}: cannot be opened: {fault.strerror}") from fault

    def _opened_to_write(self) -> contextlib.AbstractContextManager[int]:
        if self._fd >= 0:
            return contextlib.nullcontext(self._fd)
        return files.closing(self._open(files.open_to_write))

    def _load(self) -> _Replay:
        with files.closing(self._open()) as fd:
            header = self._read_header(fd)
            known = self._replay
            if known is not None and known.header == header:
                return known
            replay = self._read(fd, header)
        self._replay = replay
        return replay

    def unpublished(self) -> tuple[State, str]:
        """Return what the next holder of the lock will publish, and why it drops what is left.

        The text is empty if nothing is dropped. Takes no lock, changes nothing. Raises like
        `published`.
        """
        for _ in range(_READ_TRIES):
            with files.closing(self._open()) as fd:
                header = self._read_header(fd)
                replay = self._with_unpublished(fd, self._read(fd, header))
            if not replay.lost:
                break
            with files.closing(self._open()) as fd:
                if self._read_header(fd) == header:
                    break  # otherwise a living holder has published meanwhile
        return replay.state, replay.lost

    def is_recovered(self) -> bool:
        """Return whether no whole record follows the published ones."""
        with files.closing(self._open()) as fd:
            header = self._read_header(fd)
            self._replay = replay = self._read(fd, header)
            return (
                not header.is_other_boot
                and self._next_record(fd, replay.end, replay.state.number) is None
            )

    def records(self) -> tuple[dict[str, Any], Iterator[tuple[int, int, int, dict[str, Any]]]]:
        """Return the header's fields, and all whole records: (position, size, number, change).

        Includes records that are not published. The header is `formatVersion`, `generation` (hex),
        `publishedEnd` and `syncedEnd` (bytes). Raises CorruptJournalError and StorageError.
        """
        with files.closing(self._open()) as fd:
            header = self._read_header(fd)
        fields = {
            "formatVersion": layout.JOURNAL_VERSION,
            "generation": header.generation.hex(),
            "publishedEnd": header.published_end,
            "syncedEnd": header.synced_end,
        }
        return fields, self._all_records(header.published_end)

    def _all_records(self, published_end: int) -> Iterator[tuple[int, int, int, dict[str, Any]]]:
        with files.closing(self._open()) as fd:
            position, number = layout.JOURNAL_RECORDS_POSITION, 0
            while (found := self._next_record(fd, position, number)) is not None:
                end, number, change = found
                yield position, end - position, number, change
                position = end
            if position < published_end:
                raise CorruptJournalError(
                    self.path, position, f"record {number + 1}", "bytes that are no record"
                )

    def _read_header(self, fd: int) -> _Header:
        inode = os.fstat(fd).st_ino
        if inode != self._inode:
            self._replay, self._inode = None, inode
        for _ in range(_READ_TRIES):
            block = files.read_at(fd, layout.JOURNAL_RECORDS_POSITION, 0)
            if len(block) < layout.JOURNAL_RECORDS_POSITION:
                raise CorruptJournalError(
                    self.path, 0, f"{layout.JOURNAL_RECORDS_POSITION} bytes", f"{len(block)} bytes"
                )
            magic, version, generation = layout.JOURNAL_HEADER.unpack_from(block)
            if magic != layout.JOURNAL_MAGIC:
                raise CorruptJournalError(self.path, 0, layout.JOURNAL_MAGIC, magic)
            if version != layout.JOURNAL_VERSION:
                raise StorageError(
                    f"{self.path}: the format version is {version}, this release of kafkalog "
                    f"reads {layout.JOURNAL_VERSION}: use the release that wrote it, or a newer one"
                )
            position = layout.JOURNAL_PUBLISHED_POSITION
            checksum_position = position + layout.JOURNAL_PUBLISHED.size
            (checksum,) = layout.CHECKSUM.unpack_from(block, checksum_position)
            if crc32c(block[position:checksum_position]) == checksum:
                published, synced, host_digest, boot = layout.JOURNAL_PUBLISHED.unpack_from(
                    block, position
                )
                is_other_boot = boot != _digest(host.boot_id())
                outlived = is_other_boot and host_digest == _digest(host.host_id())
                return _Header(generation, published, synced, is_other_boot, outlived)
            time.sleep(_READ_PAUSE_S)  # a writer has written a part of its 36 bytes
        raise CorruptJournalError(
            self.path,
            layout.JOURNAL_PUBLISHED_POSITION,
            "a published end with its checksum",
            "other",
        )

    def _read(self, fd: int, header: _Header) -> _Replay:
        """Replay the published records from the last state of this process.

        After a reboot everything on the disk is durable. Records after the published end, which is
        not synced, then count too. Relaxed records after the last synced one do not.
        """
        start = layout.JOURNAL_RECORDS_POSITION
        replay = _Replay(header, State(), start, State(), start)
        known = self._replay
        if (
            known is not None
            and known.header.generation == header.generation
            and known.end <= header.published_end
            and not header.outlived
            and not known.header.outlived
        ):
            replay = known._replace(header=header)
        reader = _Reader(fd, header.published_end)
        end, number = replay.end, replay.state.number
        gathered: dict[str, Any] | None = None
        while end < header.published_end or header.outlived:
            if end >= header.published_end and gathered is not None:
                replay, gathered = self._after(replay, end, number, gathered), None
            found = self._next_record(fd, end, number, reader)
            if found is None:
                if header.outlived and end >= header.synced_end:
                    break
                raise CorruptJournalError(
                    self.path, end, f"record {number + 1}", "bytes that are no record"
                )
            if end >= header.published_end:
                after = self._judged(replay, *found)
                if after.lost:
                    replay = after
                    break
                replay = after
                end, number, _ = found
                continue
            try:
                is_merged = gathered is not None and merge_change(gathered, found[2])
            except _NO_CHANGE as fault:
                raise self._unbelievable(end, fault) from fault
            if not is_merged:
                if gathered is not None:
                    replay = self._after(replay, end, number, gathered)
                gathered = found[2]
            end, number, _ = found
        if gathered is not None:
            replay = self._after(replay, end, number, gathered)
        return replay.synced() if header.outlived else replay

    def _after(self, replay: _Replay, end: int, number: int, change: Mapping[str, Any]) -> _Replay:
        try:
            return replay.after(end, number, change)
        except _NO_CHANGE as fault:
            raise self._unbelievable(replay.end, fault) from fault

    def _judged(self, replay: _Replay, end: int, number: int, change: Mapping[str, Any]) -> _Replay:
        """Return the replay after a record that is not published, or `replay`, and what it lacks.

        This alone decides what becomes of such a record, for whoever opens, commits or verifies.
        """
        after = self._after(replay, end, number, change)
        fault = self._missing(replay.state, after.state)
        if fault is None:
            return after
        marked = "has no mark of its publication"
        if replay.header.outlived:
            marked += " (or lost it, because the machine has started again since)"
        lost = (
            f"record {number}, at byte {replay.end}, {marked}, and what it appended is not here "
            f"({fault})"
        )
        return replay._replace(lost=lost)

    def _with_unpublished(self, fd: int, known: _Replay) -> _Replay:
        """Return the replay after the records that the next holder publishes."""
        replay = known
        while (
            not replay.lost
            and (found := self._next_record(fd, replay.end, replay.state.number)) is not None
        ):
            replay = self._judged(replay, *found)
            if known.header.outlived:
                return known  # relaxed records, which do not count after a power cut
        return replay

    def _unbelievable(self, position: int, fault: Exception) -> CorruptJournalError:
        """Return the error for impossible content in records up to `position`, or at it."""
        found = f"{type(fault).__name__}: {str(fault)[:80]}"
        return CorruptJournalError(self.path, position, "records of what commits changed", found)

    def _next_record(
        self, fd: int, position: int, number_before: int, reader: _Reader | None = None
    ) -> tuple[int, int, dict[str, Any]] | None:
        """Return (its end, number, change) of the record at `position`, or None."""
        reader = _Reader(fd, 0) if reader is None else reader
        head = reader.read(layout.JOURNAL_RECORD.size, position)
        if len(head) < layout.JOURNAL_RECORD.size:
            return None
        length, checksum, number = layout.JOURNAL_RECORD.unpack(head)
        # The first record of a rewritten file is a snapshot and keeps the number of its state.
        is_snapshot = position == layout.JOURNAL_RECORDS_POSITION
        if length == 0 or (number != number_before + 1 and not is_snapshot):
            return None
        if position + len(head) + length > reader.size:
            return None
        payload = reader.read(length, position + len(head))
        if len(payload) < length or _checksum(number, payload) != checksum:
            return None
        try:
            change = json.loads(payload.decode("ascii"))
            self._check_topics(change, position)
        except _NO_CHANGE as fault:
            raise self._unbelievable(position, fault) from fault
        return position + len(head) + length, number, change

    def _check_topics(self, change: Mapping[str, Any], position: int) -> None:
        """Refuse names that Kafka forbids: they become parts of paths and could lead elsewhere."""
        deleted = [entry[0] for entry in change.get("deleting", {}).values() if entry]
        for name in (*change.get("topics", ()), *deleted):
            if layout.topic_name_fault(name) is not None:
                raise CorruptJournalError(self.path, position, "a topic's name", repr(name))

    @classmethod
    def create(cls, path: Path, state: State | None = None) -> None:
        """Create a journal, empty or with a first state; the caller holds the commit lock."""
        image = _image(state or State())
        files.write_atomically(path, image, temporary_name=layout.COMMIT_TEMPORARY)

    def recover(self) -> State:
        """Make the records of a dead process durable, publish them, and return the state.

        A record whose bytes are not there is dropped with those after it; a warning is logged.
        """
        with self._opened_to_write() as fd:
            header = self._read_header(fd)
            # Only one host writes, so to a writer another boot is a later one, even if the host's
            # name differs (containers change their names).
            if header.is_other_boot:
                header = header._replace(outlived=True)
            before = self._recovered
            if before is None or before.header.generation != header.generation:
                # The process that renamed this file may have died before the name was durable.
                files.sync_directory(self.path.parent)
            known = self._replay
            if known is None or known.header != header:
                known = self._read(fd, header)
            replay = self._with_unpublished(fd, known)
            left = replay.end - known.end
            if left or header.outlived or self._in_doubt or replay.lost:
                if left:
                    # Write these bytes, and earlier relaxed records, again: after a failed sync
                    # the kernel may mark pages as clean that are not on disk.
                    start = known.synced_end
                    files.write_at(fd, files.read_at(fd, replay.end - start, start), start)
                if replay.lost:
                    _logger.warning("%s: %s, so it is dropped", self.path, replay.lost)
                if header.outlived or replay.lost:
                    # Zero the rest, so that no record of a lost future fits behind a new one.
                    files.write_zeros(fd, replay.end)
                files.sync_data(fd)
                replay = replay._replace(header=self._publish(fd, replay), lost="")
            self._in_doubt = False
            self._recovered = self._replay = replay
            return replay.state

    def append(
        self, change: Mapping[str, Any], *, sync: bool = True, ends_work: bool = False
    ) -> State:
        """Write a record; with `sync` this is the commit point. The journal must be recovered.

        It clears the note of `begin_syncs`, and with `ends_work` that of `begin_work`. Raises
        CommitInDoubtError if the record was written and its sync failed. It may then be on disk,
        and the next holder of the lock finds out.
        """
        known = self._recovered
        assert known is not None, "recover first"
        number = known.state.number + 1
        content = {**change} if sync else {**change, "unsynced": True}
        record = _record(number, content)
        if known.end + len(record) > self._size():
            known = self.rewrite(content["time_ms"])  # all data are synced: see `is_full`
        # Apply it before writing: a record that `State.apply` refuses could never be read again.
        replay = known.after(known.end + len(record), number, content)
        with self._opened_to_write() as fd:
            try:
                files.write_at(fd, record, known.end)
                if sync:
                    files.sync_data(fd)
                header = self._publish(fd, replay, b"\0\0" if ends_work else b"\0")
            except OSError as fault:
                files.pass_on(fault)
                self._in_doubt = True
                files.pass_on(fault)
                raise CommitInDoubtError(
                    f"{self.path}: record {number} could not be synced and published "
                    f"({fault.strerror}); the commit is in doubt, "
                    "the next commit or open decides it"
                ) from fault
            self._recovered = self._replay = replay._replace(header=header)
            return replay.state

    def begin_syncs(self) -> bool:
        """Note that data are about to be synced; the next appended record clears the note.

        Returns False if the note exists: an earlier holder's sync failed, or it was killed.
        """
        return self._note(layout.JOURNAL_SYNCING_POSITION)

    def begin_work(self) -> bool:
        """Note that files are about to be changed.

        Returns False if the note exists: the changes of an earlier holder may not be durable.
        (After a power cut they are durable, although the note may remain.)
        """
        return self._note(layout.JOURNAL_WORKING_POSITION)

    def _note(self, position: int) -> bool:
        with self._opened_to_write() as fd:
            if files.read_at(fd, 1, position) != b"\0":
                return False
            files.write_at(fd, b"\1", position)
            return True

    def is_full(self, change: Mapping[str, Any]) -> bool:
        """Return whether the next record needs a rewrite first, and so a synced state."""
        known = self._recovered
        assert known is not None, "recover first"
        size = len(_record(known.state.number + 1, {**change, "unsynced": True}))
        return known.end + size > self._size()

    def _size(self) -> int:
        return (os.fstat(self._fd) if self._fd >= 0 else os.stat(self.path)).st_size

    def rewrite(self, now_ms: int = layout.INT64_MAX) -> _Replay:
        """Replace the file by one snapshot record, without writers that are silent for 30 days."""
        known = self._recovered
        assert known is not None, "recover first"
        state = known.state
        # Use the earlier of two clocks, of this commit and the last: one may have jumped ahead.
        horizon_ms = min(state.time_ms, now_ms) - WRITER_RETENTION_MS
        kept = {name: entry for name, entry in state.writers.items() if entry.time_ms >= horizon_ms}
        forgotten = {name: at for name, at in state.forgotten_writers.items() if at >= horizon_ms}
        state = State(
            state.number,
            state.time_ms,
            state.topics,
            kept,
            deleting=state.deleting,
            forgotten_writers=forgotten,
        )
        image = _image(state)
        image[layout.JOURNAL_WORKING_POSITION] = 1  # as in the old file, if it matters
        is_held = self._fd >= 0
        self._close()  # its name goes to the new file
        files.write_atomically(self.path, image, temporary_name=layout.COMMIT_TEMPORARY)
        if is_held:
            self._fd = self._open(files.open_to_write)
        self._recovered = replay = self._load()
        return replay

    def _publish(self, fd: int, replay: _Replay, noted: bytes = b"") -> _Header:
        published = _published(replay.end, replay.synced_end) + noted
        files.write_at(fd, published, layout.JOURNAL_PUBLISHED_POSITION)
        generation, end, synced_end = replay.header.generation, replay.end, replay.synced_end
        return _Header(generation, end, synced_end, is_other_boot=False, outlived=False)


@functools.cache
def _digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode(), digest_size=8).digest()


def _checksum(number: int, payload: bytes) -> int:
    return crc32c(payload, crc32c(layout.JOURNAL_NUMBER.pack(number)))


def _record(number: int, content: Mapping[str, Any]) -> bytes:
    payload = _encode(content).encode("ascii")
    return layout.JOURNAL_RECORD.pack(len(payload), _checksum(number, payload), number) + payload


def _published(end: int, synced_end: int) -> bytes:
    content = layout.JOURNAL_PUBLISHED.pack(
        end, synced_end, _digest(host.host_id()), _digest(host.boot_id())
    )
    return content + layout.CHECKSUM.pack(crc32c(content))


def _image(state: State) -> bytearray:
    record = _record(state.number, state.snapshot()) if state.number else b""
    end = layout.JOURNAL_RECORDS_POSITION + len(record)
    image = bytearray(max(layout.JOURNAL_SIZE, 4 * end))
    layout.JOURNAL_HEADER.pack_into(
        image, 0, layout.JOURNAL_MAGIC, layout.JOURNAL_VERSION, uuid.uuid4().bytes
    )
    published = _published(end, end)
    position = layout.JOURNAL_PUBLISHED_POSITION
    image[position : position + len(published)] = published
    image[layout.JOURNAL_RECORDS_POSITION : end] = record
    return image
