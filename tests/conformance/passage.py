"""Adopting and releasing a broker's directory in a process of its own, to be killed at any moment.

`python -m tests.conformance.passage adopt|release ROOT` says that it is ready, and waits for a
line. With a number N behind it, it kills itself instead of doing durable act N.
"""

from __future__ import annotations

import itertools
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from kafkalog.storage_engine.format import layout
from kafkalog.storage_engine.fs import files
from kafkalog.storage_engine.ownership.adopt import adopt
from kafkalog.storage_engine.ownership.release import release
from tests import ROOT
from tests.unit.storage_engine.faults import ACTS


def now_ms() -> int:
    return round(time.time() * 1000)


def run(verb: str, root: Path, *, die_at: int = 0, kill_after: float | None = None) -> bool:
    """Run a verb; False when it was killed, at one of its durable acts or after so many seconds."""
    arguments = [verb, str(root), *([str(die_at)] if die_at else [])]
    command = [sys.executable, "-m", "tests.conformance.passage", *arguments]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, cwd=ROOT, **pipes) as process:
        assert process.stdout.readline() == b"ready\n", process.stderr.read()
        process.stdin.write(b"\n")
        process.stdin.flush()
        try:
            process.wait(kill_after)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        assert process.returncode in {0, -signal.SIGKILL}, process.stderr.read().decode()
        return bool(process.returncode == 0)


def run_until_done(verb: str, root: Path, draw: random.Random) -> int:
    """Run a verb that is killed at work again and again, then let it finish.

    Returns how often it was killed. At no moment is the directory a broker's and ours.
    """
    killed = 0
    for die_at in (1, 2, 4, 8, 16):
        killed += not run(verb, root, die_at=die_at)
        assert_one_owner(root)
    for _ in range(3):
        killed += not run(verb, root, kill_after=draw.uniform(0, 0.02))
        assert_one_owner(root)
    run(verb, root)
    assert_one_owner(root)
    return killed


def assert_one_owner(root: Path) -> None:
    assert not ((root / layout.COMMIT).exists() and (root / layout.META_PROPERTIES).exists())


def _main(verb: str, root: Path, die_at: int) -> None:
    acts = itertools.count(1)
    for name in ACTS if die_at else ():
        setattr(files, name, _mortal(getattr(files, name), acts, die_at))
    print("ready", flush=True)
    sys.stdin.readline()
    if verb == "adopt":
        adopt(root, config={}, now_ms=now_ms())
    else:
        release(root, now_ms=now_ms())


def _mortal(act: Callable[..., Any], acts: Iterator[int], die_at: int) -> Callable[..., Any]:
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if next(acts) == die_at:
            os.kill(os.getpid(), signal.SIGKILL)
        return act(*args, **kwargs)

    return wrapper


if __name__ == "__main__":
    _main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]) if len(sys.argv) > 3 else 0)
