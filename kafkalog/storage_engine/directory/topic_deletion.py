"""Delete topics: move their directories away at once, and remove them later.

The journal record comes first: it ends the topic and keeps its id. Then each directory gets Kafka's
name for a deleted one (`layout.deleted_directory`), so that a topic of the same name can be
created. They are removed `file.delete.delay.ms` after the deletion, and the id is dropped. A
process may die anywhere. The next process that opens the log for writing, sweeps it, or creates a
topic of that name continues the work. If a directory is a symbolic link, only the link is removed.

A directory is moved under its cleaner lock, the commit lock and its segments lock, so that no
cleaning, commit or listing is active in it. A running cleaning notices that its topic is gone and
stops. Open files stay readable.

Kafka: LogManager.asyncDelete, LogManager.deleteLogs.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from kafkalog.errors import LockedByBrokerError, StorageError
from kafkalog.storage_engine.directory.new_directories import DeletionUnfinishedError
from kafkalog.storage_engine.format import layout
from kafkalog.storage_engine.fs import files, locks
from kafkalog.storage_engine.metadata import checkpoints
from kafkalog.storage_engine.metadata.state import DeletedTopic, State

if TYPE_CHECKING:
    from kafkalog.storage_engine.directory.readable_directory import ReadableDirectory

_Result = TypeVar("_Result")
_logger = logging.getLogger(__name__)


def finish_deletions(store: ReadableDirectory, *, now_ms: int, wait_for: str | None = None) -> int:
    """Move the directories of deleted topics away, and remove those whose delay has passed.

    Leaves a directory in which a cleaner works for the next call, unless it is of topic `wait_for`,
    and also a directory whose topic is unknown. Returns the number of topics that are gone for
    good. Raises OSError, StorageError, LockedByBrokerError.
    """
    removed = []
    for deleted in list(store.state().deleting.values()):
        is_moved = _move(store, deleted, wait=deleted.name == wait_for)
        if is_moved and now_ms >= deleted.remove_at_ms:
            _remove(store, deleted)
            removed.append(deleted.topic_id)
    if removed:
        _forget(store, removed, now_ms)
    return len(removed)


def try_deletions(store: ReadableDirectory, *, now_ms: int, wait_for: str | None = None) -> None:
    """Do the same, but only log a failure; the next call continues."""
    try:
        finish_deletions(store, now_ms=now_ms, wait_for=wait_for)
    except (OSError, StorageError, LockedByBrokerError) as fault:
        files.pass_on(fault)
        _logger.warning("%s: directories of deleted topics remain: %s", store.root, fault)


def _forget(store: ReadableDirectory, topic_ids: list[str], now_ms: int) -> None:
    """Drop topics whose files are gone, all in one commit.

    Rewrites the root's checkpoints first; otherwise a new topic of the same name would get the old
    entries.
    """
    with store.transaction() as transaction:
        left = [topic_id for topic_id in topic_ids if topic_id in transaction.state.deleting]
        if not left:
            return
        if transaction.state.unsynced:
            transaction.publish(now_ms)
        checkpoints.write_root_checkpoints(store.root, transaction.state)
        for topic_id in left:
            transaction.forget_deleted(topic_id)
        transaction.publish(now_ms)


def with_directories_away(
    store: ReadableDirectory, work: Callable[[], _Result], *, now_ms: int
) -> _Result:
    """Do work that creates topics; repeat it if directories of a deleted topic were in its way."""
    while True:
        try:
            return work()
        except DeletionUnfinishedError as fault:
            finish_deletions(store, now_ms=now_ms, wait_for=fault.topic)


def _move(store: ReadableDirectory, deleted: DeletedTopic, *, wait: bool) -> bool:
    """Rename the remaining directories; return False if one must stay for now."""
    is_whole, is_moved = True, False
    state = store.state()
    for number in range(deleted.partitions):
        directory = store.partition_directory(deleted.name, number)
        try:
            is_to_move = _is_of(directory, number, deleted, state)
        except StorageError as fault:
            _logger.warning("topic %r is not gone until this is repaired: %s", deleted.name, fault)
            is_whole = False
            continue
        if not is_to_move:
            continue
        target = store.root / layout.deleted_directory(deleted.name, number, deleted.topic_id)
        cleaner_lock = locks.FileLock(directory / layout.CLEANER_LOCK)
        # Another process may have moved it while this one waited.
        with (
            contextlib.suppress(FileNotFoundError),
            cleaner_lock.exclusive(wait=wait) as is_held,
        ):
            if not is_held:
                is_whole = False
                continue
            with store.transaction() as transaction, locks.SegmentsLock(directory).exclusive():
                if _is_of(directory, number, deleted, transaction.state):
                    transaction.check_lock()
                    files.rename(directory, target)
                    is_moved = True
    files.sync_directory(store.root)
    if is_moved:
        _forget_cleaned(store)
    return is_whole


def _forget_cleaned(store: ReadableDirectory) -> None:
    """Remove the topic from the cleaner's checkpoint; a full disk must not stop the deletion."""
    with store.transaction() as transaction:
        try:
            checkpoints.write_cleaner_checkpoint(store.root, transaction.state)
        except OSError as fault:  # stale, but harmless: every later checkpoint leaves it out, too
            files.pass_on(fault)
            _logger.warning("%s: the cleaner's checkpoint was not written: %s", store.root, fault)


def _is_of(directory: Path, number: int, deleted: DeletedTopic, state: State) -> bool:
    """Return whether a directory is the deleted topic's, and not a new topic's of its name.

    Raises StorageError if its topic is unknown.
    """
    new = state.topics.get(deleted.name)
    if (new is not None and number < len(new.partitions)) or not directory.is_dir():
        return False
    topic_id = checkpoints.read_topic_id(directory)
    if topic_id is None and _holds_records(directory):
        raise StorageError(
            f"{directory / layout.PARTITION_METADATA}: expected the id of a topic, found none; put "
            "the file back from a copy, or move the directory away"
        )
    return topic_id == deleted.topic_id


def _holds_records(directory: Path) -> bool:
    """Return whether a directory without an id is more than the remains of a creation.

    The next creation of the topic handles such remains.
    """
    with contextlib.suppress(FileNotFoundError):  # another process has moved it
        logs = [name for name in files.list_names(directory) if name.endswith(layout.LOG)]
        is_recorded = not (directory / layout.UNRECORDED).exists()
        return is_recorded and any((directory / name).stat().st_size for name in logs)
    return False


def _remove(store: ReadableDirectory, deleted: DeletedTopic) -> None:
    with locks.RootLock(store.root).shared():
        for number in range(deleted.partitions):
            name = layout.deleted_directory(deleted.name, number, deleted.topic_id)
            with contextlib.suppress(FileNotFoundError):  # another process may remove it too
                files.remove_directory(store.root / name)
        files.sync_directory(store.root)
