"""A disk that is full: a clear error, nothing lost, and work goes on once there is room.

The disk is a tmpfs of 16 MiB. It is left one block more each time, until an act succeeds, so each
of its writes has been the one that was refused.
"""

from __future__ import annotations

import errno
import logging
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import kafkalog
from kafkalog.errors import StorageError
from kafkalog.storage_engine.place import directory_log_of
from kafkalog.storage_engine.writing.staged_message import StagedMessage
from tests.acceptance.mounts import BLOCK, Disk, disk
from tests.builders.log_builder import LogBuilder
from tests.builders.log_contents import damage, latest_records, records

pytestmark = pytest.mark.slow

FULL = os.strerror(errno.ENOSPC)
NOW_MS = 1_750_000_000_000
A_DAY_MS = 86_400_000
TRIES_MAX = 60


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Disk]:
    with disk(tmp_path / "small", "size=16m") as found:
        yield found


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)


def noise(size: int, seed: int = 0) -> bytes:
    """Bytes that no codec makes smaller."""
    return random.Random(seed).randbytes(size)


def names_the_file_and_the_reason(told: str | None) -> bool:
    """Whether a message begins with a path below the log's root, and says what is the matter."""
    assert told is not None
    path, _, reason = told.partition(": ")
    return "/small/log/" in path and FULL in reason


def until_it_fits(small: Disk, attempt: Callable[[], str | None], check: Callable[[], None]) -> int:
    """Attempt with 0, 1, 2 ... blocks free; `attempt` returns its error. Returns how many failed.

    Each error is a clear one, and after it `check` finds everything as it was.
    """
    for blocks in range(TRIES_MAX):
        small.leave(blocks)
        error = attempt()
        if error is None:
            small.relieve()
            return blocks
        assert names_the_file_and_the_reason(error), error
        check()
        small.relieve()
    raise AssertionError("it never fits")


def test_a_commit_is_refused_as_a_whole_until_there_is_room(small: Disk) -> None:
    root = small.path / "log"
    log = kafkalog.open(root)
    log.create_topic("t", 3, {"segment.bytes": "40000"})
    rows = [(f"k{i}", noise(3000, i)) for i in range(12)]
    expected: list[object] = []

    def attempt() -> str | None:
        try:
            log.append("t", rows)
        except StorageError as fault:
            assert isinstance(fault.__cause__, OSError) and fault.__cause__.errno == errno.ENOSPC
            return str(fault)
        return None

    def check() -> None:
        assert records(log, "t") == expected
        assert records(kafkalog.open(root, read_only=True), "t") == expected

    for number in range(3):  # into new segments, and into those that are there
        refused = until_it_fits(small, attempt, check)
        assert refused >= 8
        found = records(log, "t")
        assert len(found) == 12 * (number + 1)
        assert [record for record in found if record in expected] == expected
        expected = [*found]
    log.close()
    assert damage(root) == []


def test_a_task_that_cannot_stage_leaves_no_file_and_its_retry_lands(small: Disk) -> None:
    root = small.path / "log"
    log = kafkalog.open(root)
    log.create_topic("t", 1)
    messages: list[StagedMessage] = []

    def attempt() -> str | None:
        try:
            record = ("k", noise(10 * BLOCK, 1))
            messages.append(LogBuilder(log, now_ms=NOW_MS).stage(record, batch_id=1))
        except OSError as fault:
            assert fault.errno == errno.ENOSPC
            return f"{fault.filename}: {fault.strerror}"
        return None

    def check() -> None:
        assert list(root.rglob("*.staged")) == []

    assert until_it_fits(small, attempt, check) >= 10
    small.leave(0)
    with pytest.raises(StorageError, match=FULL):
        directory_log_of(log).commit(
            messages
        )  # nothing of it is lost with the attempt: the next one commits it
    small.relieve()
    assert directory_log_of(log).commit(messages).rows == 1
    assert [record[1:3] for record in records(log, "t")] == [(0, b"k")]
    assert damage(root) == []


def test_a_cleaning_is_refused_as_a_whole_until_there_is_room(small: Disk) -> None:
    root = small.path / "log"
    log = kafkalog.open(root)
    log.create_topic("t", 1, {"segment.bytes": "60000", "file.delete.delay.ms": "0"})
    for number in range(12):
        log.append("t", [(f"k{number % 4}", noise(10_000, number))], now_ms=NOW_MS)
    before = latest_records(log, "t")

    def attempt() -> str | None:
        (stats,) = log.clean("t", force=True, now_ms=NOW_MS)
        return stats.error

    def check() -> None:
        assert latest_records(log, "t") == before
        assert not list(root.rglob("*.cleaned"))

    assert until_it_fits(small, attempt, check) >= 5
    assert latest_records(log, "t") == before
    assert len(records(log, "t")) == 4
    assert [status.state for status in log.status()] == ["clean"]
    log.close()
    assert damage(root) == []


def test_a_partition_that_the_disk_refused_is_cleaned_unasked_later(small: Disk) -> None:
    log = kafkalog.open(small.path / "log")
    log.create_topic("t", 1, {"segment.bytes": "20000", "min.cleanable.dirty.ratio": "0"})
    for number in range(6):
        log.append("t", [("k", noise(10_000, number))], now_ms=NOW_MS)
    small.leave(0)
    (stats,) = log.clean("t", now_ms=NOW_MS)
    assert names_the_file_and_the_reason(stats.error)
    small.relieve()
    assert log.clean("t", now_ms=NOW_MS) == []
    assert [found.error for found in log.clean("t", now_ms=NOW_MS + 60_000)] == [None]


def test_a_disk_without_a_free_block_is_emptied_by_retention(small: Disk) -> None:
    log = kafkalog.open(small.path / "log")
    config = {"cleanup.policy": "delete", "retention.ms": "1000", "file.delete.delay.ms": "0"}
    log.create_topic("t", 1, {**config, "segment.bytes": "30000"})
    for number in range(10):
        log.append("t", [("k", noise(20_000, number))], now_ms=NOW_MS)
    small.leave(0)
    (stats,) = directory_log_of(log).apply_retention("t", now_ms=NOW_MS + A_DAY_MS)
    # To roll the active segment, which has expired as well, takes a block.
    assert (stats.error, stats.segments) == (None, 9)
    directory_log_of(log).apply_retention(
        "t", now_ms=int(1e15)
    )  # the clock of the files is not NOW_MS
    assert small.free_blocks() >= 9 * 5
    assert log.append("t", [("k", b"new")], now_ms=NOW_MS).rows == 1
    assert [record[1] for record in records(log, "t")][-1] == 10


def test_a_disk_without_a_free_block_is_emptied_by_deleting_a_topic(small: Disk) -> None:
    log = kafkalog.open(small.path / "log")
    log.create_topic("kept", 1)
    log.append("kept", [("k", "v")])
    log.create_topic("t", 1, {"file.delete.delay.ms": "0"})
    log.append("t", [("k", noise(1_000_000))])
    small.leave(0)
    log.delete_topic("t")
    assert small.free_blocks() >= 200  # of 245; checkpoints are new files
    assert not directory_log_of(log).state().deleting
    assert len(records(log, "kept")) == 1
    log.create_topic("t", 1)


def test_records_can_be_deleted_and_configs_altered_without_a_free_block(small: Disk) -> None:
    log = kafkalog.open(small.path / "log")
    log.create_topic("t", 1, {"cleanup.policy": "compact,delete"})
    log.append("t", [("k", "1"), ("k", "2")])
    small.leave(0)
    assert log.delete_records("t", 0, 1) == 1
    assert log.alter_topic("t", {"retention.ms": "1"}).config["retention.ms"] == "1"
    assert [record[1] for record in records(log, "t")] == [1]


def test_a_log_or_topic_that_cannot_be_made_is_made_later(small: Disk) -> None:
    def make(name: str) -> Callable[[], str | None]:
        def attempt() -> str | None:
            try:
                with kafkalog.open(small.path / "log" / name) as log:
                    log.create_topic("t", 3)
            except StorageError as fault:
                return str(fault)
            return None

        return attempt

    (small.path / "log").mkdir()
    assert until_it_fits(small, make("a"), lambda: None) >= 2
    assert kafkalog.open(small.path / "log" / "a").append("t", [("k", "v")]).rows == 1


UPSERT = """
import sys
from pathlib import Path
from kafkalog.errors import StorageError
from kafkalog.sink.upsert import SQLiteUpsert
from tests.acceptance.mounts import Disk
from tests.acceptance.test_full_disk import noise
from tests.unit.sink.sqlite_rows import KINDS, NAMES, batch, driver_batch, query, row

directory, blocks = Path(sys.argv[1]), [int(number) for number in sys.argv[2].split(",")]
disk = Disk("self", directory)
upsert = SQLiteUpsert(directory / "follow.db", "stock", timeout_s=0.2)


def apply(batch_id):
    rows = [row(b"k%d" % i, noise(2000, batch_id), 10 * batch_id + i) for i in range(10)]
    return upsert.apply(batch(batch_id), NAMES, KINDS, [driver_batch(rows)])


apply(0)
for batch_id, free in enumerate(blocks, 1):
    before = query(directory / "follow.db", "SELECT * FROM stock")
    disk.leave(free)
    try:
        apply(batch_id)
        print("applied")
    except StorageError as fault:
        assert str(fault).startswith(f"{directory}/follow.db: "), fault
        # SQLite's own words, or how much is free where it has none for it.
        assert "is full" in str(fault) or " bytes are free" in str(fault), fault
        print("refused")
        disk.relieve()
        assert query(directory / "follow.db", "SELECT * FROM stock") == before
        assert apply(batch_id)
    disk.relieve()
    (found,) = query(directory / "follow.db", "SELECT batch_id FROM kafkalog_positions")
    assert found == (batch_id,)
assert query(directory / "follow.db", "PRAGMA integrity_check") == [("ok",)]
"""


def test_an_upsert_is_refused_as_a_whole_and_its_repetition_lands(small: Disk) -> None:
    outcomes = small.run(UPSERT, "0,1,2,3,5,8,13,21,100").split()
    assert outcomes[0] == "refused" and outcomes[-1] == "applied"
    assert outcomes.count("refused") >= 3


QUERY = """
import os
import sys
from pathlib import Path

from pyspark.sql import SparkSession

import kafkalog
from kafkalog.sink.upsert import SQLiteUpsert
from tests.acceptance.mounts import Disk
from tests.acceptance.test_full_disk import noise
from tests.builders.log_contents import pairs
from tests.unit.sink.sqlite_rows import query

directory, elsewhere = Path(sys.argv[1]), Path(sys.argv[2])
os.environ["PYSPARK_PYTHON"] = sys.executable
disk, database = Disk("self", directory), directory / "follow.db"
builder = SparkSession.builder.master("local[1]").config("spark.ui.enabled", "false")
for name in ("spark.local.dir", "spark.sql.warehouse.dir"):
    builder = builder.config(name, str(elsewhere / name))
for name in ("spark.driver.host", "spark.driver.bindAddress"):
    builder = builder.config(name, "127.0.0.1")
builder = builder.config("spark.python.authenticate.socketTimeout", "5m")
spark = builder.config("spark.sql.shuffle.partitions", "1").getOrCreate()
spark.sparkContext.setLogLevel("OFF")
source = kafkalog.open(elsewhere / "log")
source.create_topic("t", 1)
query(database, "CREATE TABLE stock (key TEXT PRIMARY KEY, value TEXT CHECK (value < 'z'))")
upsert = SQLiteUpsert(
    database,
    "stock",
    select=["string(key) AS key", "string(value) AS value"],
    path=directory / "letters",
    on_bad_record="deadletter:bad",
)


def run():
    stream = spark.readStream.format("kafkalog").option("path", str(elsewhere / "log"))
    records = stream.option("subscribe", "t").option("startingOffsets", "earliest").load()
    writer = records.writeStream.foreachBatch(upsert).trigger(availableNow=True)
    running = writer.option("checkpointLocation", str(directory / "checkpoint")).start()
    running.awaitTermination()


def table():
    return dict(query(database, "SELECT * FROM stock"))


expected, letters = {}, []
for number, free in enumerate(map(int, sys.argv[3].split(","))):
    before = table()
    rows = {f"k{key}": noise(1500, 10 * number + key).hex() for key in range(5)}
    expected = {**expected, **rows}
    letters.append((b"bad%d" % number, b"z"))
    source.append("t", [*rows.items(), letters[-1]])
    disk.leave(free)
    try:
        run()
        print("applied")
    except Exception as fault:
        told = str(fault)
        assert any(sign in told for sign in ("is full", "bytes are free", "No space left")), told
        print("refused")
        disk.relieve()
        # Where Spark could not note the end of a micro-batch, the table has it already.
        assert table() in (before, expected)
        run()
    disk.relieve()
    assert table() == expected
    assert pairs(kafkalog.open(directory / "letters", read_only=True), "bad") == letters
assert query(database, "PRAGMA integrity_check") == [("ok",)]
spark.stop()
"""


@pytest.mark.spark
@pytest.mark.skipif(os.environ.get("KAFKALOG_DISK") != "full", reason="runs with make kill-test")
def test_a_query_whose_table_letters_and_checkpoint_find_no_room_goes_on_later(
    small: Disk, tmp_path: Path
) -> None:
    outcomes = small.run(QUERY, str(tmp_path), "0,100,4,12,32,100").split()
    found = [outcome for outcome in outcomes if outcome in ("applied", "refused")]
    assert len(found) == 6 and found[0] == "refused" and found[-1] == "applied"
