"""The disks of several brokers as one log: which replica is read, and what is said of others."""

from __future__ import annotations

import random
import struct
from collections.abc import Sequence
from pathlib import Path

import pytest

import kafkalog
from kafkalog.cli import run
from kafkalog.errors import InvalidInputError, StorageError
from kafkalog.storage_engine.broker.metadata_log import read_topics
from kafkalog.storage_engine.format import leader_epochs
from kafkalog.storage_engine.place import directory_log_of
from tests.builders.batch_builder import batch
from tests.builders.log_contents import offsets
from tests.builders.segment_files import write_segment
from tests.unit.storage_engine import broker_root, test_metadata_log
from tests.unit.storage_engine.broker_root import TOPIC_ID, BrokerRoot

Epochs = Sequence[tuple[int, int]]


def broker(path: Path, node: int) -> BrokerRoot:
    root = BrokerRoot(path)
    properties = f"version=1\ncluster.id=c\nnode.id={node}\ndirectory.id=d{node}\n"
    (path / "meta.properties").write_text(properties)
    return root


def replica(root: BrokerRoot, epochs: Epochs, end: int, name: str = "t-0") -> Path:
    """Make a partition whose leader epochs begin at these offsets, multiples of ten."""
    directory = root.path / name
    directory.mkdir()
    starts = [start for _, start in epochs]
    batches = [
        batch(offset, 10, leader_epoch=epoch)
        for (epoch, start), following in zip(epochs, [*starts[1:], end], strict=True)
        for offset in range(start, following, 10)
    ]
    write_segment(directory, 0, batches)
    lines = ["0", str(len(epochs)), *(f"{epoch} {start}" for epoch, start in epochs), ""]
    (directory / "leader-epoch-checkpoint").write_text("\n".join(lines))
    (directory / "partition.metadata").write_text(f"version: 0\ntopic_id: {TOPIC_ID}")
    return directory


def brokers(tmp_path: Path, *replicas: tuple[Epochs, int]) -> list[Path]:
    """Make a broker for each replica of a partition: its leader epochs and its end."""
    roots = []
    for node, (epochs, end) in enumerate(replicas, 1):
        root = broker(tmp_path / f"broker-{node}", node)
        replica(root, epochs, end)
        roots.append(root.path)
    return roots


def marked(root: Path, checkpoint: str, offset: int) -> None:
    (root / checkpoint).write_text(f"0\n1\nt 0 {offset}\n")


def chosen(roots: list[Path]) -> str:
    with kafkalog.open(roots) as log:
        return directory_log_of(log).partition_directory("t", 0).parent.name


# --- which one is read ---------------------------------------------------------------------------


def test_the_longest_replica_of_the_highest_leader_epoch_is_read(tmp_path: Path) -> None:
    history = [(0, 0), (2, 30)]
    roots = brokers(tmp_path, (history, 60), ([(0, 0), (1, 40)], 90), (history, 80))
    for given in (roots, roots[::-1]):
        with kafkalog.open(given) as log:
            assert log.offsets("t") == {0: (0, 80)}
            assert offsets(directory_log_of(log)) == list(range(80))
    assert chosen(roots) == "broker-3"


def test_a_leader_epoch_that_begins_at_the_end_of_the_log_counts(tmp_path: Path) -> None:
    roots = brokers(tmp_path, ([(0, 0)], 90), ([(0, 0), (1, 60)], 60))
    assert chosen(roots) == "broker-2"


def test_a_leader_epoch_that_begins_above_a_torn_log_does_not_count(tmp_path: Path) -> None:
    roots = brokers(tmp_path, ([(0, 0), (1, 60)], 90), ([(0, 0), (1, 60)], 90))
    log = next((roots[1] / "t-0").glob("*.log"))
    log.write_bytes(log.read_bytes()[:-700])
    assert chosen(roots) == "broker-1"


def test_a_lost_end_does_not_make_a_replica_longer(tmp_path: Path) -> None:
    roots = brokers(tmp_path, ([(0, 0)], 50), ([(0, 0)], 60))
    marked(roots[0], broker_root.RECOVERY_POINT, 70)
    assert chosen(roots) == "broker-2"


def test_equal_replicas_are_read_without_a_word(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    roots = brokers(tmp_path, ([(0, 0)], 50), ([(0, 0)], 50))
    assert chosen(roots) == "broker-1"
    assert caplog.text == ""


def test_a_brokers_disks_count_as_one_replica_among_other_brokers(tmp_path: Path) -> None:
    first, disk = broker(tmp_path / "1a", 1), broker(tmp_path / "1b", 1)
    second = broker(tmp_path / "2", 2)
    replica(first, [(0, 0)], 20)
    replica(disk, [(0, 0)], 30, "t-1")
    replica(second, [(0, 0)], 50)
    with kafkalog.open(f"{first.path},{disk.path},{second.path}") as log:
        assert log.offsets("t") == {0: (0, 50), 1: (0, 30)}


def test_a_partition_on_two_disks_of_a_broker_is_read_from_another_broker(tmp_path: Path) -> None:
    roots = [broker(tmp_path / name, node) for name, node in (("1a", 1), ("1b", 1), ("2", 2))]
    for root, end in zip(roots, (90, 80, 50), strict=True):
        replica(root, [(0, 0)], end)
    with kafkalog.open([root.path for root in roots]) as log:
        assert log.offsets("t") == {0: (0, 50)}


def test_copies_without_a_sign_of_their_broker_are_replicas(tmp_path: Path) -> None:
    roots = brokers(tmp_path, ([(0, 0)], 50), ([(0, 0)], 70))
    for root in roots:
        (root / "meta.properties").unlink()
    assert chosen(roots) == "broker-2"


def test_a_replica_that_cannot_be_read_costs_no_other(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    roots = brokers(tmp_path, ([(0, 0)], 90), ([(0, 0)], 70))
    log = next((roots[0] / "t-0").glob("*.log"))
    log.unlink()
    log.symlink_to(roots[1] / "t-0" / log.name)
    assert chosen(roots) == "broker-2"
    assert str(log) in caplog.text
    other = next((roots[1] / "t-0").glob("*.log"))
    other.unlink()
    other.symlink_to(log)
    with pytest.raises(StorageError, match=str(log.parent)):
        chosen(roots)


# --- what is said --------------------------------------------------------------------------------


def test_one_notice_says_which_replica_is_read_and_how_the_others_differ(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    replicas = ([(0, 0), (2, 30)], 80), ([(0, 0), (1, 50)], 90), ([(0, 0)], 20)
    one, two, three = roots = brokers(tmp_path, *replicas)
    with kafkalog.open(roots) as log:
        log.offsets("t")
        list(log.read("t", 0))
    (notice,) = [each for each in caplog.messages if "is read" in each]
    assert notice == (
        f"t-0: {one}/t-0 is read, because it has the highest leader epoch (epoch 2, log end 80); "
        f"{two}/t-0 has a divergent tail: its records from offset 30 to 89, of leader epoch 1, are "
        f"not in the leader's log; {three}/t-0 ends at offset 20"
    )


def test_committed_records_that_no_replica_has_are_damage(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    roots = brokers(tmp_path, ([(0, 0)], 50), ([(0, 0)], 50))
    address = ",".join(map(str, roots))
    assert run(["verify", address]) == 0
    for root in roots:
        marked(root, broker_root.HIGH_WATERMARK, 70)
    assert run(["verify", address]) == 1
    expected = "had acknowledged all below offset 70, and the records from 50 on are on none"
    assert expected in capsys.readouterr().out


def metadata(root: Path, records: Sequence[bytes], leader_epoch: int = 1) -> None:
    data = test_metadata_log.batch(0, records)
    data = data[:12] + struct.pack(">i", leader_epoch) + data[16:]
    test_metadata_log.written(root, data)


def partition(number: int, replicas: Sequence[int], in_sync: Sequence[int]) -> bytes:
    def nodes(numbers: Sequence[int]) -> bytes:
        return bytes([len(numbers) + 1]) + b"".join(struct.pack(">i", each) for each in numbers)

    lists = nodes(replicas) + nodes(in_sync) + nodes([]) + nodes([])
    directories = bytes([len(replicas) + 1]) + bytes(16 * len(replicas))
    rest = struct.pack(">iii", replicas[0], 0, 0) + directories + b"\0"
    head = struct.pack(">i", number) + test_metadata_log.ID
    return test_metadata_log.frame(3, head + lists + rest, version=1)


def changed(number: int, in_sync: Sequence[int]) -> bytes:
    nodes = bytes([len(in_sync) + 1]) + b"".join(struct.pack(">i", each) for each in in_sync)
    tagged = bytes([1, 0, len(nodes)]) + nodes
    head = struct.pack(">i", number) + test_metadata_log.ID
    return test_metadata_log.frame(5, head + tagged)


def test_the_newest_metadata_names_partitions_and_brokers_that_are_not_here(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    roots = brokers(tmp_path, ([(0, 0)], 50), ([(0, 0)], 50))
    for root in roots:
        (root / "t-0" / "partition.metadata").unlink()
    old = [test_metadata_log.topic("t"), partition(0, [1, 2, 3], [1, 2, 3])]
    new = [*old, partition(1, [3, 4], [3]), changed(0, [3])]
    metadata(roots[0], [*old, *[test_metadata_log.topic("gone")] * 9], leader_epoch=1)
    metadata(roots[1], new, leader_epoch=2)
    assert read_topics(roots[1])["t"].assignment(0).replicas == (1, 2, 3)
    with kafkalog.open(roots) as log:
        assert log.describe("t").absent == {1}
        log.offsets("t")
        with pytest.raises(InvalidInputError, match="it was on the brokers 3, 4"):
            list(log.read("t", 1))
    assert "topic 't': partitions without a replica here are 1: they were on the brokers 3, 4" in (
        caplog.text
    )
    assert "in-sync replicas were on the brokers 3, and none of them can be read" in caplog.text


def test_verify_compares_the_metadata_with_the_disk(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = broker(tmp_path / "1", 1)
    replica(root, [(0, 0)], 50)
    (root.path / "t-0" / "partition.metadata").unlink()
    records = [test_metadata_log.topic("t"), *(partition(n, [1], [1]) for n in range(3))]
    metadata(root.path, records)
    root.checkpoint(broker_root.HIGH_WATERMARK, {"t-0": 50, "t-2": 0})
    assert run(["verify", str(root.path)]) == 0
    root.checkpoint(broker_root.HIGH_WATERMARK, {"t-0": 50, "t-1": 30})
    capsys.readouterr()
    assert run(["verify", str(root.path)]) == 1
    shown = capsys.readouterr().out
    assert f"damage: {root.path}/t-1" in shown
    assert "replication-offset-checkpoint has the offset 30" in shown


# --- what can be done ----------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["a directory", "an object store"])
def test_a_copy_makes_one_log_of_the_disks(tmp_path: Path, kind: str) -> None:
    roots = brokers(tmp_path, ([(0, 0), (2, 30)], 60), ([(0, 0), (1, 40)], 90))
    target = tmp_path / "one" if kind == "a directory" else f"memory://{tmp_path.name}"
    kafkalog.copy(roots, target)
    with kafkalog.open(target) as log:
        assert log.offsets("t") == {0: (0, 60)}
        assert [row for each in log.read("t", 0) for row in each["offset"].to_pylist()] == [
            *range(60)
        ]


@pytest.mark.parametrize("verb", ["verify", "status", "groups"])
def test_a_disk_that_is_not_there_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], verb: str
) -> None:
    replica(broker(tmp_path / "1", 1), [(0, 0)], 10)
    gone = tmp_path / "2"
    assert run([verb, f"{tmp_path / '1'},{gone}"]) == 2
    assert f"{gone}: there is no such directory" in capsys.readouterr().err


def test_the_disks_of_several_brokers_are_only_read(tmp_path: Path) -> None:
    roots = brokers(tmp_path, ([(0, 0)], 50), ([(0, 0)], 50))
    before = [*map(contents, roots)]
    with kafkalog.open(roots) as log:
        with pytest.raises(InvalidInputError, match=f"kafkalog copy {roots[0]},{roots[1]} NEW"):
            log.append("t", [(b"k", b"v")])
        list(log.read("t", 0))
    assert before == [*map(contents, roots)]


def contents(root: Path) -> dict[Path, bytes | None]:
    found = sorted(root.rglob("*"))
    return {path: path.read_bytes() if path.is_file() else None for path in found}


# --- where logs agree ----------------------------------------------------------------------------


def drawn_logs(draw: random.Random) -> list[list[int]]:
    """Return the logs of three replicas after elections of any of them: each record's epoch."""
    logs: list[list[int]] = [[], [], []]
    for epoch in range(draw.randrange(1, 8)):
        leader = draw.choice(logs)
        leader += [epoch] * draw.randrange(5)
        for follower in draw.sample(logs, draw.randrange(3)):
            if follower is not leader:
                same = agreed(follower, leader)
                follower[same:] = leader[same : draw.randrange(len(leader) + 1)]
    return logs


def agreed(one: list[int], other: list[int]) -> int:
    """Return how many records of two logs are the same: those of an epoch are its one leader's."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((n for n, (a, b) in pairs if a != b), min(len(one), len(other)))


def epochs_of(log: list[int]) -> list[tuple[int, int]]:
    return [(epoch, log.index(epoch)) for epoch in sorted(set(log))]


@pytest.mark.parametrize("seed", range(200))
def test_logs_agree_to_their_first_different_record(seed: int) -> None:
    one, other, _ = drawn_logs(random.Random(seed))
    if one and other:
        found = leader_epochs.agreed_end(epochs_of(one), len(one), epochs_of(other), len(other))
        assert found == agreed(one, other)


def test_logs_without_leader_epochs_agree_to_the_end_of_the_shorter_one() -> None:
    assert leader_epochs.agreed_end([], 50, [(1, 0)], 70) == 50
    assert leader_epochs.agreed_end([(1, 0)], 90, [], 70) == 70


def test_damage_is_logged_for_the_replica_that_is_read(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    roots = brokers(tmp_path, ([(0, 0)], 50), ([(0, 0)], 60))
    log = next((roots[1] / "t-0").glob("*.log"))
    log.write_bytes(log.read_bytes() + bytes(70))
    with kafkalog.open(roots) as opened:
        opened.offsets("t")
        opened.offsets("t")
    assert sum("do not count" in each for each in caplog.messages) == 1
