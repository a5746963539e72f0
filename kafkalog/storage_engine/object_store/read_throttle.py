"""How many reads of a client may be under way at once: half of them after a 503, then slowly more.

Without a 503 reads aren't limited. A 503 halves what is under way. Reads that began before it and
fail too do not halve it again. Each read that succeeds raises the limit a little, by one read for
as many successes as the limit allows. The limit goes once it is far above what a process needs.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

UNLIMITED: Final = 64
"""At this limit there is none any more."""


class ReadThrottle:
    """Lets reads begin; threads share it."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._limit = float(UNLIMITED)
        self._under_way = 0
        self._halvings = 0

    @property
    def limit(self) -> int | None:
        """The most reads at once, or None without a limit."""
        with self._changed:
            return None if self._limit >= UNLIMITED else int(self._limit)

    @contextmanager
    def turn(self) -> Iterator[int]:
        """Wait until a read may begin; yield its turn, which `halve` takes."""
        with self._changed:
            self._changed.wait_for(self._has_room)
            self._under_way += 1
            turn = self._halvings
        try:
            yield turn
        finally:
            with self._changed:
                self._under_way -= 1
                self._changed.notify()

    def _has_room(self) -> bool:
        return self._limit >= UNLIMITED or self._under_way < int(self._limit)

    def halve(self, turn: int) -> None:
        """Halve the reads under way, for a 503; one of an earlier turn has been heeded already."""
        with self._changed:
            if turn == self._halvings:
                self._halvings += 1
                self._limit = max(1.0, min(self._limit, self._under_way) / 2)

    def raise_a_little(self) -> None:
        """Raise the limit, for a read that succeeded."""
        with self._changed:
            if self._limit < UNLIMITED:
                self._limit += 1 / self._limit
                self._changed.notify_all()
