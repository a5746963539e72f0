"""A log in an object store as of its last poll, for a driver that plans reads.

A plan asks for the state many times, and each time must be the same one. Therefore only `poll` sends
a request.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from kafkalog.storage_engine.log.log_store import LogStore
from kafkalog.storage_engine.object_store.object_snapshot import open_snapshot

if TYPE_CHECKING:
    from kafkalog.storage_engine.metadata.state import State, TopicState
    from kafkalog.storage_engine.object_store.object_log import ObjectLog
    from kafkalog.storage_engine.object_store.object_snapshot import ObjectSnapshot
    from kafkalog.storage_engine.object_store.store_state import StoreState


class PolledLog(LogStore):
    """A log that is only read, as of its last poll; a context manager."""

    read_only = True
    is_brokers = False

    def __init__(self, log: ObjectLog) -> None:
        """Poll the log, which is closed with this one."""
        self._log = log
        self.root = log.root
        self.store_state: StoreState = log.store_state()
        """The state with the objects, as of the last poll."""

    def poll(self) -> None:
        """Take the newest state; one GET when nothing has changed."""
        self.store_state = self._log.store_state()

    def state(self) -> State:
        """Return the state as of the last poll; no request."""
        return self.store_state.log

    def snapshot(
        self,
        topic: str,
        partition: int,
        *,
        whole: bool = False,
        start: int | None = None,
        known_end: int = 0,
        check: Callable[[TopicState], None] = lambda topic: None,
    ) -> ObjectSnapshot:
        """Open a partition as of the last poll; only `check` has an effect here."""
        return open_snapshot(self._log.client, self.store_state, topic, partition, check=check)

    def leader_epoch_at(self, topic: str, partition: int, offset: int) -> int:
        """Return the leader epoch of the partition, which never changes; -1 before a record."""
        known = self.describe(topic).partitions[partition]
        return known.leader_epoch if known.high_watermark else -1

    def check_writable(self) -> None:
        """Raise InvalidInputError: the log was opened to read."""
        self._log.check_writable()

    def close(self) -> None:
        """Close the log."""
        self._log.close()
