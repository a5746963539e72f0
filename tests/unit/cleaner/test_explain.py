"""What is said of a partition of a broker, or of one that cannot be read."""

from __future__ import annotations

from pathlib import Path

import pytest

from kafkalog.cleaner import CleanerConfig, CleanerThread
from kafkalog.cleaner.dedup.presence import is_cleaner_running
from kafkalog.cleaner.report.explain import Explanation, Reason, explain
from kafkalog.cleaner.report.status import status
from kafkalog.cleaner.shelves import moment_of
from kafkalog.storage_engine.directory.directory_log import DirectoryLog
from kafkalog.storage_engine.format import layout
from kafkalog.storage_engine.fs import files
from tests.builders.log_builder import LogBuilder
from tests.builders.segment_files import write_segment
from tests.unit.storage_engine import test_metadata_log as metadata
from tests.unit.storage_engine.broker_root import CLEANER, HIGH_WATERMARK, BrokerRoot, batches

ID_IN_METADATA = layout.topic_id_text(metadata.ID)
NOW = 1_700_000_000_000


def told(engine: DirectoryLog, now_ms: int = NOW) -> Explanation:
    (explanation,) = explain(moment_of(engine, now_ms), "t")
    return explanation


def finding(engine: DirectoryLog, code: str, now_ms: int = NOW) -> Reason:
    (found,) = [one for one in told(engine, now_ms).findings if one.code == code]
    return found


def codes(engine: DirectoryLog, now_ms: int = NOW) -> list[str]:
    return [one.code for one in told(engine, now_ms).findings]


def test_a_cleaner_thread_is_seen_also_while_it_sleeps(tmp_path: Path) -> None:
    engine = LogBuilder(tmp_path).topic(segment_bytes=100).engine
    thread = CleanerThread(engine, CleanerConfig(backoff_ms=60_000))
    thread.start()
    while not is_cleaner_running(tmp_path):
        assert thread.is_alive
    thread.stop()
    assert is_cleaner_running(tmp_path) is False


def test_a_partition_that_cannot_be_read_says_so(tmp_path: Path) -> None:
    engine = LogBuilder(tmp_path).topic(segment_bytes=100).engine
    directory = tmp_path / "t-0"
    files.remove_directory(directory)
    assert codes(engine) == ["unreadable"]


def test_a_brokers_partition_is_the_brokers_to_clean(tmp_path: Path) -> None:
    broker = BrokerRoot(tmp_path / "broker")
    broker.partition("t-0")
    with DirectoryLog(broker.path) as engine:
        found = finding(engine, "broker")
        assert codes(engine)[0] == "broker"
        assert found.remedy is not None
        assert f"kafkalog adopt {broker.path}" in found.remedy


@pytest.mark.parametrize("ratio", [None, "0", "0.7", "0.99"])
@pytest.mark.parametrize("cleaned", [0, 50, 70])
@pytest.mark.parametrize("is_copy", [False, True])
def test_no_default_is_said_of_a_brokers_topic(
    tmp_path: Path, ratio: str | None, cleaned: int, is_copy: bool
) -> None:
    set_here = {"cleanup.policy": "compact"}
    if ratio is not None:
        others = {"segment.bytes": "2000", "segment.ms": "77", "min.compaction.lag.ms": "0"}
        set_here |= {"min.cleanable.dirty.ratio": ratio, **others}
    broker = BrokerRoot(tmp_path / "broker")
    broker.partition("t-0", bases=(0, 50, 70), end=100, topic_id=ID_IN_METADATA)
    broker.checkpoint(CLEANER, {"t-0": cleaned})
    records = [metadata.topic("t"), metadata.partition(0)]
    records += [metadata.config("t", name, value) for name, value in set_here.items()]
    metadata.written(broker.path, metadata.batch(0, records))
    if is_copy:
        (broker.path / "meta.properties").unlink()
    with DirectoryLog(broker.path, read_only=True) as engine:
        assert dict(engine.describe("t").config) == set_here
        sentences = [one.sentence for one in told(engine).findings]
        assert told(engine).findings[0].code == "broker"
        assert (codes(engine)[1:] == ["unknown"]) == (ratio is None)
        told_status = status(moment_of(engine, NOW))[0]
        assert told_status.reason is None or told_status.reason in sentences
    text = " ".join(sentences)
    assert not {"GiB", "days"} & {*text.replace(")", "").split()}
    if ratio is None:
        assert "min.cleanable.dirty.ratio, min.compaction.lag.ms, segment.bytes" in text
        assert "0.5" not in text
    else:
        assert f"min.cleanable.dirty.ratio{'' if ' above ' in text else ','} {ratio}" in text


def test_a_live_broker_may_have_moved_on_from_the_segment_that_was_active(tmp_path: Path) -> None:
    broker = BrokerRoot(tmp_path / "broker")
    directory = broker.partition("t-0", bases=(0, 50), end=100)
    broker.checkpoint(HIGH_WATERMARK, {"t-0": 100})
    with broker.alive(), DirectoryLog(broker.path) as engine:
        assert codes(engine)[0] == "broker"
        write_segment(directory, 100, batches(100, 120))
        for path in directory.glob(f"{50:020}.*"):
            path.rename(f"{path}.deleted")
        assert codes(engine)[0] == "broker"
