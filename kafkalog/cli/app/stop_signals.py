"""The signals that end a verb which otherwise runs forever."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator


@contextlib.contextmanager
def stop_signals() -> Iterator[threading.Event]:
    """Make SIGTERM and SIGINT set an event instead of ending the process."""
    stop = threading.Event()
    kinds = (signal.SIGTERM, signal.SIGINT)
    before = {kind: signal.signal(kind, lambda *_: stop.set()) for kind in kinds}
    try:
        yield stop
    finally:
        for kind, handler in before.items():
            signal.signal(kind, handler)


@contextlib.contextmanager
def kept_interrupt() -> Iterator[threading.Event]:
    """Make SIGINT set an event besides raising KeyboardInterrupt, which Python drops in `__del__`.

    A SIGINT that the process ignores stays ignored.
    """
    came = threading.Event()
    before = signal.getsignal(signal.SIGINT)
    if before is not signal.default_int_handler:
        yield came
        return

    def interrupt(*_: object) -> None:
        came.set()
        raise KeyboardInterrupt

    signal.signal(signal.SIGINT, interrupt)
    try:
        yield came
    finally:
        signal.signal(signal.SIGINT, before)
