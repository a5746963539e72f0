"""A client whose k-th request is spoiled, or before or after which its process dies."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any

from kafkalog.errors import StorageError
from kafkalog.storage_engine.object_store.address import StoreAddress
from kafkalog.storage_engine.object_store.client import GET, PUT, ObjectClient
from kafkalog.storage_engine.object_store.failure import ObjectMissingError, RefusedError


class Killed(BaseException):
    """The process is dead: nothing of ours catches this."""


class Spoil(Enum):
    """What becomes of a request. A request that is done after its answer is `LANDS_LATE`."""

    KILLED_BEFORE = "killed before"
    KILLED_AFTER = "killed after"
    FAILED = "failed"
    ANSWER_LOST = "the answer is lost"
    LANDS_LATE = "lands late"
    REFUSED = "412 or 409"
    STALE_404 = "404"


class SpoiledClient(ObjectClient):
    """Spoils the requests whose numbers, counted from `spoil` on, are in its plan."""

    def __init__(self, address: StoreAddress) -> None:
        super().__init__(address)
        self._plan: Mapping[int, Spoil] = {}
        self._number = 0
        self.is_spoiled = False
        self.late: Callable[[], Any] = lambda: None
        """Does what LANDS_LATE held back."""

    def spoil(self, plan: Mapping[int, Spoil]) -> None:
        """Count requests from here; the first one is 1."""
        self._plan, self._number = plan, 0

    def _ask(self, kind: str, name: str, act: Callable[[], Any], *, requests: int = 1) -> Any:
        self._number += 1
        spoil = self._plan.get(self._number)
        if spoil is None:
            return super()._ask(kind, name, act, requests=requests)
        self.is_spoiled = True
        if spoil is Spoil.KILLED_BEFORE:
            raise Killed
        if spoil is Spoil.REFUSED and kind == PUT:
            raise RefusedError(f"{name}: refused")
        if spoil is Spoil.STALE_404 and kind == GET:
            raise ObjectMissingError(f"{name}: missing")
        if spoil is Spoil.LANDS_LATE and kind == PUT:

            def late() -> None:
                with contextlib.suppress(StorageError):
                    super(SpoiledClient, self)._ask(kind, name, act)

            self.late = late
        if spoil in {Spoil.KILLED_AFTER, Spoil.ANSWER_LOST}:
            super()._ask(kind, name, act, requests=requests)
        if spoil is Spoil.KILLED_AFTER:
            raise Killed
        raise StorageError(f"{name}: spoiled")
