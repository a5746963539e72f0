"""The disks of a killed cluster read as one log, beside what the cluster serves once it restarts.

Each seed is a death: brokers are killed under traffic, one of them first or all at once. A third of
the seeds lose a disk, another third have a torn one. Then the disks are copied, kafkalog reads the
copies, and the cluster starts on the disks. In CI a single death; all of them with
KAFKALOG_GROUPS=full (`make groups-test`), or those that KAFKALOG_SEEDS names.

A restarted cluster may elect any replica that was in sync, not only the one that kafkalog reads:

- a shorter one, so it serves a beginning of what kafkalog reads;
- one that has not truncated its log to that of the last leader. It serves a divergent tail, because
  followers fetch records before anything acknowledges them.

Whatever it serves is the log of one of the disks, and neither lacks an acknowledged record, unless
a disk was torn.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import pytest
from confluent_kafka import Consumer, TopicPartition

import kafkalog
from kafkalog.errors import StorageError
from kafkalog.inspection.verify import verify
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
SEEDS: Final = 30 if IS_FULL else 1
_CHOSEN: Final = os.environ.get("KAFKALOG_SEEDS", "")
"""Seeds to run in place of all, with commas between them; one may come again."""
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
    notices: Callable[[], str] = str
    """What kafkalog has logged."""

    @property
    def paths(self) -> list[Path]:
        """The disks that are left."""
        return [path for n, paths in self.disks.items() if n != self.lost for path in paths]

    def replicas(self, place: Partition) -> list[list[Record]]:
        """Return what each disk that is left has of a partition, read alone."""
        logs = []
        for number, paths in self.disks.items():
            if number != self.lost:
                with contextlib.suppress(StorageError), kafkalog.open(paths) as log:
                    logs.append(read(log, place, "read_uncommitted"))
        return logs


def die(cluster: KafkaCluster, seed: int, work: Path, notices: Callable[[], str]) -> Death:
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
            if draw.random() < 0.5:  # the one behind may lead; the third has a tail
                cluster.kill_ahead_of(*numbers[:2])
                cluster.wait_for_election(6)
            else:
                cluster.kill(numbers[:1])
                time.sleep(draw.uniform(0, 4))
        cluster.kill(cluster.nodes)
    lost, torn = (numbers[0] if seed % 3 == kind else 0 for kind in (1, 2))
    if torn:
        tear(cluster.nodes[torn].log_dir, draw)
    return Death(seed, cluster.copy_disks(work), traffic, lost, torn, notices=notices)


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


def agree(
    topic: str,
    one: list[Record],
    other: list[Record],
    end: int,
    aborted: Collection[bytes | None] = (),
) -> bool:
    """Return whether two logs of a partition are one below `end`.

    Each broker cleans a compacted topic on its own, so either may lack what is obsolete or was
    aborted.
    """
    below = [[each for each in log if each.offset < end] for log in (one, other)]
    if topic != COMPACTED:
        return below[0] == below[1]

    def has_all(wanted: list[Record], log: list[Record]) -> bool:
        newest = latest(each for each in log if each.value not in aborted)
        there = {*log}
        return all(
            each in there or (each.key in newest and newest[each.key].offset > each.offset)
            for each in wanted
            if each.value not in aborted
        )

    return has_all(below[0], other) and has_all(below[1], one)


def compare(death: Death, place: Partition, ours: list[Record], served: list[Record]) -> int:
    """Compare what both serve of a partition, and count how; return where the same log ends."""
    topic, number = place
    shown = f"seed {death.seed}, {place}"
    end = served[-1].offset + 1 if served else 0
    same, aborted = sys.maxsize, death.traffic.aborted
    if agree(topic, served, ours, end, aborted):
        death.counts["equal" if not ours or ours[-1].offset < end else "longer"] += 1
    else:
        logs = death.replicas(place)
        assert any(agree(topic, served, log, end, aborted) for log in logs), shown
        tail = rf"/{topic}-{number} has a divergent tail: its records from offset (\d+)"
        starts = [int(start) for start in re.findall(tail, death.notices())]
        assert starts, shown
        same = min(starts)
        assert agree(topic, served, ours, same, aborted), shown
        death.counts["the divergent tail of another replica"] += 1
    acknowledged = death.traffic.acknowledged.get(place, {})

    def lacking(log: list[Record]) -> list[int]:
        kept = {each.offset: each.value for each in log}
        if topic == COMPACTED:  # obsolete records may be gone
            return [offset for offset in acknowledged if offset > max(kept, default=-1)]
        return [offset for offset, value in acknowledged.items() if kept.get(offset) != value]

    if topic != SINGLE or not death.torn:  # no other replica has what the disk has lost
        assert not lacking(ours), shown
    if not death.torn:
        assert not lacking(served), shown
    death.counts["acknowledged, lost by Kafka"] += len(lacking(served))
    return same


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


def compare_committed(
    death: Death, topic: str, ours: list[Record], served: list[Record], same: int
) -> None:
    """Compare committed records, as far as both have decided about transactions."""
    if ours and served:
        end = min(ours[-1].offset + 1, served[-1].offset + 1, same)
        assert agree(topic, ours, served, end), (death.seed, topic)
        death.counts["committed"] += sum(each.offset < end for each in ours)


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


def check(cluster: KafkaCluster, seed: int, work: Path, notices: Callable[[], str]) -> Counter[str]:
    death = die(cluster, seed, work, notices)
    alive = [number for number in cluster.nodes if number != death.lost]
    for path in (death.disks[number][0] for number in alive if number != death.torn):
        assert not [found for found in verify(path, deep=True) if found.is_damage], seed
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
        same = compare(death, place, found[place], served[place])
        compare_committed(death, place[0], committed[place], decided[place], same)
        death.counts["records"] += len(found[place])
    if "__consumer_offsets" not in {topic for topic, _ in unled}:
        compare_groups(death, cluster)
    death.counts["divergent tails"] = len(re.findall("has a divergent tail", notices()))
    if death.lost:
        assert not cluster.start([death.lost])
    return death.counts


def keep_disks(cluster: KafkaCluster, work: Path) -> str:
    """Keep the disks of a death that failed where no later run removes them; say where."""
    cluster.kill(cluster.nodes)
    kept = Path(tempfile.mkdtemp(prefix="kafkalog-death-"))
    shutil.move(work, kept / "dead")
    shutil.copytree(cluster.directory, kept / "restarted")
    return f"the disks as they died are in {kept}/dead, those of the restart in {kept}/restarted"


def of(key: int, offset: int, value: bytes = b"") -> Record:
    return Record(offset, 0, record.CREATE_TIME, b"%d" % key, value or b"%d" % offset)


def test_a_log_that_lacks_what_is_obsolete_or_aborted_is_the_same_compacted_log() -> None:
    whole = [of(1, 0), of(2, 1), of(3, 2, b"aborted"), of(1, 3), of(2, 9)]
    cleaned = [whole[1], whole[3]]
    for pair in ((whole, cleaned), (cleaned, whole)):
        assert agree(COMPACTED, *pair, 4, [b"aborted"])
        assert not agree(COMPACTED, *pair, 4), "an aborted record that is not known as one"
        assert not agree(COMPACTED, *pair, 10, [b"aborted"]), "a latest record is not there"
        assert not agree(PLAIN, *pair, 4, [b"aborted"])


def test_the_divergent_tail_of_another_replica_is_not_the_same_log() -> None:
    before = [of(key, key) for key in range(20)]
    read_log = [*before, of(1, 20, b"new"), of(8, 21, b"new")]
    served = [*before, *(of(key, key + 20, b"%d" % key) for key in range(10))]
    for topic in (PLAIN, COMPACTED):
        assert agree(topic, served, read_log, 20)
        assert not agree(topic, served, read_log, 30)
        assert agree(topic, served, [*served, of(3, 40)], 30)
        assert not agree(topic, served, served[:-1], 30)


@pytest.mark.peers
@pytest.mark.slow
def test_a_dead_clusters_disks_are_what_the_restarted_cluster_serves(
    peers: None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    total: Counter[str] = Counter()
    seeds = [*map(int, _CHOSEN.split(","))] if _CHOSEN else range(SEEDS)
    with KafkaCluster(tmp_path / "cluster") as cluster:
        for number, seed in enumerate(seeds):
            work = tmp_path / f"death-{number}-of-seed-{seed}"
            try:
                counts = check(cluster, seed, work, lambda: caplog.text)
                caplog.clear()
            except Exception as failure:
                failure.add_note(f"seed {seed}: {keep_disks(cluster, work)}")
                raise
            print(f"seed {seed}:", dict(sorted(counts.items())), flush=True)
            total += counts
            shutil.rmtree(work)
    print("in all:", dict(sorted(total.items())))
    assert total["equal"] > 0
    assert total["records"] > 100 * len(seeds)
