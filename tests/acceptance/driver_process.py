"""The driver's process of the cluster's jobs (`cluster_driver`), asked line by line."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.acceptance.cluster import PATIENCE_S, Cluster, kill_session, wait_until

__all__ = ["Driver"]


class Driver:
    """A running driver; its checkpoints are in `scratch`, by topic."""

    def __init__(self, cluster: Cluster, scratch: Path, prefix: Sequence[str] = ()) -> None:
        """`prefix` is what stands before its command, as of another namespace."""
        self.scratch = scratch
        self.output = scratch / "output"
        environment = {**os.environ, "SPARK_HOME": str(cluster.home), "TMPDIR": str(scratch)}
        module = "tests.acceptance.cluster_driver"
        with self.output.open("wb") as errors:
            self.process = subprocess.Popen(
                [*prefix, sys.executable, "-m", module, cluster.address, str(scratch)],
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                start_new_session=True,
            )
        self._answers: queue.Queue[bytes] = queue.Queue()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()
        self._answer()

    def ask(self, do: str, **arguments: Any) -> Any:
        """Send a request, return its answer; an error there is an error here."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"do": do, **arguments}).encode() + b"\n")
        self.process.stdin.flush()
        return self._answer()

    def stop(self) -> int:
        """Kill it and all it has started; return how many processes that were."""
        count = kill_session(self.process)
        self._reader.join()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()
        return count

    def committed(self, topic: str) -> int:
        """Return how many micro-batches of the stream into a topic Spark has noted as done."""
        return self._noted(topic, "commits")

    def begun(self, topic: str) -> int:
        """Return how many Spark has begun."""
        return self._noted(topic, "offsets")

    def wait_for_commits(self, topic: str, count: int) -> None:
        """Wait until so many micro-batches are done."""
        wait_until(lambda: self.committed(topic) >= count, f"the stream into {topic} stands still")

    def _noted(self, topic: str, directory: str) -> int:
        try:
            names = os.listdir(self.scratch / topic / directory)
        except FileNotFoundError:
            return 0
        return 1 + max((int(name) for name in names if name.isdigit()), default=-1)

    def _answer(self) -> Any:
        try:
            line = self._answers.get(timeout=PATIENCE_S)
        except queue.Empty:
            line = b""
        assert line, f"no answer from the driver:\n{self.output.read_text()[-8000:]}"
        answer = json.loads(line)
        assert "error" not in answer, answer["error"]
        return answer["answer"]

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._answers.put(line)
        self._answers.put(b"")
