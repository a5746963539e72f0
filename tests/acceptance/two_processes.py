"""Two processes that do the same at the same time, which was meant for one of them."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

__all__ = ["CLEANER", "ZOMBIE", "two"]

ZOMBIE = """
import sys, time
from pathlib import Path
import pyarrow as pa
import kafkalog
from kafkalog.errors import CommitConflictError, StorageError
from kafkalog.storage_engine.commit import Writer
from kafkalog.storage_engine.staging import StagedWriter, writer_slug

root, number, gate = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
log = kafkalog.open(root)
while not gate.exists():
    time.sleep(0.001)
landed = 0
for batch_id in range(25):
    writer = StagedWriter(Path(root), log.state(), now_ms=lambda: int(time.time() * 1000),
                          writer_slug=writer_slug("query", "t"), batch_id=batch_id, attempt=number)
    keys = [b"%d-%d" % (batch_id, row) for row in range(10)]
    writer.append("t", pa.RecordBatch.from_pydict({"key": keys, "value": keys}))
    try:
        message = writer.finish()
        landed += not log.commit([message], writer=Writer("query", "t", batch_id)).skipped
    except CommitConflictError:
        pass  # the other one is ahead
    except StorageError as fault:
        assert "missing" in str(fault) or "was removed" in str(fault), fault
print(landed)
"""

CLEANER = """
import sys, time
from pathlib import Path
import kafkalog

log = kafkalog.open(sys.argv[1])
gate = Path(sys.argv[3])
while not gate.exists():
    time.sleep(0.001)
removed = 0
for _ in range(10):
    for stats in log.clean("t", force=True):
        assert stats.error is None, stats.error
        removed += stats.records_removed
print(removed)
"""


def two(program: str, root: Path, gate: Path) -> list[int]:
    """Run a program in two processes that begin at the same time; return what each has counted."""
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", program, str(root), str(number), str(gate)],
            stdout=subprocess.PIPE,
            text=True,
        )
        for number in range(2)
    ]
    time.sleep(0.5)  # most of what they import; which of them is first does not matter
    gate.touch()
    counted = [process.communicate()[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    return [*map(int, counted)]
