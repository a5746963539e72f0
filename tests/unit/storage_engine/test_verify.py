"""What `verify` finds: nothing in a sound log, and each kind of damage where it is."""

from __future__ import annotations

import os
import shutil
import struct
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

import kafkalog
from kafkalog.errors import InvalidInputError, UnknownTopicError
from kafkalog.inspection.finding import Finding
from kafkalog.inspection.verify import log_size, verify
from kafkalog.storage_engine.directory.directory_log import DirectoryLog
from kafkalog.storage_engine.format import compression, layout
from kafkalog.storage_engine.segment import log_scanner
from tests.builders.batch_builder import (
    ABORT,
    COMMIT,
    GZIP,
    BatchBuilder,
    Record,
    at_times,
    batch,
    batch_data,
    empty,
    joined,
    marker,
    section,
)
from tests.builders.log_builder import LogBuilder
from tests.builders.message_builder import message, wrapper
from tests.builders.segment_files import aborted_entry, name, write_segment

NOW_MS = 1_700_000_000_000
SMALL = {"segment.bytes": "4000", "index.interval.bytes": "200"}


def damage(root: Path, **options: bool) -> list[Finding]:
    return [finding for finding in verify(root, **options) if finding.is_damage]


def notices(root: Path) -> list[Finding]:
    return [finding for finding in verify(root) if not finding.is_damage]


def write(root: Path) -> None:
    log = LogBuilder(root).topic("history", 2, policy="delete", **SMALL)
    log.topic("table", compression_type="zstd", **SMALL)
    for commit in range(12):
        pairs = [(f"key-{commit * n % 31}", f"value {n}" * 5) for n in range(40)]
        for topic in ("history", "table"):
            log.to(topic).append(*pairs, now_ms=NOW_MS + 1000 * commit, batch_size=500)
    log.clean(now_ms=NOW_MS + 60_000).append(("a", "b"), now_ms=NOW_MS + 70_000).close()


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("verify") / "log"
    write(root)
    return root


@pytest.fixture
def root(sound: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(sound, tmp_path / "log"))


def test_a_damaged_key_index_is_a_notice(root: Path) -> None:
    assert notices(root) == []
    path = max((root / "table-0").glob("kl-*.keys"), key=lambda path: path.stat().st_size)
    change(path, 5000)
    assert [(found.path, found.position) for found in notices(root)] == [(path, 4096)]
    path.write_bytes(path.read_bytes()[:-1])
    assert [found.path for found in notices(root)] == [path]
    path.write_bytes(b"")
    assert [(found.path, found.position) for found in notices(root)] == [(path, 0)]
    assert damage(root) == []


def change(path: Path, position: int, data: bytes = b"\xa5") -> None:
    content = bytearray(path.read_bytes())
    content[position : position + len(data)] = data
    path.write_bytes(content)


def segment(root: Path, suffix: str = ".log") -> Path:
    """The first segment of the first partition, which is closed."""
    return min((root / "history-0").glob(f"*{suffix}"))


# --- nothing -------------------------------------------------------------------------------------


def test_a_sound_log_has_no_finding(sound: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in sound.rglob("*") if path.is_file()}
    assert list(verify(sound)) == []
    assert list(verify(sound, deep=True)) == []
    assert {p: p.stat().st_mtime_ns for p in sound.rglob("*") if p.is_file()} == before


def test_a_log_just_made_has_no_finding(tmp_path: Path) -> None:
    with kafkalog.open(tmp_path / "log") as log:
        assert list(verify(log.root)) == []
        log.create_topic("t", 3)
        assert list(verify(log.root)) == []


def test_progress_counts_every_byte_of_the_log_files(sound: Path) -> None:
    done: list[int] = []
    assert list(verify(sound, progress=done.append)) == []
    assert sum(done) == log_size(sound)
    done.clear()
    assert list(verify(sound, "table", progress=done.append)) == []
    assert sum(done) == log_size(sound, "table") < log_size(sound)


def test_bytes_that_were_never_committed_are_not_a_finding(root: Path) -> None:
    active = max((root / "history-0").glob("*.log"))
    with active.open("ab") as file:
        file.write(batch(10_000, 3).data[:-1])
    write_segment(root / "history-0", 99_999, [batch(99_999, 3)])
    assert list(verify(root)) == []


@pytest.mark.slow
def test_it_goes_on_while_records_are_appended_and_cleaned(tmp_path: Path) -> None:
    stop = threading.Event()
    with kafkalog.open(tmp_path / "log") as log:
        log.create_topic("t", 1, SMALL)

        commits = 0

        def work() -> None:
            nonlocal commits
            while not stop.is_set():
                log.append("t", [(f"{n % 7}", f"{commits}" * 20) for n in range(50)])
                if commits % 5 == 4:
                    log.clean("t", force=True)
                commits += 1

        thread = threading.Thread(target=work)
        thread.start()
        found = []
        try:
            while commits < 40 and thread.is_alive():
                found += [finding for finding in verify(log.root) if finding.is_damage]
        finally:
            stop.set()
            thread.join()
    assert commits >= 40
    assert found == []


# --- logs ----------------------------------------------------------------------------------------


def test_a_changed_byte_is_found_at_its_batch(root: Path) -> None:
    path = segment(root)
    header_size = 61
    change(path, header_size + 5)
    (found,) = damage(root)
    assert (found.path, found.position) == (path, 0)
    assert "checksum" in found.expected


def test_every_damaged_batch_is_reported(root: Path) -> None:
    path = segment(root)
    positions = []
    data = path.read_bytes()
    position = 0
    while position < len(data):
        positions.append(position)
        (length,) = struct.unpack_from(">i", data, position + 8)
        position += 12 + length
    for position in positions[::2]:
        change(path, position + 65)
    assert [found.position for found in damage(root)] == positions[::2]


def test_no_changed_byte_of_a_log_goes_unnoticed(tmp_path: Path) -> None:
    directory = tmp_path / "t-0"
    directory.mkdir()
    write_segment(directory, 100, [batch(100, 2), batch(102, 2), batch(104, 1)], interval=50)
    (directory / "leader-epoch-checkpoint").write_text("0\n1\n0 100\n")
    assert list(verify(directory)) == []
    path = directory / name(100, ".log")
    sound = path.read_bytes()
    for position in range(len(sound)):
        change(path, position, bytes([sound[position] ^ 0x41]))
        # The last byte of the file's last length may turn its batch into half a one.
        assert list(verify(directory)), position
        path.write_bytes(sound)


def test_offsets_that_do_not_rise_are_found(root: Path) -> None:
    path = segment(root)
    second = 12 + struct.unpack_from(">i", path.read_bytes(), 8)[0]
    change(path, second, struct.pack(">q", 0))
    assert {(found.path, found.position) for found in damage(root)} == {(path, second)}


def test_a_batch_beyond_the_next_segment_is_found(tmp_path: Path) -> None:
    write_segment(tmp_path, 0, [batch(0, 4), batch(4, 8)])
    write_segment(tmp_path, 10, [batch(12, 2)])
    (found,) = damage(tmp_path)
    assert (found.path.name, found.expected) == (name(0, ".log"), "offsets above 3 and below 10")


def test_bytes_that_are_not_a_batch_end_a_segment(root: Path) -> None:
    path = segment(root)
    size = path.stat().st_size
    with path.open("ab") as file:
        file.write(b"\0" * 8 + b"\xff" * 80)
    (found,) = damage(root)
    assert (found.path, found.position) == (path, size)
    assert "88 bytes from there on were not checked" in found.found


@pytest.mark.parametrize("deep", [False, True])
def test_records_are_decoded_when_asked(tmp_path: Path, deep: bool) -> None:
    bad = batch_data([Record(0, 1, b"k", b"v")], payload=b"\x08\x00\x00\x00\x7f")
    good = batch_data([Record(1, 1, b"k", b"v")], base_offset=1)
    worse = batch_data([], payload=b"\x08\x00", count=1, base_offset=2)
    (tmp_path / name(0, ".log")).write_bytes(bad + good + worse)
    positions = [found.position for found in damage(tmp_path, deep=deep)]
    assert positions == ([0, len(bad + good)] if deep else [])


def test_headers_that_cannot_be_are_found(tmp_path: Path) -> None:
    record = Record(0, 1, None, b"v")
    (tmp_path / name(0, ".log")).write_bytes(batch_data([record], attributes=5))
    assert [found.found for found in damage(tmp_path)] == ["codec 5"]
    for count in (-1, 2):
        (tmp_path / name(0, ".log")).write_bytes(batch_data([record], count=count))
        assert [found.found for found in damage(tmp_path)] == [f"a count of {count}"]


@pytest.mark.parametrize("magic", [0, 1])
def test_messages_of_the_old_formats_are_verified(tmp_path: Path, magic: int) -> None:
    inner = [Record(n, NOW_MS + n, b"k", b"v") for n in range(1, 4)]
    data = message(magic, 0, b"a", b"b", timestamp=NOW_MS)
    data += wrapper(magic, GZIP, inner)
    path = tmp_path / name(0, ".log")
    path.write_bytes(data)
    assert damage(tmp_path, deep=True) == []
    change(path, len(data) - 3)
    assert len(damage(tmp_path, deep=True)) == 1


def test_a_large_batch_is_checked_in_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_scanner, "LARGE_SIZE", 5000)
    monkeypatch.setattr(log_scanner, "CHUNK_SIZE", 1000)
    write_segment(tmp_path, 0, [batch(0, 3), batch(3, 1, size=9000), batch(4, 3)], interval=50)
    assert damage(tmp_path, deep=True) == []
    path = tmp_path / name(0, ".log")
    first = len(batch(0, 3).data)
    change(path, first + 8000)
    assert [found.position for found in damage(tmp_path, deep=True)] == [first]


# --- indexes -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("suffix", "size"), [(".index", 8), (".timeindex", 12)])
def test_no_changed_entry_of_an_index_goes_unnoticed(root: Path, suffix: str, size: int) -> None:
    path = segment(root, suffix)
    sound = path.read_bytes()
    assert len(sound) >= 3 * size
    for position in range(len(sound)):
        change(path, position, bytes([sound[position] ^ 0x11]))
        found = damage(root)
        assert {item.path for item in found} == {path}, position
        assert position // size * size in {item.position for item in found}, position
        path.write_bytes(sound)
    path.write_bytes(sound[:-1])
    assert [item.position for item in damage(root)] == [len(sound) - size]


def test_zeros_at_the_end_of_an_index_are_room(root: Path) -> None:
    for suffix in (".index", ".timeindex"):
        path = segment(root, suffix)
        path.write_bytes(path.read_bytes() + bytes(size_of(path) * 100))
    assert list(verify(root)) == []


def size_of(path: Path) -> int:
    return 8 if path.suffix == ".index" else 12


def test_entries_beyond_a_closed_segment_are_found(root: Path) -> None:
    path = segment(root, ".index")
    size = path.stat().st_size
    with path.open("ab") as file:
        file.write(struct.pack(">ii", 5000, 1 << 20))
    (found,) = damage(root)
    assert (found.path, found.position) == (path, size)


def test_many_wrong_entries_are_counted(root: Path) -> None:
    path = segment(root, ".index")
    entries = [(n + 1000, 10 * n + 1) for n in range(1, 60)]
    path.write_bytes(b"".join(struct.pack(">ii", *entry) for entry in entries))
    found = damage(root)
    assert len(found) == 11
    assert found[-1].found == "49 more that it does not"


def test_a_missing_index_is_a_notice(root: Path) -> None:
    for suffix in (".index", ".timeindex"):
        segment(root, suffix).unlink()
    assert damage(root) == []
    assert [found.found for found in notices(root)] == ["no file", "no file"]


# --- transactions, producers, epochs -------------------------------------------------------------


def write_transaction(directory: Path, *, kind: int = ABORT) -> None:
    data = BatchBuilder(transactional=True, producer=(7, 0, 0))
    data.add(b"k", b"v", timestamp=1).add(b"k", b"w", timestamp=1)
    log = joined([data.build(), marker(2, kind, 7, timestamp=2)])
    (directory / name(0, ".log")).write_bytes(log)


def test_an_aborted_transaction_has_its_entry(tmp_path: Path) -> None:
    write_transaction(tmp_path)
    (found,) = damage(tmp_path)
    assert "aborted by producer 7" in found.expected
    (tmp_path / name(0, ".txnindex")).write_bytes(aborted_entry(7, 0, 2, 3))
    assert damage(tmp_path) == []


@pytest.mark.parametrize(
    "wrong",
    [
        aborted_entry(8, 0, 2, 3),
        aborted_entry(7, 1, 2, 3),
        aborted_entry(7, 0, 1, 2),
        aborted_entry(7, 0, 2, 4),
        aborted_entry(7, 0, 2, 3, version=1),
        aborted_entry(7, 0, 2, 3)[:-1],
        aborted_entry(7, 0, 2, 3) + b"x",
        aborted_entry(7, 0, 2, 3) + aborted_entry(7, 0, 1, 2),
    ],
)
def test_a_wrong_entry_of_a_transaction_index_is_found(tmp_path: Path, wrong: bytes) -> None:
    write_transaction(tmp_path)
    (tmp_path / name(0, ".txnindex")).write_bytes(wrong)
    assert damage(tmp_path)
    assert {found.path.name for found in damage(tmp_path)} == {name(0, ".txnindex")}


def test_a_committed_transaction_has_no_entry(tmp_path: Path) -> None:
    write_transaction(tmp_path, kind=COMMIT)
    assert damage(tmp_path) == []
    (tmp_path / name(0, ".txnindex")).write_bytes(aborted_entry(7, 0, 2, 3))
    (found,) = damage(tmp_path)
    assert "COMMIT" in found.found


def test_a_transaction_may_begin_in_an_earlier_segment(tmp_path: Path) -> None:
    data = batch_data([Record(0, 1, b"k", b"v")], attributes=0x10, producer=(7, 0, 0))
    (tmp_path / name(0, ".log")).write_bytes(data)
    (tmp_path / name(1, ".log")).write_bytes(marker(1, ABORT, 7, timestamp=2).data)
    assert [found.path.name for found in damage(tmp_path)] == [name(1, ".txnindex")]
    (tmp_path / name(1, ".txnindex")).write_bytes(aborted_entry(7, 0, 1, 2))
    assert damage(tmp_path) == []


def test_no_changed_byte_of_a_producer_snapshot_goes_unnoticed(tmp_path: Path) -> None:
    from kafkalog.storage_engine.transactions.producer_snapshot import pack_snapshot
    from kafkalog.storage_engine.transactions.producers import ProducerEntry

    write_segment(tmp_path, 0, [batch(0, 9)])
    path = tmp_path / name(9, ".snapshot")
    sound = pack_snapshot([ProducerEntry(7, 0, 3, 8, 0, NOW_MS, -1, -1)])
    path.write_bytes(sound)
    assert damage(tmp_path) == []
    for position in range(len(sound)):
        change(path, position, bytes([sound[position] ^ 0x10]))
        assert [found.path for found in damage(tmp_path)] == [path], position
        path.write_bytes(sound)
    path.rename(tmp_path / name(5, ".snapshot"))
    (found,) = damage(tmp_path)
    assert found.expected == "offsets below 5, the snapshot's"


@pytest.mark.parametrize(
    "epochs",
    ["0\n2\n3 0\n2 5\n", "0\n2\n0 5\n1 5\n", "0\n1\n5 0\n", "1\n0\n"],
)
def test_leader_epochs_rise_and_are_those_of_the_batches(root: Path, epochs: str) -> None:
    (root / "history-1" / "leader-epoch-checkpoint").write_text(epochs)
    assert {found.path.parent for found in damage(root)} == {root / "history-1"}


def test_leader_epochs_of_a_commit_that_died_are_not_damage(root: Path) -> None:
    (root / "history-1" / "leader-epoch-checkpoint").write_text("0\n3\n0 0\n9 9999\n7 10000\n")
    assert damage(root) == []


def test_a_leader_epoch_replaced_by_a_lower_one_is_not_damage(tmp_path: Path) -> None:
    engine = DirectoryLog(tmp_path)
    engine.create_topic("t")
    for steps in ([(0, 2), (1, 5), (2, 6)], [(3, 3), (4, 3)]):
        engine.append_raw("t", 0, joined(at_times(base, leader_epoch=n) for base, n in steps))
    assert damage(tmp_path) == []
    epoch = len(at_times(0).data) + 12  # of the second batch; no checksum covers it
    change(tmp_path / "t-0" / name(0, ".log"), epoch, (1).to_bytes(4, "big"))
    assert len(damage(tmp_path)) == 1


# --- the journal and the other files -------------------------------------------------------------


def truncated(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 10)


@pytest.mark.parametrize(
    ("harm", "where"),
    [
        (lambda root: truncated(max((root / "history-0").glob("*.log"))), "history-0"),
        (lambda root: max((root / "history-0").glob("*.log")).unlink(), "history-0"),
        (lambda root: segment(root).unlink(), "history-0"),
        (lambda root: shutil.rmtree(root / "history-1"), "history-1"),
        (lambda root: (root / "history-1" / "partition.metadata").unlink(), "history-1"),
        (
            lambda root: (root / "history-1" / "partition.metadata").write_text(
                "version: 0\ntopic_id: AAAAAAAAAAAAAAAAAAAAAA"
            ),
            "history-1",
        ),
        (
            lambda root: (root / "recovery-point-offset-checkpoint").write_text(
                "0\n1\nhistory 0 99999\n"
            ),
            "recovery-point-offset-checkpoint",
        ),
        (
            lambda root: (root / "cleaner-offset-checkpoint").write_text("0\n2\ntable 0 1\n"),
            "cleaner-offset-checkpoint",
        ),
        (lambda root: change(root / "commit", 600), "commit"),
        (lambda root: os.truncate(root / "commit", 300), "commit"),
    ],
)
def test_what_contradicts_the_journal_is_found(
    root: Path, harm: Callable[[Path], object], where: str
) -> None:
    harm(root)
    found = [item.path.relative_to(root).parts[0] for item in damage(root)]
    assert where in found
    # Where a log has lost its end, the checkpoints contradict it too.
    assert {part for part in found if not part.endswith("-checkpoint")} <= {where}, found


def test_a_lost_end_is_found_though_every_batch_is_sound(root: Path) -> None:
    active = max((root / "table-0").glob("*.log"))
    size = active.stat().st_size
    other = batch(0, 1, size=500).data
    assert len(other) > size
    write_segment(root / "table-0", int(active.stem), [batch(int(active.stem), 1, size=1)])
    data = active.read_bytes()
    active.write_bytes(data.ljust(size, b"\0"))
    assert damage(root)


def test_foreign_files_and_leftovers_are_notices(root: Path) -> None:
    (root / "notes.txt").write_text("x")
    (root / "lost+found").mkdir()
    (root / "history-0" / "core").write_text("x")
    (root / "history-0" / name(77, ".index")).write_bytes(b"")
    shutil.copytree(root / "table-0", root / "unknown-3")
    assert damage(root) == []
    assert {found.path.name for found in notices(root)} == {
        *("notes.txt", "lost+found", "core", name(77, ".index"), "unknown-3")
    }


def test_what_is_left_of_a_deleted_topic_is_a_notice_until_it_has_its_own_name(root: Path) -> None:
    before = notices(root)
    with DirectoryLog(root).transaction() as transaction:  # of a process that dies then
        transaction.delete_topic("table", 10**14)
        transaction.publish(10**14)
    (left,) = set(notices(root)) - set(before)
    assert (left.path, left.found) == (root / "table-0", "what is left of one that was deleted")
    assert damage(root) == []
    DirectoryLog(root)  # moves it away, to be removed later
    assert list(root.glob("table-0.*-delete"))
    assert notices(root) == before


def test_a_deleted_partition_that_nobody_will_remove_is_a_notice(root: Path) -> None:
    stray = root / f"old-0.{'a' * 32}-delete"
    stray.mkdir()
    (found,) = [finding for finding in notices(root) if finding.path == stray]
    assert "set aside" in found.found


def test_a_broker_that_has_loaded_a_log_of_ours_is_noticed(root: Path) -> None:
    (root / "table-0" / "kl-canary.deleted").unlink()
    (root / "meta.properties").write_text("version=1\nnode.id=1\n")
    assert damage(root) == []
    (found,) = notices(root)
    assert "kafkalog adopt" in found.found


def test_one_topic_alone_is_verified(root: Path) -> None:
    change(segment(root), 70)
    assert list(verify(root, "table")) == []
    assert len(list(verify(root, "history"))) == 1
    with pytest.raises(UnknownTopicError, match="history, table"):
        list(verify(root, "tabel"))


def test_a_directory_without_a_log_is_the_callers_fault(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "missing"):
        with pytest.raises(InvalidInputError, match=path.name):
            list(verify(path))


# --- a broker's directory ------------------------------------------------------------------------


def broker(tmp_path: Path, *, clean: bool) -> Path:
    """A directory as a broker leaves it, with its recovery point at offset 8."""
    root = tmp_path / "broker"
    directory = root / "t-0"
    directory.mkdir(parents=True)
    write_segment(directory, 0, [batch(0, 4), batch(4, 4)], interval=50)
    write_segment(directory, 8, [batch(8, 4), empty(12, 13), batch(14, 4)], interval=50)
    (directory / "leader-epoch-checkpoint").write_text("0\n1\n0 0\n")
    (directory / "partition.metadata").write_text("version: 0\ntopic_id: " + "A" * 21 + "Q")
    (root / "meta.properties").write_text("version=1\n")
    for checkpoint, offset in (("recovery-point", 8), ("replication", 17)):
        (root / f"{checkpoint}-offset-checkpoint").write_text(f"0\n1\nt 0 {offset}\n")
    if clean:
        (root / ".kafka_cleanshutdown").write_text('{"version":0,"brokerEpoch":1}')
    return root


@pytest.mark.parametrize("clean", [True, False])
def test_a_brokers_directory_is_verified(tmp_path: Path, clean: bool) -> None:
    root = broker(tmp_path, clean=clean)
    assert list(verify(root, deep=True)) == []
    assert not list(root.rglob("kl-*")), "nothing is written into it"
    change(root / "t-0" / name(0, ".log"), 70)
    assert len(damage(root)) == 1


@pytest.mark.parametrize("topic_id", ["A" * 22, "short", "+" * 22, "A" * 21 + "R"])
def test_an_id_that_kafka_gives_no_topic_is_damage(tmp_path: Path, topic_id: str) -> None:
    root = broker(tmp_path, clean=True)
    (root / "t-0" / "partition.metadata").write_text(f"version: 0\ntopic_id: {topic_id}")
    assert [found.found for found in damage(root)] == [topic_id]


def test_what_the_next_start_of_a_killed_broker_mends_is_a_notice(tmp_path: Path) -> None:
    root = broker(tmp_path, clean=False)
    with (root / "t-0" / name(8, ".log")).open("ab") as file:
        file.write(batch(18, 4).data[:-5])
    change(root / "t-0" / name(8, ".index"), 3)
    change(root / "t-0" / name(8, ".timeindex"), 3)
    assert damage(root) == []
    assert {found.path.name for found in notices(root)} == {
        *(name(8, ".log"), name(8, ".index"), name(8, ".timeindex"))
    }
    change(root / "t-0" / name(0, ".index"), 3)
    assert [found.path.name for found in damage(root)] == [name(0, ".index")]


def test_a_checkpoint_beyond_the_log_is_damage(tmp_path: Path) -> None:
    root = broker(tmp_path, clean=True)
    (root / "log-start-offset-checkpoint").write_text("0\n1\nt 0 99\n")
    (found,) = damage(root)
    assert found.path.name == "log-start-offset-checkpoint"


def test_a_partition_alone_is_verified(tmp_path: Path) -> None:
    directory = broker(tmp_path, clean=True) / "t-0"
    assert list(verify(directory)) == []
    change(directory / name(8, ".log"), 70)
    assert len(damage(directory)) == 1


@pytest.mark.parametrize("suffix", [".index", ".timeindex"])
def test_half_an_index_entry_is_damage_but_in_the_active_segment(root: Path, suffix: str) -> None:
    closed = segment(root, suffix)
    active = max((root / "history-0").glob(f"*{suffix}"))
    for path in (closed, active):
        path.write_bytes(path.read_bytes()[:-3] if path == closed else b"\0" * 5)
    (found,) = damage(root)
    assert found.path == closed
    assert "bytes at the end" in found.found
    assert [finding.path for finding in notices(root)] == [active]


@pytest.mark.slow
def test_a_batch_that_decompresses_to_more_than_we_read_is_a_notice(tmp_path: Path) -> None:
    item = Record(0, 1, b"k", bytes(compression.SIZE_MAX))
    payload = compression.compress(layout.CODEC_ZSTD, section([item], 0, 1))
    data = batch_data([item], attributes=layout.CODEC_ZSTD, payload=payload)
    (tmp_path / name(0, ".log")).write_bytes(data)
    found = [one for one in verify(tmp_path, deep=True) if "decompressed" in one.expected]
    assert [one.is_damage for one in found] == [False]
