"""Several processes at one log: writers take turns, readers see whole commits, kills lose none."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from kafkalog.storage_engine.directory.directory_log import DirectoryLog
from tests.builders.log_builder import LogBuilder

# The children are forked from one process that has imported and compiled everything.
WRITERS = """
import os, sys
from kafkalog.storage_engine.directory.directory_log import DirectoryLog
root, count, rounds = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
DirectoryLog(root).append("warm", [("k", "v")])
children = []
for number in range(count):
    child = os.fork()
    if child == 0:
        engine = DirectoryLog(root)
        for n in range(rounds):
            # one commit over all partitions: key `w<writer>-<n>-<i>`
            engine.append("t", [(f"w{number}-{n}-{i}", f"{n}") for i in range(20)])
        os._exit(0)
    children.append(child)
sys.exit(any(os.waitpid(child, 0)[1] for child in children))
"""

# Each child appends commits, noting each one when it is acknowledged, until it is killed.
KILLED = """
import os, random, signal, sys, time
from kafkalog.storage_engine.directory.directory_log import DirectoryLog
from kafkalog.storage_engine.metadata.writer import Writer
from kafkalog.storage_engine.writing.staging import StagedWriter
from kafkalog.storage_engine.metadata.writer import writer_slug
import pyarrow as pa
root, notes, kills, seed = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
random.seed(seed)

def stage(engine, batch_id):
    writer = StagedWriter(engine, engine.state(), now_ms=lambda: int(time.time() * 1000),
                          writer_slug=writer_slug("q", "t"), batch_id=batch_id)
    keys = [f"b{batch_id}-{i}".encode() for i in range(30)]
    writer.append("t", pa.RecordBatch.from_pydict({"key": keys, "value": keys}))
    return writer.finish()

def work():
    engine = DirectoryLog(root)
    known = engine.state().writers.get("q t")
    batch_id = max(0, known.batch_id if known else 0)  # what was committed last is tried again
    with open(notes, "a") as acknowledged:
        while True:
            engine.commit([stage(engine, batch_id)], writer=Writer("q", "t", batch_id))
            acknowledged.write(f"{batch_id}\\n")
            acknowledged.flush()
            batch_id += 1

DirectoryLog(root).append("warm", [("k", "v")])
stage(DirectoryLog(root), 0)
for _ in range(kills):
    child = os.fork()
    if child == 0:
        work()
    time.sleep(random.uniform(0.01, 0.15))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
"""


def create(root: Path) -> DirectoryLog:
    return LogBuilder(root).topic("t", 4, segment_bytes=3_000).topic("warm").engine


def keys(engine: DirectoryLog) -> list[str]:
    found = []
    for partition, (start, end) in engine.offsets("t").items():
        offsets: list[int] = []
        for batch in engine.read("t", partition, start, end):
            offsets += batch["offset"].to_pylist()
            found += [key.decode() for key in batch["key"].to_pylist()]
        assert offsets == list(range(start, end))
    return found


@pytest.mark.slow
def test_writers_of_several_processes_take_turns_and_readers_see_whole_commits(
    tmp_path: Path,
) -> None:
    engine = create(tmp_path)
    process = subprocess.Popen([sys.executable, "-c", WRITERS, str(tmp_path), "3", "25"])
    reader = DirectoryLog(tmp_path, read_only=True)
    while process.poll() is None:
        state = reader.state()
        ends = {n: p.high_watermark for n, p in enumerate(state.topics["t"].partitions)}
        seen = sum(
            batch.num_rows
            for partition, end in ends.items()
            for batch in reader.read("t", partition, 0, end)
        )
        assert seen % 20 == 0  # the state is one point of the journal: whole commits only
    assert process.returncode == 0
    found = keys(engine)
    assert len(found) == len(set(found)) == 3 * 25 * 20


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
def test_a_writer_killed_again_and_again_loses_and_doubles_nothing(
    tmp_path: Path, seed: int
) -> None:
    engine = create(tmp_path / "log")
    notes = tmp_path / "acknowledged"
    notes.touch()
    command = [sys.executable, "-c", KILLED, str(engine.root), str(notes), "60", str(seed)]
    subprocess.run(command, check=True, timeout=120)
    acknowledged = {int(line) for line in notes.read_text().split("\n")[:-1]}
    found = keys(engine)
    assert len(found) == len(set(found))
    committed = {int(key[1:].split("-")[0]) for key in found}
    assert acknowledged <= committed
    assert committed == set(range(max(committed) + 1))
    assert len(found) == 30 * len(committed)
