"""The input of queries that are killed: files of records, added as fast as they are taken."""

from __future__ import annotations

import json
import random
import threading
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from tests.acceptance.micro_batches import MicroBatches, Row
from tests.acceptance.test_killed_query import last_batch

RECORDS_PER_FILE = 60
KEYS = 150
BACKLOG = 6
"""So many micro-batches of input files lie ready, always."""


class Feed:
    """Adds files to `root`/source for these queries until `end`, and notes their micro-batches."""

    def __init__(self, root: Path, queries: Sequence[str], files_per_batch: int, seed: int) -> None:
        self.source = root / "source"
        self.source.mkdir()
        self.random = random.Random(seed)
        self.files = 0
        self.records: Counter[Row] = Counter()
        checkpoints = {name: root / "checkpoints" / name for name in queries}
        self.batches = {n: MicroBatches(path, self.source) for n, path in checkpoints.items()}
        self._offsets = [path / "offsets" for path in checkpoints.values()]
        self._files_per_batch = files_per_batch
        self._is_full, self._stop = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Feed:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def end(self) -> None:
        """Add no more files; micro-batches are still noted."""
        self._is_full.set()

    def _run(self) -> None:
        while not self._stop.wait(0.02):
            for batches in self.batches.values():
                batches.note()
            done = min(map(last_batch, self._offsets))
            is_short = self.files < (done + BACKLOG) * self._files_per_batch
            if is_short and not self._is_full.is_set():
                self.add()

    def add(self) -> None:
        """Add one file."""
        rows = input_rows(self.random, self.files * RECORDS_PER_FILE)
        lines = [json.dumps({"key": key, "value": value}) for key, value in rows]
        hidden = self.source / f".{self.files:07d}"
        hidden.write_text("\n".join(lines))
        self.records.update(rows)
        hidden.rename(self.source / f"{self.files:07d}.json")
        self.files += 1


def input_rows(draw: random.Random, first: int) -> list[Row]:
    """Return the rows of a file, the first record being the `first` of all.

    A third of them have a key used once, so that the loss of an old record shows in a table. A
    twentieth have no value.
    """
    return [
        (
            f"key-{draw.randrange(KEYS)}" if number % 3 else f"once-{number}",
            None if draw.random() < 0.05 else f"value-{number:09d}",
        )
        for number in range(first, first + RECORDS_PER_FILE)
    ]
