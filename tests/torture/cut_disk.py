"""A disk after a power cut: mounted, compared with what was acknowledged, and written on."""

from __future__ import annotations

import contextlib
import os
import random
from dataclasses import dataclass
from pathlib import Path

from kafkalog.inspection.verify import verify
from kafkalog.storage_engine.directory.directory_log import DirectoryLog
from kafkalog.storage_engine.fs import host
from tests.torture import block_device, roles
from tests.torture.oracle import COMMIT, Model, Notes, Wrong, step_of

_boots = iter(range(1 << 40))


@dataclass(frozen=True, slots=True)
class Cut:
    """One power cut: the least and the most that must be found, and how the log goes on."""

    seed: str
    acknowledged: int
    sent: int
    options: str
    fate: str
    goes_on: bool
    is_verified: bool

    @property
    def draw(self) -> random.Random:
        """What the cleaning after it draws from."""
        return random.Random(f"{self.seed} {self.sent} {self.fate}")


def boot() -> None:
    """Let this process take the host for one that was booted anew, as after a cut it is."""
    name = f"boot {os.getpid()} {next(_boots)}"
    host.boot_id = lambda: name  # type: ignore[assignment]


def check_disk(image: Path, cut: Cut, model: Model) -> int:
    """Mount what a cut has left, and compare; returns how many steps are there. Raises Wrong."""
    target = image.with_suffix(".mounted")
    target.mkdir(exist_ok=True)
    boot()
    with contextlib.ExitStack() as held:
        try:
            held.enter_context(block_device.mounted(image, target, cut.options))
        except OSError as fault:
            raise Wrong(f"the file system cannot be mounted: {fault}") from fault
        root = target / "log"
        try:
            with DirectoryLog(root, read_only=True) as log:
                steps = model.steps_in(log.state(), cut.acknowledged, cut.sent)
                model.check(log)
            if cut.goes_on:
                _go_on(root, cut, model, steps, Notes(image.with_suffix(".notes")))
        except Wrong:
            raise
        except Exception as fault:  # whatever it is: opening and going on must not fail
            raise Wrong(f"{type(fault).__name__}: {fault}") from fault
    return steps


def _go_on(root: Path, cut: Cut, model: Model, steps: int, notes: Notes) -> None:
    """Write, clean and verify a log that a cut has left."""
    try:
        with DirectoryLog(root) as log, log.transaction() as transaction:  # settled, it is the same
            model.steps_in(transaction.state, steps, steps)
        writer = roles.Writer(root, cut.seed, notes, model=model)
        if steps and step_of(cut.seed, steps).kind == COMMIT:
            writer.retry(step_of(cut.seed, steps))
        writer.resume(steps)
        writer.take(steps + 2)
        draw = cut.draw
        with DirectoryLog(root) as log:
            roles.clean_once(log, draw)
            roles.clean_once(log, draw)
            model.steps_in(log.state(), steps + 2, steps + 2)
            model.check(log)
        if cut.is_verified:
            damage = [str(each) for each in verify(root, deep=True) if each.is_damage]
            if damage:
                raise Wrong(f"verify found: {damage}")
    finally:
        notes.close()
