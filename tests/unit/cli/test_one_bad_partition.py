"""A partition that cannot be loaded costs itself: lists and reads of others go on, and say why."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import kafkalog as package
from kafkalog.storage_engine.fs import file_system
from tests.unit.cli.conftest import Command
from tests.unit.storage_engine.broker_root import BrokerRoot

BAD = "t-0"


def each(pattern: str) -> Callable[[Path], None]:
    """Put directories in the place of the files of a pattern."""

    def act(partition: Path) -> None:
        for path in partition.glob(pattern):
            path.unlink()
            path.mkdir()

    return act


def link_to_itself(partition: Path) -> None:
    shutil.rmtree(partition)
    partition.symlink_to(partition)


def file_instead(partition: Path) -> None:
    shutil.rmtree(partition)
    partition.write_bytes(b"no directory")


def zeros(partition: Path) -> None:
    for path in partition.iterdir():
        path.write_bytes(bytes(path.stat().st_size + 10))


DAMAGES: dict[str, Callable[[Path], None]] = {
    "indexes are directories": each("*.index"),
    "time indexes are directories": each("*.timeindex"),
    "segments are directories": each("*.log"),
    "epochs are a directory": each("leader-epoch-checkpoint"),
    "the id is a directory": each("partition.metadata"),
    "a link to itself": link_to_itself,
    "a file": file_instead,
    "zeros": zeros,
    "gone": shutil.rmtree,
    "no permission": lambda _: None,
}


class Forbidden(file_system.FileSystem):
    """A disk that refuses what is in the bad partition, as to another user."""

    def open(self, path: Any, *arguments: Any) -> int:
        if f"/{BAD}/" in os.fspath(path):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return super().open(path, *arguments)


@pytest.fixture(params=["broker", "copy", "ours"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    path = tmp_path / "log"
    if request.param == "ours":
        with package.open(path) as log:
            log.create_topic("t", 2)
            log.create_topic("u")
            for topic in ("t", "u"):
                log.append(topic, [(f"k{number}", "1") for number in range(50)])
        return path
    broker = BrokerRoot(path)
    for name in ("t-0", "t-1", "u-0"):
        broker.partition(name, topic_id=name[0] * 21 + "Q")
    if request.param == "copy":
        (path / "meta.properties").unlink()
        (path / ".lock").unlink()
    return path


@pytest.fixture(params=DAMAGES)
def damaged(request: pytest.FixtureRequest, root: Path) -> Iterator[Path]:
    DAMAGES[request.param](root / BAD)
    other = Forbidden() if request.param == "no permission" else file_system.FileSystem()
    with file_system.replaced(other):
        yield root


def test_the_other_partitions_are_listed_and_read(damaged: Path, kafkalog: Command) -> None:
    listed = kafkalog("topics", "list", damaged, "--json")
    assert listed.status == 0, listed.err
    assert [row["topic"] for row in listed.json] == ["t", "u"]
    assert listed.json[1]["offsets"] > 0
    for verb in (["topics", "list"], ["topics", "describe"], ["status"], ["explain"]):
        topic = ["t"] if verb[-1] == "describe" else []
        done = kafkalog(*verb, damaged, *topic)
        assert done.status == 0, (verb, done.err)
    states = [json.loads(line) for line in kafkalog("status", damaged, "--json").lines]
    assert {row["topic"] for row in states if "topic" in row} >= {"t", "u"}
    for arguments in (["t", "--partition", "1"], ["u"]):
        done = kafkalog("read", damaged, *arguments)
        assert done.status == 0, (arguments, done.err)
        assert len(done.lines) > 10
    assert kafkalog("verify", damaged, "u").status == 0
