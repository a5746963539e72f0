"""`adopt`: a broker's directory becomes ours, and goes back, whatever the process died of."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from kafkalog.errors import (
    InvalidInputError,
    KafkaLogError,
    LockedByBrokerError,
    StorageError,
)
from kafkalog.storage_engine.directory.directory_log import DirectoryLog
from kafkalog.storage_engine.fs import locks
from kafkalog.storage_engine.metadata import checkpoints
from kafkalog.storage_engine.metadata.writer import Writer
from kafkalog.storage_engine.ownership.adopt import AdoptReport, adopt
from kafkalog.storage_engine.ownership.release import ReleaseReport, release
from tests.builders.batch_builder import batch
from tests.builders.log_builder import LogBuilder
from tests.builders.log_contents import values
from tests.builders.segment_files import write_segment
from tests.unit.storage_engine.faults import Died, each_act
from tests.unit.storage_engine.test_metadata_log import batch as metadata_batch
from tests.unit.storage_engine.test_metadata_log import config, partition, text
from tests.unit.storage_engine.test_metadata_log import frame as metadata_frame

NOW_MS = 1_700_000_000_000
ROW_MS = 2000
"""A time of rows that does not end the segment they come to."""
META = "#\n#Sat Nov 21 06:09:56 UTC 2026\nnode.id=1\ndirectory.id=KNYotSM8TtH2azTN1QdKRg\n"
CLEAN = '{"version":0,"brokerEpoch":13}'
TOPIC_ID, OTHER_ID = "fHq_kc1HQBmiynnrtAlnIQ", "2oi_791ARxqwrqFeEL1wxQ"
COMPACT = {"t": {"cleanup.policy": "compact", "retention.ms": "1", "delete.retention.ms": "2"}}
KEPT = {"retention.ms": "-1", "delete.retention.ms": str(2**63 - 1)}
"""What keeps every record and every tombstone."""


def broker_partition(root: Path, name: str, topic_id: str | None, *, epoch: int = 5) -> Path:
    """Write a partition of two segments, the offsets 0 to 79, as a broker leaves it."""
    directory = root / name
    directory.mkdir()
    write_segment(directory, 0, [batch(first, 10) for first in range(0, 40, 10)])
    write_segment(directory, 40, [batch(first, 10) for first in range(40, 80, 10)])
    (directory / "leader-epoch-checkpoint").write_text(f"0\n2\n0 0\n{epoch} 40\n")
    if topic_id:
        (directory / "partition.metadata").write_text(f"version: 0\ntopic_id: {topic_id}")
    return directory


def broker_root(tmp_path: Path, *, is_clean: bool = True) -> Path:
    """Write a broker's log directory: two partitions of one topic, and what else lies there."""
    root = tmp_path / "kafka"
    root.mkdir()
    (root / "meta.properties").write_text(META)
    if is_clean:
        (root / ".kafka_cleanshutdown").write_text(CLEAN)
    for number in (0, 2):
        broker_partition(root, f"t-{number}", TOPIC_ID)
    internal = broker_partition(root, "__consumer_offsets-7", OTHER_ID)
    (internal / f"{40:020d}.log").write_bytes(b"nobody looks at this")
    broker_partition(root, f"gone-0.{'a' * 32}-delete", OTHER_ID)
    broker_partition(root, f"astray-0.{'b' * 32}-stray", OTHER_ID)
    broker_partition(root, f"t-0.{'c' * 32}-future", TOPIC_ID)
    lines = ["t 0 40", "t 2 40", "__consumer_offsets 7 42"]
    for name in ("recovery-point-offset-checkpoint", "replication-offset-checkpoint"):
        (root / name).write_text("\n".join(["0", "3", *lines, ""]))
    (root / "log-start-offset-checkpoint").write_text("0\n1\nt 2 7\n")
    (root / "cleaner-offset-checkpoint").write_text("0\n2\nt 0 40\n__consumer_offsets 7 9\n")
    return root


def take(root: Path, **options: object) -> AdoptReport:
    return adopt(root, now_ms=NOW_MS, **options)


def give_back(root: Path, **options: object) -> ReleaseReport:
    return release(root, now_ms=NOW_MS, **options)


def content(root: Path, *, of: str = "*") -> dict[str, bytes]:
    return {
        str(path.relative_to(root)): path.read_bytes()
        for path in root.rglob("*")
        if path.is_file() and path.match(of) and path.name not in ("commit", ".lock")
    }


def is_ours(root: Path) -> bool:
    return (root / "commit").exists()


def can_broker_start(root: Path) -> bool:
    return (root / "meta.properties").exists() and not (root / "kl-owned-by-kafkalog").exists()


# --- what is found -------------------------------------------------------------------------------


def test_an_adopted_directory_is_ours_up_to_the_end_of_the_log(tmp_path: Path) -> None:
    root = broker_root(tmp_path)
    report = take(root, config=COMPACT)
    assert report == AdoptReport(root, False, ("t",), 2, True)
    assert is_ours(root)
    assert not can_broker_start(root)
    assert not (root / ".kafka_cleanshutdown").exists()
    with DirectoryLog(root) as engine:
        topic = engine.describe("t")
        assert (topic.topic_id, dict(topic.config)) == (TOPIC_ID, COMPACT["t"])
        assert (len(topic.partitions), set(topic.absent)) == (3, {1})
        assert (topic.partitions[0].log_start_offset, topic.partitions[0].high_watermark) == (0, 80)
        assert (topic.partitions[2].log_start_offset, topic.partitions[2].high_watermark) == (7, 80)
    assert len(values(root, partition=0)) == 80
    assert len(values(root, partition=2)) == 73


def test_what_the_cleaner_had_done_stays_done(tmp_path: Path) -> None:
    root = broker_root(tmp_path)
    take(root)
    with DirectoryLog(root) as engine:
        found = engine.describe("t").partitions
        assert [found[n].first_dirty_offset for n in (0, 2)] == [40, 7]
    give_back(root)
    cleaned = checkpoints.read_offset_checkpoint(root / "cleaner-offset-checkpoint")
    assert cleaned == {("t", 0): 40, ("t", 2): 7, ("__consumer_offsets", 7): 9}


def test_an_append_goes_on_in_the_brokers_last_epoch(tmp_path: Path) -> None:
    root = broker_root(tmp_path)
    take(root, config=COMPACT)
    LogBuilder(root, now_ms=ROW_MS).append(("k", "ours"), partition=0).close()
    log = (root / "t-0" / f"{40:020d}.log").read_bytes()
    before = sum(len(batch(first, 10).data) for first in range(40, 80, 10))
    assert len(log) > before
    assert int.from_bytes(log[before : before + 8], "big") == 80
    assert int.from_bytes(log[before + 12 : before + 16], "big") == 5
    epochs = (root / "t-0" / "leader-epoch-checkpoint").read_text()
    assert epochs == "0\n2\n0 0\n5 40\n"


def test_what_is_not_a_partition_of_ours_stays_as_it_is(tmp_path: Path) -> None:
    root = broker_root(tmp_path)
    names = ("__consumer_offsets-7", *(p.name for p in root.iterdir() if "." in p.name[1:]))
    before = {name: content(root / name) for name in names if (root / name).is_dir()}
    take(root)
    LogBuilder(root, now_ms=ROW_MS).append(("k", "ours"), partition=0).close()
    give_back(root)
    assert {name: content(root / name) for name in before} == before


def test_directories_that_cannot_be_taken_are_refused(tmp_path: Path) -> None:
    root = broker_root(tmp_path)
    before = content(root)
    (root / "backup-20240101").mkdir()
    assert len(values(root, partition=0)) == 80
    with pytest.raises(StorageError, match=r"backup-20240101.*move"):
        take(root)
    (root / "backup-20240101").rmdir()
    (root / "t-1").symlink_to(root / "t-2")
    with pytest.raises(StorageError, match=r"t-1.*link"):
        take(root)
    (root / "t-1").unlink()
    assert content(root) == before
    assert can_broker_start(root)


@pytest.mark.parametrize(
    "offset",
    [
        str(2**63),
        str(2**63 - 1),
        str(2**63 - 2**31),
        "1_000",
        "-" + "9" * 30,
        "\N{ARABIC-INDIC DIGIT ONE}",
    ],
)
def test_a_checkpoint_with_other_content_than_offsets_says_nothing(
    tmp_path: Path, offset: str
) -> None:
    root = broker_root(tmp_path)
    (root / "log-start-offset-checkpoint").write_text(f"0\n1\nt 0 {offset}\n")
    assert "byte 4" in (notice := take(root).notices[0])
    assert "deleted records may be back" in notice
    with DirectoryLog(root, read_only=True) as engine:
        assert engine.offsets("t") == {0: (0, 80), 2: (0, 80)}


@pytest.mark.parametrize("is_clean", [True, False])
@pytest.mark.parametrize("base_offset", ["9" * 20, f"{2**63 - 1:020d}"])
def test_a_stray_segment_above_all_offsets_is_named_and_nothing_is_changed(
    tmp_path: Path, base_offset: str, is_clean: bool
) -> None:
    root = broker_root(tmp_path, is_clean=is_clean)
    stray = root / "t-0" / f"{base_offset}.log"
    stray.touch()
    before = content(root)
    with pytest.raises(StorageError, match=rf"{stray}: .*move the file away"):
        take(root)
    assert content(root) == before
    assert can_broker_start(root)
    stray.unlink()
    assert take(root).partitions == 2


def test_what_no_journal_takes_is_said_before_anything_is_changed(tmp_path: Path) -> None:
    root = broker_root(tmp_path)
    metadata_log(root, partitions=100_001)
    before = content(root)
    with pytest.raises(StorageError, match=rf"{root}: .*topic 't': 100001 partitions"):
        take(root)
    assert content(root) == before
    assert can_broker_start(root)


def test_what_is_appended_at_the_largest_log_start_is_read(tmp_path: Path) -> None:
    root = broker_root(tmp_path)
    largest = 2**63 - 1 - 2**31
    (root / "log-start-offset-checkpoint").write_text(f"0\n1\nt 0 {largest}\n")
    take(root)
    LogBuilder(root, now_ms=ROW_MS).append(("k", "ours"), partition=0).close()
    LogBuilder(root, now_ms=ROW_MS).append(("k", "ours"), partition=0).close()
    assert values(root, partition=0) == [b"ours"] * 2
    with DirectoryLog(root) as engine:
        assert engine.offsets("t")[0] == (largest, largest + 2)


def test_an_empty_partition_never_begins_below_zero(tmp_path: Path) -> None:
    root = broker_root(tmp_path)
    (root / "empty-0").mkdir()
    (root / "log-start-offset-checkpoint").write_text("0\n1\nempty 0 -5\n")
    take(root)
    assert (root / "empty-0" / f"{0:020d}.log").exists()
    assert values(root, "empty") == []


def test_a_second_adopt_says_that_it_is_ours(tmp_path: Path) -> None:
    root = broker_root(tmp_path)
    take(root)
    before = content(root)
    assert take(root).adopted_already
    assert take(root).topics == ("t",)
    assert content(root) == before


def test_a_second_adopt_says_which_configs_it_did_not_set(tmp_path: Path) -> None:
    root = broker_root(tmp_path)
    take(root, config=COMPACT)
    assert take(root, config=COMPACT).notices == ()
    (notice,) = take(root, config={"t": {"cleanup.policy": "delete"}}).notices
    assert "kafkalog topics alter" in notice
    assert found_config(root) == COMPACT["t"]


def test_after_a_crash_the_tail_is_checked_and_the_damage_told(tmp_path: Path) -> None:
    root = broker_root(tmp_path, is_clean=False)
    torn = batch(80, 10).data
    with (root / "t-0" / f"{40:020d}.log").open("ab") as file:
        file.write(torn + torn[:-1])
    report = take(root)
    assert not report.was_clean
    assert len(report.damage) == 1
    assert f"t-0/{40:020d}.log" in report.damage[0]
    assert len(values(root, partition=0)) == 90
    give_back(root)
    # Internal topics lie here too, and nobody has checked those.
    assert not (root / ".kafka_cleanshutdown").exists()


def test_a_topic_without_an_id_gets_one(tmp_path: Path) -> None:
    root = broker_root(tmp_path)
    for number in (0, 2):
        (root / f"t-{number}" / "partition.metadata").unlink()
    report = take(root)
    found = {checkpoints.read_topic_id(root / f"t-{number}") for number in (0, 2)}
    with DirectoryLog(root, read_only=True) as engine:
        assert found == {engine.describe("t").topic_id}
    assert "one was drawn" in report.notices[0]


def test_a_partition_without_an_id_has_that_of_its_topic(tmp_path: Path) -> None:
    root = broker_root(tmp_path)
    (root / "t-0" / "partition.metadata").unlink()
    take(root)
    assert checkpoints.read_topic_id(root / "t-0") == TOPIC_ID


def test_two_topics_of_one_name_are_refused_if_nothing_tells_them_apart(tmp_path: Path) -> None:
    root = broker_root(tmp_path)
    for number in (1, 3):
        broker_partition(root, f"t-{number}", OTHER_ID)
    before = content(root)
    with pytest.raises(StorageError, match=r"--metadata"):
        take(root)
    assert content(root) == before
    assert can_broker_start(root)


# --- configs -------------------------------------------------------------------------------------


def metadata_log(root: Path, topic_id: str = TOPIC_ID, *, partitions: int = 4) -> None:
    import base64

    data = base64.urlsafe_b64decode(topic_id + "==")
    topic = metadata_frame(2, text("t") + data + b"\0")
    records = [
        topic,
        *(partition(number, data) for number in range(partitions - 4, partitions)),
        config("t", "cleanup.policy", "compact,delete"),
        config("t", "min.insync.replicas", "1"),
        config("t", "segment.bytes", "5000"),
    ]
    directory = root / "__cluster_metadata-0"
    directory.mkdir(parents=True)
    (directory / f"{0:020d}.log").write_bytes(metadata_batch(0, records))


def found_config(root: Path) -> dict[str, str]:
    with DirectoryLog(root, read_only=True) as engine:
        return dict(engine.describe("t").config)


def test_a_topic_without_a_known_policy_is_left_alone(tmp_path: Path) -> None:
    root = broker_root(tmp_path)
    report = take(root)
    assert found_config(root) == {"cleanup.policy": "", **KEPT}
    assert "cleanup.policy is not known" in report.notices[0]
    with DirectoryLog(root) as engine:
        assert engine.apply_retention(now_ms=10**15) == []


@pytest.mark.parametrize("is_apart", [False, True])
def test_the_clusters_metadata_knows_configs_and_partitions(tmp_path: Path, is_apart: bool) -> None:
    root = broker_root(tmp_path)
    place = tmp_path / "metadata" if is_apart else root
    metadata_log(place)
    report = take(root, metadata=place if is_apart else None)
    policy = {"cleanup.policy": "compact,delete", "segment.bytes": "5000"}
    assert found_config(root) == {**policy, **KEPT}
    assert "min.insync.replicas=1" in report.notices[0]
    with DirectoryLog(root, read_only=True) as engine:
        assert len(engine.describe("t").partitions) == 4
        assert engine.describe("t").absent == {1, 3}
    assert (place / "__cluster_metadata-0").is_dir()


def test_metadata_of_another_topic_of_that_name_is_not_ours(tmp_path: Path) -> None:
    root = broker_root(tmp_path)
    metadata_log(root, OTHER_ID)
    before = content(root)
    with pytest.raises(StorageError, match=f"{TOPIC_ID}.*metadata has {OTHER_ID}"):
        take(root)
    assert content(root) == before


def test_a_config_for_the_topic_counts_more_than_metadata_and_one_for_all_less(
    tmp_path: Path,
) -> None:
    root = broker_root(tmp_path)
    metadata_log(root)
    given = {
        "*": {"cleanup.policy": "delete", "segment.ms": "1000"},
        "t": {"segment.bytes": "6000"},
    }
    take(root, config=given)
    assert found_config(root) == {
        "cleanup.policy": "compact,delete",
        "segment.ms": "1000",
        "segment.bytes": "6000",
        **KEPT,
    }


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"typo": {"cleanup.policy": "compact"}}, "the topics here are: t"),
        ({"t": {"cleanup.polly": "compact"}}, "did you mean"),
        ({"*": {"segment.bytes": "1"}}, "expected a whole number"),
    ],
)
def test_a_wrong_config_is_refused_before_anything_changes(
    tmp_path: Path, given: dict[str, dict[str, str]], message: str
) -> None:
    root = broker_root(tmp_path)
    before = content(root)
    with pytest.raises(InvalidInputError, match=message):
        take(root, config=given)
    assert content(root) == before
    assert can_broker_start(root)


# --- who owns it ---------------------------------------------------------------------------------


def test_a_directory_without_partitions_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match="no such directory"):
        take(tmp_path / "missing")
    with pytest.raises(InvalidInputError, match=r"not a broker's log directory"):
        take(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] in ([], [".lock"])


def test_a_running_broker_keeps_its_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = broker_root(tmp_path)
    monkeypatch.setattr("kafkalog.storage_engine.ownership.adopt.LOCK_WAIT_S", 0.1)
    code = (
        "import fcntl, sys; file = open(sys.argv[1], 'w'); fcntl.lockf(file, fcntl.LOCK_EX); "
        "print('held', flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", code, str(root / ".lock")]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as broker:
        assert broker.stdout is not None
        broker.stdout.readline()
        with pytest.raises(LockedByBrokerError, match="a Kafka broker holds this directory"):
            take(root)
        assert broker.stdin is not None
        broker.stdin.close()
    assert can_broker_start(root)
    assert not take(root).adopted_already


def test_an_adoption_keeps_everybody_out(tmp_path: Path) -> None:
    root = broker_root(tmp_path)
    with locks.RootLock(root).exclusive():
        with pytest.raises(LockedByBrokerError), locks.RootLock(root).shared():
            pass
        with pytest.raises(LockedByBrokerError), locks.RootLock(root).exclusive(wait_s=0.1):
            pass
    with locks.RootLock(root).shared(), locks.RootLock(root).shared():
        pass


def test_a_broker_that_was_started_on_our_log_all_the_same_has_it(tmp_path: Path) -> None:
    root = broker_root(tmp_path)
    take(root, config=COMPACT)
    LogBuilder(root, now_ms=ROW_MS).append(("k", "ours"), partition=0).close()
    (root / "t-0" / "kl-canary.deleted").unlink()
    with (root / "t-0" / f"{40:020d}.log").open("ab") as file:
        file.write(batch(81, 10).data)
    with (root / "t-2" / f"{40:020d}.log").open("ab") as file:
        file.write(batch(80, 10).data)  # what we had not committed, and no broker has seen
    with pytest.raises(LockedByBrokerError, match="adopt"):
        LogBuilder(root, now_ms=ROW_MS).append(("k", "ours"), partition=0).close()
    assert not take(root).adopted_already
    assert len(values(root, partition=0)) == 91
    assert len(values(root, partition=2)) == 73
    assert found_config(root) == COMPACT["t"]
    LogBuilder(root, now_ms=ROW_MS).append(("k", "ours"), partition=0).close()
    assert len(values(root, partition=0)) == 92


def test_key_indexes_of_an_earlier_adoption_go(tmp_path: Path) -> None:
    root = broker_root(tmp_path)
    stale = root / "t-0" / f"kl-{40:020d}.keys"
    stale.write_bytes(b"of a file that the broker has replaced")
    take(root, config=COMPACT)
    assert not stale.exists()


def force_broker(root: Path) -> None:
    """Do what a user must have done for a broker to start here, and what the broker does first."""
    shutil.rmtree(root / "kl-owned-by-kafkalog")
    (root / "meta.properties").write_text(META)
    for canary in root.glob("t-*/kl-canary.deleted"):
        canary.unlink()


def test_a_broker_that_was_killed_on_our_log_did_not_leave_it_in_good_order(tmp_path: Path) -> None:
    root = broker_root(tmp_path)
    assert take(root, config=COMPACT).was_clean
    force_broker(root)
    damaged = bytearray(batch(80, 10).data)
    damaged[-1] ^= 1
    with (root / "t-0" / f"{40:020d}.log").open("ab") as file:
        file.write(damaged)
    report = take(root)
    assert not report.was_clean
    assert len(report.damage) == 1
    assert len(values(root, partition=0)) == 80


@pytest.mark.parametrize("gone", [("t-0",), ("t-0", "t-2")])
def test_partitions_that_a_broker_has_removed_are_given_up(
    tmp_path: Path, gone: tuple[str, ...]
) -> None:
    root = broker_root(tmp_path)
    take(root, config=COMPACT)
    for name in gone:
        (root / name).rename(root / f"{name}.{'d' * 32}-stray")
    with pytest.raises(LockedByBrokerError, match="is missing"):
        LogBuilder(root, now_ms=ROW_MS).append(("k", "ours"), partition=0).close()
    with pytest.raises(LockedByBrokerError, match="is missing"):
        give_back(root)
    report = take(root)
    assert not report.adopted_already
    assert [line.split()[0] for line in report.notices] == list(gone)
    assert report.partitions == 2 - len(gone)
    with DirectoryLog(root) as engine:
        assert engine.topics() == ["t"][len(gone) - 1 :]
        if len(gone) == 1:
            assert engine.describe("t").absent == {0, 1}
    assert take(root).adopted_already
    assert give_back(root).has_broker


def test_who_has_a_brokers_directory_open_reads_no_commit_that_is_not_made(tmp_path: Path) -> None:
    root = broker_root(tmp_path)
    reader = DirectoryLog(root)
    assert sum(rows.num_rows for rows in reader.read("t", 0)) == 80
    take(root, config=COMPACT)
    with (root / "t-0" / f"{40:020d}.log").open("ab") as file:
        file.write(batch(80, 10).data)
    with pytest.raises(LockedByBrokerError, match="open it again"):
        list(reader.read("t", 0))


def test_a_row_for_a_partition_that_is_not_here_changes_no_partition(tmp_path: Path) -> None:
    root = broker_root(tmp_path)
    take(root, config=COMPACT)
    before = content(root, of="t-*/*")
    with DirectoryLog(root) as engine, pytest.raises(InvalidInputError, match="t-1"):
        engine.append("t", [(b"k%d" % n, b"v") for n in range(50)])
    assert content(root, of="t-*/*") == before


# --- there and back ------------------------------------------------------------------------------


def commit(root: Path, batch_id: int, *, target: str = "t", value: bytes = b"once") -> bool:
    """Commit a batch of a writer; False when the log has it already."""
    with DirectoryLog(root) as engine:
        writer = Writer("query", target, batch_id)
        builder = LogBuilder(engine, now_ms=ROW_MS)
        staging = {"partition": 0, "in_memory": True, "batch_size": 1000}
        return not builder.commit(("k", value), writer=writer, now_ms=NOW_MS, **staging).skipped


def test_who_wrote_exactly_once_still_does_after_a_broker_had_it(tmp_path: Path) -> None:
    root = broker_root(tmp_path)
    take(root, config=COMPACT)
    assert commit(root, 7)
    assert commit(root, 3, target="*")
    give_back(root)
    with (root / "t-0" / f"{40:020d}.log").open("ab") as file:
        file.write(batch(82, 8).data)  # the broker's turn
    (root / ".kafka_cleanshutdown").unlink()
    take(root)
    assert not commit(root, 7)
    assert not commit(root, 3, target="*")
    assert found_config(root) == COMPACT["t"]
    assert commit(root, 8)
    assert values(root, partition=0).count(b"once") == 3
    assert len(values(root, partition=0)) == 80 + 2 + 8 + 1


def test_a_topic_of_another_id_remembers_nothing(tmp_path: Path) -> None:
    root = broker_root(tmp_path)
    take(root, config=COMPACT)
    commit(root, 7)
    give_back(root)
    for number in (0, 2):
        content = f"version: 0\ntopic_id: {OTHER_ID}"
        (root / f"t-{number}" / "partition.metadata").write_text(content)
    take(root)
    assert found_config(root) == {"cleanup.policy": "", **KEPT}
    assert commit(root, 7)


def test_the_number_of_partitions_outlives_the_clusters_metadata(tmp_path: Path) -> None:
    root = broker_root(tmp_path)
    metadata_log(tmp_path / "metadata")
    take(root, metadata=tmp_path / "metadata")
    give_back(root)
    take(root)
    with DirectoryLog(root) as engine:
        assert len(engine.describe("t").partitions) == 4
        assert engine.describe("t").absent == {1, 3}


def test_ids_given_at_the_release_are_remembered(tmp_path: Path) -> None:
    root = broker_root(tmp_path)
    take(root, config=COMPACT)
    commit(root, 7)
    give_back(root, topic_ids={"t": OTHER_ID})
    take(root)
    assert found_config(root) == COMPACT["t"]
    assert not commit(root, 7)


def test_a_damaged_old_journal_costs_only_what_it_knew(tmp_path: Path) -> None:
    root = broker_root(tmp_path)
    take(root, config=COMPACT)
    give_back(root)
    (root / "kl-commit.released").write_bytes(b"damaged")
    report = take(root)
    assert "is lost" in report.notices[0]
    assert found_config(root) == {"cleanup.policy": "", **KEPT}


@pytest.mark.slow
@pytest.mark.parametrize("is_clean", [True, False])
def test_an_adoption_that_died_anywhere_goes_on(tmp_path: Path, is_clean: bool) -> None:
    original = broker_root(tmp_path, is_clean=is_clean)
    if not is_clean:
        with (original / "t-0" / f"{40:020d}.log").open("ab") as file:
            file.write(b"torn")
    whole = tmp_path / "whole"
    shutil.copytree(original, whole)
    take(whole, config=COMPACT)
    expected = content(whole)
    expected_log = values(whole, partition=0), values(whole, partition=2)
    number, running = 0, True
    while running:
        number += 1
        root = tmp_path / f"{number}"
        shutil.copytree(original, root)
        running = each_act(_adopting(root), number, Died(), after=True)
        assert not (is_ours(root) and can_broker_start(root))
        if can_broker_start(root):
            assert content(root, of="*.log") == content(original, of="*.log")
        took = not is_ours(root)
        assert take(root, config=COMPACT).adopted_already != took
        assert content(root) == expected, number
        assert (values(root, partition=0), values(root, partition=2)) == expected_log
        shutil.rmtree(root)
    assert number > 20


def _adopting(root: Path) -> Callable[[], None]:
    def work() -> None:
        take(root, config=COMPACT)

    return work


def _releasing(root: Path) -> Callable[[], None]:
    def work() -> None:
        give_back(root)

    return work


@pytest.mark.slow
def test_an_adoption_that_died_anywhere_can_be_given_up(tmp_path: Path) -> None:
    original = broker_root(tmp_path)
    logs = content(original, of="*.log")
    number, running = 0, True
    while running:
        number += 1
        root = tmp_path / f"{number}"
        shutil.copytree(original, root)
        running = each_act(_adopting(root), number, Died(), after=True)
        report = give_back(root)
        assert report.has_broker
        assert can_broker_start(root)
        assert not is_ours(root)
        assert content(root, of="*.log") == logs
        assert {p.name for p in root.rglob("kl-*")} <= {"kl-commit.released"}
        shutil.rmtree(root)


@pytest.mark.slow
def test_an_adoption_of_what_a_dead_release_left(tmp_path: Path) -> None:
    original = broker_root(tmp_path)
    take(original, config=COMPACT)
    assert commit(original, 7)
    expected = values(original, partition=0)
    number, running = 0, True
    while running:
        number += 1
        root = tmp_path / f"{number}"
        shutil.copytree(original, root)
        running = each_act(_releasing(root), number, Died(), after=True)
        take(root)
        assert values(root, partition=0) == expected
        assert not commit(root, 7)
        assert found_config(root) == COMPACT["t"]
        LogBuilder(root, now_ms=ROW_MS).append(("k", "ours"), partition=0).close()
        shutil.rmtree(root)


def test_any_damaged_file_is_a_typed_error_and_nothing_is_changed(tmp_path: Path) -> None:
    """Or it is taken as it is: what matters is that a broker can still have it."""
    original = broker_root(tmp_path)
    damaged = [p.relative_to(original) for p in original.rglob("*") if p.is_file()]
    for number, name in enumerate(damaged):
        if "t-" not in str(name) and name.parent != Path():
            continue
        root = tmp_path / f"{number}"
        shutil.copytree(original, root)
        data = bytearray((root / name).read_bytes())
        data[len(data) // 2 :] = b"\xff" * (len(data) - len(data) // 2)
        (root / name).write_bytes(bytes(data))
        before = content(root)
        try:
            take(root)
        except KafkaLogError:
            assert content(root) == before
            assert can_broker_start(root)
        else:
            assert is_ours(root)
