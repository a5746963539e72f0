"""`kafkalog verify` on what a real broker leaves: it finds nothing wrong where nothing is."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kafkalog.inspection.finding import Finding
from kafkalog.inspection.verify import verify
from kafkalog.storage_engine.ownership.adopt import adopt
from kafkalog.storage_engine.ownership.release import release
from tests.conformance import traffic
from tests.conformance.kafka import KafkaBroker
from tests.conformance.traffic import Traffic

pytestmark = [pytest.mark.peers, pytest.mark.slow]


def damage(root: Path) -> list[Finding]:
    return [finding for finding in verify(root, deep=True) if finding.is_damage]


def test_a_brokers_directory_is_sound_in_every_state(peers: None, tmp_path: Path) -> None:
    with KafkaBroker(tmp_path) as broker:
        root = broker.log_dir
        traffic.create_topics(broker)
        producers = Traffic(broker, seed=11)
        for _ in range(3):
            producers.round()
        producers.leave_open("left-open")
        producers.trim()
        assert damage(root) == [], "while it runs"
        broker.stop()
        (left_open,) = verify(root, deep=True)  # after a shutdown in good order
        assert not left_open.is_damage and "no broker is here to end it" in left_open.found
        assert list((root / f"{traffic.TRANSACTIONS}-0").glob("*.txnindex"))
        broker.start()
        producers.round()
        broker.kill()
        assert damage(root) == [], "after a kill"
        assert list(verify(tmp_path / "metadata", deep=True)) == []
        adopt(root, now_ms=traffic.NOW_MS + 10_000_000)
        assert list(verify(root, deep=True)) == [], "once it was adopted"
        release(root, now_ms=traffic.NOW_MS + 20_000_000)
        assert damage(root) == [], "once it was released"


def test_damage_to_a_brokers_files_is_found_where_it_is(peers: None, tmp_path: Path) -> None:
    with KafkaBroker(tmp_path) as broker:
        traffic.create_topics(broker)
        Traffic(broker, seed=12).round()
        Traffic(broker, seed=13).round()
        broker.stop()
        directory = broker.log_dir / f"{traffic.TRANSACTIONS}-0"
        paths = [path for path in directory.iterdir() if path.suffix in {".log", ".snapshot"}]
        paths += [*directory.glob("*.txnindex"), directory / "leader-epoch-checkpoint"]
        checked = 0
        for path in paths:
            sound = path.read_bytes()
            if not sound:
                continue
            harmed = bytearray(sound)
            harmed[len(sound) // 2] ^= 0x55
            path.write_bytes(harmed)
            assert path in {finding.path for finding in damage(broker.log_dir)}, path.name
            path.write_bytes(sound)
            checked += 1
        assert checked >= 5
        os.truncate(max(directory.glob("*.txnindex")), 0)
        assert any("aborted by producer" in finding.expected for finding in damage(broker.log_dir))
