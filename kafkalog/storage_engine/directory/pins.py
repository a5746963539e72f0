"""Snapshot pins: one snapshot of the log for all tasks of one action.

The tasks of a Spark action start one after the other and cannot communicate. The first task writes
the journal's state to a small file `kl-pin-...` in the root, named after the action. The other
tasks, their retries, and all other readers of the action read that file instead of the journal.
Because `link` creates it, the first task wins, and the file is visible as a whole or not at all.

A pin is *live* for ten minutes after it was made or renewed; tasks renew it while they read. The
cleaner does not clean past a live pin, so a later task still finds its records. A reader also
shares the file's lock. A forced cleaning ignores leases and honours only pins that are in use.
Invariants:

- A pin with an action's name never changes, and no cleaner had passed it when it was made. Its
  maker writes it under a temporary name, which cleaners honour too, reads the journal again, and
  only then links it. A cleaner announces its cleaning in the journal, looks at the pins, and only
  then swaps. The second of the two always sees the first.
- Correctness never depends on a lease. A reader that opens a snapshot compares the state of the
  open files with the pin, and refuses a log that was cleaned beyond it. A changelog read refuses
  any later swap (`swapped_at`), because a cleaning below the pin removes records too.
- A pin ends with its lease, by the renewing host's clock and by the file system's. It also ends
  when its application has pinned so many later snapshots that its action must have ended. Its file
  is removed, and `ended_pins` informs a late task. The pins of a streaming query end when a later
  batch of the query makes one. A pin in use never ends.

A changelog reader also shares the lock `kl-changelog.lock` of the root. Background cleaners then
start no cleaning, which would make the action fail.

A root without write permission has no pins, nor has a broker's. Kafka has nothing similar.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import logging
import math
import os
import random
import re
import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from kafkalog.errors import CorruptLogError, KafkaLogError, StorageError
from kafkalog.storage_engine.directory import ended_pins, pin_file
from kafkalog.storage_engine.directory.pin_file import Pin
from kafkalog.storage_engine.format import layout
from kafkalog.storage_engine.fs import files, locks
from kafkalog.storage_engine.metadata.state import State

_logger = logging.getLogger(__name__)

LEASE_MS = 10 * 60_000
"""How long a pin holds cleaners back after its last renewal."""
_LEASED_MAX = 32
"""Pins of one application that keep their lease while no reader uses them."""
_SWEEPS_ONE_IN = 8
"""Share of the actions outside micro-batches that sweep, which lists every file of the root."""
_TRIES = 100
_ASKS = 4
_ASK_PAUSE_S = 0.003
_LISTINGS = 10
"""Attempts to list a root without a change during the listing."""
_NOT_WRITABLE = files.NOT_WRITABLE | {errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS}
_NAME = re.compile(rf"^{layout.PIN}([0-9a-f]{{16}})-([0-9]+|x)-[0-9a-f]{{16}}(\.[0-9a-f]+)?$")


@dataclass(frozen=True, slots=True)
class Action:
    """The common identity of the tasks that must see one snapshot."""

    application: str
    name: str
    """The action's name, unique within the application."""
    query: str | None = None
    """Id of the streaming query of the action's micro-batch."""
    batch: int | None = None
    """Number of that micro-batch."""

    def file_name(self) -> str:
        """Return the name of the action's pin."""
        series = _digest(self.application, self.query or "")
        number = "x" if self.query is None or self.batch is None else str(self.batch)
        return f"{layout.PIN}{series}-{number}-{_digest(self.application, self.name)}"


def pin(
    root: Path,
    action: Action,
    load_state: Callable[[], State],
    now_ms: int,
    *,
    held: contextlib.ExitStack | None = None,
) -> Pin | None:
    """Return the pin of an action, or pin the present state.

    With `held`, shares the pin's lock until that is closed. Returns None if the root cannot be
    written or has no hard links. Raises StorageError if the disk refuses the file, and
    CorruptLogError for an unreadable pin.
    """
    path = root / action.file_name()
    for _ in range(_TRIES):
        try:
            found = pin_file.read(path)
            if found is not None:
                if held is not None:
                    hold(path, held, now_ms)
                if held is None or path.exists():  # else it has just ended
                    return found
        except OSError as fault:
            files.pass_on(fault)
            raise StorageError(
                f"{path}: the snapshot pin of this read cannot be read: {fault.strerror}; "
                "run all executors as one user, or with a umask that lets them read"
            ) from fault
        content = None
        try:
            with ended_pins.making(root):
                content = ended_pins.find(root, path.name)
                made = _make(path, content, load_state, now_ms, held)
        except OSError as fault:
            files.pass_on(fault)
            if fault.errno in _NOT_WRITABLE and content is None:
                return None
            raise StorageError(
                f"{path}: the snapshot pin of this read cannot be written, and without it its "
                f"tasks could see different snapshots: {fault.strerror}; free space, or give "
                "endingOffsets, which needs no pin"
            ) from fault
        if made and (action.batch is not None or secrets.randbelow(_SWEEPS_ONE_IN) == 0):
            with files.ignoring(KafkaLogError):
                _sweep(root, now_ms, action.file_name())
    raise StorageError(
        f"{path}: the pin of this read vanished, or was passed, {_TRIES} times; "
        "run the action again"
    )


def hold(path: Path, held: contextlib.ExitStack, now_ms: int) -> None:
    """Share the lock of a pin until `held` is closed, to mark it as in use; renew it too."""
    held.enter_context(locks.FileLock(path, create=False).shared())
    renew(path, now_ms)  # after the lock: a cleaner that looked before it looks again


def hold_changelog(root: Path, held: contextlib.ExitStack) -> None:
    """Mark the root as having a changelog reader until `held` is closed, if that is possible.

    Without the mark, a cleaning may make the read fail.
    """
    with files.ignoring(StorageError):
        held.enter_context(locks.FileLock(root / layout.CHANGELOG_LOCK).shared())


def renew(path: Path, now_ms: int) -> None:
    """Restart the lease of a pin; ignore one that is gone or belongs to another user."""
    with files.ignoring():
        files.set_times(path, now_ms * 1_000_000)


def _make(
    path: Path,
    content: bytes | None,
    load_state: Callable[[], State],
    now_ms: int,
    held: contextlib.ExitStack | None,
) -> bool:
    """Pin the present state; return False if another task won or a cleaner has passed it.

    With `content`, that of an ended pin, pin that state again.
    """
    state = load_state()
    candidate = path.with_name(f"{path.name}.{secrets.token_hex(8)}")
    try:
        files.create(candidate, pin_file.encoded(state) if content is None else content)
        with contextlib.ExitStack() as own:
            # The lock belongs to the file, not to its name, so it covers the link too.
            hold(candidate, own, now_ms)
            is_passed = content is None and _is_passed(state, load_state())
            if is_passed or not files.link(candidate, path):
                return False
            if held is not None:
                held.enter_context(own.pop_all())
            return True
    finally:
        files.remove(candidate)


def _is_passed(then: State, now: State) -> bool:
    """Return whether a cleaning after `then` has removed records that were there then."""
    for topic in now.topics.values() if now is not then else ():
        known = then.topics.get(topic.name)
        if known is None or known.topic_id != topic.topic_id:
            continue
        for old, new in zip(known.partitions, topic.partitions, strict=False):
            is_beyond = new.cleaned_to > max(old.last_stable_offset, old.cleaned_to)
            if is_beyond or new.swapped_at > then.number:
                return True
    return False


_Hold = tuple[int, int]
"""An offset that no cleaning may pass, and the negated end of the lease: the least pair counts."""
_NONE: _Hold = (layout.INT64_MAX, 0)


class LivePins:
    """The pins of a root that hold cleaners back, as of one listing."""

    def __init__(self, root: Path, now_ms: int, *, held_only: bool = False) -> None:
        """Find them; costs a listing of the root, and a small read per live pin.

        With `held_only`, only pins in use count; a lease is not enough.
        """
        self._everywhere = _NONE
        """For pins that this process cannot read."""
        self._least: dict[tuple[str, str], dict[int, _Hold]] = {}
        self.has_changelog = _is_held(root / layout.CHANGELOG_LOCK)
        """Whether a reader of a changelog is active now."""
        for path, renewed_ms in _live(root, now_ms, held_only=held_only):
            until = -(renewed_ms + LEASE_MS)
            try:
                found = pin_file.read_either(path)
            except (CorruptLogError, FileNotFoundError):
                continue  # an unfinished pin does not count: its maker reads the journal again
            except OSError as fault:
                files.pass_on(fault)
                _logger.warning("%s: cannot be read, so nothing is cleaned: %s", path, fault)
                found = None
            if found is None:
                self._everywhere = min(self._everywhere, (0, until))
            else:
                self._add(found, until)

    def _add(self, pin: Pin, until: int) -> None:
        for topic, (topic_id, partitions) in pin.topics.items():
            least = self._least.setdefault((topic, topic_id), {})
            for number, pinned in enumerate(partitions):
                hold = (pinned.last_stable_offset, until)
                if hold < least.get(number, _NONE):
                    least[number] = hold

    def limit(self, topic: str, topic_id: str, partition: int) -> int:
        """Return the offset that no cleaning of the partition may pass; INT64_MAX for none."""
        return self.holder(topic, topic_id, partition)[0]

    def holder(self, topic: str, topic_id: str, partition: int) -> tuple[int, int]:
        """Return that offset, and the end (epoch ms) of the lease of its pin."""
        held = self._least.get((topic, topic_id), {}).get(partition, _NONE)
        offset, until = min(self._everywhere, held)
        return offset, -until


class LivePin(NamedTuple):
    """A pin that holds cleaners back."""

    path: Path
    number: int | None
    """Number of its journal record; None if the pin cannot be read."""
    renewed_ms: int
    is_held: bool
    """Whether a reader uses it now."""


def live_pins(root: Path, now_ms: int) -> list[LivePin]:
    """Return the live pins of a root, by name; raises OSError if it cannot be listed."""
    found = []
    for path, renewed_ms in _live(root, now_ms, held_only=False):
        try:
            read = pin_file.read_either(path)
        except (CorruptLogError, OSError) as raised:
            files.pass_on(raised)
            read = None
        number = None if read is None else read.number
        found.append(LivePin(path, number, renewed_ms, _is_held(path)))
    return sorted(found)


def _live(root: Path, now_ms: int, *, held_only: bool) -> Iterator[tuple[Path, int]]:
    """Yield the pins in use, and leased ones unless `held_only`, with their last renewal."""
    seen: set[int] = set()
    for path, inode, renewed_ms, _ in _listed(root):
        if inode not in seen:
            seen.add(inode)
            is_leased = abs(now_ms - renewed_ms) < LEASE_MS
            if (is_leased and not held_only) or _is_held(Path(path)):
                yield Path(path), renewed_ms


def sweep_pins(root: Path, now_ms: int) -> int:
    """Remove pins that have ended, and return their number. Raises OSError and KafkaLogError."""
    return _sweep(root, now_ms, None)


def _sweep(root: Path, now_ms: int, action: str | None) -> int:
    """Remove ended pins, and those of earlier batches of the query that made `action`'s pin."""
    own = None if action is None else _NAME.match(action)
    gone: dict[str, bytes | None] = {}
    later: Counter[str] = Counter()
    with ended_pins.ending(root) as is_alone:
        found = list(_entries(root)) if is_alone else []
        for path, _, renewed_ms, changed_ms in sorted(found, key=lambda one: -one.renewed_ms):
            name = os.path.basename(path)
            match = _NAME.match(name)
            series = match[1] if match else ""
            is_earlier = own and match and series == own[1] and _batch(match) < _batch(own)
            is_over = all(abs(now_ms - ms) >= LEASE_MS for ms in (renewed_ms, changed_ms))
            with files.ignoring():
                is_surplus = later[series] >= _LEASED_MAX and name != action
                if not (is_earlier or is_over or is_surplus):
                    later[series] += 1
                elif not _is_held(Path(path)):
                    gone[name] = None if is_earlier else files.read_file(path)
        ended = {name: content for name, content in gone.items() if content is not None}
        if ended:
            ended_pins.add(root, ended, now_ms)
        for name in gone:
            with files.ignoring():
                files.remove(root / name)
    return len(gone)


def _batch(match: re.Match[str]) -> float:
    """Return the batch number in a pin's name; NaN, never less than another, without one."""
    return math.nan if match[2] == "x" else int(match[2])


def _is_held(path: Path) -> bool:
    """Return whether a lock is shared; for a pin also under its later name.

    Two processes that test at once may take each other for a reader, so a positive test is
    repeated. For a file that cannot be opened or locked, only its lease counts.
    """
    with files.ignoring(StorageError):
        for name in dict.fromkeys((path, path.with_suffix(""))):
            lock = locks.FileLock(name, create=False)
            for attempt in range(_ASKS):
                if not lock.is_held():
                    break
                if attempt == _ASKS - 1:
                    return True
                time.sleep(random.uniform(0.3, 1.7) * _ASK_PAUSE_S)
    return False


def _listed(root: Path) -> list[_Entry]:
    """List the pins of a root, without missing one that is renamed during the listing."""
    for _ in range(_LISTINGS):
        before = root.stat().st_mtime_ns
        found = list(_entries(root))
        if root.stat().st_mtime_ns == before:
            break
    return found


class _Entry(NamedTuple):
    path: str
    inode: int
    renewed_ms: int
    """By the clock of the process that renewed it."""
    changed_ms: int
    """By the clock of the file system."""


def _entries(root: Path) -> Iterator[_Entry]:
    with files.scan(root) as entries:
        for entry in entries:
            if entry.name.startswith(layout.PIN) and entry.is_file(follow_symlinks=False):
                try:
                    known = entry.stat(follow_symlinks=False)
                except FileNotFoundError:
                    continue
                times = (known.st_mtime_ns // 1_000_000, known.st_ctime_ns // 1_000_000)
                yield _Entry(entry.path, known.st_ino, *times)


def _digest(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
