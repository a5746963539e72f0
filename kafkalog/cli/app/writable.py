"""Opens a log for the verbs that write; a broker's directory is refused at once."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kafkalog.log import KafkaLog

__all__ = ["open_writable"]


def open_writable(path: str, *, create: bool = False) -> KafkaLog:
    """Open a log; raises InvalidInputError if there is none, and for a broker's directory."""
    import kafkalog
    from kafkalog.cli.app.readable import check_log
    from kafkalog.errors import InvalidInputError

    if not create:
        check_log(path)
    log = kafkalog.open(path, create=create)
    if log.read_only:
        raise InvalidInputError(
            f"{log.root}: a Kafka broker's log directory is only read; to write to it, stop "
            f"the broker and run: kafkalog adopt {log.root}"
        )
    return log
