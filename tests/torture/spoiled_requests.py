"""The requests of one process to an object store, of which one is spoiled.

A request is spoiled between our client and obstore: what obstore raises for an answer is raised
here, so the client's own repetitions and its words for errors take part. A process that is killed
sends nothing more, from none of its threads. A process that is stopped goes on later.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from enum import StrEnum
from types import MappingProxyType
from typing import Any, Final, NoReturn
from unittest import mock

import obstore
from obstore import exceptions

from kafkalog.storage_engine.object_store import (
    client,
    collector,
    commit_log,
    object_log,
    regroup,
    store_state,
)
from kafkalog.storage_engine.object_store.address import StoreAddress
from kafkalog.storage_engine.object_store.client import (
    DELETE,
    GET,
    HEAD,
    LIST,
    PUT,
    ObjectClient,
)
from kafkalog.storage_engine.object_store.commit_log import CommitLog

__all__ = ["FAULTS", "Fault", "Killed", "Requests", "process", "short_patience"]

PATIENCE_S: Final = 0.02
"""How long a request is repeated, and how long a commit looks for what became of it."""
SNAPSHOT_COMMITS: Final = 4
"""After so many commits there is a snapshot, so that a collector has work."""


class Killed(BaseException):
    """The process is dead: nothing of ours catches this."""


class Fault(StrEnum):
    """What becomes of a request."""

    KILLED_BEFORE = "killed-before"
    KILLED_AFTER = "killed-after"
    REFUSED_412 = "412"
    REFUSED_409 = "409"
    OVERLOADED = "503"
    DONE_BUT_500 = "500-done"
    REQUEST_LOST = "lost"
    ANSWER_LOST = "answer-lost"
    CUT_BODY = "cut"
    """The answer ends in the middle; of a request that writes, the request does."""
    LATE = "late"
    """No answer comes in time; a request that writes is done later."""
    STALE_404 = "404"
    DOWN = "down"
    """The store answers this request, and all later ones of the operation, with 503."""
    STOPPED = "stopped"
    """The process is stopped before the request, while another one works."""


_READS: Final = (
    *(Fault.KILLED_BEFORE, Fault.KILLED_AFTER, Fault.REFUSED_412, Fault.REFUSED_409),
    *(Fault.OVERLOADED, Fault.REQUEST_LOST, Fault.CUT_BODY, Fault.DOWN),
)
_WRITES: Final = (*_READS, Fault.DONE_BUT_500, Fault.ANSWER_LOST, Fault.LATE)
FAULTS: Final = MappingProxyType(
    {
        PUT: _WRITES,
        DELETE: _WRITES,
        GET: (*_READS, Fault.STALE_404),
        HEAD: (*_READS, Fault.STALE_404),
        LIST: _READS,
    }
)
"""The faults of each kind of request; an answer that is lost and a late one are alike for a read.

`STOPPED` needs another process, so it is not among them.
"""
_STATUS: Final = MappingProxyType(
    {
        Fault.REFUSED_412: "412 Precondition Failed: <Code>PreconditionFailed</Code>",
        Fault.REFUSED_409: "409 Conflict: <Code>ConditionalRequestConflict</Code>",
        Fault.OVERLOADED: "503 Service Unavailable: <Code>SlowDown</Code>",
        Fault.DOWN: "503 Service Unavailable: <Code>SlowDown</Code>",
        Fault.DONE_BUT_500: "500 Internal Server Error: <Code>InternalError</Code>",
    }
)
_REFUSALS: Final = MappingProxyType(
    {
        Fault.REFUSED_412: exceptions.PreconditionError,
        Fault.REFUSED_409: exceptions.AlreadyExistsError,
    }
)


class Requests:
    """What one process sends while it is armed, and the fault of its n-th request."""

    def __init__(
        self,
        n: int = 0,
        fault: Fault | None = None,
        meanwhile: Callable[[], None] = lambda: None,
    ) -> None:
        """`meanwhile` is what another process does before the n-th request of a stopped one."""
        self.kinds: list[str] = []
        """The kinds of the requests, in their order."""
        self.spoiled = ""
        """The request that was spoiled; empty while none was."""
        self.is_armed = False
        self._n = n
        self._fault = fault
        self._meanwhile = meanwhile
        self._is_dead = False
        self._late: list[Callable[[], Any]] = []
        self._lock = threading.Lock()

    def land_late(self) -> None:
        """Let the store do what is under way."""
        late, self._late = self._late, []
        for act in late:
            with contextlib.suppress(exceptions.BaseError, OSError):
                act()

    def send(
        self,
        kind: str,
        name: str,
        act: Callable[[], Any],
        cut: Callable[[Any], Any] | None = None,
    ) -> Any:
        """Send a request, or do what the fault makes of it; `cut` cuts the body of an answer."""
        if self._is_dead:
            raise Killed
        if not self.is_armed:
            return act()
        with self._lock:
            self.kinds.append(kind)
            number = len(self.kinds)
            is_spoiled = number == self._n or (number > self._n and self._fault is Fault.DOWN)
            if number == self._n:
                self.spoiled = f"{kind} {name}"
        if self._fault is None or not is_spoiled:
            return act()
        if self._fault is Fault.STOPPED:
            self.is_armed = False
            self._meanwhile()
            self.is_armed = True
            return act()
        if self._fault is Fault.CUT_BODY and cut is not None:
            return cut(act())
        return self._spoil(self._fault, kind, name, act)

    def _spoil(self, fault: Fault, kind: str, name: str, act: Callable[[], Any]) -> Any:
        """Do what the fault leaves of a request, and raise what comes of it."""
        if fault in (Fault.KILLED_AFTER, Fault.DONE_BUT_500, Fault.ANSWER_LOST):
            act()
        if fault in (Fault.KILLED_BEFORE, Fault.KILLED_AFTER):
            self._is_dead = True
            raise Killed
        if fault is Fault.STALE_404:
            raise FileNotFoundError(f"Object at location {name} not found")
        if fault is Fault.CUT_BODY:
            raise _broken()
        if fault is Fault.LATE and kind in (PUT, DELETE):
            self._late.append(act)
        is_refused = kind == PUT and fault in _REFUSALS
        made = _REFUSALS[fault] if is_refused else exceptions.GenericError
        answer = f"status code: {_STATUS[fault]}" if fault in _STATUS else "TimedOut"
        raise made(f"Error performing {kind} {name} - {answer}")


class _Cut:
    """An answer of which half of the body comes."""

    def __init__(self, answer: Any) -> None:
        self._answer = answer
        self.meta = answer.meta

    def stream(self, min_chunk_size: int) -> Iterator[bytes]:
        data = bytes(self._answer.bytes())
        yield data[: len(data) // 2]
        raise _broken()

    def bytes(self) -> NoReturn:
        raise _broken()


def _broken() -> Exception:
    return exceptions.GenericError("error reading a body from connection: end of file")


class _Spoiled:
    """The functions of obstore that our client calls; what they send goes by `Requests`."""

    exceptions = exceptions

    def __init__(self, requests: Requests) -> None:
        self._requests = requests

    def put(self, store: Any, key: str, data: Any, **given: Any) -> Any:
        return self._send(PUT, key, lambda: obstore.put(store, key, data, **given))

    def delete(self, store: Any, keys: list[str]) -> Any:
        return self._send(DELETE, str(len(keys)), lambda: obstore.delete(store, keys))

    def get(self, store: Any, key: str) -> Any:
        return self._send(GET, key, lambda: obstore.get(store, key), _Cut)

    def get_range(self, store: Any, key: str, **given: Any) -> Any:
        return self._send(GET, key, lambda: obstore.get_range(store, key, **given))

    def get_ranges(self, store: Any, key: str, **given: Any) -> Any:
        return self._send(GET, key, lambda: obstore.get_ranges(store, key, **given))

    def head(self, store: Any, key: str) -> Any:
        return self._send(HEAD, key, lambda: obstore.head(store, key))

    def list(self, store: Any, prefix: str, **given: Any) -> Any:
        """Return the pages, of which the client takes the first: one request."""
        return self._send(LIST, prefix, lambda: [*obstore.list(store, prefix, **given)][:1])

    def _send(self, *given: Any) -> Any:
        return self._requests.send(*given)


_current = Requests()


class _Client(ObjectClient):
    """A client of the process whose requests are the current ones; its store is sound."""

    def __init__(self, address: StoreAddress) -> None:
        super().__init__(address, patience_s=PATIENCE_S)
        self._obstore = _Spoiled(_current)

    def probe(self, name: str, **_: int) -> None:
        """Race two creators for one object, where a new log has 8 race for 32."""
        super().probe(name, creators=2, names=1, rounds=1)


class _Log(CommitLog):
    """A commit log that soon gives up on a store that does not answer."""

    def __init__(self, client: ObjectClient) -> None:
        super().__init__(client, patience_s=PATIENCE_S)

    @classmethod
    def create(cls, client: ObjectClient, *, patience_s: float = PATIENCE_S) -> bool:
        return super().create(client, patience_s=patience_s)


@contextlib.contextmanager
def process(requests: Requests) -> Iterator[None]:
    """Let the logs that are opened in the block be of the process that sends these requests."""
    global _current
    before, _current = _current, requests
    try:
        yield
    finally:
        _current = before


@contextlib.contextmanager
def short_patience() -> Iterator[None]:
    """Let logs be opened with clients of this module, and send one request at a time.

    So the n-th request is the same one each time.
    """
    changed = (
        (object_log, "ObjectClient", _Client),
        (object_log, "CommitLog", _Log),
        (client, "_FIRST_PAUSE_S", 0.0005),
        (commit_log, "_FIRST_PAUSE_S", 0.0005),
        (commit_log, "_FETCHERS", 1),
        (regroup, "REQUESTS", 1),
        (store_state, "SNAPSHOT_COMMITS", SNAPSHOT_COMMITS),
        (collector, "SNAPSHOT_COMMITS", SNAPSHOT_COMMITS),
    )
    with contextlib.ExitStack() as stack:
        for module, name, value in changed:
            stack.enter_context(mock.patch.object(module, name, value))
        yield
