"""`kafkalog dump` beside Kafka's own tool: the same lines for the same files, sound or not."""

from __future__ import annotations

import contextlib
import io
import random
import struct
from collections.abc import Sequence
from pathlib import Path

import pytest
from crc32c import crc32c

import kafkalog
from kafkalog.cli import run
from kafkalog.storage_engine.engine import engine_of
from tests.conformance.kafka import dump_log_segments
from tests.conformance.our_log import CODECS, NOW_MS, rows
from tests.unit.storage_engine import naive, naive_messages

pytestmark = [pytest.mark.peers, pytest.mark.slow]

_SMALL = {"segment.bytes": "6000", "index.interval.bytes": "300"}
HISTORY = "history"
_MARKERS = {"ABORT": 0, "COMMIT": 1}


def our_lines(paths: Sequence[Path], *options: str) -> list[str]:
    """Return what the command prints, findings included, sorted."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        run(["dump", *map(str, paths), *options])
    return sorted(line for line in (out.getvalue() + err.getvalue()).splitlines() if line)


def kafkas_lines(paths: Sequence[Path], *options: str) -> list[str]:
    return sorted(line for line in dump_log_segments(paths, *options).splitlines() if line)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A log of ours with every codec, and one segment each of what only others write."""
    root = tmp_path_factory.mktemp("dump") / "log"
    draw = random.Random(7)
    with kafkalog.open(root) as log:
        for codec in CODECS:
            log.create_topic(codec, 1, {"compression.type": codec, **_SMALL})
            for commit in range(12):
                now_ms = NOW_MS + 1000 * commit
                engine_of(log).append(
                    codec, rows(draw, 40, now_ms, keys=30), now_ms=now_ms, batch_size=1000
                )
            log.clean(codec, force=True, now_ms=NOW_MS + 60_000)
        log.create_topic(HISTORY, 1, {**_SMALL, "cleanup.policy": "delete"})
        for commit in range(12):
            now_ms = NOW_MS + 10_000 * commit
            engine_of(log).append(HISTORY, rows(draw, 40, now_ms), now_ms=now_ms, batch_size=500)
    transactions = root.parent / "transactions-0"
    transactions.mkdir()
    write_transactions(transactions)
    for magic in (0, 1):
        directory = root.parent / f"messages-{magic}"
        directory.mkdir()
        (directory / f"{0:020d}.log").write_bytes(messages(magic))
    return root


def write_transactions(directory: Path) -> None:
    """Data of two producers, their markers, the aborted one's entry, and a producer snapshot."""
    log = b""
    for base, producer, sequence in ((0, 7, 0), (2, 8, 2**31 - 1)):
        records = [
            naive.Record(base, NOW_MS, b"key", b"value", [(b"h", b"x"), (b"g", None)]),
            naive.Record(base + 1, NOW_MS + 5, None, None),
        ]
        log += naive.batch(
            records,
            base_offset=base,
            attributes=0x10,
            producer=(producer, 3, sequence),
            leader_epoch=4,
        )
    for offset, producer, kind in ((4, 7, "ABORT"), (5, 8, "COMMIT")):
        key, value = struct.pack(">hh", 0, _MARKERS[kind]), struct.pack(">hi", 0, 9)
        log += naive.batch(
            [naive.Record(offset, NOW_MS + 9, key, value)],
            base_offset=offset,
            attributes=0x30,
            producer=(producer, 3, -1),
            leader_epoch=4,
        )
    (directory / f"{0:020d}.log").write_bytes(log)
    (directory / f"{0:020d}.txnindex").write_bytes(struct.pack(">hqqqq", 0, 7, 0, 4, 2))
    entries = struct.pack(">qhiqiqiq", 7, 3, 1, 1, 1, NOW_MS, 9, -1)
    entries += struct.pack(">qhiqiqiq", 8, 3, 0, 3, 1, NOW_MS, -1, 2)
    entries += struct.pack(">qhiqiqiq", 9, 0, -1, -1, 0, NOW_MS, -1, -1)
    checked = struct.pack(">i", 3) + entries
    (directory / f"{6:020d}.snapshot").write_bytes(struct.pack(">hI", 1, crc32c(checked)) + checked)


def messages(magic: int) -> bytes:
    data = naive_messages.message(magic, 0, b"k", b"v", timestamp=NOW_MS)
    data += naive_messages.message(magic, 1, None, None, timestamp=NOW_MS + 1)
    inner = [naive_messages.Message(n, NOW_MS + n, b"k", b"%d" % n) for n in range(2, 5)]
    data += naive_messages.wrapper(magic, naive_messages.GZIP, inner)
    inner = [naive_messages.Message(n, NOW_MS + n, None, b"%d" % n) for n in range(5, 7)]
    return data + naive_messages.wrapper(magic, naive_messages.SNAPPY, inner)


def files_of(root: Path) -> list[Path]:
    return sorted(
        path
        for path in root.parent.rglob("*")
        if path.suffix in {".log", ".index", ".timeindex", ".txnindex", ".snapshot"}
    )


def test_every_line_is_that_of_kafkas_tool(peers: None, root: Path) -> None:
    paths = files_of(root)
    lines = kafkas_lines(paths, "--print-data-log")
    for codec in ("none", "gzip", "snappy", "lz4", "zstd"):
        assert any(f" compresscodec: {codec} " in line for line in lines)
    for wanted in ("payload: ", "OptionalLong[", "endTxnMarker: ABORT", "is followed by"):
        assert any(wanted in line for line in lines), wanted
    assert our_lines(paths, "--print-data-log") == lines


def test_what_it_finds_in_damaged_files_is_what_kafkas_tool_finds(
    peers: None, root: Path, tmp_path: Path
) -> None:
    source = root / f"{HISTORY}-0"
    paths = sorted(source.glob("*.index")) + sorted(source.glob("*.timeindex"))
    paths = [path for path in paths if path.stat().st_size >= 24]
    for path in [*paths, *source.glob("*.log")]:
        (tmp_path / path.name).write_bytes(path.read_bytes())
    index = tmp_path / next(path.name for path in paths if path.suffix == ".index")
    times = tmp_path / next(path.name for path in paths[::-1] if path.suffix == ".timeindex")
    data = bytearray(index.read_bytes())
    data[3] ^= 1  # an offset
    index.write_bytes(data)
    data = bytearray(times.read_bytes())
    data[7] ^= 1  # a timestamp
    data[23] ^= 1  # an offset
    times.write_bytes(data)
    log = max(tmp_path.glob("*.log"), key=lambda path: path.stat().st_size)
    data = bytearray(log.read_bytes())
    data[-1] ^= 1  # a checksum
    log.write_bytes(bytes(data) + bytes(5) + b"garbage")
    wanted = [index, times, log]
    lines = kafkas_lines(wanted)
    assert any("Mismatches in" in line for line in lines)
    assert any("isvalid: false" in line for line in lines)
    assert any("invalid bytes at the end" in line for line in lines)
    assert [line for line in our_lines(wanted) if not line.startswith(str(log))] == lines
