"""Makes the n-th durable act of a piece of work fail, or the process die there.

The seam is `storage_engine.files`: everything that changes a disk goes through its functions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kafkalog.storage_engine import files

ACTS = (
    "write_at",
    "truncate",
    "preallocate",
    "sync_file",
    "sync_data",
    "sync_path",
    "sync_directory",
    "rename",
    "link",
    "remove",
    "remove_directory",
    "make_directory",
    "create",
    "write_atomically",
    "set_times",
)


class Died(BaseException):
    """The process was killed here: no handler of ours may repair anything."""


class Acts:
    """Counts durable acts, and raises `fault` instead of (or, with `after`, behind) the n-th."""

    def __init__(
        self, patch: pytest.MonkeyPatch, n: int, fault: BaseException, *, after: bool = False
    ) -> None:
        self.count = 0
        self.fired = False
        self._n, self._fault, self._after = n, fault, after
        self._depth = 0
        for name in ACTS:
            patch.setattr(files, name, self._wrapped(getattr(files, name)))

    def _wrapped(self, act: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if self.fired and isinstance(self._fault, Died):
                raise self._fault
            self.count += 1
            is_chosen = self.count == self._n
            if is_chosen and not self._after:
                self.fired = True
                raise self._fault
            result = act(*args, **kwargs)
            if is_chosen:
                self.fired = True
                raise self._fault
            return result

        return wrapper


def each_act(
    work: Callable[[], None], n: int, fault: BaseException, *, after: bool = False
) -> bool:
    """Run `work` with its n-th act failing; False when it has fewer acts."""
    with pytest.MonkeyPatch.context() as patch:
        acts = Acts(patch, n, fault, after=after)
        try:
            work()
        except (Exception, Died):
            if not acts.fired:
                raise
        return acts.fired
