"""Opens a log for the verbs that write; a broker's directory is refused at once."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kafkalog.storage_engine.engine import Engine

__all__ = ["open_writable"]


def open_writable(path: str, *, create: bool = False) -> Engine:
    """Open a log; raises InvalidInputError if nothing is there, and for a broker's directory."""
    from kafkalog.cli.app.readable import check_log
    from kafkalog.errors import InvalidInputError
    from kafkalog.storage_engine.engine import Engine

    if not create:
        check_log(path)
    log = Engine(path, create=create)
    if log.read_only:
        raise InvalidInputError(
            f"{log.root}: a Kafka broker's log directory is only read; to write to it, stop "
            f"the broker and run: kafkalog adopt {log.root}"
        )
    return log
