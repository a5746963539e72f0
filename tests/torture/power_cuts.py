"""Cut the power while a log on a real ext4 is written and cleaned; acknowledged data is there.

A writer and a cleaner work on a log in an ext4 file system. Its disk (`block_device`) notes every
write and every flush of the kernel, between the writer's notes of what it sent and what was
acknowledged. The disk has nothing of the kernel's page cache. Then both processes are killed. The
program draws moments from the notes, and makes the disk as it was at each. The disk has all flushed
writes. Its own cache may still hold the later ones, so they are there in full, not at all, as a
first part, any part, or any sectors. Equal disks with as much acknowledged count once.

A cut is thus an exact moment between two writes of the device, also inside an fsync or a commit of
the file system itself. No process has to stop for it, and the notes up to there say what was
acknowledged.

The program mounts the disk, which replays the file system's journal. It opens the log as after a
reboot of the host and compares it with the `oracle`. After one cut in three, which is drawn, work
continues: the last batch comes once more and is known, further steps land, and the log is cleaned.
Sometimes every byte is verified. The next round starts from one of the cuts.

The options of ext4 vary from disk to disk: the ordering of data, the time of allocation, the
interval of its own commits. Fast commits are left out, because ext4 then calls its own journal
corrupted after some cuts, and does not mount. Three logs in ten are relaxed (`flush.messages`).
Their steps count as acknowledged once synced, and a cut goes back to a whole number of steps. Now
and then the kernel writes back some unsynced pages, in any order, as it does by itself after some
seconds.

    python -m tests.torture.power_cuts [--quick] [--seed N] [--jobs N] [--only CASE]

The program needs root, loop devices and FUSE; without them it says so and ends. It keeps the disk
of a violation in a directory, and `--only DIRECTORY` checks exactly this disk again. The seed draws
steps, options, moments and fates. It does not repeat the history of a disk, which depends on real
time. `--only NUMBER` repeats what the seed draws for that disk.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

from tests.torture import Tally, block_device, kills, parser, roles
from tests.torture.block_device import FATES, CutDisk
from tests.torture.cut_disk import Cut, boot, check_disk
from tests.torture.oracle import Model, Note, Notes, Progress, Wrong
from tests.torture.scratch import scratch
from tests.torture.workers import Workers

TARGET: Final = 10_000
QUICK: Final = 80
CUTS: Final = 25
"""Of one round."""
ROUNDS: Final = 6
"""Of one disk; it is small."""
WORK_S: Final = 3.0
"""How long a round works at most."""
_START: Final = b"b"
"""A note: from here on the log is there, and may be cut."""
_STOP: Final = b"e"
MOUNTS: Final = (
    "data=ordered",
    "data=ordered,noauto_da_alloc",
    "data=ordered,nodelalloc",
    "data=ordered,commit=1",
    "data=writeback",
    "data=writeback,noauto_da_alloc",
    "data=journal",
)


@dataclass
class Outcome:
    """What came of one disk."""

    disk: int
    data: str = ""
    """How its file system orders data: the option of that name."""
    cuts: int = 0
    repeated: int = 0
    """Cuts that left what an earlier one had left; they are none of `cuts`."""
    steps: int = 0
    mid_step: int = 0
    """Cuts between the sending and the acknowledgement of a step."""
    cached: int = 0
    """Cuts where the disk's cache held something."""
    violations: tuple[str, ...] = ()
    kept: str = ""


class Disk:
    """One file system with a log, through rounds of work and of cuts."""

    def __init__(self, scratch: Path, seed: int, number: int) -> None:
        self.outcome = Outcome(number)
        self._scratch = scratch
        self._seed = f"{seed} {number}"
        self._draw = random.Random(self._seed)
        self._model = Model(self._seed)
        self._options = self._draw.choice(MOUNTS)
        self.outcome.data = self._options.partition(",")[0]
        self._is_relaxed = self._draw.random() < 0.3
        self._image = block_device.make_file_system(scratch / "empty")
        self._steps = 0
        self._is_new = True
        self._found: dict[tuple[bytes, int], int] = {}
        """Steps that were found where a cut left this, after so many were acknowledged."""

    def run(self, rounds: int, cuts: int) -> Outcome:
        """Work and cut by turns; a violation ends it."""
        try:
            for number in range(rounds):
                notes = self._work(number)
                self._cut(notes, cuts)
        except Wrong as fault:
            self.outcome.violations = (f"{fault} ({self._options})",)
        return self.outcome

    def _work(self, number: int) -> list[Note]:
        """Let the log be written and cleaned for a while; returns what was noted."""
        boot()
        path = self._scratch / f"{number}.notes"
        notes = Notes(path)
        target = self._scratch / "mounted"
        target.mkdir(exist_ok=True)
        disk = self._scratch / "disk"
        with (
            block_device.recorded_disk(self._image, disk, notes),
            block_device.mounted(disk, target, self._options),
        ):
            root = target / "log"
            if self._is_new:
                roles.create(root, is_relaxed=self._is_relaxed)
                self._is_new = False
            notes.write(_START, 0)
            found = self._run_processes(root, notes)
            notes.write(_STOP, 0)
        found += notes.read()
        notes.close()
        path.unlink()
        kinds = [note.kind for note in found]
        start, stop = kinds.index(_START), kinds.index(_STOP)
        before = [note for note in found[:start] if note.kind in b"wc"]
        return [*before, *found[start:stop]]

    def _run_processes(self, root: Path, notes: Notes) -> list[Note]:
        seed, steps, model = self._seed, self._steps, self._model
        writing = partial(_write, root, seed, notes, model, steps)
        cleaning = partial(roles.clean, root, f"{seed} {steps}", pause_s=0.02)
        running = [
            roles.Process(writing, self._scratch / "write.fault"),
            roles.Process(cleaning, self._scratch / "clean.fault"),
        ]
        found: list[Note] = []
        progress, enough = Progress(steps, steps), steps + self._draw.randrange(10, 50)
        deadline = time.monotonic() + WORK_S
        try:
            while progress.acknowledged < enough and time.monotonic() < deadline:
                time.sleep(self._draw.uniform(0.01, 0.05))
                if self._draw.random() < 0.3:
                    block_device.write_back_some(root, self._draw)
                news = list(notes.read())
                progress.take(news)
                found += news
        finally:
            for process in running:
                process.kill()
        for process in running:
            process.check()
        return found

    def _cut(self, notes: Sequence[Note], count: int) -> None:
        """Cut the power at moments drawn from the notes, in their order."""
        start = next(n for n, note in enumerate(notes) if note.kind == _START)
        moments = sorted(self._draw.randint(start, len(notes)) for _ in range(count))
        last = self._draw.randrange(count)
        disk, progress = CutDisk(self._image), Progress(self._steps, self._steps)
        position, image = 0, self._scratch / "cut"
        for number, moment in enumerate(moments):
            disk.take(notes[position:moment])
            progress.take(notes[position:moment])
            position = moment
            cut = self._draw_cut(progress)
            survivors = disk.survivors(cut.fate, self._draw)
            left = disk.write_image(image, survivors), progress.acknowledged
            next_image = image.read_bytes() if number == last else b""
            if left in self._found:
                self.outcome.repeated += 1
            else:
                self.outcome.cuts += 1
                try:
                    self._found[left] = check_disk(image, cut, self._model)
                except Wrong:
                    disk.write_image(image, survivors)
                    self._keep(image, cut)
                    raise
                self.outcome.mid_step += progress.sent > progress.acknowledged
                self.outcome.cached += disk.is_cached
            if next_image:
                self._image, next_steps = next_image, self._found[left]
        self.outcome.steps += progress.acknowledged - self._steps
        self._steps = next_steps

    def _draw_cut(self, progress: Progress) -> Cut:
        return Cut(
            self._seed,
            progress.acknowledged,
            progress.sent,
            self._options,
            self._draw.choice(FATES),
            goes_on=self._draw.random() < 0.35,
            is_verified=self._draw.random() < 0.3,
        )

    def _keep(self, image: Path, cut: Cut) -> None:
        kept = Path(tempfile.mkdtemp(prefix="power_cut-"))
        shutil.copy(image, kept / "image")
        told = {name: getattr(cut, name) for name in cut.__slots__}
        (kept / "cut.json").write_text(json.dumps(told))
        self.outcome.kept = str(kept)


def _write(root: Path, seed: str, notes: Notes, model: Model, steps: int) -> None:
    writer = roles.Writer(root, seed, notes, model=model, needs_sync=True)
    writer.run(steps, pause_s=0.004)


def live(directory: Path, seed: int, rounds: int, cuts: int, disk: int) -> Outcome:
    """Work on one disk, from its making on."""
    place = directory / str(disk)
    place.mkdir()
    outcome = Disk(place, seed, disk).run(rounds, cuts)
    shutil.rmtree(place)
    return outcome


def check_again(directory: Path, kept: Path) -> str | None:
    """Check the disk of a violation once more; returns what is wrong."""
    told: dict[str, Any] = json.loads((kept / "cut.json").read_text())
    cut = Cut(**told)
    image = Path(shutil.copy(kept / "image", directory / kept.name))
    try:
        check_disk(image, cut, Model(cut.seed))
    except Wrong as fault:
        return str(fault)
    return None


def checked_again(kept: Sequence[Path]) -> Iterator[str | None]:
    """The same of several, in a process that mounts for itself alone."""
    with scratch("power_cuts") as directory, _workers(1) as workers:
        yield from workers.results(partial(check_again, directory), kept)


def _workers(jobs: int) -> Workers:
    """Have processes that mount for themselves alone, with all compiled that they need."""
    kills.warm()
    return Workers(jobs, _begin)


def _begin() -> None:
    block_device.keep_mounts_private()
    kills.be_quiet()


def outcomes(
    seed: int, disks: Iterable[int], rounds: int, cuts: int, jobs: int
) -> Generator[Outcome]:
    """Yield what came of one disk after the other, `jobs` at a time. Raises WorkerDied."""
    with scratch("power_cuts") as directory, _workers(jobs) as workers:
        yield from workers.results(partial(live, directory, seed, rounds, cuts), disks)


def main(arguments: list[str] | None = None) -> None:
    made = parser("power_cuts", __doc__)
    made.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="disks at a time (all)")
    options = made.parse_args(arguments)
    tally = Tally("power_cuts", "power cuts", options, TARGET)
    tally.skipped = block_device.refusal() or ""
    if options.only and not options.only.isdecimal() and not tally.skipped:
        (fault,) = checked_again([Path(options.only)])
        tally.tried()
        if fault is not None:
            tally.violated(options.only, fault)
    elif not tally.skipped:
        _cut(options, tally)
    tally.report()


def _cut(options: argparse.Namespace, tally: Tally) -> None:
    """Cut as often as is asked for, or as there is time for."""
    rounds, cuts, wanted = (3, 30, QUICK) if options.quick else (ROUNDS, CUTS, TARGET)
    disks = [int(options.only)] if options.only else range(3 * wanted // (rounds * cuts))
    totals: Counter[str] = Counter()
    by_data: Counter[str] = Counter()
    found = outcomes(options.seed, disks, rounds, cuts, options.jobs)
    with tally.deaths(), contextlib.closing(found):
        for outcome in found:
            tally.tried(outcome.cuts)
            by_data[outcome.data] += outcome.cuts
            totals["steps"] += outcome.steps
            totals["cuts within a step"] += outcome.mid_step
            totals["cuts with writes in the disk's cache"] += outcome.cached
            totals["cuts that left the same, not counted"] += outcome.repeated
            for told in outcome.violations:
                tally.violated(outcome.kept or str(outcome.disk), told)
            if tally.count >= wanted:
                break
    tally.more |= {**totals, **by_data, "cuts a second": round(tally.count / tally.seconds, 1)}


if __name__ == "__main__":
    main(sys.argv[1:])
