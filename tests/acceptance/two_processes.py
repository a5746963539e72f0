"""Two processes that do the same at the same time, which was meant for one of them, or for both.

Each says when it is ready, waits for the other, and tells what it counted, and from when to when it
was at work: if one began after the other's end, nothing was shown, and that is an error.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

__all__ = ["APPENDER", "CLEANER", "ZOMBIE", "two"]

APPENDER = """
import sys, time
from pathlib import Path
import kafkalog

log = kafkalog.open(sys.argv[1])
gate = Path(sys.argv[3])
print("ready", flush=True)
while not gate.exists():
    time.sleep(0.001)
began = time.monotonic()
for number in range(25):
    log.append("t", [(f"{sys.argv[2]}-{number}-{row}", "v") for row in range(10)])
print(250, began, time.monotonic())
"""

ZOMBIE = """
import sys, time
from pathlib import Path
import pyarrow as pa
from kafkalog.errors import CommitConflictError, StorageError
from kafkalog.storage_engine.directory.directory_log import DirectoryLog
from kafkalog.storage_engine.metadata.writer import Writer
from kafkalog.storage_engine.writing.staging import StagedWriter
from kafkalog.storage_engine.metadata.writer import writer_slug

root, number, gate = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
engine = DirectoryLog(root)
print("ready", flush=True)
while not gate.exists():
    time.sleep(0.001)
began, landed = time.monotonic(), 0
for batch_id in range(25):
    writer = StagedWriter(engine, engine.state(), now_ms=lambda: int(time.time() * 1000),
                          writer_slug=writer_slug("query", "t"), batch_id=batch_id, attempt=number)
    keys = [b"%d-%d" % (batch_id, row) for row in range(10)]
    writer.append("t", pa.RecordBatch.from_pydict({"key": keys, "value": keys}))
    try:
        message = writer.finish()
        landed += not engine.commit([message], writer=Writer("query", "t", batch_id)).skipped
    except CommitConflictError:
        pass  # the other one is ahead
    except StorageError as fault:
        assert "missing" in str(fault) or "was removed" in str(fault), fault
print(landed, began, time.monotonic())
"""

CLEANER = """
import sys, time
from pathlib import Path
import kafkalog

log = kafkalog.open(sys.argv[1])
gate = Path(sys.argv[3])
print("ready", flush=True)
while not gate.exists():
    time.sleep(0.001)
began, removed = time.monotonic(), 0
for _ in range(10):
    for stats in log.clean("t", force=True):
        assert stats.error is None, stats.error
        removed += stats.records_removed
print(removed, began, time.monotonic())
"""


def two(program: str, roots: tuple[Path, Path], gate: Path) -> list[int]:
    """Run a program in two processes that begin at the same time; return what each has counted.

    Each has its own path of the log.
    """
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", program, str(roots[number]), str(number), str(gate)],
            stdout=subprocess.PIPE,
            text=True,
        )
        for number in range(2)
    ]
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    gate.touch()
    told = [process.communicate()[0].split() for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    last_begin = max(float(began) for _, began, _ in told)
    first_end = min(float(ended) for _, _, ended in told)
    assert last_begin < first_end, f"one after the other, which shows nothing: {told}"
    return [int(count) for count, _, _ in told]
