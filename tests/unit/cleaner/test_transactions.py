"""Transactions under the cleaner of a directory: its indexes, deaths, and the slow rules."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from kafkalog.cleaner.schedule.manager import clean
from kafkalog.errors import CorruptLogError
from kafkalog.schema import changelog_schema
from kafkalog.storage_engine.directory.directory_log import DirectoryLog
from tests.unit.cleaner.transactional_log import DAY, Log
from tests.unit.storage_engine.faults import Died, each_act

# --- the index and the markers -------------------------------------------------------------------


@pytest.mark.parametrize("place", ["lost", "invented"])
def test_an_index_that_contradicts_the_markers_destroys_nothing(tmp_path: Path, place: str) -> None:
    log = Log.create(tmp_path)
    log.transact(1, 1)
    log.commit(1)
    log.transact(2, 2)
    log.abort(2)
    log.data(3)
    log.roll()
    (index,) = log.directory.glob("*.txnindex")
    data = bytearray(index.read_bytes())
    if place == "lost":
        index.unlink()
        log.clean()
        assert log.keys() == [1, 3]  # the marker says enough
        return
    data[9:10] = b"\1"  # the producer, whose transaction was committed
    data[17:18], data[25:26] = b"\0", b"\1"
    index.write_bytes(data)
    before = log.batches()
    with pytest.raises(CorruptLogError):
        log.clean()
    assert log.batches() == before


def test_a_marker_that_cannot_be_read_destroys_nothing(tmp_path: Path) -> None:
    """Without the index, nothing says that the later record of key 1 was aborted."""
    log = Log.create(tmp_path)
    log.data(1)
    log.transact(2, 1)
    log.roll()
    log.abort(2)
    log.data(3)
    for index in log.directory.glob("*.txnindex"):
        index.unlink()
    active = max(log.directory.glob("*.log"))
    data = bytearray(active.read_bytes())
    data[70] ^= 1
    active.write_bytes(data)
    before = {path.name: path.read_bytes() for path in log.directory.glob("*.log")}
    with pytest.raises(CorruptLogError, match="checksum"):
        log.clean()
    assert {path.name: path.read_bytes() for path in log.directory.glob("*.log")} == before


# --- a cleaner that dies -------------------------------------------------------------------------


def _committed(engine: DirectoryLog) -> dict[bytes, bytes]:
    """What a reader of committed records has in its table at the end."""
    with engine.snapshot("t", 0) as snapshot:
        found: dict[bytes, bytes] = {}
        for rows in snapshot.read(0, snapshot.state.high_watermark, schema=changelog_schema()):
            found |= zip(rows["key"].to_pylist(), rows["value"].to_pylist(), strict=True)
        return found


@pytest.mark.slow
def test_a_round_cut_short_at_any_durable_act_shows_no_aborted_record(tmp_path: Path) -> None:
    log = Log.create(tmp_path / "log", segment_bytes="150")
    for i in range(2):
        log.transact(1, 1, i)
        log.transact(2, 2, i)
        log.roll()
        log.mark(1, i % 2)
        log.roll()
    log.abort(2)
    log.roll()
    expected = _committed(log.engine)
    assert sorted(expected) == [b"1"]
    n, is_cut_short = 0, True
    while is_cut_short:
        n += 1
        root = tmp_path / str(n)
        shutil.copytree(tmp_path / "log", root)
        engine = DirectoryLog(root)
        is_cut_short = each_act(lambda: clean(engine, now_ms=1), n, Died())  # noqa: B023
        assert _committed(DirectoryLog(root, read_only=True)) == expected, n
        other = DirectoryLog(root)
        for now in (2 + DAY, 3 + DAY):
            other.append("t", [("new", "1")], now_ms=1)
            assert [s.error for s in clean(other, force=True, now_ms=now)] == [None], n
            assert _committed(other) == expected | {b"new": b"1"}, n
        aborted = [path for path in (root / "t-0").glob("*.txnindex") if path.stat().st_size]
        assert aborted == [], n
        shutil.rmtree(root)
    assert n > 20


# --- against the slow cleaner --------------------------------------------------------------------
