"""A process that changes all of a table at once, again and again, and cleans it.

    python -m tests.acceptance.moment_writer ROOT PERIOD_S [FORCED_S]

Commit n gives each of the topic's keys, in all of its partitions, the value n. Every FORCED_S a
cleaning is forced, which waits for no lease. It ends when its standard input does, and prints how
many commits there were and how often something was cleaned.
"""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path

import pyarrow as pa

from kafkalog.cleaner.schedule.manager import clean
from kafkalog.storage_engine.directory.directory_log import DirectoryLog
from kafkalog.storage_engine.fs import clock

TOPIC = "table"
PARTITIONS = 4
KEYS_PER_PARTITION = 5
CONFIG = {"segment.bytes": "4000", "min.cleanable.dirty.ratio": "0"}


def rows(version: int) -> pa.Table:
    numbers = [n for n in range(PARTITIONS) for _ in range(KEYS_PER_PARTITION)]
    keys = [f"k{place}".encode() for place in range(len(numbers))]
    return pa.table(
        {
            "key": pa.array(keys, pa.binary()),
            "value": pa.array([str(version).encode()] * len(keys), pa.binary()),
            "partition": pa.array(numbers, pa.int32()),
        }
    )


def main(root: Path, period_s: float, forced_s: float | None = None) -> None:
    is_over = threading.Event()
    cleanings = [0]

    def keep_clean() -> None:
        engine = DirectoryLog(root)
        while not is_over.wait(0.5):
            cleanings[0] += len(clean(engine, TOPIC, now_ms=clock.now_ms()))

    def force() -> None:
        engine = DirectoryLog(root)
        while not is_over.wait(forced_s):
            cleanings[0] += len(clean(engine, TOPIC, force=True, now_ms=clock.now_ms()))

    def wait_for_the_end() -> None:
        sys.stdin.read()
        is_over.set()

    for work in (keep_clean, wait_for_the_end, *([] if forced_s is None else [force])):
        threading.Thread(target=work, daemon=True).start()
    engine = DirectoryLog(root)
    version = 0
    due = time.monotonic()
    while not is_over.is_set():
        version += 1
        engine.append(TOPIC, rows(version))
        due = max(due + period_s, time.monotonic())
        is_over.wait(due - time.monotonic())
    print(version, cleanings[0], flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(float, sys.argv[2:]))
