"""What is said of a partition; every sentence has the figure that decides."""

from __future__ import annotations

from pathlib import Path

import pytest

from kafkalog.cleaner import CleanerConfig, CleanerThread
from kafkalog.cleaner.dedup.presence import announced, is_cleaner_running
from kafkalog.cleaner.directory.pause import abort_and_pause
from kafkalog.cleaner.report.explain import Explanation, Reason, explain, utc_time
from kafkalog.cleaner.report.status import status
from kafkalog.cleaner.schedule.manager import clean
from kafkalog.cleaner.state.notes import DirectoryNotes
from kafkalog.cleaner.state.uncleanable import mark_uncleanable
from kafkalog.errors import UnknownTopicError
from kafkalog.storage_engine.directory.directory_log import DirectoryLog
from kafkalog.storage_engine.format import layout
from kafkalog.storage_engine.fs import files, locks
from tests.builders.batch_builder import ABORT, at_times, joined, marker
from tests.builders.log_builder import LogBuilder
from tests.builders.segment_files import write_segment
from tests.unit.storage_engine import test_metadata_log as metadata
from tests.unit.storage_engine.broker_root import CLEANER, HIGH_WATERMARK, BrokerRoot, batches

HOUR = 3_600_000
ID_IN_METADATA = layout.topic_id_text(metadata.ID)
NOW = 1_700_000_000_000


def told(engine: DirectoryLog, now_ms: int = NOW) -> Explanation:
    (explanation,) = explain(engine, "t", now_ms)
    return explanation


def finding(engine: DirectoryLog, code: str, now_ms: int = NOW) -> Reason:
    (found,) = [one for one in told(engine, now_ms).findings if one.code == code]
    return found


def codes(engine: DirectoryLog, now_ms: int = NOW) -> list[str]:
    return [one.code for one in told(engine, now_ms).findings]


def test_an_empty_partition_is_empty(tmp_path: Path) -> None:
    engine = LogBuilder(tmp_path).topic(segment_bytes=100).engine
    assert codes(engine) == ["empty"]
    assert told(engine).answer == "is clean"


def test_a_dirty_partition_is_due_and_needs_a_cleaner(tmp_path: Path) -> None:
    engine = LogBuilder(tmp_path).topic(segment_bytes=100).rounds(3, "ab").engine
    assert codes(engine) == ["due", "no cleaner"]
    explanation = told(engine)
    assert (explanation.is_due, explanation.answer) == (True, "is due, and no cleaner runs")
    assert "dirty ratio is 1.00" in finding(engine, "due").sentence
    remedy = finding(engine, "no cleaner").remedy
    assert remedy is not None
    assert f"kafkalog cleaner {tmp_path}" in remedy


def test_a_cleaner_of_any_process_is_seen_while_it_runs(tmp_path: Path) -> None:
    engine = LogBuilder(tmp_path).topic(segment_bytes=100).rounds(3, "ab").engine
    assert is_cleaner_running(tmp_path) is False
    with announced(tmp_path):
        assert is_cleaner_running(tmp_path) is True
        assert codes(engine) == ["due", "cleaner"]
        assert told(engine).answer == "will be cleaned"
    assert is_cleaner_running(tmp_path) is False


def test_a_cleaner_thread_is_seen_also_while_it_sleeps(tmp_path: Path) -> None:
    engine = LogBuilder(tmp_path).topic(segment_bytes=100).engine
    thread = CleanerThread(engine, CleanerConfig(backoff_ms=60_000))
    thread.start()
    while not is_cleaner_running(tmp_path):
        assert thread.is_alive
    thread.stop()
    assert is_cleaner_running(tmp_path) is False


def test_the_ratio_says_how_much_is_missing(tmp_path: Path) -> None:
    engine = (
        LogBuilder(tmp_path)
        .topic(segment_bytes=100, min_cleanable_dirty_ratio=0.8)
        .rounds(3, "ab")
        .engine
    )
    clean(engine, force=True, now_ms=NOW)
    LogBuilder(engine).rounds(2, "ab")
    sizes = [path.stat().st_size for path in sorted((tmp_path / "t-0").glob("*.log"))]
    first, second, _ = [size for size in sizes if size]  # clean, dirty, active
    ratio = finding(engine, "ratio")
    assert told(engine).findings[0] == ratio
    share = second / (first + second)
    assert f"is {share:.2f} ({second} bytes of {first + second} bytes)" in ratio.sentence
    assert "min.cleanable.dirty.ratio, 0.8" in ratio.sentence
    missing = int(ratio.sentence.split("with ")[1].split(" ")[0])
    assert (second + missing) / (first + second + missing) > 0.8
    assert (second + missing - 2) / (first + second + missing - 2) <= 0.8
    assert utc_time(NOW)[:16] in ratio.sentence


def test_what_lies_in_the_active_segment_waits_for_the_next_one(tmp_path: Path) -> None:
    log = LogBuilder(tmp_path).topic(segment_bytes=100_000, segment_ms=2 * HOUR)
    engine = log.rounds(3, "ab").engine
    active = finding(engine, "active segment")
    assert told(engine).answer == "is not due"
    size = (tmp_path / "t-0" / f"{0:020}.log").stat().st_size
    assert "from offset 0 on" in active.sentence
    assert f"({size} bytes of 97.7 KiB)" in active.sentence
    assert "2 hours" in active.sentence
    assert active.remedy is not None
    assert f"kafkalog clean {tmp_path} t --force" in active.remedy


def test_an_active_segment_alone_is_told_with_the_cleaner_that_is_missing(tmp_path: Path) -> None:
    engine = LogBuilder(tmp_path).topic(segment_bytes=100).rounds(1, "ab").engine
    assert codes(engine) == ["active segment", "no cleaner"]
    found = finding(engine, "no cleaner")
    assert found.commands == (f"kafkalog cleaner {tmp_path}",)
    assert found.remedy is not None and found.commands[0] in found.remedy
    with announced(tmp_path):
        assert codes(engine) == ["active segment"]


def test_an_active_segment_that_is_full_ends_with_the_next_append(tmp_path: Path) -> None:
    engine = LogBuilder(tmp_path).topic(segment_bytes=100_000).rounds(3, "ab").engine
    sentence = finding(engine, "active segment").sentence
    assert "an append that would take it above segment.bytes" in sentence
    size = engine.describe("t").partitions[0].active_size
    engine.alter_topic("t", {"segment.bytes": str(size - 1)})
    sentence = finding(engine, "active segment").sentence
    assert "has reached segment.bytes" in sentence
    assert "so the next append begins another one" in sentence


def test_where_the_ratio_is_the_cause_only_a_forced_cleaning_helps(tmp_path: Path) -> None:
    engine = (
        LogBuilder(tmp_path)
        .topic(segment_bytes=100, min_cleanable_dirty_ratio=1)
        .rounds(1, "ab")
        .engine
    )
    LogBuilder(engine).roll()
    LogBuilder(engine).rounds(1, "ab")
    remedy = finding(engine, "ratio").remedy
    assert remedy is not None and remedy.endswith("t --force")
    engine.alter_topic("t", {"min.cleanable.dirty.ratio": "0"})
    assert finding(engine, "due").commands == (f"kafkalog clean {tmp_path} t",)


def test_a_lag_ends_at_a_known_time(tmp_path: Path) -> None:
    engine = (
        LogBuilder(tmp_path)
        .topic(segment_bytes=100, min_compaction_lag_ms=HOUR)
        .rounds(3, "ab")
        .engine
    )
    lag = finding(engine, "lag")
    assert lag.until_ms == NOW + HOUR
    assert utc_time(NOW + HOUR) in lag.sentence
    assert "1 hour" in lag.sentence
    assert codes(engine, NOW + HOUR - 1)[0] == "lag"
    assert codes(engine, NOW + HOUR)[0] == "due"


def test_a_lag_needs_no_closed_segment(tmp_path: Path) -> None:
    engine = LogBuilder(tmp_path).topic(min_compaction_lag_ms=HOUR).rounds(1, "ab").engine
    assert "lag" not in codes(engine)
    assert "active segment" in codes(engine)


def test_the_longest_lag_makes_it_due(tmp_path: Path) -> None:
    engine = (
        LogBuilder(tmp_path)
        .topic(segment_bytes=100, max_compaction_lag_ms=HOUR, min_cleanable_dirty_ratio=1.0)
        .engine
    )
    LogBuilder(engine).rounds(3, "ab")
    assert codes(engine, NOW + HOUR)[0] == "ratio"
    due = finding(engine, "due", NOW + 3 * HOUR)
    assert "max.compaction.lag.ms (1 hour) passed 2 hours ago" in due.sentence


def test_an_open_transaction_is_told_with_its_producer_and_its_age(tmp_path: Path) -> None:
    engine = LogBuilder(tmp_path).topic(segment_bytes=100).engine
    batches = [at_times(0), at_times(1, (4, 5), 7, transactional=True), at_times(3), at_times(4)]
    for batch in batches:
        engine.append_raw("t", 0, joined([batch]), now_ms=NOW)
    found = finding(engine, "transaction")
    assert "producer 7 is open from offset 1 on" in found.sentence
    assert "since " in found.sentence
    assert codes(engine)[0] == "due"  # what lies below
    engine.append_raw("t", 0, joined([marker(5, ABORT, 7)]), now_ms=NOW)
    assert "transaction" not in codes(engine)


def test_the_lowest_barrier_is_told_first(tmp_path: Path) -> None:
    engine = LogBuilder(tmp_path).topic(segment_bytes=100, min_compaction_lag_ms=HOUR).engine
    engine.append_raw("t", 0, joined([at_times(0, (1,), 7, transactional=True)]), now_ms=NOW)
    LogBuilder(engine).rounds(3, "ab")
    assert codes(engine) == ["transaction", "lag", "active segment", "no cleaner"]
    assert "--force" not in str(finding(engine, "no cleaner").remedy)  # it would not help


def test_another_policy_is_the_only_thing_told(tmp_path: Path) -> None:
    engine = LogBuilder(tmp_path).topic(segment_bytes=100, policy="delete").rounds(3, "ab").engine
    assert codes(engine) == ["policy"]
    policy = finding(engine, "policy")
    assert "cleanup.policy is delete" in policy.sentence
    assert policy.remedy is not None
    assert "--config cleanup.policy=compact" in policy.remedy
    engine.alter_topic("t", {"cleanup.policy": ""})
    assert "is empty" in finding(engine, "policy").sentence


def test_an_uncleanable_partition_says_why_since_when_and_until_when(tmp_path: Path) -> None:
    engine = LogBuilder(tmp_path).topic(segment_bytes=100).rounds(3, "ab").engine
    config = dict(engine.describe("t").config)
    mark_uncleanable(DirectoryNotes(tmp_path / "t-0"), "a bad batch", config, now_ms=NOW)
    mark = mark_uncleanable(
        DirectoryNotes(tmp_path / "t-0"), "a bad batch", config, now_ms=NOW + 1000
    )
    explanation = told(engine)
    assert not explanation.is_due
    assert [one.code for one in explanation.findings] == ["uncleanable", "due"]
    found = explanation.findings[0]
    assert f"since {utc_time(NOW)}, 2 times in a row: a bad batch." in found.sentence
    assert utc_time(mark.retry_at_ms) in found.sentence
    assert found.until_ms == mark.retry_at_ms
    assert "tries again" in finding(engine, "uncleanable", mark.retry_at_ms).sentence


def test_a_cleaning_at_this_moment_is_told(tmp_path: Path) -> None:
    engine = LogBuilder(tmp_path).topic(segment_bytes=100).rounds(3, "ab").engine
    with locks.FileLock(tmp_path / "t-0" / layout.CLEANER_LOCK).exclusive():
        assert codes(engine)[0] == "cleaning"
        assert told(engine).answer == "is being cleaned"


def test_a_paused_partition_is_told(tmp_path: Path) -> None:
    engine = LogBuilder(tmp_path).topic(segment_bytes=100).rounds(3, "ab").engine
    with abort_and_pause(engine, "t", 0):
        assert codes(engine) == ["paused", "due"]
        assert not told(engine).is_due


def test_tombstones_wait_until_a_known_time(tmp_path: Path) -> None:
    engine = LogBuilder(tmp_path).topic(segment_bytes=100, delete_retention_ms=HOUR).engine
    engine.append("t", [("a", None), ("b", None)], now_ms=NOW)
    clean(engine, force=True, now_ms=NOW)
    assert codes(engine) == ["all clean", "tombstones"]
    found = finding(engine, "tombstones")
    assert found.sentence.startswith("2 tombstones wait for the delete horizon")
    assert found.until_ms == NOW + HOUR
    due = finding(engine, "due", NOW + HOUR)
    assert "delete horizon" in due.sentence


def test_a_partition_that_cannot_be_read_says_so(tmp_path: Path) -> None:
    engine = LogBuilder(tmp_path).topic(segment_bytes=100).engine
    directory = tmp_path / "t-0"
    files.remove_directory(directory)
    assert codes(engine) == ["unreadable"]


def test_a_topic_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UnknownTopicError):
        explain(LogBuilder(tmp_path).topic(segment_bytes=100).engine, "u", NOW)


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
        told_status = status(engine, NOW)[0]
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


def test_asking_writes_nothing(tmp_path: Path) -> None:
    engine = LogBuilder(tmp_path).topic(segment_bytes=100).rounds(3, "ab").engine
    clean(engine, now_ms=NOW)
    before = sorted(tmp_path.rglob("*"))
    explain(DirectoryLog(tmp_path, read_only=True), "t", NOW)
    assert sorted(tmp_path.rglob("*")) == before
