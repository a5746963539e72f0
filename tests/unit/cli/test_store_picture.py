"""The picture of a log in an object store: the page of a directory's, with objects and costs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import kafkalog as library
from kafkalog.cleaner.objects import upkeep
from kafkalog.cli.picture.counts import Counts
from kafkalog.cli.picture.figures import figures
from kafkalog.cli.picture.server import serving
from kafkalog.storage_engine.object_store.object_log import ObjectLog
from kafkalog.storage_engine.object_store.regroup import fresh_objects, regroup
from tests.unit.cli.conftest import Command
from tests.unit.cli.test_picture import asked, embedded
from tests.unit.storage_engine.store_log import memory_address

NOW_MS = 1_700_000_000_000
LAG_MS = 3_600_000


def write(log: library.KafkaLog, value: int) -> None:
    log.append("stock", [(f"k{key}", f"{value}") for key in range(20)])
    log.append("audit", [("a", f"{value}")])


@pytest.fixture
def url() -> str:
    """A log with clean, regrouped and fresh records, in that order."""
    url = str(memory_address())
    with library.open(url) as log:
        log.create_topic("audit", config={"cleanup.policy": "delete"})
        log.create_topic("stock", 2)
        for value in range(2):
            write(log, value)
            log.clean(force=True)
        write(log, 2)
    return url


def shown(url: str, now_ms: int = NOW_MS) -> dict[str, Any]:
    return figures(url, ObjectLog(url, read_only=True), Counts(), now_ms)


def test_the_numbers_are_those_of_status_but_for_the_requests(url: str, kafkalog: Command) -> None:
    told = kafkalog("status", url, "--json").json
    found = shown(url)["status"]
    for log, *_ in (told, found):
        assert log.pop("requests")["GET"] > 0 and log.pop("requestsPrice") > 0
        assert log.pop("regroupReason") and log.pop("regroupFigures")
    assert found == told


def test_runs_in_objects_add_up_to_the_partitions_bytes(url: str) -> None:
    found = shown(url)
    rows = {
        (row["topic"], row["partition"]): row
        for row in found["status"]
        if row["type"] == "partition"
    }
    assert len(found["partitions"]) == len(rows) == 3
    for one in found["partitions"]:
        row = rows[one["topic"], one["partition"]]
        assert sum(run["bytes"] for run in one["segments"]) == row["bytes"]
        assert one["segments"][-1]["nextOffset"] == row["highWatermark"]
        states = [run["state"] for run in one["segments"]]
        kept = "active" if one["topic"] == "audit" else "clean"
        assert (set(states[:-1]), states[-1]) == ({kept}, "fresh")
        names = [run["object"] for run in one["segments"]]
        assert names[-1].endswith(".mixed") and all(n.startswith("segments/") for n in names[:-1])


def test_a_run_that_a_lag_holds_back_is_uncleanable_until_it_is_old_enough(url: str) -> None:
    with library.open(url) as log:
        log.alter_topic("stock", config={"min.compaction.lag.ms": str(LAG_MS)})
    stored = ObjectLog(url)
    upkeep.roll_active(stored, now_ms=NOW_MS)
    regroup(stored, fresh_objects(stored.store_state()), now_ms=NOW_MS)
    state = stored.store_state()
    newest_ms = max(run.max_timestamp for each in state.objects.values() for run in each.extents)

    def words(now_ms: int) -> list[str]:
        (one, _) = [row for row in shown(url, now_ms)["partitions"] if row["topic"] == "stock"]
        return [run["state"] for run in one["segments"]]

    assert words(newest_ms)[-1] == "uncleanable"
    assert words(newest_ms + LAG_MS + 1)[-1] == "cleanable"


def test_the_last_cleaning_is_told_as_that_of_a_directory(url: str) -> None:
    (one, _) = [row for row in shown(url)["partitions"] if row["topic"] == "stock"]
    (last,) = one["cleanings"]
    assert last["recordsRead"] == 2 * last["recordsKept"] > 0
    assert last["endOffset"] == one["segments"][-1]["baseOffset"]


def test_the_page_costs_one_request_while_nothing_changes(url: str) -> None:
    log = ObjectLog(url, read_only=True)
    before = dict(log.client.counts)
    figures(url, log, Counts(), NOW_MS)
    assert {kind: count - before[kind] for kind, count in log.client.counts.items()} == {
        "GET": 1
    } | {kind: 0 for kind in before if kind != "GET"}


def test_the_server_gives_pages_of_records_of_an_object_store(url: str) -> None:
    with serving(url, ObjectLog(url, read_only=True), 0, counts_obsolete=False) as served:
        assert embedded(asked(served, "/")[1])["path"] == url
        page = json.loads(asked(served, "/records.json?topic=audit&partition=0")[1])
        assert [row["value"] for row in page["records"]] == ["0", "1", "2"]
        query = "/records.json?topic=stock&partition=1&latest=1"
        page = json.loads(asked(served, query)[1])
        assert {row["value"] for row in page["records"]} == {"2"}
        assert asked(served, "/records.json?topic=audit&partition=4")[0] == 400


def test_the_page_of_an_object_store_is_written_as_a_file(
    url: str, tmp_path: Path, kafkalog: Command
) -> None:
    file = tmp_path / "shop.html"
    done = kafkalog("status", url, "audit", "--html", file)
    assert (done.status, done.out) == (0, "")
    assert [one["topic"] for one in embedded(file.read_bytes())["partitions"]] == ["audit"]


@pytest.mark.parametrize("line", [("ui",), ("status", "--html", "FILE")], ids=["ui", "status"])
def test_nothing_dead_is_counted_in_an_object_store(
    url: str, tmp_path: Path, kafkalog: Command, line: tuple[str, ...]
) -> None:
    verb, *options = line
    given = [str(tmp_path / "shop.html") if option == "FILE" else option for option in options]
    refused = kafkalog(verb, url, *given, "--count")
    assert (refused.status, refused.out, refused.err.count("\n")) == (2, "", 1)
    assert (
        "--count reads the whole log (expected a directory, found an object store)" in refused.err
    )
