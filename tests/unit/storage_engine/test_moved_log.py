"""The directory of an open log is moved or removed, or the log is sent to another process."""

from __future__ import annotations

import copy
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

import kafkalog
from kafkalog.errors import InvalidInputError, LogMovedError
from kafkalog.storage_engine.metadata.state import TopicState
from tests.unit.storage_engine.broker_root import BrokerRoot

ACTS: dict[str, Callable[[kafkalog.KafkaLog], object]] = {
    "append": lambda log: log.append("t", [("b", "1")]),
    "create": lambda log: log.create_topic("u"),
    "read": lambda log: list(log.read("t", 0, 0)),
    "latest": lambda log: list(log.latest("t")),
    "lookup": lambda log: log.lookup("t", "a"),
    "topics": lambda log: log.topics(),
    "describe": lambda log: log.describe("t"),
    "offsets": lambda log: log.offsets("t"),
    "offset_for_time": lambda log: log.offset_for_time("t", 0),
    "clean": lambda log: log.clean("t", force=True),
    "a turn of the cleaner": lambda log: log.clean(),
    "status": lambda log: log.status(),
    "explain": lambda log: log.explain(),
    "delete_topic": lambda log: log.delete_topic("t"),
    "erase": lambda log: log.erase("t", ["a"]),
}
HARMS: dict[str, Callable[[Path], object]] = {
    "renamed": lambda root: root.rename(root.with_name("other")),
    "removed": shutil.rmtree,
    "a file now": lambda root: (shutil.rmtree(root), root.touch()),
    "empty": lambda root: (shutil.rmtree(root), root.mkdir()),
}


@pytest.mark.parametrize("read_only", [False, True])
@pytest.mark.parametrize("harm", HARMS)
def test_every_act_on_a_log_whose_directory_is_gone_says_so(
    harm: str, read_only: bool, tmp_path: Path
) -> None:
    for number, act in enumerate(ACTS.values()):
        root = tmp_path / str(number) / "log"
        root.parent.mkdir()
        with kafkalog.open(root) as log:
            log.create_topic("t", config={"cleanup.policy": "compact,delete"})
            log.append("t", [("a", "1")])
        log = kafkalog.open(root, read_only=read_only)
        log.offsets("t")
        HARMS[harm](root)
        expected = (InvalidInputError, LogMovedError) if read_only else LogMovedError
        with pytest.raises(expected) as found:
            act(log)
        if isinstance(found.value, InvalidInputError):
            assert "read-only" in str(found.value)
        else:
            assert str(found.value).startswith(f"{root}: ") and "Open the log again" in str(
                found.value
            )
        log.close()
        assert not (root / "commit").exists()


def test_a_read_under_way_goes_on_in_its_open_files(tmp_path: Path) -> None:
    root = tmp_path / "log"
    log = kafkalog.open(root)
    log.create_topic("t")
    log.append("t", [("a", "1")])
    reading = log.read("t", 0)
    found = [next(reading)]
    root.rename(tmp_path / "other")
    found += reading
    assert [key for batch in found for key in batch["key"].to_pylist()] == [b"a"]


def test_a_log_that_was_moved_is_opened_again_where_it_is(tmp_path: Path) -> None:
    log = kafkalog.open(tmp_path / "log")
    log.create_topic("t")
    log.append("t", [("a", "1")])
    (tmp_path / "log").rename(tmp_path / "other")
    with kafkalog.open(tmp_path / "other") as other:
        other.append("t", [("b", "1")])
        assert other.offsets("t") == {0: (0, 2)}


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize("place", ["directory", "memory://pickled"])
def test_an_open_log_cannot_be_pickled_and_says_what_to_do(
    place: str, protocol: int, tmp_path: Path
) -> None:
    path = str(tmp_path) if place == "directory" else place
    for log in (kafkalog.open(path), kafkalog.open(path, read_only=True)):
        for value in (log, [log], {"log": log}):
            with pytest.raises(InvalidInputError, match=r"call kafkalog\.open\(path\) there"):
                pickle.dumps(value, protocol)


@pytest.mark.parametrize("kind", ["directory", "memory", "broker"])
@pytest.mark.parametrize("send", [lambda found: pickle.loads(pickle.dumps(found)), copy.deepcopy])
def test_what_a_log_says_of_a_topic_can_be_pickled_and_copied(
    kind: str, send: Callable[[object], object], tmp_path: Path
) -> None:
    if kind == "broker":
        BrokerRoot(tmp_path / "log").partition("t-0")
    log = kafkalog.open(f"memory://{tmp_path.name}" if kind == "memory" else tmp_path / "log")
    if kind != "broker":
        created = log.create_topic("t", partitions=3, config={"segment.ms": "5"})
        assert send(created) == created
    found = log.describe("t")
    sent = send(found)
    assert isinstance(sent, TopicState)
    assert (sent.topic_id, dict(sent.config)) == (found.topic_id, dict(found.config))
    assert list(sent.partitions) == list(found.partitions)
    with pytest.raises(TypeError):
        sent.config["x"] = "y"  # type: ignore[index]
