"""Opens the log of a read; only the process that opens it imports the store.

Spark imports the source in four processes of a query, and two of them only make and pickle it. The
store is half of the import time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kafkalog.storage_engine.store import Store

__all__ = ["opened_log"]


def opened_log(directories: Sequence[str]) -> Store:
    """Open a log, or a broker's directories, for reading; raises InvalidInputError."""
    from kafkalog.storage_engine.store import Store

    return Store(directories, read_only=True, create=False)
