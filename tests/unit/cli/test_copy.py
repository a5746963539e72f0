"""`kafkalog copy`: what it copies, what it prints, and what it refuses in one line."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.cli.conftest import Command

RECORDS = b'{"key":"a","value":"1"}\n{"key":"b","value":{"x":1}}\n'


@pytest.fixture
def source(kafkalog: Command, tmp_path: Path) -> Path:
    path = tmp_path / "source"
    for topic in ("t", "u"):
        assert kafkalog("topics", "create", path, topic).status == 0
        assert kafkalog("append", path, topic, stdin=RECORDS).status == 0
    return path


def test_a_log_is_copied_to_a_store_and_back_and_then_what_is_new(
    kafkalog: Command, source: Path, tmp_path: Path, s3_url: str
) -> None:
    back = tmp_path / "back"
    first = kafkalog("copy", source, s3_url, "--json")
    assert [(row["topic"], row["startOffset"], row["endOffset"]) for row in first.json] == [
        ("t", 0, 2),
        ("u", 0, 2),
    ]
    assert kafkalog("copy", s3_url, back).status == 0
    for topic in ("t", "u"):
        read = [kafkalog("read", path, topic, "--json").json for path in (source, back)]
        assert read[0] == read[1] != []
    kafkalog("append", source, "u", stdin=RECORDS)
    heads, row = kafkalog("copy", source, s3_url).lines
    assert heads.split() == ["topic", "partition", "from", "to", "bytes"]
    assert row.split()[:4] == ["u", "0", "2", "4"]
    again = kafkalog("copy", source, s3_url)
    assert (again.status, again.out) == (0, "")
    assert again.err == "nothing is new in 2 partitions\n"


def test_the_topics_that_are_named_are_copied(
    kafkalog: Command, source: Path, tmp_path: Path
) -> None:
    kafkalog("topics", "create", source, "v")
    copied = kafkalog("copy", source, tmp_path / "copy", "--topic", "u", "--topic", "v", "--json")
    assert [row["topic"] for row in copied.json] == ["u", "v"]


def test_what_cannot_be_copied_is_refused_in_one_line(
    kafkalog: Command, source: Path, tmp_path: Path
) -> None:
    for arguments in (
        (source, source),
        (source, "memory://copy"),
        (tmp_path / "nothing", tmp_path / "copy"),
        (source, tmp_path / "copy", "--topic", "nothing"),
    ):
        result = kafkalog("copy", *arguments)
        assert (result.status, result.out, result.err.count("\n")) == (2, "", 1)
        assert not (tmp_path / "nothing").exists()


def test_a_topic_that_is_refused_leaves_the_others_to_be_copied(
    kafkalog: Command, source: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    kafkalog("topics", "create", other, "t")
    for new in (["u"], []):
        result = kafkalog("copy", source, other, "--json")
        assert (result.status, [row["topic"] for row in result.json]) == (1, ["u"])
        assert result.err.count("\n") == 1
        assert "topic 't' is not a copy of that of" in result.err
        rows = [row["startOffset"] < row["endOffset"] for row in result.json]
        assert rows == [bool(new)]


def test_a_topic_that_only_the_destination_has_is_named_and_stays(
    kafkalog: Command, source: Path, tmp_path: Path
) -> None:
    copy = tmp_path / "copy"
    kafkalog("copy", source, copy)
    kafkalog("topics", "delete", source, "u")
    named = kafkalog("copy", source, copy)
    assert (named.status, named.out) == (0, "")
    assert f"{copy}: topic 'u' is not, or no longer, in {source}" in named.err
    assert len(kafkalog("read", copy, "u", "--json").json) == 2
    assert "'u'" not in kafkalog("copy", source, copy, "--topic", "t").err
