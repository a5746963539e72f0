"""The picture in a browser: what it shows, and that eyes, keyboards and phones can read it."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from kafkalog.cleaner.state.notes import DirectoryNotes
from kafkalog.cleaner.state.uncleanable import mark_uncleanable
from kafkalog.cli.picture.counts import Counts
from kafkalog.cli.picture.figures import figures
from kafkalog.cli.picture.page import page as make_page
from kafkalog.cli.picture.server import HOST, Served, serving
from kafkalog.errors import KafkaLogError
from kafkalog.log import KafkaLog
from kafkalog.storage_engine.format import layout
from kafkalog.storage_engine.fs import locks
from kafkalog.storage_engine.log.log import Log
from kafkalog.storage_engine.object_store.address import is_store_url
from kafkalog.storage_engine.place import directory_log_of
from tests.builders.log_builder import LogBuilder
from tests.unit.cli.conftest import Command
from tests.unit.storage_engine.store_log import new_object_log

pytestmark = pytest.mark.slow
NOW_MS = 1_700_000_000_000
FIELDS = ("state", "bytes", "logStartOffset", "firstDirtyOffset", "highWatermark", "dirtyRatio")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    program = shutil.which("chromium") or shutil.which("google-chrome")
    if program is None:
        reason = "no Chromium: install `chromium`"
        pytest.fail(reason) if os.environ.get("CI") else pytest.skip(reason)
    from playwright.sync_api import sync_playwright

    with sync_playwright() as started:
        # As root it has no sandbox; the pages are our own.
        found = started.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield found
        found.close()


Open = Callable[..., Any]


@pytest.fixture
def log(tmp_path: Path) -> Iterator[KafkaLog]:
    shop = LogBuilder(tmp_path / "shop", now_ms=NOW_MS).topic("nothing-yet")
    shop.topic("audit", policy="delete", segment_bytes=50).append_each(("a", "1"), ("a", "2"))
    shop.topic("stock", 2, segment_bytes=200)
    for value in range(6):
        rows = [(f"k{key}", f"{value}") for key in range(10)]
        shop.append(*rows, ("gone", None), now_ms=NOW_MS + value)
        if value == 3:
            shop.clean(now_ms=NOW_MS + value)
    with shop as opened:
        yield opened


@pytest.fixture
def opened(browser: Any, log: KafkaLog) -> Iterator[Open]:
    """Open the served page; nothing may go wrong in it, and nothing may be asked of others."""
    faults: list[str] = []
    contexts: list[Any] = []
    servers: list[AbstractContextManager[Served]] = []

    def open_page(path: str = "", stored: Log | None = None, **settings: Any) -> Any:
        if stored is None:
            path, stored = str(log.root), directory_log_of(log)
        server = serving(path, stored, 0, counts_obsolete=not is_store_url(path))
        served = server.__enter__()
        servers.append(server)
        context = browser.new_context(**settings)
        contexts.append(context)
        page = context.new_page()
        page.on("pageerror", lambda fault: faults.append(str(fault)))
        page.on("console", lambda line: faults.append(line.text) if is_fault(line) else None)
        home = f"http://{HOST}:{served.port}/"
        page.on(
            "request",
            lambda asked: (
                None if asked.url.startswith((home, "data:")) else faults.append(asked.url)
            ),
        )
        page.goto(served.address)
        return page

    yield open_page
    for context in contexts:
        context.close()
    for server in servers:
        server.__exit__(None, None, None)
    assert faults == []


def is_fault(line: Any) -> bool:
    """That a log, or the server, has gone is no fault of the page."""
    gone = ("503 (Service Unavailable)", "net::ERR_CONNECTION_REFUSED")
    return line.type == "error" and not any(text in line.text for text in gone)


def told(page: Any, partition: str) -> str:
    # Not `inner_text`, here and where a state is picked: a card that has come just now has none
    # before it is drawn, with the next frame.
    text: str = page.locator(f'[data-partition="{partition}"] .told').first.text_content()
    return text


def test_its_numbers_are_those_of_status(opened: Open, log: KafkaLog, kafkalog: Command) -> None:
    page = opened()
    rows = [json.loads(line) for line in kafkalog("status", log.root, "--json").out.splitlines()]
    partitions = [row for row in rows if row["type"] == "partition"]
    assert page.locator("article").count() == len(partitions) == 4
    for row in partitions:
        article = page.locator(f'[data-partition="{row["topic"]}-{row["partition"]}"]')
        for field in FIELDS:
            shown = article.locator(f'[data-field="{field}"]')
            if field == "dirtyRatio" and row["state"] == "not compacted":
                assert shown.count() == 0
                continue
            value = shown.get_attribute("data-value")
            assert value == str(row[field]) or float(value) == row[field], (row, field)
        widths = article.locator(".segment").evaluate_all(
            "all => all.map(one => Number(one.style.getPropertyValue('--size')))"
        )
        assert sum(widths) == row["bytes"]


def until(page: Any, wanted: str) -> None:
    """Press Tab until the focused element has what is wanted."""
    for _ in range(30):
        page.keyboard.press("Tab")
        if page.evaluate(f"!!document.activeElement.{wanted}"):
            return
    raise AssertionError(wanted)


def test_records_are_shown_a_page_at_a_time_by_keyboard_on_a_phone(
    opened: Open, log: KafkaLog
) -> None:
    log.append("audit", [(f"a{n % 9}", f"value {n}") for n in range(60)])
    page = opened(viewport={"width": 400, "height": 900})
    page.locator("#filter").fill("audit")
    until(page, "matches('[data-partition=audit-0] [data-part=records] summary')")
    page.keyboard.press("Enter")
    part = page.locator('[data-partition="audit-0"] [data-part="records"]')
    line = part.locator(".told")
    page.wait_for_selector('[data-partition="audit-0"] tbody tr >> text=value 59')
    assert line.inner_text() == "25 records, offsets 37 to 61; the partition has 0 to 61"
    for key, told in (("first", "offsets 0 to 24"), ("later", "offsets 25 to 49")):
        until(page, f"matches('[data-act={key}]')")
        page.keyboard.press("Enter")
        page.wait_for_selector(f'[data-part="records"] .told >> text={told}')
    log.append("audit", [("a0", "new")])
    page.wait_for_selector(
        '[data-partition="audit-0"] [data-field="highWatermark"][data-value="63"]'
    )
    assert page.evaluate("document.activeElement.dataset.act") == "later"  # the page goes on
    until(page, "matches('[type=number]')")
    page.keyboard.type("60")
    page.keyboard.press("Enter")
    page.wait_for_selector('[data-part="records"] .told >> text=offsets 60 to 62')
    until(page, "matches('[data-act=latest]')")
    page.keyboard.press("Space")
    page.wait_for_selector('[data-part="records"] .told >> text=10 records')
    assert page.evaluate("document.documentElement.scrollWidth") <= 400


def test_advice_is_told_once_for_the_log_and_its_commands_can_be_copied(opened: Open) -> None:
    page = opened()
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    advice = page.locator("#advice li")
    assert advice.count() == 1
    assert advice.inner_text().startswith("No background cleaner runs on this log")
    assert page.locator("article >> text=No background cleaner").count() == 0
    command = page.locator("#advice code").inner_text()
    font = page.locator("#advice code").evaluate("one => getComputedStyle(one).fontFamily")
    assert (command.startswith("kafkalog cleaner /"), "monospace" in font) == (True, True)
    page.locator("#advice button").click()
    page.wait_for_selector("#advice button >> text=copied")
    assert page.evaluate("navigator.clipboard.readText()") == command
    assert page.locator("article code").count() > 0


def test_a_keyboard_is_enough(opened: Open) -> None:
    page = opened()
    until(page, "matches('#filter')")
    page.keyboard.type("STO")
    assert page.locator("article").evaluate_all("all => all.map(one => one.dataset.topic)") == [
        "stock",
        "stock",
    ]
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.id") == "state"
    until(page, "dataset.base")
    first = page.evaluate("document.activeElement.dataset.base")
    page.keyboard.press("End")
    last = page.evaluate("document.activeElement.dataset.base")
    assert int(first) < int(last)
    assert told(page, "stock-0").startswith("active segment")
    page.keyboard.press("ArrowLeft")
    assert f"offsets {page.evaluate('document.activeElement.dataset.base')} to " in told(
        page, "stock-0"
    )
    assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") != "none"
    until(page, "matches('summary')")
    assert page.evaluate("document.activeElement.textContent") == "Its last cleaning"
    page.keyboard.press("Enter")
    assert (
        page.locator('[data-partition="stock-0"] [data-part="history"]').get_attribute("open") == ""
    )


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [400, 1280])
def test_it_can_be_read_at_any_width_by_day_and_by_night(
    opened: Open, scheme: str, width: int
) -> None:
    page = opened(color_scheme=scheme, viewport={"width": width, "height": 900})
    for summary in page.locator("summary").all():
        summary.click()
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    background = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (luminance(background) < 0.2) == (scheme == "dark")
    low = page.evaluate(
        """() => [...document.querySelectorAll('h1, h2, h3, p, li, code, td, th, summary, span')]
        .filter(one => one.checkVisibility() && one.textContent.trim() && !one.closest('.segment'))
        .map(one => [one.textContent.slice(0, 40), getComputedStyle(one).color,
                     getComputedStyle(one.closest('article') ?? document.body).backgroundColor])"""
    )
    assert [row for row in low if contrast(row[1], row[2]) < 4.5] == []


def luminance(color: str) -> float:
    """Of `rgb(r, g, b)`, by WCAG."""
    parts = [float(part) / 255 for part in color.strip("rgba()").split(",")[:3]]
    red, green, blue = (
        part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4 for part in parts
    )
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    bright, dark = sorted([luminance(one), luminance(other)], reverse=True)
    return (bright + 0.05) / (dark + 0.05)


def test_it_follows_the_log_and_keeps_what_was_opened_and_focused(
    opened: Open, log: KafkaLog
) -> None:
    page = opened()
    summary = page.locator('[data-partition="stock-0"] [data-part="segments"] summary')
    summary.click()
    summary.focus()
    before = page.locator('[data-partition="audit-0"] [data-field="highWatermark"]')
    assert before.get_attribute("data-value") == "2"
    log.append("stock", [(f"k{key}", "6") for key in range(10)])
    log.append("audit", [("a", "3")])
    page.wait_for_selector(
        '[data-partition="audit-0"] [data-field="highWatermark"][data-value="3"]'
    )
    assert (
        page.locator('[data-partition="stock-0"] [data-part="segments"]').get_attribute("open")
        == ""
    )
    assert page.evaluate("document.activeElement.textContent").endswith("segments as a table")


def test_a_cleaning_at_work_is_seen(opened: Open, log: KafkaLog) -> None:
    page = opened()
    directory = directory_log_of(log).partition_directory("stock", 0)
    (directory / f"{0:020}.log.cleaned").write_bytes(b"x" * 3000)
    with locks.FileLock(directory / layout.CLEANER_LOCK).exclusive():
        busy = page.wait_for_selector('[data-partition="stock-0"] .busy')
        assert busy.inner_text() == "a cleaning is at work: 2.9 KiB written so far"
    (directory / f"{0:020}.log.cleaned").unlink()
    page.wait_for_selector('[data-partition="stock-0"] .busy', state="detached")


def test_obsolete_bytes_come_in_when_they_are_counted(opened: Open) -> None:
    page = opened()
    page.wait_for_selector('[data-partition="stock-0"] >> text=/\\d+ records are obsolete/')
    shares = page.locator('[data-partition="stock-0"] .segment').evaluate_all(
        "all => all.map(one => parseFloat(one.style.getPropertyValue('--obsolete-share')))"
    )
    assert max(shares) > 0


def test_a_log_that_goes_away_is_reported(opened: Open, log: KafkaLog) -> None:
    page = opened()
    aside = log.root.with_name("aside")
    log.root.rename(aside)
    page.wait_for_selector("#fault:not(:empty)")
    assert (
        page.locator("#fault")
        .inner_text()
        .endswith(f"{log.root}/commit: No such file or directory")
    )
    aside.rename(log.root)
    page.wait_for_selector("#fault:empty", state="attached")


def test_a_server_that_has_stopped_is_told_where_it_is_seen(opened: Open, log: KafkaLog) -> None:
    page = opened(viewport={"width": 400, "height": 500})
    page.route("**/figures.json", lambda route: route.abort("connectionrefused"))
    page.evaluate("scrollTo(0, document.body.scrollHeight)")
    fault = page.wait_for_selector("#fault:not(:empty)")
    assert fault.inner_text().endswith("kafkalog ui does not answer; start it again")
    assert 0 <= fault.bounding_box()["y"] < 500


def test_the_partitions_of_a_state_can_be_picked_and_are_counted(
    opened: Open, log: KafkaLog
) -> None:
    mark_uncleanable(
        DirectoryNotes(directory_log_of(log).partition_directory("stock", 1)),
        KafkaLogError("a bad byte"),
        {},
        now_ms=NOW_MS,
    )
    page = opened()
    assert page.locator("#totals").inner_text().startswith("4 partitions, ")
    states = [row.state for row in log.status()]
    for state in sorted(set(states)):
        assert f"{states.count(state)} {state}" in page.locator("#totals").inner_text()
        page.locator("#state").select_option(state)
        shown = page.locator("article [data-field=state]").all_text_contents()
        assert shown == [state] * states.count(state)


def test_a_fault_that_keeps_cleaners_away_and_another_policy_have_colours_of_their_own(
    opened: Open, log: KafkaLog
) -> None:
    mark_uncleanable(
        DirectoryNotes(directory_log_of(log).partition_directory("stock", 1)),
        KafkaLogError("a bad byte"),
        {},
        now_ms=NOW_MS,
    )
    page = opened()
    for partition, kinds in (
        ("stock-0", {"clean", "cleanable", "active"}),
        ("stock-1", {"clean", "uncleanable", "active"}),
        ("audit-0", {"closed", "active"}),
    ):
        found = page.locator(f'[data-partition="{partition}"] .segment').evaluate_all(
            "all => all.map(one => [one.classList[1], getComputedStyle(one).backgroundColor])"
        )
        assert {kind for kind, _ in found} == kinds
        assert len({color for _, color in found}) == len(kinds)
    named = page.locator(".legend i").evaluate_all("all => all.map(one => one.className)")
    assert {"clean", "cleanable", "uncleanable", "active", "closed"} <= set(named)


def test_what_is_selected_and_what_has_not_changed_stays_as_the_log_goes_on(
    opened: Open, log: KafkaLog
) -> None:
    page = opened()
    page.evaluate("for (const one of document.querySelectorAll('article')) one.isOld = true")
    sentence = page.locator('[data-partition="stock-0"] .why li').first
    sentence.click(click_count=3)
    selected = page.evaluate("getSelection().toString()")
    log.append("stock", [("k1", "6"), ("k2", "6"), ("k3", "6")])
    log.append("audit", [("a", "3")])
    page.wait_for_selector(
        '[data-partition="audit-0"] [data-field="highWatermark"][data-value="3"]'
    )
    old = page.evaluate(
        "[...document.querySelectorAll('article')].filter(one => one.isOld)"
        ".map(one => one.dataset.partition)"
    )
    assert {"stock-0", "nothing-yet-0"} <= set(old) and "audit-0" not in old
    assert page.evaluate("getSelection().toString()") == selected != ""
    page.evaluate("getSelection().removeAllRanges()")
    end = dict(log.offsets("stock"))[0][1]
    page.wait_for_selector(
        f'[data-partition="stock-0"] [data-field="highWatermark"][data-value="{end}"]'
    )


def test_a_thousand_segments_fit_a_phone(browser: Any, log: KafkaLog) -> None:
    found = figures(str(log.root), directory_log_of(log), Counts(), NOW_MS)
    (one,) = [part for part in found["partitions"] if part["topic"] == "audit"]
    shown = one["segments"][0]
    one["segments"] = [{**shown, "baseOffset": place, "bytes": 1} for place in range(1000)]
    page = browser.new_page(viewport={"width": 400, "height": 900})
    page.set_content(make_page(found, is_live=False).decode())
    bar = page.locator('[data-partition="audit-0"] .bar').bounding_box()
    last = page.locator('[data-partition="audit-0"] .segment').last.bounding_box()
    assert last["x"] + last["width"] <= bar["x"] + bar["width"] + 0.5
    assert last["width"] > 0
    page.close()


def test_the_file_shows_the_same(
    browser: Any, log: KafkaLog, tmp_path: Path, kafkalog: Command
) -> None:
    file = tmp_path / "shop.html"
    kafkalog("status", log.root, "--html", file)
    page = browser.new_page()
    page.goto(file.as_uri())
    assert page.locator("article").count() == 4
    assert page.locator("#foot").inner_text().startswith("Made at ")
    # A file has no records: it names the command that shows them.
    assert page.locator("[data-part=records]").count() == 0
    assert page.locator("#foot code").inner_text() == f"kafkalog ui {log.root}"
    page.close()


def test_an_object_store_shows_its_objects_costs_and_records_on_a_phone(opened: Open) -> None:
    stored = new_object_log()
    stored.create_topic("stock")
    for value in range(3):
        stored.append("stock", [(f"k{key}", f"{value}") for key in range(9)])
    page = opened(stored.root, stored, viewport={"width": 400, "height": 900})
    assert "3 fresh objects" in page.locator("#log").inner_text()
    costs = page.locator("#costs").inner_text()
    assert "one read of everything: 3 GETs" in costs and "regroup not due: " in costs
    classes = page.locator(".segment").evaluate_all("all => all.map(one => one.classList[1])")
    assert classes == ["fresh"] * 3
    assert page.locator(".legend i.fresh").is_visible()
    assert not page.locator(".legend i.active").is_visible()
    until(page, "dataset.base")
    page.keyboard.press("End")
    assert told(page, "stock-0").startswith("fresh object, offsets 18 to 26")
    assert told(page, "stock-0").endswith(".mixed")
    until(page, "matches('[data-part=records] summary')")
    page.keyboard.press("Enter")
    page.wait_for_selector('[data-part="records"] .told >> text=offsets 2 to 26')
    stored.append("stock", [("k0", "new")])
    page.wait_for_selector('[data-field="highWatermark"][data-value="28"]')
    assert page.evaluate("document.documentElement.scrollWidth") <= 400
