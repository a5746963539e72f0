"""What is left of keys in all files of a topic: one look at everything, as it is found.

Nothing is held up by it: files come and go while they are read. So the files are listed again
afterwards, and those that are new are read too, until a listing has nothing new.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from kafkalog.cleaner.erasure.file_traces import FileTraces, scan_file
from kafkalog.cleaner.erasure.remains import Remainder, remains
from kafkalog.cleaner.erasure.topic_files import FileKind, TopicFile, topic_files
from kafkalog.errors import StorageError

if TYPE_CHECKING:
    from kafkalog.cleaner.erasure.keys import ErasedKeys
    from kafkalog.storage_engine.engine import Engine
    from kafkalog.storage_engine.state import State

__all__ = ["KindTotal", "Traces", "find_traces"]

_LISTINGS: Final = 100


@dataclass(frozen=True, slots=True)
class KindTotal:
    """How much was looked at of one kind of file."""

    kind: FileKind
    files: int
    bytes: int
    """As they are on the disk."""
    records: int


@dataclass(frozen=True, slots=True)
class Traces:
    """What a look at all files has found."""

    began_ms: int
    files: tuple[FileTraces, ...]
    """Every file that was looked at, by path."""
    remains: tuple[Remainder, ...]
    """What was found, in sentences; empty where there is no trace of any key."""
    ended_ms: int

    @property
    def bytes(self) -> int:
        """How many bytes were looked at, as they are on the disk."""
        return sum(file.size for file in self.files)

    @property
    def records(self) -> int:
        """How many records had their keys compared."""
        return sum(file.records for file in self.files)

    @property
    def found(self) -> int:
        """How many records bear a key."""
        return sum(file.record_count for file in self.files)

    @property
    def mentions(self) -> int:
        """Other records, in live segments, that have a key's bytes in key, value or headers."""
        return sum(file.mentions for file in self.files if file.file.kind is FileKind.LOG)

    @property
    def by_key(self) -> Counter[int]:
        """How often each key was found, by its number: as a record's, or as bytes of a file."""
        count = Counter[int]()
        for file in self.files:
            count.update(file.found)
            count.update(file.positions.keys())
        return count

    @property
    def by_kind(self) -> Iterator[KindTotal]:
        """Yield the totals of each kind of file that there is."""
        for kind in FileKind:
            files = [file for file in self.files if file.file.kind is kind]
            if files:
                size, records = sum(one.size for one in files), sum(one.records for one in files)
                yield KindTotal(kind, len(files), size, records)


def find_traces(
    engine: Engine,
    topic: str,
    keys: ErasedKeys,
    *,
    clock: Callable[[], int],
    is_strict: bool = False,
    progress: Callable[[int, int], None] = lambda _, __: None,
) -> Traces:
    """Look for keys in every file of a topic, and in those of the root.

    Where `is_strict`, other records that mention a key are traces too. `clock` tells epoch ms;
    `progress` is told how many bytes are read, and of how many. Raises UnknownTopicError, OSError,
    and StorageError where new files come faster than they are read.
    """
    began_ms, names = clock(), _names(engine.state(), keys)
    done = of = 0

    def advance(count: int) -> None:
        nonlocal done
        done += count
        progress(done, of)

    seen: dict[tuple[str, int], FileTraces] = {}
    for _ in range(_LISTINGS):
        listed = topic_files(engine, topic)
        fresh = [file for file in listed if _identity(file) not in seen]
        if not fresh:
            found = tuple(seen[_identity(file)] for file in listed)
            now_ms = clock()
            left = remains(engine, topic, found, is_strict=is_strict, now_ms=now_ms)
            return Traces(began_ms, found, tuple(left), now_ms)
        of += sum(file.size for file in fresh)
        for file in fresh:
            try:
                seen[_identity(file)] = scan_file(file, keys, names=names, progress=advance)
            except FileNotFoundError:
                continue  # the next listing has it no more, or under another name
    raise StorageError(
        f"{engine.root}: new files came during each of {_LISTINGS} listings; stop those who write, "
        "and look again"
    )


def _identity(file: TopicFile) -> tuple[str, int]:
    return str(file.path), file.inode


def _names(state: State, keys: ErasedKeys) -> list[bytes]:
    """Return the names in which a key stands and that are no trace: topics', writers', configs'.

    The longest first, as one may stand in another.
    """
    names = {*state.topics, *state.writers, *(gone.name for gone in state.deleting.values())}
    for topic in state.topics.values():
        names.update(topic.config)
        names.update(topic.config.values())
    encoded = sorted((name.encode() for name in names), key=len, reverse=True)
    return [name for name in encoded if any(key in name for key in keys.keys if key)]
