"""Narrows a 64-bit local of a type sheet to 32 bits; the kernels' tests must fail then.

    python -m tests.mutated_sheets [SHEET:FUNCTION.LOCAL...]

Without a name, all of `MUTANTS`, whose locals hold numbers above 2^31 in tests. Most others hold
them only for arrays of more than 2 GiB: for all of them, test_sheets.py compares the type itself.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Final

from tests import kernel_builds

MUTANTS: Final = (
    "cleaner/dedup/kernels:hash_keys.size",
    "storage_engine/records/kernels/decode:read_varlong.value",
    "storage_engine/records/kernels/legacy:read_message.timestamp",
    "storage_engine/records/kernels/decode:decode_records.timestamp",
    "storage_engine/records/kernels/murmur2:murmur2_partitions.value",
)
_FUNCTION: Final = re.compile(r"^cp?def (?:inline )?\w+ (\w+)\(", re.MULTILINE)


def narrowed(sheet: str, name: str) -> str:
    """Return a sheet in which the local `name` (function.local) has 32 bits."""
    for local in re.finditer(r"\b(\w+)=i64\b", sheet):
        function = _FUNCTION.search(sheet, local.end())
        if function is not None and f"{function[1]}.{local[1]}" == name:
            return f"{sheet[: local.end(1)]}=int{sheet[local.end() :]}"
    raise SystemExit(f"{name}: no local of 64 bits in its sheet")


def is_caught(tree: Path, mutant: str) -> bool:
    """Tell whether the kernels' tests fail with one local narrowed."""
    path, _, name = mutant.partition(":")
    sheet = tree / "kafkalog" / f"{path}.pxd"
    text = sheet.read_text()
    sheet.write_text(narrowed(text, name))
    try:
        kernel_builds.compile_kernels(tree, "")
        tests = sorted(
            map(str, (tree / "tests" / "unit" / path.split("/")[0]).glob("test_*kernels.py"))
        )
        run = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests],
            cwd=tree,
            env=kernel_builds.environment(tree, ""),
            check=False,
            capture_output=True,
            text=True,
        )
    finally:
        sheet.write_text(text)
    if run.returncode not in (0, 1):
        raise SystemExit(f"{mutant}: the tests did not run: {run.stdout[-2000:]}{run.stderr}")
    return run.returncode == 1


def copy_compiled(tree: Path) -> None:
    """Copy what the setup has compiled, so that only narrowed kernels are compiled."""
    root = kernel_builds.ROOT
    for path in root.glob("kafkalog/**/*.so"):
        kernel_builds.copy_file(path, tree / "build" / "lib" / path.relative_to(root))
    for path in root.glob("build/c-fast/**/*.c"):
        kernel_builds.copy_file(path, tree / path.relative_to(root))


def main() -> None:
    """Try the mutants that are named, or all; exit with 1 when one is not caught."""
    tree = kernel_builds.ROOT / "build" / "kernels" / "mutated"
    shutil.rmtree(tree, ignore_errors=True)
    kernel_builds.copy(tree)
    copy_compiled(tree)
    os.environ["CC"] = kernel_builds.quick_gcc(tree)
    mutants = sys.argv[1:] or MUTANTS
    missed = 0
    for mutant in mutants:
        caught = is_caught(tree, mutant)
        missed += not caught
        print(f"{mutant}: {'caught' if caught else 'NOT CAUGHT'}", flush=True)
    print(f"{len(mutants)} locals narrowed to 32 bits, {missed} not caught")
    raise SystemExit(bool(missed))


if __name__ == "__main__":
    main()
