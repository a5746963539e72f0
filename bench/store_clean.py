"""How fast a log in an object store is cleaned, and how much memory it takes.

    python -m bench.store_clean [--json] [--quick] [--path DIR] [--rounds N] [--keys N]

Records of 100 bytes whose keys are overwritten (bench/overwritten.py), in a log in an object store
(versitygw on the loopback, on the same disk), and the same in a log directory, the peer. Segments
have 64 MiB on both sides. A process for each side does nothing but clean, with a buffer of 128 MiB,
and takes its turn on a copy of the log. The store's log is regrouped before: a directory has
segments from the start. How long that took is told. What is left must be the same, record by
record: offset, key and value. A client that only downloads into files what a cleaning reads, and
uploads what it writes, has a CPU time too, which is told: no cleaning in a store can do without.

With --keys, that many distinct keys are cleaned once in a buffer of 16 MiB, next to the limit of
bench/dedup.py. The memory is that of the cleaning process, without the server's.
"""

from __future__ import annotations

import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import numpy as np

from bench import LESS, compare_figures, in_turn, leave_out, overwritten, program, report
from bench.cleaning_process import Cleaning, CleaningProcess
from bench.overwritten import TOPIC, Int64s
from bench.stored import BUCKET, StoreServer, fault, make_secret, options_at, url_of
from kafkalog.cleaner.objects import upkeep
from kafkalog.storage_engine.directory.directory_log import DirectoryLog
from kafkalog.storage_engine.fs import files
from kafkalog.storage_engine.log.log import Log
from kafkalog.storage_engine.object_store.object_log import ObjectLog

MIB: Final = 1 << 20
BUFFER: Final = 128 * MIB
SMALL_BUFFER: Final = 16 * MIB
ALLOWANCE_MIB: Final = 32
CONFIG: Final = {
    "cleanup.policy": "compact",
    "compression.type": "producer",
    "segment.bytes": str(64 * MIB),
    "file.delete.delay.ms": "1000",
}
NOW_MS: Final = 2 * overwritten.NOW_MS


@dataclass
class Side:
    """A log of either kind, of which copies are cleaned by a process."""

    process: CleaningProcess
    options: dict[str, str] | None
    bucket: Path
    """The directory that has the logs, by name."""
    found: list[Cleaning] = field(default_factory=list)

    def place(self, name: str) -> str:
        """Return the path or URL of a log."""
        return str(self.bucket / name) if self.options is None else url_of(name)

    def opened(self, name: str) -> Log:
        """Open a log."""
        if self.options is None:
            return DirectoryLog(self.bucket / name)
        return ObjectLog(self.place(name), options=self.options)

    def fill(self, name: str, numbers: Int64s) -> None:
        """Write a log of one record for each number, in segments."""
        with self.opened(name) as log:
            log.create_topic(TOPIC, 1, CONFIG)
            overwritten.append(log, numbers)
            if isinstance(log, DirectoryLog):
                overwritten.roll(log)

    def clean(self, name: str, buffer: int, *, is_counted: bool = True) -> Cleaning:
        """Clean a copy of a log, which stays as `copy`."""
        copy = self.bucket / "copy"
        shutil.rmtree(copy, ignore_errors=True)
        subprocess.run(["cp", "-a", str(self.bucket / name), str(copy)], check=True)
        took = self.process.clean(
            self.place("copy"), TOPIC, buffer_size=buffer, now_ms=NOW_MS, options=self.options
        )
        if is_counted:
            self.found.append(took)
        return took

    def digest(self) -> tuple[int, str]:
        """Return how many records the copy has, and their digest."""
        with self.opened("copy") as log:
            return overwritten.digest(log.read(TOPIC, 0))


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the benchmark and print its figures."""
    parser = program("store_clean", __doc__, quick="small logs, one round")
    parser.add_argument("--rounds", type=int, help="rounds that are counted")
    parser.add_argument("--keys", type=int, help="distinct keys in 16 MiB")
    options = parser.parse_args(arguments)
    if reason := fault():
        leave_out("an object store", reason)
        return
    make_secret()
    count, keys = (200_000, 20_000) if options.quick else (4_000_000, 400_000)
    rounds = options.rounds or (1 if options.quick else 3)
    with ExitStack() as opened:
        name = tempfile.TemporaryDirectory(prefix="kafkalog-bench-", dir=options.path)
        scratch = Path(opened.enter_context(name))
        server = opened.enter_context(StoreServer(scratch))
        bucket = server.directory / "buckets" / BUCKET
        places = [(options_at(server.port), bucket), (None, scratch)]
        dice = np.random.default_rng(1)
        if options.keys is None:
            with sides(places) as (ours, peer):
                numbers = dice.integers(0, keys, count)
                compare(ours, peer, numbers, rounds, as_json=options.json)
        distinct = options.keys or (100_000 if options.quick else 3_000_000)
        numbers = np.append(np.arange(distinct), np.arange(distinct // 10))
        with sides(places) as (ours, peer):
            spill(ours, peer, dice.permutation(numbers), as_json=options.json)


@contextmanager
def sides(places: Sequence[tuple[dict[str, str] | None, Path]]) -> Iterator[list[Side]]:
    """Yield the sides, with a new process each."""
    with ExitStack() as opened:
        yield [Side(opened.enter_context(CleaningProcess()), *place) for place in places]


def compare(ours: Side, peer: Side, numbers: Int64s, rounds: int, *, as_json: bool) -> None:
    """Clean copies of a log in turn; the first turn, of a smaller one, warms up."""
    for side in (ours, peer):
        side.fill("small", numbers[: len(numbers) // 5])
        side.fill("large", numbers)
    regroup_s = [regrouped(ours, name) for name in ("small", "large")][-1]
    for turn in range(rounds + 1):
        for side in in_turn(turn, [ours, peer]):
            side.clean("large" if turn else "small", BUFFER, is_counted=turn > 0)
        if ours.digest() != peer.digest():
            raise SystemExit(f"we left {ours.digest()}, the directory's cleaner {peer.digest()}")
    claim = compare_figures(
        f"clean {len(numbers):,} records of 100 bytes, {len(np.unique(numbers)):,} keys",
        [took.seconds for took in ours.found],
        [took.seconds for took in peer.found],
        unit="s",
        peer_name="the same in a log directory",
        ratio_is=LESS,
        target="<= 1.3",
        ours_mib=max(took.mib for took in ours.found),
        peer_mib=max(took.mib for took in peer.found),
    )
    report(
        claim.told(
            MB_of_log=round(ours.found[-1].bytes_read / 1e6),
            our_CPU_s=min(round(took.cpu_seconds, 2) for took in ours.found),
            its_CPU_s=min(round(took.cpu_seconds, 2) for took in peer.found),
            a_bare_clients_CPU_s=round(min(bare_client_s(ours) for _ in range(rounds)), 2),
            regroup_before_s=round(regroup_s, 2),
        ),
        as_json=as_json,
    )


def bare_client_s(side: Side) -> float:
    """Move the bytes of a cleaning, those of the log and of its copy; return the CPU seconds."""
    with (
        side.opened("large") as before,
        side.opened("copy") as after,
        tempfile.TemporaryDirectory(prefix="kafkalog-bench-") as scratch,
    ):
        assert isinstance(before, ObjectLog)
        assert isinstance(after, ObjectLog)
        sizes = {name: each.size for name, each in before.store_state().objects.items()}
        outputs = [after.client.get(name) for name in after.store_state().objects]
        spent = time.process_time()
        for name, size in sizes.items():
            with files.closing(files.open_empty(Path(scratch) / "object")) as fd:
                files.preallocate(fd, size)
                position = 0
                for piece in before.client.pieces(name, size):
                    files.write_at(fd, piece, position)
                    position += len(piece)
            files.remove(Path(scratch) / "object")
        for number, output in enumerate(outputs):
            assert output is not None
            after.client.put_unique(f"bare/{number}", output.data)
        return time.process_time() - spent


def regrouped(side: Side, name: str) -> float:
    """Regroup a log; return the seconds."""
    with side.opened(name) as log:
        assert isinstance(log, ObjectLog)
        started = time.perf_counter()
        upkeep.regroup_due(log, now_ms=NOW_MS, force=True)
        return time.perf_counter() - started


def spill(ours: Side, peer: Side, numbers: Int64s, *, as_json: bool) -> None:
    """Clean many keys in a small buffer; compare the memory with the limit of a directory.

    A small log is cleaned before, so that all modules are imported.
    """
    for side in (ours, peer):
        side.fill("few", np.arange(2000))
        side.clean("few", 24 * 100, is_counted=False)
        side.fill("many", numbers)
        side.clean("many", SMALL_BUFFER)
    if ours.digest() != peer.digest():
        raise SystemExit(f"we left {ours.digest()}, the directory's cleaner {peer.digest()}")
    took, other = ours.found[-1], peer.found[-1]
    limit = SMALL_BUFFER // MIB + ALLOWANCE_MIB
    keys = f"{len(np.unique(numbers)):,} distinct dirty keys in 16 MiB"
    claim = compare_figures(
        f"{keys}: peak memory above idle",
        [took.mib - took.idle_mib],
        [limit],
        unit="MiB",
        peer_name="the limit of a log directory",
        ratio_is="of that",
        target="<= 1",
    )
    report(claim.told(directory_MiB=round(other.mib - other.idle_mib, 1)), as_json=as_json)
    claim = compare_figures(
        f"{keys}: rewrites of the log",
        [took.rounds],
        [other.rounds],
        unit="rewrites",
        peer_name="the same in a log directory",
        ratio_is="of its rewrites",
        target="ours <= 1",
    )
    report(
        claim.told(our_seconds=round(took.seconds, 1), its_seconds=round(other.seconds, 1)),
        as_json=as_json,
    )


if __name__ == "__main__":
    main()
