"""A broker's directory is copied as it is, and again from where the copy ends.

What comes through Spark's connector is in tests/conformance/test_sink_twin.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest

import kafkalog
from examples import mirror_kafka
from kafkalog.errors import InvalidInputError
from tests.builders.batch_builder import COMMIT, at_times, batch, joined, marker
from tests.builders.log_builder import LogBuilder
from tests.builders.segment_files import write_segment
from tests.conformance.record import Record, of_kafkalog
from tests.unit.storage_engine.broker_root import HIGH_WATERMARK, LOG_START, BrokerRoot, batches

END = {"t-0": 100, "t-1": 70}


def records(root: Path, partition: int) -> list[Record]:
    with kafkalog.open(root, read_only=True) as log:
        return of_kafkalog(log.read("t", partition, include_headers=True))


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[BrokerRoot]:
    """A running broker's directory; behind the high watermark of one partition there is more."""
    root = BrokerRoot(tmp_path / "broker")
    root.partition("t-0")
    root.partition("t-1", bases=(0, 30, 60), end=100)
    root.checkpoint(HIGH_WATERMARK, END)
    with root.alive():
        yield root


def test_each_partition_is_copied_up_to_its_high_watermark(
    broker: BrokerRoot, tmp_path: Path
) -> None:
    assert mirror_kafka.copy_directory(broker.path, ["t"], tmp_path / "log") == 170
    for partition, end in enumerate((100, 70)):
        found = records(tmp_path / "log", partition)
        assert found == records(broker.path, partition)
        assert [record.offset for record in found] == list(range(end))


def test_it_goes_on_where_it_has_ended(broker: BrokerRoot, tmp_path: Path) -> None:
    mirror_kafka.copy_directory(broker.path, ["t"], tmp_path / "log")
    write_segment(broker.path / "t-0", 100, batches(100, 160))
    broker.checkpoint(HIGH_WATERMARK, {"t-0": 150, "t-1": 100})
    assert mirror_kafka.copy_directory(broker.path, ["t"], tmp_path / "log") == 80
    assert mirror_kafka.copy_directory(broker.path, ["t"], tmp_path / "log") == 0
    found = [record.offset for record in records(tmp_path / "log", 0)]
    assert found == list(range(150))


def test_what_was_deleted_there_before_is_not_copied(broker: BrokerRoot, tmp_path: Path) -> None:
    broker.checkpoint(LOG_START, {"t-0": 23})
    mirror_kafka.copy_directory(broker.path, ["t"], tmp_path / "log")
    assert [record.offset for record in records(tmp_path / "log", 0)] == list(range(23, 100))
    # What is deleted there later stays here.
    broker.checkpoint(LOG_START, {"t-0": 90})
    assert mirror_kafka.copy_directory(broker.path, ["t"], tmp_path / "log") == 0
    assert len(records(tmp_path / "log", 0)) == 77


def test_gaps_and_transactions_keep_their_offsets(tmp_path: Path) -> None:
    written = [at_times(3), at_times(10, (1, 2), 9, transactional=True), marker(12, COMMIT, 9)]
    with kafkalog.open(tmp_path / "source") as source:
        source.create_topic("t", config={"cleanup.policy": "delete"})
        source.append_raw("t", 0, joined(written))
    assert mirror_kafka.copy_directory(tmp_path / "source", ["t"], tmp_path / "log") == 3
    assert [record.offset for record in records(tmp_path / "log", 0)] == [3, 10, 11]
    with kafkalog.open(tmp_path / "log") as log:
        assert log.offsets("t")[0][1] == 13


def test_a_log_that_has_records_of_its_own_is_refused(broker: BrokerRoot, tmp_path: Path) -> None:
    with kafkalog.open(tmp_path / "log") as log:
        log.create_topic("t", 2)
        log.append("t", [(b"k", b"v")] * 5)
    with pytest.raises(InvalidInputError, match=r"t-\d has another record at offset 0 than "):
        mirror_kafka.copy_directory(broker.path, ["t"], tmp_path / "log")


EVENTS = {"cleanup.policy": "delete"}


def source(path: Path, *values: str, partitions: int = 1) -> Path:
    """A topic `t` with one commit for each value; those of two calls have different ids."""
    log = LogBuilder(path).topic("t", partitions, policy="delete", exist_ok=True)
    return log.append_each(*(("k", value) for value in values)).close()


def forget_note(tmp_path: Path) -> None:
    (tmp_path / "log.mirror.json").unlink()


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_a_topic_that_was_made_anew_there_is_refused(tmp_path: Path, count: int) -> None:
    mirror_kafka.copy_directory(source(tmp_path / "a", "x", "y", "z"), ["t"], tmp_path / "log")
    anew = source(tmp_path / "b", *"xyz12"[:count])
    with pytest.raises(
        InvalidInputError, match=r"a copy of the one with the id .*created again there"
    ):
        mirror_kafka.copy_directory(anew, ["t"], tmp_path / "log")
    assert [record.value for record in records(tmp_path / "log", 0)] == [b"x", b"y", b"z"]


def test_a_copy_that_was_deleted_here_is_made_of_another_topic(tmp_path: Path) -> None:
    mirror_kafka.copy_directory(source(tmp_path / "a", "x"), ["t"], tmp_path / "log")
    with kafkalog.open(tmp_path / "log") as log:
        log.delete_topic("t")
    assert mirror_kafka.copy_directory(source(tmp_path / "b", "1"), ["t"], tmp_path / "log") == 1
    assert [record.value for record in records(tmp_path / "log", 0)] == [b"1"]


def test_a_partition_that_ends_earlier_there_is_refused(broker: BrokerRoot, tmp_path: Path) -> None:
    mirror_kafka.copy_directory(broker.path, ["t"], tmp_path / "log")
    earlier = BrokerRoot(tmp_path / "backup")
    earlier.partition("t-0", end=80)
    earlier.partition("t-1", bases=(0, 30, 60))
    with pytest.raises(InvalidInputError, match=r"t-0 ends at offset 100, and in .*backup at 80"):
        mirror_kafka.copy_directory(earlier.path, ["t"], tmp_path / "log")


def test_a_running_brokers_checkpoint_may_lag_behind(broker: BrokerRoot, tmp_path: Path) -> None:
    mirror_kafka.copy_directory(broker.path, ["t"], tmp_path / "log")
    broker.checkpoint(HIGH_WATERMARK, {"t-0": 80, "t-1": 70})
    assert mirror_kafka.copy_directory(broker.path, ["t"], tmp_path / "log") == 0


def test_other_records_below_the_end_are_refused(tmp_path: Path) -> None:
    root = BrokerRoot(tmp_path / "broker")
    directory = root.partition("t-0")
    mirror_kafka.copy_directory(root.path, ["t"], tmp_path / "log")
    # The id is the same, the leader has changed before what was copied was everywhere.
    write_segment(directory, 50, [*batches(50, 90), batch(90, 10, size=11), *batches(100, 120)])
    with pytest.raises(InvalidInputError, match="t-0 has another record at offset 90 than"):
        mirror_kafka.copy_directory(root.path, ["t"], tmp_path / "log")


def test_what_was_cleaned_is_not_taken_for_another_record(tmp_path: Path) -> None:
    root = BrokerRoot(tmp_path / "broker")
    directory = root.partition("t-0")
    mirror_kafka.copy_directory(root.path, ["t"], tmp_path / "log")
    write_segment(directory, 50, [batch(90, 3, last=99, step=2), *batches(100, 120)])
    assert mirror_kafka.copy_directory(root.path, ["t"], tmp_path / "log") == 20
    write_segment(directory, 50, batches(130, 140))
    assert mirror_kafka.copy_directory(root.path, ["t"], tmp_path / "log") == 10


def test_without_the_note_the_records_tell(broker: BrokerRoot, tmp_path: Path) -> None:
    mirror_kafka.copy_directory(broker.path, ["t"], tmp_path / "log")
    forget_note(tmp_path)
    assert mirror_kafka.copy_directory(broker.path, ["t"], tmp_path / "log") == 0
    forget_note(tmp_path)
    broker.checkpoint(LOG_START, {"t-0": 100})
    with pytest.raises(InvalidInputError, match="t-0 has records, and nothing shows that they are"):
        mirror_kafka.copy_directory(broker.path, ["t"], tmp_path / "log")


def test_what_was_deleted_there_uncopied_is_warned_of(
    broker: BrokerRoot, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    mirror_kafka.copy_directory(broker.path, ["t"], tmp_path / "log")
    write_segment(broker.path / "t-0", 100, batches(100, 160))
    broker.checkpoint(LOG_START, {"t-0": 120})
    broker.checkpoint(HIGH_WATERMARK, {"t-0": 150, "t-1": 70})
    assert mirror_kafka.copy_directory(broker.path, ["t"], tmp_path / "log") == 30
    assert "t-0: the offsets 100 to 119 were deleted there before they were copied" in caplog.text


def test_of_a_broker_that_has_some_partitions_nothing_is_copied(tmp_path: Path) -> None:
    root = BrokerRoot(tmp_path / "broker")
    root.partition("u-0", topic_id=None)
    for number in (0, 2, 4):
        root.partition(f"t-{number}")
    with pytest.raises(InvalidInputError, match="t-1, t-3 of topic 't' are missing: "):
        mirror_kafka.copy_directory(root.path, ["u", "t"], tmp_path / "log")
    with kafkalog.open(tmp_path / "log") as log:
        assert log.topics() == []


def test_partitions_in_several_directories_of_a_broker_are_one_topic(tmp_path: Path) -> None:
    roots = [BrokerRoot(tmp_path / name) for name in ("disk1", "disk2")]
    for number in range(3):
        roots[number % 2].partition(f"t-{number}")
    paths = ",".join(str(root.path) for root in roots)
    assert mirror_kafka.copy_directory(paths, ["t"], tmp_path / "log") == 300


def test_a_topic_with_another_count_of_partitions_is_refused(tmp_path: Path) -> None:
    mirror_kafka.copy_directory(source(tmp_path / "a", "x"), ["t"], tmp_path / "log")
    more = source(tmp_path / "b", "x", partitions=2)
    with pytest.raises(InvalidInputError, match="has 1 partitions, and there it has 2: "):
        mirror_kafka.copy_directory(more, ["t"], tmp_path / "log")


def test_a_mirror_by_spark_is_refused_before_it_makes_anything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What the connector says there is; nothing else of Spark is asked before.
    counts = {"new": 1, "t": 3}
    monkeypatch.setattr(mirror_kafka, "partition_counts", lambda *_: counts)
    source(tmp_path / "log", "x", partitions=2)
    with pytest.raises(InvalidInputError, match="has 2 partitions, and there it has 3: "):
        mirror_kafka.mirror(None, "kafka:9092", ["new", "t"], tmp_path / "log", tmp_path / "c")
    with kafkalog.open(tmp_path / "log") as log:
        assert log.topics() == ["t"]


def test_a_topic_that_is_made_takes_records_of_any_time_and_size(tmp_path: Path) -> None:
    mirror_kafka.copy_directory(
        source(tmp_path / "a", "x"), ["t"], tmp_path / "log", config={"cleanup.policy": "compact"}
    )
    with kafkalog.open(tmp_path / "log") as log:
        assert log.describe("t").config["cleanup.policy"] == "compact"
        soon = pa.table(
            {"key": ["k"], "value": ["v" * (2 << 20)], "timestamp": [4_000_000_000_000]}
        )
        log.append("t", soon, now_ms=1_700_000_000_000)


def test_the_program_says_how_many(
    broker: BrokerRoot, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = ["--directory", str(broker.path), "--path", str(tmp_path / "log")]
    assert mirror_kafka.main(["--topics", "t", *paths]) == 0
    assert capsys.readouterr().out == "170 records copied\n"
