"""The guides show what happens: their Python is run, their commands are typed, in their order."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shlex
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from kafkalog.storage_engine.object_store.address import StoreAddress
from tests import ROOT

pytest_plugins = ["pytester"]

from tests.acceptance.cluster import PATIENCE_S, SMALL_JVM, kill_session  # noqa: E402
from tests.builders.batch_builder import BatchBuilder, batch  # noqa: E402
from tests.builders.segment_files import write_segment  # noqa: E402
from tests.spark_home import make_spark_home  # noqa: E402
from tests.unit.cli.conftest import kafkalog  # noqa: E402, F401 - a fixture
from tests.unit.storage_engine.broker_root import BrokerRoot  # noqa: E402
from tests.unit.values.test_window_keys import written as streams_records  # noqa: E402

DOCS = ROOT / "docs"
VALUES = ROOT / "tests/unit/values"
BLOCK = re.compile(r"^```(python|console)\n(.*?)^```\n(?:```text\n(.*?)^```$)?", re.M | re.S)
COMMAND = re.compile(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", re.M)


def dead_broker(root: Path) -> None:
    """One that was shut down, with a group's position, and one that was killed as it wrote."""
    made = BrokerRoot(root / "kafka-logs")
    made.partition("orders-0")
    internal = made.partition("__consumer_offsets-0", (0,), 0, topic_id="B" * 21 + "Q")
    group, position = b"\0\2\0\7billing", struct.pack(">hqihq", 3, 42, -1, 0, 1_700_000_000_000)
    partition = b"\0\1\0\7billing\0\6orders\0\0\0\0"
    empty = b"\0\3\0\x08consumer" + struct.pack(">ihhqi", 7, -1, -1, 1_700_000_000_000, 0)
    records = BatchBuilder().add(group, empty, timestamp=1).add(partition, position, timestamp=1)
    write_segment(internal, 0, [records.build()])
    made.shut_down()
    (segment,) = BrokerRoot(root / "killed").partition("orders-0").glob("*050.log")
    with segment.open("ab") as tail:
        tail.write(batch(100, 10).data[:100])


def connect_and_streams(root: Path) -> None:
    """A directory with what Kafka Connect and Kafka Streams wrote to their topics."""
    apps = BrokerRoot(root / "apps-logs")
    made_of: dict[str, BatchBuilder] = {}
    for line in (VALUES / "connect_topics.txt").read_text().splitlines():
        topic, key, value = json.loads(line)
        made_of.setdefault(topic, BatchBuilder()).add(key.encode(), value.encode())
    for topic in ("app-windows-changelog", "app-counts-changelog"):
        made_of[topic] = BatchBuilder()
        for key, value, ms in streams_records(topic):
            made_of[topic].add(key, value, timestamp=ms)
    for number, (topic, records) in enumerate(made_of.items()):
        made_at = apps.partition(f"{topic}-0", (0,), 0, topic_id=f"{number}" + "A" * 21)
        write_segment(made_at, 0, [records.build()])
    apps.shut_down()


PREPARED: dict[str, Callable[[Path], None]] = {
    "dead-broker": dead_broker,
    "connect-streams": connect_and_streams,
}
GUIDES = [
    "tutorial",
    "python",
    "dead-broker",
    "connect-streams",
    "ktables",
    "spark-connect",
    "erasing",
]


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
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    PREPARED.get(guide, lambda _: None)(tmp_path)
    run_guide(guide, {"spark": spark}, tmp_path, kafkalog)


@pytest.mark.spark
@pytest.mark.slow
def test_the_guide_to_object_stores_does_what_it_shows(
    spark: Any,
    tmp_path: Path,
    kafkalog: Any,  # noqa: F811 - the fixture
    s3_address: StoreAddress,
) -> None:
    """The server that its reader starts is the tests' own."""
    places = {
        "http://127.0.0.1:9000": str(s3_address.endpoint),
        "s3://bucket/orders": f"{s3_address}/orders",
    }
    run_guide("object-store", {"spark": spark}, tmp_path, kafkalog, places)


def run_guide(
    guide: str,
    names: dict[str, Any],
    tmp_path: Path,
    kafkalog: Any,  # noqa: F811 - the fixture
    places: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Run the blocks of a guide with its `places` replaced, and compare what they print."""
    found = list(blocks(guide))
    assert found
    for block in found:
        source = block.source.replace("/data/", f"{tmp_path}/")
        for shown, place in places.items():
            source = source.replace(shown, place)
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
            both = result.out + result.err, result.err + result.out
            shown = [told(text.replace(str(tmp_path), "/data")) for text in both]
            assert told(output) in shown, line


def told(text: str) -> list[list[str]]:
    """Return the words of each line, without what differs from run to run: times, sizes."""
    time = re.compile(r"\d{4}-\d\d-\d\d(T[\d:.]+Z| [\d:]+ UTC)|\d{8}T\d{6}Z")
    size = re.compile(r"[\d.]+ (?=bytes|kB|MB)")
    return [size.sub("", time.sub("", line)).split() for line in text.splitlines()]


@pytest.mark.spark
@pytest.mark.slow
def test_the_guide_to_testing_works_as_written(pytester: pytest.Pytester) -> None:
    """Its blocks are one file of tests, but for those that only show a call."""
    sources = [block.source for block in blocks("testing")]
    pytester.makepyfile(test_guide="\n\n".join(sources))
    done = pytester.runpytest_subprocess("-p", "no:cacheprovider", timeout=300)
    done.assert_outcomes(passed=3)


MASTER = "spark://master:7077"
TWO_EXECUTORS = "local-cluster[2,1,1024]"
SMALL_SPARK = {
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.driver.extraJavaOptions": SMALL_JVM,
    "spark.executor.extraJavaOptions": SMALL_JVM,
    "spark.log.level": "ERROR",
    "spark.sql.shuffle.partitions": "2",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
}
END_OF_BLOCK = "--- end of block ---"


@pytest.mark.spark
@pytest.mark.slow
def test_the_guide_to_a_cluster_works_on_one(tmp_path: Path) -> None:
    """Its blocks are one program, whose executors are processes of their own."""
    found = list(blocks("cluster"))
    sources = [block.source + f"print({END_OF_BLOCK!r})\n" for block in found]
    program = "\n".join(sources).replace("/data/", f"{tmp_path}/")
    assert program.count(MASTER) == 1
    (tmp_path / "guide.py").write_text(program.replace(MASTER, TWO_EXECUTORS))
    settings = [word for pair in SMALL_SPARK.items() for word in ("--conf", "=".join(pair))]
    environment = {
        **os.environ,
        "SPARK_HOME": str(make_spark_home(tmp_path / "spark")),
        "PYSPARK_SUBMIT_ARGS": shlex.join([*settings, "pyspark-shell"]),
    }
    with (tmp_path / "errors").open("wb") as errors:
        guide = subprocess.Popen(
            [sys.executable, "guide.py"],
            cwd=tmp_path,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=errors,
            start_new_session=True,
            text=True,
        )
    try:
        printed, _ = guide.communicate(timeout=2 * PATIENCE_S)
    finally:
        kill_session(guide)
    assert guide.returncode == 0, (tmp_path / "errors").read_text()[-8000:]
    shown = [part.split() for part in printed.split(END_OF_BLOCK)]
    assert shown == [*(block.output.split() for block in found), []]
