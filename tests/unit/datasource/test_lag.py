"""Offsets behind latest; the numbers are those of Spark's KafkaMicroBatchSourceSuite."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest

import kafkalog
from kafkalog.datasource.lag import LagListener, offsets_behind_latest


def progress(*sources: dict[str, Any], query: str = "q") -> Any:
    return {"id": query, "sources": list(sources)}


def source(end: Any, latest: Any) -> dict[str, Any]:
    return {"description": "a source", "endOffset": end, "latestOffset": latest}


def test_a_limited_query_is_behind_in_each_partition() -> None:
    latest = {"t": {str(partition): 10 for partition in range(3)}}
    ends = {"t": {"0": 9, "1": 7, "2": 5}}

    assert offsets_behind_latest(progress(source(ends, latest))) == [
        {
            "minOffsetsBehindLatest": "1",
            "maxOffsetsBehindLatest": "5",
            "avgOffsetsBehindLatest": "3.0",
        }
    ]


def test_a_query_that_has_read_all_is_not_behind() -> None:
    ends = {"t": {"0": 4}}
    (found,) = offsets_behind_latest(progress(source(ends, ends)))

    assert set(found.values()) == {"0", "0.0"}


def test_a_partition_not_read_yet_counts_from_its_first_offset_ever() -> None:
    (found,) = offsets_behind_latest(progress(source({"t": {"0": 4}}, {"t": {"0": 4, "1": 3}})))

    assert (found["minOffsetsBehindLatest"], found["avgOffsetsBehindLatest"]) == ("0", "1.5")


@pytest.mark.parametrize(
    ("end", "latest"),
    [(None, {"t": {"0": 1}}), ({"t": {"0": 1}}, None), ({"t": {"0": 1}}, {}), (7, 9), ("x", "y")],
)
def test_nothing_is_said_of_a_source_without_offsets_of_topics(end: Any, latest: Any) -> None:
    assert offsets_behind_latest(progress(source(end, latest))) == [{}]


def test_text_of_a_listener_and_objects_of_a_query_say_the_same() -> None:
    as_text = SimpleNamespace(
        sources=[SimpleNamespace(endOffset='{"t":{"0":1}}', latestOffset='{"t": {"0": 3}}')]
    )

    assert offsets_behind_latest(as_text) == offsets_behind_latest(
        progress(source({"t": {"0": 1}}, {"t": {"0": 3}}))
    )
    assert offsets_behind_latest(None) == []


@pytest.mark.parametrize(
    ("latest", "text"),
    [
        ({"0": 20_000_000}, "20000000.0"),
        ({"0": 2**63 - 1}, "9223372036854776000.0"),
        ({"0": 1, "1": 0, "2": 0}, "0.3"),
        ({"0": 1, "1": 0, "2": 0, "3": 0}, "0.3"),
        ({"0": 3, "1": 0, "2": 0, "3": 0, "4": 0, "5": 0, "6": 0, "7": 0}, "0.4"),
        ({"0": 1, **{str(n): 0 for n in range(1, 2_000)}}, "0.0"),
    ],
)
def test_the_average_is_rounded_to_one_decimal(latest: dict[str, int], text: str) -> None:
    ends = {"t": dict.fromkeys(latest, 0)}

    (found,) = offsets_behind_latest(progress(source(ends, {"t": latest})))

    assert found["avgOffsetsBehindLatest"] == text


def test_a_listener_logs_and_keeps_what_each_query_said_last(
    caplog: pytest.LogCaptureFixture,
) -> None:
    listener = kafkalog.LagListener()
    assert isinstance(listener, LagListener)
    told = SimpleNamespace(
        id="q",
        name=None,
        batchId=3,
        sources=[SimpleNamespace(endOffset='{"t":{"0":1}}', latestOffset='{"t":{"0":3}}')],
    )

    with caplog.at_level(logging.INFO):
        listener.onQueryProgress(SimpleNamespace(progress=told))
    assert "query q, batch 3, source 0: offsets behind latest: min 2, max 2, avg 2.0" in caplog.text
    assert listener.latest["q"][0]["maxOffsetsBehindLatest"] == "2"
    listener.onQueryTerminated(SimpleNamespace(id="q"))
    assert listener.latest == {}
