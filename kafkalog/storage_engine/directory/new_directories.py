"""The directories of the partitions that one change of a log adds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from kafkalog.errors import InvalidInputError, StorageError
from kafkalog.storage_engine.format import layout
from kafkalog.storage_engine.fs import files
from kafkalog.storage_engine.metadata import checkpoints
from kafkalog.storage_engine.metadata.state import DeletedTopic, TopicState
from kafkalog.storage_engine.segment import partition_directory


class DeletionUnfinishedError(StorageError):
    """The directories of a deleted topic still have the names that a new topic needs.

    Moving them requires their cleaner locks, which a holder of the commit lock must not wait for.
    """

    def __init__(self, topic: str) -> None:
        super().__init__(f"topic {topic!r}: its deletion is not finished; create it again")
        self.topic = topic


class NewDirectories:
    """Directories that are made before the record that names their partitions."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._unrecorded: list[Path] = []

    def create(
        self,
        topic: str,
        topic_id: str,
        starts: Mapping[int, int],
        deleted: Iterable[DeletedTopic],
        others: Iterable[TopicState],
    ) -> None:
        """Create the directory of each partition of a topic, which begins at an offset.

        Raises DeletionUnfinishedError, or InvalidInputError, where the file system takes the
        directory of a `deleted` topic, or of one of the `others`, for it.
        """
        for gone in deleted:
            if self._is_directory_of(gone, topic, starts):
                raise DeletionUnfinishedError(gone.name)
        for other in others:
            if other.name != topic and self._is_directory_of(other, topic, starts):
                raise InvalidInputError(
                    f"topic {topic!r}: this file system does not tell upper case from lower case "
                    f"(expected a name that differs in more from {other.name!r}). Choose another "
                    "one."
                )
        for number, start in starts.items():
            directory = self._root / layout.partition_directory(topic, number)
            partition_directory.create_partition(directory, topic_id, start)
            self._unrecorded.append(directory)
        files.sync_directory(self._root)

    def _is_directory_of(
        self, known: TopicState | DeletedTopic, topic: str, numbers: Iterable[int]
    ) -> bool:
        """Tell whether the file system takes a directory of a known topic for one of `topic`."""
        if known.name.lower() != topic.lower():
            return False
        directories = (self._root / layout.partition_directory(topic, each) for each in numbers)
        return any(checkpoints.read_topic_id(each) == known.topic_id for each in directories)

    def note_recorded(self) -> None:
        """Note that the journal names them."""
        for directory in self._unrecorded:
            partition_directory.note_recorded(directory)
        self._unrecorded.clear()
