"""The verbs on a log in an object store: those of topics, records and status; the others refuse."""

from __future__ import annotations

from pathlib import Path

import pytest

from kafkalog.cleaner.objects import upkeep
from kafkalog.storage_engine.object_store.object_log import ObjectLog
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
    assert (log["path"], log["commit"], log["objects"], log["droppedObjects"]) == (url, 2, 1, 0)
    assert log["requests"]["GET"] >= 1
    assert sorted(row["extents"] for row in partitions) == [0, 1]
    assert sum(row["highWatermark"] for row in partitions) == 2
    shown = kafkalog("status", url).lines
    assert "commit: 2  objects: 1" in shown[0]
    assert shown[1].startswith("fresh: 1 objects") and "one read: 1 GETs" in shown[1]
    assert shown[2].startswith("regroup: not due. The oldest fresh object is 0 s old")


def test_status_says_what_is_due_and_why_and_what_requests_cost(
    kafkalog: Command, url: str
) -> None:
    log, *partitions = kafkalog("status", url, "--json").json
    assert (log["freshObjects"], log["regroup"]) == (1, "not due")
    assert log["regroupFigures"]["oldestAgeMs"] < 60_000
    assert log["requestsPrice"] > 0
    states = sorted((row["state"], row["dirtyRatio"], row["reason"]) for row in partitions)
    assert [state[:2] for state in states] == [("clean", 0.0), ("not due", 0.0)]
    assert states[1][2].startswith("Everything dirty is in the active segment, from offset 0 on")


def test_a_partition_whose_records_cannot_be_cleaned_yet_is_not_clean(
    kafkalog: Command, url: str
) -> None:
    kafkalog("topics", "alter", url, "t", "--config", "min.compaction.lag.ms=3600000")
    upkeep.roll_active(ObjectLog(url), now_ms=0)
    partitions = kafkalog("status", url, "--json").json[1:]
    assert sorted(row["state"] for row in partitions) == ["clean", "not due"]
    explained = kafkalog("explain", url, "t", "--json").json
    (waiting,) = (row for row in explained if row["findings"][0]["code"] == "lag")
    assert waiting["answer"] == "is not due" and not waiting["due"]
    assert waiting["findings"][0]["untilMs"] is not None
    assert [each["code"] for each in waiting["findings"]] == ["lag", "cleaner unknown"]


def test_verify_compares_the_objects_with_the_log(kafkalog: Command, url: str) -> None:
    checked = kafkalog("verify", url, "t", "--deep")
    assert (checked.status, checked.lines) == (0, [])
    log = ObjectLog(url)
    (name,) = log.store_state().objects
    log.client.delete([name])
    checked = kafkalog("verify", url, "--json")
    assert checked.status == 1
    (row,) = checked.json
    assert (row["kind"], row["path"]) == ("damage", f"{url}/{name}")


def test_erase_reports_objects_as_it_does_files(
    kafkalog: Command, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    kafkalog("topics", "create", tmp_path / "log", "t", "--partitions", 2)
    kafkalog("append", tmp_path / "log", "t", stdin=RECORDS)
    found = kafkalog("erase", url, "t", "--key", "a", "--dry-run")
    assert (found.status, [*tmp_path.glob("*.json")]) == (1, [])
    assert found.lines[-2].startswith("as of    commit 2 (t-0 to offset ")
    first = kafkalog("erase", url, "t", "--key", "a", "--no-wait", "--json")
    assert first.status == 1
    (report,) = first.json
    assert any("file.delete.delay.ms (1 hour)" in one["what"] for one in report["after"]["left"])
    assert report["deletionsLeft"][0]["nextOffset"] == 3
    done, local = (
        kafkalog("erase", path, "t", "--key", "a", "--now", "--json")
        for path in (url, tmp_path / "log")
    )
    assert (done.status, local.status) == (0, 0)
    ((ours,), (directorys,)) = done.json, local.json
    assert ours.keys() == directorys.keys() and ours["after"].keys() == directorys["after"].keys()
    assert (ours["path"], ours["erased"], ours["after"]["left"]) == (url, True, [])
    assert any("versions" in each for each in ours["notLookedAt"])
    assert kafkalog("read", url, "t", "--key", "b").lines
    assert len([*tmp_path.glob("kafkalog-erase-t-*.json")]) == 3
