"""What kafkalog writes and cleans, aiokafka's decoder reads: the same records, byte for byte."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest

import kafkalog
from tests.acceptance.independent_reader import (
    IndependentFault,
    latest_of_kafkalog,
    main,
    read_log,
)

CODECS = {"uncompressed": 0, "gzip": 1, "snappy": 2, "lz4": 3, "zstd": 4}


class Changes:
    """Overwrites and tombstones over few keys, and the dict that they lead to."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.latest: dict[bytes, bytes] = {}
        self.count = 0

    def draw(self, count: int) -> list[tuple[bytes, bytes | None]]:
        records: list[tuple[bytes, bytes | None]] = []
        for _ in range(count):
            self.count += 1
            key = b"key-%d" % self.random.randrange(150)
            if self.random.random() < 0.2:
                records.append((key, None))
                self.latest.pop(key, None)
            else:
                value = b"%d " % self.count * self.random.randrange(0, 30)
                records.append((key, value))
                self.latest[key] = value
        return records


def create(log: kafkalog.log.KafkaLog, topic: str, codec: str) -> None:
    config = {
        "compression.type": codec,
        "segment.bytes": "6000",
        "delete.retention.ms": "0",
        "min.cleanable.dirty.ratio": "0",
    }
    log.create_topic(topic, 3, config)


@pytest.mark.slow
@pytest.mark.parametrize("codec", CODECS)
def test_a_log_appended_cleaned_and_appended_reads_the_same_to_all(
    tmp_path: Path, codec: str
) -> None:
    changes = Changes(seed=CODECS[codec])
    with kafkalog.open(tmp_path) as log:
        create(log, "t", codec)
        for commit in range(60):
            log.append("t", changes.draw(30), now_ms=1_000_000 + commit)
        assert read_log(tmp_path)["t"].records == 1800
        assert read_log(tmp_path)["t"].latest_records == changes.latest
        # The first cleaning gives tombstones their horizon, the second finds it passed.
        for now_ms in (2_000_000, 3_000_000):
            assert not [
                stats.error for stats in log.clean("t", force=True, now_ms=now_ms) if stats.error
            ]
            log.append("t", changes.draw(30), now_ms=now_ms + 1)
        for _ in range(5):
            log.append("t", changes.draw(30), now_ms=3_000_002)
    contents = read_log(tmp_path, "t")["t"]
    assert contents.latest_records == changes.latest == latest_of_kafkalog(tmp_path, "t")
    assert contents.records < 600
    assert CODECS[codec] in contents.codecs
    assert main([str(tmp_path), "t", "--compare"]) == 0


def small_log(root: Path) -> Path:
    """Write a few commits, and return the one file that holds them."""
    changes = Changes(seed=9)
    with kafkalog.open(root) as log:
        log.create_topic("t")
        for _ in range(3):
            log.append("t", changes.draw(10), now_ms=1_000_000)
    (path,) = (root / "t-0").glob("*.log")
    return path


def flip_a_bit(data: bytearray) -> None:
    data[-1] ^= 1


def tear_the_last_batch(data: bytearray) -> None:
    del data[-1]


def leave_a_byte_over(data: bytearray) -> None:
    data.append(0)


def repeat_everything(data: bytearray) -> None:
    data += bytes(data)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (flip_a_bit, "wrong CRC"),
        (tear_the_last_batch, "no whole batch"),
        (leave_a_byte_over, "1 bytes left over"),
        (repeat_everything, "offset 0 where at least 30 is due"),
    ],
)
def test_the_independent_reader_finds_damage(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    damage: Callable[[bytearray], None],
    message: str,
) -> None:
    path = small_log(tmp_path)
    data = bytearray(path.read_bytes())
    damage(data)
    path.write_bytes(data)
    with pytest.raises(IndependentFault, match=message):
        read_log(tmp_path)
    assert main([str(tmp_path)]) == 1
    assert message in capsys.readouterr().err
