"""Where compiled kernels are kept when numba's own places cannot be written."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kafkalog.storage_engine import kernel_cache

PROGRAM = """
import os, sys
{first}
from kafkalog.storage_engine import kernel_cache
kernel_cache._is_writable = lambda directory: {writable}
kernel_cache.prepare()
print(os.environ.get("NUMBA_CACHE_DIR", ""))
{last}
"""


def run(scratch: Path, *, writable: bool, first: str = "", last: str = "", given: str = "") -> str:
    environment = {**os.environ, "TMPDIR": str(scratch)}
    environment.pop("NUMBA_CACHE_DIR", None)
    if given:
        environment["NUMBA_CACHE_DIR"] = given
    program = PROGRAM.format(writable=writable, first=first, last=last)
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.strip()


def test_numbas_own_places_are_left_alone_where_they_can_be_written(tmp_path: Path) -> None:
    assert run(tmp_path, writable=True) == ""


def test_a_place_the_user_chose_is_left_alone(tmp_path: Path) -> None:
    assert run(tmp_path, writable=False, given="/somewhere") == "/somewhere"


def test_else_it_is_a_temporary_directory_that_only_the_user_can_write(tmp_path: Path) -> None:
    found = Path(run(tmp_path, writable=False))
    assert found.parent == tmp_path
    assert found.stat().st_mode & 0o777 == 0o700
    assert Path(run(tmp_path, writable=False)) == found, "the next process finds it again"


def test_a_directory_that_others_can_write_is_not_trusted(tmp_path: Path) -> None:
    found = Path(run(tmp_path, writable=False))
    found.chmod(0o777)
    other = Path(run(tmp_path, writable=False))
    assert other != found
    assert other.stat().st_mode & 0o777 == 0o700


def test_a_file_or_link_of_that_name_is_not_trusted(tmp_path: Path) -> None:
    found = Path(run(tmp_path, writable=False))
    found.rmdir()
    found.write_text("")
    assert Path(run(tmp_path, writable=False)) != found
    found.unlink()
    found.symlink_to(tmp_path)
    assert Path(run(tmp_path, writable=False)) != found


@pytest.mark.parametrize("first", ["", "import numba"], ids=["before numba", "after numba"])
def test_numba_uses_the_place(tmp_path: Path, first: str) -> None:
    last = "import numba; print(numba.config.CACHE_DIR)"
    chosen, used = run(tmp_path, writable=False, first=first, last=last).split()
    assert chosen == used


def test_kernels_that_another_thread_is_importing_are_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = SimpleNamespace(begun=threading.Event(), go_on=threading.Event())
    monkeypatch.setitem(sys.modules, "gate_of_kernels", gate)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "kernels_of_gate.py").write_text(
        "import gate_of_kernels\n"
        "gate_of_kernels.begun.set()\n"
        "gate_of_kernels.go_on.wait()\n"
        "OK = 0\n"
    )
    found: list[Any] = []
    first = threading.Thread(target=import_module, args=["kernels_of_gate"])
    second = threading.Thread(
        target=lambda: found.append(vars(kernel_cache.load("kernels_of_gate")).get("OK"))
    )
    first.start()
    gate.begun.wait()
    second.start()
    second.join(0.2)
    gate.go_on.set()
    first.join()
    second.join()
    monkeypatch.delitem(sys.modules, "kernels_of_gate")
    assert found == [0]
