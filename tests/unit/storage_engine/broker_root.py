"""A log directory as a Kafka broker leaves it, or holds it, made with none of kafkalog's code."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.builders.batch_builder import BuiltBatch, batch
from tests.builders.segment_files import write_segment

TOPIC_ID = "AAAAAAAAAAAAAAAAAAAAAQ"
RECOVERY_POINT = "recovery-point-offset-checkpoint"
LOG_START = "log-start-offset-checkpoint"
HIGH_WATERMARK = "replication-offset-checkpoint"
CLEANER = "cleaner-offset-checkpoint"
CLEAN_SHUTDOWN = ".kafka_cleanshutdown"

_HOLDER = """
import fcntl, sys
with open(sys.argv[1], "a") as lock:
    fcntl.lockf(lock, fcntl.LOCK_EX)
    print("held", flush=True)
    sys.stdin.read()
"""


def batches(first: int, end: int) -> list[BuiltBatch]:
    """Batches of ten records each."""
    return [batch(offset, min(10, end - offset)) for offset in range(first, end, 10)]


@dataclass
class BrokerRoot:
    path: Path

    def __post_init__(self) -> None:
        self.path.mkdir(parents=True, exist_ok=True)
        (self.path / "meta.properties").write_text(
            "#\nversion=1\ncluster.id=c\nnode.id=1\ndirectory.id=d\n"
        )
        (self.path / ".lock").touch()
        self.checkpoints: dict[str, dict[str, int]] = {}

    def partition(
        self,
        name: str,
        bases: Sequence[int] = (0, 50),
        end: int = 100,
        *,
        topic_id: str | None = TOPIC_ID,
    ) -> Path:
        """Make a partition with segments of these bases; `name` is that of its directory."""
        directory = self.path / name
        directory.mkdir()
        for base, following in zip(bases, [*bases[1:], end], strict=True):
            write_segment(directory, base, batches(base, following))
        # Retention moves the first epoch's start along with the log's.
        (directory / "leader-epoch-checkpoint").write_text(f"0\n1\n0 {bases[0]}\n")
        if topic_id is not None:
            metadata = f"version: 0\ntopic_id: {topic_id}"
            (directory / "partition.metadata").write_text(metadata)
        return directory

    def checkpoint(self, name: str, offsets: Mapping[str, int]) -> None:
        """Put a checkpoint in place as a broker does: offsets by the partitions' directories."""
        self.checkpoints[name] = dict(offsets)
        lines = [
            f"{topic} {number} {offset}"
            for (topic, _, number), offset in (
                (key.rpartition("-"), value) for key, value in offsets.items()
            )
        ]
        temporary = self.path / f"{name}.tmp"
        temporary.write_text("\n".join(["0", str(len(lines)), *lines, ""]))
        temporary.rename(self.path / name)

    def shut_down(self) -> None:
        (self.path / CLEAN_SHUTDOWN).write_text('{"version":0,"brokerEpoch":5}')

    @contextlib.contextmanager
    def alive(self) -> Iterator[None]:
        """Hold `.lock` from another process, as a running broker does."""
        holder = subprocess.Popen(
            [sys.executable, "-c", _HOLDER, str(self.path / ".lock")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert holder.stdout is not None and holder.stdin is not None
        try:
            assert holder.stdout.readline() == b"held\n"
            yield
        finally:
            holder.stdin.close()
            holder.wait()
            holder.stdout.close()

    def contents(self) -> dict[str, bytes | None]:
        """Everything in the directory: files with their bytes, directories as None."""
        return {
            str(path.relative_to(self.path)): path.read_bytes() if path.is_file() else None
            for path in sorted(self.path.rglob("*"))
        }
