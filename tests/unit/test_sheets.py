"""What the kernels' type sheets promise to C, and which kernels are at work."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests import kernel_builds
from tests.torture import fuzz_children

ROOT = kernel_builds.ROOT
SHEETS = kernel_builds.SHEETS
CONSTANTS = sorted(
    [*(ROOT / "kafkalog").rglob("codes.pxd"), *(ROOT / "kafkalog").rglob("layout.pxd")]
)
WIDE = {
    *("i64", "u64", "void", "pair", "triple", "four", "five", "four_words"),
    *("u8s", "u8s_out", "i32s", "i32s_out", "i64s", "i64s_out", "u64s", "flags_in", "flags_out"),
    *("table", "table_out", "rows_in", "rows_out"),
}
"""Integers of 64 bits, tuples of them, and arrays."""


def named(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("sheet", CONSTANTS, ids=named)
def test_constants_of_c_are_those_of_python(sheet: Path) -> None:
    module = importlib.import_module(".".join(sheet.with_suffix("").relative_to(ROOT).parts))
    told = re.findall(r"^    (\w+) = (\S+)$", sheet.read_text(), re.MULTILINE)
    assert {name: int(value, 0) for name, value in told} == {
        name: getattr(module, name) for name, _ in told
    }
    if sheet.stem == "codes":
        assert {name for name, _ in told} == {name for name in vars(module) if name.isupper()}


@pytest.mark.parametrize("sheet", SHEETS, ids=named)
def test_no_integer_of_a_sheet_is_narrower_than_64_bits(sheet: Path) -> None:
    text = sheet.read_text()
    functions = re.findall(
        r"^cp?def (?:inline )?(\w+) (\w+)\((.*?)\) noexcept nogil$", text, re.MULTILINE | re.DOTALL
    )
    given = {
        (name, word.split()[0])
        for result, name, arguments in functions
        for word in (result, *filter(str.strip, arguments.split(",")))
    }
    locals_ = re.findall(r"=([\w.]+)[,)]", text)
    assert {kind for _, kind in given} <= WIDE | {"bint"}
    assert {*locals_} <= {"i64", "u64", "cython.bint"}


@pytest.mark.slow
@pytest.mark.parametrize("sheet", SHEETS, ids=named)
def test_no_local_of_a_kernel_is_narrower_than_64_bits_in_c(sheet: Path) -> None:
    """Cython gives a local that takes an item of bytes the type of the item, unless it is told."""
    tree = kernel_builds.tree("checked")
    path = sheet.relative_to(ROOT).with_suffix(".c")
    (code,) = (tree / "build").glob(f"c-*/{path}")
    function = re.compile(r"^[^\n;]*__pyx_f_\w+\([^;]*?\) \{$(.*?)^\}$", re.MULTILINE | re.DOTALL)
    kernels = function.findall(code.read_text())
    narrow = re.findall(
        r"^  (?:CYTHON_UNUSED )?(?:unsigned |const )*(?:char|short|int) __pyx_v_(\w+);",
        "".join(kernels),
        re.MULTILINE,
    )
    assert len(kernels) > 0
    assert {*narrow} == {*re.findall(r"(\w+)=cython.bint", sheet.read_text())}


def test_what_a_fuzzer_writes_while_builds_are_at_work_changes_none_of_them() -> None:
    assert fuzz_children.KEPT.is_relative_to(ROOT / "tests")
    assert not [path for path in kernel_builds._files() if fuzz_children.KEPT in path.parents]


def test_kernels_that_are_not_compiled_say_so_once() -> None:
    program = (
        "import kafkalog\n"
        "import kafkalog.cleaner.dedup.kernels\n"
        "import kafkalog.storage_engine.records.kernels.decode\n"
        "print(kafkalog.__compiled__)\n"
    )
    place = kernel_builds.tree("python")
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=place,
        env=kernel_builds.environment(place, "python"),
        check=True,
        capture_output=True,
        text=True,
    )
    assert done.stdout == "False\n"
    assert done.stderr.count("RuntimeWarning: kafkalog: the kernels are not compiled") == 1
    assert "apt-get install gcc" in done.stderr
