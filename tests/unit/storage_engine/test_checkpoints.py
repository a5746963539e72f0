"""Kafka's text files: what a broker's say, and what is none."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kafkalog.errors import CorruptLogError, StorageError
from kafkalog.storage_engine.metadata import checkpoints

TOPIC_ID = "fHq_kc1HQBmiynnrtAlnIQ"


def read(tmp_path: Path, data: bytes) -> dict[tuple[str, int], int]:
    path = tmp_path / "replication-offset-checkpoint"
    path.write_bytes(data)
    return checkpoints.read_offset_checkpoint(path)


def test_an_offset_checkpoint_names_partitions(tmp_path: Path) -> None:
    found = read(tmp_path, b"0\n3\na 0 5\nb-1 12  9223372036854775807\nc 1 -1\n")
    assert found == {("a", 0): 5, ("b-1", 12): 2**63 - 1, ("c", 1): -1}


def test_of_two_lines_for_a_partition_the_last_counts(tmp_path: Path) -> None:
    assert read(tmp_path, b"0\n2\na 0 5\na 0 6\n") == {("a", 0): 6}


def test_a_log_start_leaves_room_for_a_batch(tmp_path: Path) -> None:
    path = tmp_path / "log-start-offset-checkpoint"
    largest = 2**63 - 1 - 2**31
    path.write_text(f"0\n1\na 0 {largest}\n")
    assert checkpoints.read_offset_checkpoint(path) == {("a", 0): largest}
    for offset in (largest + 1, 2**63 - 1):
        path.write_text(f"0\n2\na 1 5\na 0 {offset}\n")
        with pytest.raises(CorruptLogError, match=f"byte 10: .* up to {largest}, found {offset}"):
            checkpoints.read_offset_checkpoint(path)


def test_a_missing_and_an_empty_checkpoint_say_nothing(tmp_path: Path) -> None:
    assert read(tmp_path, b"") == {}
    assert checkpoints.read_offset_checkpoint(tmp_path / "missing") == {}


@pytest.mark.parametrize(
    "data",
    [
        b"1\n0\n",
        b"0\n",
        b"0\nx\n",
        b"0\n2\na 0 5\n",
        b"0\n0\na 0 5\n",
        b"0\n1\na 0\n",
        b"0\n1\na 0 5 6\n",
        b"0\n1\na x 5\n",
        b"0\n1\na 0 5.0\n",
        b"\xff\xfe",
        b"\n",
    ],
)
def test_a_malformed_checkpoint_is_an_error_that_names_the_byte(
    tmp_path: Path, data: bytes
) -> None:
    with pytest.raises(CorruptLogError, match=r"at byte \d+: expected .*; restore it"):
        read(tmp_path, data)


def test_leader_epochs_come_back(tmp_path: Path) -> None:
    assert checkpoints.read_leader_epochs(tmp_path) == []
    checkpoints.write_leader_epochs(tmp_path, [(0, 0), (5, 40)])
    assert (tmp_path / "leader-epoch-checkpoint").read_text() == "0\n2\n0 0\n5 40\n"
    assert checkpoints.read_leader_epochs(tmp_path) == [(0, 0), (5, 40)]
    for entry in ("5 x", f"{2**31} 0", "-1 0"):
        (tmp_path / "leader-epoch-checkpoint").write_text(f"0\n1\n{entry}\n")
        with pytest.raises(CorruptLogError, match="byte 4"):
            checkpoints.read_leader_epochs(tmp_path)


@pytest.mark.parametrize(
    "text", [f"version: 0\ntopic_id: {TOPIC_ID}", f"version:0\n\ntopic_id:{TOPIC_ID}\n"]
)
def test_a_partition_names_its_topic(tmp_path: Path, text: str) -> None:
    assert checkpoints.read_topic_id(tmp_path) is None
    (tmp_path / "partition.metadata").write_text(text)
    assert checkpoints.read_topic_id(tmp_path) == TOPIC_ID


@pytest.mark.parametrize(
    "data",
    [
        b"version: 1\ntopic_id: fHq_kc1HQBmiynnrtAlnIQ",
        b"topic_id: fHq_kc1HQBmiynnrtAlnIQ",
        b"version: 0\ntopic_id: ",
        b"version: 0\ntopic_id: AAAAAAAAAAAAAAAAAAAAAA",
        b"version: 0\ntopic_id: fHq_kc1HQBmiynnrtAlnIR",
        b"version: 0\ntopic_id: ../../../../etc/passwd",
        b"version: 0\ntopic_id: \xff\xff",
    ],
)
def test_a_partition_that_names_no_topic_is_an_error(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "partition.metadata").write_bytes(data)
    with pytest.raises(StorageError, match="topic id of 22 characters"):
        checkpoints.read_topic_id(tmp_path)


def test_properties_are_javas(tmp_path: Path) -> None:
    path = tmp_path / "meta.properties"
    assert checkpoints.read_properties(path) == {}
    path.write_text("#\n! comment\n\nnode.id=1\ncluster.id = a\\=b\n")
    assert checkpoints.read_properties(path) == {"node.id": "1", "cluster.id": "a=b"}
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(StorageError, match="a text file of properties"):
        checkpoints.read_properties(path)


def test_leader_epochs_are_those_in_the_file_now_whoever_wrote_it(tmp_path: Path) -> None:
    path = tmp_path / "leader-epoch-checkpoint"
    checkpoints.write_leader_epochs(tmp_path, [(0, 0)])
    first = checkpoints.read_leader_epochs(tmp_path)
    first.append((9, 9))  # the caller's own
    assert checkpoints.read_leader_epochs(tmp_path) == [(0, 0)]
    stat = path.stat()
    path.write_bytes(path.read_bytes().replace(b"0 0\n", b"1 0\n"))  # in place, of the same size
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert checkpoints.read_leader_epochs(tmp_path) == [(1, 0)]
    path.unlink()
    assert checkpoints.read_leader_epochs(tmp_path) == []
