"""The verbs on a log in an object store: those of topics, records and status; the others refuse."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.cli.conftest import Command
from tests.unit.storage_engine.store_log import memory_address

RECORDS = b'{"key":"a","value":"1"}\n{"key":"b","value":{"x":1}}\n'


@pytest.fixture
def url(kafkalog: Command) -> str:
    url = str(memory_address())
    assert kafkalog("topics", "create", url, "t", "--partitions", 2).status == 0
    assert kafkalog("append", url, "t", stdin=RECORDS).status == 0
    return url


def test_topics_records_and_writers_are_those_of_a_directory(
    kafkalog: Command, url: str, tmp_path: Path
) -> None:
    kafkalog("topics", "create", tmp_path, "t", "--partitions", 2)
    kafkalog("append", tmp_path, "t", stdin=RECORDS)
    for arguments in (("read", "t"), ("read", "t", "--key", "a"), ("read", "t", "--latest")):
        verb, *more = arguments
        ours, stored = (kafkalog(verb, path, *more, "--json").json for path in (tmp_path, url))
        assert [(row["offset"], row["value"]) for row in ours]
        assert [(row["offset"], row["value"]) for row in stored] == [
            (row["offset"], row["value"]) for row in ours
        ]
    assert kafkalog("topics", "alter", url, "t", "--config", "retention.ms=9").status == 0
    (topic,) = kafkalog("topics", "list", url, "--json").json
    assert topic["config"]["retention.ms"] == "9"
    assert kafkalog("writers", url).status == 0
    assert kafkalog("topics", "delete", url, "t").status == 0
    assert kafkalog("topics", "list", url, "--json").json == []


def test_status_counts_objects_extents_and_its_requests(kafkalog: Command, url: str) -> None:
    log, *partitions = kafkalog("status", url, "--json").json
    assert (log["path"], log["commit"], log["objects"], log["deadObjects"]) == (url, 2, 1, 0)
    assert log["requests"]["GET"] >= 1
    assert sorted(row["extents"] for row in partitions) == [0, 1]
    assert sum(row["highWatermark"] for row in partitions) == 2
    assert "commit: 2  objects: 1" in kafkalog("status", url).lines[0]


@pytest.mark.parametrize("verb", ["explain", "clean", "cleaner", "erase", "verify"])
def test_a_verb_that_needs_a_directory_says_so(
    kafkalog: Command, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    monkeypatch.chdir(tmp_path)
    topic = {"explain": ["t"], "erase": ["t", "--key", "a"]}.get(verb, [])
    refused = kafkalog(verb, url, *topic)
    assert refused.status == 2
    assert url in refused.err and "expected a log directory" in refused.err
    assert len(refused.err.splitlines()) == 1
    assert not list(tmp_path.iterdir())
