"""What is left of erased keys, in sentences: where, why, until when, and what to do about it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from kafkalog.cleaner.report.explain import duration, explain
from kafkalog.erasure.topic_files import FileKind
from kafkalog.storage_engine.format import layout
from kafkalog.storage_engine.metadata.config import TopicConfig
from kafkalog.storage_engine.writing.commit import STAGED_RETENTION_MS

if TYPE_CHECKING:
    from kafkalog.cleaner.report.explain import Reason
    from kafkalog.erasure.file_occurrences import FileOccurrences
    from kafkalog.storage_engine.engine import Engine

__all__ = ["ERASE", "Residual", "residuals"]

_OBSTACLES: Final = {
    *("policy", "broker", "unreadable", "cleaning", "paused", "uncleanable"),
    *("transaction", "lag", "pin"),
}
"""What of an explanation keeps a forced cleaning away."""
ERASE: Final = "erase"
"""What to do where that was not tried yet."""
_AGAIN: Final = "erase again"


@dataclass(frozen=True, slots=True)
class Residual:
    """Something of the keys that is left in one file."""

    path: Path
    partition: int | None
    """None for a file of the root."""
    sentence: str
    until_ms: int | None = None
    """When it can go (epoch ms), where that is known."""
    remedy: str = ERASE


def residuals(
    engine: Engine,
    topic: str,
    files: Sequence[FileOccurrences],
    *,
    is_strict: bool,
    was_erased: bool,
    now_ms: int,
) -> list[Residual]:
    """Say what is left, file by file; nothing where no file has a trace.

    Where `is_strict`, other records that mention a key are traces too. `was_erased` says that what
    is found was left by an erasure, or came since. Raises UnknownTopicError.
    """
    left = [file for file in files if not file.is_clear or (is_strict and file.mentions)]
    if not left:
        return []
    config = TopicConfig.parse(engine.describe(topic).config)
    obstacles = {
        explanation.partition: [one for one in explanation.findings if one.code in _OBSTACLES]
        for explanation in explain(engine, topic, now_ms)
    }
    return [
        remainder
        for file in left
        for remainder in _of_file(
            file,
            config,
            obstacles.get(-1 if file.file.partition is None else file.file.partition, []),
            is_strict=is_strict,
            was_erased=was_erased,
        )
    ]


def _of_file(
    traces: FileOccurrences,
    config: TopicConfig,
    obstacles: list[Reason],
    *,
    is_strict: bool,
    was_erased: bool,
) -> Iterator[Residual]:
    file = traces.file
    again = _AGAIN if was_erased else ERASE

    def remainder(sentence: str, until_ms: int | None = None, remedy: str = again) -> Residual:
        return Residual(file.path, file.partition, sentence, until_ms, remedy)

    for fault in [file.fault] if file.fault else []:
        yield remainder(
            f"what it holds cannot be told: {fault}",
            remedy="the log has none such: look there, and take it out, or let it be read",
        )
    for fault in [] if file.fault else traces.faults:
        yield remainder(
            f"what it holds cannot be told: {fault}",
            remedy=f"kafkalog verify tells what is damaged: restore it, then {again}; what was "
            "never committed is cut off by the next append",
        )
    if traces.positions:
        places = ", ".join(str(position) for position in sorted(traces.positions.values())[:5])
        count = len(traces.positions)
        verb = "stands" if count == 1 else "stand"
        sentence = f"{_keys(count)} {verb} in it as bytes, at byte {places}"
        if file.kind is FileKind.OTHER:
            yield remainder(sentence, remedy="the file is none of the log's: look at it, remove it")
        elif not traces.faults:
            yield remainder(sentence, remedy="look at it, with kafkalog dump where that knows it")
        else:
            yield remainder(sentence, remedy="see above")
    if is_strict and traces.mentions:
        yield remainder(
            f"{_records(traces.mentions)} with another key {_have(traces.mentions)} the bytes of "
            "one in key, value or headers",
            remedy="write such a record anew without it, or erase its key too",
        )
    if not traces.found:
        return
    what = _found(traces)
    if file.remove_at_ms is not None:
        yield remainder(
            f"{what}, of a topic of this name that was deleted",
            file.remove_at_ms,
            "its directory goes then, when the log is next opened for writing",
        )
    elif file.kind is FileKind.RETIRED:
        yield remainder(
            f"{what}; the file is replaced, and kept for file.delete.delay.ms "
            f"({duration(config.file_delete_delay_ms)}) for readers that have just listed it",
            file.changed_ms + config.file_delete_delay_ms,
            f"{again} then, or with --now",
        )
    elif file.kind in (FileKind.STAGED, FileKind.STAGED_FOR_ANY):
        of_which = "" if file.kind is FileKind.STAGED else "; it may be of another topic"
        yield remainder(
            f"{what}, written by a task and not committed{_writer(file.path)}{of_which}",
            file.modified_ms + STAGED_RETENTION_MS,
            f"wait until it is committed or given up, or until then, and {again}: a commit to "
            "this topic brings the key back, and what nobody commits goes after that time",
        )
    elif file.kind is FileKind.UNFINISHED:
        yield remainder(
            f"{what}, written by a cleaning that is under way, or has died",
            remedy=f"a forced cleaning removes what a dead one has left: {again}",
        )
    elif obstacles:
        for finding in obstacles:
            yield remainder(
                f"{what}. {finding.sentence}",
                finding.until_ms,
                f"{finding.remedy}; then {again}" if finding.remedy else f"{again} then",
            )
    elif traces.record_count > traces.deletions:
        yield remainder(
            f"{what}",
            remedy=f"stop who writes the key, then {again}" if was_erased else ERASE,
        )
    elif traces.horizon_ms is None or traces.horizon_ms == layout.INT64_MAX:
        yield remainder(f"{what}: the deletion itself, not cleaned yet")
    else:
        yield remainder(
            f"{what}: the deletion itself, kept for delete.retention.ms "
            f"({duration(config.delete_retention_ms)}) for followers to see it",
            traces.horizon_ms,
            f"{again} then, or with --now once all followers have read it",
        )


def _found(traces: FileOccurrences) -> str:
    """Return `3 records of 2 keys (1 deletion), offsets 4 to 18`."""
    deletions = f" ({_count(traces.deletions, 'deletion')})" if traces.deletions else ""
    text = f"{_records(traces.record_count)} of {_keys(len(traces.found))}{deletions}"
    if traces.file.kind in (FileKind.STAGED, FileKind.STAGED_FOR_ANY):
        return text  # its offsets count from 0
    if traces.first_offset == traces.last_offset:
        return f"{text}, offset {traces.first_offset}"
    return f"{text}, offsets {traces.first_offset} to {traces.last_offset}"


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
