"""The guard against a client in a forked child, where it would wait for ever.

obstore runs threads, and a fork copies none of them. A process that forks before it uses a client
is free to use one in the child. PySpark's workers do so: they import this after the fork.
"""

from __future__ import annotations

import os

from kafkalog.errors import StorageError


class _Process:
    """This process, and whether it has obstore's threads."""

    def __init__(self) -> None:
        self.has_used = False
        self.is_child_of_user = False

    def after_fork(self) -> None:
        """Note in a child that its parent had threads which the child lacks."""
        self.is_child_of_user = self.is_child_of_user or self.has_used


process = _Process()
os.register_at_fork(after_in_child=process.after_fork)


def check_and_note_use(place: str) -> None:
    """Raise StorageError in a child whose parent used a client; otherwise note the use."""
    if process.is_child_of_user:
        raise StorageError(
            f"{place}: this process was forked from one that uses an object store, whose threads "
            "a fork does not copy. Start it with the method 'spawn', or fork before the first use."
        )
    process.has_used = True
