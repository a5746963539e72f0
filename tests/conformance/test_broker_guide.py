"""docs/broker.md, typed on a real broker: read, taken over, written to, given back."""

from __future__ import annotations

import contextlib
import io
import re
import shlex
from pathlib import Path

import pytest
from confluent_kafka import Consumer, TopicPartition

import kafkalog as library
from tests import ROOT
from tests.conformance.clients import Sender
from tests.conformance.kafka import KafkaBroker
from tests.unit.cli.conftest import Command, kafkalog  # noqa: F401 - a fixture

pytestmark = [pytest.mark.peers, pytest.mark.slow]

GUIDE = (ROOT / "docs" / "broker.md").read_text()
SECTIONS = ("Read a broker's directory", "Take it over: adopt", "Give it back: release")
OFTEN = {"replica.high.watermark.checkpoint.interval.ms": "100"}
BLOCK = re.compile(r"^```(sh|python)\n(.*?)^```$", re.M | re.S)


def test_the_guide_does_on_a_broker_what_it_says(
    peers: None,
    tmp_path: Path,
    kafkalog: Command,  # noqa: F811 - the fixture
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("new-orders.jsonl").write_text('{"key": "order-1", "value": "paid"}\n')
    with KafkaBroker(tmp_path / "broker", settings=OFTEN) as broker:
        broker.create_topic("orders")
        sender = Sender(broker)
        for number in range(5):
            sender.send("orders", b"open", b"order-%d" % number)
        sender.flush()
        broker.wait_until(lambda: end_of(broker.log_dir) == 5)
        for section in SECTIONS:
            (text,) = re.findall(rf"^## {section}\n(.*?)^## ", GUIDE, re.M | re.S)
            for kind, source in BLOCK.findall(text):
                here = source.replace("/var/kafka", str(broker.log_dir))
                if kind == "python":
                    assert printed(here) == "5\n"
                else:
                    for line in here.splitlines():
                        typed(line, broker, kafkalog)
        assert last_value(broker) == b"paid"


def end_of(root: Path) -> int:
    with library.open(root, read_only=True) as log:
        return log.offsets("orders")[0][1]


def typed(line: str, broker: KafkaBroker, kafkalog: Command) -> None:  # noqa: F811
    """Do what a line of a shell says."""
    (name, *arguments), stdin = shlex.split(line, comments=True), b""
    if "<" in arguments:
        *arguments, _, file = arguments
        stdin = Path(file).read_bytes()
    if name == "kafkalog":
        result = kafkalog(*arguments, stdin=stdin)
        assert result.status == 0, result.err
        assert arguments[0] != "read" or result.json[-1]["value"] == "open"
    else:
        {"kafka-server-stop": broker.stop, "kafka-server-start": broker.start}[name]()


def printed(source: str) -> str:
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(compile(source, "broker.md", "exec"), {})
    return out.getvalue()


def last_value(broker: KafkaBroker) -> bytes | None:
    """Return the value of the last record, as a consumer gets it."""
    consumer = Consumer({"bootstrap.servers": broker.bootstrap, "group.id": "guide"})
    try:
        consumer.assign([TopicPartition("orders", 0, 5)])
        message = consumer.poll(30)
        assert message is not None and message.error() is None
        return message.value()
    finally:
        consumer.close()
