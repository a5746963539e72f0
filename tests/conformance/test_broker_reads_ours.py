"""What a real Kafka makes of the files that kafkalog writes: its dump, its broker, its cleaner."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from confluent_kafka import Consumer, Producer, TopicPartition
from confluent_kafka.admin import AlterConfigOpType, ConfigEntry, ConfigResource, ResourceType

import kafkalog
from kafkalog.storage_engine.directory.directory_log import DirectoryLog
from kafkalog.storage_engine.format import layout
from kafkalog.storage_engine.ownership.release import release
from tests.conformance import our_log
from tests.conformance.kafka import CLEAN_SHUTDOWN, KafkaBroker, dump_log_segments
from tests.conformance.our_log import AWAY, BINARY, CLEANED, PARTITIONS, TOMBSTONES
from tests.conformance.record import DumpedRecord, Record, consumed, consumed_all, dumped
from tests.unit.storage_engine.times import offset_since

pytestmark = [pytest.mark.peers, pytest.mark.slow]

ALL = [(topic, number) for topic, count in PARTITIONS.items() for number in range(count)]
FINE = re.compile(
    "|".join(
        [
            r"Dumping \S+",
            r"\S+ is empty\.",
            r"Log starting offset: \d+",
            r"baseOffset: .* magic: 2 .* isvalid: true",
            r"\| offset: .*",
            r"offset: \d+ position: \d+",
            r"timestamp: \d+ offset: \d+",
        ]
    )
)
GAP = re.compile(r"Non-consecutive offsets in \S+|  -?\d+ is followed by \d+")
"""What the tool says of every gap, and of the first offset of a file, but for 0."""


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("ours") / "log"
    our_log.write(root)
    return root


@pytest.fixture(scope="module")
def copied(ours: Path) -> Path:
    """The log after a journey: from its directory to an object store, and back to another one."""
    root, store = ours.parent / "copied", f"memory://{ours.parent.name}"
    kafkalog.copy(ours, store, now_ms=our_log.NOW_MS)
    kafkalog.copy(store, root, now_ms=our_log.NOW_MS)
    return root


@pytest.fixture(scope="module")
def records(ours: Path) -> dict[tuple[str, int], list[Record]]:
    return {partition: our_log.read(ours, *partition) for partition in ALL}


def paths_of(root: Path, topic: str) -> list[Path]:
    suffixes = {".log", ".index", ".timeindex"}
    return sorted(path for path in root.glob(f"{topic}-[0-9]/*") if path.suffix in suffixes)


def findings(output: str) -> list[str]:
    """Return every line of a dump that does not say that all is well, or tells of a gap."""
    lines = [line for line in output.splitlines() if line]
    return [line for line in lines if not FINE.fullmatch(line) and not GAP.fullmatch(line)]


def topics_with_gaps(output: str) -> set[str]:
    """Return the topics of whose offsets the dump misses some."""
    topics, topic = set(), ""
    for line in filter(GAP.fullmatch, output.splitlines()):
        if not line.startswith(" "):
            topic = Path(line.split(" in ")[1]).parent.name.rpartition("-")[0]
        elif not line.startswith("  -1 "):
            topics.add(topic)
    return topics


# --- Kafka's dump of the files -------------------------------------------------------------------


@pytest.fixture(scope="module")
def dump(peers: None, ours: Path) -> str:
    topics = [topic for topic in PARTITIONS if topic != BINARY]
    paths = [path for topic in topics for path in paths_of(ours, topic)]
    return dump_log_segments(paths, "--deep-iteration", "--print-data-log")


def test_the_log_has_what_is_to_be_judged(ours: Path, dump: str) -> None:
    for codec in ("none", "gzip", "snappy", "lz4", "zstd"):
        assert f"compresscodec: {codec} " in dump
    assert "deleteHorizonMs: OptionalLong[" in dump
    assert "LogAppendTime: " in dump
    assert re.search(r"count: 0 .* isvalid: true", dump), "no empty batch"
    entries = re.findall(r"^(?:offset: \d+ position|timestamp: \d+ offset): \d+$", dump, re.M)
    assert len(entries) > 500
    for topic in CLEANED[:6]:
        assert len(list((ours / f"{topic}-0").glob("*.log"))) >= 3


def test_kafkas_dump_finds_no_fault_in_any_file(ours: Path, dump: str) -> None:
    # The tool wants a record for every time that is indexed, and a batch without records has none.
    # Kafka's own cleaner leaves the same bytes: see below.
    (without_records,) = (ours / f"{AWAY}-0").glob("*00000.timeindex")
    assert findings(dump) == [
        f"Found timestamp mismatch in :{without_records}",
        f"  Index timestamp: {our_log.NOW_MS + 50}, log timestamp: -1",
    ]
    assert topics_with_gaps(dump) == set(CLEANED) - {AWAY, TOMBSTONES}


def test_kafkas_dump_finds_no_fault_in_binary_data(peers: None, ours: Path) -> None:
    assert findings(dump_log_segments(paths_of(ours, BINARY), "--deep-iteration")) == []


def test_kafkas_dump_finds_no_fault_in_a_copy_by_way_of_a_store(peers: None, copied: Path) -> None:
    paths = [path for topic in {*PARTITIONS} - {AWAY} for path in paths_of(copied, topic)]
    assert findings(dump_log_segments(paths, "--deep-iteration")) == []


def test_kafkas_dump_finds_no_fault_in_segments_that_the_cleaner_has_closed(
    peers: None, tmp_path: Path
) -> None:
    with kafkalog.open(tmp_path / "log") as log:
        log.create_topic("t")
        for _ in range(3):
            log.append("t", [(f"k{number % 50}", "v" * 1000) for number in range(150)])
            (stats,) = log.clean()
            assert (stats.error, stats.rounds) == (None, 1)
    release(tmp_path / "log", now_ms=our_log.NOW_MS)
    found = paths_of(tmp_path / "log", "t")
    assert len(found) == 6  # a clean segment, and an active one
    assert findings(dump_log_segments(found, "--deep-iteration")) == []


def test_kafkas_indexes_pass_their_sanity_check(peers: None, ours: Path) -> None:
    paths = [path for topic in PARTITIONS for path in paths_of(ours, topic)]
    indexes = [path for path in paths if path.suffix != ".log"]
    output = dump_log_segments(indexes, "--index-sanity-check")
    found = re.findall(r"^(\S+) (?:passed sanity check|is empty)\.$", output, re.M)
    assert sorted(map(Path, found)) == sorted(indexes)


def test_kafkas_dump_prints_the_records_that_kafkalog_reads(
    dump: str, records: dict[tuple[str, int], list[Record]]
) -> None:
    by_partition: dict[str, list[DumpedRecord]] = {}
    for path, found in sorted(dumped(dump).items()):
        by_partition.setdefault(path.parent.name, []).extend(found)
    for (topic, number), expected in records.items():
        if topic == BINARY:
            continue
        assert by_partition.get(f"{topic}-{number}", []) == [
            DumpedRecord(*record[:5], tuple(name for name, _ in record.headers))
            for record in expected
        ]


@pytest.mark.parametrize(
    ("suffix", "position", "finding"),
    [
        (".index", 3, "Mismatches in"),
        (".timeindex", 7, "Found timestamp mismatch in"),
        (".log", 20, "isvalid: false"),
    ],
)
def test_kafkas_dump_finds_what_is_damaged(
    peers: None, ours: Path, tmp_path: Path, suffix: str, position: int, finding: str
) -> None:
    source = next(
        path
        for path in sorted((ours / "written-uncompressed-0").glob("*" + suffix))
        if path.stat().st_size >= 24
    )
    for path in source.parent.glob(source.stem + ".*"):
        shutil.copy(path, tmp_path)
    damaged = tmp_path / source.name
    data = bytearray(damaged.read_bytes())
    data[position] ^= 1
    damaged.write_bytes(data)
    found = findings(dump_log_segments([damaged], "--deep-iteration"))
    assert found
    assert finding in found[0]


# --- a broker that is given the directories ------------------------------------------------------


def mount(broker: KafkaBroker, root: Path) -> None:
    """Release a copy of our log, with the ids the broker gave its topics, in the directory's place.

    What else the broker keeps there moves in.
    """
    place, copy = broker.log_dir, root.parent / "released"
    shutil.copytree(root, copy)
    ids = {topic: topic_id(place / f"{topic}-0") for topic in PARTITIONS}
    report = release(
        copy, topic_ids=ids, meta_properties=place / layout.META_PROPERTIES, now_ms=our_log.NOW_MS
    )
    assert report.has_broker
    assert report.partitions == len(ALL)
    ours = {path.name for path in copy.iterdir()}
    for path in place.iterdir():
        if path.is_dir() and path.name not in ours:
            path.rename(copy / path.name)
    shutil.rmtree(place)
    copy.rename(place)


def topic_id(directory: Path) -> str:
    lines = (directory / "partition.metadata").read_text().splitlines()
    return next(line.removeprefix("topic_id: ") for line in lines if line.startswith("topic_id"))


@pytest.fixture(scope="module")
def mounted(kafka: KafkaBroker, copied: Path) -> Iterator[KafkaBroker]:
    """The broker has the copy, as after a clean shutdown."""
    for topic, count in PARTITIONS.items():
        policy = "compact" if topic in CLEANED else "delete"
        # Nothing is to be deleted or cleaned before a test wants it.
        config = {"retention.ms": "-1", "min.cleanable.dirty.ratio": "1"}
        config |= {"index.interval.bytes": our_log.INDEX_INTERVAL}
        kafka.create_topic(topic, count, {"cleanup.policy": policy, **config})
    kafka.stop()
    assert (kafka.log_dir / CLEAN_SHUTDOWN).exists()
    mount(kafka, copied)
    kafka.start()
    yield kafka


def assert_consumed(broker: KafkaBroker, records: dict[tuple[str, int], list[Record]]) -> None:
    for committed in (True, False):
        found = consumed_all(broker.bootstrap, dict.fromkeys(records, 0), committed=committed)
        assert found == records


def test_a_consumer_gets_the_records_that_kafkalog_reads(
    mounted: KafkaBroker, records: dict[tuple[str, int], list[Record]]
) -> None:
    assert_consumed(mounted, records)


def test_a_consumer_may_begin_anywhere(
    mounted: KafkaBroker, records: dict[tuple[str, int], list[Record]]
) -> None:
    for topic in ("written-zstd", "cleaned-uncompressed"):
        expected = records[topic, 0]
        for start in range(0, expected[-1].offset, 67):
            found = consumed(mounted.bootstrap, topic, 0, start=start)
            assert found == [record for record in expected if record.offset >= start]


def test_a_broker_sees_where_each_partition_begins_and_ends(
    mounted: KafkaBroker, ours: Path
) -> None:
    consumer = Consumer({"bootstrap.servers": mounted.bootstrap, "group.id": "tests"})
    try:
        with DirectoryLog(ours, read_only=True) as log:
            for topic, number in ALL:
                found = consumer.get_watermark_offsets(TopicPartition(topic, number), 30)
                assert found == log.offsets(topic)[number]
    finally:
        consumer.close()


@pytest.fixture(scope="module")
def recovered(mounted: KafkaBroker, ours: Path) -> KafkaBroker:
    """The broker has checked every segment and rebuilt every index, as after a power cut."""
    mounted.stop()
    mount(mounted, ours)
    # Without the last one it also cleans what we have cleaned.
    for name in (CLEAN_SHUTDOWN, "recovery-point-offset-checkpoint", "cleaner-offset-checkpoint"):
        (mounted.log_dir / name).unlink()
    before = mounted.output.stat().st_size
    mounted.start()
    output = mounted.output.read_text(errors="replace")[before:]
    assert "Recovering unflushed segment" in output
    return mounted


def test_a_broker_that_recovers_keeps_every_record(
    recovered: KafkaBroker, records: dict[tuple[str, int], list[Record]]
) -> None:
    assert_consumed(recovered, records)


@pytest.mark.parametrize("suffix", [".index", ".timeindex"])
def test_a_broker_rebuilds_the_indexes_that_kafkalog_wrote(
    recovered: KafkaBroker, ours: Path, suffix: str
) -> None:
    count = 0
    for topic, number in ALL:
        directory = ours / f"{topic}-{number}"
        *closed, active = sorted(path.stem for path in directory.glob("*.log"))
        rebuilt = recovered.log_dir / directory.name
        for base in closed:
            data = (directory / (base + suffix)).read_bytes()
            assert (rebuilt / (base + suffix)).read_bytes() == data
            count += len(data)
        # The broker's last one has room for more, and the last time, which we add at a roll.
        if (directory / (active + suffix)).exists():
            data = (directory / (active + suffix)).read_bytes()
            assert (rebuilt / (active + suffix)).read_bytes().startswith(data)
    assert count > 2000


@pytest.mark.parametrize("topic", ["written-gzip", "cleaned-lz4", "stamped", AWAY, "empty"])
def test_offsets_for_times_are_the_same(recovered: KafkaBroker, ours: Path, topic: str) -> None:
    consumer = Consumer({"bootstrap.servers": recovered.bootstrap, "group.id": "tests"})
    try:
        with DirectoryLog(ours, read_only=True) as log, log.snapshot(topic, 0) as snapshot:
            for timestamp in range(our_log.NOW_MS - 6000, our_log.NOW_MS + 150_000, 997):
                (found,) = consumer.offsets_for_times([TopicPartition(topic, 0, timestamp)], 30)
                offset = None if found.offset < 0 else found.offset
                assert offset == offset_since(snapshot, timestamp), timestamp
    finally:
        consumer.close()


def alter(broker: KafkaBroker, topic: str, config: dict[str, str]) -> None:
    """Set configs of a topic."""
    entries = [
        ConfigEntry(name, value, incremental_operation=AlterConfigOpType.SET)
        for name, value in config.items()
    ]
    resource = ConfigResource(ResourceType.TOPIC, topic, incremental_configs=entries)
    for future in broker.admin.incremental_alter_configs([resource]).values():
        future.result(120)


def cleaned_to(broker: KafkaBroker, topic: str) -> int:
    """Return a topic's first dirty offset of partition 0, as the broker has recorded it."""
    path = broker.log_dir / "cleaner-offset-checkpoint"
    entries = [line.split() for line in path.read_text().splitlines()] if path.exists() else []
    return next((int(entry[2]) for entry in entries if entry[:2] == [topic, "0"]), -1)


@pytest.fixture(scope="module")
def cleaned(recovered: KafkaBroker, ours: Path) -> KafkaBroker:
    """The broker has cleaned what we wrote and cleaned."""
    for topic in CLEANED:
        alter(recovered, topic, {"segment.ms": "1000", "delete.retention.ms": "0"})
    producer = Producer({"bootstrap.servers": recovered.bootstrap})
    for topic in CLEANED:
        if topic != TOMBSTONES:
            # It closes the active segment, which no cleaner touches; that of TOMBSTONES is empty.
            producer.produce(topic, b"kafka's", b"key-0")
    assert producer.flush(30) == 0
    for topic in CLEANED:
        alter(recovered, topic, {"min.cleanable.dirty.ratio": "0"})
    with DirectoryLog(ours, read_only=True) as log:
        ends = {topic: log.offsets(topic)[0][1] for topic in CLEANED}
    recovered.wait_until(lambda: all(cleaned_to(recovered, t) >= end for t, end in ends.items()))
    return recovered


def test_the_brokers_cleaner_goes_over_our_files_without_a_fault(cleaned: KafkaBroker) -> None:
    output = cleaned.output.read_text(errors="replace")
    assert "Starting the log cleaner" in output
    assert [
        line for line in output.splitlines() if "ncleanable" in line or "CorruptR" in line
    ] == []


@pytest.mark.parametrize("topic", [topic for topic in CLEANED if topic != TOMBSTONES])
def test_the_broker_keeps_the_latest_record_of_every_key(
    cleaned: KafkaBroker, records: dict[tuple[str, int], list[Record]], topic: str
) -> None:
    before = records[topic, 0]
    *survivors, new = consumed(cleaned.bootstrap, topic, 0)
    assert (new.key, new.value) == (b"key-0", b"kafka's")
    assert set(survivors) <= set(before)
    latest = {record.key: record for record in before}
    kept = [record for record in latest.values() if record.value is not None]
    assert [record for record in survivors if record.value is not None] == sorted(kept)


def test_kafkas_cleaner_and_ours_leave_the_same_bytes_of_a_log_without_records(
    cleaned: KafkaBroker, ours: Path
) -> None:
    assert consumed(cleaned.bootstrap, TOMBSTONES, 0) == []
    for suffix in (".log", ".timeindex"):
        name = f"{0:020d}{suffix}"
        by_kafka = (cleaned.log_dir / f"{TOMBSTONES}-0" / name).read_bytes()
        assert by_kafka
        assert by_kafka == (ours / f"{AWAY}-0" / name).read_bytes()
