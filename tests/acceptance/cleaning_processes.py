"""The processes of a log that is written and cleaned at once, and the changes that are written.

`python -m tests.acceptance.cleaning_processes append LOG SEED` goes on until its input ends, and
`python -m tests.acceptance.cleaning_processes clean LOG SECONDS` for a time. Commit number n of a
seed is always the same, and so is the offset of each of its records: who knows the seed knows what
every offset must hold.
"""

from __future__ import annotations

import json
import random
import select
import sys
import time
from pathlib import Path

import kafkalog
from kafkalog.cleaner import CleanerConfig

TOPIC = "cleaned"
KEYS = 250
COMMIT_RECORDS = 25
TOMBSTONES = 0.15

Record = tuple[bytes, bytes | None]


def draw_commit(seed: int, number: int) -> list[Record]:
    """Return the records of one commit; values are unique."""
    draw = random.Random(f"{seed} {number}")
    records: list[Record] = []
    for n in range(COMMIT_RECORDS):
        value = b"%d-%d " % (number, n) * draw.randrange(1, 12)
        key = b"key-%d" % draw.randrange(KEYS)
        records.append((key, None if draw.random() < TOMBSTONES else value))
    return records


def append(path: Path, seed: int) -> None:
    """Append commits 0, 1, ... until the input ends, and print how many."""
    number = 0
    with kafkalog.open(path) as log:
        while not select.select([sys.stdin], [], [], 0.002)[0]:
            log.append(TOPIC, draw_commit(seed, number))
            number += 1
    print(number)


def clean(path: Path, seconds: float) -> None:
    """Run the cleaner's thread, and print what it counted."""
    with kafkalog.open(path, cleaner=CleanerConfig(backoff_ms=2)) as log:
        thread = log.cleaner
        assert thread is not None
        time.sleep(seconds)
        counts = {"cleanings": thread.cleanings, "failures": thread.failures}
    print(json.dumps(counts))


if __name__ == "__main__":
    role, log_path, argument = sys.argv[1:]
    if role == "append":
        append(Path(log_path), int(argument))
    else:
        clean(Path(log_path), float(argument))
