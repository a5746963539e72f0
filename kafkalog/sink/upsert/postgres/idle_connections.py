"""Connections that wait for their next use.

A new one costs the server a process and a login, more than a small micro-batch does.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Generic, Protocol, TypeVar


class _Connection(Protocol):
    def execute(self, statement: Any, /) -> object: ...
    def close(self) -> None: ...


C = TypeVar("C", bound=_Connection)


class IdleConnections(Generic[C]):
    """Connections to one server, in autocommit; each is used by one thread at a time.

    A pickled copy starts empty. A forked process gets none of its parent's, because both would read
    the server's answers. They are closed with this object.
    """

    def __init__(self, connect: Callable[[str], C], conninfo: str) -> None:
        self._connect = connect
        self._conninfo = conninfo
        self._idle: dict[int, list[C]] = {}
        weakref.finalize(self, _close, self._idle)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle what makes connections."""
        return IdleConnections, (self._connect, self._conninfo)

    @contextmanager
    def borrow(self) -> Iterator[C]:
        """Yield a connection that answers; after an exception close it, since it may be broken."""
        connection = self._answering() or self._connect(self._conninfo)
        try:
            yield connection
        except BaseException:
            connection.close()
            raise
        self._idle.setdefault(os.getpid(), []).append(connection)

    def _answering(self) -> C | None:
        idle = self._idle.get(os.getpid(), [])
        while idle:
            connection = idle.pop()
            try:
                connection.execute("SELECT 1")
            except Exception:  # whatever it is, a new connection shows whether it lasts
                connection.close()
            else:
                return connection
        return None


def _close(idle: dict[int, list[Any]]) -> None:
    for connection in idle.pop(os.getpid(), []):
        connection.close()
