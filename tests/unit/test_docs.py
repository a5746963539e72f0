"""What the documents show is what happens."""

from __future__ import annotations

import importlib
import inspect
import re
from pathlib import Path

import pytest

from kafkalog.cleaner.state import notes
from kafkalog.sink.upsert.delta import commits
from kafkalog.storage_engine.directory import ended_pins, pin_file
from kafkalog.storage_engine.format import layout
from tests import ROOT

DOCUMENTS = [
    "README.md",
    "ARCHITECTURE.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    "docs/broker.md",
    "docs/command-line.md",
    "docs/compaction.md",
    "docs/compatibility.md",
    "docs/dead-broker.md",
    "docs/deployment.md",
    "docs/cleaner.md",
    "docs/cluster.md",
    "docs/connect-streams.md",
    "docs/conformance.md",
    "docs/erasing.md",
    "docs/first-mistakes.md",
    "docs/format.md",
    "docs/glossary.md",
    "docs/index.md",
    "docs/ktables.md",
    "docs/limits.md",
    "docs/platforms.md",
    "docs/object-store.md",
    "docs/promises.md",
    "docs/tutorial.md",
    "docs/spark.md",
    "docs/spark-connect.md",
    "docs/testing.md",
]
API = (ROOT / "docs" / "api.md").read_text()
LINK = re.compile(r"\[[^\]]*\]\(([^)#\s]+)(?:#[^)]*)?\)")


@pytest.mark.parametrize("document", DOCUMENTS)
def test_links_lead_somewhere(document: str) -> None:
    path = ROOT / document
    targets = [link for link in LINK.findall(path.read_text()) if "://" not in link]
    assert [target for target in targets if not (path.parent / target).exists()] == []


@pytest.mark.parametrize(
    "public",
    ["kafkalog", "kafkalog.cleaner", "kafkalog.errors", "kafkalog.sink", "kafkalog.sink.upsert"],
)
def test_the_page_of_python_shows_each_public_name_with_its_docstring(public: str) -> None:
    shown = re.findall(r"^::: (\S+)(?:\n    options:\n      members: \[(.*)\])?", API, re.M)
    pages = {name: members.split(", ") if members else [] for name, members in shown}
    module = importlib.import_module(public)
    for name in module.__all__:
        found = getattr(module, name)
        if name.startswith("__"):
            continue
        assert inspect.getdoc(found), name
        whole, *rooms = f"{found.__module__}.{name}", found.__module__, public
        assert whole in pages or any(
            room in pages and (not pages[room] or name in pages[room]) for room in rooms
        ), whole


def test_the_readme_names_only_make_targets_that_exist() -> None:
    targets = set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(), re.M))
    for document in DOCUMENTS:
        named = set(re.findall(r"`make ([a-z0-9-]+)", (ROOT / document).read_text()))
        assert named <= targets, document


def test_the_containers_commands_are_those_of_the_readme() -> None:
    """Docker is not at hand where the tests run; what it would run is."""
    image = (ROOT / "Dockerfile").read_text()
    needed = re.search(r"a Debian machine with (.*?)\.", (ROOT / "README.md").read_text())
    assert needed is not None
    (installed,) = re.findall(r"^RUN apt-get .* --no-install-recommends (.*)$", image, re.M)
    assert set(installed.split()) == {*re.findall(r"`(.+?)`", needed[1]), "ca-certificates"}
    made = re.findall(r'^(?:RUN make|CMD \["make",) "?([a-z-]+)', image, re.M)
    assert made == ["demo-setup", "demo"]
    targets = re.findall(r"^([a-z-]+): \$\(DEMO_READY\)", (ROOT / "Makefile").read_text(), re.M)
    assert targets == made


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


@pytest.mark.parametrize(
    ("file", "version"),
    [
        ("`commit` in a directory", layout.JOURNAL_VERSION),
        ("`kl-gaps`", layout.GAPS_VERSION),
        ("`kl-<base>.keys`", layout.KEYS_VERSION),
        ("`kl-pin-*`", pin_file._VERSION),
        ("`kl-ended-pins`", int(ended_pins._HEADER.split()[1])),
        ("`kl-delete-horizon`", notes.VERSION),
        ("`kl-uncleanable`", notes.VERSION),
        ("`kl-log`", layout.STORED_VERSION),
        ("`data/*.mixed`", layout.MIXED_VERSION),
        ("`*.side`", layout.SIDE_VERSION),
        ("Delta", f"`{commits._FORMAT}`"),
    ],
)
def test_the_page_has_the_version_of_each_format(file: str, version: int | str) -> None:
    page = (ROOT / "docs" / "compatibility.md").read_text()
    rows = [[cell.strip() for cell in line.split("|")] for line in page.splitlines()]
    (found,) = (row[3] for row in rows if len(row) == 6 and row[2].startswith(file))
    assert found == str(version)
