"""What the library has logged about faults, while some of them are passed over on purpose."""

from __future__ import annotations

import logging
from types import TracebackType
from typing import Final, Self

from kafkalog.errors import KafkaLogError

__all__ = ["Complaints"]

_LOGGER: Final = logging.getLogger("kafkalog")


class Complaints(logging.Handler):
    """A context manager that hears all warnings, and writes none; `faults` are those of no type.

    A cleaner and retention go on with the next partition whatever happens to one, and log it: an
    error that is neither one of ours nor the system's is found there alone.
    """

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.faults: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Look at the exceptions that a record tells of."""
        given = record.args if isinstance(record.args, tuple) else ()
        raised = record.exc_info[1] if record.exc_info else None
        for fault in (raised, *given):
            if isinstance(fault, Exception) and not isinstance(fault, KafkaLogError | OSError):
                self.faults.append(f"logged {type(fault).__name__}: {fault}")

    def __enter__(self) -> Self:
        self._before = _LOGGER.level, _LOGGER.propagate, logging.root.manager.disable
        logging.disable(logging.NOTSET)
        _LOGGER.setLevel(logging.WARNING)
        _LOGGER.propagate = False
        _LOGGER.addHandler(self)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        fault: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        level, _LOGGER.propagate, disabled = self._before
        _LOGGER.removeHandler(self)
        _LOGGER.setLevel(level)
        logging.disable(disabled)
