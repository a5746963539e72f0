"""Producer snapshots: Kafka's bytes, what damage does to them, and which of them counts."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kafkalog.errors import CorruptLogError, StorageError
from kafkalog.storage_engine.fs import files
from kafkalog.storage_engine.transactions.producer_snapshot import (
    latest_snapshot,
    pack_snapshot,
    parse_snapshot,
    read_snapshot,
    snapshot_offsets,
    sweep_snapshots,
    write_snapshot,
)
from kafkalog.storage_engine.transactions.producers import EXPIRATION_MS, ProducerEntry, Producers
from tests.builders.segment_files import producer_snapshot

Fields = tuple[int, int, int, int, int, int, int, int]

GOLDEN = bytes.fromhex(
    "0001"  # version
    "fedf4e50"  # CRC-32C of the rest
    "00000002"  # entries
    # id, epoch, last sequence, last offset, offset delta, timestamp, coordinator, first offset
    "0000000000000001 0002 00000001 0000000000000002 00000003 ffffffffffffffff 00000003"
    "0000000000000064"
    "000000000000000b 000c ffffffff ffffffffffffffff 00000000 000000000001e240 0000000d"
    "ffffffffffffffff"
)
ENTRIES = [
    ProducerEntry(1, 2, 1, 2, 3, -1, 3, 100),
    ProducerEntry(11, 12, -1, -1, 0, 123_456, 13, -1),
]


def fields_of(entry: ProducerEntry) -> Fields:
    return (
        entry.producer_id,
        entry.producer_epoch,
        entry.last_sequence,
        entry.last_offset,
        entry.offset_delta,
        entry.timestamp,
        entry.coordinator_epoch,
        entry.current_txn_first_offset,
    )


def at(directory: Path, offset: int, stage: str = "") -> Path:
    return directory / f"{offset:020d}.snapshot{stage}"


def take(directory: Path, offset: int, producer_id: int = 1) -> None:
    entry = ProducerEntry(producer_id, 0, 0, offset - 1, 0, 1000, -1, -1)
    write_snapshot(directory, Producers([entry], offset))


# --- bytes ---------------------------------------------------------------------------------------


def test_the_bytes_are_kafkas() -> None:
    assert len(GOLDEN) == 10 + 2 * 46
    assert (
        pack_snapshot(ENTRIES) == GOLDEN == producer_snapshot(fields_of(entry) for entry in ENTRIES)
    )
    assert parse_snapshot(GOLDEN, "p") == ENTRIES


def test_no_producers_are_a_snapshot_too() -> None:
    assert pack_snapshot([]) == producer_snapshot([])
    assert len(pack_snapshot([])) == 10
    assert parse_snapshot(producer_snapshot([]), "p") == []


def test_entries_are_written_in_the_order_of_their_ids() -> None:
    assert pack_snapshot(reversed(ENTRIES)) == GOLDEN


def test_entries_are_read_in_any_order() -> None:
    data = producer_snapshot(fields_of(entry) for entry in reversed(ENTRIES))
    assert parse_snapshot(data, "p") == ENTRIES[::-1]


def test_a_producer_without_a_last_batch_has_no_fields_of_one() -> None:
    data = producer_snapshot([(7, 1, 55, -3, 66, 9, 2, -8)])
    assert parse_snapshot(data, "p") == [ProducerEntry(7, 1, -1, -1, 0, 9, 2, -1)]


def test_what_follows_the_entries_is_passed_over_if_the_checksum_covers_it() -> None:
    assert (
        parse_snapshot(producer_snapshot([fields_of(ENTRIES[0])], tail=b"more"), "p") == ENTRIES[:1]
    )


def integers(bits: int, low: int | None = None) -> st.SearchStrategy[int]:
    top = 2 ** (bits - 1)
    return st.integers(-top if low is None else low, top - 1)


ANY_ENTRIES = st.lists(
    st.builds(
        ProducerEntry,
        integers(64, 0),
        integers(16),
        integers(32),
        integers(64, 0),
        integers(32),
        integers(64),
        integers(32),
        integers(64, -1),
    ),
    max_size=5,
    unique_by=lambda entry: entry.producer_id,
)


@given(ANY_ENTRIES)
@settings(max_examples=60, deadline=None)
def test_any_state_survives_its_snapshot(entries: list[ProducerEntry]) -> None:
    entries.sort(key=lambda entry: entry.producer_id)
    data = pack_snapshot(entries)
    assert data == producer_snapshot(fields_of(entry) for entry in entries)
    assert parse_snapshot(data, "p") == entries


# --- damage --------------------------------------------------------------------------------------


def test_a_snapshot_cut_off_at_any_byte_is_corrupt() -> None:
    for size in range(len(GOLDEN)):
        with pytest.raises(CorruptLogError):
            parse_snapshot(GOLDEN[:size], "p")


def test_a_snapshot_with_any_byte_changed_is_corrupt() -> None:
    for place in range(len(GOLDEN)):
        for change in (0x01, 0x80, 0xFF):
            damaged = bytearray(GOLDEN)
            damaged[place] ^= change
            with pytest.raises(CorruptLogError):
                parse_snapshot(damaged, "p")


def test_a_snapshot_with_bytes_after_it_is_corrupt() -> None:
    # A broker that writes a smaller one over a larger one leaves such a file.
    with pytest.raises(CorruptLogError, match="checksum"):
        parse_snapshot(GOLDEN + bytes(46), "p")


def test_zeros_are_not_a_snapshot() -> None:
    for size in (0, 1, 9, 10, 56, 4096):
        with pytest.raises(CorruptLogError):
            parse_snapshot(bytes(size), "p")


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "at byte 0: expected a snapshot of at least 10 bytes, found 0 bytes"),
        (
            producer_snapshot([], version=0),
            "at byte 0: expected snapshot version 1, found version 0",
        ),
        (producer_snapshot([], version=2), "found version 2"),
        (producer_snapshot([], version=-1), "found version -1"),
        (producer_snapshot([], count=1), "at byte 6: expected 0 to 0 entries, found 1"),
        (
            producer_snapshot([(1, 0, 0, 0, 0, 0, 0, 0)], count=2),
            "expected 0 to 1 entries, found 2",
        ),
        (producer_snapshot([], count=-1), "expected 0 to 0 entries, found -1"),
        (producer_snapshot([], count=2**31 - 1), "found 2147483647"),
        (GOLDEN[:2] + bytes(4) + GOLDEN[6:], "expected checksum 0x00000000"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_an_error_says_where_and_what(data: bytes, words: str) -> None:
    with pytest.raises(CorruptLogError) as caught:
        parse_snapshot(data, "3.snapshot")
    assert str(caught.value).startswith("3.snapshot: ")
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_huge_count_allocates_nothing() -> None:
    data = producer_snapshot([], count=2**31 - 1)
    tracemalloc.start()
    try:
        with pytest.raises(CorruptLogError):
            parse_snapshot(data, "p")
        assert tracemalloc.get_traced_memory()[1] < 100_000
    finally:
        tracemalloc.stop()


# --- files ---------------------------------------------------------------------------------------


def test_a_snapshot_bears_the_offset_up_to_which_it_tells(tmp_path: Path) -> None:
    producers = Producers(ENTRIES, 4711)
    write_snapshot(tmp_path, producers)
    assert [path.name for path in tmp_path.iterdir()] == ["00000000000000004711.snapshot"]
    assert at(tmp_path, 4711).read_bytes() == GOLDEN
    assert read_snapshot(tmp_path, 4711) == producers
    assert read_snapshot(tmp_path, 4711).first_unstable_offset() == 100


def test_a_snapshot_is_replaced_as_a_whole(tmp_path: Path) -> None:
    write_snapshot(tmp_path, Producers(ENTRIES, 9))
    write_snapshot(tmp_path, Producers(ENTRIES[:1], 9))
    assert read_snapshot(tmp_path, 9) == Producers(ENTRIES[:1], 9)


def test_a_snapshot_is_synced_before_it_has_its_name_and_its_name_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = []
    for step in ("sync_file", "rename", "sync_directory"):
        real = getattr(files, step)

        def noted(*arguments: object, step: str = step, real: object = real) -> None:
            steps.append((step, at(tmp_path, 5).exists()))
            real(*arguments)

        monkeypatch.setattr(files, step, noted)
    write_snapshot(tmp_path, Producers(ENTRIES, 5))
    assert steps == [("sync_file", False), ("rename", False), ("sync_directory", True)]


def test_a_write_that_died_left_nothing_a_broker_looks_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def die(*_: object) -> None:
        raise OSError("the disk is gone")

    with monkeypatch.context() as patched:
        patched.setattr(files, "rename", die)
        with pytest.raises(OSError, match="the disk is gone"):
            write_snapshot(tmp_path, Producers(ENTRIES, 5))
    assert all(path.name.startswith("kl-") for path in tmp_path.iterdir())
    assert snapshot_offsets(tmp_path) == []
    write_snapshot(tmp_path, Producers(ENTRIES, 5))
    assert [path.name for path in tmp_path.iterdir()] == [at(tmp_path, 5).name]


def test_a_snapshot_that_is_not_there_is_an_error_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=r"0{19}5\.snapshot: .* offset 5 is missing"):
        read_snapshot(tmp_path, 5)


def test_a_damaged_snapshot_is_an_error_that_names_it(tmp_path: Path) -> None:
    at(tmp_path, 5).write_bytes(b"")
    with pytest.raises(CorruptLogError, match=r"0{19}5\.snapshot: at byte 0"):
        read_snapshot(tmp_path, 5)


def test_only_files_of_a_snapshots_name_are_snapshots(tmp_path: Path) -> None:
    for offset in (42, 5, 20):
        take(tmp_path, offset)
    names = ("00000000000000000006.snapshot.deleted", "7.snapshot", "kl-snapshot.tmp")
    for name in (*names, "00000000000000000008.log", "00000000000000000009.snapshot.tmp"):
        (tmp_path / name).write_bytes(GOLDEN)
    assert snapshot_offsets(tmp_path) == [5, 20, 42]


def test_without_files_there_are_no_snapshots(tmp_path: Path) -> None:
    assert snapshot_offsets(tmp_path) == []
    assert latest_snapshot(tmp_path, log_start=7, end=100) == Producers(end_offset=7)


# --- which one counts ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("log_start", "end", "found"),
    [
        (0, 99, 5),
        (0, 5, 5),
        (0, 4, 4),
        (1, 3, 3),
        (2, 3, 3),
        (3, 3, None),
        (5, 99, None),
        (0, 0, None),
    ],
)
def test_the_latest_above_the_log_start_and_not_above_the_end_counts(
    tmp_path: Path, log_start: int, end: int, found: int | None
) -> None:
    for offset in range(1, 6):
        take(tmp_path, offset)
    producers = latest_snapshot(tmp_path, log_start=log_start, end=end)
    assert producers.end_offset == (log_start if found is None else found)
    assert [entry.last_offset for entry in producers.entries.values()] == (
        [] if found is None else [found - 1]
    )
    assert snapshot_offsets(tmp_path) == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("damage", ["empty", "half", "garbage"])
def test_a_damaged_snapshot_is_skipped_and_kept(tmp_path: Path, damage: str) -> None:
    take(tmp_path, 1)
    take(tmp_path, 2)
    whole = at(tmp_path, 2).read_bytes()
    damaged = {"empty": b"", "half": whole[: len(whole) // 2], "garbage": bytes(37) + whole[37:]}
    at(tmp_path, 2).write_bytes(damaged[damage])
    producers = latest_snapshot(tmp_path, log_start=0, end=20)
    assert (producers.end_offset, producers.entries[1].last_offset) == (1, 0)
    assert at(tmp_path, 2).read_bytes() == damaged[damage]
    at(tmp_path, 1).write_bytes(b"")
    assert latest_snapshot(tmp_path, log_start=0, end=20) == Producers(end_offset=0)


def test_one_that_a_broker_removes_meanwhile_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    take(tmp_path, 1)
    take(tmp_path, 2)
    real = files.read_file

    def vanishing(path: Path) -> bytes:
        if path == at(tmp_path, 2):
            path.unlink()
        return real(path)

    monkeypatch.setattr(files, "read_file", vanishing)
    assert latest_snapshot(tmp_path, log_start=0, end=9).end_offset == 1


def test_silent_producers_expire_after_a_reload_and_open_transactions_do_not(
    tmp_path: Path,
) -> None:
    entries = [ProducerEntry(1, 0, 1, 1, 0, 1), ProducerEntry(2, 0, 0, 0, 0, 1, -1, 0)]
    write_snapshot(tmp_path, Producers(entries, 2))
    producers = latest_snapshot(tmp_path, log_start=0, end=2)
    producers.expire(1 + EXPIRATION_MS - 1)
    assert set(producers.entries) == {1, 2}
    producers.expire(1 + EXPIRATION_MS)
    assert set(producers.entries) == {2}
    assert producers.end_offset == 2


# --- strays --------------------------------------------------------------------------------------


def test_strays_are_retired_but_the_one_of_a_clean_shutdown(tmp_path: Path) -> None:
    for offset in (5, 2, 42):
        take(tmp_path, offset)
    assert sweep_snapshots(tmp_path, [5]) == 1
    assert snapshot_offsets(tmp_path) == [5, 42]
    assert at(tmp_path, 2, ".deleted").exists()


def test_strays_below_the_last_base_are_all_retired(tmp_path: Path) -> None:
    for offset in (5, 2, 42):
        take(tmp_path, offset)
    assert sweep_snapshots(tmp_path, {42}) == 2
    assert snapshot_offsets(tmp_path) == [42]


def test_of_several_above_the_last_base_the_latest_stays(tmp_path: Path) -> None:
    for offset in (10, 20, 30, 40):
        take(tmp_path, offset)
    assert sweep_snapshots(tmp_path, {0, 10}) == 2
    assert snapshot_offsets(tmp_path) == [10, 40]


def test_the_snapshot_at_the_end_is_not_a_stray(tmp_path: Path) -> None:
    for offset in (10, 20, 30):
        take(tmp_path, offset)
    assert sweep_snapshots(tmp_path, {0, 30}) == 2
    assert snapshot_offsets(tmp_path) == [30]
    assert sweep_snapshots(tmp_path, {0, 30}) == 0


def test_without_segments_the_latest_stays(tmp_path: Path) -> None:
    assert sweep_snapshots(tmp_path, ()) == 0
    for offset in (1, 2):
        take(tmp_path, offset)
    assert sweep_snapshots(tmp_path, ()) == 1
    assert snapshot_offsets(tmp_path) == [2]


def test_a_damaged_stray_is_retired_like_another(tmp_path: Path) -> None:
    at(tmp_path, 3).write_bytes(b"")
    take(tmp_path, 5)
    assert sweep_snapshots(tmp_path, {5}) == 1
    assert snapshot_offsets(tmp_path) == [5]
