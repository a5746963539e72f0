"""Where the groups were, from Kafka's own topics; the reference is what Kafka's own tools printed.

`groups.tar.xz` has the disk of a broker that was killed (`python -m tests.conformance.group_disk`),
`old-groups.tar.xz` those of old releases (`python -m tests.conformance.old_groups`).
Records of other versions and faults are written by hand.
"""

from __future__ import annotations

import json
import shutil
import struct
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import kafkalog
from kafkalog.datasource.offsets import TopicPartition, from_json
from kafkalog.errors import CorruptBatchError, CorruptRecordError, InvalidInputError
from kafkalog.errors import UnknownGroupError as UnknownGroup
from kafkalog.inspection.consumer_group import ConsumerGroup, GroupPosition, GroupType
from kafkalog.inspection.groups import Groups, read_groups
from kafkalog.storage_engine.ownership.adopt import adopt
from kafkalog.storage_engine.place import Place, open_log
from tests.builders.batch_builder import ABORT, COMMIT, BuiltBatch, marker
from tests.builders.commits import commit, key, text, value
from tests.builders.segment_files import name, write_segment
from tests.unit.storage_engine.store_log import memory_address

ARCHIVE = Path(__file__).with_name("groups.tar.xz")
OLD_GROUPS = Path(__file__).with_name("old-groups.tar.xz")
NOW_MS = 1_800_000_000_000
TOMBSTONE = None


@pytest.fixture(scope="module")
def disk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("disk")
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(path, filter="data")
    return path


def groups(place: Place) -> Groups:
    with open_log(place, read_only=True, create=False) as log:
        return read_groups(log)


def positions(found: Groups, *, shared: bool = False) -> set[tuple[Any, ...]]:
    """Return (group, topic, partition, offset, lag) of all groups of one kind."""
    return {
        (group.name, at.topic, at.partition, at.offset, at.lag)
        for group in found.by_name.values()
        if (group.type is GroupType.SHARE) == shared
        for at in group.positions
    }


def printed(disk: Path, rows: str, offset: str) -> set[tuple[Any, ...]]:
    """Return the same of what a tool of Kafka's printed."""
    said = json.loads((disk / "said.json").read_text())[rows]
    return {
        (row["GROUP"], row["TOPIC"], *(int(row[name]) for name in ("PARTITION", offset, "LAG")))
        for row in said
        if row[offset] != "-"
    }


# --- a real broker's disk ------------------------------------------------------------------------


def test_positions_and_start_offsets_are_those_of_kafkas_tools(disk: Path) -> None:
    found = groups(disk / "log-0")
    assert positions(found) == printed(disk, "groups", "CURRENT-OFFSET")
    assert positions(found, shared=True) == printed(disk, "shared", "START-OFFSET")
    assert not found.damage and not found.unknown and not found.notices


def test_each_group_has_its_type_and_what_its_members_speak(disk: Path) -> None:
    found = groups(disk / "log-0").by_name
    kinds = {
        name: (found[name].type, found[name].protocol) for name in found if name.endswith("-1")
    }
    assert kinds["classic-1"] == ("classic", "consumer")
    assert kinds["consumer-1"] == ("consumer", None)
    assert kinds["share-1"] == ("share", None)
    assert found["simple-1-0"].type == "simple"
    assert "deleted-1" not in found


def test_a_copy_in_a_directory_and_in_a_store_and_an_adopted_log_have_the_same_groups(
    disk: Path, tmp_path: Path
) -> None:
    wanted = groups(disk / "log-0").by_name
    for place in (tmp_path / "copy", memory_address()):
        with open_log(disk / "log-0", read_only=True) as source, open_log(place) as target:
            from kafkalog.storage_engine.copying.copy import copy

            copy(source, target, now_ms=NOW_MS)
            assert read_groups(target).by_name == wanted
    root = Path(shutil.copytree(disk / "log-0", tmp_path / "adopted"))
    adopt(root, now_ms=NOW_MS)
    assert kafkalog.open(root, read_only=True).topics() == ["topic-0", "topic-1"]
    assert groups(root).by_name == wanted


def test_partitions_alone_have_the_groups_too(disk: Path, tmp_path: Path) -> None:
    for path in (disk / "log-0").glob("*-*"):
        if path.is_dir():
            shutil.copytree(path, tmp_path / path.name)
    for path in tmp_path.rglob("*.metadata"):
        path.unlink()
    found = groups(tmp_path)
    assert positions(found) == printed(disk, "groups", "CURRENT-OFFSET")
    assert found.notices == []  # ids that are not known are not compared


def test_commits_of_a_topic_of_another_id_are_named(disk: Path, tmp_path: Path) -> None:
    root = Path(shutil.copytree(disk / "log-0", tmp_path / "log"))
    for path in root.glob("topic-1-*/partition.metadata"):
        path.write_text(f"version: 0\ntopic_id: {'B' * 21}Q")
    (notice,) = groups(root).notices
    assert "commits name topic 'topic-1' by the id " in notice
    assert f"(here it is {'B' * 21}Q)" in notice


def test_a_groups_offsets_fit_the_starting_offsets_of_spark(disk: Path) -> None:
    found = kafkalog.group_offsets(disk / "log-0", "classic-1")
    assert found["topic-1"].keys() == {0, 1, 2}
    committed = {
        (row[1], row[2]): row[3]
        for row in printed(disk, "groups", "CURRENT-OFFSET")
        if row[0] == "classic-1"
    }
    starts = from_json(json.loads(json.dumps(found)))
    for partition in range(3):
        wanted = committed.get(("topic-1", partition), -2)
        assert starts[TopicPartition("topic-1", partition)] == wanted


def test_a_share_group_and_an_unknown_one_have_no_offsets_to_go_on_from(disk: Path) -> None:
    with pytest.raises(InvalidInputError, match=r"'share-1' is a share group"):
        kafkalog.group_offsets(disk / "log-0", "share-1")
    with pytest.raises(UnknownGroup, match=r"no group 'nobody' .*found 'classic-0', 'classic-1'"):
        kafkalog.group_offsets(disk / "log-0", "nobody")
    with pytest.raises(
        InvalidInputError, match=r"no topic __consumer_offsets, which has the groups' positions"
    ):
        kafkalog.group_offsets(disk / "metadata", "any")


def test_partitions_that_are_not_here_are_named(disk: Path, tmp_path: Path) -> None:
    root = Path(shutil.copytree(disk / "log-0", tmp_path / "log"))
    shutil.rmtree(root / "__consumer_offsets-1")
    (notice,) = groups(root).notices
    assert "of 4 partitions of __consumer_offsets 1 are not here (1)" in notice
    with pytest.raises(UnknownGroup, match=r"nobody.*1 are not here"):
        kafkalog.group_offsets(root, "nobody")


@pytest.mark.parametrize("release", ["0.10.2.2", "0.11.0.3", "2.8.2"])
def test_groups_of_old_releases_are_where_their_broker_said(release: str, tmp_path: Path) -> None:
    with tarfile.open(OLD_GROUPS) as archive:
        archive.extractall(tmp_path, filter="data")
    said = json.loads((tmp_path / "positions.json").read_text())[release]
    found = groups(tmp_path / release)
    places = {
        group.name: [(at.topic, at.partition, at.offset, at.metadata) for at in group.positions]
        for group in found.by_name.values()
    }
    # The client that committed writes the end of a C string as well, and does not show it.
    assert places == {name: [("plain", 0, at, f"{m}\0")] for name, (at, m) in said.items()}
    assert found.by_name["group-3"].type == "classic" and found.by_name["group-0"].type == "simple"
    expires = {at.expire_timestamp for group in found.by_name.values() for at in group.positions}
    assert (expires == {None}) == (release == "2.8.2")  # version 1 of the value ended with 2.0
    assert not found.damage and not found.unknown and not found.notices


# --- records by hand -----------------------------------------------------------------------------


def disk_of(root: Path, batches: Sequence[BuiltBatch], partition: int = 0) -> Path:
    directory = root / f"__consumer_offsets-{partition}"
    directory.mkdir(parents=True)
    write_segment(directory, 0, batches, indexes=False)
    return root


def offsets(root: Path, group: str = "g") -> dict[int, int]:
    return {at.partition: at.offset for at in groups(root).by_name[group].positions}


@pytest.mark.parametrize("version", range(5))
def test_a_commit_of_every_version_is_read(tmp_path: Path, version: int) -> None:
    root = disk_of(tmp_path, [commit(0, (key(), value(7, version=version)))])
    assert groups(root).by_name["g"].positions == [
        GroupPosition(
            "t",
            0,
            7,
            None,
            leader_epoch=5 if version >= 3 else None,
            commit_timestamp=1000,
            expire_timestamp=77 if version == 1 else None,
            metadata="m",
        )
    ]


def test_both_versions_of_a_key_mean_the_same_position(tmp_path: Path) -> None:
    old, new = (key(version=0), value(1, version=0)), (key(version=1), value(2))
    assert offsets(disk_of(tmp_path / "a", [commit(0, old, new)])) == {0: 2}
    assert offsets(disk_of(tmp_path / "b", [commit(0, new, old)])) == {0: 1}


def test_a_tombstone_takes_a_position_away_and_a_later_commit_brings_it_back(
    tmp_path: Path,
) -> None:
    records = [(key(), value(1)), (key(partition=1), value(2)), (key(), TOMBSTONE)]
    assert offsets(disk_of(tmp_path / "a", [commit(0, *records)])) == {1: 2}
    records.append((key(), value(3)))
    assert offsets(disk_of(tmp_path / "b", [commit(0, *records)])) == {0: 3, 1: 2}


def test_a_committed_offset_below_zero_is_not_a_position(tmp_path: Path) -> None:
    records = [(key(), value(4)), (key(), value(-1)), (key(partition=1), value(2))]
    root = disk_of(tmp_path, [commit(0, *records)])
    for number in range(2):
        (tmp_path / f"t-{number}").mkdir()
        write_segment(tmp_path / f"t-{number}", 0, [])
    assert offsets(root) == {1: 2}
    # Spark takes -1 for the end, so it would skip all records there are.
    assert kafkalog.group_offsets(root, "g") == {"t": {0: -2, 1: 2}}


PENDING = commit(1, (key(), value(5)), of=7)
IN_TRANSACTIONS = {
    "committed": ([PENDING, marker(2, COMMIT, 7)], 5),
    "aborted": ([PENDING, marker(2, ABORT, 7)], 1),
    "open": ([PENDING], 1),
    "another producer's marker": ([PENDING, marker(2, COMMIT, 8)], 1),
    "a plain commit beyond an open one": ([PENDING, commit(2, (key(), value(6)))], 6),
    "a later plain commit": (
        [PENDING, commit(2, (key(), value(6))), marker(3, COMMIT, 7)],
        6,
    ),
    "a tombstone takes what is pending": (
        [PENDING, commit(2, (key(), TOMBSTONE)), marker(3, COMMIT, 7)],
        None,
    ),
    "the later record, not the later marker": (
        [PENDING, commit(2, (key(), value(6)), of=8), marker(3, COMMIT, 8), marker(4, COMMIT, 7)],
        6,
    ),
}


@pytest.mark.parametrize("batches, wanted", IN_TRANSACTIONS.values(), ids=IN_TRANSACTIONS)
def test_a_commit_in_a_transaction_counts_as_kafkas_coordinator_counts_it(
    tmp_path: Path, batches: list[BuiltBatch], wanted: int | None
) -> None:
    root = disk_of(tmp_path, [commit(0, (key(), value(1))), *batches])
    found = groups(root).by_name.get("g", ConsumerGroup("g"))
    assert [at.offset for at in found.positions] == ([] if wanted is None else [wanted])


def test_records_of_unknown_types_are_counted_and_no_error(tmp_path: Path) -> None:
    unknown = struct.pack(">h", 99) + b"anything"
    records = [(unknown, b"x"), (unknown, TOMBSTONE), (b"", b"x"), (key(), value(1))]
    found = groups(disk_of(tmp_path, [commit(0, *records)]))
    assert found.unknown == {
        "of type 99 in __consumer_offsets": 2,
        "without a type in __consumer_offsets": 1,
    }
    assert positions(found) == {("g", "t", 0, 1, None)} and not found.damage


@pytest.mark.parametrize(
    "damaged, words",
    [
        (value(5)[:-3], r"commitTimestamp: expected 8 bytes at byte \d+, found 5"),
        (value(5)[:1], "expected 2 bytes of a version, found 1"),
        (struct.pack(">h", 9) + value(5)[2:], "version 0 to 4, found version 9"),
        (struct.pack(">hqih", 3, 5, 5, -1), "metadata: expected a string .*, found null"),
    ],
)
def test_a_damaged_value_costs_its_group_alone_and_names_its_place(
    tmp_path: Path, damaged: bytes, words: str
) -> None:
    records = [(key("sound"), value(1)), (key("g"), value(4)), (key("g"), damaged)]
    root = disk_of(tmp_path, [commit(0, *records)])
    (fault,) = groups(root).damage
    assert "__consumer_offsets-0: at offset 2: expected a value of OffsetCommit" in str(fault)
    with pytest.raises(CorruptRecordError, match=words):
        kafkalog.group_offsets(root, "g")
    assert kafkalog.group_offsets(root, "sound") == {"t": {0: 1}}


def test_a_damaged_record_about_a_group_leaves_its_positions(tmp_path: Path) -> None:
    metadata = struct.pack(">h", 2) + text("g"), b"\0\3broken"
    root = disk_of(tmp_path, [commit(0, (key(), value(4)), metadata)])
    (fault,) = groups(root).damage
    assert "at offset 1: expected a value of GroupMetadata" in str(fault)
    assert kafkalog.group_offsets(root, "g") == {"t": {0: 4}}


@pytest.mark.parametrize(
    "number, member, kind", [(3, 5, "consumer"), (11, 10, "share"), (17, 19, "streams")]
)
def test_a_group_of_each_new_type_is_known_by_its_own_record(
    tmp_path: Path, number: int, member: int, kind: str
) -> None:
    # The hash of the topics is a tagged field of consumer groups alone.
    state = struct.pack(">hi", 0, 7) + (b"" if kind == "consumer" else bytes(8)) + b"\0"
    group = struct.pack(">h", number) + text("g"), state
    members = [(struct.pack(">h", member) + text("g") + text(f"m{n}"), b"\0\0") for n in (1, 2)]
    found = groups(disk_of(tmp_path, [commit(0, group, *members)]))
    assert (found.by_name["g"].type, found.by_name["g"].members) == (kind, 2)
    assert not found.damage


SHARED = text("s") + bytes(15) + b"\1" + struct.pack(">i", 4)
"""What the keys of a share group's partition have in common."""


def snapshot(start: int) -> tuple[bytes, bytes]:
    state = struct.pack(">hiiiqqq", 0, 1, 1, 5, start, 900, 1000)
    return b"\0\0" + SHARED, state + b"\1\0"


def update(start: int, delivered: int | None = None) -> tuple[bytes, bytes]:
    tags = b"\0" if delivered is None else b"\1\0\4" + struct.pack(">i", delivered)
    return b"\0\1" + SHARED, struct.pack(">hiiq", 0, 1, 5, start) + b"\1" + tags


STATES = {
    "a snapshot": ([snapshot(10)], [(10, None)]),
    "a later update": ([snapshot(10), update(15, 2)], [(15, 2)]),
    "an update that leaves the start": ([snapshot(10), update(-1)], [(10, None)]),
    "a later snapshot": ([snapshot(10), update(15, 2), snapshot(20)], [(20, None)]),
    "a state without a start": ([snapshot(-1)], []),
    "a deletion": ([snapshot(10), update(15), (snapshot(0)[0], TOMBSTONE)], []),
}


@pytest.mark.parametrize("records, wanted", STATES.values(), ids=STATES)
def test_a_share_groups_start_offset_is_that_of_its_last_state(
    tmp_path: Path,
    records: list[tuple[bytes, bytes | None]],
    wanted: list[tuple[int, int | None]],
) -> None:
    directory = tmp_path / "__share_group_state-0"
    directory.mkdir()
    write_segment(directory, 0, [commit(0, *records)], indexes=False)
    found = groups(tmp_path)
    states = [at for group in found.by_name.values() for at in group.positions]
    assert [(at.offset, at.delivered) for at in states] == wanted
    assert all((at.topic, at.partition) == (f"{'A' * 20}AQ", 4) for at in states)
    assert not found.damage and not found.unknown


def test_a_damaged_partition_costs_its_groups_alone(tmp_path: Path) -> None:
    disk_of(tmp_path, [commit(0, (key("lost"), value(1)))])
    directory = tmp_path / "__consumer_offsets-0"
    for base in (1, 2):
        write_segment(directory, base, [commit(base, (key("lost"), value(base)))])
    log = directory / name(1, ".log")
    log.write_bytes(log.read_bytes()[:-1] + b"!")
    write_segment(directory, 0, [commit(0, (key("lost"), value(1)))])
    disk_of(tmp_path, [commit(0, (key("sound"), value(1)))], partition=1)
    (tmp_path / "meta.properties").write_text("node.id=1\n")
    (tmp_path / ".kafka_cleanshutdown").touch()
    found = groups(tmp_path)
    assert list(found.by_name) == ["sound"]
    assert [type(fault) for fault in found.damage] == [CorruptBatchError]
    with pytest.raises(CorruptBatchError, match="checksum"):
        kafkalog.group_offsets(tmp_path, "lost")
    assert kafkalog.group_offsets(tmp_path, "sound") == {"t": {0: 1}}
