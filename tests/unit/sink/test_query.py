"""Which query a checkpoint belongs to, and how far its offset log says a micro-batch reaches."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kafkalog.errors import StorageError
from kafkalog.sink.plan import other_ends
from kafkalog.sink.query import checkpoint_query_id, end_offsets, end_offsets_of_checkpoint


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


@pytest.mark.parametrize(
    "plan",
    [
        'v1\n{"batchTimestampMs":1}\n{"t":{"0":7}}\n-\n{"u":{"1":2}}',
        'v2\n{"batchTimestampMs":1}\n0:{"t":{"0":7}}\norders:{"u":{"1":2}}',
    ],
)
def test_the_offset_log_of_a_checkpoint_has_the_end_of_a_micro_batch(
    tmp_path: Path, plan: str
) -> None:
    (tmp_path / "offsets").mkdir()
    (tmp_path / "offsets" / "3").write_text(plan)
    assert end_offsets_of_checkpoint(tmp_path, 3) == {"t": {"0": 7}, "u": {"1": 2}}


def test_a_micro_batch_that_no_offset_log_has_is_named(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="offsets/4: the plan of the micro-batch: "):
        end_offsets_of_checkpoint(tmp_path, 4)


def test_sources_on_other_partitions_add_up_and_on_the_same_the_lower_offset_counts() -> None:
    sources = ['{"t": {"0": 7, "1": 3}, "u": {"0": 1}}', '{"t":{"1":2,"2":9}}']
    assert end_offsets(sources) == {"t": {"0": 7, "1": 2, "2": 9}, "u": {"0": 1}}


@pytest.mark.parametrize(
    "other",
    [
        *('{"logOffset":3}', "17", "null", "[]", "no json", '{"t":{"0":-1}}', '{"t":{"0":"7"}}'),
        *('{"t":{"a":7}}', '{"t":[7]}', '{"t":{"0":true}}', '{"t":{"0":7},"u":3}'),
    ],
)
def test_sources_that_are_not_kafka_logs_are_left_out(other: str) -> None:
    assert end_offsets([other]) == {}
    assert end_offsets([other, '{"t":{"0":7}}']) == {"t": {"0": 7}}


def test_the_ends_of_sources_that_are_not_kafka_logs_are_told_apart(tmp_path: Path) -> None:
    (tmp_path / "offsets").mkdir()
    (tmp_path / "sources" / "1").mkdir(parents=True)

    def found(*sources: str, files: str = "a") -> str | None:
        (tmp_path / "offsets" / "3").write_text("\n".join(["v1", "{}", *sources]))
        entry = json.dumps({"path": files, "batchId": 0}, separators=(",", ":"))
        (tmp_path / "sources" / "1" / "0").write_text(f"v1\n{entry}")
        return other_ends(str(tmp_path), 3)

    log, of_files = '{"t":{"0":7}}', '{"logOffset":0}'
    assert (found(log), found(log, "-"), other_ends("s3://a/b", 3)) == (None, None, None)
    assert found(log, "17") == found('{"t":{"0":9}}', "17") != found(log, "18")
    assert found(log, of_files) == found("-", of_files) != found(log, of_files, files="b")
