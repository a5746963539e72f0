"""What an earlier process has cut or named, and died over, is durable before others build on it.

Found by review: after a second death the third process found nothing left to cut, and so synced
nothing; a power cut brought back what the first one had left, now among committed records.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kafkalog.cleaner.schedule.partition_cleaner import PartitionCleaner
from kafkalog.cleaner.shelves import shelf_of
from kafkalog.errors import CorruptLogError, LockedByBrokerError, StorageError
from kafkalog.inspection.verify import verify
from kafkalog.storage_engine.directory.directory_log import DirectoryLog
from kafkalog.storage_engine.format import layout
from kafkalog.storage_engine.fs import files
from kafkalog.storage_engine.metadata import new_log
from kafkalog.storage_engine.ownership.adopt import adopt
from kafkalog.storage_engine.ownership.release import release
from kafkalog.storage_engine.segment import partition_directory
from tests.builders.batch_builder import Record, batch_data
from tests.torture.chain import Chain
from tests.torture.repeatable import booted
from tests.torture.rows import abort, commit
from tests.unit.storage_engine.broker_root import RECOVERY_POINT, BrokerRoot

NOW_MS = 1_700_000_000_000
COMPACT = {"*": {"cleanup.policy": "compact"}}
RECORD = r"write commit at (51[2-9]|5[2-9]\d|[6-9]\d\d|\d{4})"
"""The commit point: from byte 512 on the journal has its records."""
Work = Callable[[Path], object]


class Died(BaseException):
    """A process does, right here."""


def die(*_: object, **__: object) -> None:
    raise Died


either = pytest.mark.parametrize("planted", [False, True], ids=["mended", "old"])


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "log"


def log(root: Path, config: dict[str, str], *data: bytes) -> Chain:
    """A log of one topic, of what was imported into it."""
    with booted("boot 0"), DirectoryLog(root) as engine:
        engine.create_topic("t", 1, {"cleanup.policy": "compact", **config}, now_ms=NOW_MS)
        for each in data:
            engine.append_raw("t", 0, each, now_ms=NOW_MS)
    return Chain(root)


def plant(monkeypatch: pytest.MonkeyPatch, planted: bool) -> None:
    if planted:
        monkeypatch.setattr(partition_directory, "sync_truncation", lambda *_: None)


def plain(base: int, epoch: int = 0) -> bytes:
    return batch_data([Record(base, NOW_MS, b"raw", b"v")], leader_epoch=epoch)


def importing(data: bytes) -> Work:
    return lambda root: DirectoryLog(root, create=False).append_raw("t", 0, data, now_ms=NOW_MS)


def append(root: Path) -> None:
    rows = [(b"k%d" % n, b"v") for n in range(10)]
    DirectoryLog(root, create=False).append("t", rows, now_ms=NOW_MS)


def read(root: Path) -> list[tuple[int, bytes]]:
    with booted("boot 1"):
        batches = DirectoryLog(root, create=False).read("t", 0, columns=("offset", "value"))
        return [(row["offset"], row["value"]) for each in batches for row in each.to_pylist()]


# --- the cut of what a commit has left that died --------------------------------------------------


@either
def test_gaps_of_a_dead_import_do_not_come_back(
    root: Path, monkeypatch: pytest.MonkeyPatch, planted: bool
) -> None:
    plant(monkeypatch, planted)
    chain = log(root, {}, plain(0))
    chain.run(importing(plain(6)), [RECORD])
    chain.run(append, ["name t-0/kl-raw-gaps$|name t-0/kl-raw-gaps,", "sync t-0$"])
    chain.run(append)
    chain.power_cut()
    assert [offset for offset, _ in read(root)] == ([0] if planted else [*range(11)])


@either
def test_an_aborted_transaction_of_a_dead_import_does_not_come_back(
    root: Path, monkeypatch: pytest.MonkeyPatch, planted: bool
) -> None:
    """Its producer has committed another one in its place."""
    plant(monkeypatch, planted)
    chain = log(root, {}, plain(0), abort(1, 900, NOW_MS))
    chain.run(importing(abort(3, 7, NOW_MS)), [RECORD])
    again = importing(commit(3, 7, NOW_MS))
    chain.run(again, [r"resize t-0/0+\.txnindex", "sync"])
    chain.run(again)
    chain.power_cut()
    if planted:
        with pytest.raises(CorruptLogError):
            read(root)
    else:
        assert read(root) == [(0, b"v"), (3, b"committed")]


@either
def test_a_leader_epoch_of_a_dead_import_does_not_come_back(
    root: Path, monkeypatch: pytest.MonkeyPatch, planted: bool
) -> None:
    plant(monkeypatch, planted)
    chain = log(root, {}, plain(0))
    chain.run(importing(plain(1, epoch=7)), [RECORD])
    chain.run(append, ["name t-0/leader-epoch-checkpoint,", "sync t-0$"])
    chain.run(append)
    chain.power_cut()
    with booted("boot 1"):
        assert bool(list(verify(root, deep=True))) == planted


def test_segments_of_a_dead_commit_are_not_handed_to_a_broker(root: Path) -> None:
    def releasing(root: Path) -> None:
        release(root, now_ms=NOW_MS)

    def append_much(root: Path) -> None:
        rows = [(b"D%d" % n, b"dead" * 20) for n in range(8)]
        DirectoryLog(root, create=False).append("t", rows, now_ms=NOW_MS, batch_size=150)

    chain = log(root, {"segment.bytes": "400"}, commit(0, 900, NOW_MS))
    chain.run(append_much, [RECORD])
    chain.run(releasing, [r"unname t-0/0+3\.log", "sync"])
    chain.run(releasing, ["unname t-0/kl-canary", "sync t-0$"])
    chain.power_cut()
    with booted("boot 1"):
        release(root, now_ms=NOW_MS)
        adopt(root, config=COMPACT, now_ms=NOW_MS)
    assert read(root) == [(0, b"committed")]


# --- release, adopt -------------------------------------------------------------------------------


def test_a_topic_id_that_a_dead_release_has_written_stays(root: Path) -> None:
    wanted = "AAAAAAAAAAAAAAAAAAAAAQ"

    def releasing(root: Path) -> None:
        release(root, topic_ids={"t": wanted}, now_ms=NOW_MS)

    chain = log(root, {}, commit(0, 900, NOW_MS))
    chain.run(releasing, ["name t-0/partition.metadata,", "sync t-0$"])
    chain.run(releasing, ["name kl-commit.released", "unname t-0/kl-canary", "sync t-0$"])
    chain.power_cut(loses="commit.released at|partition.metadata")
    assert wanted in (root / "t-0" / "partition.metadata").read_text()


def test_a_segment_behind_a_damaged_one_does_not_come_back_behind_the_cut(root: Path) -> None:
    """Retired by a dead adoption; offsets would be missing between the two."""

    def adopting(root: Path) -> None:
        adopt(root, config=COMPACT, now_ms=NOW_MS)

    broker = BrokerRoot(root)
    directory = broker.partition("t-0", bases=(0, 50, 100), end=150)
    broker.checkpoint(RECOVERY_POINT, {"t-0": 0})
    damaged = directory / "00000000000000000050.log"
    data = bytearray(damaged.read_bytes())
    data[len(data) // 2] ^= 0xFF
    damaged.write_bytes(data)
    chain = Chain(root)
    chain.run(adopting, [r"unname t-0/0+100\.timeindex", "sync t-0$"])
    chain.run(adopting, [r"sync t-0/0+50\.log", "."])
    chain.power_cut()
    with booted("boot 1"):
        adopting(root)
    offsets = [offset for offset, _ in read(root)]
    assert offsets == [*range(offsets[0], offsets[-1] + 1)]


def test_the_time_that_a_dead_release_has_set_of_an_empty_segment_is_synced(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kafka's search by time would end there."""
    with DirectoryLog(root) as engine:
        engine.create_topic("t", 1, now_ms=NOW_MS)
        engine.append("t", [(b"a", b"1")], now_ms=NOW_MS)
        with engine.transaction() as transaction:
            transaction.roll("t", 0, NOW_MS)
            transaction.publish(NOW_MS)
    synced, real = [], files.sync_path

    def sync(path: Path) -> None:
        synced.append(path.name)
        real(path)

    with monkeypatch.context() as patch:
        patch.setattr(files, "sync_path", die)
        with pytest.raises(Died):
            release(root, now_ms=NOW_MS)
    monkeypatch.setattr(files, "sync_path", sync)
    release(root, now_ms=NOW_MS)
    assert "00000000000000000001.log" in synced


# --- a new log ------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_linked", [False, True], ids=["as given", "behind a link"])
def test_directories_of_a_log_whose_maker_has_died_are_synced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_linked: bool
) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to("disk/data")
    data = tmp_path / ("link" if is_linked else "disk/data")
    root, real = data / "log", files.sync_directory
    synced = []

    def sync(path: Path) -> None:
        synced.append(path)
        real(path)

    with monkeypatch.context() as patch:
        patch.setattr(files, "sync_directory", die)
        with pytest.raises(Died):
            new_log.create_log(root.resolve())
    assert root.is_dir()
    monkeypatch.setattr(files, "sync_directory", sync)
    DirectoryLog(root)
    assert {tmp_path, tmp_path / "disk", tmp_path / "disk/data"} <= {*map(Path.resolve, synced)}


# --- retention ------------------------------------------------------------------------------------


@pytest.mark.parametrize("ends", [False, True], ids=["of some", "of all"])
def test_retention_does_not_remove_the_segment_that_the_last_synced_record_names(
    root: Path, ends: bool
) -> None:
    """Nobody dies here: a relaxed commit has rolled, or retention itself does."""
    config = {"cleanup.policy": "delete", "segment.bytes": "200", "flush.messages": "100"}
    config["retention.ms"] = "1000" if ends else "-1"

    def retain(root: Path) -> None:
        engine = DirectoryLog(root, create=False)
        if not ends:
            engine.append("t", [(b"k", b"w" * 60)], now_ms=NOW_MS + 2)
        stats = engine.apply_retention(now_ms=NOW_MS + (100_000 if ends else 3))
        assert [each.segments for each in stats] == [1]

    with booted("boot 0"), DirectoryLog(root) as engine:
        engine.create_topic("t", 1, config, now_ms=NOW_MS)
        engine.append("t", [(b"k", b"v" * 60)], now_ms=NOW_MS)
        engine.sync(now_ms=NOW_MS)
        engine.delete_records("t", 0, -1, now_ms=NOW_MS + 1)
    chain = Chain(root)
    chain.run(retain)
    chain.power_cut()
    kept = [] if ends else [1]
    assert [offset for offset, _ in read(root)] == kept
    with booted("boot 1"):
        append(root)
    assert [offset for offset, _ in read(root)] == [*kept, *range(1 + len(kept), 11 + len(kept))]


# --- cleaning -------------------------------------------------------------------------------------


def test_a_swap_leaves_the_segment_that_the_last_synced_record_names(root: Path) -> None:
    """A cleaner may come again as far as it has been, after a broker has cut the log there."""

    def clean(root: Path) -> None:
        engine = DirectoryLog(root, create=False)
        PartitionCleaner(shelf=shelf_of(engine), now_ms=NOW_MS + 1000).clean("t", 0, force=True)

    config = {"cleanup.policy": "compact", "flush.messages": "1000"}
    with booted("boot 0"), DirectoryLog(root) as engine:
        engine.create_topic("t", 1, config, now_ms=NOW_MS)
        rows = [(b"a", b"old" * 60), (b"b", b"v"), (b"a", b"v")]
        engine.append("t", rows, now_ms=NOW_MS)
        engine.sync(now_ms=NOW_MS)
        with engine.transaction() as transaction:
            transaction.change_partition("t", 0, cleaning_offset=3)
            transaction.publish(NOW_MS)
    chain = Chain(root)
    chain.run(clean, ["name t-0/kl-delete-horizon.tmp"])
    chain.power_cut()
    assert [offset for offset, _ in read(root)] == [1, 2]
    with booted("boot 1"):
        append(root)


# --- what cannot be made durable ------------------------------------------------------------------


def append_one(engine: DirectoryLog, topic: str) -> None:
    engine.append(topic, [(b"k", b"v")], now_ms=NOW_MS)


def dies_in_a_commit(engine: DirectoryLog, topic: str) -> None:
    """Leave a partition with records that were not committed, as a dead process does."""
    with pytest.MonkeyPatch.context() as patch, pytest.raises(Died):
        patch.setattr(engine._journal, "append", die)
        append_one(engine, topic)


def test_a_partition_whose_disk_fails_keeps_no_other_from_being_written_to(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def noted() -> int:
        return (root / layout.COMMIT).read_bytes()[layout.JOURNAL_WORKING_POSITION]

    with DirectoryLog(root) as engine:
        for topic in ("bad", "good"):
            engine.create_topic(topic, 1, now_ms=NOW_MS)
    real, is_sick = files.sync_path, True

    def sync(path: Path) -> None:
        if is_sick and path.parent.name == "bad-0":
            raise OSError(5, "Input/output error", str(path))
        real(path)

    with DirectoryLog(root) as engine:
        dies_in_a_commit(engine, "bad")
        monkeypatch.setattr(files, "sync_path", sync)
        assert noted() == 1
        append_one(engine, "good")
        assert noted() == 1, "what the dead one has left in the other is still not durable"
        for _ in range(2):
            with pytest.raises(StorageError, match=r"bad-0/.*index: .*Input/output error"):
                append_one(engine, "bad")
        engine.create_topic("new", 1, now_ms=NOW_MS)
        is_sick = False
        append_one(engine, "bad")
        assert noted() == 0
        is_sick = True
        append_one(engine, "bad")  # of a good commit nothing is to be mended


def test_the_topic_of_a_partition_whose_disk_fails_can_be_deleted(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with DirectoryLog(root) as engine:
        engine.create_topic("bad", 1, now_ms=NOW_MS)
        dies_in_a_commit(engine, "bad")
        with monkeypatch.context() as patch:
            refuse = OSError(5, "Input/output error")

            def sync_truncation(*_: object) -> None:
                raise refuse

            patch.setattr(partition_directory, "sync_truncation", sync_truncation)
            engine.delete_topic("bad", now_ms=NOW_MS)
    assert not DirectoryLog(root, create=False).state().topics


def test_relaxed_commits_are_not_written_again_once_a_sync_of_them_has_succeeded(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also while a partition's disk fails: or every commit would write them all."""
    with DirectoryLog(root) as engine:
        engine.create_topic("bad", 1, now_ms=NOW_MS)
        engine.create_topic("t", 1, {"flush.messages": "1000"}, now_ms=NOW_MS)
        dies_in_a_commit(engine, "bad")
        written, real, write_again = [], files.sync_path, partition_directory.write_again

        def sync(path: Path) -> None:
            if path.parent.name == "bad-0":
                raise OSError(5, "Input/output error", str(path))
            real(path)

        def write(*args: Any) -> None:
            written.append(args)
            write_again(*args)

        monkeypatch.setattr(files, "sync_path", sync)
        monkeypatch.setattr(partition_directory, "write_again", write)
        for _ in range(3):
            append_one(engine, "t")
    assert len(written) == 0


def test_a_missing_directory_whose_commits_wait_for_their_sync_stops_no_other_partition(
    root: Path,
) -> None:
    with DirectoryLog(root) as engine:
        engine.create_topic("good", 1, now_ms=NOW_MS)
        engine.create_topic("t", 1, {"flush.messages": "1000"}, now_ms=NOW_MS)
        append_one(engine, "t")
        shutil.rmtree(root / "t-0")
        with pytest.raises(LockedByBrokerError, match=r"t-0: the directory .*`kafkalog adopt`"):
            append_one(engine, "t")
        append_one(engine, "good")
    adopt(root, config=COMPACT, now_ms=NOW_MS)
    assert set(DirectoryLog(root, create=False).state().topics) == {"good"}


def test_a_failed_sync_where_relaxed_commits_wait_is_not_believed_when_the_next_one_succeeds(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with DirectoryLog(root) as engine:
        engine.create_topic("good", 1, now_ms=NOW_MS)
        engine.create_topic("t", 1, {"flush.messages": "1000"}, now_ms=NOW_MS)
        append_one(engine, "t")
        dies_in_a_commit(engine, "good")
        failed: list[Path] = []
        real = files.sync_directory

        def sync(path: Path) -> None:
            if path.name == "t-0" and not failed:
                failed.append(path)
                raise OSError(5, "Input/output error", str(path))
            real(path)

        monkeypatch.setattr(files, "sync_directory", sync)
        with pytest.raises(StorageError, match="t-0"):
            append_one(engine, "good")
        assert failed
        assert set(engine.state().unsynced) == {("t", 0)}
        append_one(engine, "good")
        assert not engine.state().unsynced
