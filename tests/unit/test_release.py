"""What a release refuses before it builds anything."""

from __future__ import annotations

import re
import runpy
import subprocess
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests import ROOT

RELEASE: dict[str, Any] = runpy.run_path(str(ROOT / ".ci" / "release.py"))
version_of: Callable[[Path], str] = RELEASE["version_of"]
check_repository: Callable[[Path, str], None] = RELEASE["check_repository"]
FOR_WORK = {"demo", "test", "bench", "dev", "docs", "release", "fuzz"}
FILES = ("pyproject.toml", "kafkalog/__init__.py", "CHANGELOG.md")


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """Return the three files that name the version, on the day of the release."""
    (tmp_path / "kafkalog").mkdir()
    for name in FILES:
        text = (ROOT / name).read_text()
        (tmp_path / name).write_text(text.replace("- unreleased", "- 2027-01-02", 1))
    return tmp_path


def git(place: Path, *words: str) -> None:
    who = ("-c", "user.name=a", "-c", "user.email=a@b.c")
    subprocess.run(("git", *who, *words), cwd=place, check=True, capture_output=True)


def test_the_three_places_of_the_version_agree(checkout: Path) -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+(rc\d+)?", version_of(checkout))


@pytest.mark.parametrize("name", FILES)
def test_a_release_refuses_a_version_that_one_place_does_not_name(
    checkout: Path, name: str
) -> None:
    version = version_of(checkout)
    text = (checkout / name).read_text()
    (checkout / name).write_text(text.replace(version, "9.9.9", 1))
    with pytest.raises(SystemExit, match="expected"):
        version_of(checkout)


def test_a_release_is_tried_out_with_every_extra_of_users() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert {*RELEASE["EXTRAS"].split(",")} == {*project["optional-dependencies"]} - FOR_WORK


def test_a_release_has_a_day(checkout: Path) -> None:
    changelog = checkout / "CHANGELOG.md"
    changelog.write_text(changelog.read_text().replace("- 2027-01-02", "- unreleased", 1))
    with pytest.raises(SystemExit, match="Write the day"):
        version_of(checkout)


def test_a_release_is_of_what_is_committed_and_not_yet_tagged(checkout: Path) -> None:
    git(checkout, "init", "-q")
    git(checkout, "add", ".")
    with pytest.raises(SystemExit, match=r"not committed:\nA  CHANGELOG.md"):
        check_repository(checkout, "v1")
    git(checkout, "commit", "-q", "-m", "a")
    check_repository(checkout, "v1")
    git(checkout, "tag", "v1")
    with pytest.raises(SystemExit, match="the tag v1 is there already"):
        check_repository(checkout, "v1")
