"""The commit of what tasks have staged: `commit_staged` is all of it, step by step.

`writer.is_new` says whether a batch is committed. Nothing here decodes data.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from kafkalog.errors import InvalidInputError
from kafkalog.storage_engine.directory.staged_contents import StagedContents
from kafkalog.storage_engine.format import layout
from kafkalog.storage_engine.fs import files
from kafkalog.storage_engine.log.results import STAGED_RETENTION_MS, CommitResult
from kafkalog.storage_engine.metadata.new_topic import NewTopic
from kafkalog.storage_engine.metadata.state import State
from kafkalog.storage_engine.metadata.writer import Writer, is_new, writer_slug
from kafkalog.storage_engine.writing.staged_message import Run, StagedMessage

if TYPE_CHECKING:
    from kafkalog.storage_engine.directory.appender import Appender
    from kafkalog.storage_engine.directory.readable_directory import ReadableDirectory
    from kafkalog.storage_engine.directory.transaction import Transaction

_logger = logging.getLogger(__name__)
_ByPartition: TypeAlias = dict[tuple[str, int], list[tuple[StagedMessage, Run]]]
_LARGE_SIZE = 4 << 20
"""Bytes for one partition that are worth a thread."""
_SIDE_BY_SIDE_MIN, _SIDE_BY_SIDE_MAX = 2, 4
"""Partitions that are appended to at once, in as many threads."""


def commit_staged(
    log: ReadableDirectory,
    staged: Sequence[StagedMessage],
    *,
    writer: Writer | None,
    create: NewTopic | None,
    reset_writer: bool,
    now_ms: int,
) -> CommitResult:
    """Commit what tasks have staged, all of it or nothing; see `DirectoryLog.commit`.

    The order of the calls is the promise: is it a retry, verify, truncate, append, sync, record,
    sync, publish.
    After an exception before `record`, or a death, the next holder of the commit lock truncates
    what was appended, if this process has not. It publishes what was recorded.
    """
    rows = sum(message.rows for message in staged)
    with log.transaction() as transaction:  # what a dead holder has left is recovered here
        if not is_new(transaction.state, writer, rows, now_ms, reset_writer=reset_writer):
            # The attempt that committed it may have died, and perhaps no later batch comes.
            left = staged_paths(log.root, transaction.state, lambda _: True)
            remove_done(log.root, staged, writer, {path.parent for path in left})
            return CommitResult(skipped=True, rows=0)
        if rows == 0:
            if writer is not None and writer.is_recorded_without_rows:
                transaction.record_writer(writer.name, writer.batch_id, 0, now_ms, writer.ends)
                transaction.publish(now_ms)
            remove_staged(log.root, staged)
            return CommitResult(skipped=False, rows=0)
        ordered = sorted(staged, key=lambda message: message.spark_partition)
        contents = _verify(transaction, log.root, ordered)
        transaction.match_topics(ordered, create)
        offsets = {}
        for group in _side_by_side(_by_partition(transaction, ordered)):
            # The first call truncates the partitions to the state that the journal records.
            for appenders in transaction.appenders(list(group), now_ms):
                starts = {key: each.state.high_watermark for key, each in appenders.items()}
                files.all_at_once(
                    [
                        functools.partial(_append, appender, log.root, contents, group[key])
                        for key, appender in appenders.items()
                    ],
                    at_least=_SIDE_BY_SIDE_MIN,
                )
                for key, appender in appenders.items():
                    offsets[key] = starts[key], appender.state.high_watermark
        if writer is not None:
            transaction.record_writer(writer.name, writer.batch_id, rows, now_ms, writer.ends)
        transaction.sync_appended(now_ms, rows=rows)
        transaction.record()  # the record is written, synced (the commit point) and published
    directories = (log.partition_directory(*place) for place in offsets)
    remove_done(log.root, staged, writer, directories)
    return CommitResult(skipped=False, rows=rows, offsets=offsets)


def _verify(
    transaction: Transaction, root: Path, ordered: Sequence[StagedMessage]
) -> StagedContents:
    """Compare every staged byte with what its task said, before anything is changed."""
    _check_names(ordered)
    transaction.refuse_gone_topics(ordered)
    contents = StagedContents(root)
    for message in ordered:
        contents.verify(message)
    return contents


def _append(
    appender: Appender,
    root: Path,
    contents: StagedContents,
    runs: Sequence[tuple[StagedMessage, Run]],
) -> None:
    """Append the runs of one partition; a run in a file of its own becomes a segment."""
    for is_segment, group in itertools.groupby(runs, lambda each: each[1].is_segment):
        if is_segment:
            for message, run in group:
                name = message.files[run.file].name
                appender.adopt(root / name.removesuffix(layout.STAGED), run.rows)
        else:
            appender.append((run.rows, contents.pieces(message, run)) for message, run in group)


def _by_partition(transaction: Transaction, ordered: Sequence[StagedMessage]) -> _ByPartition:
    """Return the runs of each partition, in the order of the messages and of their runs."""
    found: _ByPartition = {}
    for message in ordered:
        for run in message.runs:
            found.setdefault((run.topic, run.partition), []).append((message, run))
    for topic, number in found:
        transaction.topic(topic).check_is_here(number)
    return found


def _side_by_side(by_partition: _ByPartition) -> Iterator[_ByPartition]:
    """Yield the partitions, a few together if each of them gets much."""
    group: _ByPartition = {}
    for key, runs in by_partition.items():
        if sum(run.size for _, run in runs) < _LARGE_SIZE:
            yield {key: runs}
            continue
        group[key] = runs
        if len(group) == _SIDE_BY_SIDE_MAX:
            yield group
            group = {}
    if group:
        yield group


def staged_paths(root: Path, state: State, matches: Callable[[str], bool]) -> list[Path]:
    """Return the staged files, in the root and in partitions, whose names match."""
    directories = [root] + [
        root / layout.partition_directory(topic.name, number)
        for topic in state.topics.values()
        for number in topic.numbers()
    ]
    suffixes = (layout.STAGED, layout.STAGED_INDEX, layout.STAGED_TIME_INDEX)
    found: list[Path] = []
    for directory in directories:
        names: list[str] = []
        with files.ignoring():  # who could not list it has staged nothing there
            names = files.list_names(directory)
        found.extend(
            directory / name
            for name in names
            if name.startswith(layout.OURS) and name.endswith(suffixes) and matches(name)
        )
    return found


def _check_names(staged: Sequence[StagedMessage | None]) -> None:
    """Refuse messages that name other files than tasks stage: such are read, renamed and removed.

    Raises InvalidInputError.
    """
    for message in staged:
        for file in message.files if message else ():
            if not layout.is_staged_path(file.name):
                raise InvalidInputError(
                    f"{file.name!r} is not a staged file below the log's directory: the message "
                    "was not made by a task of kafkalog"
                )


def remove_staged(root: Path, staged: Sequence[StagedMessage | None]) -> None:
    """Remove the staged files that messages name; large ones with their indexes."""
    _check_names(staged)
    for message in staged:
        for file in message.files if message else ():
            stem = file.name.removesuffix(layout.STAGED)
            for suffix in (layout.STAGED, layout.STAGED_INDEX, layout.STAGED_TIME_INDEX):
                path = root / f"{stem}{suffix}"
                if suffix == layout.STAGED or path.parent != root:
                    files.remove(path)


def remove_done(
    root: Path,
    staged: Sequence[StagedMessage],
    writer: Writer | None,
    directories: Iterable[Path],
) -> None:
    """After a commit: remove its staged files, and what failed attempts of its writer left.

    `directories` are those of the partitions it wrote to, or where any are left. The commit is
    made, so a failure here must not look like one of the commit.
    """
    try:
        remove_staged(root, staged)
        if writer is not None:
            last = {writer_slug(writer.id, writer.target): writer.batch_id}
        else:  # a writer without a name has one batch alone
            named = (Path(file.name).name for message in staged for file in message.files)
            last = {parts[0]: parts[1] for name in named if (parts := layout.parse_staged(name))}
        for directory in {root, *directories} if last else ():
            for name in files.list_names(directory):
                parts = layout.parse_staged(name)
                if parts is not None and parts[1] <= last.get(parts[0], -1):
                    files.remove(directory / name)
    except OSError as fault:
        files.pass_on(fault)
        _logger.warning("%s: staged files were not removed: %s", root, fault)


def remove_aborted(
    root: Path,
    state: State,
    staged: Sequence[StagedMessage | None],
    writer: Writer | None,
    prefix: str | None,
    *,
    run: int | None = None,
) -> None:
    """Remove what a failed batch staged: what messages name, and what bears its prefix.

    With a `run`, only its files with that prefix go: another run may be at work.
    """
    remove_staged(root, staged)
    if prefix is None and writer is not None:
        prefix = layout.staged_prefix(writer_slug(writer.id, writer.target), writer.batch_id)
    if prefix:
        wanted = prefix

        def matches(name: str) -> bool:
            if not name.startswith(wanted):
                return False
            parts = layout.parse_staged(name)
            return run is None or (parts is not None and parts[2] == run)

        for path in staged_paths(root, state, matches):
            files.remove(path)


def sweep_staged(root: Path, state: State, *, now_ms: int) -> int:
    """Remove staged files so old that no living query can name them; returns how many."""
    count = 0
    for path in staged_paths(root, state, lambda _: True):
        with contextlib.suppress(FileNotFoundError):
            if path.stat().st_mtime * 1000 < now_ms - STAGED_RETENTION_MS:
                files.remove(path)
                count += 1
    return count
