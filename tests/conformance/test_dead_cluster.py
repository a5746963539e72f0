"""The disks of a killed cluster read as one log, beside what the cluster serves once it restarts.

Each seed is a death: brokers are killed under traffic, one of them first or all at once. A third of
the seeds lose a disk, another third have a torn one. Then the disks are copied, kafkalog reads the
copies, and the cluster starts on the disks. In CI a single death; all of them with
KAFKALOG_GROUPS=full (`make groups-test`).

A restarted cluster may elect a replica that is shorter than the one that kafkalog reads. What it
serves is then a beginning of it, and nothing acknowledged is in the rest, unless a disk was torn.
"""

from __future__ import annotations

import os
import random
import shutil
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import pytest
from confluent_kafka import Consumer, TopicPartition

import kafkalog
from kafkalog.errors import StorageError
from kafkalog.log import KafkaLog
from tests.conformance import record
from tests.conformance.clients import Partition
from tests.conformance.kafka_cluster import (
    BROKERS,
    COMPACTED,
    FAST,
    GROUP,
    PARTITIONS,
    PLAIN,
    SINGLE,
    KafkaCluster,
    Traffic,
)
from tests.conformance.record import Record

IS_FULL: Final = os.environ.get("KAFKALOG_GROUPS") == "full"
pytestmark = [
    pytest.mark.peers,
    pytest.mark.slow,
    pytest.mark.skipif(not IS_FULL, reason="runs with make groups-test, on an idle machine"),
]
SEEDS: Final = 30
FIRST: Final = int(os.environ.get("KAFKALOG_SEED", "0"))
_TORN_BYTES: Final = 3000
_STILL_SECONDS: Final = 3
"""Twice `replica.lag.time.max.ms`."""


@dataclass
class Death:
    """One death of a cluster: its disks, and what must be on them."""

    seed: int
    disks: dict[int, list[Path]]
    traffic: Traffic
    lost: int = 0
    torn: int = 0
    counts: Counter[str] = field(default_factory=Counter)

    @property
    def paths(self) -> list[Path]:
        """The disks that are left."""
        return [path for n, paths in self.disks.items() if n != self.lost for path in paths]


def die(cluster: KafkaCluster, seed: int, work: Path) -> Death:
    draw = random.Random(seed)
    traffic = Traffic(cluster, seed)
    numbers = draw.sample(range(1, BROKERS + 1), BROKERS)
    with traffic.running():
        deadline = time.monotonic() + 60
        while not traffic.has_begun():
            assert time.monotonic() < deadline, "the cluster acknowledges nothing"
            time.sleep(0.05)
        time.sleep(draw.uniform(0.5, 3))
        if draw.random() < 0.6:
            cluster.kill(numbers[:1])
            time.sleep(draw.uniform(0, 4))
        cluster.kill(cluster.nodes)
    lost, torn = (numbers[0] if seed % 3 == kind else 0 for kind in (1, 2))
    if torn:
        tear(cluster.nodes[torn].log_dir, draw)
    return Death(seed, cluster.copy_disks(work), traffic, lost, torn)


def tear(disk: Path, draw: random.Random) -> None:
    """Cut bytes off the ends of logs, or make them zeros, as a power cut does."""
    for log in sorted(disk.glob("*/*.log")):
        size = log.stat().st_size
        if size and log == max(log.parent.glob("*.log")):
            cut = draw.randrange(min(size, _TORN_BYTES))
            with log.open("r+b") as file:
                file.truncate(size - cut)
                file.seek(0, os.SEEK_END)
                file.write(bytes(draw.choice((0, cut))))


def read(log: KafkaLog, place: Partition, isolation_level: str) -> list[Record]:
    batches = log.read(*place, isolation_level=isolation_level, include_headers=True)
    return record.of_kafkalog(batches)


def latest(records: Iterable[Record]) -> dict[bytes | None, Record]:
    return {each.key: each for each in records}


def compare(death: Death, place: Partition, ours: list[Record], served: list[Record]) -> None:
    """Compare what both serve of a partition, and count how."""
    topic, _ = place
    shown = f"seed {death.seed}, {place}"
    end = served[-1].offset + 1 if served else 0
    common = [each for each in ours if each.offset < end]
    if topic == COMPACTED:  # each broker cleans on its own
        later = latest(ours)
        wanted = {key: each for key, each in later.items() if each.offset < end}
        found = latest(served)
        assert {key: found.get(key) for key in wanted} == wanted, shown
    else:
        assert common == served, shown
    rest = [each for each in ours if each.offset >= end]
    death.counts["equal" if not rest else "longer"] += 1
    acknowledged = death.traffic.acknowledged.get(place, {})
    kept = {each.offset: each.value for each in ours}
    missing = {
        offset: value
        for offset, value in acknowledged.items()
        if kept.get(offset) != value and topic != COMPACTED
    }
    if topic != SINGLE or not death.torn:  # no other replica has what the disk has lost
        assert not missing, shown
    refused = [each.offset for each in rest if each.offset in acknowledged]
    if not death.torn:
        assert not refused, shown
    death.counts["acknowledged, lost by Kafka"] += len(refused)


def compare_groups(death: Death, cluster: KafkaCluster) -> None:
    places = [TopicPartition(*place) for place in death.traffic.positions]
    consumer = Consumer({"bootstrap.servers": cluster.bootstrap, "group.id": GROUP})
    answer = consumer.committed(places, timeout=60)
    consumer.close()
    served = {(each.topic, each.partition): each.offset for each in answer}
    found = kafkalog.group_offsets(death.paths, GROUP)
    ours = {(t, p): offset for t, each in found.items() for p, offset in each.items()}
    for place in death.traffic.positions:
        may_be = death.traffic.tried[place]
        assert ours.get(place) in may_be, (death.seed, place)
        if not death.torn:
            assert served[place] in may_be, (death.seed, place)
        death.counts["positions"] += 1
        death.counts["equal positions"] += ours[place] == served[place]


def compare_committed(death: Death, ours: list[Record], served: list[Record]) -> None:
    """Compare committed records, as far as both have decided about transactions."""
    if ours and served:
        last = min(ours[-1].offset, served[-1].offset)
        decided = [[each for each in found if each.offset <= last] for found in (ours, served)]
        assert decided[0] == decided[1], death.seed
        death.counts["committed"] += len(decided[0])


def wait_for_followers(cluster: KafkaCluster, places: Iterable[Partition]) -> None:
    """Wait until no high watermark moves any more.

    A leader that comes back serves records only up to its checkpointed high watermark, until its
    followers have fetched or have left the in-sync replicas.
    """
    consumer = Consumer({"bootstrap.servers": cluster.bootstrap, "group.id": "watermarks"})
    before: object = None
    now: object = ()
    while now != before:
        before = now
        time.sleep(_STILL_SECONDS)
        now = {
            place: consumer.get_watermark_offsets(TopicPartition(*place), timeout=60)
            for place in places
        }
    consumer.close()


def check(cluster: KafkaCluster, seed: int, work: Path) -> Counter[str]:
    death = die(cluster, seed, work)
    alive = [number for number in cluster.nodes if number != death.lost]
    with kafkalog.open(death.paths) as log:
        topics = (PLAIN, FAST, COMPACTED, SINGLE)
        places = [(topic, n) for topic in topics for n in log.describe(topic).numbers()]
        found = {}
        for place in places:
            try:
                found[place] = read(log, place, "read_uncommitted")
            except StorageError as fault:  # the only replica was torn
                assert death.torn and place[0] == SINGLE and "are lost" in str(fault), seed
                death.counts["torn logs without another replica, named"] += 1
        places = [*found]
        committed = {place: read(log, place, "read_committed") for place in places}
    kafkalog.copy(death.paths, work / "copied", topics=[PLAIN])
    with kafkalog.open(work / "copied", read_only=True) as one:
        for place in places[:PARTITIONS]:
            assert read(one, place, "read_committed") == committed[place], (seed, place)
    if death.lost:
        death.counts["partitions not here"] = len(topics) * PARTITIONS - len(places)
    unled = cluster.start(alive, 20 if death.lost else 60)  # whoever was in sync is not here
    assert not unled or death.lost
    death.counts["partitions that Kafka does not serve"] = len({*places} & unled)
    starts = dict.fromkeys(set(places) - unled, 0)
    wait_for_followers(cluster, starts)
    served = record.consumed_all(cluster.bootstrap, starts, committed=False)
    decided = record.consumed_all(cluster.bootstrap, starts)
    for place in starts:
        compare(death, place, found[place], served[place])
        if place[0] != COMPACTED:
            compare_committed(death, committed[place], decided[place])
        death.counts["records"] += len(found[place])
    if "__consumer_offsets" not in {topic for topic, _ in unled}:
        compare_groups(death, cluster)
    if death.lost:
        assert not cluster.start([death.lost])
    return death.counts


def test_a_dead_clusters_disks_are_what_the_restarted_cluster_serves(
    peers: None, tmp_path: Path
) -> None:
    total: Counter[str] = Counter()
    with KafkaCluster(tmp_path / "cluster") as cluster:
        for seed in range(FIRST, FIRST + SEEDS):
            work = tmp_path / f"seed-{seed}"
            counts = check(cluster, seed, work)
            print(f"seed {seed}:", dict(sorted(counts.items())), flush=True)
            total += counts
            shutil.rmtree(work)
    print("in all:", dict(sorted(total.items())))
    assert total["equal"] > 0
    assert total["records"] > 100 * SEEDS
