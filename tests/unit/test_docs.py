"""What the documents show is what happens."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path
from typing import Any

import pytest

from tests import ROOT

DOCUMENTS = [
    "README.md",
    "ARCHITECTURE.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "docs/broker.md",
    "docs/by-example.md",
    "docs/command-line.md",
    "docs/compaction.md",
    "docs/dead-broker.md",
    "docs/cleaner.md",
    "docs/cluster.md",
    "docs/conformance.md",
    "docs/erasing.md",
    "docs/format.md",
    "docs/glossary.md",
    "docs/ktables.md",
    "docs/limits.md",
    "docs/promises.md",
    "docs/quick-start.md",
    "docs/spark.md",
    "docs/testing.md",
]
EXAMPLE = re.compile(r"^```python\n(.*?)^```\n(?:\s*^```text\n(.*?)^```$)?", re.M | re.S)
LINK = re.compile(r"\[[^\]]*\]\(([^)#\s]+)(?:#[^)]*)?\)")


def examples(document: str) -> list[tuple[str, str]]:
    """Return the document's Python blocks, each with the output shown after it."""
    return EXAMPLE.findall((ROOT / document).read_text())


@pytest.mark.spark
@pytest.mark.slow
@pytest.mark.parametrize("document", ["README.md", "docs/by-example.md", "docs/spark.md"])
def test_a_documents_examples_print_what_it_shows(
    document: str, spark: Any, tmp_path: Path
) -> None:
    found = examples(document)
    assert found
    for table in spark.catalog.listTables():  # of a test that had this session before
        spark.catalog.dropTempView(table.name)
    names: dict[str, Any] = {"spark": spark}
    for source, output in found:
        here = source.replace("/data/", f"{tmp_path}/")
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(here, document, "exec"), names)
        shown = printed.getvalue().replace(str(tmp_path), "/data")
        assert shown.split() == output.split(), source


@pytest.mark.parametrize("document", DOCUMENTS)
def test_links_lead_somewhere(document: str) -> None:
    path = ROOT / document
    targets = [link for link in LINK.findall(path.read_text()) if "://" not in link]
    assert [target for target in targets if not (path.parent / target).exists()] == []


def test_the_readme_names_only_make_targets_that_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    for document in DOCUMENTS:
        named = set(re.findall(r"`make ([a-z-]+)", (ROOT / document).read_text()))
        assert named <= targets, document


def test_the_formats_example_is_what_is_written(tmp_path: Path) -> None:
    import kafkalog

    text = (ROOT / "docs" / "format.md").read_text()
    block = re.search(r"^```hex\n(.*?)^```$", text, re.M | re.S)
    assert block is not None
    dump = " ".join(line.split("  ")[0] for line in block[1].splitlines())
    with kafkalog.open(tmp_path) as log:
        log.create_topic("t")
        log.append("t", [(b"a", b"one"), (b"b", None)], now_ms=1_700_000_000_000)
    (written,) = (tmp_path / "t-0").glob("*.log")
    assert written.read_bytes().hex(" ") == " ".join(dump.split())
