"""The `commit` file: a small preallocated journal, and the only truth about what a log holds.

A header, then numbered records with length and checksum; a record is the JSON of what one commit
changed (`state.Change`). Writing a record and syncing it *is* the commit. Then `published_end` in
the header is moved behind it: readers go no further, so nobody ever sees what a power cut could
take back.

Invariants
----------
- Records below `published_end` are whole; the numbers have no gaps.
- Whoever writes here holds the commit lock. Readers hold nothing.
- A record that follows `published_end` with a right checksum was written by a process that died
  between writing and publishing. It counts: the next holder of the lock makes it durable and
  publishes it (`recover`). A torn one is absent.
- The file is written with zeros when it is made, so that a sync of a record moves no metadata.
- A record marked `unsynced` (relaxed `flush.messages`) counts only as long as the host runs: after
  a power cut the whole log goes back to the last synced record.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import os
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from crc32c import crc32c

from kafkalog.errors import (
    CommitInDoubtError,
    CorruptJournalError,
    LockedByBrokerError,
    StorageError,
)
from kafkalog.storage_engine.format import layout
from kafkalog.storage_engine.fs import files, host
from kafkalog.storage_engine.metadata.state import State, merge_change

WRITER_RETENTION_MS = 30 * 24 * 60 * 60 * 1000
_READ_TRIES = 200
_READ_PAUSE_S = 0.001
_PIECE_SIZE = 256 << 10
_encode = json.JSONEncoder(separators=(",", ":")).encode
_NO_CHANGE = (
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RecursionError,
)
"""What comes of a record that has the right checksum, and says what no commit can say."""


@dataclass(frozen=True, slots=True)
class _Header:
    """The header as read: which file this is, and how far it is published and synced."""

    generation: bytes
    published_end: int
    synced_end: int
    is_other_boot: bool
    """The numbers were written in another boot: of this host, or of another one."""
    outlived: bool
    """This host has been booted anew since the numbers were written."""


@dataclass(frozen=True, slots=True)
class _Replay:
    """A state, where the record that led to it ends, and the same for the last synced record."""

    header: _Header
    state: State
    end: int
    synced_state: State
    synced_end: int

    def after(self, end: int, number: int, change: Mapping[str, Any]) -> _Replay:
        state = self.state.apply(number, change)
        if "unsynced" in change:
            return _Replay(self.header, state, end, self.synced_state, self.synced_end)
        return _Replay(self.header, state, end, state, end)

    def synced(self) -> _Replay:
        return _Replay(
            self.header, self.synced_state, self.synced_end, self.synced_state, self.synced_end
        )


class _Reader:
    """Reads an open journal; the published part, which stays as it is, in large pieces."""

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
    """One process's hold on the `commit` file of a log."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._replay: _Replay | None = None
        """What any thread has read last, which may be older than what another one has read."""
        self._recovered: _Replay | None = None
        """What the holder of the commit lock goes on from; no reader writes here."""
        self._in_doubt = False

    # --- reading, without a lock -----------------------------------------------------------------

    def published(self) -> State:
        """Return the published state; one small read when nothing has changed.

        Raises CorruptJournalError, and StorageError for a format of another release.
        """
        return self._load().state

    def _open(self, open_: Callable[[Path], int] = files.open_to_read) -> int:
        try:
            return open_(self.path)
        except PermissionError as fault:
            raise StorageError(f"{self.path}: cannot be opened: {fault.strerror}") from fault
        except FileNotFoundError as fault:
            if not self.path.with_name(layout.COMMIT_RELEASED).exists():
                raise
            raise LockedByBrokerError(
                f"{self.path.parent}: this log was released to a Kafka broker; open it anew to "
                "read it, or take it back with `kafkalog adopt`"
            ) from fault

    def _load(self) -> _Replay:
        fd = self._open()
        try:
            header = self._read_header(fd)
            known = self._replay
            if known is not None and known.header == header:
                return known
            replay = self._read(fd, header)
        finally:
            os.close(fd)
        self._replay = replay
        return replay

    def is_recovered(self) -> bool:
        """Tell whether no whole record follows what is published."""
        fd = self._open()
        try:
            header = self._read_header(fd)
            self._replay = replay = self._read(fd, header)
            return (
                not header.is_other_boot
                and self._next_record(fd, replay.end, replay.state.number) is None
            )
        finally:
            os.close(fd)

    def records(self) -> tuple[dict[str, Any], Iterator[tuple[int, int, int, dict[str, Any]]]]:
        """Return the header's fields, and the whole records: (position, size, number, change).

        Also records that are not published. The header is `formatVersion`, `generation` (hex),
        `publishedEnd` and `syncedEnd` (bytes). Raises CorruptJournalError and StorageError.
        """
        fd = self._open()
        try:
            header = self._read_header(fd)
        finally:
            os.close(fd)
        fields = {
            "formatVersion": layout.JOURNAL_VERSION,
            "generation": header.generation.hex(),
            "publishedEnd": header.published_end,
            "syncedEnd": header.synced_end,
        }
        return fields, self._all_records(header.published_end)

    def _all_records(self, published_end: int) -> Iterator[tuple[int, int, int, dict[str, Any]]]:
        fd = self._open()
        try:
            position, number = layout.JOURNAL_RECORDS_POSITION, 0
            while (found := self._next_record(fd, position, number)) is not None:
                end, number, change = found
                yield position, end - position, number, change
                position = end
            if position < published_end:
                raise CorruptJournalError(
                    self.path, position, f"record {number + 1}", "bytes that are no record"
                )
        finally:
            os.close(fd)

    def _read_header(self, fd: int) -> _Header:
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
            time.sleep(_READ_PAUSE_S)  # met a writer half way through its 36 bytes
        raise CorruptJournalError(
            self.path,
            layout.JOURNAL_PUBLISHED_POSITION,
            "a published end with its checksum",
            "other",
        )

    def _read(self, fd: int, header: _Header) -> _Replay:
        """Replay the records that are published, from where this process had got to.

        After a new boot, whatever is on the disk is durable, and counts also past the published end
        (which is not synced); but the relaxed records after the last synced one do not.
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
            replay = dataclasses.replace(known, header=header)
        reader = _Reader(fd, header.published_end)
        end, number = replay.end, replay.state.number
        gathered: dict[str, Any] | None = None
        while end < header.published_end or header.outlived:
            found = self._next_record(fd, end, number, reader)
            if found is None:
                if header.outlived and end >= header.synced_end:
                    break
                raise CorruptJournalError(
                    self.path, end, f"record {number + 1}", "bytes that are no record"
                )
            try:
                if gathered is None or not merge_change(gathered, found[2]):
                    replay = replay if gathered is None else replay.after(end, number, gathered)
                    gathered = found[2]
            except _NO_CHANGE as fault:
                raise self._unbelievable(end, fault) from fault
            end, number, _ = found
        try:
            replay = replay if gathered is None else replay.after(end, number, gathered)
        except _NO_CHANGE as fault:
            raise self._unbelievable(end, fault) from fault
        return replay.synced() if header.outlived else replay

    def _unbelievable(self, position: int, fault: Exception) -> CorruptJournalError:
        """Return the error for records up to `position`, or at it, that say what none can say."""
        found = f"{type(fault).__name__}: {str(fault)[:80]}"
        return CorruptJournalError(self.path, position, "records of what commits changed", found)

    def _next_record(
        self, fd: int, position: int, number_before: int, reader: _Reader | None = None
    ) -> tuple[int, int, dict[str, Any]] | None:
        """Return (its end, number, change) of the record at `position`; None when it is none."""
        reader = _Reader(fd, 0) if reader is None else reader
        head = reader.read(layout.JOURNAL_RECORD.size, position)
        if len(head) < layout.JOURNAL_RECORD.size:
            return None
        length, checksum, number = layout.JOURNAL_RECORD.unpack(head)
        # The first record of a rewritten file is a snapshot and keeps the number it stands for.
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
        """Refuse names that Kafka forbids: they are parts of paths, which may lead elsewhere."""
        deleted = [entry[0] for entry in change.get("deleting", {}).values() if entry]
        for name in (*change.get("topics", ()), *deleted):
            if layout.topic_name_fault(name) is not None:
                raise CorruptJournalError(self.path, position, "a topic's name", repr(name))

    # --- writing, under the commit lock ----------------------------------------------------------

    @classmethod
    def create(cls, path: Path, state: State | None = None) -> None:
        """Put a journal in place, empty or with a first state; the caller holds the commit lock."""
        image = _image(state or State(), layout.JOURNAL_SIZE)
        files.write_atomically(path, image, temporary_name=layout.COMMIT_TEMPORARY)

    def recover(self) -> State:
        """Count what a dead process left, make it durable, publish it, and return the state."""
        fd = self._open(files.open_to_write)
        try:
            header = self._read_header(fd)
            # Only one host writes, so to a writer another boot is a later one, whatever the host is
            # called by now (containers change their names).
            header = dataclasses.replace(header, outlived=header.is_other_boot)
            before = self._recovered
            if before is None or before.header.generation != header.generation:
                # Whoever put this file in place may have died before its name was durable.
                files.sync_directory(self.path.parent)
            known = self._replay
            if known is None or known.header != header:
                known = self._read(fd, header)
            replay = known
            while (found := self._next_record(fd, replay.end, replay.state.number)) is not None:
                try:
                    replay = replay.after(*found)
                except _NO_CHANGE as fault:
                    raise self._unbelievable(replay.end, fault) from fault
                if header.outlived:
                    replay = known  # relaxed records that a power cut has made unbelievable
                    break
            left = replay.end - known.end
            if left or header.outlived or self._in_doubt:
                if left:
                    # Written again, also what relaxed commits had left before it: after a failed
                    # sync the pages may only pretend to be clean.
                    start = known.synced_end
                    files.write_at(fd, files.read_at(fd, replay.end - start, start), start)
                if header.outlived:
                    self._erase(fd, replay.end)
                files.sync_data(fd)
                replay = dataclasses.replace(replay, header=self._publish(fd, replay))
            self._in_doubt = False
            self._recovered = self._replay = replay
            return replay.state
        finally:
            os.close(fd)

    def append(
        self, change: Mapping[str, Any], *, sync: bool = True, ends_work: bool = False
    ) -> State:
        """Write a record: the commit point, when `sync`. The journal must be recovered.

        It ends what `begin_syncs` has noted, and if it `ends_work`, what `begin_work` has.
        Raises CommitInDoubtError when the record was written and its sync failed: it may be on
        disk, and the next holder of the lock finds out.
        """
        known = self._recovered
        assert known is not None, "recover first"
        number = known.state.number + 1
        content = {**change} if sync else {**change, "unsynced": True}
        record = _record(number, content)
        if known.end + len(record) > self.path.stat().st_size:
            known = self.rewrite(content["time_ms"])  # all data are synced: see `is_full`
        # Before it is written: what `State.apply` refuses could never be read again.
        replay = known.after(known.end + len(record), number, content)
        fd = self._open(files.open_to_write)
        try:
            try:
                files.write_at(fd, record, known.end)
                if sync:
                    files.sync_data(fd)
                header = self._publish(fd, replay, b"\0\0" if ends_work else b"\0")
            except OSError as fault:
                self._in_doubt = True
                raise CommitInDoubtError(
                    f"{self.path}: record {number} could not be synced and published "
                    f"({fault.strerror}); the commit is in doubt, "
                    "the next commit or open settles it"
                ) from fault
            self._recovered = self._replay = dataclasses.replace(replay, header=header)
            return replay.state
        finally:
            os.close(fd)

    def begin_syncs(self) -> bool:
        """Note here that data are about to be synced; the next record that is appended ends that.

        False where it is noted already: the sync of an earlier holder has failed, or it was killed.
        """
        return self._note(layout.JOURNAL_SYNCING_POSITION)

    def begin_work(self) -> bool:
        """Note in the same way that files are about to be changed.

        False where an earlier holder has not ended that: what it has left may not be durable.
        (After a power cut it is, and may be noted all the same.)
        """
        return self._note(layout.JOURNAL_WORKING_POSITION)

    def _note(self, position: int) -> bool:
        fd = self._open(files.open_to_write)
        try:
            if files.read_at(fd, 1, position) != b"\0":
                return False
            files.write_at(fd, b"\1", position)
            return True
        finally:
            os.close(fd)

    def is_full(self, change: Mapping[str, Any]) -> bool:
        """Tell whether the next record needs a rewrite first, and so a synced state."""
        known = self._recovered
        assert known is not None, "recover first"
        size = len(_record(known.state.number + 1, {**change, "unsynced": True}))
        return known.end + size > self.path.stat().st_size

    def rewrite(self, now_ms: int = layout.INT64_MAX) -> _Replay:
        """Replace the file by one snapshot record, forgetting writers that are long silent."""
        known = self._recovered
        assert known is not None, "recover first"
        state = known.state
        # By the clock of this commit and of the last one: one of them may have jumped ahead.
        horizon_ms = min(state.time_ms, now_ms) - WRITER_RETENTION_MS
        kept = {name: entry for name, entry in state.writers.items() if entry.time_ms >= horizon_ms}
        state = State(state.number, state.time_ms, state.topics, kept, deleting=state.deleting)
        image = _image(state, layout.JOURNAL_SIZE)
        image[layout.JOURNAL_WORKING_POSITION] = 1  # as it is in the old file, where it matters
        files.write_atomically(self.path, image, temporary_name=layout.COMMIT_TEMPORARY)
        self._recovered = replay = self._load()
        return replay

    def _publish(self, fd: int, replay: _Replay, noted: bytes = b"") -> _Header:
        published = _published(replay.end, replay.synced_end) + noted
        files.write_at(fd, published, layout.JOURNAL_PUBLISHED_POSITION)
        generation, end, synced_end = replay.header.generation, replay.end, replay.synced_end
        return _Header(generation, end, synced_end, is_other_boot=False, outlived=False)

    def _erase(self, fd: int, position: int) -> None:
        """Zero what follows, so that no record of a lost future fits behind a new one."""
        size = os.fstat(fd).st_size
        files.write_at(fd, bytes(size - position), position)


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


def _image(state: State, size_min: int) -> bytearray:
    """Return a whole journal file whose only record is a snapshot of `state`."""
    record = _record(state.number, state.snapshot()) if state.number else b""
    end = layout.JOURNAL_RECORDS_POSITION + len(record)
    image = bytearray(max(size_min, 4 * end))
    layout.JOURNAL_HEADER.pack_into(
        image, 0, layout.JOURNAL_MAGIC, layout.JOURNAL_VERSION, uuid.uuid4().bytes
    )
    published = _published(end, end)
    position = layout.JOURNAL_PUBLISHED_POSITION
    image[position : position + len(published)] = published
    image[layout.JOURNAL_RECORDS_POSITION : end] = record
    return image
