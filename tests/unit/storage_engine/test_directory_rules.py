"""Names in a log directory: which of a broker's directories are partitions, and what ours are."""

from __future__ import annotations

from pathlib import Path

import pytest

from kafkalog.storage_engine.directory.directory_log import DirectoryLog
from kafkalog.storage_engine.metadata import checkpoints
from tests.builders.batch_builder import batch
from tests.builders.segment_files import write_segment


def broker_directory(root: Path, *names: str) -> DirectoryLog:
    """What a broker that was shut down leaves: a record in each partition."""
    root.mkdir(exist_ok=True)
    (root / "meta.properties").write_text("version=1\ncluster.id=c\nnode.id=0\n")
    (root / ".kafka_cleanshutdown").write_bytes(checkpoints.CLEAN_SHUTDOWN_CONTENT)
    for name in names:
        (root / name).mkdir()
        write_segment(root / name, 0, [batch(0, 1)])
    return DirectoryLog(root)


@pytest.mark.parametrize(
    ("name", "topic", "partition"), [("a-0", "a", 0), ("a-b-3", "a-b", 3), ("-.-_-12", "-.-_", 12)]
)
def test_a_partitions_directory_is_split_at_the_last_hyphen(
    tmp_path: Path, name: str, topic: str, partition: int
) -> None:
    engine = broker_directory(tmp_path, name)
    assert engine.topics() == [topic]
    assert engine.offsets(topic)[partition] == (0, 1)
    assert engine.partition_directory(topic, partition) == tmp_path / name


def test_a_root_without_hyphenless_directories_is_what_is_written(tmp_path: Path) -> None:
    """A broker refuses to load a directory with another name than a partition's."""
    with DirectoryLog(tmp_path) as engine:
        engine.create_topic("a", 2)
        engine.append("a", [("k", "v")], now_ms=5)
        engine.delete_topic("a", now_ms=5)
        engine.create_topic("b")
    directories = [path.name for path in tmp_path.iterdir() if path.is_dir()]
    assert len(directories) == 3
    assert all("-" in name for name in directories)
