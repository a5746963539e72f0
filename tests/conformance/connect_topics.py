"""Remake what Kafka Connect writes to its topics: `tests/unit/values/connect_topics.txt`.

`python -m tests.conformance.connect_topics 4.3.1` fetches the jars of a release with Maven, and
starts a worker beside a broker. A connector that reads a file runs for a while.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import kafkalog
from tests import ROOT
from tests.conformance.kafka import KafkaBroker, free_ports
from tests.conformance.old_brokers import fetched, wait

TARGET: Final = ROOT / "tests/unit/values/connect_topics.txt"
TOPICS: Final = ("connect-configs", "connect-offsets", "connect-status")
_FILE_SOURCE: Final = "org.apache.kafka.connect.file.FileStreamSourceConnector"
_SETTINGS: Final = {
    "group.id": "connect",
    "key.converter": "org.apache.kafka.connect.storage.StringConverter",
    "value.converter": "org.apache.kafka.connect.storage.StringConverter",
    "config.storage.topic": "connect-configs",
    "offset.storage.topic": "connect-offsets",
    "status.storage.topic": "connect-status",
    "config.storage.replication.factor": "1",
    "offset.storage.replication.factor": "1",
    "status.storage.replication.factor": "1",
    "offset.storage.partitions": "1",
    "status.storage.partitions": "1",
    "offset.flush.interval.ms": "1000",
}


def _answer(url: str, sent: Mapping[str, object] | None = None) -> object:
    data = None if sent is None else json.dumps(sent).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=30) as answer:
        return json.load(answer)


def _answers(url: str) -> bool:
    try:
        return _answer(url) is not None
    except (urllib.error.URLError, OSError):
        return False


def make(jars: Path, work: Path) -> list[str]:
    """Return the records of Connect's topics: topic, key, value, as JSON strings."""
    (port,) = free_ports(1)
    url = f"http://127.0.0.1:{port}/connectors"
    with KafkaBroker(work / "broker") as broker:
        broker.create_topic("lines")
        configs = {**_SETTINGS, "bootstrap.servers": broker.bootstrap, "listeners": url[:-11]}
        properties = work / "connect.properties"
        properties.write_text("".join(f"{name}={value}\n" for name, value in configs.items()))
        main = "org.apache.kafka.connect.cli.ConnectDistributed"
        with (work / "out").open("wb") as out:
            worker = subprocess.Popen(
                ["java", "-Xmx400m", "-cp", f"{jars}/*", main, str(properties)],
                stdout=out,
                stderr=out,
            )
        try:
            wait(lambda: _answers(url), 120)
            (work / "lines").write_text("one\ntwo\n")
            source = {"connector.class": _FILE_SOURCE, "topic": "lines"}
            _answer(url, {"name": "lines", "config": {**source, "file": str(work / "lines")}})
            time.sleep(20)
            with (work / "lines").open("a") as file:
                file.write("three\n")
            time.sleep(10)
        finally:
            worker.kill()
            worker.wait()
        broker.kill()
        root = next(path for path in (work / "broker").glob("log*"))
        with kafkalog.open(root, read_only=True) as log:
            return [
                json.dumps([topic, row["key"].decode(), row["value"].decode()])
                for topic in TOPICS
                for batch in log.read(topic)
                for row in batch.to_pylist()
                if row["key"] != b"session-key"  # a secret of the worker
            ]


def main() -> None:
    """Write the lines of the release that the command line names."""
    with tempfile.TemporaryDirectory() as work:
        names = ("connect-runtime", "connect-file")
        wanted = [("org.apache.kafka", name, sys.argv[1]) for name in names]
        jars = fetched(wanted, Path(work) / "jars")
        lines = make(jars, Path(work))
        TARGET.write_text("\n".join(line.replace(work, "/data") for line in lines) + "\n")


if __name__ == "__main__":
    main()
