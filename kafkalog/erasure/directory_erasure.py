"""The files of a log directory that had erased keys: those that a cleaning or retention replaced.

They are removed after `file.delete.delay.ms`. Processes that have one open can still read it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from kafkalog.cleaner.state.first_dirty_offset import heal_first_dirty_offsets
from kafkalog.erasure.topic_files import partition_directories, root_directories, topic_files
from kafkalog.storage_engine.format import layout
from kafkalog.storage_engine.fs import files
from kafkalog.storage_engine.metadata.config import TopicConfig
from kafkalog.storage_engine.segment.swaps import sweep_deleted

if TYPE_CHECKING:
    from kafkalog.erasure.file_occurrences import FileOccurrences
    from kafkalog.storage_engine.directory.directory_log import DirectoryLog


class DirectoryErasure:
    """The steps of one erasure that differ from those in a store."""

    def __init__(
        self,
        log: DirectoryLog,
        topic: str,
        before: Sequence[FileOccurrences],
        *,
        clock: Callable[[], int],
    ) -> None:
        """`before` are the occurrences that were found first; the clock returns epoch ms."""
        self._log = log
        self._topic = topic
        self._clock = clock
        self._retired = {
            one.file.partition
            for one in before
            if one.file.is_retired and not one.is_clear and one.file.partition is not None
        }

    def prepare(self, partitions: Sequence[int]) -> None:
        """Correct first dirty offsets that lie outside their log."""
        heal_first_dirty_offsets(self._log, now_ms=self._clock())

    def remove_replaced(
        self, partitions: Sequence[int], *, now: bool, wait: Callable[[int], None] | None
    ) -> None:
        """Remove replaced files: with `now` at once, or after their time.

        `wait` receives the time until which they stay, and returns then; without it they stay.
        Then make durable which files are gone. Raises OSError.
        """
        directories = {
            self._log.partition_directory(self._topic, number)
            for number in {*partitions, *self._retired}
        }
        retired = [
            file
            for file in topic_files(self._log, self._topic)
            if file.path.parent in directories
            and file.is_retired
            and layout.parse_segment_file(file.path.name)
        ]
        if retired and (now or wait is not None):
            config = TopicConfig.parse(self._log.describe(self._topic).config)
            delay_ms = 0 if now else config.file_delete_delay_ms
            until_ms = layout.INT64_MAX
            if wait is not None and not now:
                until_ms = max(file.changed_ms for file in retired) + delay_ms
                wait(until_ms)
            for directory in directories:
                sweep_deleted(directory, older_than_ms=delay_ms, now_ms=until_ms)
        self._sync_names()

    def _sync_names(self) -> None:
        """Make durable which files are gone, also those that a dead process replaced or removed."""
        partitions = partition_directories(self._log, self._topic)
        for directory in sorted({*root_directories(self._log, partitions), *partitions}):
            # The scan tells of a directory that cannot be read; one that is missing has no file.
            with contextlib.suppress(FileNotFoundError, PermissionError):
                files.sync_directory(directory)
