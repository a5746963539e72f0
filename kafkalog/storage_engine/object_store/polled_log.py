"""A log in an object store as of its last poll, for a driver that plans reads.

A plan asks for the state many times, and each time must be the same one. Therefore only `poll`
sends a request. The plans of a process share what they know of a log, so only the first one reads
its commits.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from kafkalog.storage_engine.object_store.commit_log import CommitLog
from kafkalog.storage_engine.object_store.object_log import ObjectLog

if TYPE_CHECKING:
    from kafkalog.storage_engine.object_store.address import StoreAddress
    from kafkalog.storage_engine.object_store.store_state import StoreState

_OPENED_MAX = 8
_opened: dict[StoreAddress, PolledLog] = {}
"""The logs that this process has opened, the last one used at the end."""
_lock = threading.Lock()


class PolledLog(ObjectLog):
    """A log that is only read, as of its last poll; a context manager that closes nothing."""

    def __init__(self, address: StoreAddress) -> None:
        """Open the log with its newest state; raises what `ObjectLog` raises."""
        super().__init__(address, read_only=True, create=False)
        self._polled = self._log.state

    @classmethod
    def shared(cls, address: StoreAddress) -> PolledLog:
        """Open the log, or poll it if this process has opened it: two GETs if nothing is new."""
        with _lock:
            known = _opened.pop(address, None)
            found = known if known is not None and known._is_there() else cls(address)
            _opened[address] = found
            while len(_opened) > _OPENED_MAX:
                del _opened[next(iter(_opened))]
        if found is known:
            found.poll()
        return found

    def _is_there(self) -> bool:
        """Return whether the log of this address is still the one that was opened."""
        return CommitLog.id_of(self.client) == self._log.log_id

    def poll(self) -> None:
        """Take the newest state; one GET when nothing has changed."""
        self._polled = self._log.poll()

    def close(self) -> None:
        """Do nothing: a later plan may read the log."""

    def store_state(self) -> StoreState:
        """Return the state as of the last poll; no request."""
        return self._polled
