"""What docs/compaction.md tells of its pictures is what is in the log at each step."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

import kafkalog
from examples import compaction
from kafkalog.cleaner.dedup.census import census
from kafkalog.storage_engine.place import directory_log_of
from tests import ROOT

NOW_MS = 1_700_000_000_000
PICTURES = ROOT / "docs" / "pictures"


def test_each_step_leaves_what_the_guide_says_and_has_its_picture(tmp_path: Path) -> None:
    found = {}
    with kafkalog.open(tmp_path) as log:
        for step in compaction.steps(log, NOW_MS):
            with directory_log_of(log).snapshot(compaction.TOPIC, 0, whole=True) as snapshot:
                counts = census(snapshot, budget_bytes=1 << 20)
            found[step] = (
                len([one for one in counts if one.records]),
                sum(one.records for one in counts),
                sum(one.obsolete_records for one in counts),
                sum(one.tombstones for one in counts),
            )
        offsets = log.offsets(compaction.TOPIC)
    assert found == {
        "written": (5, 900, 860, 0),
        "cleaned": (2, 60, 20, 0),
        "dirty-again": (2, 220, 180, 0),
        "deleted": (1, 40, 0, 10),
        "forgotten": (1, 30, 0, 0),
    }
    assert offsets == {0: (0, 1070)}
    assert found.keys() == {path.stem for path in PICTURES.glob("*.png")}


@pytest.mark.slow
def test_a_screenshot_has_the_width_and_the_colours_of_the_pictures(tmp_path: Path) -> None:
    from PIL import Image

    if shutil.which("chromium") is None and "CI" not in os.environ:
        pytest.skip("no Chromium: install `chromium`")
    page = tmp_path / "page.html"
    page.write_text("<body style='margin: 0'><main style='height: 100px'>prices</main></body>")
    compaction.photograph(page, tmp_path / "made.png")
    with Image.open(tmp_path / "made.png") as made, Image.open(PICTURES / "written.png") as kept:
        assert (made.width, made.mode) == (kept.width, kept.mode) == (compaction.WIDTH, "P")
        assert 100 <= made.height <= 100 + 2 * compaction.MARGIN
