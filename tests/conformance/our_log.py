"""A log of kafkalog's that has one topic of each kind, for a real Kafka to judge.

Keys, values and names of headers are ASCII, as Kafka's dump prints them as text, but in `binary`.
"""

from __future__ import annotations

import random
from pathlib import Path

import pyarrow as pa
import pytest

import kafkalog
from kafkalog.log import KafkaLog
from kafkalog.schema import HEADERS
from kafkalog.storage_engine.directory import staged_directory
from kafkalog.storage_engine.place import directory_log_of
from kafkalog.storage_engine.writing.staging import StagedWriter
from tests.conformance.record import Record, of_kafkalog

NOW_MS = 1_700_000_000_000
CODECS = ("uncompressed", "gzip", "snappy", "lz4", "zstd")
BINARY = "binary"
AWAY, TOMBSTONES = "cleaned-away", "cleaned-tombstones"
CLEANED = [*(f"cleaned-{codec}" for codec in CODECS), "cleaned-stamped", AWAY, TOMBSTONES]
PARTITIONS = {
    **{f"written-{codec}": 2 for codec in CODECS},
    **dict.fromkeys(CLEANED, 1),
    "stamped": 1,
    "segments": 2,
    "empty": 1,
    BINARY: 1,
}
INDEX_INTERVAL = "300"
_SMALL = {"segment.bytes": "6000", "index.interval.bytes": INDEX_INTERVAL}
_WORDS = ("alpha", "beta", "gamma", "delta", "epsilon")


def rows(
    draw: random.Random, count: int, now_ms: int, *, keys: int | None = None
) -> pa.RecordBatch:
    """Draw rows: overwrites and tombstones, headers or none, timestamps that go up and down.

    With `keys` each row has one of so many keys, else some have none.
    """
    key, value, headers, times = [], [], [], []
    for _ in range(count):
        is_keyed = keys is not None or draw.random() < 0.8
        key.append(f"key-{draw.randrange(keys or 50)}".encode() if is_keyed else None)
        text = " ".join(draw.choices(_WORDS, k=draw.randrange(20))).encode()
        value.append(None if draw.random() < 0.15 else text)
        names = draw.choices(_WORDS, k=draw.choice((0, 0, 0, 1, 3)))
        headers.append([(name, draw.choice((None, b"", b"\0\xff", b"text"))) for name in names])
        times.append(now_ms + draw.randrange(-5000, 5000))
    return pa.record_batch(
        {
            "key": pa.array(key, pa.binary()),
            "value": pa.array(value, pa.binary()),
            "headers": pa.array(
                [[{"key": name, "value": data} for name, data in one] or None for one in headers],
                HEADERS,
            ),
            "timestamp": pa.array(times, pa.int64()),
        }
    )


def write(root: Path) -> None:
    """Write the log and close it."""
    draw = random.Random(4)
    with kafkalog.open(root) as log:
        for codec in CODECS:
            _write(log, draw, f"written-{codec}", {"compression.type": codec})
            _write_cleaned(log, draw, f"cleaned-{codec}", {"compression.type": codec})
        stamped = {"message.timestamp.type": "LogAppendTime"}
        _write(log, draw, "stamped", stamped)
        _write_cleaned(log, draw, "cleaned-stamped", stamped)
        _write_deleted(log, TOMBSTONES, cleanings=1)
        _write_deleted(log, AWAY, cleanings=2)
        _write_segments(log, draw)
        log.create_topic("empty")
        _write_binary(log, draw)


def _write(log: KafkaLog, draw: random.Random, topic: str, config: dict[str, str]) -> None:
    log.create_topic(topic, PARTITIONS[topic], {"cleanup.policy": "delete", **_SMALL, **config})
    for commit in range(25):
        directory_log_of(log).append(
            topic,
            rows(draw, draw.randrange(1, 60), NOW_MS + 1000 * commit),
            now_ms=NOW_MS + 1000 * commit,
            batch_size=draw.choice((300, 1000, 20_000)),
        )


def _write_cleaned(log: KafkaLog, draw: random.Random, topic: str, config: dict[str, str]) -> None:
    """Clean, append, clean again, so that segments merge and tombstones have a horizon."""
    log.create_topic(topic, 1, {**_SMALL, **config, "delete.retention.ms": "86400000"})
    for cleaning in range(3):
        for commit in range(12):
            now_ms = NOW_MS + 60_000 * cleaning + 1000 * commit
            batch_size = draw.choice((300, 1000, 20_000))
            directory_log_of(log).append(
                topic, rows(draw, 30, now_ms, keys=120), now_ms=now_ms, batch_size=batch_size
            )
        if cleaning < 2:
            now_ms = NOW_MS + 60_000 * cleaning + 30_000
            (stats,) = log.clean(topic, force=True, now_ms=now_ms)
            assert stats.error is None


def _write_deleted(log: KafkaLog, topic: str, *, cleanings: int) -> None:
    """Overwrite and delete every key; the first cleaning leaves tombstones, the second nothing.

    Nothing is a batch without records, which keeps the end of the log.
    """
    config = {**_SMALL, "segment.bytes": "1000", "delete.retention.ms": "0"}
    log.create_topic(topic, 1, config)
    for commit in range(40):
        values = [(b"key-%d" % key, b"some value %d" % commit) for key in range(10)]
        log.append(topic, values, now_ms=NOW_MS + commit)
    log.append(topic, [(b"key-%d" % key, None) for key in range(10)], now_ms=NOW_MS + 50)
    for cleaning in range(cleanings):
        log.clean(topic, force=True, now_ms=NOW_MS + 1000 * (cleaning + 1))


def _write_segments(log: KafkaLog, draw: random.Random) -> None:
    """Stage runs so large that they become segments by renaming."""
    log.create_topic(
        "segments", 2, {"cleanup.policy": "delete", "index.interval.bytes": INDEX_INTERVAL}
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(staged_directory, "SEGMENT_RUN_SIZE", 2000)
        for commit in range(3):
            now_ms = NOW_MS + 1000 * commit
            writer = StagedWriter(
                directory_log_of(log),
                directory_log_of(log).state(),
                now_ms=lambda now_ms=now_ms: now_ms,
                writer_slug="a" * 32,
                batch_id=commit,
                batch_size=500,
            )
            for _ in range(6):
                writer.append("segments", rows(draw, 60, now_ms))
            message = writer.finish()
            assert any(run.is_segment for run in message.runs)
            directory_log_of(log).commit([message], now_ms=now_ms)


def _write_binary(log: KafkaLog, draw: random.Random) -> None:
    log.create_topic(BINARY, 1, {"cleanup.policy": "delete", **_SMALL})
    pairs = [(draw.randbytes(draw.randrange(200)), draw.randbytes(3000)) for _ in range(40)]
    log.append(BINARY, [*pairs, (b"", b""), (b"", None)], now_ms=NOW_MS)


def read(root: Path, topic: str, partition: int) -> list[Record]:
    """Return all records of a partition, as kafkalog reads them."""
    with kafkalog.open(root, read_only=True) as log:
        return of_kafkalog(log.read(topic, partition, include_headers=True))
