"""`kafkalog dump` beside Kafka's own tool: the same lines for the same files, sound or not."""

from __future__ import annotations

import contextlib
import io
import random
from collections.abc import Sequence
from pathlib import Path

import pytest

import kafkalog
from kafkalog.cli import run
from kafkalog.storage_engine.place import directory_log_of
from tests.builders.batch_builder import ABORT, COMMIT, GZIP, SNAPPY, BatchBuilder, Record, marker
from tests.builders.message_builder import message, wrapper
from tests.builders.segment_files import aborted_entry, name, producer_snapshot, write_segment
from tests.conformance.kafka import dump_log_segments
from tests.conformance.our_log import CODECS, NOW_MS, rows

pytestmark = [pytest.mark.peers, pytest.mark.slow]

_SMALL = {"segment.bytes": "6000", "index.interval.bytes": "300"}
HISTORY = "history"


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
                directory_log_of(log).append(
                    codec, rows(draw, 40, now_ms, keys=30), now_ms=now_ms, batch_size=1000
                )
            log.clean(codec, force=True, now_ms=NOW_MS + 60_000)
        log.create_topic(HISTORY, 1, {**_SMALL, "cleanup.policy": "delete"})
        for commit in range(12):
            now_ms = NOW_MS + 10_000 * commit
            directory_log_of(log).append(
                HISTORY, rows(draw, 40, now_ms), now_ms=now_ms, batch_size=500
            )
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
    batches = []
    for base, producer, sequence in ((0, 7, 0), (2, 8, 2**31 - 1)):
        data = BatchBuilder(
            base_offset=base, transactional=True, producer=(producer, 3, sequence), leader_epoch=4
        )
        data.add(b"key", b"value", timestamp=NOW_MS, headers=[(b"h", b"x"), (b"g", None)])
        batches.append(data.add(None, None, timestamp=NOW_MS + 5).build())
    for offset, producer, kind in ((4, 7, ABORT), (5, 8, COMMIT)):
        batches.append(
            marker(
                offset,
                kind,
                producer,
                timestamp=NOW_MS + 9,
                epoch=3,
                coordinator_epoch=9,
                leader_epoch=4,
            )
        )
    write_segment(directory, 0, batches, indexes=False)
    (directory / name(0, ".txnindex")).write_bytes(aborted_entry(7, 0, 4, 2))
    entries = [
        (7, 3, 1, 1, 1, NOW_MS, 9, -1),
        (8, 3, 0, 3, 1, NOW_MS, -1, 2),
        (9, 0, -1, -1, 0, NOW_MS, -1, -1),
    ]
    (directory / name(6, ".snapshot")).write_bytes(producer_snapshot(entries))


def messages(magic: int) -> bytes:
    data = message(magic, 0, b"k", b"v", timestamp=NOW_MS)
    data += message(magic, 1, None, None, timestamp=NOW_MS + 1)
    inner = [Record(n, NOW_MS + n, b"k", b"%d" % n) for n in range(2, 5)]
    data += wrapper(magic, GZIP, inner)
    inner = [Record(n, NOW_MS + n, None, b"%d" % n) for n in range(5, 7)]
    return data + wrapper(magic, SNAPPY, inner)


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
