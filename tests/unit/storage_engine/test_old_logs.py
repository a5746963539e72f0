"""A log that any earlier build has written is read, verified, cleaned, copied and written to.

`old_log.py` says which builds wrote the archives in `old_logs`.
"""

from __future__ import annotations

import json
import tarfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import kafkalog
from kafkalog.errors import CorruptLogError, StorageError
from kafkalog.inspection.verify import verify
from kafkalog.inspection.verify_store import verify_store
from kafkalog.storage_engine.format import layout
from kafkalog.storage_engine.object_store.address import StoreAddress
from kafkalog.storage_engine.object_store.client import ObjectClient
from kafkalog.storage_engine.object_store.object_log import ObjectLog
from tests.unit.storage_engine.old_log import START_MS, rows_of
from tests.unit.storage_engine.store_log import memory_address

ARCHIVES = sorted((Path(__file__).parent / "old_logs").glob("*.tar.xz"))
LATER_MS = START_MS + 60_000
Edit = Callable[[str, bytes], bytes]


@dataclass(frozen=True)
class OldLog:
    """An old log where this release can open it, and the records that its build read."""

    path: Path | str
    rows: dict[str, list[list[Any]]]

    def findings(self) -> list[str]:
        """Return what a deep `verify` finds."""
        if isinstance(self.path, Path):
            return [str(finding) for finding in verify(self.path, deep=True)]
        log = ObjectLog(StoreAddress.parse(self.path))
        return [str(finding) for finding in verify_store(log, deep=True)]

    def latest(self) -> dict[str, str]:
        """Return the latest value of each key that has one, from the records of then."""
        changes = [row for name in ("changes-0", "changes-1") for row in self.rows[name]]
        return {k: v for k, v in {key: value for _, key, value in changes}.items() if v is not None}


def unpacked(archive: Path, tmp_path: Path, edit: Edit = lambda _, data: data) -> OldLog:
    """Put the files of a log in a directory, or in a store."""
    with tarfile.open(archive) as opened:
        # A Python 3.11 before 3.11.4, as Debian 12 has it, knows no filters.
        opened.extraction_filter = getattr(tarfile, "data_filter", None)
        opened.extractall(tmp_path)
    rows = json.loads((tmp_path / "records.json").read_text())
    root = tmp_path / "log"
    files = [path for path in root.rglob("*") if path.is_file()]
    content = {str(path.relative_to(root)): edit(path.name, path.read_bytes()) for path in files}
    if archive.name.startswith("directory"):
        for name, data in content.items():
            (root / name).write_bytes(data)
        return OldLog(root, rows)
    address = memory_address()
    client = ObjectClient(address)
    for name, data in content.items():
        client.put_unique(name, data)
    return OldLog(str(address), rows)


@pytest.fixture(params=ARCHIVES, ids=lambda path: path.name.removesuffix(".tar.xz"))
def old(request: pytest.FixtureRequest, tmp_path: Path) -> OldLog:
    return unpacked(request.param, tmp_path)


def test_an_old_log_is_sound_and_has_its_records(old: OldLog) -> None:
    assert old.findings() == []
    with kafkalog.open(old.path, read_only=True) as log:
        assert rows_of(log) == old.rows


def test_a_lookup_and_the_latest_records_of_an_old_log_are_those_of_then(old: OldLog) -> None:
    latest = {key.encode(): value.encode() for key, value in old.latest().items()}
    with kafkalog.open(old.path, read_only=True) as log:
        found: dict[bytes, bytes] = {}
        for batch in log.latest("changes"):
            found |= zip(batch["key"].to_pylist(), batch["value"].to_pylist(), strict=True)
        assert found == latest
        for number in range(8):
            record = log.lookup("changes", b"k%d" % number, partition=number % 2)
            assert (record and record.value) == latest.get(b"k%d" % number)


def test_a_cleaning_of_an_old_log_keeps_the_latest_records(old: OldLog) -> None:
    with kafkalog.open(old.path) as log:
        log.clean("changes", force=True, now_ms=LATER_MS)
        found = rows_of(log)
    for name, rows in found.items():
        is_compact = name.startswith("changes")
        last = {row[1] if is_compact else row[0]: row for row in old.rows[name]}
        assert rows == sorted(last.values())
        assert is_compact == (len(rows) < len(old.rows[name]))
    assert old.findings() == []


def test_an_old_log_is_copied_to_a_directory_and_to_a_store(old: OldLog, tmp_path: Path) -> None:
    for place in (tmp_path / "copy", str(memory_address())):
        kafkalog.copy(old.path, place, now_ms=LATER_MS)
        with kafkalog.open(place, read_only=True) as log:
            assert rows_of(log) == old.rows
        assert OldLog(place, old.rows).findings() == []


def test_an_old_log_is_written_to_where_it_ends(old: OldLog) -> None:
    with kafkalog.open(old.path) as log:
        end = log.describe("plain").partitions[0].high_watermark
        log.append("plain", [(None, b"new")], now_ms=LATER_MS)
    with kafkalog.open(old.path, read_only=True) as log:
        assert rows_of(log)["plain-0"] == [*old.rows["plain-0"], [end, None, "new"]]
    assert old.findings() == []


def with_version(name: str, magic: bytes) -> Edit:
    """Return an edit that raises the version, behind the magic, in files of a name's ending."""

    def edit(found: str, data: bytes) -> bytes:
        if not found.endswith(name):
            return data
        place = len(magic)
        assert data.startswith(magic) and data[place : place + 3] == b"\0\0\0"
        return data[: place + 3] + bytes([data[place + 3] + 1]) + data[place + 4 :]

    return edit


@pytest.mark.parametrize(
    ("archive", "name", "magic"),
    [
        ("directory-11-numbers", "commit", layout.JOURNAL_MAGIC),
        ("directory-11-numbers", "kl-gaps", layout.GAPS_MAGIC),
        ("store-12-numbers", layout.STORED_LOG, layout.STORED_LOG_MAGIC),
        ("store-12-numbers", ".commit", layout.STORED_COMMIT_MAGIC),
        ("store-12-numbers", ".snapshot", layout.STORED_SNAPSHOT_MAGIC),
        ("store-12-numbers", layout.STORED_BOUNDARY, layout.STORED_BOUNDARY_MAGIC),
        ("store-12-numbers", layout.STORED_SIDE, layout.SIDE_MAGIC),
    ],
)
def test_an_unknown_version_of_a_format_is_refused(
    archive: str, name: str, magic: bytes, tmp_path: Path
) -> None:
    path = next(path for path in ARCHIVES if path.name == f"{archive}.tar.xz")
    log = unpacked(path, tmp_path, with_version(name, magic))
    with (
        pytest.raises((StorageError, CorruptLogError), match=r"version|\(b'kl-sides', 1\)"),
        kafkalog.open(log.path, read_only=True) as opened,
    ):
        rows_of(opened)


def test_a_key_index_of_another_version_is_passed_over(tmp_path: Path) -> None:
    path = next(path for path in ARCHIVES if path.name == "directory-10-numbers-keys-1.tar.xz")
    log = unpacked(path, tmp_path)
    indexes = [*(tmp_path / "log").rglob("*.keys")]
    assert {int.from_bytes(each.read_bytes()[8:12]) for each in indexes} == {1}
    with kafkalog.open(log.path, read_only=True) as opened:
        record = opened.lookup("changes", b"k0", partition=0)
        assert record is not None and record.value.decode() == log.latest()["k0"]
