"""The `commit` file: what counts, what is published, what a crash or a power cut leaves."""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from pathlib import Path

import pytest

from kafkalog.errors import CommitInDoubtError, CorruptJournalError, StorageError
from kafkalog.storage_engine.format import layout
from kafkalog.storage_engine.fs import files, host
from kafkalog.storage_engine.metadata import journal as journal_module
from kafkalog.storage_engine.metadata.journal import Journal
from kafkalog.storage_engine.metadata.state import Change, PartitionState
from tests.unit.storage_engine.faults import LyingPages


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / layout.COMMIT
    Journal.create(path)
    return path


def topic_change(name: str = "t", partitions: int = 2) -> Change:
    change = Change()
    change.topic(name, "A" * 22, partitions, {"cleanup.policy": "compact"})
    return change


def partition_change(high_watermark: int) -> dict[str, object]:
    change = Change()
    change.partition("t", 0, PartitionState(high_watermark=high_watermark, active_size=9))
    change.writers["w t"] = [high_watermark, 1, 5]
    return change.record(1000 + high_watermark)


def filled(path: Path, count: int = 3) -> Journal:
    journal = Journal(path)
    journal.recover()
    journal.append(topic_change().record(1))
    for n in range(1, count):
        journal.append(partition_change(n))
    return journal


def high_watermark(journal: Journal) -> int:
    return journal.published().topics["t"].partitions[0].high_watermark


def test_a_new_journal_is_empty(path: Path) -> None:
    assert Journal(path).published().number == 0
    assert Journal(path).is_recovered()


@pytest.mark.parametrize(
    "state",
    [
        PartitionState(high_watermark=2**63),
        PartitionState(high_watermark=-1),
        PartitionState(active_size=-1),
        PartitionState(leader_epoch=-2),
        PartitionState(producer_snapshot=-2),
    ],
)
def test_what_could_not_be_read_again_is_not_written(path: Path, state: PartitionState) -> None:
    journal = filled(path)
    before = path.read_bytes()
    change = Change()
    change.partition("t", 0, state)
    with pytest.raises(ValueError, match="expected numbers"):
        journal.append(change.record(1))
    assert path.read_bytes() == before
    journal.append(partition_change(7))
    assert high_watermark(Journal(path)) == 7


def test_another_process_sees_what_was_appended(path: Path) -> None:
    filled(path)
    reader = Journal(path)
    assert high_watermark(reader) == 2
    assert reader.published().writers["w t"].batch_id == 2


def test_a_reader_follows_record_by_record(path: Path) -> None:
    writer, reader = filled(path), Journal(path)
    before = reader.published()
    assert reader.published() is before
    writer.append(partition_change(7))
    assert high_watermark(reader) == 7
    assert before.topics["t"].partitions[0].high_watermark == 2


def test_a_copy_that_was_put_back_and_went_on_alike_is_read_anew(path: Path) -> None:
    """Its header is the same: a length of as many digits gives a record of the same size."""
    follower = filled(path)
    copy = path.read_bytes()
    writer = Journal(path)
    writer.recover()
    writer.append(partition_change(7))
    assert high_watermark(follower) == 7
    path.unlink()
    path.write_bytes(copy)
    writer = Journal(path)
    writer.recover()
    writer.append(partition_change(8))
    assert high_watermark(follower) == 8
    follower.recover()
    follower.append(partition_change(9))
    assert high_watermark(Journal(path)) == 9


def unpublish(path: Path, published: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(layout.JOURNAL_PUBLISHED_POSITION)
        file.write(published)


def header(path: Path) -> bytes:
    size = layout.JOURNAL_PUBLISHED.size + layout.CHECKSUM.size
    return path.read_bytes()[layout.JOURNAL_PUBLISHED_POSITION :][:size]


def test_a_record_that_was_not_published_is_unseen_until_settled(path: Path) -> None:
    journal = filled(path)
    published = header(path)
    journal.append(partition_change(9))
    unpublish(path, published)
    assert high_watermark(Journal(path)) == 2
    assert not Journal(path).is_recovered()
    assert Journal(path).recover().topics["t"].partitions[0].high_watermark == 9
    assert high_watermark(Journal(path)) == 9
    assert Journal(path).is_recovered()


def test_a_torn_last_record_is_absent_at_every_length(path: Path) -> None:
    journal = filled(path)
    published, start = header(path), journal._replay.end
    journal.append(partition_change(9))
    end = journal._replay.end
    whole = path.read_bytes()
    for cut in range(start, end):
        path.write_bytes(whole[:cut] + bytes(len(whole) - cut))
        unpublish(path, published)
        is_whole = not any(whole[cut:end])
        settled = Journal(path).recover()
        assert settled.topics["t"].partitions[0].high_watermark == (9 if is_whole else 2)
        again = Journal(path)
        again.recover()
        again.append(partition_change(5))
        assert high_watermark(Journal(path)) == 5


def test_a_damaged_published_record_is_an_error_that_names_its_position(path: Path) -> None:
    journal = filled(path)
    data = bytearray(path.read_bytes())
    position = journal._replay.end - 3
    data[position] ^= 1
    path.write_bytes(data)
    with pytest.raises(CorruptJournalError, match=f"{layout.COMMIT}: at byte"):
        Journal(path).published()


def write_byte(path: Path, position: int, value: int) -> None:
    with path.open("r+b") as file:
        file.seek(position)
        file.write(bytes([value]))


def test_every_flipped_byte_is_an_error_or_harmless(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_module, "_READ_TRIES", 2)
    journal = filled(path)
    whole, state = path.read_bytes(), journal.published()
    end = journal._replay.end
    for position in range(end):
        write_byte(path, position, whole[position] ^ 0x40)
        with contextlib.suppress(CorruptJournalError, StorageError):
            assert Journal(path).published() == state, position
        write_byte(path, position, whole[position])


def test_an_unknown_format_version_is_refused(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[11] = 9
    path.write_bytes(data)
    with pytest.raises(StorageError, match="format version is 9, this release of kafkalog reads 1"):
        Journal(path).published()


def test_a_failed_sync_leaves_the_commit_in_doubt_and_the_next_holder_counts_it(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = filled(path)

    def fail(fd: int) -> None:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(files, "sync_data", fail)
        with pytest.raises(CommitInDoubtError, match="in doubt"):
            journal.append(partition_change(9))
    assert high_watermark(journal) == 2
    assert journal.recover().topics["t"].partitions[0].high_watermark == 9


@pytest.mark.parametrize("is_rewritten", [False, True])
def test_a_slow_reader_of_the_same_process_never_takes_the_writer_back(
    path: Path, monkeypatch: pytest.MonkeyPatch, *, is_rewritten: bool
) -> None:
    ours, theirs = filled(path), Journal(path)
    theirs.recover()
    theirs.append(partition_change(3))
    has_read, may_go_on = threading.Event(), threading.Event()
    read = Journal._read

    def slow_read(*args: object) -> object:
        replay = read(*args)
        if threading.current_thread() is reader:
            has_read.set()
            assert may_go_on.wait(120)
        return replay

    monkeypatch.setattr(Journal, "_read", slow_read)
    reader = threading.Thread(target=ours.published)
    reader.start()
    assert has_read.wait(120)
    if is_rewritten:
        theirs.rewrite()
    theirs.append(partition_change(4))
    ours.recover()
    may_go_on.set()
    reader.join()  # and has now stored what was read before record 5
    state = ours.append({**partition_change(5), "partitions": {}})
    assert state.topics["t"].partitions[0].high_watermark == 4
    assert high_watermark(Journal(path)) == 4
    assert high_watermark(ours) == 4


def test_the_name_of_a_file_another_process_put_in_place_is_synced_before_a_commit(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, theirs = filled(path), Journal(path)
    synced: list[Path] = []
    sync = files.sync_directory
    theirs.recover()
    monkeypatch.setattr(files, "sync_directory", lambda path: None)  # killed before it could
    theirs.rewrite()
    monkeypatch.setattr(files, "sync_directory", lambda path: (synced.append(path), sync(path)))
    ours.recover()
    assert synced == [path.parent]
    ours.append(partition_change(3))
    ours.recover()
    assert synced == [path.parent]


def test_work_is_noted_until_a_record_ends_it_also_in_a_rewritten_file(path: Path) -> None:
    journal = filled(path)
    assert journal.begin_work()
    assert not journal.begin_work()
    journal.append(partition_change(3))
    assert not journal.begin_work()
    journal.rewrite()
    assert not journal.begin_work()
    journal.append(partition_change(4), ends_work=True)
    assert journal.begin_work()


def test_a_full_journal_is_rewritten_as_one_snapshot(path: Path) -> None:
    journal = filled(path)
    reader = Journal(path)
    reader.published()
    inode = path.stat().st_ino
    n = 10
    while path.stat().st_ino == inode:
        change = partition_change(n)
        change["writers"] = {f"{'w' * 3000} {number}": [n, 1, 5] for number in range(5)}
        journal.append(change)
        n += 1
    assert n > 50
    assert high_watermark(reader) == n - 1
    assert reader.published() == Journal(path).published()
    assert path.stat().st_size == layout.JOURNAL_SIZE
    assert high_watermark(Journal(path)) == n - 1


def test_a_rewrite_forgets_writers_that_have_long_been_silent(path: Path) -> None:
    journal = filled(path)
    journal.append(
        {"time_ms": 40 * 24 * 3600 * 1000, "writers": {"new t": [1, 1, 40 * 24 * 3600 * 1000]}}
    )
    journal.rewrite()
    assert set(Journal(path).published().writers) == {"new t"}


class TestRelaxed:
    """Records that were acknowledged before they were synced."""

    def test_they_are_seen_while_the_host_runs(self, path: Path) -> None:
        journal = filled(path)
        journal.append(partition_change(9), sync=False)
        assert high_watermark(Journal(path)) == 9
        assert Journal(path).published().unsynced == {("t", 0): (0, 9)}

    def test_a_power_cut_takes_the_log_back_to_the_last_synced_record(
        self, path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        journal = filled(path)
        journal.append(partition_change(8), sync=False)
        journal.append(partition_change(9), sync=False)
        monkeypatch.setattr(host, "boot_id", lambda: "another boot")
        assert high_watermark(Journal(path)) == 2
        assert Journal(path).published().writers["w t"].batch_id == 2
        assert not Journal(path).is_recovered()
        after = Journal(path)
        assert after.recover().topics["t"].partitions[0].high_watermark == 2
        after.append(partition_change(8))  # as long as the record that was lost
        assert high_watermark(Journal(path)) == 8

    def test_a_synced_record_makes_those_before_it_durable(
        self, path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        journal = filled(path)
        journal.append(partition_change(8), sync=False)
        journal.append(partition_change(9))
        assert Journal(path).published().unsynced == {}
        monkeypatch.setattr(host, "boot_id", lambda: "another boot")
        assert high_watermark(Journal(path)) == 9

    def test_a_writer_takes_another_boot_for_a_power_cut_whatever_the_host_is_called(
        self, path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        journal = filled(path)
        journal.append(partition_change(9), sync=False)
        monkeypatch.setattr(host, "boot_id", lambda: "another boot")
        monkeypatch.setattr(host, "host_id", lambda: "a container's new name")
        assert Journal(path).recover().topics["t"].partitions[0].high_watermark == 2
        assert high_watermark(Journal(path)) == 2

    def test_another_host_does_not_mistake_them_for_lost(
        self, path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        journal = filled(path)
        journal.append(partition_change(9), sync=False)
        monkeypatch.setattr(host, "boot_id", lambda: "another boot")
        monkeypatch.setattr(host, "host_id", lambda: "another host")
        assert high_watermark(Journal(path)) == 9

    def test_syncs_that_were_begun_and_not_followed_by_a_record_are_known_to_all(
        self, path: Path
    ) -> None:
        ours, theirs = filled(path), Journal(path)
        ours.append(partition_change(8), sync=False)
        assert ours.begin_syncs()
        theirs.recover()
        assert not theirs.begin_syncs()
        assert not ours.begin_syncs()
        theirs.append(partition_change(9), sync=False)
        ours.recover()
        assert ours.begin_syncs()
        ours.append(partition_change(10))
        assert ours.begin_syncs()


def test_after_a_power_cut_synced_records_past_the_published_end_count(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = filled(path)
    published = header(path)
    journal.append(partition_change(9))
    unpublish(path, published)  # the header is not synced by a commit
    monkeypatch.setattr(host, "boot_id", lambda: "another boot")
    assert high_watermark(Journal(path)) == 9
    assert os.path.exists(path)


def test_relaxed_records_outlive_a_power_cut_after_a_sync_of_theirs_that_failed(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    filled(path)
    before = path.read_bytes()
    disk = LyingPages(monkeypatch, errno.EIO, lambda name: True)
    journal = Journal(path)
    journal.recover()
    for end in (7, 8):
        journal.append(partition_change(end), sync=False)
    with pytest.raises(CommitInDoubtError, match="in doubt"):
        journal.append(partition_change(9))
    assert Journal(path).recover().topics["t"].partitions[0].high_watermark == 9
    start, after = len(before.rstrip(b"\0")), path.read_bytes()
    assert disk.kept(path)[start:] == after.rstrip(b"\0")[start:]
