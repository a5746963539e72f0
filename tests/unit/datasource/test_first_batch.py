"""A query's first batch: what it starts with, and what a repetition after a crash makes of it.

And what a poll finds where the query was further than the log says.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path

import pytest

from kafkalog.errors import DataLossError, InvalidInputError, UnknownTopicError
from kafkalog.storage_engine.directory.directory_log import DirectoryLog
from tests.builders.batch_builder import COMMIT, at_times, joined, marker
from tests.unit.datasource.logs import append, append_to, numbered
from tests.unit.datasource.streaming_query import Row, StreamingQuery

TIME = 1_700_000_000_000
"""When `append` and `append_to` append."""
SINCE = {"startingTimestamp": str(TIME)}
LENIENT = {"failOnDataLoss": "false"}


def places(batch: list[Row]) -> list[tuple[str, int]]:
    return [(row["topic"], row["offset"]) for row in batch]


def delete(root: Path, topic: str) -> None:
    with DirectoryLog(root) as engine:
        engine.delete_topic(topic)


def begin(streaming: StreamingQuery, between: Callable[[], None]) -> None:
    """Plan the first batch, with something happening after the query was asked for its start."""
    streaming.start()
    reader = streaming.reader
    assert reader is not None
    start = json.loads(json.dumps(reader.initialOffset()))
    between()
    end = reader.latestOffset(start, reader.getDefaultReadLimit())
    streaming.planned.append(json.dumps(end))


@pytest.mark.parametrize("fail", ["true", "false"])
def test_a_checkpoint_that_is_within_an_open_transaction_is_gone_on_from(
    tmp_path: Path, fail: str
) -> None:
    opened = at_times(3, (1, 2), 7, transactional=True)
    with DirectoryLog(tmp_path) as engine:
        engine.create_topic("t", 1)
        engine.append_raw("t", 0, joined([at_times(0, (1, 2, 3)), opened, at_times(5, (3,))]))
    streaming = StreamingQuery(tmp_path, {"failOnDataLoss": fail})
    # Spark's own source has read uncommitted records, up to the high watermark.
    streaming.planned, streaming.committed = ['{"t":{"0":6}}'], 1

    assert streaming.drain() == []
    with DirectoryLog(tmp_path) as engine:
        engine.append_raw("t", 0, joined([marker(6, COMMIT, 7), at_times(7, (4,))]))

    assert [row["offset"] for row in streaming.drain()] == [7]


@pytest.mark.parametrize("dies", [False, True])
@pytest.mark.parametrize("start", [{"startingOffsets": "latest"}, SINCE], ids=["latest", "time"])
def test_a_topic_that_comes_between_start_and_first_batch_is_read_whole(
    tmp_path: Path, start: dict[str, str], dies: bool
) -> None:
    append_to(tmp_path, "t1", {0: 3})
    streaming = StreamingQuery(tmp_path, {"subscribePattern": "t.", **start})
    begin(streaming, lambda: append_to(tmp_path, "t2", {0: 5}))
    if dies:
        streaming.start()

    found = places(streaming.run_planned() + streaming.drain())

    assert [place for place in found if place[0] == "t2"] == [("t2", n) for n in range(5)]
    assert json.loads(streaming.planned[0]) == {"t1": {"0": 3}}


def test_a_first_batch_is_repeated_though_a_new_topic_has_no_record_since_the_time(
    tmp_path: Path,
) -> None:
    append_to(tmp_path, "t1", {0: 2})
    streaming = StreamingQuery(tmp_path, {"subscribePattern": "t.", **SINCE})
    streaming.plan()
    append_to(tmp_path, "t2", {0: 0})
    streaming.start()

    assert places(streaming.run_planned()) == [("t1", 0), ("t1", 1)]
    append_to(tmp_path, "t2", {0: 1})
    assert places(streaming.drain()) == [("t2", 0)]


@pytest.mark.parametrize("newer", [0, 2])
def test_a_first_batch_that_retention_took_whole_is_data_loss(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, newer: int
) -> None:
    append(tmp_path, "t", numbered(5))
    streaming = StreamingQuery(tmp_path, dict(SINCE))
    streaming.plan()
    with DirectoryLog(tmp_path) as engine:
        engine.delete_records("t", 0, 5)
    append(tmp_path, "t", numbered(newer))
    streaming.start()

    with pytest.raises(DataLossError, match=r"NOT_FOUND_FOR_PARTITIONS\] .* t-0 .* up to .* 5,"):
        streaming.run_planned()
    streaming.options |= LENIENT
    streaming.start()
    with caplog.at_level(logging.WARNING):
        assert streaming.run_planned() == []
    assert "none of that is left" in caplog.text
    append(tmp_path, "t", numbered(1))
    assert places(streaming.drain()) == [("t", 5 + n) for n in range(newer + 1)]


@pytest.mark.parametrize(
    "start", [{"startingOffsets": "earliest"}, {"startingOffsets": '{"t":{"0":0},"u":{"0":0}}'}]
)
def test_a_first_batch_is_repeated_without_a_topic_that_is_gone(
    tmp_path: Path, start: dict[str, str]
) -> None:
    append_to(tmp_path, "t", {0: 5})
    append_to(tmp_path, "u", {0: 2})
    streaming = StreamingQuery(tmp_path, {"subscribe": "t,u", **start})
    streaming.plan()
    delete(tmp_path, "t")
    streaming.start()

    with pytest.raises(DataLossError, match="t-0"):
        streaming.run_planned()
    streaming.options |= LENIENT
    streaming.start()
    assert places(streaming.run_planned() + streaming.drain()) == [("u", 0), ("u", 1)]


def test_a_new_query_without_its_topic_is_refused_whatever_loss_is_accepted(
    tmp_path: Path,
) -> None:
    append_to(tmp_path, "t", {0: 1})

    with pytest.raises(UnknownTopicError, match=r"^subscribe: topic 'gone'"):
        StreamingQuery(tmp_path, {"subscribe": "t,gone", **LENIENT}).plan()


@pytest.mark.parametrize(
    "options",
    [{"startingTimestamp": "-3"}, {"startingOffsetsByTimestamp": '{"t":{"0":-3}}'}],
    ids=["global", "specific"],
)
def test_a_stream_does_not_start_at_the_largest_timestamp(
    tmp_path: Path, options: dict[str, str]
) -> None:
    append_to(tmp_path, "t", {0: 1})

    with pytest.raises(InvalidInputError, match=rf"^{next(iter(options))}: -3 .* is no start"):
        StreamingQuery(tmp_path, options).plan()


def test_given_offsets_beyond_the_end_are_told_by_their_option(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    append_to(tmp_path, "t", {0: 5})
    options = {"startingOffsets": '{"t":{"0":9}}'}

    with pytest.raises(DataLossError, match=r"START_OFFSET_RESET\] startingOffsets: t-0 .* 9 .* 5"):
        StreamingQuery(tmp_path, options).plan()
    with caplog.at_level(logging.WARNING):
        assert StreamingQuery(tmp_path, options | LENIENT).drain() == []
    assert "startingOffsets: t-0" in caplog.text


@pytest.mark.parametrize(
    "options",
    [
        {"startingOffsets": '{"t":{"0":1,"00":2}}'},
        {"startingOffsetsByTimestamp": '{"t":{"0":1,"00":2}}'},
    ],
    ids=["offsets", "times"],
)
def test_a_partition_named_twice_is_refused(tmp_path: Path, options: dict[str, str]) -> None:
    append_to(tmp_path, "t", {0: 5})

    with pytest.raises(InvalidInputError, match=r"^starting\w+: t-0 is named twice"):
        StreamingQuery(tmp_path, options).plan()


def test_missing_topics_are_told_once_while_they_are_the_same(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for topic in ("t", "u", "v"):
        append_to(tmp_path, topic, {0: 1})
    streaming = StreamingQuery(tmp_path, {"subscribe": "t,u,v", **LENIENT})
    streaming.drain()
    caplog.set_level(logging.WARNING)

    for gone in ("u", "v"):
        delete(tmp_path, gone)
        for _ in range(3):
            append_to(tmp_path, "t", {0: 1})
            streaming.drain()

    told = [text for text in caplog.messages if text.startswith("going on without")]
    assert told == ["going on without missing topics: " + names for names in ("u", "u, v")]


def test_an_idle_poll_keeps_its_answer_until_something_is_committed(tmp_path: Path) -> None:
    append_to(tmp_path, "t", {0: 2, 1: 1})
    streaming = StreamingQuery(tmp_path, {"startingOffsets": "earliest"})
    streaming.drain()
    reader = streaming.reader
    assert reader is not None

    def poll() -> tuple[object, object]:
        found = reader.latestOffset(json.loads(streaming.planned[-1]), reader.getDefaultReadLimit())
        return found, reader.reportLatestOffset()

    idle = poll()
    again = poll()
    assert idle == again == ({"t": {"0": 2, "1": 1}},) * 2
    assert idle[0] is again[0] is again[1]
    append_to(tmp_path, "t", {1: 1})

    assert poll() == ({"t": {"0": 2, "1": 2}},) * 2
    assert places(streaming.drain()) == [("t", 1)]
    # Another start is another question, though nothing was committed.
    limit = reader.getDefaultReadLimit()
    assert reader.latestOffset({"t": {"0": 0}}, limit) == {"t": {"0": 2, "1": 2}}
