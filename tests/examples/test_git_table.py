"""The demo, on a small repository of odd things; `make demo` is the same on a real one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from aiokafka.record import MemoryRecords

from examples.git_history import Entry, head_tree
from examples.git_report import compare
from examples.git_table import main
from tests.examples.repository import ODD_NAMES, Repository

ROOT = Path(__file__).resolve().parent.parent.parent
FILE = Entry("100644", "a" * 40)
LINK = Entry("120000", "a" * 40)


def test_a_comparison_names_what_differs() -> None:
    table = {b"same": FILE, b"extra": FILE, b"\xff": FILE}
    found = compare("table", table, {b"same": FILE, b"missing": FILE, b"\xff": LINK})
    assert (found.missing, found.extra, found.different) == (
        ["'missing'"],
        ["'extra'"],
        ["'\\udcff'"],
    )
    assert not found.is_identical


def test_equal_tables_are_identical() -> None:
    assert compare("table", {b"a": FILE}, {b"a": FILE}).is_identical


def test_no_repository_is_an_error_of_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--repo", str(tmp_path), "--path", str(tmp_path / "log")]) == 1
    assert capsys.readouterr().err.count("\n") == 1
    assert not (tmp_path / "log").exists()


@pytest.mark.spark
@pytest.mark.slow
def test_a_repository_of_odd_things_ends_identical(tmp_path: Path) -> None:
    repository = Repository(tmp_path / "repository")
    for name in ODD_NAMES:
        repository.write(name)
    repository.commit()
    repository.commit()
    for name in ODD_NAMES[::2]:
        repository.write(name, "changed")
    repository.git("mv", "tab\t", "renamed")
    repository.remove(b"\xff\xfe not utf-8")
    (repository.path / "link").symlink_to(b"\xfe".decode("utf-8", "surrogateescape"))
    repository.commit()
    log = tmp_path / "log"
    options = ["--json", "--repo", str(repository.path), "--path", str(log)]
    result = subprocess.run(
        [sys.executable, "-m", "examples.git_table", *options],
        cwd=ROOT,
        check=False,
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    figures = json.loads(result.stdout)
    assert figures["identical"]
    assert figures["records_written"] == figures["changes"]
    # Forced to the end, the log holds one record per path and no delete.
    assert figures["records_kept"] == figures["paths"] == len(ODD_NAMES)
    assert figures["dirty_ratio_after"] == 0
    assert result.stderr.rstrip().endswith("identical")
    newest = {key: json.loads(value) for key, value in newest_by_another_reader(log).items()}
    assert {key: Entry(value["mode"], value["blob"]) for key, value in newest.items()} == (
        head_tree(repository.path)
    )


def newest_by_another_reader(log: Path) -> dict[bytes, bytes]:
    """Read every byte of every `.log` with aiokafka; return the newest value per key."""
    newest: dict[bytes, bytes | None] = {}
    files = sorted(log.glob("git-*/*.log"))
    assert files
    for path in files:
        last_offset = int(path.stem) - 1
        records = MemoryRecords(path.read_bytes())
        assert records.size_in_bytes() == path.stat().st_size
        while (batch := records.next_batch()) is not None:
            assert batch.validate_crc()
            for record in batch:
                assert record.offset > last_offset
                last_offset = record.offset
                newest[record.key] = record.value
    return {key: value for key, value in newest.items() if value is not None}
