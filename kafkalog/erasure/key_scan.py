"""A scan of all that holds a topic's records, in rounds, while other processes write and clean.

`topic_scan` scans the files of a directory, and `store_scan` the objects of a store.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final, Generic, TypeVar

from kafkalog.errors import StorageError

if TYPE_CHECKING:
    from kafkalog.cleaner.rewrite.erased_keys import ErasedKeys
    from kafkalog.erasure.file_occurrences import FileOccurrences
    from kafkalog.storage_engine.log.log import Log
    from kafkalog.storage_engine.metadata.state import State

_Place = TypeVar("_Place")
_Found = TypeVar("_Found")
_ROUNDS: Final = 100
_FREE_ROUNDS: Final = 8


class KeyScan(ABC, Generic[_Place, _Found]):
    """Scan everything; occurrences within `names` do not count.

    `progress` receives the bytes done, and of how many. Afterwards `state` is the state that the
    result holds for, and `files` are the results by path, or by name in a store.
    """

    def __init__(
        self,
        log: Log,
        topic: str,
        keys: ErasedKeys,
        names: Sequence[bytes],
        progress: Callable[[int, int], None],
    ) -> None:
        self.state: State = log.state()
        self.files: tuple[FileOccurrences, ...] = ()
        self._log = log
        self._topic, self._keys, self._names = topic, keys, names
        self._progress = progress
        self._done = self._of = 0
        self._seen: dict[_Place, _Found] = {}
        """What was found in each place so far."""

    def run(self) -> None:
        """Scan until the result is stable; raises UnknownTopicError, OSError, StorageError."""
        for number in range(_ROUNDS):
            if self._round(is_pressed=number >= _FREE_ROUNDS):
                return
        raise StorageError(
            f"{self._log.root}: what was to be scanned was replaced in each of {_ROUNDS} scans. "
            "Stop the cleaners, and try again."
        )

    @abstractmethod
    def _round(self, *, is_pressed: bool) -> bool:
        """Scan what is new or has changed; return whether the result is stable.

        `is_pressed` says that writers have not paused for long.
        """

    def _advance(self, count: int) -> None:
        self._done += count
        self._progress(self._done, self._of)
