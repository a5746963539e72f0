"""The manifests of a materialized table: which one counts, and which files may go."""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kafkalog.errors import InvalidInputError, KafkaLogError, StorageError
from kafkalog.tables.manifest import (
    Manifest,
    TableFile,
    manifest_name,
    version_of_data,
    version_of_manifest,
)
from kafkalog.tables.table_moment import PartitionMoment, TableMoment, location_of, mark_of
from kafkalog.tables.table_place import (
    TablePlace,
    check_outside_log,
    table_location,
    table_place,
)

MOMENT = TableMoment("t", "A" * 22, mark_of("/a b", "1", "t"), 3, {0: PartitionMoment(7, None)})


def manifest(version: int, made_ms: int = 0, *names: str) -> Manifest:
    return Manifest(
        version=version,
        moment=MOMENT,
        made_ms=made_ms,
        definition={"json": "n int"},
        schema={"type": "struct", "fields": []},
        columns=["key", "n"],
        place_columns=["key", "partition", "offset"],
        readers=['"int"'],
        files=[TableFile(name, 1, 2) for name in names],
        deletions=[],
    )


@pytest.fixture(params=["directory", "store"])
def at(request: pytest.FixtureRequest, tmp_path: Path) -> TablePlace:
    is_store = request.param == "store"
    where = f"memory://{secrets.token_hex(8)}/table" if is_store else str(tmp_path / "table")
    return table_place(where, {})


def publish(at: TablePlace, version: int, made_ms: int = 0) -> Manifest:
    """Write a version with one file."""
    found = manifest(version, made_ms, f"data/{version}-a/x.parquet")
    for file in found.files:
        at.write(file.path, b"rows")
    assert at.create(manifest_name(version), found.encode())
    return found


def test_a_manifest_is_read_as_it_was_written() -> None:
    gone = TableFile("data/3-a/gone.parquet", 1, 2)
    made = replace(manifest(3, 5, "data/3-a/x.parquet"), deletions=[gone])
    assert Manifest.decode("here", made.encode()) == made
    assert location_of(made.moment.mark) == "/a b"


@pytest.mark.parametrize(
    ("spoil", "problem"),
    [
        (lambda found: found.update(format=2), "another format"),
        (lambda found: found.pop("files"), "not the manifest"),
        (lambda found: found.update(partitions={"0": [1]}), "not the manifest"),
    ],
)
def test_a_manifest_of_another_form_is_refused(
    spoil: Callable[[dict[str, object]], object], problem: str
) -> None:
    content = json.loads(manifest(1).encode())
    spoil(content)
    with pytest.raises(StorageError, match=problem):
        Manifest.decode("here", json.dumps(content).encode())


def test_only_names_of_ours_have_versions() -> None:
    assert version_of_manifest(manifest_name(12)) == 12
    others = ("manifest-1.json", "manifest-" + "9" * 21 + ".json", "x", "manifest-.json")
    assert [version_of_manifest(name) for name in others] == [None] * 4
    assert version_of_data("data/12-ab/x.parquet") == 12
    assert [version_of_data(name) for name in ("data/x/y", "12-a", manifest_name(1))] == [None] * 3


def test_the_manifest_with_the_highest_number_counts_and_is_made_once(at: TablePlace) -> None:
    assert at.newest() is None
    publish(at, 1)
    second = publish(at, 2)
    assert not at.create(manifest_name(2), manifest(2, 9).encode())
    assert at.newest() == second


def test_versions_go_once_they_were_replaced_before_the_grace_time(at: TablePlace) -> None:
    for version, made_ms in ((1, 100), (2, 200), (3, 300)):
        last = publish(at, version, made_ms)
    at.collect(last, before_ms=250)  # 1 was replaced at 200, 2 at 300
    left = {manifest_name(2), manifest_name(3), "data/2-a/x.parquet", "data/3-a/x.parquet"}
    assert {*at.names()} == left
    at.collect(last, before_ms=1000)
    assert {*at.names()} == {manifest_name(3), "data/3-a/x.parquet"}


def test_files_of_refreshes_that_ended_go_and_those_of_one_that_may_run_stay(
    at: TablePlace,
) -> None:
    gone = TableFile("data/1-a/gone.parquet", 1, 2)
    last = replace(publish(at, 1), deletions=[gone])
    at.write(gone.path, b"versions of deleted rows")
    at.write("data/1-second/x.parquet", b"of a refresh that came second")
    at.write("data/2-runs/x.parquet", b"of a refresh that runs")
    at.write("data/users/x", b"of somebody else")
    at.collect(replace(last, made_ms=0), before_ms=0)
    assert {*at.names()} == {
        manifest_name(1),
        "data/1-a/x.parquet",
        gone.path,
        "data/2-runs/x.parquet",
        "data/users/x",
    }
    assert at.read("data/1-second/x.parquet") is None


def test_a_table_inside_its_log_is_refused(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "log")
    inside = [("log", "log"), ("log/t", "log"), ("link/t", "log"), ("other/../log/t", "link")]
    urls = [("s3://b/log", "s3://b/log/"), ("s3://b/log/t/", "s3://b/log")]
    for location, log in [(f"{tmp_path}/{a}", f"{tmp_path}/{b}") for a, b in inside] + urls:
        with pytest.raises(InvalidInputError, match="cannot lie inside its log"):
            check_outside_log(location, log)
    for location, log in (("/log-2", "/log"), ("/", "/log"), ("s3://b/log-2", "s3://b/log")):
        check_outside_log(location, log)
    check_outside_log("/log/t", "s3://b/log")


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("file", "is a directory, and .*/file is a file"),
        ("file/below", "is a directory, and .*/file is a file"),
        ("", "expected a directory, or the URL"),
        (None, "expected a directory, or the URL"),
        ("hdfs://host/t", "expected a directory, or the URL"),
        ("a\0b", "null character"),
        ("x" * 300, "File name too long"),
    ],
)
def test_a_location_where_no_table_can_be_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: Any, words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(KafkaLogError, match=words):
        table_location(given)


def test_a_location_is_an_absolute_path_or_the_url_of_a_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert table_location("a,b") == str(tmp_path / "a,b")
    assert table_location(tmp_path / "t") == table_location(f"file:{tmp_path}/t")
    assert table_location("s3://bucket/t") == "s3://bucket/t"
