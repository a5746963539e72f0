"""Make the groups that old brokers leave: `tests/unit/storage_engine/old-groups.tar.xz`.

`python -m tests.conformance.old_groups 0.10.2.2 2.8.2 ...` fetches the jars of each release with
Maven, and lets groups commit positions. `positions.json` has what the broker answered, by release:
{group: [offset, metadata]}.
"""

from __future__ import annotations

import json
import random
import sys
import tarfile
import tempfile
import time
from pathlib import Path
from typing import Any, Final

from confluent_kafka import Consumer, Producer, TopicPartition

from tests import ROOT
from tests.conformance.old_brokers import BROKERS, OldCluster

ARCHIVE: Final = ROOT / "tests/unit/storage_engine/old-groups.tar.xz"
TOPIC: Final = "plain"
_SECONDS: Final = 60


def committed(cluster: OldCluster, group: str, draw: random.Random, *, joins: bool) -> list[Any]:
    """Commit a few times, as a member of the group if it `joins`; return the last commit."""
    settings = {"group.id": group, "enable.auto.commit": False, "auto.offset.reset": "earliest"}
    consumer = Consumer(cluster.client(**settings))
    if joins:
        consumer.subscribe([TOPIC])
        while consumer.poll(_SECONDS) is None:
            continue
    for _ in range(3):
        offset = draw.randrange(20)
        position = TopicPartition(TOPIC, 0, offset, f"note {offset}")
        consumer.commit(offsets=[position], asynchronous=False)
    (answer,) = consumer.committed([TopicPartition(TOPIC, 0)], timeout=_SECONDS)
    consumer.close()
    return [answer.offset, answer.metadata]


def make(release: str, work: Path, archive: tarfile.TarFile) -> dict[str, list[Any]]:
    """Add the directories of a release to the archive; return the positions of its groups."""
    draw = random.Random(release)
    with OldCluster(release, work) as cluster:
        cluster.create(TOPIC, {})
        time.sleep(2)
        producer = Producer(cluster.client())
        for _ in range(20):
            producer.produce(TOPIC, b"x")
        producer.flush(_SECONDS)
        found = {
            f"group-{number}": committed(cluster, f"group-{number}", draw, joins=number == 3)
            for number in range(4)
        }
        time.sleep(2)
        for number in reversed(BROKERS):
            cluster.stop(number)
        root = cluster.log_dir(1)
        paths = [*root.glob("*-0/*.log"), root / "meta.properties", root / ".kafka_cleanshutdown"]
        for path in paths:
            if path.exists() and "__cluster_metadata" not in str(path):
                archive.add(path, f"{release}/{path.relative_to(root)}", filter=_plain)
    return found


def _plain(member: tarfile.TarInfo) -> tarfile.TarInfo:
    member.uid = member.gid = member.mtime = 0
    member.uname = member.gname = ""
    return member


def main() -> None:
    """Make the archive of the releases that the command line names."""
    with tempfile.TemporaryDirectory() as given, tarfile.open(ARCHIVE, "w:xz") as archive:
        work = Path(given)
        positions = {}
        for release in sys.argv[1:]:
            (work / release).mkdir()
            positions[release] = make(release, work / release, archive)
        (work / "positions.json").write_text(json.dumps(positions))
        archive.add(work / "positions.json", "positions.json", filter=_plain)
    print(ARCHIVE.stat().st_size, "bytes")


if __name__ == "__main__":
    main()
