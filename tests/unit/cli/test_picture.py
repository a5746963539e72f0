"""The picture: its figures are those of `status --json`, and it goes to nobody but this machine."""

from __future__ import annotations

import html.parser
import http.client
import json
import math
import re
import shlex
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import kafkalog as library
from kafkalog.cli.picture.counts import Counts
from kafkalog.cli.picture.figures import figures
from kafkalog.cli.picture.page import page
from kafkalog.cli.picture.server import HOST, Served, serving
from kafkalog.errors import InvalidInputError
from kafkalog.log import KafkaLog
from kafkalog.storage_engine.fs import clock, file_system, locks
from kafkalog.storage_engine.fs.file_system import FileSystem, Place
from kafkalog.storage_engine.place import directory_log_of
from tests.builders.log_builder import LogBuilder
from tests.unit.cli.conftest import Command

NOW_MS = 1_700_000_000_000


@pytest.fixture
def log(tmp_path: Path) -> Iterator[KafkaLog]:
    shop = LogBuilder(tmp_path / "shop", now_ms=NOW_MS)
    shop.topic("audit", policy="delete", segment_bytes=50).append_each(("a", "1"), ("a", "2"))
    shop.topic("stock", 2, segment_bytes=100)
    for value in range(4):
        rows = [(f"k{key}", f"{value}") for key in range(10)]
        shop.append(*rows, ("gone", None), now_ms=NOW_MS + value)
        if value == 1:
            shop.clean(now_ms=NOW_MS + value)
    with shop as opened:
        yield opened


def shown(log: KafkaLog, counts: Counts | None = None) -> dict[str, Any]:
    return figures(str(log.root), directory_log_of(log), counts or Counts(), clock.now_ms())


def embedded(content: bytes) -> dict[str, Any]:
    found = re.search(rb'<script id="figures" type="application/json">(.*?)</script>', content)
    assert found is not None
    result: dict[str, Any] = json.loads(found[1])
    return result


def test_the_numbers_are_those_of_status(log: KafkaLog, kafkalog: Command) -> None:
    told = [json.loads(line) for line in kafkalog("status", log.root, "--json").out.splitlines()]
    assert shown(log)["status"] == told


def test_segments_are_those_on_disk_and_add_up_to_the_partitions_bytes(log: KafkaLog) -> None:
    found = shown(log)
    bytes_of = {
        (row["topic"], row["partition"]): row
        for row in found["status"]
        if row["type"] == "partition"
    }
    for one in found["partitions"]:
        row = bytes_of[one["topic"], one["partition"]]
        sums = {"clean": 0, "cleanable": 0, "uncleanable": 0, "active": 0, "closed": 0}
        for segment in one["segments"]:
            sums[segment["state"]] += segment["bytes"]
        assert sum(sums.values()) == row["bytes"]
        if one["topic"] == "stock":
            assert sums["clean"] == row["cleanBytes"]
            assert sums["cleanable"] == row["dirtyBytes"]
            assert sums["active"] + sums["uncleanable"] == row["uncleanableBytes"]
            assert sums["clean"] and sums["cleanable"]
        else:
            assert sums["closed"] and not sums["cleanable"]  # no cleaning ever takes it


def test_what_is_dead_is_counted_of_compacted_topics(log: KafkaLog) -> None:
    counts = Counts()
    counts.count(directory_log_of(log))
    found = shown(log, counts)
    for one in found["partitions"]:
        obsolete = [segment["obsoleteRecords"] for segment in one["segments"]]
        if one["topic"] == "audit":
            assert set(obsolete) == {None}
    records = [
        (segment["records"], segment["obsoleteRecords"], segment["tombstones"])
        for one in found["partitions"]
        if one["topic"] == "stock"
        for segment in one["segments"]
    ]
    # 44 were appended and 11 cleaned away; the latest of each key are no more than 11.
    assert tuple(map(sum, zip(*records, strict=True))) == (33, 22, 3)


def test_a_partition_is_counted_again_when_it_has_changed_and_rested(log: KafkaLog) -> None:
    counts = Counts()
    counts.count(directory_log_of(log))
    before = counts.of("stock", 0)
    counts.count(directory_log_of(log))
    assert counts.of("stock", 0) is before
    log.append("stock", [(f"k{key}", "9") for key in range(10)])
    for known in counts._counted.values():
        known.due = math.inf
    counts.count(directory_log_of(log))
    assert counts.of("stock", 0) is before  # it rests
    for known in counts._counted.values():
        known.due = 0
    counts.count(directory_log_of(log))
    assert sum(one.obsolete_records for one in counts.of("stock", 0).values()) > sum(
        one.obsolete_records for one in before.values()
    )
    log.delete_topic("stock")
    counts.count(directory_log_of(log))
    assert counts.of("stock", 0) == {}


def test_cleanings_are_told_latest_first_with_bytes_before_and_after(log: KafkaLog) -> None:
    log.clean("stock", force=True)
    (one, _) = [row for row in shown(log)["partitions"] if row["topic"] == "stock"]
    first, second = one["cleanings"]
    assert first["endedMs"] > second["endedMs"]
    assert 0 < first["bytesWritten"] < first["bytesRead"]


def test_a_running_cleaning_is_reported_with_its_bytes_written(log: KafkaLog) -> None:
    directory = directory_log_of(log).partition_directory("stock", 0)
    (directory / f"{0:020}.log.cleaned").write_bytes(b"x" * 77)
    with locks.FileLock(directory / "kl-cleaner.lock").exclusive():
        one = next(row for row in shown(log)["partitions"] if row["topic"] == "stock")
    assert one["cleanedBytes"] == 77
    assert "cleaning" in [finding["code"] for finding in one["explanation"]["findings"]]


def test_an_unreadable_partition_is_reported_and_stops_nothing(log: KafkaLog) -> None:
    for path in directory_log_of(log).partition_directory("stock", 1).glob("*.log"):
        path.unlink()
    found = shown(log)
    assert len(found["partitions"]) == 3
    reasons = [row["reason"] for row in found["status"] if row["type"] == "partition"]
    assert any(text and text.endswith("is missing; committed records are lost") for text in reasons)


def test_the_root_is_listed_as_often_however_many_partitions_there_are(log: KafkaLog) -> None:
    listed: list[str] = []

    class Watched(FileSystem):
        def scandir(self, directory: Place) -> Any:
            listed.append(str(directory))
            return super().scandir(directory)

    with file_system.replaced(Watched()):
        shown(log)
        few = listed.count(str(log.root))
        log.create_topic("more", 20)
        listed.clear()
        shown(log)
    assert (listed.count(str(log.root)), few > 0) == (few, True)
    assert (
        listed.count(str(directory_log_of(log).partition_directory("more", 0))) == 1
    )  # for one plan


# --- the page ------------------------------------------------------------------------------------


class _Addresses(html.parser.HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found += [value or "" for name, value in attrs if name in ("src", "href", "action")]


def test_the_page_needs_nothing_else(log: KafkaLog, tmp_path: Path, kafkalog: Command) -> None:
    file = tmp_path / "shop.html"
    done = kafkalog("status", log.root, "--html", file)
    assert (done.status, done.out) == (0, "")
    content = file.read_bytes()
    parser = _Addresses()
    parser.feed(content.decode())
    assert parser.found == ["data:,"]
    assert b"url(" not in content and b"@import" not in content
    assert embedded(content)["partitions"][-1]["segments"][0]["records"] is not None


def test_nothing_is_read_where_nothing_is_to_be_counted(
    log: KafkaLog, tmp_path: Path, kafkalog: Command
) -> None:
    file = tmp_path / "shop.html"
    kafkalog("status", log.root, "stock", "--html", file, "--no-count")
    found = embedded(file.read_bytes())
    assert {one["topic"] for one in found["partitions"]} == {"stock"}
    assert {s["records"] for one in found["partitions"] for s in one["segments"]} == {None}


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--html", "FILE", "--json"], "--html writes a page and --json prints: give one of them"),
        (["--html", "FILE", "--checkpoint", "c"], "--html writes a page and --checkpoint prints"),
        (["--no-count"], "--no-count is about the picture: it goes with --html FILE"),
        (["--count", "--json"], "--count is about the picture"),
    ],
)
def test_options_of_which_one_would_be_ignored_are_refused_in_one_line(
    log: KafkaLog, tmp_path: Path, kafkalog: Command, options: list[str], reason: str
) -> None:
    file = tmp_path / "shop.html"
    given = [str(file) if option == "FILE" else option for option in options]
    result = kafkalog("status", log.root, *given)
    assert (result.status, result.out, result.err.count("\n")) == (2, "", 1)
    assert reason in result.err
    assert not file.exists()


def test_a_page_that_is_there_is_written_anew(
    log: KafkaLog, tmp_path: Path, kafkalog: Command
) -> None:
    file = tmp_path / "shop.html"
    file.write_text("old" * 100_000)
    assert kafkalog("status", log.root, "--html", file, "--no-count").status == 0
    assert embedded(file.read_bytes())["path"] == str(log.root)
    assert b"oldold" not in file.read_bytes()


@pytest.mark.slow
def test_a_disk_that_refuses_the_page_leaves_the_one_that_was_there(
    log: KafkaLog, tmp_path: Path
) -> None:
    file = tmp_path / "shop.html"
    file.write_text("old")
    command = [sys.executable, "-m", "kafkalog", "status", log.root, "--no-count", "--html"]
    line = f"ulimit -f 4; exec {shlex.join(map(str, [*command, file]))}"
    result = subprocess.run(["sh", "-c", line], check=False, capture_output=True, text=True)
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr == f"kafkalog: {file}: File too large\n"
    assert file.read_text() == "old"
    assert {path.name for path in tmp_path.iterdir()} == {"shop", "shop.html"}


def test_a_page_may_go_into_what_is_not_a_file(log: KafkaLog, kafkalog: Command) -> None:
    result = kafkalog("status", log.root, "--no-count", "--html", "/dev/full")
    assert (result.status, result.err) == (1, "kafkalog: /dev/full: No space left on device\n")
    assert Path("/dev/full").is_char_device()


@pytest.mark.parametrize("place", ["{root}/commit", "{root}/stock-0/p.html", "{link}/p.html"])
def test_no_page_is_written_into_the_log(
    log: KafkaLog, tmp_path: Path, kafkalog: Command, place: str
) -> None:
    (tmp_path / "link").symlink_to(log.root)
    file = Path(place.format(root=log.root, link=tmp_path / "link"))
    journal = (log.root / "commit").read_bytes()
    result = kafkalog("status", log.root, "--html", file)
    reason = "a picture does not belong in the log; name another place with --html FILE"
    assert (result.status, result.out, result.err) == (2, "", f"kafkalog: {file}: {reason}\n")
    assert (log.root / "commit").read_bytes() == journal
    assert file.exists() == (file.name == "commit")


def test_no_text_of_a_log_can_end_the_script(log: KafkaLog) -> None:
    found = shown(log)
    found["path"] = "</script><script>alert(1)</script><!--"
    content = page(found, is_live=False)
    assert content.count(b"</script>") == 2
    assert embedded(content)["path"] == found["path"]


# --- the server ----------------------------------------------------------------------------------


def asked(served: Served, path: str, method: str = "GET", **headers: str) -> tuple[int, bytes]:
    with_token = f"{path}{'&' if '?' in path else '?'}token={served.token}"
    return asked_plainly(served, with_token, method, **headers)


def asked_plainly(
    served: Served, path: str, method: str = "GET", **headers: str
) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection(HOST, served.port, timeout=120)
    try:
        connection.request(method, path, headers=headers)
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def test_the_server_gives_the_page_and_its_figures(log: KafkaLog) -> None:
    with serving(str(log.root), directory_log_of(log), 0, counts_obsolete=False) as served:
        status, content = asked(served, "/")
        assert status == 200
        assert embedded(content)["status"] == shown(log)["status"]
        log.append("audit", [("a", "3")])
        status, content = asked(served, "/figures.json")
        assert (status, json.loads(content)["status"]) == (200, shown(log)["status"])
        assert asked(served, "/etc/passwd")[0] == 404
        assert asked(served, "/", "POST")[0] == 501


def test_the_server_gives_pages_of_records(log: KafkaLog) -> None:
    log.create_topic("many", config={"cleanup.policy": "delete"})
    log.append("many", [(f"k{n % 7}", f"{n}", [("by", b"ann")]) for n in range(60)])
    log.append("many", [("bytes", b"\xff"), ("gone", None), ("long", "x" * 1000)])

    def page(**query: object) -> dict[str, Any]:
        text = "&".join(f"{name}={value}" for name, value in {"topic": "many", **query}.items())
        status, content = asked(served, f"/records.json?{text}")
        assert status == 200, content
        found: dict[str, Any] = json.loads(content)
        return found

    with serving(str(log.root), directory_log_of(log), 0, counts_obsolete=False) as served:
        last = page(partition=0)
        assert (last["start"], last["next"], last["endOffset"]) == (38, None, 63)
        first = page(partition=0, start=0)
        assert [row["offset"] for row in first["records"]] == list(range(25))
        assert (first["next"], first["records"][3]["headers"]) == (25, [["by", "ann"]])
        assert page(partition=0, start=25)["records"][0]["value"] == "25"
        assert page(partition=0, start=-5)["start"] == 0
        told = [(row["key"], row["value"]) for row in last["records"][-3:]]
        assert told == [("bytes", "0xff"), ("gone", None), ("long", "x" * 500 + "…")]
        latest = page(partition=0, latest=1)
        keys = [row["key"] for row in latest["records"]]
        assert sorted(keys) == ["bytes", *(f"k{n}" for n in range(7)), "long"]
        assert asked(served, "/records.json?topic=many")[0] == 400
        assert asked(served, "/records.json?topic=many&partition=7")[0] == 400
        assert asked(served, "/records.json?topic=none&partition=0")[0] in (400, 503)
        assert asked(served, "/records.json?topic=many&partition=0&start=x")[0] == 400


def test_who_calls_by_another_name_gets_no_answer(log: KafkaLog) -> None:
    with serving(str(log.root), directory_log_of(log), 0, counts_obsolete=False) as served:
        for name in ("evil.example", f"evil.example:{served.port}", "127.0.0.1.evil.example"):
            status, content = asked(served, "/figures.json", Host=name)
            assert (status, b"stock" in content) == (403, False)
        assert asked(served, "/", Host=f"localhost:{served.port}")[0] == 200


@pytest.mark.parametrize("path", ["/", "/figures.json", "/records.json?topic=stock&partition=0"])
@pytest.mark.parametrize("method", ["GET", "HEAD"])
def test_who_has_not_the_token_of_the_printed_address_gets_nothing(
    path: str, method: str, log: KafkaLog
) -> None:
    with serving(str(log.root), directory_log_of(log), 0, counts_obsolete=False) as served:
        name, sign = f"kafkalog-{served.port}", "&" if "?" in path else "?"
        wrong = ["", "token=", "token=x", f"token={served.token[:-1]}", f"token={served.token}x"]
        for query in [*wrong, f"token={served.token}&token=x", "token=%ff"]:
            for cookie in ("", f"{name}=x", "kafkalog-1=" + served.token, f"{name}", "=;;=\x7f"):
                status, content = asked_plainly(
                    served, f"{path}{sign}{query}", method, Cookie=cookie
                )
                assert (status, b"stock" in content) == (403, False)
        assert asked_plainly(served, path, method, Cookie=f"{name}={served.token}")[0] == 200
        assert asked(served, path, method)[0] == 200


def test_each_server_has_a_token_of_its_own_and_the_page_gives_it_to_the_browser(
    log: KafkaLog,
) -> None:
    with (
        serving(str(log.root), directory_log_of(log), 0, counts_obsolete=False) as one,
        serving(str(log.root), directory_log_of(log), 0, counts_obsolete=False) as other,
    ):
        assert len(one.token) >= 20 and one.token != other.token
        assert asked_plainly(one, f"/?token={other.token}")[0] == 403
        jar = urllib.request.build_opener(urllib.request.HTTPCookieProcessor())
        assert jar.open(one.address).status == 200
        assert jar.open(f"http://{HOST}:{one.port}/figures.json").status == 200


def test_a_port_that_is_taken_is_wrong_usage(log: KafkaLog) -> None:
    with (
        serving(str(log.root), directory_log_of(log), 0, counts_obsolete=False) as served,
        pytest.raises(InvalidInputError, match=f"port {served.port} of 127.0.0.1: .*try another"),
        serving(str(log.root), directory_log_of(log), served.port, counts_obsolete=False),
    ):
        pass


def test_a_log_that_cannot_be_read_is_not_served(tmp_path: Path, kafkalog: Command) -> None:
    library.open(tmp_path / "shop").close()
    (tmp_path / "shop" / "commit").write_bytes(b"x" * 600)
    result = kafkalog("ui", tmp_path / "shop", "--port", "0")
    assert (result.status, result.out, result.err.count("\n")) == (1, "", 1)
    assert str(tmp_path / "shop" / "commit") in result.err


def test_the_server_counts_in_the_background(log: KafkaLog) -> None:
    with serving(str(log.root), directory_log_of(log), 0, counts_obsolete=True) as served:
        for _ in range(600):
            found = json.loads(asked(served, "/figures.json")[1])
            if all(
                segment["records"] is not None
                for one in found["partitions"]
                if one["topic"] == "stock"
                for segment in one["segments"]
            ):
                return
    raise AssertionError("nothing was counted")
