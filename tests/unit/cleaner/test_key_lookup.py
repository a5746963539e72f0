"""Lookups of single keys, against a dictionary that has read the whole log."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import kafkalog
from kafkalog.cleaner.key_index.key_index import KeyIndexWriter
from kafkalog.cleaner.key_index.key_lookup import KeyLookup, Record
from kafkalog.errors import CorruptLogError
from kafkalog.log import KafkaLog
from kafkalog.storage_engine.format import layout
from kafkalog.storage_engine.fs import files
from kafkalog.storage_engine.place import directory_log_of
from kafkalog.storage_engine.transactions.transaction_index import (
    AbortedTransaction,
    transaction_entry,
)
from tests.builders.log_builder import LogBuilder
from tests.unit.cleaner.transactional_log import Log
from tests.unit.storage_engine.broker_root import BrokerRoot
from tests.unit.storage_engine.faults import Died, each_act

NOW_MS = 1_700_000_000_000
CONFIG = {"cleanup.policy": "compact", "segment.bytes": "4096", "compression.type": "lz4"}


@pytest.fixture
def log(tmp_path: Path) -> Iterator[KafkaLog]:
    """Yield a log of topic `t` with one partition and small segments."""
    with LogBuilder(tmp_path / "log").topic(**CONFIG) as opened:
        yield opened


def put(log: KafkaLog, *pairs: tuple[str, str | None], partition: int = 0) -> None:
    LogBuilder(log).append(*pairs, partition=partition, batch_size=600)


def indexes(log: KafkaLog) -> list[Path]:
    return sorted((log.root / "t-0").glob(f"*{layout.KEYS}"))


def value(record: Record | None) -> str | None:
    return None if record is None or record.value is None else record.value.decode()


def test_many_keys_pass_over_a_damaged_index(log: KafkaLog) -> None:
    put(log, *((f"key-{i}", f"{i}") for i in range(500)))
    LogBuilder(log).clean()
    for path in indexes(log):
        data = bytearray(path.read_bytes())
        data[5000] ^= 1
        path.write_bytes(data)
    with KeyLookup(directory_log_of(log), "t") as lookup:
        found = lookup.get_many(f"key-{i}" for i in range(501))
        assert [value(record) for record in found.values()] == [*map(str, range(500)), None]
        assert lookup.scanned_bytes > 0


def test_a_lost_index_costs_a_scan_and_the_next_cleaning_writes_it_anew(log: KafkaLog) -> None:
    put(log, *((f"key-{i}", "v" * 50) for i in range(100)))
    LogBuilder(log).clean()
    for path in indexes(log):
        path.unlink()
    with KeyLookup(directory_log_of(log), "t") as lookup:
        assert value(lookup.get("key-7")) == "v" * 50
        assert lookup.scanned_bytes > 0
    put(log, ("key-8", "new"))
    LogBuilder(log).clean()
    assert indexes(log)
    with KeyLookup(directory_log_of(log), "t") as lookup:
        assert value(lookup.get("key-8")) == "new"
        assert lookup.scanned_bytes == 0


@pytest.mark.parametrize("place", [0, 8, 16, 30, 60, 120, 4090, 4096, 5000, 8188])
def test_a_damaged_index_is_passed_over(log: KafkaLog, place: int) -> None:
    put(log, *((f"key-{i}", "v") for i in range(30)))
    LogBuilder(log).clean()
    (path,) = indexes(log)
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)
    with KeyLookup(directory_log_of(log), "t") as lookup:
        for number in range(30):
            assert value(lookup.get(f"key-{number}")) == "v"
        assert lookup.scanned_bytes > 0


@pytest.mark.parametrize("size", [0, 100, 4096, 5000])
def test_an_index_that_was_cut_is_passed_over(log: KafkaLog, size: int) -> None:
    put(log, *((f"key-{i}", "v") for i in range(30)))
    LogBuilder(log).clean()
    (path,) = indexes(log)
    path.write_bytes(path.read_bytes()[:size])
    assert value(log.lookup("t", "key-3")) == "v"


def test_another_segments_index_is_passed_over(log: KafkaLog, tmp_path: Path) -> None:
    """As after files were copied by hand: the same base offset and size, other batches."""
    put(log, ("a", "1"), ("b", "1"))
    LogBuilder(log).clean()
    with kafkalog.open(tmp_path / "other") as other:
        other.create_topic("t", 1, CONFIG)
        put(other, ("c", "1"), ("d", "1"))
        LogBuilder(other).clean()
        (foreign,) = indexes(other)
        shutil.copy(foreign, indexes(log)[0])
    assert value(log.lookup("t", "a")) == "1"
    assert log.lookup("t", "c") is None


def test_an_old_index_goes_before_its_segment(log: KafkaLog) -> None:
    put(log, ("secret-key", "1"), ("b", "1"))
    LogBuilder(log).clean()
    before = indexes(log)[0].read_bytes()
    put(log, ("secret-key", None))
    LogBuilder(log).clean()
    LogBuilder(log).clean(now_ms=NOW_MS + 2 * 86_400_000)

    assert indexes(log)[0].read_bytes() != before
    assert log.lookup("t", "secret-key") is None
    assert not list((log.root / "t-0").glob(f"{layout.SPILL}*"))


def test_the_transaction_index_is_read_once_for_many_lookups(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = Log.create(tmp_path / "log", cleanup_policy="compact")
    for segment in range(3):
        log.transact(7, segment, 10 + segment)
        log.commit(7)
        log.transact(7, segment)
        log.abort(7)
        log.roll()
    log.data(99)
    read: list[str] = []
    read_bytes = files.read_file

    def counted(path: Path | str) -> bytes:
        if Path(path).suffix == layout.TRANSACTION_INDEX:
            read.append(Path(path).name)
        return read_bytes(path)

    monkeypatch.setattr(files, "read_file", counted)
    with KeyLookup(log.engine, "t") as lookup:
        for _ in range(4):
            offsets = {
                key: record.offset
                for key in (0, 1, 2, 10, 11, 12)
                if (record := lookup.get(b"%d" % key)) is not None
            }
            assert offsets == {0: 0, 1: 5, 2: 10, 10: 1, 11: 6, 12: 11}
        assert sorted(read) == sorted(set(read))
        assert len(read) == 3


def test_a_transaction_index_that_was_mended_is_read_again(tmp_path: Path) -> None:
    log = Log.create(tmp_path / "log", cleanup_policy="compact")
    log.transact(7, 1)
    log.commit(7)
    log.roll()
    log.data(2)
    path = log.directory / layout.segment_file(0, layout.TRANSACTION_INDEX)
    path.write_bytes(transaction_entry(AbortedTransaction(7, 0, 1)))
    with KeyLookup(log.engine, "t") as lookup:
        for _ in range(2):
            with pytest.raises(CorruptLogError, match="remove these"):
                lookup.get(b"1")
        path.unlink()
        found = lookup.get(b"1")
        assert found is not None
        assert found.offset == 0


def test_a_brokers_directory_is_scanned(tmp_path: Path) -> None:
    broker = BrokerRoot(tmp_path)
    broker.partition("t-0", bases=(0, 50), end=100)
    broker.checkpoint("replication-offset-checkpoint", {"t-0": 100})
    broker.shut_down()
    before = broker.contents()
    with kafkalog.open(tmp_path) as log:
        for number in range(7):
            record = log.lookup("t", f"key-{number}")
            assert record is not None
            assert record.offset == max(o for o in range(100) if o % 7 == number)
        assert log.lookup("t", "key-7") is None
    assert broker.contents() == before


# --- a full disk ---------------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["runs", ".keys"])
def test_a_disk_without_room_for_the_index_has_a_cleaned_log(
    log: KafkaLog, place: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    put(log, *((f"key-{i}", "v" * 50) for i in range(100)))
    put(log, *((f"key-{i}", "new") for i in range(50)))
    monkeypatch.setattr("kafkalog.cleaner.key_index.key_index.RUN_ENTRIES", 16)
    monkeypatch.setattr(KeyIndexWriter.__init__, "__kwdefaults__", {"run_entries": 16})
    limit_disk(monkeypatch, lambda name: name.endswith(place))
    LogBuilder(log).clean()

    assert indexes(log) == []
    assert not list((log.root / "t-0").glob(f"{layout.SPILL}*"))
    with KeyLookup(directory_log_of(log), "t") as lookup:
        assert value(lookup.get("key-7")) == "new"
        assert lookup.scanned_bytes > 0
    told = [record for record in caplog.records if "no key index" in record.message]
    assert len(told) == len(list((log.root / "t-0").glob("*.log"))) - 1
    monkeypatch.undo()
    put(log, ("a", "1"))
    LogBuilder(log).clean()
    assert indexes(log)


def test_the_index_makes_room_for_its_segment(
    log: KafkaLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is derived goes first where the disk has no room for both."""
    put(log, *((f"key-{i}", "v" * 50) for i in range(30)))
    put(log, *((f"key-{i}", "new") for i in range(10)))
    monkeypatch.setattr(KeyIndexWriter.__init__, "__kwdefaults__", {"run_entries": 4})
    runs = log.root / "t-0"
    limit_disk(
        monkeypatch,
        lambda name: (
            name.endswith(".timeindex.cleaned") and any(runs.glob(f"{layout.SPILL}*-runs"))
        ),
    )
    LogBuilder(log).clean()
    assert indexes(log) == []
    assert value(log.lookup("t", "key-7")) == "new"


def limit_disk(monkeypatch: pytest.MonkeyPatch, is_full_for: Callable[[str], bool]) -> None:
    """Let nothing be written to files of these names."""
    write_at, create = files.write_at, files.create

    def fail_for(name: str) -> None:
        if is_full_for(name):
            raise OSError(errno.ENOSPC, "No space left on device")

    def written(fd: int, data: files.Buffer, position: int) -> None:
        fail_for(os.readlink(f"/proc/self/fd/{fd}"))
        write_at(fd, data, position)

    def created(path: Path, data: files.Buffer = b"") -> None:
        if data:
            fail_for(path.name)
        create(path, data)

    monkeypatch.setattr(files, "write_at", written)
    monkeypatch.setattr(files, "create", created)


# --- crashes -------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_cleaning_that_dies_anywhere_leaves_lookups_right(tmp_path: Path) -> None:
    """No index is ever found beside a segment that it is not of, and the next cleaning has all."""
    source = tmp_path / "source"
    table: dict[str, str | None] = {}
    with kafkalog.open(source) as log:
        log.create_topic("t", 1, CONFIG)
        for step, keys in enumerate((range(20), range(0, 20, 3))):
            pairs = [(f"key-{i}", None if i % 7 == 0 else f"{step}" * 60) for i in keys]
            put(log, *pairs)
            table.update(pairs)
            if step == 0:
                LogBuilder(log).clean()
        assert indexes(log)
    for n in range(1, 200):
        root = tmp_path / f"root-{n}"
        shutil.copytree(source, root)

        def work(root: Path = root) -> None:
            with kafkalog.open(root) as log:
                log.clean("t", force=True, now_ms=NOW_MS)

        fired = each_act(work, n, Died())
        with kafkalog.open(root) as log:
            check(log, table)
            assert not any(stats.error for stats in log.clean("t", force=True, now_ms=NOW_MS))
            assert check(log, table) == 0
            assert not list((root / "t-0").glob(f"{layout.SPILL}*"))
        shutil.rmtree(root)
        if not fired:
            break
    assert n > 20


def check(log: KafkaLog, table: dict[str, str | None]) -> int:
    """Look every key up; returns how many bytes were scanned for that."""
    with KeyLookup(directory_log_of(log), "t") as lookup:
        for key, expected in table.items():
            assert value(lookup.get(key)) == expected
        assert lookup.get("nobody") is None
        return lookup.scanned_bytes


def test_records_that_a_restored_backup_replaced_are_read_again(
    log: KafkaLog, tmp_path: Path
) -> None:
    put(log, ("a", "1"))
    log.close()
    backup = shutil.copytree(log.root, tmp_path / "backup")
    with kafkalog.open(log.root) as opened:
        for pair in (("a", "2"), ("b", "2")):
            put(opened, pair)
        lookup = KeyLookup(directory_log_of(opened), "t")
        for _ in range(3):
            assert [value(lookup.get(key)) for key in "abc"] == ["2", "2", None]
    for path in sorted(each for each in backup.rglob("*") if each.is_file()):
        restored = log.root / path.relative_to(backup)
        restored.write_bytes(path.read_bytes())  # the file keeps its inode
    with kafkalog.open(log.root) as opened, lookup:
        for pair in (("c", "3"), ("b", "3"), ("d", "4")):
            put(opened, pair)
        lookup._store = directory_log_of(opened)
        assert [value(lookup.get(key)) for key in "abc"] == ["1", "3", "3"]
