"""Directories of brokers that are not as a broker keeps them: ids, small files, paths, configs."""

from __future__ import annotations

import os
import secrets
import shutil
from pathlib import Path

import pytest

import kafkalog
from kafkalog.errors import InvalidInputError, KafkaLogError
from kafkalog.inspection.verify import verify
from kafkalog.storage_engine.copying.copy import copy
from kafkalog.storage_engine.directory.directory_log import DirectoryLog
from kafkalog.storage_engine.log.log import Log
from kafkalog.storage_engine.metadata import checkpoints
from kafkalog.storage_engine.object_store.address import StoreAddress
from kafkalog.storage_engine.object_store.client import ObjectClient
from kafkalog.storage_engine.object_store.commit_log import CommitLog
from kafkalog.storage_engine.object_store.object_log import ObjectLog
from kafkalog.storage_engine.ownership.adopt import adopt
from kafkalog.storage_engine.ownership.release import release
from kafkalog.storage_engine.place import read_places
from tests.builders.batch_builder import batch
from tests.builders.rescued import rescued
from tests.builders.segment_files import write_segment
from tests.unit.storage_engine import broker_root
from tests.unit.storage_engine.broker_root import TOPIC_ID, BrokerRoot
from tests.unit.storage_engine.store_log import WithoutProbe, memory_address
from tests.unit.storage_engine.test_adopt import OTHER_ID, metadata_log
from tests.unit.storage_engine.test_adopt import TOPIC_ID as CLUSTER_ID

NOW_MS = 1_700_000_000_000


def notices(*roots: Path, now_ms: int = NOW_MS) -> list[str]:
    found = [each for root in roots for each in verify(root, beside=roots, now_ms=now_ms)]
    assert [str(each) for each in found if each.is_damage] == []
    return [str(each) for each in found]


# --- ids decide ----------------------------------------------------------------------------------


def read_apart(tmp_path: Path, roots: list[Path], right: set[int], aside: Path) -> None:
    """Reading, copying and verifying take the right partitions, and say why not the other one."""
    number = int(aside.name[-1])
    log = kafkalog.open(roots)
    assert set(log.offsets("t")) == right
    with pytest.raises(InvalidInputError, match=f"{aside} is set aside: it is of the topic"):
        list(log.read("t", number))
    kafkalog.copy(roots, tmp_path / "copy")
    assert set(kafkalog.open(tmp_path / "copy").offsets("t")) == right
    assert any(str(aside) in each and "set aside" in each for each in notices(*roots))


def test_two_topics_with_one_id_are_read_by_their_names_and_not_adopted(tmp_path: Path) -> None:
    root = BrokerRoot(tmp_path / "log")
    root.partition("t-0")
    root.partition("other-0", (0,), 30)
    log = kafkalog.open(root.path, read_only=True)
    assert (log.offsets("t"), log.offsets("other")) == ({0: (0, 100)}, {0: (0, 30)})
    text = f"the topics other and t have one id, {TOPIC_ID}"
    assert any(text in each for each in notices(root.path))
    with pytest.raises(KafkaLogError, match="nothing says which id the topic 'other' had"):
        adopt(root.path, now_ms=NOW_MS)


def test_the_clusters_metadata_says_which_partition_is_of_the_topic(tmp_path: Path) -> None:
    root = BrokerRoot(tmp_path / "log")
    metadata_log(root.path, CLUSTER_ID)
    root.partition("t-0", topic_id=CLUSTER_ID)
    root.partition("t-1", topic_id=OTHER_ID)
    root.partition("t-2", topic_id=OTHER_ID)
    read_apart(tmp_path, [root.path], {0}, root.path / "t-1")


def test_without_metadata_most_partitions_say_it(tmp_path: Path) -> None:
    root = BrokerRoot(tmp_path / "log")
    for number, topic_id in enumerate((OTHER_ID, TOPIC_ID, TOPIC_ID, None)):
        root.partition(f"t-{number}", topic_id=topic_id)
    read_apart(tmp_path, [root.path], {1, 2, 3}, root.path / "t-0")


def test_of_as_many_the_latest_record_says_it(tmp_path: Path) -> None:
    root = BrokerRoot(tmp_path / "log")
    root.partition("t-0", (0,), 20, topic_id=OTHER_ID)
    root.partition("t-1", (0,), 40, topic_id=TOPIC_ID)
    read_apart(tmp_path, [root.path], {1}, root.path / "t-0")


def test_a_disk_that_was_away_has_an_old_partition(tmp_path: Path) -> None:
    first, second = BrokerRoot(tmp_path / "a"), BrokerRoot(tmp_path / "b")
    metadata_log(first.path, CLUSTER_ID)
    first.partition("t-0", topic_id=CLUSTER_ID)
    second.partition("t-1", topic_id=OTHER_ID)
    read_apart(tmp_path, [first.path, second.path], {0}, second.path / "t-1")


def test_an_adoption_leaves_a_partition_of_another_topic_as_it_is(tmp_path: Path) -> None:
    root = BrokerRoot(tmp_path / "log")
    for number, topic_id in enumerate((TOPIC_ID, OTHER_ID, TOPIC_ID)):
        root.partition(f"t-{number}", topic_id=topic_id)
    before = {path.name: path.read_bytes() for path in (root.path / "t-1").iterdir()}
    report = adopt(root.path, now_ms=NOW_MS)
    assert any("t-1: set aside" in each for each in report.notices)
    assert {path.name: path.read_bytes() for path in (root.path / "t-1").iterdir()} == before
    assert set(DirectoryLog(root.path, read_only=True).offsets("t")) == {0, 2}
    assert any("t-1" in each for each in notices(root.path))


# --- a damaged small file ------------------------------------------------------------------------

DAMAGE = {"zeros": bytes(20), "half": b"0\n2\n0", "empty": b"", "garbage": os.urandom(64)}
DAMAGE |= {"version": b"7\n0\n", "text": b"version: 9\ntopic_id: x"}


@pytest.mark.parametrize("damage", [*DAMAGE, "directory", "huge"])
@pytest.mark.parametrize("file", ["leader-epoch-checkpoint", "partition.metadata"])
def test_a_damaged_file_of_a_partition_costs_no_record(
    tmp_path: Path, file: str, damage: str
) -> None:
    root = BrokerRoot(tmp_path / "log")
    path = root.partition("t-0") / file
    root.partition("t-1")
    root.partition("u-0", topic_id=OTHER_ID)
    spoil(path, damage)
    log = kafkalog.open(root.path)
    assert log.topics() == ["t", "u"]
    assert log.offsets("t") == {0: (0, 100), 1: (0, 100)}
    for topic, partition in (("t", 0), ("t", 1), ("u", 0)):
        assert sum(rows.num_rows for rows in log.read(topic, partition)) == 100


@pytest.mark.parametrize("damage", [*DAMAGE, "directory", "huge"])
@pytest.mark.parametrize(
    "file",
    [
        broker_root.RECOVERY_POINT,
        broker_root.LOG_START,
        broker_root.HIGH_WATERMARK,
        broker_root.CLEANER,
        "meta.properties",
    ],
)
def test_a_damaged_file_of_the_root_costs_what_it_would_have_told(
    tmp_path: Path, file: str, damage: str
) -> None:
    root, other = BrokerRoot(tmp_path / "log"), BrokerRoot(tmp_path / "other")
    root.partition("t-0")
    other.partition("t-1")
    spoil(root.path / file, damage)
    log = kafkalog.open([root.path, other.path])
    assert log.offsets("t") == {0: (0, 100), 1: (0, 100)}


def spoil(path: Path, damage: str) -> None:
    path.unlink(missing_ok=True)
    if damage == "directory":
        path.mkdir()
    elif damage == "huge":
        with path.open("wb") as file:
            file.truncate(1 << 40)
    else:
        path.write_bytes(DAMAGE[damage])


@pytest.mark.parametrize("damage", DAMAGE)
def test_an_adoption_takes_the_epochs_from_the_batches(tmp_path: Path, damage: str) -> None:
    root = BrokerRoot(tmp_path / "log")
    directory = root.path / "t-0"
    directory.mkdir()
    write_segment(directory, 0, [batch(0, 10, leader_epoch=3), batch(10, 10, leader_epoch=5)])
    spoil(directory / "leader-epoch-checkpoint", damage)
    root.shut_down()
    adopt(root.path, now_ms=NOW_MS)
    expected = [] if damage == "empty" else [(3, 0), (5, 10)]
    assert checkpoints.read_leader_epochs(directory) == expected


# --- paths that are one level off ----------------------------------------------------------------


@pytest.mark.parametrize("kind", ["broker", "copy", "ours"])
@pytest.mark.parametrize("place", ["log/orders-0", "log/orders-0/sub", "log/orders-9", "."])
@pytest.mark.parametrize("create", [False, True])
def test_a_path_one_level_off_is_answered_with_the_log(
    tmp_path: Path, kind: str, place: str, create: bool
) -> None:
    log = tmp_path / "log"
    log_of_kind(log, kind)
    (log / "orders-0" / "sub").mkdir()
    names = sorted(tmp_path.rglob("*"))
    with pytest.raises(InvalidInputError, match=f"give {log}$"):
        kafkalog.open(tmp_path / place, create=create)
    assert sorted(tmp_path.rglob("*")) == names


@pytest.mark.parametrize("kind", ["broker", "copy", "ours"])
def test_a_file_in_a_log_is_answered_with_the_log(tmp_path: Path, kind: str) -> None:
    log = tmp_path / "log"
    log_of_kind(log, kind)
    (segment, *_) = (log / "orders-0").glob("*.log")
    with pytest.raises(InvalidInputError, match=f"partition orders-0 of the log in {log}: give"):
        kafkalog.open(segment)


def test_several_logs_below_are_named(tmp_path: Path) -> None:
    for name in ("a", "b"):
        rescued(tmp_path / name)
    for act in (
        lambda: kafkalog.open(tmp_path, create=False),
        lambda: kafkalog.open(tmp_path),
        lambda: list(verify(tmp_path)),
        lambda: adopt(tmp_path, now_ms=NOW_MS),
    ):
        with pytest.raises(InvalidInputError, match=f"{tmp_path / 'a'}, {tmp_path / 'b'}"):
            act()


@pytest.mark.parametrize(
    "place",
    ["log/orders-0", "log/log", "log/data/0", "log/segments/0/x.log", "log/log/9.commit", "."],
)
@pytest.mark.parametrize("create", [False, True])
@pytest.mark.parametrize("prefix", ["", "deep/logs/"])
def test_an_address_one_level_off_is_answered_with_the_log(
    place: str, create: bool, prefix: str
) -> None:
    bucket = f"memory://{secrets.token_hex(8)}"
    log = f"{bucket}/{prefix}log"
    CommitLog.create(WithoutProbe(StoreAddress.parse(log)))
    names = all_names(bucket)
    with pytest.raises(InvalidInputError, match=f"give {log}$"):
        kafkalog.open(f"{bucket}/{prefix}{place}".removesuffix("/."), create=create)
    assert all_names(bucket) == names


def test_several_logs_below_an_address_are_named() -> None:
    bucket = f"memory://{secrets.token_hex(8)}"
    for name in ("a", "b"):
        CommitLog.create(WithoutProbe(StoreAddress.parse(f"{bucket}/{name}")))
    for act in (
        lambda: kafkalog.open(bucket, create=False),
        lambda: kafkalog.open(bucket),
        lambda: kafkalog.open(bucket, read_only=True),
    ):
        with pytest.raises(InvalidInputError, match=f"one of {bucket}/a, {bucket}/b$"):
            act()


def test_an_address_far_from_a_log_is_answered_without_one() -> None:
    bucket = f"memory://{secrets.token_hex(8)}"
    CommitLog.create(WithoutProbe(StoreAddress.parse(f"{bucket}/a/b/c/log")))
    for place in ("elsewhere/log", "a/b", "a/b/c2"):
        with pytest.raises(InvalidInputError, match=r"no log .* A store in memory .*there\.$"):
            kafkalog.open(f"{bucket}/{place}", create=False)


def all_names(bucket: str) -> list[str]:
    return [entry.name for entry in ObjectClient(StoreAddress.parse(bucket)).list("")]


def log_of_kind(root: Path, kind: str) -> None:
    if kind == "ours":
        with DirectoryLog(root) as log:
            log.create_topic("orders")
            return
    rescued(root)
    if kind == "broker":
        (root / "meta.properties").write_text("node.id=1\n")


# --- configs that are not known ------------------------------------------------------------------


@pytest.fixture(params=["directory", "store"])
def destination(request: pytest.FixtureRequest, tmp_path: Path) -> Log:
    if request.param == "directory":
        return DirectoryLog(tmp_path / "copy")
    return ObjectLog(memory_address())


@pytest.mark.parametrize("cleaned", ["checkpoint", "missing", "damaged"])
def test_a_second_copy_that_may_miss_a_deletion_is_refused(
    tmp_path: Path, destination: Log, cleaned: str
) -> None:
    root = BrokerRoot(tmp_path / "log")
    root.partition("t-0", (0,), 50)
    copy(DirectoryLog(root.path, read_only=True), destination, now_ms=NOW_MS)
    shutil.rmtree(root.path / "t-0")
    root.partition("t-0", (0, 90), 100)
    if cleaned == "checkpoint":
        root.checkpoint(broker_root.CLEANER, {"t-0": 90})
    elif cleaned == "damaged":
        (root.path / broker_root.CLEANER).write_bytes(b"garbage")
    source = DirectoryLog(root.path, read_only=True)
    with pytest.raises(InvalidInputError, match=r"--config t:delete\.retention\.ms="):
        copy(source, destination, now_ms=NOW_MS + 1)
    given = {"*": {"delete.retention.ms": "1000"}}
    with pytest.raises(InvalidInputError, match="a copy every 1000 ms"):
        copy(source, destination, now_ms=NOW_MS + 1000, config=given)
    copy(source, destination, now_ms=NOW_MS + 999, config=given)
    assert destination.offsets("t") == {0: (0, 100)}


def test_a_broker_that_has_cleaned_nothing_has_removed_no_deletion(
    tmp_path: Path, destination: Log
) -> None:
    root = BrokerRoot(tmp_path / "log")
    root.checkpoint(broker_root.CLEANER, {})
    root.partition("t-0", (0,), 50)
    copy(DirectoryLog(root.path, read_only=True), destination, now_ms=NOW_MS)
    shutil.rmtree(root.path / "t-0")
    root.partition("t-0")
    copy(DirectoryLog(root.path, read_only=True), destination, now_ms=NOW_MS)
    assert destination.offsets("t") == {0: (0, 100)}


def test_status_says_that_a_brokers_policy_is_not_known(tmp_path: Path) -> None:
    root = BrokerRoot(tmp_path / "log")
    root.partition("t-0")
    (found,) = kafkalog.open(root.path).status()
    assert found.state == "policy unknown"


# --- internal topics -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["__consumer_offsets", "__transaction_state", "__share_group_state"]
)
def test_an_internal_topic_stays_with_kafka(tmp_path: Path, name: str) -> None:
    root = BrokerRoot(tmp_path / "log")
    root.partition("t-0")
    root.partition(f"{name}-0", topic_id=OTHER_ID)
    assert adopt(root.path, now_ms=NOW_MS).topics == ("t",)
    with DirectoryLog(root.path) as log, pytest.raises(KafkaLogError):
        log.create_topic(name)


# --- what a log holds back -----------------------------------------------------------------------


def test_records_of_the_future_are_noticed(tmp_path: Path) -> None:
    root = BrokerRoot(tmp_path / "log")
    root.partition("t-0")
    assert notices(root.path, now_ms=NOW_MS) == []
    assert "retention by time deletes" in notices(root.path, now_ms=-4_000_000)[0]


@pytest.mark.parametrize("start", [0, 5])
def test_a_log_that_begins_above_its_start_may_be_tiered(
    tmp_path: Path, start: int, caplog: pytest.LogCaptureFixture
) -> None:
    root = BrokerRoot(tmp_path / "log")
    root.partition("t-0", (10, 50), 100)
    root.checkpoint(broker_root.LOG_START, {"t-0": start})
    (root.path / "remote-log-index-cache").mkdir()
    assert kafkalog.open(root.path).offsets("t") == {0: (10, 100)}
    assert "tiered storage" in caplog.text
    assert any("tiered storage" in each for each in notices(root.path))


def test_a_future_partition_alone_is_noticed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root = BrokerRoot(tmp_path / "log")
    root.partition("t-0")
    root.partition(f"t-0.{'a' * 32}-future")
    root.partition(f"t-1.{'b' * 32}-future")
    log = kafkalog.open(root.path)
    assert log.offsets("t") == {0: (0, 100)}
    with pytest.raises(InvalidInputError, match="only this is left of t-1"):
        list(log.read("t", 1))
    assert "only this is left of t-1" in caplog.text
    assert sum("only this is left" in each for each in notices(root.path)) == 1


# --- links that lead nowhere ---------------------------------------------------------------------

LINKED = ("t-9", "meta.properties", "commit.bak", ".kafka_cleanshutdown", "t-9.x-future", "t-1")


@pytest.mark.parametrize("name", [*LINKED, broker_root.LOG_START, broker_root.CLEANER])
@pytest.mark.parametrize("target", ["itself", "nothing"])
def test_a_link_that_leads_nowhere_costs_no_other_partition(
    tmp_path: Path, name: str, target: str
) -> None:
    root = BrokerRoot(tmp_path / "log")
    root.partition("t-0")
    path = root.path / name
    path.unlink(missing_ok=True)
    path.symlink_to(path if target == "itself" else tmp_path / "nothing")
    assert kafkalog.open(root.path).offsets("t") == {0: (0, 100)}
    assert all(path.name in str(found.path) for found in verify(root.path) if found.is_damage)


@pytest.mark.parametrize("place", ["loop", "loop/sub"])
def test_a_path_that_leads_in_a_circle_has_no_log(tmp_path: Path, place: str) -> None:
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    path = tmp_path / place
    for act in (
        lambda: kafkalog.open([path, tmp_path], read_only=True),
        lambda: kafkalog.open(path, create=False),
        lambda: list(verify(path)),
        lambda: adopt(path, now_ms=NOW_MS),
        lambda: release(path, now_ms=NOW_MS),
        lambda: read_places({"path": str(path)}) and kafkalog.open(path, read_only=True),
    ):
        with pytest.raises(InvalidInputError, match=f"{path}: "):
            act()


@pytest.mark.parametrize("kind", ["broker", "copy", "ours"])
@pytest.mark.parametrize("place", ["log/orders-9", "log/orders-0/sub", "log/nothing"])
def test_a_missing_directory_in_a_log_is_answered_with_the_log(
    tmp_path: Path, kind: str, place: str
) -> None:
    log_of_kind(tmp_path / "log", kind)
    for act in (
        lambda: list(verify(tmp_path / place)),
        lambda: adopt(tmp_path / place, now_ms=NOW_MS),
        lambda: release(tmp_path / place, now_ms=NOW_MS),
    ):
        with pytest.raises(InvalidInputError, match=f"give {tmp_path / 'log'}$"):
            act()
