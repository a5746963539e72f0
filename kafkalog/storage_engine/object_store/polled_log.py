"""A log in an object store as of its last poll, for a driver that plans reads.

A plan asks for the state many times, and each time must be the same one. Therefore only `poll`
sends a request.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kafkalog.storage_engine.object_store.object_log import ObjectLog

if TYPE_CHECKING:
    from kafkalog.storage_engine.object_store.address import StoreAddress
    from kafkalog.storage_engine.object_store.store_state import StoreState


class PolledLog(ObjectLog):
    """A log that is only read, as of its last poll; a context manager."""

    def __init__(self, address: StoreAddress) -> None:
        """Open the log with its newest state; raises what `ObjectLog` raises."""
        super().__init__(address, read_only=True, create=False)

    def poll(self) -> None:
        """Take the newest state; one GET when nothing has changed."""
        self._log.poll()

    def store_state(self) -> StoreState:
        """Return the state as of the last poll; no request."""
        return self._log.state
