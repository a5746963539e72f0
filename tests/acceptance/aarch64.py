"""The kernels and the codec on an emulated aarch64, and logs that it and this processor exchange.

    python -m tests.acceptance.aarch64 [ARGUMENTS OF PYTEST...]

Debian's cross compiler builds the kernels of a copy of this checkout. Debian's Python for arm64 and
the packages' own wheels run them under `qemu-aarch64`. All of it is below build/aarch64. Tests that
start a Python are left out: it would be one of this processor.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Final

from tests import ROOT, kernel_builds

PLACE: Final = ROOT / "build" / "aarch64"
SYSTEM, PACKAGES, TREE = PLACE / "system", PLACE / "packages", PLACE / "tree"
TOOLS: Final = ("gcc-aarch64-linux-gnu", "libc6-dev-arm64-cross", "qemu-user-static")
"""Packages of Debian for this processor."""
GCC, EMULATOR = "aarch64-linux-gnu-gcc", "qemu-aarch64-static"
PYTHON: Final = ("python3.11", "libpython3.11-dev", "libstdc++6")
"""Packages of Debian for arm64."""
WHEELS: Final = ("pytest", "hypothesis", "psutil")
"""What the tests need next to what kafkalog needs."""
_UNIT: Final = "tests/unit/storage_engine/test_"
TESTS: Final = (
    *(f"{_UNIT}{name}.py" for name in ("kernels", "murmur2", "compression", "batch")),
    *(f"{_UNIT}{name}.py" for name in ("foreign_batches", "arrow_batches")),
    *(f"{_UNIT}{name}.py" for name in ("brokers_of_releases", "old_logs")),
    "tests/unit/cleaner/test_kernels.py",
    "tests/unit/cleaner/test_merge_kernels.py",
)
"""The kernels, the codec, and the bytes that brokers and earlier builds of kafkalog wrote."""
NO_STORE: Final = "not store"
"""The index has no wheel of obstore for aarch64 that is recent enough."""
LOG_PROGRAM: Final = "tests/acceptance/exchanged_log.py"


def install_tools() -> None:
    """Install the cross compiler and the emulator, as root; else say what to run."""
    if shutil.which(GCC) and shutil.which(EMULATOR) and Path("/usr/aarch64-linux-gnu").is_dir():
        return
    command = ("apt-get", "install", "-q", "-y", "--no-install-recommends", *TOOLS)
    if os.getuid():
        raise SystemExit(f"aarch64: missing tools. Run `sudo {' '.join(command)}`.")
    subprocess.run(("apt-get", "update", "-q"), check=True)
    subprocess.run(command, check=True)


def unpack_system(target: Path) -> None:
    """Unpack Debian's Python for arm64, and all that it needs, into a directory."""
    apt = PLACE / "apt"
    for name in ("state/lists/partial", "cache/archives/partial"):
        (apt / name).mkdir(parents=True, exist_ok=True)
    (apt / "status").write_text("")  # nothing is installed there
    settings = {
        "Dir::State": apt / "state",
        "Dir::State::status": apt / "status",
        "Dir::Cache": apt / "cache",
        "APT::Architecture": "arm64",
        "APT::Architectures": "arm64",
        "APT::Sandbox::User": "",
        "Acquire::Languages": "none",
    }
    words = [word for pair in settings.items() for word in ("-o", "{}={}".format(*pair))]
    subprocess.run(("apt-get", *words, "-q", "update"), check=True)
    options = ("-q", "-y", "--download-only", "--no-install-recommends")
    subprocess.run(("apt-get", *words, "install", *options, *PYTHON), check=True)
    for package in sorted((apt / "cache" / "archives").glob("*.deb")):
        subprocess.run(("dpkg", "-x", str(package), str(target)), check=True)


def install_packages(target: Path) -> None:
    """Install the wheels for aarch64 of what kafkalog and the tests need."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    platforms = ("manylinux2014_aarch64", "manylinux_2_28_aarch64")
    options = [word for name in platforms for word in ("--platform", name)]
    options += [word for name in ("cp311", "abi3", "none") for word in ("--abi", name)]
    options += ["--python-version", "3.11", "--implementation", "cp", "--only-binary=:all:"]
    command = (sys.executable, "-m", "pip", "install", "-q", "--target", str(target), *options)
    subprocess.run((*command, *project["dependencies"], *WHEELS), check=True)


def build_tree(target: Path) -> None:
    """Copy this checkout, and cross-compile its kernels."""
    kernel_builds.copy(target)
    headers = (f"-I{SYSTEM}/usr/include/python3.11", f"-I{SYSTEM}/usr/include")
    kernel_builds.compile_kernels(
        target,
        kind="",
        CC=GCC,
        LDSHARED=f"{GCC} -shared",
        CFLAGS=" ".join(headers),
        _PYTHON_HOST_PLATFORM="linux-aarch64",
    )


def make() -> None:
    """Make what is not there; the copy of this checkout always."""
    install_tools()
    for target, fill in ((SYSTEM, unpack_system), (PACKAGES, install_packages)):
        if not target.exists():
            begun = target.with_suffix(".begun")
            shutil.rmtree(begun, ignore_errors=True)
            fill(begun)
            begun.rename(target)
    shutil.rmtree(TREE, ignore_errors=True)
    build_tree(TREE)


def run_there(*arguments: str, **options: bool) -> subprocess.CompletedProcess[str]:
    """Run the Python of aarch64 in the copy of this checkout."""
    python = str(SYSTEM / "usr" / "bin" / "python3.11")
    path = os.pathsep.join(map(str, (TREE, PACKAGES)))
    return subprocess.run(
        (EMULATOR, "-L", str(SYSTEM), python, *arguments),
        cwd=TREE,
        env={**os.environ, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"},
        check=True,
        text=True,
        **options,
    )


def exchange(scratch: Path) -> None:
    """Write a log on either processor, read both on the other, and compare all of it."""
    shutil.rmtree(scratch, ignore_errors=True)

    def here(*arguments: str) -> str:
        command = (sys.executable, str(ROOT / LOG_PROGRAM), *arguments)
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        return subprocess.run(
            command, env=environment, check=True, capture_output=True, text=True
        ).stdout

    def there(*arguments: str) -> str:
        return run_there(LOG_PROGRAM, *arguments, capture_output=True).stdout

    ours, theirs = str(scratch / "ours"), str(scratch / "theirs")
    found = [here("write", ours), there("write", theirs), there("show", ours), here("show", theirs)]
    first = json.loads(found[0])
    assert not first["damage"], first["damage"]
    for other in map(json.loads, found[1:]):
        names = sorted(
            name for name in first["files"] if first["files"][name] != other["files"][name]
        )
        assert other == first, f"files that differ: {names}"
    print(f"{len(first['files'])} files of either processor are equal, and read the same on both")


def main() -> None:
    """Make the system, exchange logs, and run the tests."""
    make()
    machine = run_there("-c", "import platform; print(platform.machine())", capture_output=True)
    assert machine.stdout == "aarch64\n"
    exchange(PLACE / "logs")
    options = ("-q", "-p", "no:cacheprovider", "--durations=5")
    run_there("-m", "pytest", *options, "-k", NO_STORE, *(sys.argv[1:] or TESTS))


if __name__ == "__main__":
    main()
