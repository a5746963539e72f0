"""Compaction, step by step, with a picture of the log after each step.

`python -m examples.compaction [--path DIR] [--pictures DIR]`

The prices of forty products change again and again, some products disappear, and the cleaner keeps
up. After each step the page of `kafkalog status PATH --html FILE` shows the segments to scale, with
their obsolete shares hatched. Open the files in a browser in their order; docs/compaction.md
explains them. With `--pictures`, Chromium makes a screenshot of each, as docs/pictures has them.
"""

from __future__ import annotations

import argparse
import random
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import kafkalog
from kafkalog.cli import run as run_command
from kafkalog.log import KafkaLog

__all__ = ["steps"]

TOPIC: Final = "prices"
PRODUCTS: Final = 40
CONFIG: Final = {
    "segment.bytes": "8000",
    "min.cleanable.dirty.ratio": "0.5",
    "delete.retention.ms": "3600000",
}
HOUR_MS: Final = 3_600_000
WIDTH: Final = 900
MARGIN: Final = 12
"""Pixels of a screenshot: in all, and above and below the topics."""
COLOURS: Final = 64
"""Enough for the page, in a third of the bytes."""


def steps(log: KafkaLog, now_ms: int) -> Iterator[str]:
    """Run the steps on a log; yield the name of each step that is done."""
    draw = random.Random(1)
    log.create_topic(TOPIC, config=CONFIG)
    change_prices(log, draw, 900, now_ms)
    yield "written"
    log.clean(TOPIC, now_ms=now_ms)
    yield "cleaned"
    change_prices(log, draw, 160, now_ms)
    yield "dirty-again"
    log.append(TOPIC, [(product(number), None) for number in range(10)], now_ms=now_ms)
    log.clean(TOPIC, force=True, now_ms=now_ms)
    yield "deleted"
    log.clean(TOPIC, force=True, now_ms=now_ms + 2 * HOUR_MS)
    yield "forgotten"


def change_prices(log: KafkaLog, draw: random.Random, count: int, now_ms: int) -> None:
    """Append new prices, a few in each commit."""
    for _ in range(count // 20):
        changes = [
            (product(draw.randrange(PRODUCTS)), f'{{"price": {draw.randrange(100, 999)}}}')
            for _ in range(20)
        ]
        log.append(TOPIC, changes, now_ms=now_ms)


def product(number: int) -> str:
    """Return a product's key."""
    return f"product-{number:03}"


def photograph(page: Path, picture: Path) -> None:
    """Make a screenshot of a page's topics; needs Chromium, playwright and pillow."""
    from PIL import Image
    from playwright.sync_api import sync_playwright

    with sync_playwright() as started:
        program = shutil.which("chromium") or shutil.which("google-chrome")
        browser = started.chromium.launch(executable_path=program, args=["--no-sandbox"])
        shown = browser.new_page(viewport={"width": WIDTH, "height": WIDTH})
        shown.goto(page.absolute().as_uri())
        place = shown.locator("main").bounding_box()
        assert place is not None
        top, height = place["y"] - MARGIN, place["height"] + 2 * MARGIN
        shown.screenshot(path=picture, clip={"x": 0, "y": top, "width": WIDTH, "height": height})
        browser.close()
    with Image.open(picture) as made:
        made.quantize(COLOURS).save(picture, optimize=True)


def main() -> None:
    """Make the pictures."""
    import time

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--path", type=Path, help="where the log and the pages go")
    parser.add_argument("--pictures", type=Path, help="where screenshots of the pages go")
    given = parser.parse_args()
    path = given.path or Path(tempfile.mkdtemp(prefix="compaction-"))
    if path.exists() and any(path.iterdir()):
        parser.error(f"{path} is not empty: name a new directory")
    with kafkalog.open(path / "log") as log:
        for number, step in enumerate(steps(log, time.time_ns() // 1_000_000), 1):
            page = path / f"{number}-{step}.html"
            run_command(["status", str(path / "log"), "--html", str(page)])
            if given.pictures is not None:
                photograph(page, given.pictures / f"{step}.png")


if __name__ == "__main__":
    main()
