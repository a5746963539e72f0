"""The staged files of a task attempt in a log directory.

A task has **one** staged file in the root, with a run per log partition. A run that is large enough
to become a segment gets its own file in its partition's directory, with its indexes. The task syncs
that file, since the commit renames it. The commit syncs what it copies.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from kafkalog.storage_engine.directory.staged_file_writer import StagedFileWriter
from kafkalog.storage_engine.format import layout
from kafkalog.storage_engine.writing.pending_run import PendingRun
from kafkalog.storage_engine.writing.staged_message import Run
from kafkalog.storage_engine.writing.staged_topic import StagedTopic
from kafkalog.storage_engine.writing.staging_target import AttemptName, Staged

_WRITE_SIZE = 1 << 20
"""Bytes of runs to write at once; a task may have a few for each of many partitions."""
_PENDING_SIZE = 128 << 20
"""Memory of a task's unwritten batches."""
SEGMENT_RUN_SIZE = 64 << 20
"""A run of this size becomes a segment, if `segment.bytes` allows it."""


class StagedDirectory:
    """Stages the runs of one attempt below a root."""

    def __init__(self, root: Path, name: AttemptName) -> None:
        self._root = root
        self._name = name
        self._shared: StagedFileWriter | None = None
        self._large: dict[tuple[str, int], StagedFileWriter] = {}
        self._files: list[StagedFileWriter] = []
        self._runs: list[Run] = []

    def take_excess(self, topics: Sequence[StagedTopic]) -> None:
        """Write runs that will become segments, and all runs if they take too much memory."""
        for topic in topics:
            for partition, run in topic.pending.items():
                is_open = (topic.name, partition) in self._large
                if is_open or (
                    run.size >= SEGMENT_RUN_SIZE
                    and topic.config.segment_bytes >= SEGMENT_RUN_SIZE
                    and topic.topic_id
                ):
                    self._spill_large(topic, partition)
        if sum(topic.held_size for topic in topics) > _PENDING_SIZE:
            for topic in topics:
                self._spill(topic)
                topic.held_size = 0

    def take_rest(self, topics: Sequence[StagedTopic]) -> Staged:
        """Write the rest, and sync what the commit will rename."""
        for topic in topics:
            self._spill(topic)
        return Staged([writer.finish() for writer in self._files], self._runs)

    def discard(self) -> None:
        """Remove the staged files."""
        for writer in self._files:
            writer.discard()

    def _spill(self, topic: StagedTopic) -> None:
        name, pending = topic.name, topic.pending
        small: list[tuple[int, PendingRun]] = []
        for partition in sorted(pending):
            run = pending[partition]
            if (name, partition) in self._large:
                self._spill_large(topic, partition)
            elif run.size:
                small.append((partition, run))
        if not small:
            return
        if self._shared is None:
            self._shared = self._open(layout.staged_file(*self._name, 0))
        number = self._files.index(self._shared)
        parts: list[memoryview] = []
        position = self._shared.size
        for partition, run in small:
            self._runs.append(Run(name, partition, number, position, run.size, run.rows))
            position += run.size
            parts += [part.data for part in run.parts]
            run.clear()
            if position - self._shared.size >= _WRITE_SIZE:
                self._shared.append(parts)
                parts = []
        self._shared.append(parts)

    def _spill_large(self, topic: StagedTopic, partition: int) -> None:
        """Move a pending run to a file that becomes a segment, or to several."""
        name = topic.name
        run = topic.pending[partition]
        run.is_segment = True
        for part in run.parts:
            position = 0
            while position < len(part.positions):
                writer = self._large.get((name, partition)) or self._open_large(topic, partition)
                position, rows = writer.append_batches(part, position)
                number = self._files.index(writer)
                index = next(i for i, known in enumerate(self._runs) if known.file == number)
                rows += self._runs[index].rows
                self._runs[index] = Run(
                    name, partition, number, 0, writer.size, rows, is_segment=True
                )
                if position < len(part.positions):
                    del self._large[name, partition]
        run.clear()

    def _open_large(self, topic: StagedTopic, partition: int) -> StagedFileWriter:
        name = topic.name
        file = layout.staged_file(*self._name, len(self._files) + 1)
        directory = layout.partition_directory(name, partition)
        writer = self._large[name, partition] = self._open(f"{directory}/{file}")
        writer.begin_segment(topic.config)
        self._runs.append(Run(name, partition, len(self._files) - 1, 0, 0, 0, is_segment=True))
        return writer

    def _open(self, name: str) -> StagedFileWriter:
        writer = StagedFileWriter(self._root, name)
        self._files.append(writer)
        return writer
