"""Explain the residuals of erased keys: where, why, until when, and what to do about them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from kafkalog.cleaner.report.explain import Reason, duration, explain
from kafkalog.cleaner.shelves import moment_of
from kafkalog.erasure.topic_files import FileKind
from kafkalog.storage_engine.format import layout
from kafkalog.storage_engine.log.results import STAGED_RETENTION_MS
from kafkalog.storage_engine.metadata.config import TopicConfig

if TYPE_CHECKING:
    from kafkalog.erasure.file_occurrences import FileOccurrences
    from kafkalog.storage_engine.log.log import Log

ERASE: Final = "erase"
"""The remedy if no erasure was tried yet."""
_AGAIN: Final = "erase again"


@dataclass(frozen=True, slots=True)
class Residual:
    """An occurrence of the keys that is left in one file."""

    path: Path
    partition: int | None
    """None for a file of the root."""
    sentence: str
    until_ms: int | None = None
    """When it can be removed (epoch ms), if that is known."""
    remedy: str = ERASE


def residuals(
    log: Log,
    topic: str,
    files: Sequence[FileOccurrences],
    *,
    is_strict: bool,
    was_erased: bool,
    now_ms: int,
) -> list[Residual]:
    """Explain what is left, file by file; empty if no key occurs. Raises UnknownTopicError.

    If `is_strict`, other records that mention a key count; `was_erased` is true after an erasure.
    """
    left = [file for file in files if not file.is_clear or (is_strict and file.mentions)]
    if not left:
        return []
    config = TopicConfig.parse(log.describe(topic).config)
    obstacles = {
        explanation.partition: [one for one in explanation.findings if one.is_obstacle]
        for explanation in explain(moment_of(log, now_ms), topic)
    }
    return [
        residual
        for file in left
        for residual in _of_file(
            file,
            config,
            obstacles.get(-1 if file.file.partition is None else file.file.partition, []),
            is_strict=is_strict,
            was_erased=was_erased,
        )
    ]


def _of_file(
    occurrences: FileOccurrences,
    config: TopicConfig,
    obstacles: list[Reason],
    *,
    is_strict: bool,
    was_erased: bool,
) -> Iterator[Residual]:
    file = occurrences.file
    again = _AGAIN if was_erased else ERASE

    def residual(sentence: str, until_ms: int | None = None, remedy: str = again) -> Residual:
        return Residual(file.path, file.partition, sentence, until_ms, remedy)

    for fault in [file.fault] if file.fault else []:
        yield residual(
            f"its content is unknown: {fault}",
            remedy="the log has no such file: inspect it, then remove it or make it readable",
        )
    for fault in [] if file.fault else occurrences.faults:
        yield residual(
            f"its content is unknown: {fault}",
            remedy=f"kafkalog verify shows what is damaged: restore it, then {again}; the next "
            "append truncates what was never committed",
        )
    if occurrences.positions:
        places = ", ".join(str(position) for position in sorted(occurrences.positions.values())[:5])
        count = len(occurrences.positions)
        verb = "occurs" if count == 1 else "occur"
        sentence = f"{_keys(count)} {verb} in it as bytes, at byte {places}"
        if file.kind is FileKind.OTHER:
            yield residual(sentence, remedy="the file is not the log's: inspect it, then remove it")
        elif not occurrences.faults:
            yield residual(sentence, remedy="inspect it, with kafkalog dump if that can read it")
        else:
            yield residual(sentence, remedy="see above")
    if is_strict and (count := occurrences.mentions):
        yield residual(
            f"{_records(count)} with another key {_have(count)} the bytes of one in key, value or "
            "headers",
            remedy="write such records again without it, or erase their keys too",
        )
    if not occurrences.found:
        return
    what = _found(occurrences)
    if file.remove_at_ms is not None:
        yield residual(
            f"{what}, of a topic of this name that was deleted",
            file.remove_at_ms,
            "its directory goes then, when the log is next opened for writing",
        )
    elif file.kind is FileKind.RETIRED:
        until_ms = file.changed_ms + config.file_delete_delay_ms
        noun = "file"
        if file.kept_until_ms is not None:
            until_ms, noun = file.kept_until_ms, "object"
        yield residual(
            f"{what}; the {noun} was replaced, and is kept for file.delete.delay.ms "
            f"({duration(until_ms - file.changed_ms)}) for readers that have just listed it",
            until_ms,
            f"{again} then, or with --now",
        )
    elif file.kind in (FileKind.STAGED, FileKind.STAGED_FOR_ANY):
        of_which = "" if file.kind is FileKind.STAGED else "; it may be of another topic"
        yield residual(
            f"{what}, written by a task and not committed{_writer(file.path)}{of_which}",
            file.modified_ms + STAGED_RETENTION_MS,
            f"wait until it is committed or given up, or until then, and {again}: a commit to "
            "this topic brings the key back; without a commit the file goes then",
        )
    elif file.kind is FileKind.UNFINISHED:
        remedy = f"a forced cleaning removes the files of a dead one: {again}"
        if file.kept_until_ms is not None:
            remedy = f"{again} then, or with --now"
        yield residual(
            f"{what}, written by a cleaning that is running or has died",
            file.kept_until_ms,
            remedy,
        )
    elif obstacles:
        for finding in obstacles:
            yield residual(
                f"{what}. {finding.sentence}",
                finding.until_ms,
                f"{finding.remedy}; then {again}" if finding.remedy else f"{again} then",
            )
    elif occurrences.record_count > occurrences.deletions:
        yield residual(
            f"{what}",
            remedy=f"stop the writers of the key, then {again}" if was_erased else ERASE,
        )
    elif occurrences.horizon_ms is None or occurrences.horizon_ms == layout.INT64_MAX:
        yield residual(f"{what}: the deletion itself, not cleaned yet")
    else:
        yield residual(
            f"{what}: the deletion itself, kept for delete.retention.ms "
            f"({duration(config.delete_retention_ms)}) for followers to see it",
            occurrences.horizon_ms,
            f"{again} then, or with --now once all followers have read it",
        )


def _found(occurrences: FileOccurrences) -> str:
    """Return `3 records of 2 keys (1 deletion), offsets 4 to 18`."""
    deletions = f" ({_count(occurrences.deletions, 'deletion')})" if occurrences.deletions else ""
    text = f"{_records(occurrences.record_count)} of {_keys(len(occurrences.found))}{deletions}"
    file = occurrences.file
    is_dropped = file.kind is FileKind.RETIRED and file.path.suffix == layout.STORED_MIXED
    if is_dropped or file.kind in (FileKind.STAGED, FileKind.STAGED_FOR_ANY):
        return text  # its offsets count from 0
    if occurrences.first_offset == occurrences.last_offset:
        return f"{text}, offset {occurrences.first_offset}"
    return f"{text}, offsets {occurrences.first_offset} to {occurrences.last_offset}"


def _writer(path: Path) -> str:
    parsed = layout.parse_staged(path.name)
    return "" if parsed is None else f" (writer {parsed[0]}, batch {parsed[1]})"


def _records(count: int) -> str:
    return _count(count, "record")


def _have(count: int) -> str:
    return "has" if count == 1 else "have"


def _keys(count: int) -> str:
    return _count(count, "key")


def _count(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"
