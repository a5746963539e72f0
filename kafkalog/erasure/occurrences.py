"""The occurrences of keys in all files of a topic, as of a commit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kafkalog.erasure.kinds import scan_of
from kafkalog.erasure.residuals import Residual, residuals
from kafkalog.erasure.topic_files import LIVE, FileKind

if TYPE_CHECKING:
    from kafkalog.cleaner.rewrite.erased_keys import ErasedKeys
    from kafkalog.erasure.file_occurrences import FileOccurrences
    from kafkalog.storage_engine.log.log import Log
    from kafkalog.storage_engine.metadata.state import State


@dataclass(frozen=True, slots=True)
class KindTotal:
    """How much was scanned of one kind of file."""

    kind: FileKind
    files: int
    bytes: int
    """Bytes on disk."""
    records: int
    found: int
    """How many of them have one of the keys."""


@dataclass(frozen=True, slots=True)
class Occurrences:
    """The result of a scan of all files."""

    began_ms: int
    record_number: int | None
    """The journal's record up to which all commits were scanned; None in a broker's directory."""
    high_watermarks: Mapping[int, int]
    """The high watermark of each partition at that record."""
    files: tuple[FileOccurrences, ...]
    """Every scanned file, by path; of a mixed object one for each partition, and its footer."""
    residuals: tuple[Residual, ...]
    """The residuals, in sentences; empty if no key occurs."""
    ended_ms: int

    @property
    def file_count(self) -> int:
        """Number of files that were scanned."""
        return len({file.file.path for file in self.files})

    @property
    def bytes(self) -> int:
        """Bytes on disk that were scanned."""
        return sum(file.size for file in self.files)

    @property
    def records(self) -> int:
        """Number of records whose keys were compared."""
        return sum(file.records for file in self.files)

    @property
    def found(self) -> int:
        """Number of records that have one of the keys."""
        return sum(file.record_count for file in self.files)

    @property
    def mentions(self) -> int:
        """Other records, in live segments, that have a key's bytes in key, value or headers."""
        return sum(file.mentions for file in self.files if file.file.kind in LIVE)

    @property
    def by_key(self) -> Counter[int]:
        """How often each key was found, by its number: in records, or as bytes of a file."""
        count = Counter[int]()
        for file in self.files:
            count.update(file.found)
            count.update(file.positions.keys())
        return count

    @property
    def by_kind(self) -> Iterator[KindTotal]:
        """Yield the totals of each kind of file that exists."""
        for kind in FileKind:
            files = [file for file in self.files if file.file.kind is kind]
            if files:
                yield KindTotal(
                    kind,
                    len({one.file.path for one in files}),
                    sum(one.size for one in files),
                    sum(one.records for one in files),
                    sum(one.record_count for one in files),
                )


def find_occurrences(
    log: Log,
    topic: str,
    keys: ErasedKeys,
    *,
    clock: Callable[[], int],
    is_strict: bool = False,
    was_erased: bool = False,
    progress: Callable[[int, int], None] = lambda _, __: None,
) -> Occurrences:
    """Find keys in all files of a topic, and in those of the root.

    If `is_strict`, other records that mention a key count too; `was_erased` says that an erasure
    has run. The clock returns epoch ms, and `progress` receives the bytes read, and of how many.
    Raises UnknownTopicError, OSError, and StorageError if files are replaced faster than they are
    read, or if a store cannot be listed.
    """
    began_ms = clock()
    names = _names(log.state(), keys)
    scan = scan_of(log, topic, keys, names, progress)
    scan.run()
    now_ms = clock()
    left = residuals(
        log, topic, scan.files, is_strict=is_strict, was_erased=was_erased, now_ms=now_ms
    )
    present = scan.state.topic(topic).present()
    return Occurrences(
        began_ms,
        None if log.is_brokers else scan.state.number,
        {number: partition.high_watermark for number, partition in present},
        scan.files,
        tuple(left),
        now_ms,
    )


def _names(state: State, keys: ErasedKeys) -> list[bytes]:
    """Return names of topics, writers and configs that contain a key, longest first."""
    names = {*state.topics, *state.writers, *(gone.name for gone in state.deleting.values())}
    for topic in state.topics.values():
        names.update(topic.config)
        names.update(topic.config.values())
    encoded = sorted((name.encode() for name in names), key=len, reverse=True)
    return [name for name in encoded if any(keys.find_bytes(name, is_text=False))]
