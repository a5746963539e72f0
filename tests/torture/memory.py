"""What this process remembers of logs, and how it becomes like one that has just begun.

That is whatever a module has under a small name, and can clear. What follows from bytes alone
(`functools.cache`) stays, and so do locks, which nobody holds.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any, Final

from kafkalog.storage_engine.fs import locks

__all__ = ["elsewhere", "forget", "remembers"]

_ROOMS: Final = ("kafkalog.storage_engine.", "kafkalog.cleaner.")


def forget() -> None:
    """Forget all directories: another state is at their paths now."""
    for memory in _memories():
        memory.clear()


def remembers() -> bool:
    """Tell whether there is anything to `forget`."""
    return any(len(memory) for memory in _memories())


@contextlib.contextmanager
def elsewhere() -> Iterator[None]:
    """Be another process meanwhile, that knows nothing; what this one knew comes back."""
    known = [(memory, _content(memory)) for memory in _memories()]
    forget()
    try:
        yield
    finally:
        for memory, content in known:
            memory.clear()
            (memory if isinstance(memory, dict | set) else vars(memory)).update(content)


def _content(memory: Any) -> Any:
    return memory.copy() if isinstance(memory, dict | set) else vars(memory).copy()


def _memories() -> list[Any]:
    return [getattr(module, name) for module, name in _places(len(sys.modules))]


@functools.cache
def _places(_modules: int) -> tuple[tuple[ModuleType, str], ...]:
    return tuple(
        (module, name)
        for path, module in sorted(sys.modules.items())
        if path.startswith(_ROOMS) and module is not locks
        for name, value in vars(module).items()
        if name.islower() and not name.startswith("__")
        if hasattr(value, "clear") and not isinstance(value, type)
    )
