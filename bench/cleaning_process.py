"""A process that does nothing but clean logs: what its memory is, is what cleaning takes.

    python -m bench.cleaning_process

Each line on the standard input is a JSON object, what to clean; each is answered by one of JSON.
The process goes on, so its kernels are as warm in later rounds as the peer's JVM.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from bench.answering_process import AnsweringProcess
from bench.memory import peak_mib, reset_peak

__all__ = ["Cleaning", "CleaningProcess"]


@dataclass(frozen=True, slots=True)
class Cleaning:
    """The costs of a cleaning."""

    seconds: float
    """Around the call alone: the log was open."""
    cpu_seconds: float
    mib: float
    """The most that the process had resident meanwhile."""
    idle_mib: float
    """What it had resident before."""
    rounds: int
    bytes_read: int


class CleaningProcess(AnsweringProcess):
    """The process, as its parent sees it."""

    def __init__(self) -> None:
        super().__init__(__name__)

    def clean(
        self,
        root: Path | str,
        topic: str,
        *,
        buffer_size: int,
        now_ms: int,
        options: dict[str, str] | None = None,
    ) -> Cleaning:
        """Clean all that is dirty of a topic of the log at `root`, which nobody has open.

        With `options`, those of an object store, it is a URL.
        """
        asked = {"root": str(root), "topic": topic, "buffer_size": buffer_size, "now_ms": now_ms}
        asked["options"] = options
        return Cleaning(**self.ask(json.dumps(asked)))


def cleaned(
    root: str, topic: str, buffer_size: int, now_ms: int, options: dict[str, str] | None
) -> Cleaning:
    """Clean in this process."""
    from kafkalog.cleaner import CleanerConfig
    from kafkalog.cleaner.schedule import manager
    from kafkalog.storage_engine.directory.directory_log import DirectoryLog
    from kafkalog.storage_engine.object_store.object_log import ObjectLog

    config = CleanerConfig(dedupe_buffer_size=buffer_size)
    with DirectoryLog(Path(root)) if options is None else ObjectLog(root, options=options) as log:
        idle_mib = peak_after_reset()
        spent, started = time.process_time(), time.perf_counter()
        (stats,) = manager.clean(log, topic, force=True, now_ms=now_ms, config=config)
        seconds, spent = time.perf_counter() - started, time.process_time() - spent
        mib = peak_mib()
    if stats.error is not None:
        raise SystemExit(stats.error)
    return Cleaning(seconds, spent, mib, idle_mib, stats.rounds, stats.bytes_read)


def peak_after_reset() -> float:
    """Let the peak of memory count from now on; return what is resident (MiB)."""
    reset_peak()
    return peak_mib()


def main() -> None:
    """Clean as long as anything is asked."""
    for line in sys.stdin:
        print(json.dumps(asdict(cleaned(**json.loads(line)))), flush=True)


if __name__ == "__main__":
    main()
