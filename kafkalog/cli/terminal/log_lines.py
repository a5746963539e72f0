"""Log messages of the library while a verb runs, without those that the verb prints itself."""

from __future__ import annotations

import logging
import sys
import traceback
from typing import Any, Final

from kafkalog.cli.terminal.control_characters import escaped

_ROOT: Final = "kafkalog"
_LOG: Final = "kafkalog.storage_engine.directory.directory_log"
_CLEANER: Final = "kafkalog.cleaner.schedule.partition_cleaner"
_RETENTION: Final = "kafkalog.storage_engine.directory.retention"


class LogLines(logging.Handler):
    """Prints log messages on the standard error; a context manager.

    A consequence of a fault, such as a partition that cannot be cleaned, is held back until the
    verb ends. If the verb fails, its own line names the fault. With `holds_back=False`, for a verb
    that runs until it is stopped, all messages are printed at once.
    """

    def __init__(self, *, holds_back: bool = True) -> None:
        super().__init__(logging.WARNING)
        self._holds_back = holds_back
        self._held: list[logging.LogRecord] = []
        self.is_failed = False
        """Whether the verb has reported a fault."""

    def __enter__(self) -> LogLines:
        self._level = logging.getLogger(_ROOT).level
        logging.getLogger(_ROOT).addHandler(self)
        return self

    def __exit__(self, *_: object) -> None:
        logging.getLogger(_ROOT).removeHandler(self)
        logging.getLogger(_ROOT).setLevel(self._level)
        told = [_subject(record) for record in self._held if record.name == _CLEANER]
        for record in self._held:
            is_told = record.name != _RETENTION or _subject(record) in told
            if not (self.is_failed and is_told):
                _print(record)

    def emit(self, record: logging.LogRecord) -> None:
        """Print a record or hold it back; one of an unexpected exception has its traceback."""
        is_consequence = record.name in (_LOG, _CLEANER, _RETENTION) and not record.exc_info
        if is_consequence and self._holds_back:
            self._held.append(record)
        else:
            _print(record)


def print_details() -> None:
    """Let the verb at work print messages of level INFO too."""
    logger = logging.getLogger(_ROOT)
    logger.setLevel(logging.INFO)
    for handler in logger.handlers:
        if isinstance(handler, LogLines):
            handler.setLevel(logging.INFO)


def _subject(record: logging.LogRecord) -> tuple[Any, ...]:
    """Return topic and partition of a cleaner's or a retention's record."""
    return tuple(record.args[:2]) if isinstance(record.args, tuple) else ()


def _print(record: logging.LogRecord) -> None:
    sys.stderr.write(f"kafkalog: {escaped(' '.join(record.getMessage().split()))}\n")
    if record.exc_info and record.exc_info[0] is not None:
        traceback.print_exception(*record.exc_info)
