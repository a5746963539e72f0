"""Whole directories with what does not belong there: files of others, batches that lie, bombs."""

from __future__ import annotations

import gzip
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import lz4.frame
import pyarrow as pa
import pytest
import snappy

import kafkalog
from kafkalog.errors import CorruptBatchError, InvalidInputError, OffsetOutOfRangeError
from kafkalog.storage_engine.place import directory_log_of
from tests.builders import batch_builder
from tests.builders.batch_builder import Record, batch_data, varint
from tests.unit.storage_engine.damage import Judge, read
from tests.unit.storage_engine.sample_root import (
    GZIP,
    LZ4,
    NOW_MS,
    SNAPPY,
    ZSTD,
    Log,
    Root,
    Segment,
    Stored,
    log_name,
    some,
    stored,
)


@pytest.fixture
def judge(tmp_path: Path) -> Iterator[Judge]:
    judge = Judge(Root(tmp_path / "root"), tmp_path / "copy")
    yield judge
    assert not judge.faults, judge.faults


def judged(judge: Judge, name: str = "t-0") -> str:
    """Judge the root as it is, by a file that is not changed."""
    path = Path(name) / "partition.metadata"
    data = (judge.root.path / path).read_bytes()
    return judge.judge(path, data, len(data), write=True)


# --- files of others -----------------------------------------------------------------------------

HARMLESS = [
    "README",
    "x" * 255,
    ".hidden",
    "ünïcödé ☃",
    "a\nb",
    "0.log",
    "99.log",
    "00000000000000000099.txt",
    "000000000000000000099.log",
    "-0000000000000000001.log",
    "00000000000000000099.log.bak",
    "00000000000000000099.index",
    "00000000000000000099.txnindex",
    "00000000000000000099.log",
    "00000000000000000099.log.swap",
    "00000000000000000099.log.cleaned",
    "00000000000000000099.index.swap",
    "00000000000000000030.index",
    "00000000000000000030.timeindex",
    "99999999999999999999.log",
    "00000000000000000000.log.deleted",
    "kl-unknown",
    "kl-x-1-2-3.staged",
    "leader-epoch-checkpoint.tmp",
]


@pytest.mark.parametrize("name", HARMLESS)
@pytest.mark.parametrize("content", [b"", b"\0" * 100, b"not one of ours" * 20])
def test_a_foreign_file_next_to_ours_changes_nothing(
    judge: Judge, name: str, content: bytes
) -> None:
    (judge.root.path / "t-0" / name).write_bytes(content)
    assert judged(judge) == "whole"


@pytest.mark.parametrize("name", ["directory", "00000000000000000099.log", "0.log.deleted"])
def test_a_foreign_directory_next_to_ours_changes_nothing(judge: Judge, name: str) -> None:
    (judge.root.path / "t-0" / name).mkdir()
    assert judged(judge) in {"whole", "refused"}


@pytest.mark.parametrize("name", ["link", "00000000000000000099.log", "00000000000000000030.index"])
@pytest.mark.parametrize("target", ["nowhere", "00000000000000000000.log", "."])
def test_a_symlink_next_to_our_files_changes_nothing(judge: Judge, name: str, target: str) -> None:
    (judge.root.path / "t-0" / name).symlink_to(target)
    assert judged(judge) in {"whole", "refused"}


@pytest.mark.parametrize("name", ["00000000000000000045.log", "00000000000000000000.log.swap"])
@pytest.mark.parametrize("content", [b"\0" * 100, b"not one of ours" * 20])
def test_a_foreign_segment_amid_ours_is_refused(judge: Judge, name: str, content: bytes) -> None:
    (judge.root.path / "t-0" / name).write_bytes(content)
    assert judged(judge) == "refused"


@pytest.mark.parametrize("name", ["lost+found", "t-x", "t-", "-0", "t-99", "__consumer_offsets-0"])
def test_foreign_directories_in_the_root_change_nothing(judge: Judge, name: str) -> None:
    (judge.root.path / name).mkdir()
    (judge.root.path / name / "00000000000000000000.log").write_bytes(b"x" * 100)
    for log in judge.root.logs:
        assert judged(judge, log) == "whole"


# --- files that lie ------------------------------------------------------------------------------


@pytest.mark.parametrize("base", [0, 40, 60])
@pytest.mark.parametrize("far", [False, True])
def test_stale_index_entries_above_a_cut_change_nothing(judge: Judge, base: int, far: bool) -> None:
    last, position = (5000, 1 << 20) if far else (59 - base, 700)
    stale = {
        ".index": struct.pack(">ii", last, position),
        ".timeindex": struct.pack(">qi", 1000 + base + last, last),
        ".txnindex": struct.pack(">hqqqq", 0, 8, base, base + last, base + last + 1),
    }
    for suffix, entry in stale.items():
        name = Path("t-0") / f"{base:020d}{suffix}"
        path = judge.root.path / name
        data = path.read_bytes() if path.exists() else b""
        path.write_bytes(data)
        outcome = judge.judge(name, data + entry, len(data), write=True)
        assert outcome == "whole" or (suffix == ".txnindex" and outcome == "refused")


def lying(base: int) -> dict[str, bytes]:
    """Batches of two offsets whose checksums are right, and whose contents are not."""
    rows = [Record(base, 1, b"k", b"v"), Record(base + 1, 2, b"l", b"w")]

    def batch(**fields: object) -> bytes:
        return batch_data(rows, last_offset=base + 1, **fields)

    section = batch_builder.section(rows, base, 1)
    sound = batch()
    return {
        "magic 3": sound[:16] + b"\3" + sound[17:],
        "magic 127": sound[:16] + b"\x7f" + sound[17:],
        "codec 5": batch(attributes=5),
        "codec 7": batch(attributes=7),
        "count -1": batch(count=-1),
        "count 1": batch(count=1),
        "count 3": batch(count=3),
        "count 2^31-1": batch(count=2**31 - 1),
        "a record longer than the batch": batch(payload=varint(1000) + section[1:]),
        "a record of negative length": batch(payload=varint(-5) + section[1:]),
        "bytes after the records": batch(payload=section + b"\0"),
        "a key longer than the record": batch(payload=section[:4] + varint(99) + section[5:]),
        "no gzip": batch(payload=section, attributes=GZIP),
        "no snappy": batch(payload=section, attributes=SNAPPY),
        "no lz4": batch(payload=section, attributes=LZ4),
        "no zstd": batch(payload=section, attributes=ZSTD),
        "a cut gzip": batch(payload=gzip.compress(section)[:-5], attributes=GZIP),
        "length 0": sound[:8] + struct.pack(">i", 0) + sound[12:],
        "length -1": sound[:8] + struct.pack(">i", -1) + sound[12:],
        "length 2^31-1": sound[:8] + struct.pack(">i", 2**31 - 1) + sound[12:],
        "last offset delta -1": batch_data(rows, last_offset=base - 1),
        "offset -1": struct.pack(">q", -1) + sound[8:],
        "offset 2^63-1": struct.pack(">q", 2**63 - 1) + sound[8:],
    }


class _OneLog(Root):
    """A root of one partition: two batches, one that lies, one more."""

    def __init__(self, path: Path, data: bytes, *, is_active: bool) -> None:
        self.bad = Stored(10, 11, data, [])
        batches = [stored(some(0, 5)), stored(some(5, 5)), self.bad, stored(some(12, 3))]
        segments = [Segment(log_name(0), 0, batches)]
        if not is_active:
            segments.append(Segment(log_name(20), 20, [stored(some(20, 3))]))
        self.log = Log("one", 0, segments, config={"cleanup.policy": "compact"})
        super().__init__(path, [self.log])


@pytest.mark.parametrize("is_active", [False, True])
@pytest.mark.parametrize("name", lying(0))
def test_a_batch_that_lies_is_a_corrupt_batch_and_hides_nothing_before_it(
    tmp_path: Path, name: str, is_active: bool
) -> None:
    root = _OneLog(tmp_path / "root", lying(10)[name], is_active=is_active)
    log = root.log
    below = [row for row in log.rows(committed=False) if row.offset < 10]
    engine = kafkalog.open(root.path)
    for committed in (True, False):
        assert read(directory_log_of(engine), log, committed=committed, end=10) == below
        with pytest.raises(CorruptBatchError, match=r"at byte \d+: expected"):
            read(directory_log_of(engine), log, committed=committed)
    assert len(engine.status(now_ms=NOW_MS)) == 1
    (stats,) = engine.clean("one", force=True, now_ms=NOW_MS)
    assert stats.error is not None
    engine.append("one", [("new", "v")], now_ms=NOW_MS)
    assert read(directory_log_of(engine), log, committed=False, end=10) == below


# --- names and offsets ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["", ".", "..", "a/b", "../x", "a b", "ä", "a\0b", "x" * 250, "a\n"]
)
def test_a_topic_name_kafka_forbids_is_refused_everywhere(tmp_path: Path, name: str) -> None:
    engine = kafkalog.open(tmp_path)
    calls: list[Callable[[], object]] = [
        lambda: engine.create_topic(name),
        lambda: engine.append(name, [("k", "v")]),
        lambda: list(engine.read(name, 0)),
        lambda: engine.describe(name),
        lambda: engine.delete_topic(name),
        lambda: engine.clean(name),
    ]
    for call in calls:
        with pytest.raises(InvalidInputError):
            call()
    assert not [entry for entry in tmp_path.iterdir() if entry.is_dir()]


@pytest.mark.parametrize(("start", "end"), [(-1, None), (0, 74), (74, None), (2**63, None)])
def test_an_offset_out_of_range_names_the_range(judge: Judge, start: int, end: int | None) -> None:
    engine = kafkalog.open(judge.root.path, read_only=True)
    with pytest.raises(OffsetOutOfRangeError, match=r"valid range is \[0, 73\]"):
        list(engine.read("t", 0, start, end))


# --- bombs ---------------------------------------------------------------------------------------

BOMB, SNAPPY_BOMB = 10 << 30, 1 << 30
"""Snappy packs zeros a twentieth as small, so its larger bomb would be half a gigabyte."""
PIECE = bytes(32 << 20)
PEAK_MIB = 832
"""The interpreter with its libraries (256 MiB), and a section at the limit (256 MiB) held twice."""
READER = """
import re, sys
from pathlib import Path
import kafkalog
from kafkalog.errors import KafkaLogError
from kafkalog.inspection.verify import verify
engine = kafkalog.open(sys.argv[1])
print("verified", *verify(Path(sys.argv[1]), deep=True))
try:
    rows = sum(batch.num_rows for batch in engine.read("one", 0))
    print("read", rows)
except KafkaLogError as fault:
    print("refused", fault)
(stats,) = engine.clean("one", force=True)
print("cleaned", stats.error)
try:
    print("erased", engine.erase("one", ["k"]).is_erased)
except KafkaLogError as fault:
    print("erased", fault)
print("peak", int(re.search(r"VmHWM:\\s*(\\d+)", Path("/proc/self/status").read_text())[1]) >> 10)
"""
"""VmHWM, for ru_maxrss is inherited: a child of a large test run begins with its parent's peak."""


def bomb(codec: int) -> bytes:
    """A section that decompresses to 10 GiB, or 1 GiB."""
    count = (SNAPPY_BOMB if codec == SNAPPY else BOMB) // len(PIECE)
    if codec == GZIP:
        return gzip.compress(PIECE) * count
    if codec == LZ4:
        return bytes(lz4.frame.compress(PIECE, store_size=False, block_linked=False)) * count
    if codec == ZSTD:
        return bytes(pa.Codec("zstd").compress(PIECE, asbytes=True)) * count
    block = bytes(snappy.compress(PIECE))
    return (
        b"\x82SNAPPY\0" + struct.pack(">ii", 1, 1) + (struct.pack(">i", len(block)) + block) * count
    )


def claim(codec: int) -> bytes:
    """A few bytes that only say they are 4 GiB."""
    if codec == SNAPPY:
        return b"\xff\xff\xff\xff\x0f" + b"\0" * 20
    head = lz4.frame.compress(b"x" * 100, content_checksum=False, store_size=True)
    if codec == LZ4:
        return bytes(head[:6] + struct.pack("<Q", 1 << 40) + head[14:])
    if codec == ZSTD:
        return b"\x28\xb5\x2f\xfd\xe0" + struct.pack("<Q", 1 << 40) + b"\x01\0\0"
    return gzip.compress(b"x" * 100)[:-4] + b"\xff" * 4


@pytest.mark.slow
@pytest.mark.parametrize("made", [bomb, claim])
@pytest.mark.parametrize("codec", [GZIP, SNAPPY, LZ4, ZSTD])
def test_a_bomb_is_refused_in_bounded_memory(
    tmp_path: Path, codec: int, made: Callable[[int], bytes]
) -> None:
    rows = [Record(10, 1, b"k", b"v"), Record(11, 2, b"l", b"w")]
    data = batch_data(rows, payload=made(codec), attributes=codec)
    root = _OneLog(tmp_path / "root", data, is_active=False)
    done = subprocess.run(
        [sys.executable, "-c", READER, str(root.path)], capture_output=True, text=True, check=True
    )
    lines = dict(line.split(" ", 1) for line in done.stdout.splitlines())
    assert "expected" in lines["refused"], done.stdout
    assert "expected" in lines["cleaned"], done.stdout
    assert "expected" in lines["verified"], done.stdout
    assert lines["erased"] != "True", done.stdout
    assert int(lines["peak"]) < PEAK_MIB, done.stdout
    assert done.stdout.count("\n") == 5
    print(codec, made.__name__, lines["peak"], "MiB", lines["refused"][-90:])
