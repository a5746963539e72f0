"""Pins: one moment of the log, kept for the many tasks of one action.

The tasks of a Spark action start one after the other and cannot speak with each other. The first
one writes down what the journal says, in a small file `kl-pin-...` in the root that is named by the
action; the others, their retries, and all other readers of the same action read that file instead.
`link` makes it: the first wins, and everybody sees the file whole or not at all.

A pin is *live* for ten minutes after it was made or renewed, and tasks renew it while they read.
The cleaner does not clean past what a live pin says, so that whoever comes later still finds the
moment. Who reads holds the file's lock besides, shared: a cleaning that is forced waits for no
lease, and honours only the pins that somebody holds. Invariants:

- A pin that bears an action's name never changes, and was not passed by a cleaner when it was made:
  its maker writes it under a name of its own, which cleaners honour as well, looks at the journal
  again, and only then links it. A cleaner tells the journal how far it will go, looks at the pins,
  and only then swaps. Whoever comes second sees the other.
- That a moment is whole never depends on a lease. Whoever opens a view of it compares the state
  that belongs to the open files with the pin, and refuses a log that was cleaned beyond. A
  changelog refuses any swap since (`swapped_at`): a cleaning below the pin takes records, too.
- A pin ends with its lease, by the clock of who renewed it last and by the file system's; or when
  its application has pinned so many later moments that its action will have ended. Its file goes,
  and `ended_pins` tells a late task of it, which never takes it for missing. The pins of a
  streaming query go when a later batch of it pins one. None goes that somebody reads by.

Who reads a changelog shares the lock `kl-changelog.lock` of the root besides: background cleaners
begin nothing meanwhile, and so do not make his action fail.

A root that cannot be written has no pins; nor has a broker's. Kafka has nothing like it.
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
from kafkalog.storage_engine.format import layout
from kafkalog.storage_engine.fs import files, locks
from kafkalog.storage_engine.metadata.state import State
from kafkalog.storage_engine.reading import ended_pins, pin_file
from kafkalog.storage_engine.reading.pin_file import Pin, PinnedPartition

__all__ = [
    "LEASE_MS",
    "Action",
    "LivePin",
    "LivePins",
    "Pin",
    "PinnedPartition",
    "hold",
    "hold_changelog",
    "live_pins",
    "pin",
    "renew",
    "sweep_pins",
]

_logger = logging.getLogger(__name__)

LEASE_MS = 10 * 60_000
"""How long a pin holds cleaners back after it was renewed last."""
_LEASED_MAX = 32
"""Pins of one application that keep their lease when nobody reads by them."""
_SWEEPS_ONE_IN = 8
"""Of the actions that are no micro-batch: a sweep looks at every file of the root."""
_TRIES = 100
_ASKS = 4
_ASK_PAUSE_S = 0.003
_LISTINGS = 10
"""Attempts to list a root between two changes of it."""
_NOT_WRITABLE = files.NOT_WRITABLE | {errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS}
"""Also what file systems without hard links say."""
_NAME = re.compile(rf"^{layout.PIN}([0-9a-f]{{16}})-([0-9]+|x)-[0-9a-f]{{16}}(\.[0-9a-f]+)?$")


@dataclass(frozen=True, slots=True)
class Action:
    """What the tasks that are to see one moment have in common."""

    application: str
    name: str
    """Of the action; no other one of the application has it."""
    query: str | None = None
    """Id of the streaming query whose micro-batch it belongs to."""
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
    """Return the moment of an action: the one that is pinned, else the present one, pinned now.

    With `held` its lock is shared until that is closed. None where the root cannot be written, and
    where its file system has no hard links. Raises StorageError when the disk refuses the file, and
    CorruptLogError for a pin that cannot be read.
    """
    path = root / action.file_name()
    for _ in range(_TRIES):
        try:
            found = pin_file.read(path)
            if found is not None:
                if held is not None:
                    hold(path, held, now_ms)
                if held is None or path.exists():  # else it has ended meanwhile
                    return found
        except OSError as fault:
            raise StorageError(
                f"{path}: the moment of this read is pinned and cannot be read: {fault.strerror}; "
                "run all executors as one user, or with a umask that lets them read"
            ) from fault
        content = None
        try:
            with ended_pins.making(root):
                content = ended_pins.find(root, path.name)
                made = _make(path, content, load_state, now_ms, held)
        except OSError as fault:
            if fault.errno in _NOT_WRITABLE and content is None:
                return None
            raise StorageError(
                f"{path}: the moment of this read cannot be written down, and its tasks would see "
                f"different ones: {fault.strerror}; free space, or give endingOffsets, which needs "
                "no pin"
            ) from fault
        if made and (action.batch is not None or secrets.randbelow(_SWEEPS_ONE_IN) == 0):
            with contextlib.suppress(OSError, KafkaLogError):
                _sweep(root, now_ms, action.file_name())
    raise StorageError(
        f"{path}: the pin of this read vanished, or was passed, {_TRIES} times; "
        "run the action again"
    )


def hold(path: Path, held: contextlib.ExitStack, now_ms: int) -> None:
    """Share the lock of a pin, until `held` is closed: somebody reads by it. Renews it, too."""
    held.enter_context(locks.FileLock(path, create=False).shared())
    renew(path, now_ms)  # after it: cleaners who had asked before ask again


def hold_changelog(root: Path, held: contextlib.ExitStack) -> None:
    """Say, until `held` is closed, that somebody reads the changelog of a moment, where it can be.

    A cleaner that does not hear of it makes the read fail, and no more.
    """
    with contextlib.suppress(OSError, StorageError):
        held.enter_context(locks.FileLock(root / layout.CHANGELOG_LOCK).shared())


def renew(path: Path, now_ms: int) -> None:
    """Begin the lease of a pin anew; one that is gone, or another user's, is left alone."""
    with contextlib.suppress(OSError):
        files.set_times(path, now_ms * 1_000_000)


def _make(
    path: Path,
    content: bytes | None,
    load_state: Callable[[], State],
    now_ms: int,
    held: contextlib.ExitStack | None,
) -> bool:
    """Pin the present moment, unless another has won, or a cleaner has passed it already.

    With the content of a pin that has ended, pin that again.
    """
    state = load_state()
    candidate = path.with_name(f"{path.name}.{secrets.token_hex(8)}")
    try:
        files.create(candidate, pin_file.encoded(state) if content is None else content)
        with contextlib.ExitStack() as own:
            # A lock is the file's, whatever its name: so there is no moment without it.
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
    """Whether a cleaning that `then` did not know of has taken records that were there then."""
    for topic in now.topics.values() if now is not then else ():
        known = then.topics.get(topic.name)
        if known is None or known.topic_id != topic.topic_id:
            continue
        for old, new in zip(known.partitions, topic.partitions, strict=False):
            is_beyond = new.cleaned_to > max(old.last_stable_offset, old.cleaned_to)
            if is_beyond or new.swapped_at > then.number:
                return True
    return False


# --- what cleaners ask ---------------------------------------------------------------------------


_Hold = tuple[int, int]
"""An offset that no cleaning may pass, and the end of the lease, negative: the least one counts."""
_NONE: _Hold = (layout.INT64_MAX, 0)


class LivePins:
    """What the pins of a root that hold cleaners back say, as they were at one look."""

    def __init__(self, root: Path, now_ms: int, *, held_only: bool = False) -> None:
        """Look for them; costs a listing of the root, and a small read per live pin.

        With `held_only` a lease is not enough: only what somebody reads by now counts.
        """
        self._everywhere = _NONE
        """Of pins that nobody here can read."""
        self._least: dict[tuple[str, str], dict[int, _Hold]] = {}
        """By topic and its id, then by partition."""
        self.has_changelog = _is_held(root / layout.CHANGELOG_LOCK)
        """Whether somebody reads the changelog of a moment now."""
        for path, renewed_ms in _live(root, now_ms, held_only=held_only):
            until = -(renewed_ms + LEASE_MS)
            try:
                found = pin_file.read_either(path)
            except (CorruptLogError, FileNotFoundError):
                continue  # one that is being written counts for nothing yet: its maker looks again
            except OSError as fault:
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
        """Return that offset, and until when (epoch ms) the pin that holds there is leased."""
        held = self._least.get((topic, topic_id), {}).get(partition, _NONE)
        offset, until = min(self._everywhere, held)
        return offset, -until


class LivePin(NamedTuple):
    """A pin that holds cleaners back."""

    path: Path
    number: int | None
    """Of the journal's record that it is of; None where the pin cannot be read."""
    renewed_ms: int
    is_held: bool
    """Whether somebody reads by it now."""


def live_pins(root: Path, now_ms: int) -> list[LivePin]:
    """Return the live pins of a root, by name; raises OSError where it cannot be listed."""
    found = []
    for path, renewed_ms in _live(root, now_ms, held_only=False):
        try:
            read = pin_file.read_either(path)
        except (CorruptLogError, OSError):
            read = None
        number = None if read is None else read.number
        found.append(LivePin(path, number, renewed_ms, _is_held(path)))
    return sorted(found)


def _live(root: Path, now_ms: int, *, held_only: bool) -> Iterator[tuple[Path, int]]:
    """Yield the pins that are held, or leased where that is enough, and when they were renewed."""
    seen: set[int] = set()
    for path, inode, renewed_ms, _ in _listed(root):
        if inode not in seen:
            seen.add(inode)
            is_leased = abs(now_ms - renewed_ms) < LEASE_MS
            if (is_leased and not held_only) or _is_held(Path(path)):
                yield Path(path), renewed_ms


def sweep_pins(root: Path, now_ms: int) -> int:
    """Remove pins that have ended; returns how many. Raises OSError and KafkaLogError."""
    return _sweep(root, now_ms, None)


def _sweep(root: Path, now_ms: int, action: str | None) -> int:
    """Remove ended pins, and those of earlier batches of the query that pinned that action's."""
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
            with contextlib.suppress(OSError):
                is_surplus = later[series] >= _LEASED_MAX and name != action
                if not (is_earlier or is_over or is_surplus):
                    later[series] += 1
                elif not _is_held(Path(path)):
                    gone[name] = None if is_earlier else files.read_file(path)
        ended = {name: content for name, content in gone.items() if content is not None}
        if ended:
            ended_pins.add(root, ended, now_ms)
        for name in gone:
            with contextlib.suppress(OSError):
                files.remove(root / name)
    return len(gone)


def _batch(match: re.Match[str]) -> float:
    """Return the number in a pin's name; that of no micro-batch is no number, and so not less."""
    return math.nan if match[2] == "x" else int(match[2])


def _is_held(path: Path) -> bool:
    """Whether a lock is shared: that of a pin also under the name that it has been given since.

    Two who ask at once may take each other for a reader, so a yes is asked for again. Where nobody
    can tell, of a file that may not be opened or locked alone, only its lease counts.
    """
    with contextlib.suppress(OSError, StorageError):
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
    """List the pins of a root; no name is missed that was there all the time under either name."""
    for _ in range(_LISTINGS):
        before = root.stat().st_mtime_ns
        found = list(_entries(root))
        if root.stat().st_mtime_ns == before:
            break
    return found


class _Entry(NamedTuple):
    """A pin in a listing of its root, which may be long."""

    path: str
    inode: int
    renewed_ms: int
    """By the clock of who renewed it."""
    changed_ms: int
    """By the clock of the file system."""


def _entries(root: Path) -> Iterator[_Entry]:
    """Yield the pins of a root."""
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
