"""The examples of the documents print what the documents show."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path
from typing import Any

import pytest

from tests import ROOT

pytestmark = [pytest.mark.spark, pytest.mark.slow]
EXAMPLE = re.compile(r"^```python\n(.*?)^```\n(?:\s*^```text\n(.*?)^```$)?", re.M | re.S)


def examples(document: str) -> list[tuple[str, str]]:
    """Return the document's Python blocks, each with the output shown after it."""
    return EXAMPLE.findall((ROOT / document).read_text())


@pytest.mark.parametrize("document", ["README.md", "docs/spark.md"])
def test_a_documents_examples_print_what_it_shows(
    document: str, spark: Any, tmp_path: Path
) -> None:
    found = examples(document)
    assert found
    # Those of a test that had this session before. Spark's `listTables` wants its compiler.
    for view in spark.sql("SHOW VIEWS").collect():
        spark.catalog.dropTempView(view.viewName)
    names: dict[str, Any] = {"spark": spark}
    for source, output in found:
        here = source.replace("/data/", f"{tmp_path}/")
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(here, document, "exec"), names)
        shown = printed.getvalue().replace(str(tmp_path), "/data")
        assert shown.split() == output.split(), source
