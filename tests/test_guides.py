"""The guides show what happens: their Python is run, their commands are typed, in their order."""

from __future__ import annotations

import contextlib
import io
import re
import shlex
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

pytest_plugins = ["pytester"]

from tests.cli.conftest import kafkalog  # noqa: E402, F401 - a fixture
from tests.storage_engine.broker_root import BrokerRoot  # noqa: E402

DOCS = Path(__file__).resolve().parent.parent / "docs"
BLOCK = re.compile(r"^```(python|console)\n(.*?)^```\n(?:```text\n(.*?)^```$)?", re.M | re.S)
COMMAND = re.compile(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", re.M)


def dead_broker(root: Path) -> None:
    made = BrokerRoot(root / "kafka-logs")
    made.partition("orders-0")
    made.shut_down()


PREPARED: dict[str, Callable[[Path], None]] = {"dead-broker": dead_broker}
GUIDES = ["quick-start", "dead-broker", "ktables"]


@dataclass(frozen=True)
class Block:
    kind: str
    source: str
    output: str


def blocks(guide: str) -> Iterator[Block]:
    text = (DOCS / f"{guide}.md").read_text()
    for kind, source, output in BLOCK.findall(text):
        yield Block(kind, source, output)


@pytest.mark.spark
@pytest.mark.slow
@pytest.mark.parametrize("guide", GUIDES)
def test_a_guide_does_what_it_shows(
    guide: str,
    spark: Any,
    tmp_path: Path,
    kafkalog: Any,  # noqa: F811 - the fixture
) -> None:
    PREPARED.get(guide, lambda _: None)(tmp_path)
    names: dict[str, Any] = {"spark": spark}
    found = list(blocks(guide))
    assert found
    for block in found:
        source = block.source.replace("/data/", f"{tmp_path}/")
        if block.kind == "python":
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed):
                exec(compile(source, guide, "exec"), names)
            shown = printed.getvalue().replace(str(tmp_path), "/data")
            assert shown.split() == block.output.split(), block.source
            continue
        for line, output in COMMAND.findall(block.source):
            name, *arguments = shlex.split(line.replace("/data", str(tmp_path)))
            assert name == "kafkalog"
            result = kafkalog(*arguments)
            shown = (result.out + result.err).replace(str(tmp_path), "/data")
            assert told(shown) == told(output), line


def told(text: str) -> list[list[str]]:
    """Return the words of each line, without times, which differ from run to run."""
    time = re.compile(r"\d{4}-\d\d-\d\d(T[\d:.]+Z| [\d:]+ UTC)")
    return [time.sub("", line).split() for line in text.splitlines()]


@pytest.mark.spark
@pytest.mark.slow
def test_the_guide_to_testing_works_as_written(pytester: pytest.Pytester) -> None:
    """Its blocks are one file of tests, but for those that only show a call."""
    sources = [block.source for block in blocks("testing")]
    pytester.makepyfile(test_guide="\n\n".join(sources))
    done = pytester.runpytest_subprocess("-p", "no:cacheprovider", timeout=300)
    done.assert_outcomes(passed=3)
