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
  that belongs to the open files with the pin, and refuses a log that was cleaned beyond.
- A pin that is no longer live stays for a day, by the clock of who renewed it last and by the file
  system's, so that a straggler does not take it for missing and pin another moment; the pins of a
  streaming query go when a later batch of it pins one. None goes that somebody reads by.
- Who takes hold of a pin renews it then. So of one that has ended, and that nobody held when a
  cleaner asked, it does not ask again for some minutes, unless it was renewed.

A root that cannot be written has no pins; nor has a broker's. Kafka has nothing like it.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import logging
import os
import random
import re
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from crc32c import crc32c

from kafkalog.errors import CorruptLogError, StorageError
from kafkalog.storage_engine import files, layout, locks
from kafkalog.storage_engine.state import PartitionState, State

__all__ = [
    "LEASE_MS",
    "Action",
    "LivePin",
    "LivePins",
    "Pin",
    "PinnedPartition",
    "hold",
    "live_pins",
    "pin",
    "renew",
    "sweep_pins",
]

_logger = logging.getLogger(__name__)

LEASE_MS = 10 * 60_000
"""How long a pin holds cleaners back after it was renewed last."""
_KEPT_MS = 24 * 60 * 60_000
_ASKED_AGAIN_MS = 5 * 60_000
"""After which an ended pin is asked about anew: who may not write to it cannot renew it."""
_SWEEPS_ONE_IN = 32
"""Of the actions that are no micro-batch: a sweep looks at every file of the root."""
_TRIES = 100
_ASKS = 4
_ASK_PAUSE_S = 0.003
_LISTINGS = 10
"""Attempts to list a root between two changes of it."""
_VERSION = 1
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


class PinnedPartition(NamedTuple):
    """What a pin says of a partition."""

    log_start_offset: int
    high_watermark: int
    last_stable_offset: int


@dataclass(frozen=True, slots=True)
class Pin:
    """One point of the journal, written down."""

    path: Path
    number: int
    """Of the journal's record."""
    topics: Mapping[str, tuple[str, tuple[PinnedPartition, ...]]]
    """By name: a topic's id, and its partitions in order."""

    def partition(self, topic: str, topic_id: str, partition: int) -> PinnedPartition | None:
        """Return what is said of a partition; None where that topic did not have it."""
        known = self.topics.get(topic)
        if known is None or known[0] != topic_id or partition >= len(known[1]):
            return None
        return known[1][partition]


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
            found = _read(path)
            if found is not None:
                if held is not None:
                    hold(path, held, now_ms)
                return found
        except OSError as fault:
            raise StorageError(
                f"{path}: the moment of this read is pinned and cannot be read: {fault.strerror}; "
                "run all executors as one user, or with a umask that lets them read"
            ) from fault
        try:
            made = _make(path, load_state, now_ms, held)
        except OSError as fault:
            if fault.errno in _NOT_WRITABLE:
                return None
            raise StorageError(
                f"{path}: the moment of this read cannot be written down, and its tasks would see "
                f"different ones: {fault.strerror}; free space, or give endingOffsets, which needs "
                "no pin"
            ) from fault
        if made and (action.batch is not None or secrets.randbelow(_SWEEPS_ONE_IN) == 0):
            with contextlib.suppress(OSError):
                _sweep(root, now_ms, action.file_name())
    raise StorageError(
        f"{path}: the pin of this read vanished, or was passed, {_TRIES} times; "
        "run the action again"
    )


def hold(path: Path, held: contextlib.ExitStack, now_ms: int) -> None:
    """Share the lock of a pin, until `held` is closed: somebody reads by it. Renews it, too."""
    held.enter_context(locks.FileLock(path, create=False).shared())
    renew(path, now_ms)  # after it: cleaners who had asked before ask again


def renew(path: Path, now_ms: int) -> None:
    """Begin the lease of a pin anew; one that is gone, or another user's, is left alone."""
    with contextlib.suppress(OSError):
        files.set_times(path, now_ms * 1_000_000)


def _make(
    path: Path, load_state: Callable[[], State], now_ms: int, held: contextlib.ExitStack | None
) -> bool:
    """Pin the present moment, unless another has won, or a cleaner has passed it already."""
    state = load_state()
    candidate = path.with_name(f"{path.name}.{secrets.token_hex(8)}")
    try:
        files.create(candidate, _encoded(state))
        with contextlib.ExitStack() as own:
            # A lock is the file's, whatever its name: so there is no moment without it.
            hold(candidate, own, now_ms)
            if _is_passed(state, load_state()) or not files.link(candidate, path):
                return False
            if held is not None:
                held.enter_context(own.pop_all())
            return True
    finally:
        files.remove(candidate)


def _is_passed(then: State, now: State) -> bool:
    """Whether a cleaning that `then` did not know of reaches beyond what was stable then."""
    for topic in now.topics.values() if now is not then else ():
        known = then.topics.get(topic.name)
        if known is None or known.topic_id != topic.topic_id:
            continue
        for old, new in zip(known.partitions, topic.partitions, strict=False):
            if new.cleaned_to > max(old.last_stable_offset, old.cleaned_to):
                return True
    return False


# --- what cleaners ask ---------------------------------------------------------------------------


_Hold = tuple[int, int]
"""An offset that no cleaning may pass, and the end of the lease, negative: the least one counts."""
_NONE: _Hold = (layout.INT64_MAX, 0)

_unheld: dict[Path, dict[int, tuple[int, int]]] = {}
"""By root and inode, of pins that nobody held: when they were renewed, and when asked about."""


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
        for path, renewed_ms in _live(root, now_ms, held_only=held_only):
            until = -(renewed_ms + LEASE_MS)
            try:
                found = _read_either(path)
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
            read = _read_either(path)
        except (CorruptLogError, OSError):
            read = None
        number = None if read is None else read.number
        found.append(LivePin(path, number, renewed_ms, _is_held(path)))
    return sorted(found)


def _live(root: Path, now_ms: int, *, held_only: bool) -> Iterator[tuple[Path, int]]:
    """Yield the pins that are held, or leased where that is enough, and when they were renewed."""
    before = _unheld.get(root, {})
    unheld: dict[int, tuple[int, int]] = {}
    seen: set[int] = set()
    for path, inode, renewed_ms, _ in _listed(root):
        if inode in seen:
            continue
        seen.add(inode)
        is_leased = abs(now_ms - renewed_ms) < LEASE_MS
        known_ms, asked_ms = before.get(inode, (None, 0))
        if is_leased or known_ms != renewed_ms or abs(now_ms - asked_ms) >= _ASKED_AGAIN_MS:
            if (is_leased and not held_only) or _is_held(Path(path)):
                yield Path(path), renewed_ms
                continue
            asked_ms = now_ms
        unheld[inode] = (renewed_ms, asked_ms)
    _unheld[root] = unheld


def sweep_pins(root: Path, now_ms: int) -> int:
    """Remove pins that have not been renewed for a day; returns how many."""
    return _sweep(root, now_ms, None)


def _sweep(root: Path, now_ms: int, action: str | None) -> int:
    """Remove old pins, and those of earlier batches of the query that pinned that action's."""
    own = None if action is None else _NAME.match(action)
    count = 0
    for path, _, renewed_ms, changed_ms in _entries(root):
        match = _NAME.match(os.path.basename(path))
        is_old = all(abs(now_ms - time_ms) >= _KEPT_MS for time_ms in (renewed_ms, changed_ms))
        is_earlier = (
            own is not None
            and match is not None
            and match[1] == own[1]
            and "x" not in (match[2], own[2])
            and int(match[2]) < int(own[2])
        )
        if (is_earlier or is_old) and not _is_held(Path(path)):
            with contextlib.suppress(OSError):
                files.remove(Path(path))
                count += 1
    return count


def _is_held(path: Path) -> bool:
    """Whether somebody reads by a pin, under the name it was listed by or the one it has since.

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
    with os.scandir(root) as entries:
        for entry in entries:
            if entry.name.startswith(layout.PIN) and entry.is_file(follow_symlinks=False):
                try:
                    known = entry.stat(follow_symlinks=False)
                except FileNotFoundError:
                    continue
                times = (known.st_mtime_ns // 1_000_000, known.st_ctime_ns // 1_000_000)
                yield _Entry(entry.path, known.st_ino, *times)


# --- the file ------------------------------------------------------------------------------------


def _encoded(state: State) -> bytes:
    topics = {
        topic.name: [topic.topic_id, [_pinned(held) for held in topic.partitions]]
        for topic in state.topics.values()
    }
    content = {"version": _VERSION, "number": state.number, "topics": topics}
    return _json({**content, "crc": crc32c(_json(content))}) + b"\n"


def _json(content: Mapping[str, object]) -> bytes:
    return json.dumps(content, separators=(",", ":")).encode()


def _pinned(held: PartitionState) -> PinnedPartition:
    return PinnedPartition(held.log_start_offset, held.high_watermark, held.last_stable_offset)


def _read(path: Path) -> Pin | None:
    """Return a pin; None where there is none. Raises CorruptLogError."""
    try:
        found = _decoded(path, path.read_bytes())
    except FileNotFoundError:
        return None
    if found is None:
        raise CorruptLogError(
            path,
            0,
            f"a pin of version {_VERSION}",
            "one of a later release",
            advice="run one release everywhere",
        )
    return found


def _read_either(path: Path) -> Pin | None:
    """Return a pin under the name that it was listed by, or the one that it has been given since.

    None for one of a later release. Raises OSError and CorruptLogError.
    """
    try:
        return _decoded(path, path.read_bytes())
    except FileNotFoundError:
        path = path.with_suffix("")
        return _decoded(path, path.read_bytes())


def _decoded(path: Path, data: bytes) -> Pin | None:
    try:
        content = json.loads(data)
        if content["version"] != _VERSION:
            return None
        if content.pop("crc") != crc32c(_json(content)):
            raise ValueError("wrong checksum")
        topics = {
            str(name): (str(topic_id), tuple(PinnedPartition(*map(int, held)) for held in rows))
            for name, (topic_id, rows) in content["topics"].items()
        }
        return Pin(path, int(content["number"]), topics)
    except (
        ValueError,
        TypeError,
        KeyError,
        AttributeError,
        ArithmeticError,
        RecursionError,
    ) as fault:
        raise CorruptLogError(
            path,
            0,
            "the JSON of a pin",
            f"{data[:40]!r}",
            advice="remove it and run the action again",
        ) from fault


def _digest(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
