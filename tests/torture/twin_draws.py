"""Draws the directory of one partition, as a broker, a hand or our own release has left it.

Batches come from `twin_batches` and `message_builder`, which know none of our code. Kafka writes
them as a follower or as a leader, or they are laid into files as they are.
"""

from __future__ import annotations

import os
import random
import shutil
import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

import kafkalog
from kafkalog.cleaner.schedule import manager
from kafkalog.storage_engine.ownership.release import release
from kafkalog.storage_engine.place import directory_log_of
from tests.builders.batch_builder import Record
from tests.builders.message_builder import messages, wrapper
from tests.builders.segment_files import name
from tests.conformance.twin_batches import Taste, Writers, draw_taste
from tests.conformance.twin_kafka import CleanerSettings, KafkaCleaner

__all__ = ["LARGE_MAP", "META", "NOW_MS", "TOPIC", "Drawn", "draw_log", "held_by", "sizes_of"]

NOW_MS: Final = 1_700_000_000_000
TOPIC: Final = "t"
META: Final = "version=1\ncluster.id=c\nnode.id=1\ndirectory.id=AAAAAAAAAAAAAAAAAAAAAA\n"
LARGE_MAP: Final = CleanerSettings(24 << 10, 0.9, 1 << 20)
"""It takes in all keys of a log that is drawn here."""
_STYLES: Final = ("follower", "follower", "leader", "hand", "ours")
_ODD_TIMES: Final = (1_000, 86_400_000, NOW_MS - 10**10, NOW_MS + 10**9, 4_000_000_000_000)
_HEADER: Final = struct.Struct(">qiibIhiqq")


@dataclass
class Drawn:
    """A root with one partition `t-0`, and what its broker knew of it."""

    root: Path
    style: str
    config: Mapping[str, str]
    now_ms: int = NOW_MS
    log_start: int = 0
    first_dirty: int = 0
    recovery_point: int = 0
    old_end: int = 0
    """Below it are messages v0 and v1."""
    is_killed: bool = False
    """Its broker did not stop: indexes have the room that was preallocated."""
    is_clean: bool = False
    """There is the mark of a clean shutdown."""
    spoiled: list[str] = field(default_factory=list)
    """What was done to the files."""
    held: frozenset[tuple[int, int]] = frozenset()
    """The first and last offsets of its batches before that."""

    @property
    def directory(self) -> Path:
        """The partition's directory."""
        return self.root / f"{TOPIC}-0"

    def logs(self) -> list[Path]:
        """The segments' logs, ascending."""
        return sorted(self.directory.glob("*.log"))

    def bases(self) -> list[int]:
        """The base offsets of the segments, ascending."""
        return [int(path.stem) for path in self.logs()]

    def write_root(self) -> None:
        """Write what a broker has in the root."""
        root = self.root
        (root / "meta.properties").write_text(META)
        offsets = {
            "log-start-offset-checkpoint": self.log_start,
            "recovery-point-offset-checkpoint": self.recovery_point,
            "cleaner-offset-checkpoint": self.first_dirty,
        }
        for path, offset in offsets.items():
            (root / path).write_text(f"0\n1\n{TOPIC} 0 {offset}\n")
        if self.is_clean:
            (root / ".kafka_cleanshutdown").write_text('{"version":0,"brokerEpoch":-1}')


def draw_log(draw: random.Random, kafka: KafkaCleaner, root: Path, kafkas_name: str) -> Drawn:
    """Draw a log and write it; nothing is spoiled yet."""
    style = draw.choice(_STYLES)
    taste = draw_taste(draw)
    if style == "leader":
        taste = replace(taste, gaps=0.0, compacted=0.0, strange_controls=0.0, resets=0.0)
        taste = replace(taste, timestamp_types=(0,), bumps_epochs=False, keyless=0.0)
    drawn = Drawn(root, style, _draw_config(draw, taste))
    root.mkdir(parents=True)
    writers = Writers(draw, taste)
    if style == "hand":
        _write_by_hand(draw, drawn, writers)
    elif style == "ours":
        _write_ours(draw, drawn, writers)
    else:
        _write_kafkas(draw, drawn, writers, kafka, kafkas_name)
    for number, path in enumerate(drawn.logs()):  # what has no timestamps is as old as its file
        seconds = drawn.now_ms // 1000 - draw.choice((0, 3_600)) + number
        os.utime(path, (seconds, seconds))
    # No broker knows less than what it has cleaned; what it has not, is of a leader.
    higher = [base for base in drawn.bases() if base >= drawn.first_dirty]
    drawn.first_dirty = draw.choice((drawn.first_dirty, drawn.first_dirty, *higher))
    points = (0, *drawn.bases(), drawn.bases()[-1], writers.end, writers.end)
    drawn.recovery_point = draw.choice(points)
    drawn.is_clean = not drawn.is_killed and draw.random() < 0.6
    drawn.now_ms += draw.choice((0, 1_000, 100_000, 10**8))
    drawn.held = held_by(drawn.logs())
    return drawn


def _draw_config(draw: random.Random, taste: Taste) -> dict[str, str]:
    largest = 150 + taste.records_max * (2 * taste.value_size_max + 100)
    config = {
        "cleanup.policy": draw.choice(("compact", "delete", "compact,delete")),
        "min.cleanable.dirty.ratio": "0",
        "internal.segment.bytes": str(largest * draw.choice((1, 2, 8))),
        "segment.index.bytes": draw.choice(("4096", "200")),
        "index.interval.bytes": draw.choice(("0", "100", "4096")),
        "delete.retention.ms": draw.choice(("0", "1000", "86400000")),
        "file.delete.delay.ms": "0",
        "segment.ms": draw.choice(("604800000", "30000")),
        "retention.ms": draw.choice(("-1", "-1", "1000", "100000")),
        "retention.bytes": draw.choice(("-1", "-1", str(largest * 3))),
        "message.timestamp.after.max.ms": str(2**63 - 1),
    }
    return config


def _time(draw: random.Random, now_ms: int) -> int:
    return draw.choice(_ODD_TIMES) if draw.random() < 0.15 else now_ms


def _portions(draw: random.Random, drawn: Drawn, writers: Writers) -> Iterator[bytes]:
    """Yield what is appended at once; time passes and leaders change in between."""
    for _ in range(draw.randint(1, 5)):
        drawn.now_ms += draw.choice((0, 100, 5_000, 40_000))
        if draw.random() < 0.25:
            writers.leader_epoch += draw.choice((1, 3))
        data = writers.batches(draw.randint(1, 8), _time(draw, drawn.now_ms))
        share = draw.choice((0.0, 0.5, 1.0))
        yield data + writers.end_transactions(drawn.now_ms, share)


def _write_kafkas(
    draw: random.Random, drawn: Drawn, writers: Writers, kafka: KafkaCleaner, name: str
) -> None:
    kafka.create(drawn.now_ms, name, drawn.directory, drawn.config)
    start = 0
    for data in _portions(draw, drawn, writers):
        if drawn.style == "leader":
            end = kafka.lead(drawn.now_ms, name, _as_sent(data))
        else:
            end = kafka.append(drawn.now_ms, name, data)
            assert end == writers.end
        writers.end = end
        if draw.random() < 0.4:
            kafka.roll(drawn.now_ms, name)
        if "delete" in drawn.config["cleanup.policy"] and draw.random() < 0.15:
            start = kafka.raise_start(drawn.now_ms, name, draw.randint(start, end))
        if "compact" in drawn.config["cleanup.policy"] and draw.random() < 0.3:
            cleaned = kafka.clean(drawn.now_ms, name, drawn.first_dirty, LARGE_MAP)
            drawn.first_dirty = cleaned.end or drawn.first_dirty
    drawn.log_start = start
    copy = drawn.root / "killed"
    shutil.copytree(drawn.directory, copy)
    kafka.close(name)
    drawn.is_killed = draw.random() < 0.5
    if drawn.is_killed:
        shutil.rmtree(drawn.directory)
        copy.rename(drawn.directory)
    else:
        shutil.rmtree(copy)


def _as_sent(data: bytes) -> bytes:
    """Return batches with the base offset that a producer gives them; no checksum covers it."""
    sent = bytearray(data)
    for position, _ in sizes_of(data):
        sent[position : position + 8] = bytes(8)
    return bytes(sent)


def _write_ours(draw: random.Random, drawn: Drawn, writers: Writers) -> None:
    meta = drawn.root.with_name("meta.elsewhere")
    meta.write_text(META)
    with kafkalog.open(drawn.root) as log:
        log.create_topic(TOPIC, 1, drawn.config, now_ms=drawn.now_ms)
        for data in _portions(draw, drawn, writers):
            log.append_raw(TOPIC, 0, data, now_ms=drawn.now_ms)
            if draw.random() < 0.3:
                rows = [(b"k%d" % draw.randrange(9), draw.choice((None, b"ours")))]
                log.append(TOPIC, rows * draw.randint(1, 3), now_ms=drawn.now_ms)
                writers.end = log.offsets(TOPIC)[0][1]
            if "delete" in drawn.config["cleanup.policy"] and draw.random() < 0.15:
                start, end = log.offsets(TOPIC)[0]
                log.delete_records(TOPIC, 0, draw.randint(start, end), now_ms=drawn.now_ms)
            if "compact" in drawn.config["cleanup.policy"] and draw.random() < 0.3:
                manager.clean_filthiest(directory_log_of(log), now_ms=drawn.now_ms)
        known = log.describe(TOPIC).partitions[0]
    drawn.log_start, drawn.first_dirty = known.log_start_offset, known.first_dirty_offset
    release(drawn.root, meta_properties=meta, now_ms=drawn.now_ms)
    for path in drawn.root.iterdir():
        if path.is_file():
            path.unlink()


def _write_by_hand(draw: random.Random, drawn: Drawn, writers: Writers) -> None:
    """Lay messages and batches into files; an index may be missing."""
    drawn.directory.mkdir()
    segments = []
    for _ in range(draw.randrange(3)):
        base = writers.end
        segments.append((base, b"".join(_messages(draw, drawn, writers))))
    drawn.old_end = base = writers.end
    for data in _portions(draw, drawn, writers):
        segments.append((base, data))
        base = writers.end
    interval = int(drawn.config["index.interval.bytes"])
    for base, data in segments:
        (drawn.directory / name(base, ".log")).write_bytes(data)
        indexes = _indexes(base, data, interval)
        for suffix, content in zip((".index", ".timeindex"), indexes, strict=True):
            (drawn.directory / name(base, suffix)).write_bytes(content)
    drawn.log_start = draw.choice((0, 0, draw.randint(0, writers.end)))


def _messages(draw: random.Random, drawn: Drawn, writers: Writers) -> Iterator[bytes]:
    """Yield messages v0 and v1, and compressed sets of them."""
    for _ in range(draw.randint(1, 5)):
        magic = draw.randrange(2)
        records = []
        for _ in range(draw.randint(1, 4)):
            key = draw.choice((b"k%d" % draw.randrange(9), b""))
            value = draw.choice((None, b"old" * draw.randrange(9)))
            time = _time(draw, drawn.now_ms) if magic else -1
            records.append(Record(writers.end, time, key, value))
            writers.end += 1
        if draw.random() < 0.5:
            yield messages(magic, records)
        else:
            yield wrapper(magic, draw.choice((1, 2, 3)), records)


def sizes_of(data: bytes) -> Iterator[tuple[int, int]]:
    """Yield position and size of the batches of a log."""
    position = 0
    while position + 17 <= len(data):
        size = 12 + struct.unpack_from(">i", data, position + 8)[0]
        if size <= 12 or position + size > len(data):
            return
        yield position, size
        position += size


def held_by(logs: Iterable[Path]) -> frozenset[tuple[int, int]]:
    """Return the first and last offsets of the batches in some files; of old messages the last."""
    found = []
    for path in logs:
        data = path.read_bytes()
        for position, _ in sizes_of(data):
            header = _HEADER.unpack_from(data.ljust(position + _HEADER.size), position)
            more = header[6] if data[position + 16] == 2 else 0
            found.append((header[0], header[0] + more))
    return frozenset(found)


def _indexes(base: int, data: bytes, interval: int) -> tuple[bytes, bytes]:
    offsets = times = b""
    since, latest, latest_offset, last_time = 0, -1, base, -1
    for position, size in sizes_of(data):
        if data[position + 16] == 2:
            header = _HEADER.unpack_from(data, position)
            last, time = header[0] + header[6], header[8]
        else:
            last, time = struct.unpack_from(">q", data, position)[0], -1
            if data[position + 16] == 1:
                time = struct.unpack_from(">q", data, position + 18)[0]
        if time > latest:
            latest, latest_offset = time, last
        if since > interval:
            offsets += struct.pack(">ii", last - base, position)
            if latest > last_time:
                times += struct.pack(">qi", latest, latest_offset - base)
                last_time = latest
            since = 0
        since += size
    if latest > last_time:
        times += struct.pack(">qi", latest, latest_offset - base)
    return offsets, times
