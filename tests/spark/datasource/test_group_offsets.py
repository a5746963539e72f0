"""A Spark job goes on where a Kafka consumer stopped."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path
from typing import Any

import pytest

import kafkalog
from tests.unit.storage_engine.test_groups import ARCHIVE

pytestmark = [pytest.mark.spark, pytest.mark.slow]


@pytest.mark.parametrize("group", ["classic-1", "consumer-1"])
def test_a_job_that_goes_on_from_a_group_misses_no_record_and_reads_none_twice(
    spark: Any, tmp_path: Path, group: str
) -> None:
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(tmp_path, filter="data")
    read = json.loads((tmp_path / "said.json").read_text())["read"][group]
    root = tmp_path / "log-0"
    starts = kafkalog.group_offsets(root, group)

    def offsets(starting: str) -> list[tuple[int, int]]:
        options = {"subscribe": ",".join(starts), "startingOffsets": starting}
        frame = spark.read.format("kafkalog").options(**options).load(str(root))
        return [tuple(row) for row in frame.select("partition", "offset").collect()]

    rest = offsets(json.dumps(starts))
    assert read and rest
    assert sorted([*map(tuple, read), *rest]) == sorted(offsets("earliest"))
