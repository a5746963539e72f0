"""The cost of cleaning a few updated keys while the clean part of a log grows.

    python -m bench.growth [--json] [--quick] [--path DIR]

A log of records of 100 bytes is cleaned; then, in every round, 300,000 new records come for one in
a hundred of its keys, always the same ones, and it is cleaned again. Measured is the time of these
cleanings for each byte that is dirty, of a log of 300,000 keys and of one of ten times as many, in
turn; it is the peer of itself. (Kafka's cleaner reads and writes the clean part in each round, so
there the cost grows with it.) The first of these rounds is not counted: in it the hot keys leave
their places all over the log; how much more it costs is reported too. One process, which does
nothing else, cleans both. In the end each log must hold the last record of each key, and no other.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import numpy as np

import kafkalog
from bench import Claim, compare_figures, in_turn, overwritten, program, report
from bench.cleaning_process import Cleaning, CleaningProcess
from bench.overwritten import TOPIC, Int64s
from kafkalog.storage_engine.directory.directory_log import DirectoryLog

GROWTH: Final = 10
HOT: Final = 100
"""One key in so many is written again."""
BUFFER: Final = 128 << 20


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the benchmark and print its figures."""
    options = program("growth", __doc__, quick="fewer keys and rounds").parse_args(arguments)
    keys, rounds = (50_000, 3) if options.quick else (300_000, 5)
    report(measured(keys, rounds, options.path), as_json=options.json)


def measured(keys: int, rounds: int, path: Path | None) -> Claim:
    """Clean a small and a large log in turn, round by round."""
    with (
        tempfile.TemporaryDirectory(prefix="kafkalog-bench-", dir=path) as scratch,
        CleaningProcess() as process,
    ):
        small = Log(Path(scratch, "small"), keys, process)
        large = Log(Path(scratch, "large"), keys * GROWTH, process)
        for turn in range(rounds + 1):
            for log in in_turn(turn, [small, large]):
                log.round(keys)
        small.check()
        large.check()
        sizes = small.clean_bytes(), large.clean_bytes()
    return compare_figures(
        f"cleaning for each dirty byte, the clean part {GROWTH} times as large, hot 1 % of keys "
        "updated; the first round not counted",
        large.costs[1:],
        small.costs[1:],
        unit="s/GB",
        peer_name=f"the same for {keys:,} keys",
        ratio_is="of its time",
        target="<= 1.5",
        ours_mib=large.mib,
        peer_mib=small.mib,
    ).told(
        clean_MB=round(sizes[1] / 1e6),
        clean_MB_before=round(sizes[0] / 1e6),
        first_round=f"{large.costs[0] / statistics.median(large.costs[1:]):.1f} times as much",
        first_round_before=f"{small.costs[0] / statistics.median(small.costs[1:]):.1f} times",
    )


class Log:
    """A log whose clean part has so many keys, and what its cleanings took.

    `costs` are seconds for 10^9 dirty bytes, one a round; `mib` is the most memory in any.
    """

    def __init__(self, root: Path, keys: int, process: CleaningProcess) -> None:
        self.costs: list[float] = []
        self.mib = 0.0
        self._root = root
        self._process = process
        self._dice = np.random.default_rng(1)
        segment = {"segment.bytes": str(8 << 20), "file.delete.delay.ms": "0"}
        numbers = self._dice.permutation(keys)
        self._latest = np.argsort(numbers)
        self._end = overwritten.build(root, numbers, segment)
        self._clean()

    def round(self, count: int) -> None:
        """Write `count` records of the hot keys and clean."""
        numbers = self._dice.integers(0, len(self._latest) // HOT, count)
        with DirectoryLog(self._root) as engine:
            before = self.clean_bytes()
            overwritten.append(engine, numbers)
            end = overwritten.roll(engine)
            dirty = self.clean_bytes() - before
        self._remember(numbers)
        if end != self._end:
            raise SystemExit(f"the log ends at {end:,}, expected {self._end:,}")
        cleaning = self._clean()
        self.costs.append(cleaning.seconds / dirty * 1e9)
        self.mib = max(self.mib, cleaning.mib)

    def _remember(self, numbers: Int64s) -> None:
        np.maximum.at(self._latest, numbers, np.arange(self._end, self._end + len(numbers)))
        self._end += len(numbers)

    def clean_bytes(self) -> int:
        """Return the bytes of all segments."""
        return sum(path.stat().st_size for path in self._root.glob(f"{TOPIC}-0/*.log"))

    def check(self) -> None:
        """End the program unless the last record of each key is left, and no other."""
        left = [np.empty(0, dtype=np.int64)]
        with kafkalog.open(self._root, read_only=True) as log:
            for rows in log.read(TOPIC, 0):
                offsets = np.asarray(rows["offset"])
                numbers = np.array(rows["key"].to_pylist()).astype(np.int64)
                if not np.array_equal(self._latest[numbers], offsets):
                    raise SystemExit(f"older records are left from offset {offsets[0]:,} on")
                left.append(offsets)
        if not np.array_equal(np.concatenate(left), np.sort(self._latest)):
            raise SystemExit("other records than the last of each key are left")

    def _clean(self) -> Cleaning:
        now_ms = 2 * overwritten.NOW_MS
        return self._process.clean(self._root, TOPIC, buffer_size=BUFFER, now_ms=now_ms)


if __name__ == "__main__":
    main()
