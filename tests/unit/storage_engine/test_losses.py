"""Records that are gone from a broker's directory: verify, read and adopt say so alike.

What a broker itself takes away, or never wrote, is no loss.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path

import pytest

import kafkalog
from kafkalog.errors import DataLossError, StorageError
from kafkalog.inspection.finding import Finding
from kafkalog.inspection.verify import verify
from kafkalog.storage_engine.ownership.adopt import adopt
from kafkalog.storage_engine.transactions.producer_snapshot import pack_snapshot
from kafkalog.storage_engine.transactions.producers import ProducerEntry
from tests.builders.batch_builder import COMMIT, batch, marker
from tests.builders.log_contents import records
from tests.builders.segment_files import name, write_segment
from tests.unit.datasource.logs import read_batch
from tests.unit.storage_engine.broker_root import (
    CLEANER,
    HIGH_WATERMARK,
    LOG_START,
    RECOVERY_POINT,
    BrokerRoot,
)

NOW_MS = 1_800_000_000_000
BASES = (0, 30, 60, 90)
END = 100
SUFFIXES = (".log", ".index", ".timeindex")


@pytest.fixture
def root(tmp_path: Path) -> BrokerRoot:
    """A broker that was shut down, with one partition of four segments."""
    found = BrokerRoot(tmp_path / "log")
    found.partition("t-0", BASES, END)
    found.checkpoint(RECOVERY_POINT, {"t-0": END})
    found.checkpoint(HIGH_WATERMARK, {"t-0": END})
    found.shut_down()
    return found


def damage(root: Path) -> list[Finding]:
    return [finding for finding in verify(root, deep=True) if finding.is_damage]


def remove(root: BrokerRoot, base: int, *suffixes: str) -> None:
    for suffix in suffixes or SUFFIXES:
        (root.path / "t-0" / name(base, suffix)).unlink()


def remove_all_logs(root: BrokerRoot, *suffixes: str) -> None:
    for base in BASES:
        remove(root, base, *suffixes)


def forget_root(root: BrokerRoot) -> None:
    """Leave the partition alone, as it is rescued from a disk."""
    for path in root.path.iterdir():
        if path.is_file():
            path.unlink()


def cut(root: BrokerRoot, base: int, change: Callable[[bytes], bytes]) -> None:
    path = root.path / "t-0" / name(base, ".log")
    path.write_bytes(change(path.read_bytes()))


def empty(root: BrokerRoot, base: int) -> None:
    cut(root, base, lambda data: b"")


LOSSES: dict[str, tuple[Callable[[BrokerRoot], object], tuple[int, int]]] = {
    "every .log": (lambda root: remove_all_logs(root, ".log"), (0, 100)),
    "every file of the segments": (remove_all_logs, (0, 100)),
    "the first .log": (lambda root: remove(root, 0, ".log"), (0, 30)),
    "the first segment": (lambda root: remove(root, 0), (0, 30)),
    "a middle .log": (lambda root: remove(root, 30, ".log"), (30, 60)),
    "a middle segment": (lambda root: remove(root, 60), (60, 90)),
    "two segments": (lambda root: [remove(root, 30), remove(root, 60)], (30, 90)),
    "the bytes of the first .log": (lambda root: empty(root, 0), (0, 30)),
    "the bytes of a middle .log": (lambda root: empty(root, 60), (60, 90)),
    "the bytes of the last .log": (lambda root: empty(root, 90), (90, 100)),
    "the last .log": (lambda root: remove(root, 90, ".log"), (90, 100)),
    "the last segment": (lambda root: remove(root, 90), (90, 100)),
    "the last batch of a .log": (
        lambda root: cut(root, 0, lambda data: data[: -len(data) // 3]),
        (20, 30),
    ),
    "the end of a .log": (lambda root: cut(root, 60, lambda data: data[:-5]), (80, 90)),
}


@pytest.mark.parametrize("case", LOSSES)
def test_lost_records_are_damage_an_error_of_a_read_and_no_adoption(
    root: BrokerRoot, case: str
) -> None:
    harm, (start, end) = LOSSES[case]
    harm(root)
    before = root.contents()
    text = " ".join(f"{finding.expected} {finding.found}" for finding in damage(root.path))
    assert f"{start} to " in text or "lost" in text
    log = kafkalog.open(root.path)
    assert log.offsets("t") == {0: (0, END)}
    with pytest.raises(StorageError, match=f"the offsets {start} to .* are lost"):
        records(log, "t")
    kept = [*range(start), *range(end, END)]
    found = [*log.read("t", 0, 0, start), *log.read("t", 0, end, END)]
    assert [offset for each in found for offset in each.column("offset").to_pylist()] == kept
    with pytest.raises(StorageError, match=r"lost .*nothing was changed\. Restore it"):
        adopt(root.path, now_ms=NOW_MS)
    assert root.contents() == before


@pytest.mark.parametrize("case", ["the first .log", "the first segment", "a middle .log"])
def test_losses_show_in_a_rescued_partition_alone(root: BrokerRoot, case: str) -> None:
    LOSSES[case][0](root)
    forget_root(root)
    assert damage(root.path)
    assert damage(root.path / "t-0")
    with pytest.raises(StorageError, match="are lost"):
        records(kafkalog.open(root.path), "t")


def test_what_a_compaction_took_below_a_lost_segment_is_not_lost(root: BrokerRoot) -> None:
    remove(root, 60)
    root.checkpoint(CLEANER, {"t-0": 90})
    assert damage(root.path) == []
    remove(root, 90, ".log")
    assert [finding.path.name for finding in damage(root.path)] == [name(90, ".log")]
    log = kafkalog.open(root.path)
    found = [offset for each in log.read("t", 0, 0, 90) for offset in each.column("offset")]
    assert [offset.as_py() for offset in found] == [*range(60)]
    with pytest.raises(StorageError, match="the offsets 90 to 99 are lost"):
        records(log, "t")


@pytest.mark.parametrize("base", [0, 30, 60])
@pytest.mark.parametrize("is_rescued", [False, True])
def test_an_emptied_log_is_a_loss_though_compactions_make_holes(
    root: BrokerRoot, base: int, is_rescued: bool
) -> None:
    root.checkpoint(CLEANER, {"t-0": 90})
    empty(root, base)
    if is_rescued:
        forget_root(root)
    assert name(base, ".log") in {finding.path.name for finding in damage(root.path)}
    with pytest.raises(StorageError, match=f"the offsets {base} to {base + 29} are lost"):
        records(kafkalog.open(root.path), "t")
    with pytest.raises(StorageError, match=r"lost .*nothing was changed"):
        adopt(root.path, now_ms=NOW_MS)


@pytest.mark.parametrize("base", [0, 30, 60])
@pytest.mark.parametrize("tail", ["half a batch", "zeros"])
@pytest.mark.parametrize("is_rescued", [False, True])
def test_a_torn_segment_is_damage_unless_it_is_the_last(
    root: BrokerRoot, base: int, tail: str, is_rescued: bool
) -> None:
    root.checkpoint(CLEANER, {"t-0": 90})
    root.checkpoint(RECOVERY_POINT, {"t-0": 10})
    (root.path / ".kafka_cleanshutdown").unlink()
    if is_rescued:
        forget_root(root)
    for each, is_damage in ((90, False), (base, True)):
        path = root.path / "t-0" / name(each, ".log")
        data = path.read_bytes()
        path.write_bytes(data + (data[:50] if tail == "half a batch" else bytes(200)))
        found = [finding for finding in verify(root.path) if finding.path == path]
        assert [finding.is_damage for finding in found] == [is_damage]


@pytest.mark.parametrize("suffixes", [(".log",), (".log", ".timeindex")])
def test_an_index_alone_shows_that_no_power_cut_took_its_segment(
    root: BrokerRoot, suffixes: tuple[str, ...]
) -> None:
    (root.path / ".kafka_cleanshutdown").unlink()
    root.checkpoint(RECOVERY_POINT, {"t-0": 90})
    remove(root, 90, *suffixes)
    (root.path / "t-0" / name(90, ".index")).write_bytes(bytes(4096))  # preallocated
    assert name(90, ".log") in {finding.path.name for finding in damage(root.path)}
    with pytest.raises(StorageError, match="the offsets 90 to 99 are lost"):
        records(kafkalog.open(root.path), "t")
    with pytest.raises(StorageError, match=r"lost .*nothing was changed"):
        adopt(root.path, now_ms=NOW_MS)


@pytest.mark.parametrize("keep, told", [(-5, "from byte 628 on"), (1, "from byte 0 on")])
def test_a_loss_within_a_file_names_the_byte(root: BrokerRoot, keep: int, told: str) -> None:
    cut(root, 60, lambda data: data[:keep])
    with pytest.raises(StorageError, match=f"expected batches up to offset 89, found none {told}"):
        records(kafkalog.open(root.path), "t")


def test_a_lost_marker_of_a_transaction_hides_no_loss(tmp_path: Path) -> None:
    root = BrokerRoot(tmp_path / "log")
    directory = root.partition("t-0", (0,), 10)
    write_segment(directory, 10, [batch(10, 5, of=7), batch(15, 5)])
    write_segment(directory, 20, [marker(20, COMMIT, 7, timestamp=NOW_MS)])
    (directory / name(10, ".snapshot")).write_bytes(pack_snapshot([]))
    root.checkpoint(RECOVERY_POINT, {"t-0": 21})
    root.shut_down()
    assert len(records(kafkalog.open(root.path), "t")) == 20
    (directory / name(20, ".log")).unlink()
    log = kafkalog.open(root.path)
    with pytest.raises(StorageError, match="the offsets 20 to 20 are lost"):
        records(log, "t")
    assert sum(each.num_rows for each in log.read("t", 0, 0, 20)) == 10
    with pytest.raises(DataLossError, match="the offsets 20 to 20 are lost"):
        read_batch(root.path, subscribe="t")
    assert len(read_batch(root.path, subscribe="t", failOnDataLoss="false")) == 10


@pytest.mark.parametrize("current, lost", [(-1, True), (15, True), (10, False)])
def test_a_marker_that_a_snapshot_has_counted_is_lost(
    tmp_path: Path, current: int, lost: bool
) -> None:
    root = BrokerRoot(tmp_path / "log")
    directory = root.partition("t-0", (0,), 10)
    write_segment(directory, 10, [batch(10, 5, of=7), batch(15, 5, of=7)])
    entry = ProducerEntry(7, 0, current_txn_first_offset=current, timestamp=NOW_MS)
    (directory / name(20, ".snapshot")).write_bytes(pack_snapshot([entry]))
    root.checkpoint(RECOVERY_POINT, {"t-0": 20})
    root.checkpoint(CLEANER, {"t-0": 20})
    root.shut_down()
    (finding,) = verify(root.path, deep=True)
    assert finding.is_damage == lost
    wanted = "producer 7 from offset 10 on, which the snapshot of offset 20 has as ended"
    assert (wanted in finding.expected) == lost
    assert ("is open from offset 10 on" in finding.found) != lost


def test_spark_passes_a_loss_over_only_when_it_is_told_to(root: BrokerRoot) -> None:
    remove(root, 30, ".log")
    with pytest.raises(DataLossError, match="the records of the offsets 30 to 59 are lost"):
        read_batch(root.path, subscribe="t")
    remove(root, 0, ".log")
    remove(root, 90, ".log")
    rows = read_batch(root.path, subscribe="t", failOnDataLoss="false")
    assert [row["offset"] for row in rows] == [*range(60, 90)]


def test_a_killed_brokers_log_below_its_recovery_point_is_a_loss(root: BrokerRoot) -> None:
    (root.path / ".kafka_cleanshutdown").unlink()
    root.checkpoint(RECOVERY_POINT, {"t-0": 95})
    remove(root, 90)
    assert damage(root.path)
    with pytest.raises(StorageError, match="nothing was changed"):
        adopt(root.path, now_ms=NOW_MS)


def test_what_a_power_cut_took_is_told_and_does_not_stop_an_adoption(root: BrokerRoot) -> None:
    (root.path / ".kafka_cleanshutdown").unlink()
    root.checkpoint(RECOVERY_POINT, {"t-0": 90})
    remove(root, 90)
    assert damage(root.path)
    report = adopt(root.path, now_ms=NOW_MS)
    assert any("the records of the offsets 90 to 99 are lost" in line for line in report.damage)


# --- what is no loss -----------------------------------------------------------------------------


def emptied(root: BrokerRoot) -> None:
    """Let retention take everything."""
    remove_all_logs(root)
    write_segment(root.path / "t-0", END, [])
    (root.path / "t-0" / "leader-epoch-checkpoint").write_text(f"0\n1\n0 {END}\n")


def retained(root: BrokerRoot) -> None:
    remove(root, 0)
    (root.path / "t-0" / "leader-epoch-checkpoint").write_text("0\n1\n0 30\n")


def half_deleted(root: BrokerRoot) -> None:
    """The broker was killed after it had renamed the first file of a segment."""
    log = root.path / "t-0" / name(0, ".log")
    log.rename(log.with_name(log.name + ".deleted"))
    (root.path / ".kafka_cleanshutdown").unlink()


def tiered(root: BrokerRoot) -> None:
    """The first segment is in remote storage."""
    remove(root, 0)
    (root.path / "remote-log-index-cache").mkdir()
    root.checkpoint(LOG_START, {"t-0": 0})


def cleaned(root: BrokerRoot) -> None:
    remove(root, 30)
    root.checkpoint(CLEANER, {"t-0": 60})


def replicated_cleaned(root: BrokerRoot) -> None:
    """A follower got the leader's cleaned log: there are gaps within segments, too."""
    remove(root, 30)
    remove(root, 60)
    write_segment(root.path / "t-0", 60, [batch(60, 3), batch(70, 20)])


def died_after_its_first_swap(root: BrokerRoot) -> None:
    """The cleaner took all of the first segment, and died before it wrote its checkpoint."""
    write_segment(root.path / "t-0", 0, [])


def stopped_within_a_round(root: BrokerRoot) -> None:
    write_segment(root.path / "t-0", 0, [batch(0, 20)])
    write_segment(root.path / "t-0", 30, [])


def lost_the_cleaners_checkpoint(root: BrokerRoot) -> None:
    """Only the first batches of a segment, and the last ones of another, were of older values."""
    write_segment(root.path / "t-0", 0, [batch(0, 20)])
    write_segment(root.path / "t-0", 30, [batch(40, 20)])


def replicated_from_its_first_gap(root: BrokerRoot) -> None:
    """A follower began anew where the leader has a gap."""
    write_segment(root.path / "t-0", 0, [batch(7, 13)])


def below_the_log_start(root: BrokerRoot) -> None:
    remove(root, 0, ".log")
    root.checkpoint(LOG_START, {"t-0": 35})


def no_file_above_the_log_start(root: BrokerRoot) -> None:
    """Retention has taken everything, and what it has left behind is gone."""
    remove_all_logs(root)
    root.checkpoint(LOG_START, {"t-0": END})
    (root.path / "t-0" / "leader-epoch-checkpoint").write_text(f"0\n1\n0 {END}\n")


def compacted_to_nothing(root: BrokerRoot) -> None:
    """A compaction has left nothing of a segment, and resized its indexes."""
    for suffix in SUFFIXES:
        (root.path / "t-0" / name(0, suffix)).write_bytes(b"")
    root.checkpoint(CLEANER, {"t-0": 30})


def rolled_without_records(root: BrokerRoot) -> None:
    write_segment(root.path / "t-0", END, [])


def stale_cleaner_checkpoint(root: BrokerRoot) -> None:
    root.checkpoint(CLEANER, {"t-0": END + 50})


SOUND = (
    emptied,
    retained,
    half_deleted,
    tiered,
    cleaned,
    replicated_cleaned,
    died_after_its_first_swap,
    stopped_within_a_round,
    lost_the_cleaners_checkpoint,
    replicated_from_its_first_gap,
    below_the_log_start,
    no_file_above_the_log_start,
    compacted_to_nothing,
    rolled_without_records,
    stale_cleaner_checkpoint,
)


@pytest.mark.parametrize("change", SOUND)
def test_what_a_broker_takes_away_is_not_a_loss(
    root: BrokerRoot, change: Callable[[BrokerRoot], object]
) -> None:
    change(root)
    assert damage(root.path) == []
    log = kafkalog.open(root.path)
    assert records(log, "t") is not None
    assert not any("lost" in line for line in adopt(root.path, now_ms=NOW_MS).damage)


def test_a_log_that_was_adopted_whole_and_lost_a_segment_since_is_damage(root: BrokerRoot) -> None:
    adopt(root.path, now_ms=NOW_MS)
    assert damage(root.path) == []
    for harm in (lambda: empty(root, 30), lambda: remove(root, 30, ".log")):
        harm()
        assert name(30, ".log") in {finding.path.name for finding in damage(root.path)}
        with pytest.raises(StorageError, match="the records of the offsets 30 to 59 are lost"):
            records(kafkalog.open(root.path), "t")


# --- indexes of every release --------------------------------------------------------------------


def with_index(root: Path, *entries: tuple[int, int]) -> None:
    """Write batches of 10 records, and an `.index` of these offsets and batches."""
    batches = [batch(base, 10) for base in (0, 10, 20, 30)]
    write_segment(root, 0, batches)
    positions = [sum(len(each.data) for each in batches[:place]) for place in range(4)]
    data = b"".join(struct.pack(">ii", offset, positions[place]) for offset, place in entries)
    (root / name(0, ".index")).write_bytes(data)


@pytest.mark.parametrize(
    "entries",
    [
        [(19, 1), (39, 3)],  # of a leader since 1.0, of any broker since 4.1
        [(10, 1), (20, 2)],  # the first offset, up to 0.11
        [(29, 1), (39, 3)],  # a follower: two batches in one fetch
        [(39, 1)],  # three of them
    ],
)
def test_an_offset_index_of_any_release_is_sound(
    tmp_path: Path, entries: list[tuple[int, int]]
) -> None:
    with_index(tmp_path, *entries)
    assert damage(tmp_path) == []


@pytest.mark.parametrize(
    "entries",
    [[(9, 1)], [(25, 1)], [(29, 1), (35, 2)], [(40, 1)], [(39, 1), (38, 2)], [(29, 1), (29, 2)]],
)
def test_an_offset_index_that_no_release_writes_is_damage(
    tmp_path: Path, entries: list[tuple[int, int]]
) -> None:
    with_index(tmp_path, *entries)
    write_segment(tmp_path, 40, [batch(40, 1)])  # the other one is closed
    assert {finding.path.name for finding in damage(tmp_path)} == {name(0, ".index")}


def with_times(root: Path, *entries: tuple[int, int]) -> None:
    """Write batches of 10 records with ascending timestamps, and a `.timeindex`."""
    write_segment(root, 0, [batch(base, 10, timestamp=NOW_MS + base) for base in (0, 10, 20)])
    write_segment(root, 30, [batch(30, 1)])
    data = b"".join(struct.pack(">qi", time, offset) for time, offset in entries)
    (root / name(0, ".timeindex")).write_bytes(data)


@pytest.mark.parametrize(
    "entries",
    [
        [(0, 9), (10, 19), (20, 29)],  # the last offset of a batch, since 3.8
        [(0, 3), (20, 20)],  # the record with the largest timestamp, up to 3.7
        [(10, 15), (20, 29), (20, 29)],  # the last entry twice
    ],
)
def test_a_time_index_of_any_release_is_sound(
    tmp_path: Path, entries: list[tuple[int, int]]
) -> None:
    with_times(tmp_path, *((NOW_MS + time, offset) for time, offset in entries))
    assert damage(tmp_path) == []


@pytest.mark.parametrize("entries", [[(0, 10)], [(11, 12)], [(20, 25), (20, 26)], [(20, 30)]])
def test_a_time_index_that_no_release_writes_is_damage(
    tmp_path: Path, entries: list[tuple[int, int]]
) -> None:
    with_times(tmp_path, *((NOW_MS + time, offset) for time, offset in entries))
    assert {finding.path.name for finding in damage(tmp_path)} == {name(0, ".timeindex")}
