"""`release`: what a broker finds, after whatever the process died of."""

from __future__ import annotations

import functools
import os
import shutil
import struct
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from kafkalog.errors import (
    CorruptBatchError,
    InvalidInputError,
    LockedByBrokerError,
    UnknownTopicError,
)
from kafkalog.storage_engine.directory.directory_log import DirectoryLog
from kafkalog.storage_engine.fs import files, locks
from kafkalog.storage_engine.metadata import checkpoints
from kafkalog.storage_engine.ownership import release
from kafkalog.storage_engine.ownership.adopt import adopt
from kafkalog.storage_engine.ownership.release import ReleaseReport
from kafkalog.storage_engine.segment import partition_directory
from tests.builders.batch_builder import at_times, joined, marker
from tests.builders.log_builder import LogBuilder
from tests.builders.log_contents import damage
from tests.unit.storage_engine.broker_root import BrokerRoot
from tests.unit.storage_engine.faults import Died, each_act
from tests.unit.storage_engine.raw_log import Model

NOW_MS = 1_700_000_000_000
META = "#\n#Sat Nov 21 06:09:56 UTC 2026\nnode.id=1\ndirectory.id=KNYotSM8TtH2azTN1QdKRg\n"
TOPIC_ID = "fHq_kc1HQBmiynnrtAlnIQ"


def write(root: Path, *, topics: tuple[str, ...] = ("t",), commits: int = 3) -> None:
    log = LogBuilder(root)
    for topic in topics:
        log.topic(topic, 2, segment_bytes=300, index_interval_bytes=50)
        for commit in range(commits):
            rows = [(f"k{n}", f"value {n} of {commit}") for n in range(6)]
            log.append(*rows, now_ms=NOW_MS + commit, batch_size=100)
    log.close()


def give_back(root: Path, **options: object) -> ReleaseReport:
    return release.release(root, now_ms=NOW_MS, **options)


def properties(tmp_path: Path) -> Path:
    path = tmp_path / "meta.properties"
    path.write_text(META)
    return path


def ours(root: Path) -> list[str]:
    found = [str(p.relative_to(root)) for p in root.rglob("*") if p.name.startswith("kl-")]
    return sorted(found)


def content(root: Path) -> dict[str, bytes]:
    """Every file of a directory but the old journal, which has a random number in its header."""
    return {
        str(path.relative_to(root)): path.read_bytes()
        for path in root.rglob("*")
        if path.is_file() and path.name != "kl-commit.released"
    }


def test_a_creation_that_died_gives_a_broker_no_topic_and_no_partition(tmp_path: Path) -> None:
    root = tmp_path / "log"
    write(root)
    topic_id = DirectoryLog(root, read_only=True).state().topic("t").topic_id
    for name, of in (("new-0", TOPIC_ID), ("t-2", topic_id), ("lost-0", TOPIC_ID)):
        partition_directory.create_partition(root / name, of)
    for mark in ("kl-unrecorded", "kl-canary.deleted"):  # a power cut has kept neither
        (root / "lost-0" / mark).unlink()
    assert give_back(root).partitions == 2
    assert sorted(path.name for path in root.iterdir() if path.is_dir()) == ["t-0", "t-1"]
    adopt(root, now_ms=NOW_MS)
    state = DirectoryLog(root, read_only=True).state()
    assert [(name, len(topic.partitions)) for name, topic in state.topics.items()] == [("t", 2)]


def test_a_released_directory_is_a_brokers_and_only_the_old_journal_is_ours(
    tmp_path: Path,
) -> None:
    root = tmp_path / "log"
    write(root)
    report = give_back(root, meta_properties=properties(tmp_path))
    assert not report.released_already
    assert report.has_broker
    assert report.partitions == 2
    assert report.notices == ()
    assert ours(root) == ["kl-commit.released"]
    assert not (root / "commit").exists()
    assert (root / "meta.properties").read_text() == META
    assert (root / ".kafka_cleanshutdown").read_text() == '{"version":0,"brokerEpoch":-1}'


def test_a_second_release_finds_a_brokers_directory(tmp_path: Path) -> None:
    root = tmp_path / "log"
    write(root)
    give_back(root, meta_properties=properties(tmp_path))
    before = content(root)
    assert give_back(root) == ReleaseReport(root, True, 0, True, ())
    assert content(root) == before


def test_without_a_brokers_properties_the_directories_are_to_be_moved(tmp_path: Path) -> None:
    root = tmp_path / "log"
    write(root)
    report = give_back(root)
    assert not report.has_broker
    assert "kafka-storage" in report.notices[0]
    assert give_back(root).notices == report.notices
    assert give_back(root, meta_properties=properties(tmp_path)).has_broker
    assert (root / "meta.properties").read_text() == META


def test_the_root_checkpoints_name_the_end_of_every_partition(tmp_path: Path) -> None:
    root = tmp_path / "log"
    write(root)
    with DirectoryLog(root) as engine:
        ends = {("t", n): end for n, (_, end) in engine.offsets("t").items()}
    assert sum(ends.values()) == 18
    give_back(root)
    for name in ("replication-offset-checkpoint", "recovery-point-offset-checkpoint"):
        assert checkpoints.read_offset_checkpoint(root / name) == ends
    assert checkpoints.read_offset_checkpoint(root / "log-start-offset-checkpoint") == {}


def test_checkpoints_of_partitions_that_are_not_ours_stay(tmp_path: Path) -> None:
    root = tmp_path / "log"
    write(root)
    (root / "__consumer_offsets-7").mkdir()
    for suffix in ("log", "index", "timeindex"):
        (root / f"__consumer_offsets-7/00000000000000000000.{suffix}").touch()
    lines = "0\n2\n__consumer_offsets 7 42\ngone 0 5\n"
    (root / "replication-offset-checkpoint").write_text(lines)
    report = give_back(root)
    found = checkpoints.read_offset_checkpoint(root / "replication-offset-checkpoint")
    assert found["__consumer_offsets", 7] == 42
    assert ("gone", 0) not in found
    # Nobody knows how they were left, so the broker has to look at all of them.
    assert not (root / ".kafka_cleanshutdown").exists()
    assert "__consumer_offsets-7" in report.notices[0]


def test_the_indexes_of_the_active_segment_are_whole_and_trimmed(tmp_path: Path) -> None:
    root = tmp_path / "log"
    write(root)
    give_back(root)
    for directory in (root / "t-0", root / "t-1"):
        logs = sorted(directory.glob("*.log"))
        assert len(logs) > 1
        for log in logs:
            data = log.read_bytes()
            times = log.with_suffix(".timeindex").read_bytes()
            assert log.with_suffix(".index").stat().st_size % 8 == 0
            assert len(times) % 12 == 0
            largest = -1
            position = 0
            while position < len(data):
                length = struct.unpack_from(">i", data, position + 8)[0]
                largest = max(largest, struct.unpack_from(">q", data, position + 35)[0])
                position += 12 + length
            if data:
                assert struct.unpack_from(">q", times, len(times) - 12)[0] == largest


def test_what_was_not_committed_is_cut_off(tmp_path: Path) -> None:
    root = tmp_path / "log"
    write(root)
    active = max((root / "t-0").glob("*.log"))
    size = active.stat().st_size
    with active.open("ab") as file:
        file.write(b"what a dead process left" * 9)
    (root / "t-0" / f"{10**6:020d}.log").write_bytes(b"more of it")
    give_back(root)
    assert active.stat().st_size == size
    assert max((root / "t-0").glob("*.log")) == active


def test_half_a_swap_is_finished(tmp_path: Path) -> None:
    root = tmp_path / "log"
    write(root)
    first, second = sorted((root / "t-0").glob("*.log"))[:2]
    (root / "t-0" / (first.name + ".swap")).write_bytes(first.read_bytes() + second.read_bytes())
    give_back(root)
    assert not list((root / "t-0").glob("*.swap"))
    assert first.exists()
    assert not second.exists()


@pytest.mark.parametrize("how", ["gone", "damaged"])
@pytest.mark.parametrize("appends", [0, 3])
def test_producers_whose_snapshot_is_lost_are_told_from_the_log(
    tmp_path: Path, how: str, appends: int, caplog: pytest.LogCaptureFixture
) -> None:
    root = tmp_path / "broker"
    model = adopted_with_producers(root)
    with DirectoryLog(root) as engine:
        for _ in range(appends):
            engine.append("t", [(b"k", b"ours")], now_ms=NOW_MS)
        state = engine.describe("t").partitions[0]
    lost = root / "t-0" / f"{state.producer_snapshot:020d}.snapshot"
    whole = tmp_path / "whole"
    shutil.copytree(root, whole)
    give_back(whole)
    lost.unlink()
    if how == "damaged":
        lost.write_bytes(b"\0" * 100)
    give_back(root)
    assert [line for line in caplog.messages if str(lost) in line and "rebuilding" in line]
    end = root / "t-0" / f"{model.end + appends:020d}.snapshot"
    entries = struct.iter_unpack(">qhiqiqiq", end.read_bytes()[10:])
    assert {entry[0]: entry[1:] for entry in entries} == model.producers()
    assert end.read_bytes() == (whole / "t-0" / end.name).read_bytes()
    assert lost == end or not lost.exists()
    adopt(root, config={}, now_ms=NOW_MS)
    assert damage(root) == []


def adopted_with_producers(root: Path) -> Model:
    """Make a broker's directory of two segments with producers, and adopt it."""
    broker, model = BrokerRoot(root), Model()
    directory = root / "t-0"
    directory.mkdir()
    batches = [
        at_times(0, (NOW_MS, NOW_MS), 5, 1, 30),
        at_times(2, (NOW_MS,), 6, transactional=True),
        marker(3, 1, 6, timestamp=NOW_MS),
        at_times(4, (NOW_MS,), 7, transactional=True),
        at_times(5, (NOW_MS,), 5, 1, 32),
    ]
    for base, part in ((0, batches[:3]), (4, batches[3:])):
        (directory / f"{base:020d}.log").write_bytes(joined(part))
    (directory / "partition.metadata").write_text(f"version: 0\ntopic_id: {TOPIC_ID}")
    broker.checkpoint("recovery-point-offset-checkpoint", {"t-0": 0})
    model.add(batches)
    adopt(root, config={}, now_ms=NOW_MS)
    return model


def test_a_release_refuses_a_log_that_cannot_tell_of_lost_producers(tmp_path: Path) -> None:
    root = tmp_path / "broker"
    adopted_with_producers(root)
    for snapshot in (root / "t-0").glob("*.snapshot"):
        snapshot.unlink()
    path = root / "t-0" / f"{0:020d}.log"
    sound = path.read_bytes()
    path.write_bytes(b"\xff" * 40 + sound[40:])
    with pytest.raises(CorruptBatchError, match=str(path)):
        give_back(root)
    assert is_ours(root)
    path.write_bytes(sound)
    give_back(root)
    assert not is_ours(root)


def test_a_deleted_topic_gets_the_name_under_which_a_broker_removes_it(tmp_path: Path) -> None:
    root = tmp_path / "log"
    write(root, topics=("t", "gone"))
    shutil.copytree(root / "gone-1", tmp_path / "gone-1")
    with DirectoryLog(root) as engine:
        engine.delete_topic("gone", now_ms=NOW_MS)
    moved = next(root.glob("gone-1.*-delete"))
    shutil.rmtree(moved)
    shutil.move(tmp_path / "gone-1", root / "gone-1")  # as if the process had died before it
    give_back(root)
    assert not (root / "gone-1").exists()
    assert moved.is_dir()
    assert "gone" not in (root / "replication-offset-checkpoint").read_text()


def test_relaxed_commits_are_synced_and_the_old_journal_says_so(tmp_path: Path) -> None:
    root = tmp_path / "log"
    with DirectoryLog(root) as engine:
        engine.create_topic("t", 1, {"flush.messages": "1000"})
        engine.append("t", [(b"k", b"v")], now_ms=NOW_MS)
        assert engine.state().unsynced
        shutil.copytree(root, tmp_path / "copy")
    root = tmp_path / "copy"
    synced: list[str] = []
    sync = files.sync_file

    def note(fd: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{fd}"))
        sync(fd)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "sync_file", note)
        give_back(root)
    assert str(root / "t-0" / f"{0:020d}.log") in synced
    records = (root / "kl-commit.released").read_bytes().rstrip(b"\0")
    assert b'"unsynced"' not in records[records.rindex(b'{"time_ms"') :]


def test_topic_ids_of_the_cluster_replace_ours(tmp_path: Path) -> None:
    root = tmp_path / "log"
    write(root, topics=("t", "other"))
    other = checkpoints.read_topic_id(root / "other-0")
    give_back(root, topic_ids={"t": TOPIC_ID})
    for number in (0, 1):
        text = (root / f"t-{number}" / "partition.metadata").read_text()
        assert text == f"version: 0\ntopic_id: {TOPIC_ID}"
    assert checkpoints.read_topic_id(root / "other-0") == other


@pytest.mark.parametrize("topic_id", ["", "short", "A" * 22, "é" * 22, TOPIC_ID + "A", "+" * 22])
def test_what_is_not_a_topic_id_is_refused(tmp_path: Path, topic_id: str) -> None:
    root = tmp_path / "log"
    write(root)
    with pytest.raises(InvalidInputError, match="topic id of 22 characters"):
        give_back(root, topic_ids={"t": topic_id})
    assert (root / "commit").exists()


def test_an_unknown_topic_is_refused_before_anything_changes(tmp_path: Path) -> None:
    root = tmp_path / "log"
    write(root)
    with pytest.raises(UnknownTopicError):
        give_back(root, topic_ids={"typo": TOPIC_ID})
    assert (root / "commit").exists()
    with DirectoryLog(root) as engine:
        engine.append("t", [(b"k", b"v")])


def test_two_topics_never_get_one_id(tmp_path: Path) -> None:
    root = tmp_path / "log"
    write(root, topics=("t", "u"))
    with DirectoryLog(root) as engine:
        taken = engine.describe("u").topic_id
    before = content(root)
    for ids in ({"t": TOPIC_ID, "u": TOPIC_ID}, {"t": taken}):
        with pytest.raises(InvalidInputError, match="one id"):
            give_back(root, topic_ids=ids)
    assert content(root) == before
    give_back(root, topic_ids={"t": taken, "u": TOPIC_ID})
    assert checkpoints.read_topic_id(root / "t-0") == taken


def test_a_refused_release_keeps_the_properties_it_has(tmp_path: Path) -> None:
    root = tmp_path / "log"
    write(root)
    (root / "kl-meta.properties").write_text("node.id=7\n")
    with pytest.raises(UnknownTopicError):
        give_back(root, topic_ids={"v": TOPIC_ID}, meta_properties=properties(tmp_path))
    assert (root / "kl-meta.properties").read_text() == "node.id=7\n"


def test_a_second_release_gives_no_other_ids_or_properties(tmp_path: Path) -> None:
    root = tmp_path / "log"
    write(root)
    given = {"topic_ids": {"t": TOPIC_ID}, "meta_properties": properties(tmp_path)}
    give_back(root, **given)
    assert give_back(root, **given).released_already
    with pytest.raises(InvalidInputError, match="released already"):
        give_back(root, topic_ids={"t": "A" * 21 + "Q"})
    other = tmp_path / "other"
    other.write_text("node.id=7\n")
    with pytest.raises(InvalidInputError, match="released already"):
        give_back(root, meta_properties=other)


def test_properties_that_are_not_a_brokers_are_refused(tmp_path: Path) -> None:
    root = tmp_path / "log"
    write(root)
    (tmp_path / "other").write_text("a=b\n")
    with pytest.raises(InvalidInputError, match=r"node\.id, found a"):
        give_back(root, meta_properties=tmp_path / "other")
    assert (root / "commit").exists()


@pytest.mark.parametrize("name", ["", "empty"])
def test_a_directory_without_a_log_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(InvalidInputError, match=r"no such directory|no log here"):
        give_back(tmp_path / (name or "missing"))


def test_release_waits_for_who_writes_and_refuses_when_that_takes_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "log"
    write(root)
    held, let_go = threading.Event(), threading.Event()

    def clean() -> None:
        with locks.RootLock(root).shared():
            held.set()
            let_go.wait(120)

    thread = threading.Thread(target=clean)
    thread.start()
    held.wait(120)
    monkeypatch.setattr(release, "LOCK_WAIT_S", 0.1)
    with pytest.raises(LockedByBrokerError, match="writes to it or cleans it"):
        give_back(root)
    assert (root / "commit").exists()
    monkeypatch.setattr(release, "LOCK_WAIT_S", 30.0)
    threading.Timer(0.2, let_go.set).start()
    assert not give_back(root).released_already
    thread.join()


def test_an_engine_that_was_open_can_write_no_more(tmp_path: Path) -> None:
    root = tmp_path / "log"
    write(root)
    engine = DirectoryLog(root)
    give_back(root, meta_properties=properties(tmp_path))
    with pytest.raises(LockedByBrokerError, match="released"):
        engine.append("t", [(b"k", b"v")])
    with pytest.raises(LockedByBrokerError, match="released"):
        engine.offsets("t")
    engine.close()


def test_a_segment_without_batches_does_not_hide_younger_ones(tmp_path: Path) -> None:
    root = tmp_path / "log"
    write(root)
    directory = root / "t-0"
    with DirectoryLog(root) as engine, engine.transaction() as transaction:
        transaction.roll("t", 0, NOW_MS)
        transaction.publish(NOW_MS)
    empty = max(directory.glob("*.log"))
    assert empty.stat().st_size == 0
    give_back(root)
    assert NOW_MS <= empty.stat().st_mtime * 1000 <= NOW_MS + 100


def test_progress_is_told_partition_by_partition(tmp_path: Path) -> None:
    root = tmp_path / "log"
    write(root)
    told: list[tuple[str, int, int]] = []
    give_back(root, progress=lambda *step: told.append(step))
    assert told == [("t-0", 0, 2), ("t-1", 1, 2), ("", 2, 2)]


def is_ours(root: Path) -> bool:
    return (root / "commit").exists()


def can_broker_start(root: Path) -> bool:
    return (root / "meta.properties").exists() and not (root / "kl-owned-by-kafkalog").exists()


@pytest.mark.slow
@pytest.mark.parametrize("was_adopted", [False, True])
def test_a_release_that_died_anywhere_goes_on(tmp_path: Path, was_adopted: bool) -> None:
    original = tmp_path / "original"
    write(original, commits=2)
    with (original / "t-0" / f"{0:020d}.log").open("ab") as file:
        file.write(b"torn")
    meta = None if was_adopted else properties(tmp_path)
    if was_adopted:
        _adopted(original)
    whole = tmp_path / "whole"
    shutil.copytree(original, whole)
    give_back(whole, topic_ids={"t": TOPIC_ID}, meta_properties=meta)
    expected = content(whole)
    number, running = 0, True
    while running:
        number += 1
        root = tmp_path / f"{number}"
        shutil.copytree(original, root)
        running = each_act(_releasing(root, meta), number, Died(), after=True)
        assert not (is_ours(root) and can_broker_start(root))
        was_ours = is_ours(root)
        if was_ours:
            with DirectoryLog(root, read_only=True) as engine:
                assert sum(end for _, end in engine.offsets("t").values()) == 12
        knows_broker = (root / "kl-meta.properties").exists()
        report = give_back(
            root,
            topic_ids={"t": TOPIC_ID} if was_ours else None,
            meta_properties=meta if was_ours and not knows_broker else None,
        )
        assert report.has_broker
        assert content(root) == expected, number
        assert ours(root) == ["kl-commit.released"], number
        shutil.rmtree(root)
    assert number > 30


@pytest.mark.slow
def test_until_commit_is_gone_a_dead_release_leaves_a_log_that_is_written_to(
    tmp_path: Path,
) -> None:
    original = tmp_path / "original"
    write(original, commits=1)
    _adopted(original)
    number, running = 0, True
    while running:
        number += 1
        root = tmp_path / f"{number}"
        shutil.copytree(original, root)
        running = each_act(_releasing(root, None), number, Died(), after=True)
        if is_ours(root):
            with DirectoryLog(root) as engine:
                engine.append("t", [(b"k", b"v")], now_ms=NOW_MS)
                assert sum(end for _, end in engine.offsets("t").values()) == 7
        shutil.rmtree(root)


def _adopted(root: Path) -> None:
    """Make a log look as `adopt` leaves it."""
    (root / "kl-owned-by-kafkalog").mkdir()
    (root / "kl-meta.properties").write_text(META)
    (root / "kl-cleanshutdown").write_text('{"version":0,"brokerEpoch":13}')


def _releasing(root: Path, meta: Path | None) -> Callable[[], None]:
    def work() -> None:
        give_back(root, topic_ids={"t": TOPIC_ID}, meta_properties=meta)

    return work


def test_the_brokers_clean_shutdown_comes_back_as_it_was(tmp_path: Path) -> None:
    root = tmp_path / "log"
    write(root)
    _adopted(root)
    (root / "__consumer_offsets-7").mkdir()
    give_back(root)
    assert (root / ".kafka_cleanshutdown").read_text() == '{"version":0,"brokerEpoch":13}'


# --- a broker with tiered storage ----------------------------------------------------------------

REMOTE = {"t-0": 0, "t-1": 5, "t-2": 50}
"""Where the logs begin in remote storage; in the directory they begin at offset 50."""
EPOCHS = "0\n3\n0 0\n1 20\n2 60\n"


def tiered_of_broker(tmp_path: Path) -> Path:
    broker = BrokerRoot(tmp_path / "log")
    for name in REMOTE:
        directory = broker.partition(name, bases=(50, 70), end=100)
        (directory / "leader-epoch-checkpoint").write_text(EPOCHS)
    broker.checkpoint("log-start-offset-checkpoint", REMOTE)
    (broker.path / "remote-log-index-cache").mkdir()
    broker.shut_down()
    return broker.path


def take(root: Path) -> None:
    adopt(root, now_ms=NOW_MS)


def tiered(tmp_path: Path) -> Path:
    root = tiered_of_broker(tmp_path)
    config = {"t": {"cleanup.policy": "delete", "retention.ms": "-1", "segment.bytes": "300"}}
    adopt(root, config=config, now_ms=NOW_MS)
    return root


def log_starts(root: Path) -> dict[str, int]:
    found = checkpoints.read_offset_checkpoint(root / "log-start-offset-checkpoint")
    return {f"{topic}-{number}": offset for (topic, number), offset in found.items()}


def test_a_tiered_log_keeps_its_start_in_remote_storage_and_its_epochs(tmp_path: Path) -> None:
    root = tiered(tmp_path)
    with DirectoryLog(root) as engine:
        assert [start for start, _ in engine.offsets("t").values()] == [50, 50, 50]
        engine.append("t", [("a", "1"), ("b", "2"), ("c", "3")], now_ms=NOW_MS)
        engine.create_topic("other", 1, now_ms=NOW_MS)
        engine.delete_topic("other", now_ms=NOW_MS)
        engine.apply_retention(now_ms=NOW_MS + 10)
    assert log_starts(root) == REMOTE
    told = [line for line in give_back(root).notices if "remote storage" in line]
    assert [line.partition(":")[0] for line in told] == ["t-0", "t-1"]
    assert all("the broker keeps them" in line for line in told)
    assert log_starts(root) == REMOTE
    for name in ("t-0", "t-1"):
        assert (root / name / "leader-epoch-checkpoint").read_text() == EPOCHS
    assert not (root / "kl-remote-log-starts").exists()
    assert len([n for n in adopt(root, now_ms=NOW_MS).notices if "tiered storage" in n]) == 2
    assert log_starts(root) == REMOTE


@pytest.mark.parametrize("how", ["delete records", "retention", "delete the topic"])
def test_a_tiered_log_that_lost_records_here_says_what_goes_in_remote_storage(
    tmp_path: Path, how: str
) -> None:
    root = tiered(tmp_path)
    with DirectoryLog(root) as engine:
        if how == "delete records":
            for number in range(3):
                engine.delete_records("t", number, 80, now_ms=NOW_MS)
        elif how == "retention":
            engine.alter_topic("t", {"retention.bytes": "1"})
            engine.apply_retention(now_ms=NOW_MS)
        else:
            engine.delete_topic("t", now_ms=NOW_MS)
    told = [line for line in give_back(root).notices if "remote storage" in line]
    if how == "delete the topic":
        assert (told, log_starts(root)) == ([], {})
        return
    begin = 80 if how == "delete records" else 70
    assert set(log_starts(root).values()) == {begin}
    assert all(f"the broker deletes those below {begin}" in line for line in told)
    assert len(told) == 2


def test_a_tiered_log_of_another_topic_id_begins_in_the_directory(tmp_path: Path) -> None:
    root = tiered(tmp_path)
    told = [line for line in give_back(root, topic_ids={"t": TOPIC_ID}).notices if "t-1" in line]
    assert "the broker does not find them by another topic id" in told[0]
    assert set(log_starts(root).values()) == {50}


@pytest.mark.parametrize("act", ["adopt", "release"])
def test_a_tiered_log_keeps_what_remote_storage_needs_whatever_its_process_died_of(
    tmp_path: Path, act: str
) -> None:
    original = tiered_of_broker(tmp_path)
    if act == "release":
        adopt(original, now_ms=NOW_MS)
    number, died = 0, True
    while died:
        root = tmp_path / f"{number}"
        shutil.copytree(original, root)
        work = give_back if act == "release" else take
        died = each_act(functools.partial(work, root), number, Died(), after=True)
        if act == "adopt" and number % 2:
            take(root)
        give_back(root)
        assert log_starts(root) == REMOTE
        for name in ("t-0", "t-1"):
            assert (root / name / "leader-epoch-checkpoint").read_text() == EPOCHS
        shutil.rmtree(root)
        number += 7
