"""The mixed objects of a task attempt: one PUT for most tasks, and no copy at the commit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from kafkalog.storage_engine.format import layout
from kafkalog.storage_engine.object_store.client import ObjectClient
from kafkalog.storage_engine.object_store.mixed_object import Batches, MixedObjects
from kafkalog.storage_engine.writing.staged_topic import StagedTopic
from kafkalog.storage_engine.writing.staging_target import AttemptName, Staged

_FULL_SIZE: Final = 48 << 20
"""Bytes of pending runs at which an object is written, before rows of 16 MiB may overfill it."""


class StagedObjects:
    """Writes the runs of one attempt; `seen` is the number of the commit that it has seen."""

    def __init__(self, client: ObjectClient, seen: int, name: AttemptName) -> None:
        self._objects = MixedObjects(client, seen, layout.staged_file(*name, 0))

    def take_excess(self, topics: Sequence[StagedTopic]) -> None:
        """Write all pending runs, once they fill an object."""
        if sum(run.size for topic in topics for run in topic.pending.values()) >= _FULL_SIZE:
            self._write(topics)

    def take_rest(self, topics: Sequence[StagedTopic]) -> Staged:
        """Write the rest."""
        self._write(topics)
        return Staged(self._objects.files, self._objects.runs)

    def _write(self, topics: Sequence[StagedTopic]) -> None:
        runs = [
            (topic, number, run)
            for topic in topics
            for number, run in topic.pending.items()
            if run.size
        ]
        self._objects.write(
            Batches(topic.topic_id, topic.name, number, [part.data for part in run.parts])
            for topic, number, run in runs
        )
        for topic, _, run in runs:
            run.clear()
            topic.held_size = 0

    def discard(self) -> None:
        """Delete the objects of a failed attempt."""
        self._objects.discard()
