"""One directory, by turns a broker's and ours, with clients that stay all the time.

The passages: the broker is stopped in good order; it is killed, with batches on their way; and the
processes that adopt and release are killed themselves. Each time kafkalog reads all, writes more,
cleans, and gives the directory back.
"""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import pyarrow as pa
import pytest
from confluent_kafka.admin import AlterConfigOpType, ConfigEntry, ConfigResource, ResourceType

import kafkalog
from kafkalog.errors import LockedByBrokerError
from kafkalog.log import KafkaLog
from kafkalog.storage_engine.format import layout
from kafkalog.storage_engine.ownership.adopt import adopt
from kafkalog.storage_engine.ownership.release import release
from kafkalog.storage_engine.place import directory_log_of
from tests.conformance import passage
from tests.conformance.clients import (
    OUT_OF_ORDER_SEQUENCE,
    Follower,
    HandDriven,
    Partition,
    Sender,
    Sent,
    transaction,
)
from tests.conformance.kafka import KafkaBroker, dump_log_segments
from tests.conformance.record import Record, consumed_all, of_kafkalog

pytestmark = [pytest.mark.peers, pytest.mark.slow]

JOURNAL, LEDGER, PAYMENTS, MIRROR, BY_HAND = "journal", "ledger", "payments", "mirror", "by-hand"
PLACES = [(JOURNAL, 0), (JOURNAL, 1), (LEDGER, 0), (LEDGER, 1), (PAYMENTS, 0), (BY_HAND, 0)]
_FOREVER = {"retention.ms": "-1", "index.interval.bytes": "300", "cleanup.policy": "delete"}
_COMPACTED = {"cleanup.policy": "compact", "min.cleanable.dirty.ratio": "1"}
CONFIG = {
    JOURNAL: _FOREVER,
    # It is cleaned when the tests say so.
    LEDGER: {**_FOREVER, **_COMPACTED, "segment.ms": "60000", "delete.retention.ms": "0"},
    PAYMENTS: _FOREVER,
    MIRROR: _FOREVER,
    BY_HAND: _FOREVER,
}
# A broker forgets producers whose last record is more than a day old.
NOW_MS = passage.now_ms() - 3_600_000


class World:
    """A broker, the clients that stay with it, and what everybody has written."""

    def __init__(self, broker: KafkaBroker, stack: ExitStack) -> None:
        self.broker = broker
        self.root = broker.log_dir
        self.draw = random.Random(6)
        self.now_ms = NOW_MS
        self.count = 0
        self.ours: dict[Partition, dict[int, Sent]] = {}
        self.by_hand_written: dict[Partition, dict[int, Sent]] = {}
        # Over a restart Kafka remembers the last batch of a producer alone, so no more than one may
        # be without its acknowledgement when the broker is killed.
        one = {"max_in_flight_requests_per_connection": 1, "batch_num_messages": 50}
        self.plain = Sender(broker, enable_idempotence=True, compression_type="lz4", **one)
        self.payer = Sender(broker, transactional_id="payer", transaction_timeout_ms=600_000)
        self.other_payer = Sender(broker, transactional_id="other", compression_type="zstd")
        self.by_hand = stack.enter_context(HandDriven(broker))
        self.sequence = 0
        self.followers = {
            "group": Follower(broker, PLACES, group="group"),
            "committed": Follower(broker, PLACES),
            "uncommitted": Follower(broker, PLACES, committed=False),
        }
        # It stays away for the first two passages. What it has not read is not to be cleaned.
        self.sleeper = Follower(broker, [p for p in PLACES if p[0] != LEDGER], group="sleeper")
        for follower in [*self.followers.values(), self.sleeper]:
            stack.callback(follower.close)

    # --- writing through the broker --------------------------------------------------------------

    def record(self) -> tuple[bytes, bytes]:
        """Return a key of few, and a value that was never there before."""
        self.count += 1
        return b"key-%d" % self.draw.randrange(40), b"%d " % self.count + self.draw.randbytes(30)

    def send(self, sender: Sender, topic: str, count: int) -> None:
        for _ in range(count):
            key, value = self.record()
            partition = self.draw.randrange(2 if topic in {JOURNAL, LEDGER} else 1)
            time_ms = self.now_ms + self.draw.randrange(1000)
            sender.send(topic, value, key, partition=partition, timestamp=time_ms)

    def send_by_hand(self) -> None:
        """Send the next three records of BY_HAND, with the sequences that are due."""
        values = [self.record()[1] for _ in range(3)]
        code, offset = self.by_hand.send(BY_HAND, values, self.sequence)
        assert (code, offset >= 0) == (0, True)
        self.last_by_hand = values, self.sequence, offset
        self.sequence += 3
        written = self.by_hand_written.setdefault((BY_HAND, 0), {})
        written.update({offset + n: Sent(None, value) for n, value in enumerate(values)})

    def produce(self) -> None:
        """Everybody writes; the times of two rounds are further apart than `segment.ms`."""
        self.now_ms += 120_000
        for _ in range(4):
            self.send(self.plain, JOURNAL, 60)
            self.send(self.plain, LEDGER, 60)
            self.plain.flush()
            with transaction(self.other_payer, abort=self.draw.random() < 0.5):
                self.send(self.other_payer, PAYMENTS, 15)
                self.send(self.other_payer, JOURNAL, 5)
            self.send_by_hand()

    # --- writing as the owner --------------------------------------------------------------------

    def append(self, log: KafkaLog) -> None:
        """Append to every topic but those whose sequences a test counts."""
        self.now_ms += 120_000
        for topic in (JOURNAL, LEDGER, PAYMENTS, BY_HAND):
            for _ in range(3):
                rows = [self.record() for _ in range(40)]
                count = 2 if topic in {JOURNAL, LEDGER} else 1
                numbers = sorted(self.draw.randrange(count) for _ in rows)
                columns = {
                    "key": pa.array([key for key, _ in rows], pa.binary()),
                    "value": pa.array([value for _, value in rows], pa.binary()),
                    "partition": pa.array(numbers, pa.int32()),
                }
                result = log.append(topic, pa.record_batch(columns), now_ms=self.now_ms)
                by_partition = {n: iter(range(*at)) for (_, n), at in result.offsets.items()}
                for number, row in zip(numbers, rows, strict=True):
                    offset = next(by_partition[number])
                    self.ours.setdefault((topic, number), {})[offset] = Sent(*row)

    # --- what there is to be read ----------------------------------------------------------------

    def acknowledged(self) -> dict[Partition, dict[int, Sent]]:
        """Return every record that anybody was told is written; no offset was given twice."""
        writers = [self.plain, self.payer, self.other_payer]
        everyone = [sender.acknowledged for sender in writers] + [self.ours, self.by_hand_written]
        merged: dict[Partition, dict[int, Sent]] = {place: {} for place in PLACES}
        for written in everyone:
            for place, records in written.items():
                assert not merged[place].keys() & records.keys(), place
                merged[place].update(records)
        return merged

    def catch_up(self) -> None:
        last = {place: max(records) for place, records in self.acknowledged().items() if records}
        for follower in self.followers.values():
            follower.catch_up(last)

    def alter(self, topic: str, config: dict[str, str]) -> None:
        set_to = AlterConfigOpType.SET
        entries = [
            ConfigEntry(name, value, incremental_operation=set_to) for name, value in config.items()
        ]
        resource = ConfigResource(ResourceType.TOPIC, topic, incremental_configs=entries)
        for future in self.broker.admin.incremental_alter_configs([resource]).values():
            future.result(120)


def sent(records: Sequence[Record]) -> dict[int, Sent]:
    assert len({record.offset for record in records}) == len(records)
    return {record.offset: Sent(record.key, record.value) for record in records}


def read(log: KafkaLog, place: Partition, level: str = "read_committed") -> list[Record]:
    return of_kafkalog(log.read(*place, include_headers=True, isolation_level=level))


def mirror(log: KafkaLog, source: Path, topic: str) -> None:
    """Append the segments of a partition's directory to a topic, as a follower does."""
    for path in sorted(source.glob("*.log")):
        log.append_raw(topic, 0, path)


def dump_faults(root: Path) -> list[str]:
    """Return what Kafka's dump has to say against any file of the topics."""
    suffixes = {".log", ".index", ".timeindex", ".txnindex", ".snapshot"}
    paths = [
        path
        for topic in (*CONFIG,)
        for path in sorted(root.glob(f"{topic}-[0-9]/*"))
        if path.suffix in suffixes and path.name[0].isdigit()
    ]
    assert {path.suffix for path in paths} == suffixes
    output = dump_log_segments(paths, "--deep-iteration")
    bad = ("ismatch", "isvalid: false", "invalid bytes", "Exception", "out of order", "orrupt")
    return [line for line in output.splitlines() if any(word in line for word in bad)]


@pytest.fixture(scope="module")
def world(peers: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    directory = tmp_path_factory.mktemp("round-trip")
    # As Kafka has it by default, the controller's log is in the same directory.
    settings = {"metadata.log.dir": str(directory / "log-0")}
    with ExitStack() as stack:
        broker = stack.enter_context(KafkaBroker(directory, settings=settings))
        for topic, config in CONFIG.items():
            broker.create_topic(topic, 2 if topic in {JOURNAL, LEDGER} else 1, config)
        yield World(broker, stack)


# --- the first passage: the broker is stopped in good order --------------------------------------


@pytest.fixture(scope="module")
def stopped(world: World) -> World:
    """Everybody has written and read; one transaction is open."""
    world.produce()
    world.catch_up()
    written = world.acknowledged()
    world.sleeper.catch_up({p: sorted(written[p])[5] for p in world.sleeper.records})
    world.sleeper.sleep()
    world.payer.begin()
    world.send(world.payer, PAYMENTS, 20)
    world.send(world.payer, JOURNAL, 20)
    world.payer.flush()
    world.send(world.plain, PAYMENTS, 10)
    world.plain.flush()
    world.uncommitted_before = consumed_all(
        world.broker.bootstrap, dict.fromkeys(PLACES, 0), committed=False
    )
    world.committed_before = consumed_all(world.broker.bootstrap, dict.fromkeys(PLACES, 0))
    world.broker.stop()
    return world


@pytest.fixture(scope="module")
def adopted(stopped: World) -> World:
    adopt(stopped.root, config={}, now_ms=passage.now_ms())
    return stopped


def test_a_running_brokers_directory_is_not_adopted(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kafkalog.storage_engine.ownership.adopt.LOCK_WAIT_S", 0.1)
    with pytest.raises(LockedByBrokerError):
        adopt(world.root, config={}, now_ms=passage.now_ms())
    names = {path.name for path in world.root.rglob("*")}
    assert layout.META_PROPERTIES in names
    assert not any(name == layout.COMMIT or name.startswith(layout.OURS) for name in names)


def test_an_adopted_log_is_what_its_consumers_got(adopted: World) -> None:
    with kafkalog.open(adopted.root, read_only=True) as log:
        for place in PLACES:
            assert read(log, place) == adopted.committed_before[place]
            assert read(log, place, "read_uncommitted") == adopted.uncommitted_before[place]


def test_adopted_topics_have_the_brokers_configs(adopted: World) -> None:
    with kafkalog.open(adopted.root, read_only=True) as log:
        assert set(log.topics()) == set(CONFIG)
        for topic, config in CONFIG.items():
            # No file says the broker's own default, so tombstones stay until the topic has one.
            assert log.describe(topic).config == {"delete.retention.ms": str(2**63 - 1), **config}


def test_a_broker_refuses_a_directory_that_is_ours(adopted: World) -> None:
    with pytest.raises(AssertionError, match="the broker ended with"):
        adopted.broker.start()
    # A formatted one is refused too.
    shutil.copy(adopted.root / layout.META_ASIDE, adopted.root / layout.META_PROPERTIES)
    with pytest.raises(AssertionError, match="the broker ended with"):
        adopted.broker.start()
    (adopted.root / layout.META_PROPERTIES).unlink()
    with kafkalog.open(adopted.root, read_only=True) as log:
        for place in PLACES:
            assert read(log, place, "read_uncommitted") == adopted.uncommitted_before[place]


@pytest.fixture(scope="module")
def resumed(adopted: World) -> World:
    """We have written and cleaned, the broker has the directory again, and everybody goes on."""
    # In case a broker that was made to try has loaded a partition before it gave up.
    adopt(adopted.root, config={}, now_ms=passage.now_ms())
    with kafkalog.open(adopted.root) as log:
        (stats, *_) = log.clean(LEDGER, force=True, now_ms=adopted.now_ms)
        assert stats.error is None
        adopted.append(log)
    release(adopted.root, now_ms=passage.now_ms())
    adopted.broker.start()
    places = dict.fromkeys(PLACES, 0)
    adopted.committed_after = consumed_all(adopted.broker.bootstrap, places)
    adopted.sequences_after_stop = adopted.by_hand.send(BY_HAND, *adopted.last_by_hand[:2])
    adopted.by_hand_at_stop = adopted.last_by_hand
    adopted.payer.commit()
    adopted.produce()
    adopted.catch_up()
    return adopted


def assert_every_record_once(world: World) -> None:
    expected = world.acknowledged()
    found = consumed_all(world.broker.bootstrap, dict.fromkeys(PLACES, 0))
    for place, records in expected.items():
        topic, _ = place
        if topic != LEDGER:
            assert sent(found[place]) == records, place
            continue
        survivors = sent(found[place])
        assert survivors.items() <= records.items()
        latest = {records[offset].key: offset for offset in sorted(records)}
        assert set(latest.values()) <= survivors.keys(), place


def test_every_acknowledged_record_is_there_once(resumed: World) -> None:
    assert_every_record_once(resumed)


def assert_followers_missed_nothing(world: World) -> None:
    expected = world.acknowledged()
    for name in ("group", "committed"):
        for place, records in world.followers[name].records.items():
            assert sent(records) == expected[place], (name, place)
    for place, records in world.followers["uncommitted"].records.items():
        assert expected[place].items() <= sent(records).items()


def test_no_consumer_was_made_to_rewind_or_to_skip(resumed: World) -> None:
    assert_followers_missed_nothing(resumed)


def assert_sequences_go_on(world: World) -> None:
    """What was sent last is a duplicate, a gap is refused, and the next batch is taken."""
    values, sequence, offset = world.last_by_hand
    assert world.by_hand.send(BY_HAND, values, sequence) == (0, offset)
    code, _ = world.by_hand.send(BY_HAND, [b"too early"], world.sequence + 5)
    assert code == OUT_OF_ORDER_SEQUENCE
    world.send_by_hand()


def test_an_idempotent_producer_goes_on(resumed: World) -> None:
    assert resumed.sequences_after_stop == (0, resumed.by_hand_at_stop[2])
    assert_sequences_go_on(resumed)


def test_a_transaction_stays_open_until_its_producer_ends_it(resumed: World) -> None:
    expected = resumed.committed_before
    for place in ((PAYMENTS, 0), (JOURNAL, 0), (JOURNAL, 1)):
        assert len(resumed.uncommitted_before[place]) > len(expected[place])
        assert resumed.committed_after[place] == expected[place]


# --- the second passage: the broker is killed ----------------------------------------------------


@pytest.fixture(scope="module")
def after_kill(resumed: World) -> World:
    """The broker has cleaned, and was killed with batches on their way; then as before."""
    world = resumed
    world.alter(LEDGER, {"min.cleanable.dirty.ratio": "0"})
    end = max(world.acknowledged()[LEDGER, 0])
    base = max(int(path.stem) for path in (world.root / f"{LEDGER}-0").glob("*.log"))
    assert 0 < base <= end
    world.broker.wait_until(lambda: cleaned_to(world.root) >= base)
    world.alter(LEDGER, {"min.cleanable.dirty.ratio": "1"})
    world.by_hand_at_kill = world.last_by_hand
    world.send(world.plain, JOURNAL, 3000)
    world.plain.poke(0.005)
    world.broker.kill()
    adopt(world.root, config={}, now_ms=passage.now_ms())
    with kafkalog.open(world.root) as log:
        world.read_after_kill = {place: read(log, place) for place in PLACES}
        mirror(log, world.root / f"{PAYMENTS}-0", MIRROR)
        (stats, *_) = log.clean(LEDGER, force=True, now_ms=world.now_ms)
        assert stats.error is None
        world.append(log)
    release(world.root, now_ms=passage.now_ms())
    world.broker.start()
    world.sequences_after_kill = world.by_hand.send(BY_HAND, *world.last_by_hand[:2])
    world.plain.flush()
    world.produce()
    return world


def cleaned_to(root: Path) -> int:
    path = root / "cleaner-offset-checkpoint"
    entries = [line.split() for line in path.read_text().splitlines()] if path.exists() else []
    return next((int(entry[2]) for entry in entries if entry[:2] == [LEDGER, "0"]), -1)


def test_batches_on_their_way_when_the_broker_was_killed_arrive_once(after_kill: World) -> None:
    assert_every_record_once(after_kill)
    assert after_kill.plain.faults == []


def test_what_a_killed_broker_acknowledged_was_adopted(after_kill: World) -> None:
    written = after_kill.acknowledged()
    for place in ((PAYMENTS, 0), (BY_HAND, 0)):
        found = sent(after_kill.read_after_kill[place])
        assert found == {o: s for o, s in written[place].items() if o <= max(found)}
        assert len(found) > 50


def test_a_batch_sent_again_after_the_passage_is_a_duplicate(after_kill: World) -> None:
    assert after_kill.sequences_after_kill == (0, after_kill.by_hand_at_kill[2])
    assert_sequences_go_on(after_kill)


def test_a_raw_mirror_is_read_like_its_source(after_kill: World, tmp_path: Path) -> None:
    bootstrap = after_kill.broker.bootstrap
    for committed in (True, False):
        both = dict.fromkeys(((PAYMENTS, 0), (MIRROR, 0)), 0)
        found = consumed_all(bootstrap, both, committed=committed)
        count = len(found[MIRROR, 0])
        assert count > 100
        assert found[MIRROR, 0] == found[PAYMENTS, 0][:count]
    with kafkalog.open(tmp_path / "fresh") as fresh:
        fresh.create_topic(MIRROR, 1, {"cleanup.policy": "delete"})
        mirror(fresh, after_kill.root / f"{MIRROR}-0", MIRROR)
        for level in ("read_committed", "read_uncommitted"):
            committed = level == "read_committed"
            expected = consumed_all(bootstrap, {(MIRROR, 0): 0}, committed=committed)
            assert read(fresh, (MIRROR, 0), level) == expected[MIRROR, 0]


# --- the third passage: who adopts and who releases is killed ------------------------------------


@pytest.fixture(scope="module")
def after_kills(after_kill: World) -> World:
    world = after_kill
    world.catch_up()
    world.send(world.plain, JOURNAL, 500)
    world.broker.kill()
    world.kills = [passage.run_until_done("adopt", world.root, world.draw)]
    with kafkalog.open(world.root) as log:
        world.append(log)
    world.kills.append(passage.run_until_done("release", world.root, world.draw))
    world.broker.start()
    world.plain.flush()
    world.produce()
    world.catch_up()
    return world


def test_nothing_is_lost_when_adopting_and_releasing_are_killed(after_kills: World) -> None:
    assert min(after_kills.kills) >= 5
    assert_every_record_once(after_kills)
    assert_followers_missed_nothing(after_kills)
    assert_sequences_go_on(after_kills)


def test_every_batch_lies_within_what_the_broker_knows_of_its_leader_epoch(
    after_kills: World,
) -> None:
    by_hand, seen = after_kills.by_hand, set()
    with kafkalog.open(after_kills.root) as log:
        for place in PLACES:
            with directory_log_of(log).snapshot(*place) as snapshot:
                chunks = list(
                    snapshot.chunks(snapshot.state.log_start_offset, snapshot.state.high_watermark)
                )
            tables = [chunk.table for chunk in chunks]
            ends = {int(e): 0 for table in tables for e in table.leader_epochs}
            assert list(ends) == sorted(ends)
            for table in tables:
                for epoch, last in zip(table.leader_epochs, table.last_offsets, strict=True):
                    ends[int(epoch)] = int(last) + 1
            seen |= ends.keys()
            starts = [*list(ends.values())[1:], 1 << 62]
            for (epoch, end), next_end in zip(ends.items(), starts, strict=True):
                assert end <= by_hand.end_of_epoch(place, epoch) < next_end, (place, epoch)
    assert len(seen) >= 3


def test_a_consumer_that_was_away_goes_on_where_it_was(after_kills: World) -> None:
    expected = after_kills.acknowledged()
    after_kills.sleeper.wake()
    last = {place: max(expected[place]) for place in after_kills.sleeper.records}
    after_kills.sleeper.catch_up(last)
    for place, records in after_kills.sleeper.records.items():
        assert sent(records) == expected[place], place


def test_kafkas_dump_finds_no_fault_after_all_this(after_kills: World) -> None:
    after_kills.broker.stop()
    try:
        assert dump_faults(after_kills.root) == []
    finally:
        after_kills.broker.start()


def test_the_brokers_cleaner_never_gave_up(after_kills: World) -> None:
    output = after_kills.broker.output.read_text(errors="replace")
    assert [line for line in output.splitlines() if "ncleanable" in line] == []
    assert not any("-stray" in name for name in os.listdir(after_kills.root))
