"""The feed: files whose order, by Spark's rule, is the order of the commits."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from rich.progress import Progress

from examples import git_feed
from examples.git_feed import write_feed
from tests.unit.examples.repository import AUTHOR_TIME, Repository


@pytest.fixture
def repository(tmp_path: Path) -> Repository:
    return Repository(tmp_path / "repository")


def rows(directory: Path) -> list[dict[str, object]]:
    files = sorted(directory.glob("*.parquet"), key=lambda path: path.stat().st_mtime_ns)
    return [row for path in files for row in pq.read_table(path).to_pylist()]


def test_rows_are_numbered_in_the_order_of_the_commits(
    repository: Repository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(git_feed, "CHANGES_PER_FILE", 3)
    names = []
    for number in range(20):
        repository.write("a", str(number))
        repository.write(f"file {number}")
        names.append(repository.commit())
    feed = write_feed(repository.path, tmp_path / "feed", Progress(disable=True))
    found = rows(feed.directory)
    assert [row["seq"] for row in found] == list(range(40))
    assert [json.loads(row["value"])["commit"] for row in found[::2]] == names
    assert (feed.commits, feed.changes, feed.deletes, feed.files) == (20, 40, 0, 10)


def test_no_two_files_have_the_same_time(
    repository: Repository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(git_feed, "CHANGES_PER_FILE", 1)
    for number in range(10):
        repository.write("a", str(number))
        repository.commit()
    feed = write_feed(repository.path, tmp_path / "feed", Progress(disable=True))
    times = [path.stat().st_mtime_ns // 1_000_000 for path in sorted(feed.directory.iterdir())]
    assert times == sorted(set(times))
    assert len(times) == 10


def test_a_value_is_json_and_a_delete_is_null(repository: Repository, tmp_path: Path) -> None:
    repository.write("a")
    name = repository.commit()
    blob = repository.git("rev-parse", "HEAD:a")
    repository.remove("a")
    repository.commit()
    feed = write_feed(repository.path, tmp_path / "feed", Progress(disable=True))
    upsert, delete = rows(feed.directory)
    expected = {"mode": "100644", "blob": blob, "commit": name, "time": AUTHOR_TIME}
    assert json.loads(upsert["value"]) == expected
    assert (delete["key"], delete["value"]) == (b"a", None)
