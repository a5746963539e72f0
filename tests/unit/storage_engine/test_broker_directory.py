"""The log directories of a broker, read as they are: it runs, was stopped, or was killed."""

from __future__ import annotations

import logging
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import kafkalog
from kafkalog.errors import InvalidInputError, LogMovedError, UnknownTopicError
from kafkalog.inspection.verify import verify
from kafkalog.log import KafkaLog
from kafkalog.storage_engine.directory.directory_log import DirectoryLog
from kafkalog.storage_engine.place import directory_log_of
from tests.builders.batch_builder import BatchBuilder
from tests.builders.log_contents import offsets
from tests.builders.segment_files import name, write_segment
from tests.unit.storage_engine import broker_root
from tests.unit.storage_engine.broker_root import TOPIC_ID, BrokerRoot, batches


def stopped(path: Path) -> BrokerRoot:
    root = BrokerRoot(path)
    root.partition("t-0")
    root.checkpoint(broker_root.HIGH_WATERMARK, {"t-0": 40})
    root.shut_down()
    return root


# --- what there is -------------------------------------------------------------------------------


def test_every_partition_of_a_stopped_broker_is_read_to_its_log_end(tmp_path: Path) -> None:
    root = stopped(tmp_path / "log")
    root.partition("t-2", (0,), 30)
    root.partition("a.b-c-0", (10, 20), 40)
    log = kafkalog.open(root.path)
    assert directory_log_of(log).read_only
    assert log.topics() == ["a.b-c", "t"]
    topic = log.describe("t")
    assert (topic.topic_id, len(topic.partitions), topic.absent) == (TOPIC_ID, 3, {1})
    assert dict(topic.config) == {"cleanup.policy": ""}
    assert log.offsets("t") == {0: (0, 100), 2: (0, 30)}
    assert log.offsets("a.b-c") == {0: (10, 40)}
    assert offsets(directory_log_of(log), partition=0) == list(range(100))
    assert offsets(directory_log_of(log), "a.b-c", partition=0) == list(range(10, 40))
    with pytest.raises(InvalidInputError, match="partition 1 of topic 't' is not in"):
        next(log.read("t", 1))
    with pytest.raises(UnknownTopicError, match=r"a\.b-c, t"):
        log.describe("u")


def test_directories_that_are_not_partitions_are_passed_over(tmp_path: Path) -> None:
    root = stopped(tmp_path / "log")
    digits = "0123456789abcdef0123456789abcdef"
    for other in (
        f"t-1.{digits}-delete",
        f"t-2.{digits}-stray",
        f"t-3.{digits}-future",
        "__cluster_metadata-0",
        "nodash",
        "t-x",
        "t-01",
    ):
        root.partition(other)
    (root.path / "t-5").write_text("a file")
    assert kafkalog.open(root.path).offsets("t") == {0: (0, 100)}


def test_internal_topics_are_readable(tmp_path: Path) -> None:
    root = stopped(tmp_path / "log")
    root.partition("__consumer_offsets-7", (0,), 20)
    log = kafkalog.open(root.path)
    assert log.describe("__consumer_offsets").absent == frozenset(range(7))
    assert offsets(directory_log_of(log), "__consumer_offsets", partition=7) == list(range(20))


def test_several_directories_of_a_broker_are_one_log(tmp_path: Path) -> None:
    first, second = stopped(tmp_path / "a"), BrokerRoot(tmp_path / "b")
    second.partition("t-1", (0,), 20)
    second.partition("u-0", (0,), 10)
    for address in (
        [first.path, str(second.path)],
        f"{first.path},{second.path}",
        f"{first.path} , {second.path}",
    ):
        log = kafkalog.open(address)
        assert log.offsets("t") == {0: (0, 100), 1: (0, 20)}
        assert offsets(directory_log_of(log), "u") == list(range(10))
        assert directory_log_of(log).partition_directory("t", 1) == second.path / "t-1"


def test_a_directory_with_a_comma_in_its_name_is_one_directory(tmp_path: Path) -> None:
    root = stopped(tmp_path / "a,b")
    assert kafkalog.open(str(root.path)).topics() == ["t"]


def test_a_partition_in_two_directories_names_both_and_costs_no_other(tmp_path: Path) -> None:
    first, second = stopped(tmp_path / "a"), stopped(tmp_path / "b")
    second.partition("t-1", (0,), 20)
    log = kafkalog.open([first.path, second.path])
    assert log.offsets("t") == {1: (0, 20)}
    with pytest.raises(InvalidInputError) as fault:
        list(log.read("t", 0))
    assert str(first.path / "t-0") in str(fault.value)
    assert str(second.path / "t-0") in str(fault.value)


def test_several_directories_are_those_of_one_cluster(tmp_path: Path) -> None:
    root = stopped(tmp_path / "a")
    ours = tmp_path / "ours"
    DirectoryLog(ours).close()
    none = tmp_path / "none"
    for other, why in ((ours, "no Kafka broker's log directory"), (none, "there is no such")):
        with pytest.raises(InvalidInputError, match=f"{other}: {why}"):
            kafkalog.open([root.path, other])
    other = BrokerRoot(tmp_path / "b").path
    (other / "meta.properties").write_text("version=1\ncluster.id=d\nnode.id=2\n")
    with pytest.raises(InvalidInputError, match=f"{other}: its cluster.id is d, that of .* is c"):
        kafkalog.open([root.path, other])
    with pytest.raises(InvalidInputError, match="given twice"):
        kafkalog.open([root.path, tmp_path / "x" / ".." / "a"])
    with pytest.raises(InvalidInputError, match="at least one"):
        kafkalog.open([])


def test_a_directory_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    root = stopped(tmp_path / "a")
    log = kafkalog.open(root.path)
    shutil.rmtree(root.path)
    with pytest.raises(LogMovedError, match=f"{root.path}: the directory of this log was moved"):
        log.topics()


def test_a_topic_without_an_id_gets_the_same_one_everywhere(tmp_path: Path) -> None:
    ids = set()
    for place in ("a", "b"):
        root = BrokerRoot(tmp_path / place)
        root.partition("t-0", topic_id=None)
        directory = root.partition("t-1", topic_id=None)
        (directory / "partition.metadata").write_bytes(b"\xff\x00garbage")
        ids.add(kafkalog.open(root.path).describe("t").topic_id)
    (topic_id,) = ids
    assert len(topic_id) == 22
    root.partition("t-2")
    assert kafkalog.open(root.path).describe("t").topic_id == TOPIC_ID


# --- nothing is written --------------------------------------------------------------------------


def test_nothing_is_ever_written_there(tmp_path: Path) -> None:
    root = stopped(tmp_path / "log")
    (root.path / broker_root.CLEAN_SHUTDOWN).unlink()
    log_file = root.path / "t-0" / name(50, ".log")
    log_file.write_bytes(log_file.read_bytes() + bytes(100))
    (root.path / "t-0" / name(0, ".index")).unlink()
    before = root.contents()
    with kafkalog.open(root.path) as log:
        assert offsets(directory_log_of(log), partition=0) == list(range(100))
        assert len(log.status()) == 1
        assert sum(len(rows) for rows in log.latest("t")) == 7
        writes = [
            lambda: log.append("t", [(b"k", b"v")]),
            lambda: log.create_topic("u"),
            lambda: log.alter_topic("t", {"cleanup.policy": "compact"}),
            lambda: log.delete_topic("t"),
            lambda: log.delete_records("t", 0, 10),
            directory_log_of(log).apply_retention,
            lambda: kafkalog.open(root.path, cleaner=True),
        ]
        for write in writes:
            with pytest.raises(InvalidInputError, match=f"kafkalog adopt {root.path}"):
                write()
    with root.alive(), kafkalog.open(root.path) as log:
        offsets(directory_log_of(log))
        log.status()
    assert root.contents() == before


def test_opening_and_planning_load_nothing_heavy(tmp_path: Path) -> None:
    root = stopped(tmp_path / "log")
    (root.path / broker_root.CLEAN_SHUTDOWN).unlink()  # so its log is read and checked
    program = (
        "import sys, kafkalog\n"
        "log = kafkalog.open(sys.argv[1])\n"
        "assert log.offsets('t') == {0: (0, 100)}\n"
        "assert 'pyarrow' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", program, str(root.path)], check=True)


def test_a_partition_is_looked_at_when_it_is_asked_for(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root = stopped(tmp_path / "log")
    (root.path / broker_root.CLEAN_SHUTDOWN).unlink()
    damaged = root.partition("u-0") / name(50, ".log")
    damaged.write_bytes(damaged.read_bytes()[:-1])
    with caplog.at_level(logging.WARNING):
        log = kafkalog.open(root.path)
        assert log.topics() == ["t", "u"]
        assert log.offsets("t") == {0: (0, 100)}
        assert caplog.text == ""
        assert log.offsets("u") == {0: (0, 90)}
    assert str(damaged) in caplog.text


# --- checkpoints ---------------------------------------------------------------------------------


def test_the_log_starts_where_its_checkpoint_says(tmp_path: Path) -> None:
    root = stopped(tmp_path / "log")
    root.checkpoint(broker_root.LOG_START, {"t-0": 33})
    log = kafkalog.open(root.path)
    assert log.offsets("t") == {0: (33, 100)}
    assert offsets(directory_log_of(log)) == list(range(33, 100))


@pytest.mark.parametrize("start", [2**63 - 1, 2**63 - 2**31])
def test_a_log_start_without_room_for_a_batch_says_nothing(
    tmp_path: Path, start: int, caplog: pytest.LogCaptureFixture
) -> None:
    root = stopped(tmp_path / "log")
    root.checkpoint(broker_root.LOG_START, {"t-0": start})
    assert kafkalog.open(root.path).offsets("t") == {0: (0, 100)}
    assert f"found {start}" in caplog.text


@pytest.mark.parametrize("content", ["", "garbage", "0\n2\nt 0 1\n", "1\n0\n", "0\n1\nt 0\n"])
def test_a_damaged_checkpoint_says_nothing(tmp_path: Path, content: str) -> None:
    root = BrokerRoot(tmp_path / "log")
    root.partition("t-0")
    (root.path / "t-0" / name(0, ".log")).write_bytes(b"x")
    root.checkpoint(broker_root.RECOVERY_POINT, {"t-0": 60})
    assert kafkalog.open(root.path).offsets("t") == {0: (0, 100)}
    for checkpoint in (broker_root.RECOVERY_POINT, broker_root.LOG_START, broker_root.CLEANER):
        (root.path / checkpoint).write_text(content)
    # Without a recovery point all is checked, and the first segment holds nothing.
    assert kafkalog.open(root.path).offsets("t") == {0: (0, 0)}


def test_a_clean_shutdown_is_believed(tmp_path: Path) -> None:
    root = BrokerRoot(tmp_path / "log")
    log_file = root.partition("t-0") / name(50, ".log")
    data = bytearray(log_file.read_bytes())
    data[70] ^= 1
    log_file.write_bytes(data)
    assert kafkalog.open(root.path).offsets("t") == {0: (0, 50)}
    root.shut_down()
    assert kafkalog.open(root.path).offsets("t") == {0: (0, 100)}


# --- a live broker -------------------------------------------------------------------------------


def test_a_live_brokers_partition_ends_at_its_checkpoint(tmp_path: Path) -> None:
    root = stopped(tmp_path / "log")
    root.partition("u-0")
    with root.alive():
        log = kafkalog.open(root.path)
        state = directory_log_of(log).state()
        assert log.offsets("t") == {0: (0, 40)}
        assert log.offsets("u") == {0: (0, 0)}, "it has no checkpoint yet"
        assert offsets(directory_log_of(log)) == list(range(40))
        assert directory_log_of(log).state() is state
        root.checkpoint(broker_root.HIGH_WATERMARK, {"t-0": 75, "u-0": 100})
        assert directory_log_of(log).state() is not state
        assert log.offsets("t") == {0: (0, 75)}
        assert offsets(directory_log_of(log)) == list(range(75))
        assert offsets(directory_log_of(log), "u") == list(range(100))
        root.partition("v-0")
        assert log.topics() == ["t", "u", "v"]
    assert log.offsets("t") == {0: (0, 100)}


def test_a_checkpoint_beyond_the_log_ends_where_the_log_does(tmp_path: Path) -> None:
    root = stopped(tmp_path / "log")
    root.checkpoint(broker_root.HIGH_WATERMARK, {"t-0": 4000})
    with root.alive():
        assert kafkalog.open(root.path).offsets("t") == {0: (0, 100)}


def test_what_the_cleaner_has_passed_is_committed(tmp_path: Path) -> None:
    root = stopped(tmp_path / "log")
    root.checkpoint(broker_root.CLEANER, {"t-0": 50})
    with root.alive():
        state = kafkalog.open(root.path).describe("t").partitions[0]
        assert (state.high_watermark, state.first_dirty_offset) == (50, 50)
        root.checkpoint(broker_root.CLEANER, {"t-0": 90})  # never in the active segment
        state = kafkalog.open(root.path).describe("t").partitions[0]
        assert (state.high_watermark, state.first_dirty_offset) == (40, 0)


def test_a_broker_that_starts_again_takes_nothing_back(tmp_path: Path) -> None:
    root = stopped(tmp_path / "log")
    log = KafkaLog(root.path)
    assert log.offsets("t") == {0: (0, 100)}
    with root.alive():  # its checkpoint still says 40
        assert log.offsets("t") == {0: (0, 100)}
        task = KafkaLog(root.path)
        assert task.offsets("t") == {0: (0, 40)}
        with directory_log_of(task).snapshot("t", 0, known_end=90) as view:
            assert view.state.high_watermark == 90


def test_files_that_a_live_broker_replaces_meanwhile_are_listed_again(tmp_path: Path) -> None:
    root = stopped(tmp_path / "log")
    root.checkpoint(broker_root.HIGH_WATERMARK, {"t-0": 80})
    directory = root.path / "t-0"
    with root.alive():
        log = kafkalog.open(root.path)
        assert log.offsets("t") == {0: (0, 80)}
        # The broker rolls, then cleans both closed segments into one.
        whole = (directory / name(0, ".log")).read_bytes()
        whole += (directory / name(50, ".log")).read_bytes()
        (directory / name(0, ".log.swap")).write_bytes(whole)
        (directory / name(100, ".log")).touch()
        (directory / name(100, ".index")).touch()
        assert offsets(directory_log_of(log)) == list(range(80))
        for suffix in (".log", ".index", ".timeindex"):
            (directory / name(50, suffix)).rename(directory / name(50, suffix + ".deleted"))
            (directory / name(0, suffix)).rename(directory / name(0, suffix + ".deleted"))
        (directory / name(0, ".log.swap")).rename(directory / name(0, ".log"))
        assert offsets(directory_log_of(log)) == list(range(80))


def test_a_directory_whose_adoption_has_begun_is_still_readable(tmp_path: Path) -> None:
    root = stopped(tmp_path / "log")
    (root.path / "meta.properties").rename(root.path / "kl-meta.properties")
    assert offsets(DirectoryLog(root.path)) == list(range(100))


def test_a_transaction_that_a_dead_broker_left_open_is_noted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root = BrokerRoot(tmp_path / "log")
    directory = root.path / "t-0"
    directory.mkdir()
    opened = BatchBuilder(base_offset=50, producer=(7, 0, 0), transactional=True).add(b"k", b"v")
    write_segment(directory, 0, [*batches(0, 50), opened.build(), *batches(51, 101)])
    text = "a transaction is open from offset 50 on, and no broker is here to end it"
    log = kafkalog.open(root.path, read_only=True)
    assert sum(batch.num_rows for batch in log.read("t")) == 50
    assert any(text in message for message in caplog.messages)
    (found,) = verify(root.path)
    assert text in str(found) and not found.is_damage
    with root.alive():
        assert list(verify(root.path)) == []
