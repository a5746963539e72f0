"""A copy of a live log, made file by file, either verifies and takes writes, or does not verify."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

import kafkalog
from kafkalog.errors import KafkaLogError, StorageError
from kafkalog.inspection.verify import verify
from kafkalog.storage_engine.format import layout
from kafkalog.storage_engine.fs import file_system
from tests.unit.storage_engine.live_copy import CopyingFileSystem, History, Writer, copying


def copied_live(root: Path, seed: int) -> tuple[Path, History]:
    """Write to a log while it is copied; return the copy, and what was appended to the log."""
    draw = random.Random(seed)
    source, copy = root / "log", root / "copy"
    with kafkalog.open(source) as log:
        writer = Writer(log, draw)
        for _ in range(draw.randrange(6)):
            writer.act()
        steps = copying(source, copy, draw)
        with file_system.replaced(CopyingFileSystem(steps, draw, draw.choice([0.02, 0.1, 0.3]))):
            for _ in range(draw.randrange(2, 12)):
                writer.act()
        for _ in steps:
            pass
    return copy, writer.history


def damages(copy: Path) -> list[str]:
    return [str(found) for found in verify(copy, deep=True) if found.is_damage]


def read(log: kafkalog.KafkaLog) -> History:
    """Return what a log has, by topic id and partition."""
    found: History = {}
    for topic in log.topics():
        records = found.setdefault((log.describe(topic).topic_id, 0), {})
        for batch in log.read(topic, 0, log.offsets(topic)[0][0]):
            for row in batch.to_pylist():
                records[row["offset"]] = row["key"], row["value"]
    return found


def expected(log: kafkalog.KafkaLog, history: History) -> History:
    """Return what has to be there: all records of a topic, or the latest ones with a value."""
    wanted: History = {}
    for topic in log.topics():
        state, place = log.describe(topic), (log.describe(topic).topic_id, 0)
        start, end = log.offsets(topic)[0]
        records = {o: r for o, r in history.get(place, {}).items() if start <= o < end}
        if state.config["cleanup.policy"] == "compact":
            latest = {key: offset for offset, (key, _) in sorted(records.items())}
            records = {o: records[o] for o in latest.values() if records[o][1] is not None}
        wanted[place] = records
    return wanted


def check_whole(log: kafkalog.KafkaLog, history: History) -> None:
    found = read(log)
    for place, records in expected(log, history).items():
        assert records.items() <= found[place].items()
        assert found[place].items() <= history.get(place, {}).items()
    if "c" in log.topics():
        place = log.describe("c").topic_id, 0
        latest = {row["key"]: row["value"] for b in log.latest("c") for row in b.to_pylist()}
        assert latest == dict(expected(log, history)[place].values())


@pytest.mark.slow
@pytest.mark.parametrize("part", range(20))
def test_a_copy_of_a_live_log_verifies_and_takes_writes_or_does_not_verify(
    part: int, tmp_path: Path
) -> None:
    sound = 0
    for seed in range(part * 20, part * 20 + 20):
        copy, history = copied_live(tmp_path / str(seed), seed)
        try:
            if damages(copy):
                continue
        except KafkaLogError:
            continue  # not a log, or not one that can be checked
        sound += 1
        with kafkalog.open(copy, read_only=True) as log:
            check_whole(log, history)
        with kafkalog.open(copy) as log:
            check_whole(log, history)
            for topic in log.topics():
                place, end = (log.describe(topic).topic_id, 0), log.offsets(topic)[0][1]
                log.append(topic, [("new", "1")])
                known = history.setdefault(place, {})
                history[place] = {o: r for o, r in known.items() if o < end}
                history[place][end] = b"new", b"1"
            check_whole(log, history)
        assert damages(copy) == []
    assert sound


# --- the last record of the journal --------------------------------------------------------------


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A log with three records."""
    with kafkalog.open(tmp_path / "log") as log:
        log.create_topic("t", config={"segment.bytes": "300"})
        for number in range(3):
            log.append("t", [(f"k{number}", "1")])
    return tmp_path / "log"


def without_publication(root: Path, act: Callable[[kafkalog.KafkaLog], object]) -> dict[str, bytes]:
    """Act, and let the journal end with a record that is not published; return the files before."""
    journal, place = root / "commit", layout.JOURNAL_PUBLISHED_POSITION
    before = {str(p.relative_to(root)): p.read_bytes() for p in root.rglob("*") if p.is_file()}
    with kafkalog.open(root) as log:
        act(log)
    header = before["commit"][place : place + layout.JOURNAL_PUBLISHED.size + layout.CHECKSUM.size]
    for checkpoint in root.glob("*-checkpoint"):
        checkpoint.unlink()  # a close has written them, after the publication
    data = journal.read_bytes()
    journal.write_bytes(data[:place] + header + data[place + len(header) :])
    return before


def keys(root: Path, topic: str = "t") -> list[bytes]:
    with kafkalog.open(root) as log:
        end = log.offsets(topic)[0][1]
        return [
            k
            for b in log.read(topic, 0, log.offsets(topic)[0][0], end)
            for k in b["key"].to_pylist()
        ]


def append(log: kafkalog.KafkaLog) -> None:
    log.append("t", [("k3", "1")])


def append_and_roll(log: kafkalog.KafkaLog) -> None:
    log.append("t", [("k3", "1" * 300)])


def create(log: kafkalog.KafkaLog) -> None:
    log.create_topic("u", partitions=2)


LOG = "t-0/00000000000000000000.log"


@pytest.mark.parametrize(
    ("act", "spoil"),
    [
        (append, lambda root, before: (root / LOG).write_bytes(before[LOG])),
        (append, lambda root, before: (root / LOG).write_bytes((root / LOG).read_bytes()[:-9])),
        (append, lambda root, before: (root / LOG).write_bytes(before[LOG] + bytes(99))),
        (append_and_roll, lambda root, before: (root / "t-0/00000000000000000003.log").unlink()),
        (create, lambda root, before: shutil.rmtree(root / "u-1")),
        (create, lambda root, before: (root / "u-0/partition.metadata").unlink()),
    ],
)
def test_a_record_whose_bytes_are_not_there_is_not_published(
    root: Path, act: Callable[..., None], spoil: Callable[..., None]
) -> None:
    spoil(root, without_publication(root, act))
    assert "no mark of its publication" in " ".join(found.found for found in verify(root))
    assert damages(root) == []
    with kafkalog.open(root) as log:
        assert log.topics() == ["t"]
        log.append("t", [("new", "1")])
    assert keys(root) == [b"k0", b"k1", b"k2", b"new"]
    assert list(verify(root, "t", deep=True)) == []


@pytest.mark.parametrize("act", [append, append_and_roll, create])
def test_a_record_of_a_dead_writer_whose_bytes_are_there_is_published(
    root: Path, act: Callable[..., None]
) -> None:
    without_publication(root, act)
    assert damages(root) == []
    with kafkalog.open(root) as log:
        assert log.topics() == (["t", "u"] if act is create else ["t"])
    assert keys(root) == [b"k0", b"k1", b"k2"] + [b"k3"] * (act is not create)


@pytest.mark.parametrize("kept", [0, 70, 72, 213])
def test_published_records_without_their_bytes_are_damage_and_nothing_is_written(
    root: Path, kept: int
) -> None:
    with kafkalog.open(root) as log:
        append(log)
    (root / LOG).write_bytes((root / LOG).read_bytes()[:kept])
    assert damages(root)
    with kafkalog.open(root) as log, pytest.raises(StorageError, match="the journal records"):
        append(log)
    assert (root / LOG).stat().st_size == kept


def test_a_segment_that_was_cleaned_after_the_journal_was_copied_is_not_truncated(
    root: Path,
) -> None:
    with kafkalog.open(root) as log:
        append(log)
    data = (root / LOG).read_bytes()
    (root / LOG).write_bytes(data[71:] + data)
    assert damages(root)
    with kafkalog.open(root) as log, pytest.raises(StorageError, match="nothing is changed"):
        append(log)
    assert (root / LOG).read_bytes() == data[71:] + data


@pytest.mark.parametrize("copied_first", ["commit", "t-0"])
def test_a_cleaning_between_the_copies_of_two_files_is_damage(
    root: Path, copied_first: str
) -> None:
    copy = root.with_name("copy")
    with kafkalog.open(root) as log:
        log.alter_topic("t", config={"delete.retention.ms": "0", "segment.bytes": "75"})
        log.append("t", [("k1", "2")])
        log.clean("t", force=True)
        shutil.copytree(root, copy)
        for number in range(3):
            log.append("t", [("k0", None), ("k1", str(number)), (f"k{number}", None)])
            log.clean("t", force=True)
    for place in {"commit", "t-0"} - {copied_first}:
        if place == "commit":
            shutil.copy(root / place, copy / place)
        else:
            shutil.rmtree(copy / place)
            shutil.copytree(root / place, copy / place)
    assert damages(copy)
    with kafkalog.open(copy) as log, pytest.raises(StorageError):
        append(log)
