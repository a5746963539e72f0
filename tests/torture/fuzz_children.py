"""Starts the processes that decode, waits for them, and tells what they died of."""

from __future__ import annotations

import hashlib
import json
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from tests import ROOT, kernel_builds
from tests.torture.fuzz_run import InFlight

KEPT: Final = Path(__file__).with_name("findings")
"""Inputs that were findings once; a directory for each decoder."""
_ROOT: Final = ROOT
_STUCK_SECONDS: Final = 120.0
"""Above what was ordered."""
_BUSY: Final = 10
"""Times the seconds of the processor that were ordered: others may want it as well."""
_START_SECONDS: Final = 240.0
"""For imports on a busy machine."""
_BUILDS: Final[Mapping[str, tuple[str, str]]] = {
    "bounds": ("mutation", "checked"),
    "sanitizers": ("mutation", "sanitized"),
    "coverage": ("coverage", "python"),
    "replay-sanitizers": ("replay", "sanitized"),
}
"""By engine: its loop, and the build of the kernels. The others have the ordinary build."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Work for one process after the other, until all of its targets have had their time."""

    engine: str
    targets: list[str]
    directory: Path
    seconds: float = 0.0
    """For a target of weight 1."""
    seed: int = 0
    inputs: dict[str, list[str]] = field(default_factory=dict)
    plant: str = ""


@dataclass(frozen=True, slots=True)
class Finding:
    """An input that a decoder may neither return from nor refuse as it did."""

    target: str
    path: Path
    told: str
    place: str


def run_piece(piece: Piece) -> tuple[dict[str, int], list[Finding]]:
    """Return executions by target, and findings; a process that died is one."""
    executions: dict[str, int] = {}
    findings: list[Finding] = []
    left = list(piece.targets)
    piece.directory.mkdir(parents=True, exist_ok=True)
    while left:
        status, lines, complaint = _run_child(piece, left)
        for line in lines:
            name = line["target"]
            left.remove(name)
            executions[name] = executions.get(name, 0) + line["executions"]
            findings += [
                Finding(name, Path(found["path"]), found["told"], found["place"])
                for found in line["found"]
                if found
            ]
        if not left:
            break
        died = _death(piece, left, status, complaint)
        name, count = died[0].target, died[1]
        findings.append(died[0])
        executions[name] = executions.get(name, 0) + count
        left.remove(name)
    return executions, findings


def _run_child(piece: Piece, names: list[str]) -> tuple[int, list[dict[str, Any]], str]:
    order = {
        "targets": names,
        "seconds": piece.seconds,
        "seed": piece.seed,
        "directory": str(piece.directory),
        "inputs": piece.inputs,
        "plant": piece.plant,
    }
    path = piece.directory / "order.json"
    path.write_text(json.dumps(order))
    in_flight = piece.directory / "in-flight"
    in_flight.unlink(missing_ok=True)
    loop, build = _BUILDS.get(piece.engine, (piece.engine, ""))
    place = kernel_builds.tree(build) if build else _ROOT
    with (piece.directory / "stderr").open("wb") as stderr:
        child = subprocess.Popen(
            [sys.executable, "-m", "tests.torture.fuzz_child", loop, str(path)],
            cwd=place,
            env=_environment(place, build),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=stderr,
        )
        try:
            limit = _START_SECONDS + _STUCK_SECONDS + _BUSY * len(names) * piece.seconds
            output, _ = child.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            child.kill()
            output, _ = child.communicate()
    lines = [json.loads(line) for line in output.splitlines() if line.startswith(b'{"target"')]
    complaint = (piece.directory / "stderr").read_text(errors="replace")
    return child.returncode, lines, complaint


def _death(piece: Piece, left: Sequence[str], status: int, complaint: str) -> tuple[Finding, int]:
    """Return the finding of a process that has died, and its executions of that target."""
    in_flight = piece.directory / "in-flight"
    name, executions, data = InFlight.read(in_flight) if in_flight.exists() else ("", 0, b"")
    if status >= 0 or name not in left:
        # No input did this: the harness does not work, which no count may hide.
        raise RuntimeError(
            f"a child of {piece.engine} ended with {status} before an input of {left[0]}:\n"
            f"{complaint[-3000:]}"
        )
    word = signal.Signals(-status).name
    path = piece.directory / "found" / name / f"{word}-{hashlib.sha256(data).hexdigest()[:8]}"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    told = (
        "no end: killed" if word in {"SIGKILL", "SIGVTALRM"} else f"the interpreter died of {word}"
    )
    return Finding(name, path, told, word), executions


def _environment(place: Path, build: str) -> dict[str, str]:
    """Return the environment of a child, which uses the build of the kernels in a directory."""
    return {
        **kernel_builds.environment(place, build),
        # Arrow's other pools reserve more address space than a run may take.
        "ARROW_DEFAULT_MEMORY_POOL": "system",
        "MALLOC_ARENA_MAX": "2",
        "PYTHONHASHSEED": "0",
    }
