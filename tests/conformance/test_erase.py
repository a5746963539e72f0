"""Keys that are erased, as Kafka's dump and grep see them: in every file before, in none after."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pytest

import kafkalog
from kafkalog.log import KafkaLog
from kafkalog.storage_engine.log.results import STAGED_RETENTION_MS
from kafkalog.storage_engine.place import directory_log_of
from kafkalog.storage_engine.writing.staging import StagedWriter
from tests.conformance.kafka import dump_log_segments
from tests.conformance.our_log import CODECS, NOW_MS

pytestmark = [pytest.mark.peers, pytest.mark.slow]

KEY = "user-4711@example.org"
TOPIC = "customers"
OTHERS = [f"customer-{number}" for number in range(200)]
DUMPED_NAME = f"{0:020d}.log"
"""Kafka's tool goes by it: it would not look into a file of any other kind."""


@pytest.fixture
def log(tmp_path: Path) -> KafkaLog:
    """The key in clean and dirty segments, retired ones and a staged file, in every codec."""
    log = kafkalog.open(tmp_path / "log")
    log.create_topic(TOPIC, config={"segment.bytes": "6000"})
    for codec in CODECS:
        write(log, codec)
    log.clean(TOPIC, force=True, now_ms=NOW_MS)
    for codec in CODECS:
        write(log, codec)
    task = StagedWriter(
        directory_log_of(log),
        directory_log_of(log).state(),
        writer_slug="ab" * 16,
        now_ms=lambda: NOW_MS,
    )
    task.append(TOPIC, pa.record_batch({"key": [KEY.encode(), b"another"], "value": [b"v"] * 2}))
    task.finish()
    return log


def write(log: KafkaLog, codec: str) -> None:
    log.alter_topic(TOPIC, {"compression.type": codec}, now_ms=NOW_MS)
    log.append(TOPIC, [(key, f"in {codec}") for key in (KEY, *OTHERS)], now_ms=NOW_MS)


def files_of_batches(root: Path) -> list[Path]:
    return [
        path for path in sorted(root.rglob("*"))
        if ".log" in path.suffixes or path.suffix == ".staged"
    ]  # fmt: skip


def dumped(paths: Sequence[Path], scratch: Path) -> dict[Path, list[str]]:
    """Return the lines that Kafka's tool prints of each file, decompressed."""
    copies = {}
    for number, path in enumerate(paths):
        copy = scratch / str(number) / DUMPED_NAME
        copy.parent.mkdir(parents=True)
        shutil.copyfile(path, copy)
        copies[path] = copy
    _, *parts = dump_log_segments(copies.values(), "--print-data-log").split("Dumping ")
    shutil.rmtree(scratch)
    found = {Path(lines[0]): lines[1:] for lines in (part.splitlines() for part in parts)}
    return {path: found[copy] for path, copy in copies.items()}


def records(lines: Sequence[str]) -> list[str]:
    return [line for line in lines if line.startswith("| offset:")]


def records_of_the_key(lines: Sequence[str]) -> int:
    return sum(f" key: {KEY} " in f"{line} " for line in records(lines))


def files_that_grep_finds(root: Path) -> list[str]:
    found = subprocess.run(
        ["grep", "-rlaF", "--", KEY, str(root)], check=False, capture_output=True, text=True
    )
    return found.stdout.splitlines()


def test_kafkas_dump_and_grep_find_the_key_before_and_nowhere_after(
    peers: None, log: KafkaLog, tmp_path: Path
) -> None:
    root, scratch = log.root, tmp_path / "scratch"
    before = dumped(files_of_batches(root), scratch)
    holders = {path: records_of_the_key(lines) for path, lines in before.items()}
    kinds = Counter(path.suffix for path, count in holders.items() if count)
    assert kinds.keys() == {".log", ".deleted", ".staged"}
    assert kinds[".log"] >= 3  # a clean one, dirty ones and the active one
    headers = [line for path in holders for line in before[path] if "compresscodec: " in line]
    assert len({line.split("compresscodec: ")[1].split()[0] for line in headers}) == len(CODECS)

    found = log.occurrences(TOPIC, [KEY], now_ms=NOW_MS)
    assert {file.file.path: file.record_count for file in found.files if file.found} == {
        path: count for path, count in holders.items() if count
    }
    (staged,) = root.glob("*.staged")
    erasure = log.erase(TOPIC, [KEY], now=True, now_ms=NOW_MS)
    assert [one.path for one in erasure.after.residuals] == [staged]
    assert files_that_grep_finds(root) in ([], [str(staged)])  # it is compressed

    os.utime(staged, (0, 0))  # nobody has committed it in all that time
    later_ms = max(NOW_MS, STAGED_RETENTION_MS + 1)
    assert log.erase(TOPIC, [KEY], now=True, now_ms=later_ms).is_erased
    after = dumped(files_of_batches(root), scratch)
    assert sum(len(records(lines)) for lines in after.values()) == len(OTHERS)
    assert not any(KEY in line for lines in after.values() for line in lines)
    assert files_that_grep_finds(root) == []
