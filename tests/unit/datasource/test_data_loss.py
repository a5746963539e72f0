"""`failOnDataLoss`: what is a loss, what is none, and Spark's KafkaDontFailOnDataLossSuite."""

from __future__ import annotations

import logging
import random
from pathlib import Path

import pytest

import kafkalog
from kafkalog.errors import DataLossError
from kafkalog.storage_engine.directory.directory_log import DirectoryLog
from tests.unit.datasource.logs import append, append_to, numbered, rows, source
from tests.unit.datasource.streaming_query import StreamingQuery
from tests.unit.storage_engine import broker_root
from tests.unit.storage_engine.broker_root import BrokerRoot

TIME = 1_700_000_000_000


def query(root: Path, **options: str) -> StreamingQuery:
    return StreamingQuery(root, {"startingOffsets": "earliest", **options})


def age_out(root: Path, topic: str, before: int) -> None:
    with DirectoryLog(root) as engine:
        engine.alter_topic(topic, {"cleanup.policy": "delete"})
        engine.delete_records(topic, 0, before)


def test_records_that_were_deleted_before_they_were_read_are_told(tmp_path: Path) -> None:
    append(tmp_path, "t", numbered(10))
    streaming = query(tmp_path, maxOffsetsPerTrigger="3")
    streaming.trigger()
    age_out(tmp_path, "t", 5)

    with pytest.raises(
        DataLossError,
        match=r"COULD_NOT_READ_OFFSET_RANGE\] topic t partition 0: wanted the offsets \[3, 6\), "
        r"available are \[5, 10\).*failOnDataLoss",
    ):
        streaming.trigger()


def test_a_query_that_accepts_it_goes_on_with_the_first_record_there_is(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    append(tmp_path, "t", numbered(10))
    streaming = query(tmp_path, maxOffsetsPerTrigger="3", failOnDataLoss="false")
    streaming.trigger()
    age_out(tmp_path, "t", 8)

    with caplog.at_level(logging.WARNING):
        batches = [streaming.trigger() for _ in range(3)]

    assert [[row["offset"] for row in batch or []] for batch in batches] == [[], [8], [9]]
    assert "wanted the offsets [3, 6), available are [8, 10)" in caplog.text


def test_a_topic_that_starts_late_is_told_when_it_is_new(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    append(tmp_path, "t1", numbered(2))
    streaming = query(tmp_path, subscribePattern="t.")
    streaming.trigger()
    append(tmp_path, "t2", numbered(6))
    age_out(tmp_path, "t2", 4)

    with pytest.raises(
        DataLossError, match=r"DOES_NOT_START_FROM_OFFSET_ZERO\] added partition t2-0 .*\[4, 6\)"
    ):
        streaming.trigger()
    streaming.options["failOnDataLoss"] = "false"
    streaming.start()
    with caplog.at_level(logging.WARNING):
        assert [row["offset"] for row in streaming.drain()] == [4, 5]
    assert "ADDED_PARTITION_DOES_NOT_START_FROM_OFFSET_ZERO" in caplog.text


def test_a_stream_from_the_earliest_offset_of_an_aged_topic_loses_nothing(tmp_path: Path) -> None:
    append(tmp_path, "t", numbered(6))
    age_out(tmp_path, "t", 4)

    assert [row["offset"] for row in query(tmp_path).drain()] == [4, 5]


def test_holes_that_cleaning_leaves_are_not_a_loss(tmp_path: Path) -> None:
    append_to(tmp_path, "t", {0: 4})
    with kafkalog.open(tmp_path) as log:
        log.append("t", [(b"0", b"new"), (b"2", b"new"), (b"9", b"new")])
        log.clean("t", force=True)
    streaming = query(tmp_path, maxOffsetsPerTrigger="2")

    batches = []
    while (batch := streaming.trigger()) is not None:
        batches.append([row["offset"] for row in batch])

    assert batches == [[1], [3], [4, 5], [6]]


def cut(root: BrokerRoot, name: str, end: int) -> None:
    """Replace a partition by one that ends earlier, as a broker does that was behind."""
    import shutil

    shutil.rmtree(root.path / name)
    root.partition(name, (0,), end)


def test_a_truncated_log_is_reported(tmp_path: Path) -> None:
    root = BrokerRoot(tmp_path / "log")
    root.partition("t-0", (0,), 30)
    root.shut_down()
    streaming = query(root.path)
    assert len(streaming.drain()) == 30
    cut(root, "t-0", 20)

    streaming.start()
    with pytest.raises(DataLossError, match=r"t-0.* changed from 30 to 20.*\[0, 20\)"):
        streaming.trigger()
    streaming.options["failOnDataLoss"] = "false"
    streaming.start()
    assert streaming.drain() == []


def test_a_broker_that_reports_its_end_late_has_lost_nothing(tmp_path: Path) -> None:
    root = BrokerRoot(tmp_path / "log")
    root.partition("t-0", (0,), 30)
    root.checkpoint(broker_root.HIGH_WATERMARK, {"t-0": 10})
    root.shut_down()
    with root.alive():
        streaming = query(root.path)  # begun by Spark's own Kafka source, at the broker
        streaming.planned, streaming.committed = ['{"t":{"0":25}}'], 1

        assert streaming.drain() == []
        streaming.start(available_now=True)
        assert streaming.drain() == []
        root.checkpoint(broker_root.HIGH_WATERMARK, {"t-0": 28})
        assert [row["offset"] for row in streaming.drain()] == []  # its target was 25
        streaming.start()
        assert [row["offset"] for row in streaming.drain()] == [25, 26, 27]


def test_a_batch_read_gives_no_record_twice_after_retention(tmp_path: Path) -> None:
    append(tmp_path, "t", numbered(20))
    age_out(tmp_path, "t", 13)
    data_source = source(
        tmp_path, failOnDataLoss="false", startingOffsets='{"t":{"0":0}}', minPartitions="5"
    )
    reader = data_source.reader(data_source.schema())

    assert [row["offset"] for row in rows(reader, reader.partitions())] == list(range(13, 20))


def test_a_stream_gives_no_record_twice_after_retention(tmp_path: Path) -> None:
    append(tmp_path, "t", numbered(20))
    streaming = query(tmp_path, failOnDataLoss="false", startingOffsets='{"t":{"0":0}}')
    streaming.start()
    assert streaming.plan()
    age_out(tmp_path, "t", 13)

    assert [row["offset"] for row in streaming.drain()] == list(range(13, 20))


@pytest.mark.parametrize("seed", range(2))
def test_records_and_topics_that_vanish_at_random_never_stop_a_query_that_accepts_it(
    tmp_path: Path, seed: int
) -> None:
    """Spark's "stress test for failOnDataLoss=false"; a record must not come twice."""
    dice = random.Random(seed)
    names = [f"fail{number}" for number in range(4)]
    append(tmp_path, names[0], numbered(1))
    streaming = query(
        tmp_path, subscribePattern="fail.*", failOnDataLoss="false", maxOffsetsPerTrigger="7"
    )
    written: set[bytes] = set()
    read: list[bytes] = []
    for step in range(40):
        deed, name = dice.random(), dice.choice(names)
        with DirectoryLog(tmp_path) as engine:
            known = engine.topics()
        if deed < 0.1 and name in known:
            with DirectoryLog(tmp_path) as engine:
                engine.delete_topic(name)
        elif deed < 0.3 and name in known:
            with DirectoryLog(tmp_path) as engine:
                start, end = engine.offsets(name)[0]
            age_out(tmp_path, name, dice.randint(start, end))
        elif deed < 0.7:
            values = [f"{step}-{n}".encode() for n in range(dice.randint(1, 12))]
            written.update(values)
            append(tmp_path, name, [(b"k", value) for value in values])
        elif deed < 0.8:
            streaming.start()
        elif deed < 0.9:
            streaming.plan()
        else:
            read += [row["value"] for row in streaming.trigger() or []]
    read += [row["value"] for row in streaming.drain()]

    assert len(set(read)) == len(read)
    assert set(read) <= written | {b"v0"}


@pytest.mark.parametrize(
    ("right", "wrong", "left_out"),
    [
        ({"subscribe": "t,u"}, {"subscribe": "t"}, "u-0"),
        ({"subscribe": "t,u"}, {"subscribe": "u"}, "t-0"),
        ({"subscribePattern": "t|u"}, {"subscribePattern": "t"}, "u-0"),
        ({"assign": '{"t":[0],"u":[0]}'}, {"assign": '{"t":[0]}'}, "u-0"),
        ({"subscribe": "t,u"}, {"subscribe": "v"}, "t-0.*u-0"),
    ],
)
@pytest.mark.parametrize("available_now", [False, True])
def test_a_query_that_leaves_out_what_it_has_read_is_refused_before_it_is_planned(
    tmp_path: Path,
    right: dict[str, str],
    wrong: dict[str, str],
    left_out: str,
    available_now: bool,
) -> None:
    for topic in ("t", "u", "v"):
        append(tmp_path, topic, numbered(2))
    streaming = query(tmp_path, **right)
    streaming.start(available_now=available_now)
    streaming.trigger()
    planned = list(streaming.planned)
    for topic in ("t", "u", "v"):
        append(tmp_path, topic, numbered(1))

    streaming.options = {"startingOffsets": "earliest", **wrong}
    streaming.start(available_now=available_now)
    with pytest.raises(DataLossError, match=rf"{left_out} \(read up to 2\): in the query's check"):
        streaming.trigger()
    assert streaming.planned == planned

    streaming.options = {"startingOffsets": "earliest", **right}
    streaming.start(available_now=available_now)
    assert [(row["topic"], row["offset"]) for row in streaming.trigger() or []] == [
        ("t", 2),
        ("u", 2),
    ]


def test_a_query_that_resumes_after_deletions_are_gone_warns_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with kafkalog.open(tmp_path) as log:
        log.create_topic("t", config={"delete.retention.ms": "0"})
        log.append("t", [("a", "1"), ("b", "1")])
        streaming = query(tmp_path)
        assert len(streaming.drain()) == 2
        log.append("t", [("a", None), ("c", "1")])
        log.clean("t", force=True, now_ms=TIME)
        log.clean("t", force=True, now_ms=TIME + 1)
        streaming.start()
        assert [row["key"] for row in streaming.drain()] == [b"c"]
        assert "t-0: the query goes on from offset 2, and deletions up to offset 3" in caplog.text
        caplog.clear()
        log.append("t", [("d", "1")])
        streaming.start()
        assert len(streaming.drain()) == 1
        assert len(query(tmp_path).drain()) > 2  # a new query has missed nothing
        assert "deletions" not in caplog.text
