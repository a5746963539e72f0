"""Directories that brokers of old releases have left: sound as they are, and each loss is found.

`brokers/RELEASE.tar.xz` has the directories of a leader and of a follower after a shutdown
(`stopped-1`, `stopped-2`), and of a leader that was killed (`killed-1`). `records.json` has the
offsets that a consumer read before. `python -m tests.conformance.old_brokers` makes them, and
`first_brokers` those of Kafka 0.8, whose messages are v0.
"""

from __future__ import annotations

import json
import shutil
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import kafkalog
from kafkalog.errors import StorageError
from kafkalog.inspection.finding import Finding
from kafkalog.inspection.verify import verify
from kafkalog.storage_engine.ownership.adopt import adopt
from kafkalog.storage_engine.ownership.release import release as give_back
from tests.builders.log_contents import records

ARCHIVES = sorted((Path(__file__).parent / "brokers").glob("*.tar.xz"))
LEADER, FOLLOWER, KILLED = "stopped-1", "stopped-2", "killed-1"
NOW_MS = 1_800_000_000_000
KEPT = ("plain", "short", "stamped", "trans", "trimmed", "old0", "old1")
"""Topics that are not compacted, of which nothing expires by time."""


@pytest.fixture(scope="module", params=ARCHIVES, ids=lambda path: path.name)
def release(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Path]:
    path = tmp_path_factory.mktemp("release")
    with tarfile.open(request.param) as archive:
        # A Python 3.11 before 3.11.4, as Debian 12 has it, knows no filters.
        archive.extraction_filter = getattr(tarfile, "data_filter", None)
        archive.extractall(path)
    yield path
    shutil.rmtree(path)


def damage(root: Path, topic: str | None = None) -> list[Finding]:
    return [finding for finding in verify(root, topic, deep=True) if finding.is_damage]


@pytest.mark.parametrize("name", [LEADER, FOLLOWER, KILLED])
def test_what_a_broker_has_left_is_sound(release: Path, name: str) -> None:
    assert damage(release / name) == []


@pytest.mark.parametrize("name", [LEADER, FOLLOWER])
def test_the_records_of_a_broker_are_those_that_a_consumer_got(release: Path, name: str) -> None:
    read = json.loads((release / "records.json").read_text())
    log = kafkalog.open(release / name, read_only=True)
    for level, topics in read.items():
        for topic in topics.keys() & set(KEPT):
            found: list[int] = []
            for batch in log.read(topic, 0, isolation_level=f"read_{level}"):
                found += batch.column("offset").to_pylist()
            assert found == [row[0] for row in topics[topic]], (level, topic)


def test_an_adopted_log_of_a_broker_is_sound(release: Path, tmp_path: Path) -> None:
    root = Path(shutil.copytree(release / LEADER, tmp_path / "log"))
    before = {topic: records(kafkalog.open(root), topic) for topic in KEPT if has(root, topic)}
    assert adopt(root, now_ms=NOW_MS).damage == ()
    assert damage(root) == []
    assert {topic: records(kafkalog.open(root), topic) for topic in before} == before


def test_a_broker_is_told_what_it_cannot_take_back(
    request: pytest.FixtureRequest, release: Path, tmp_path: Path
) -> None:
    number = tuple(map(int, request.node.callspec.params["release"].name.split(".")[:2]))
    root = Path(shutil.copytree(release / LEADER, tmp_path / "log"))
    is_told = any("older than Kafka 0.11" in each for each in adopt(root, now_ms=NOW_MS).notices)
    assert is_told == (number < (0, 11))
    notices = give_back(root, now_ms=NOW_MS).notices
    if number < (0, 9):
        assert any("has no meta.properties" in each for each in notices)
        return
    told = [each for each in notices if "-stray" in each]
    assert all("had no id at the adoption" in each for each in told)
    assert bool(told) == (number < (2, 8))


def has(root: Path, topic: str) -> bool:
    return (root / f"{topic}-0").is_dir()


def logs(root: Path, topics: tuple[str, ...]) -> list[Path]:
    """The `.log` files with records."""
    found = [path for topic in topics for path in sorted((root / f"{topic}-0").glob("*.log"))]
    return [path for path in found if path.stat().st_size]


@pytest.mark.slow
@pytest.mark.parametrize("name", [LEADER, FOLLOWER, KILLED])
def test_a_lost_log_file_is_damage_for_verify_read_and_adopt(
    release: Path, tmp_path: Path, name: str
) -> None:
    root = Path(shutil.copytree(release / name, tmp_path / "log"))
    for path in logs(root, (*KEPT, "table", "both")):
        topic = path.parent.name.rpartition("-")[0]
        is_shown = any(path.with_suffix(s).read_bytes().strip(b"\0") for s in indexes(path))
        # A power cut may take a last segment that was not synced: a broker goes on without it.
        is_unsynced = name == KILLED and path == max(path.parent.glob("*.log"))
        if not is_shown and (topic not in KEPT or is_unsynced):
            continue
        aside = path.rename(tmp_path / "aside")
        found = damage(root, topic)
        assert path in {finding.path for finding in found} or (found and not is_shown), path
        with pytest.raises(StorageError, match="lost"):
            records(kafkalog.open(root), topic)
        with pytest.raises(StorageError, match="nothing was changed"):
            adopt(root, now_ms=NOW_MS)
        aside.rename(path)
    assert damage(root) == []


def indexes(path: Path) -> list[str]:
    return [s for s in (".index", ".timeindex", ".txnindex") if path.with_suffix(s).exists()]


@pytest.mark.slow
@pytest.mark.parametrize("name", [LEADER, FOLLOWER])
def test_a_lost_segment_is_damage_though_no_file_of_it_is_left(
    release: Path, tmp_path: Path, name: str
) -> None:
    root = Path(shutil.copytree(release / name, tmp_path / "log"))
    tried = 0
    for path in logs(root, KEPT):
        files = [path, *(path.with_suffix(suffix) for suffix in indexes(path))]
        contents = {file: file.read_bytes() for file in files}
        epochs = path.parent / "leader-epoch-checkpoint"
        says_start = epochs.exists() and not path.parent.name.startswith("old")
        if path == min(path.parent.glob("*.log")) and not says_start:
            continue  # before Kafka 0.11, and with messages v0 and v1, nothing says where it began
        for file in files:
            file.unlink()
        topic = path.parent.name.rpartition("-")[0]
        assert damage(root, topic), path
        with pytest.raises(StorageError, match="lost"):
            records(kafkalog.open(root), topic)
        for file, content in contents.items():
            file.write_bytes(content)
        tried += 1
    assert tried >= 3  # of Kafka 0.8; later releases have more
    assert damage(root) == []


@pytest.mark.parametrize("name", [LEADER, FOLLOWER, KILLED])
def test_a_partition_that_is_gone_is_damage_after_a_shutdown_in_good_order(
    release: Path, tmp_path: Path, name: str
) -> None:
    root = Path(shutil.copytree(release / name, tmp_path / "log"))
    shutil.rmtree(root / "plain-0")
    (found, *_) = (each for each in verify(root) if "plain-0 up to offset" in str(each))
    assert found.path.name == "recovery-point-offset-checkpoint"
    assert found.is_damage == (name != KILLED)
