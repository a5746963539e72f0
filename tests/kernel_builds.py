"""Runs Python on another build of the kernels: as Python, with bounds checks, or with sanitizers.

    python -m tests.kernel_builds {python,checked,sanitized} ARGUMENTS OF PYTHON...

Each build is a copy of this checkout below build/kernels. It is made again when a file has changed.
In a checked or sanitized build a read or write beyond an array ends the process with SIGABRT.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Final

from tests import ROOT

SHEETS: Final = sorted(
    sheet
    for sheet in (ROOT / "kafkalog").rglob("*.pxd")
    if "kernels" in (sheet.stem, sheet.parent.name)
)
"""The type sheet of each file that is compiled."""
KINDS: Final = ("python", "checked", "sanitized")
_COPIED: Final = ("kafkalog", "pyspark_kafkalog", "tests", "bench", "examples", "docs")
_PREPARED: Final = """\
import os, sys, traceback

def end(unraisable, hook=sys.unraisablehook):
    hook(unraisable)
    if isinstance(unraisable.exc_value, IndexError):  # a kernel's bounds check
        os.abort()

sys.unraisablehook = end
"""


def tree(kind: str) -> Path:
    """Return the directory of a build, made now unless it is there."""
    place = ROOT / "build" / "kernels"
    place.mkdir(parents=True, exist_ok=True)
    target = place / f"{kind}-{_digest()}"
    with (place / f"{kind}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.exists():
            for old in place.glob(f"{kind}-*"):
                shutil.rmtree(old)
            made = place / f".{kind}"
            shutil.rmtree(made, ignore_errors=True)
            copy(made)
            if kind != "python":
                (made / "sitecustomize.py").write_text(_PREPARED)
                compile_kernels(made, kind)
            made.rename(target)
    return target


def environment(place: Path, kind: str) -> dict[str, str]:
    """Return what makes Python use the build of a kind in a directory."""
    found = {**os.environ, "PYTHONPATH": str(place), "KAFKALOG_KERNEL_BUILD": kind}
    if kind == "sanitized":
        libraries = [_library("libasan.so"), _library("libstdc++.so")]
        found["LD_PRELOAD"] = " ".join(libraries)
        found["ASAN_OPTIONS"] = "detect_leaks=0:abort_on_error=1:allocator_may_return_null=1"
        found["UBSAN_OPTIONS"] = "print_stacktrace=1:abort_on_error=1"
        found["PYTHONMALLOC"] = "malloc"  # each object by itself, where its end is seen
        found["ARROW_DEFAULT_MEMORY_POOL"] = "system"
    return found


def _files() -> list[Path]:
    found = [ROOT / "setup.py", ROOT / "pyproject.toml", ROOT / "README.md", ROOT / "LICENSE"]
    for name in _COPIED:
        found += [path for path in (ROOT / name).rglob("*") if path.is_file()]
    # A fuzzer writes findings while builds are at work, which have no use for them.
    left_out = {"__pycache__", "findings"}
    return sorted(p for p in found if p.suffix != ".so" and left_out.isdisjoint(p.parts))


def _digest() -> str:
    found = hashlib.sha256()
    for path in _files():
        found.update(f"{path.relative_to(ROOT)}\0".encode() + path.read_bytes() + b"\0")
    return found.hexdigest()[:16]


def copy(target: Path) -> None:
    """Copy this checkout, without what is compiled."""
    for path in _files():
        copy_file(path, target / path.relative_to(ROOT))


def copy_file(path: Path, target: Path) -> None:
    """Copy a file with its time, which tells what has to be compiled."""
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy2(path, target)


def compile_kernels(target: Path, kind: str, **more: str) -> None:
    """Compile the kernels of a copy; `more` are variables of the environment."""
    subprocess.run(
        [sys.executable, "setup.py", "-q", "build_ext", "--inplace", "--build-lib=build/lib"],
        cwd=target,
        env={**os.environ, "KAFKALOG_KERNELS": kind, "KAFKALOG_REQUIRE_COMPILER": "1", **more},
        check=True,
        stdout=2,  # pytest may have replaced sys.stderr by an object without a descriptor
    )


def quick_gcc(directory: Path) -> str:
    """Return a gcc that spends no time on fast code, made in a directory: its last word counts."""
    command = directory / "gcc"
    command.write_text(f'#!/bin/sh\nexec {shutil.which("gcc") or "gcc"} "$@" -O0\n')
    command.chmod(0o755)
    return str(command)


def _library(name: str) -> str:
    command = ["gcc", f"-print-file-name={name}"]
    found = subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    if not Path(found).is_absolute():
        raise FileNotFoundError(f"{name}: not found. Install gcc with its sanitizers (libgcc-dev).")
    return found


def main() -> None:
    """Become the Python that is asked for."""
    if len(sys.argv) < 3 or sys.argv[1] not in KINDS:
        raise SystemExit(f"usage: python -m tests.kernel_builds {{{','.join(KINDS)}}} ARGUMENTS...")
    kind = sys.argv[1]
    place = tree(kind)
    os.chdir(place)
    os.execve(sys.executable, [sys.executable, *sys.argv[2:]], environment(place, kind))


if __name__ == "__main__":
    main()
