"""What is left of keys in all files of a topic, and as of which commit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kafkalog.erasure.residuals import Residual, residuals
from kafkalog.erasure.topic_files import FileKind
from kafkalog.erasure.topic_scan import TopicScan

if TYPE_CHECKING:
    from kafkalog.cleaner.rewrite.erased_keys import ErasedKeys
    from kafkalog.erasure.file_occurrences import FileOccurrences
    from kafkalog.storage_engine.engine import Engine
    from kafkalog.storage_engine.metadata.state import State

__all__ = ["KindTotal", "Occurrences", "find_occurrences"]


@dataclass(frozen=True, slots=True)
class KindTotal:
    """How much was looked at of one kind of file."""

    kind: FileKind
    files: int
    bytes: int
    """As they are on the disk."""
    records: int
    found: int
    """How many of them bear a key."""


@dataclass(frozen=True, slots=True)
class Occurrences:
    """What a look at all files has found."""

    began_ms: int
    record_number: int | None
    """The record of the journal as of which this is so: all that was committed by then was looked
    at. None of a broker's directory, which has no journal."""
    high_watermarks: Mapping[int, int]
    """Of each partition, as of then."""
    files: tuple[FileOccurrences, ...]
    """Every file that was looked at, by path."""
    remains: tuple[Residual, ...]
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
                yield KindTotal(
                    kind,
                    len(files),
                    sum(one.size for one in files),
                    sum(one.records for one in files),
                    sum(one.record_count for one in files),
                )


def find_occurrences(
    engine: Engine,
    topic: str,
    keys: ErasedKeys,
    *,
    clock: Callable[[], int],
    is_strict: bool = False,
    was_erased: bool = False,
    progress: Callable[[int, int], None] = lambda _, __: None,
) -> Occurrences:
    """Look for keys in every file of a topic, and in those of the root.

    Where `is_strict`, other records that mention a key are traces too; `was_erased` says that the
    look is one after an erasure. `clock` tells epoch ms;
    `progress` is told how many bytes are read, and of how many. Raises UnknownTopicError, OSError,
    and StorageError where files are replaced faster than they are read.
    """
    began_ms = clock()
    look = TopicScan(engine, topic, keys, _names(engine.state(), keys), progress)
    look.run()
    now_ms = clock()
    left = residuals(
        engine, topic, look.files, is_strict=is_strict, was_erased=was_erased, now_ms=now_ms
    )
    present = look.state.topic(topic).present()
    return Occurrences(
        began_ms,
        None if engine.is_brokers else look.state.number,
        {number: partition.high_watermark for number, partition in present},
        look.files,
        tuple(left),
        now_ms,
    )


def _names(state: State, keys: ErasedKeys) -> list[bytes]:
    """Return the names in which a key stands and that are no trace: topics', writers', configs'.

    The longest first, as one may stand in another.
    """
    names = {*state.topics, *state.writers, *(gone.name for gone in state.deleting.values())}
    for topic in state.topics.values():
        names.update(topic.config)
        names.update(topic.config.values())
    encoded = sorted((name.encode() for name in names), key=len, reverse=True)
    return [name for name in encoded if any(keys.find_bytes(name, is_text=False))]
