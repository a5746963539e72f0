"""The appenders that this process's last commits have left, for its next one.

An appender knows its partition: the size of the log, the last index entries, the leader epochs. The
next commit need not list and read that again, unless somebody else has worked in the log since. It
opens the log of a partition, and nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from kafkalog.storage_engine.directory.appender import Appender
from kafkalog.storage_engine.metadata.state import State

Key = tuple[str, int]
_KEPT_MAX: Final = 2_000
"""Partitions to know at once; each takes some kilobytes."""


class KeptAppenders:
    """Closed appenders by topic and partition; the holder of the commit lock uses them."""

    def __init__(self) -> None:
        self._state: State | None = None
        """The state that the last commit of this process recorded."""
        self._appenders: dict[Key, Appender] = {}

    def clear(self) -> None:
        """Forget all: somebody else may have worked in the log."""
        self._appenders.clear()

    def check(self, state: State) -> None:
        """Forget all unless the last record of the journal, which led to `state`, is ours."""
        if state is not self._state:
            self.clear()

    def take(self, key: Key) -> Appender | None:
        """Return the appender of a partition, and forget it; None if it is not known."""
        return self._appenders.pop(key, None)

    def keep(self, appenders: Mapping[Key, Appender], state: State) -> None:
        """Keep what a commit has closed, and the state that it recorded."""
        self._state = state
        self._appenders.update(appenders)
        while len(self._appenders) > _KEPT_MAX:
            del self._appenders[next(iter(self._appenders))]
