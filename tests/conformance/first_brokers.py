"""Make the directories of brokers of Kafka 0.8, for which there are no clients but its own.

`python -m tests.conformance.first_brokers 0.8.2.2` does for it what `old_brokers` does for later
releases. All messages are v0, which have no times: retention goes by the files. The offsets are
those that the release's own kafka.tools.DumpLogSegments prints of the leader's files.
"""

from __future__ import annotations

import json
import random
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import Final

from tests.conformance.old_brokers import BROKERS, OldCluster, archive, main

_PRODUCER: Final = Path(__file__).with_name("FirstProducer.java")
_CODECS: Final = ("none", "gzip", "snappy", "lz4")
_SMALL: Final = {"segment.bytes": "2500", "index.interval.bytes": "100"}
_KEPT: Final = {**_SMALL, "retention.ms": str(10**12)}
_TOPICS: Final = {
    "plain": _KEPT,
    "table": {
        **_SMALL,
        "cleanup.policy": "compact",
        "min.cleanable.dirty.ratio": "0.01",
        "delete.retention.ms": "100",
    },
    "expired": {**_SMALL, "retention.ms": "3000"},
    "sized": {**_KEPT, "retention.bytes": "6000"},
    "idle": {},
}
_OFFSET: Final = re.compile(r"^offset: (\d+) ", re.MULTILINE)


class FirstCluster(OldCluster):
    """Two brokers of Kafka 0.8."""

    def settings(self, number: int) -> dict[str, str]:
        """Return a broker's configs; listeners came later."""
        more = {"host.name": "127.0.0.1", "port": str(self.ports[number - 1])}
        return super().settings(number) | more

    def are_up(self) -> bool:
        """Return whether both brokers have told ZooKeeper of themselves."""
        return self._is_done("--create", "--topic=gone", *self._sizes)

    def create(self, topic: str, config: dict[str, str]) -> None:
        """Create a topic with two replicas."""
        options = [f"--config={name}={value}" for name, value in config.items()]
        assert self._is_done("--create", f"--topic={topic}", *self._sizes, *options)

    _sizes = ("--partitions=1", "--replication-factor=2")

    def _is_done(self, *arguments: str) -> bool:
        keeper = f"--zookeeper=127.0.0.1:{self.control}"
        return self.java("kafka.admin.TopicCommand", keeper, *arguments).wait(60) == 0

    def write(self, rounds: int, seed: int) -> None:
        """Write with each codec to every topic but the idle one."""
        draw = random.Random(seed)
        lines = [
            f"{topic} {codec} {_key(draw)} {_value(draw)}\n"
            for _ in range(rounds)
            for codec in _CODECS
            for topic in _TOPICS.keys() - {"idle"}
            for _ in range(draw.randrange(3, 12))
        ]
        command = ["java", "-cp", f"{self.jars}/*", str(_PRODUCER), self.bootstrap]
        subprocess.run(command, input="".join(lines), text=True, check=True, cwd=self.work)

    def dumped(self, root: Path) -> dict[str, list[tuple[int, int]]]:
        """Return the offset of each record in a directory, with no time, by topic."""
        found: dict[str, list[tuple[int, int]]] = {}
        for topic in _TOPICS:
            logs = ",".join(map(str, sorted((root / f"{topic}-0").glob("*.log"))))
            tool = "kafka.tools.DumpLogSegments", "--deep-iteration", "--files", logs
            out = subprocess.run(
                ["java", "-cp", f"{self.jars}/*", *tool], capture_output=True, text=True, check=True
            )
            found[topic] = [(int(offset), -1) for offset in _OFFSET.findall(out.stdout)]
        return found


def _key(draw: random.Random) -> str:
    return (b"key-%d" % draw.randrange(25)).hex()


def _value(draw: random.Random) -> str:
    return draw.choice(("-", "00", (b"v" * draw.randrange(1, 100)).hex(), (b"text " * 9).hex()))


def make(release: str, work: Path) -> None:
    """Write the archive of a release."""
    made = work / "made"
    with FirstCluster(release, work) as cluster:
        for topic, config in _TOPICS.items():
            cluster.create(topic, config)
        time.sleep(3)
        cluster.write(4, 1)
        cluster.stop(2, signal.SIGKILL)
        time.sleep(6)
        cluster.write(3, 2)
        cluster.start(2)
        time.sleep(8)
        cluster.write(3, 3)
        time.sleep(4)
        for number in reversed(BROKERS):
            cluster.stop(number)
            shutil.copytree(cluster.log_dir(number), made / f"stopped-{number}")
        records = {"uncommitted": cluster.dumped(made / "stopped-1")}
        for number in BROKERS:
            cluster.start(number)
        time.sleep(6)
        cluster.write(2, 4)
        time.sleep(3)
        for number in BROKERS:
            cluster.stop(number, signal.SIGKILL)
        shutil.copytree(cluster.log_dir(1), made / "killed-1")
    (made / "records.json").write_text(json.dumps(records, separators=(",", ":")))
    archive(release, made)


if __name__ == "__main__":
    main(make)
