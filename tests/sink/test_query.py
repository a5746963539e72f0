"""Which query a checkpoint belongs to."""

from __future__ import annotations

from pathlib import Path

import pytest

from kafkalog.sink.query import checkpoint_query_id


def test_the_query_id_is_in_the_checkpoints_metadata(tmp_path: Path) -> None:
    (tmp_path / "check point").mkdir()
    (tmp_path / "check point" / "metadata").write_text('{"id":"abc"}')
    assert checkpoint_query_id(str(tmp_path / "check point")) == "abc"
    assert checkpoint_query_id((tmp_path / "check point").as_uri()) == "abc"


@pytest.mark.parametrize("location", [None, "s3://bucket/c", "/nowhere/at/all"])
def test_an_unknown_place_gives_none(location: str | None) -> None:
    assert checkpoint_query_id(location) is None


@pytest.mark.parametrize("content", ["", "[]", "{}", "null"])
def test_a_torn_metadata_file_gives_none(tmp_path: Path, content: str) -> None:
    (tmp_path / "metadata").write_text(content)
    assert checkpoint_query_id(str(tmp_path)) is None
