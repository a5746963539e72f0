"""The demo, on a small repository of odd things; `make demo` is the same on a real one."""

from __future__ import annotations

import json
import shlex
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
from aiokafka.record import MemoryRecords

from examples.git_history import Entry, head_tree
from tests import ROOT
from tests.unit.examples.repository import ODD_NAMES, Repository

pytestmark = [pytest.mark.spark, pytest.mark.slow]


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
    # A history of one file has one stage; both producers wrote to each partition in it.
    assert figures["transactions"]["committed"] == figures["transactions"]["aborted"] > 0
    # Forced to the end, the log holds one record per path and no delete.
    assert figures["records_kept"] == figures["paths"] == len(ODD_NAMES)
    assert figures["dirty_ratio_after"] == 0
    assert result.stderr.rstrip().endswith("identical")
    latest = {key: json.loads(value) for key, value in latest_by_another_reader(log).items()}
    assert {key: Entry(value["mode"], value["blob"]) for key, value in latest.items()} == (
        head_tree(repository.path)
    )
    assert figures["picture"] == f"{log}.html"
    assert str(log) in Path(figures["picture"]).read_text()
    assert all(line in result.stderr for line in (figures["picture"], *figures["next"]))
    read, verify, ui = (shlex.split(command) for command in figures["next"])
    assert printed(read).count("\n") == 3
    assert printed(verify) == ""  # it ends with status 0, and its note is on the standard error
    with subprocess.Popen(ui, cwd=ROOT, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        with urllib.request.urlopen(server.stdout.readline().strip(), timeout=120) as page:
            assert str(log) in page.read().decode()
        server.send_signal(signal.SIGINT)


def printed(command: list[str]) -> str:
    return subprocess.run(
        command, cwd=ROOT, check=True, capture_output=True, text=True, timeout=60
    ).stdout


def latest_by_another_reader(log: Path) -> dict[bytes, bytes]:
    """Read every byte of every `.log` with aiokafka; return the latest value per key."""
    latest: dict[bytes, bytes | None] = {}
    files = sorted(log.glob("git-*/*.log"))
    assert files
    for path in files:
        last_offset = int(path.stem) - 1
        records = MemoryRecords(path.read_bytes())
        assert records.size_in_bytes() == path.stat().st_size
        while (batch := records.next_batch()) is not None:
            assert batch.validate_crc()
            if batch.is_control_batch:
                last_offset = batch.base_offset
                continue
            for record in batch:
                assert record.offset > last_offset
                last_offset = record.offset
                latest[record.key] = record.value
    return {key: value for key, value in latest.items() if value is not None}
