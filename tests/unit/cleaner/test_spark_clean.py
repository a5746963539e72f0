"""Cleaning as a Spark job checks its topics before Spark does anything."""

from __future__ import annotations

from pathlib import Path

import pytest

from kafkalog.cleaner import spark as spark_job
from kafkalog.errors import InvalidInputError, UnknownTopicError
from kafkalog.storage_engine.directory.directory_log import DirectoryLog


def test_topics_are_checked_before_anything_runs(tmp_path: Path) -> None:
    DirectoryLog(tmp_path).create_topic("t", 3)
    DirectoryLog(tmp_path).create_topic("d", 1, {"cleanup.policy": "delete"})
    with pytest.raises(UnknownTopicError):
        spark_job.clean(None, tmp_path, ["v"])
    with pytest.raises(InvalidInputError, match=r"cleanup\.policy"):
        spark_job.clean(None, tmp_path, ["d"])
    with pytest.raises(InvalidInputError, match="a list of names"):
        spark_job.clean(None, tmp_path, "t")
    with pytest.raises(InvalidInputError, match="no log here"):
        spark_job.clean(None, tmp_path / "none")
