"""The Spark job that the cleaner's guide (docs/cleaner.md) shows is run."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path
from typing import Any

import pytest

from tests.unit.cleaner.guide import blocks, shop

pytestmark = [pytest.mark.spark, pytest.mark.slow]


def test_the_spark_jobs_example_runs(spark: Any, tmp_path: Path) -> None:
    shop(tmp_path / "log").close()
    (source,) = [source for source in blocks("python") if "spark" in source]
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        here = source.replace("/data/", f"{tmp_path}/")
        exec(compile(here, "cleaner.md", "exec"), {"spark": spark})
    assert printed.getvalue().split() == ["stock", "0", "141", "->", "100"]
