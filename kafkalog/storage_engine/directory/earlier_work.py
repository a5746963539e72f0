"""Syncs what earlier holders of the commit lock have left unsynced, before more is built on it.

After a failed sync of relaxed commits, the pages look clean: another sync would write nothing and
succeed. Their bytes are therefore written again. After a holder's death its truncations are
unknown: the next one finds nothing to truncate, and syncs nothing. A power cut could then bring
back what was truncated, among committed records.
"""

from __future__ import annotations

import errno
import functools
from collections.abc import Iterator
from pathlib import Path

from kafkalog.storage_engine.directory.kept_appenders import KeptAppenders, Key
from kafkalog.storage_engine.format import layout
from kafkalog.storage_engine.fs import files
from kafkalog.storage_engine.metadata.journal import Journal
from kafkalog.storage_engine.metadata.state import State
from kafkalog.storage_engine.segment import partition_directory
from kafkalog.storage_engine.segment.partition_directory import Place


class EarlierWork:
    """The unsynced work of earlier holders, for one holder of the commit lock."""

    def __init__(self, root: Path, journal: Journal, kept: KeptAppenders) -> None:
        self._root = root
        self._journal = journal
        self._kept = kept
        self._is_durable = False
        self._uncertain: dict[Key, OSError] = {}
        """Partitions where it could not be made durable, and why.

        The others stay usable, as long as no commit in such a partition waits for its own sync."""

    @property
    def is_certain(self) -> bool:
        """Whether all that was tried to make durable is so."""
        return not self._uncertain

    def make_durable(self, state: State) -> None:
        """Make the changes of earlier holders durable, before files are changed or synced."""
        if self._is_durable:
            return
        if state.unsynced and not self._journal.begin_syncs():
            self.write_again(state)
        if not self._journal.begin_work():
            self._kept.clear()  # the dead holder may have worked in any partition
            files.all_at_once(
                [
                    functools.partial(self._sync_truncation, topic.name, number, each.active_base)
                    for topic in state.topics.values()
                    for number, each in topic.present()
                ]
            )
        self._is_durable = True

    def is_recorded(self) -> None:
        """Note that a record was written: others may have worked in the log before the next one."""
        self._is_durable = False

    def check(self, key: Key) -> None:
        """Raise the OSError of a partition whose earlier work could not be made durable."""
        if key in self._uncertain:
            raise self._uncertain[key]

    def _sync_truncation(self, topic: str, number: int, active_base: int) -> None:
        try:
            directory = self._root / layout.partition_directory(topic, number)
            partition_directory.sync_truncation(directory, active_base)
        except OSError as fault:
            files.pass_on(fault)
            if fault.errno == errno.EMFILE:  # not this partition's fault: see `OpenAppenders`
                raise
            self._uncertain[topic, number] = fault

    def sync_relaxed(self, state: State) -> None:
        """Sync what relaxed commits (`flush.messages`, `flush.ms`) have left."""
        for directory, start, _ in self._unsynced(state):
            partition_directory.sync_segments(directory, start)

    def write_again(self, state: State) -> None:
        """Write again what relaxed commits have left, since its pages may look clean."""
        for directory, start, end in self._unsynced(state):
            partition_directory.write_again(directory, start, end)

    def _unsynced(self, state: State) -> Iterator[tuple[Path, Place, Place]]:
        for (topic, number), start in state.unsynced.items():
            directory = self._root / layout.partition_directory(topic, number)
            known = state.topic(topic).partitions[number]
            yield directory, start, (known.active_base, known.active_size)
