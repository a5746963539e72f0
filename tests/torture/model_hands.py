"""The log's side of the model test: what is done to a log, in this process or in another one.

    python -m tests.torture.model_hands

is the other process: it does what it is told by pickles on its standard input.
"""

from __future__ import annotations

import itertools
import logging
import pickle
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import pyarrow as pa

from kafkalog.cleaner import CleanerConfig
from kafkalog.cleaner.key_index.latest_view import latest
from kafkalog.cleaner.schedule.manager import clean, clean_filthiest, retain, sweep
from kafkalog.cleaner.state.stats import CleanerStats
from kafkalog.log import KafkaLog
from kafkalog.schema import changelog_schema
from kafkalog.storage_engine.log.results import CommitResult
from kafkalog.storage_engine.metadata.state import PartitionState
from kafkalog.storage_engine.metadata.writer import Writer
from kafkalog.storage_engine.place import directory_log_of
from kafkalog.storage_engine.writing.staging import StagedWriter
from tests.torture.model_copies import CopiedLog, rows_of
from tests.torture.model_log import Row

__all__ = ["Hands", "OtherProcess"]

LOOKS_MAX: Final = 3_000
"""How often a cleaning of so small a log looks up at most."""
Wanted = tuple[int, bytes, bytes | None, int]
"""A row to append: partition, key, value, timestamp."""


class Hands:
    """Does one thing after another to a log; results can be pickled."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.log = KafkaLog(root)

    def reopen(self, *, closes: bool) -> None:
        """Go on with another engine, as a new process would."""
        if closes:
            self.log.close()
        self.log = KafkaLog(self.root)

    # --- topics ---

    def create(self, topic: str, partitions: int, config: Mapping[str, str], now_ms: int) -> None:
        """Create a topic."""
        self.log.create_topic(topic, partitions, config, now_ms=now_ms)

    def alter(self, topic: str, config: Mapping[str, str], now_ms: int) -> None:
        """Change configs."""
        self.log.alter_topic(topic, config, now_ms=now_ms)

    def delete(self, topic: str, now_ms: int) -> None:
        """Delete a topic."""
        self.log.delete_topic(topic, now_ms=now_ms)

    def config(self, topic: str) -> dict[str, str] | None:
        """Return a topic's configs; None where there is no such topic."""
        known = directory_log_of(self.log).state().topics.get(topic)
        return None if known is None else dict(known.config)

    def states(self, topic: str) -> list[PartitionState]:
        """Return what the journal says of a topic's partitions."""
        return list(self.log.describe(topic).partitions)

    # --- writing ---

    def append(
        self, topic: str, rows: Sequence[Wanted], writer: Writer | None, size: int, now_ms: int
    ) -> CommitResult:
        """Append rows in one commit, in batches of about `size` bytes."""
        numbers, keys, values, times = zip(*rows, strict=True)
        columns = {
            "partition": pa.array(numbers, pa.int32()),
            "key": pa.array(keys, pa.binary()),
            "value": pa.array(values, pa.binary()),
            "timestamp": pa.array(times, pa.int64()),
        }
        log = self.log
        staged = StagedWriter(
            None, directory_log_of(log).state(), now_ms=lambda: now_ms, batch_size=size
        )
        staged.append(topic, pa.RecordBatch.from_pydict(columns))
        return directory_log_of(log).commit([staged.finish()], writer=writer, now_ms=now_ms)

    def append_raw(self, topic: str, partition: int, data: bytes, now_ms: int) -> None:
        """Append a batch as it is."""
        self.log.append_raw(topic, partition, data, now_ms=now_ms)

    # --- reading ---

    def rows(
        self,
        topic: str,
        partition: int,
        start: int | None = None,
        end: int | None = None,
        *,
        committed: bool = False,
    ) -> list[Row]:
        """Return the records of a range."""
        level = "read_committed" if committed else "read_uncommitted"
        found = self.log.read(topic, partition, start, end, isolation_level=level)
        return rows_of(found)

    def latest(self, topic: str, partition: int, budget: int) -> list[Row]:
        """Return the latest record of every key."""
        with directory_log_of(self.log).snapshot(topic, partition, whole=True) as snapshot:
            end = snapshot.state.high_watermark
            found = latest(snapshot, end, budget_bytes=budget, schema=changelog_schema())
            return rows_of(found)

    def lookup(self, topic: str, key: bytes, partition: int) -> Row | None:
        """Return the latest record of a key."""
        found = self.log.lookup(topic, key, partition=partition)
        if found is None:
            return None
        return Row(found.offset, found.timestamp_ms, found.key, found.value)

    def lookups(self, topic: str, keys: Sequence[bytes], partition: int) -> dict[bytes, Row]:
        """Return the latest record of each key that has one, looked up all at once."""
        return CopiedLog(directory_log_of(self.log)).lookups(topic, keys, partition)

    # --- cleaning and deleting ---

    def clean(self, config: CleanerConfig, now_ms: int, *, force: bool) -> list[CleanerStats]:
        """Clean all that is due, or all."""
        looks = itertools.count()

        def look() -> None:
            if next(looks) > LOOKS_MAX:
                raise RuntimeError("the cleaning never ends")

        return clean(
            directory_log_of(self.log), now_ms=now_ms, config=config, force=force, check_abort=look
        )

    def clean_filthiest(self, config: CleanerConfig, now_ms: int) -> CleanerStats | None:
        """Clean a round of what is due most."""
        return clean_filthiest(directory_log_of(self.log), now_ms=now_ms, config=config)

    def retain(self, now_ms: int) -> list[str | None]:
        """Apply retention to all topics, and sweep; returns the errors."""
        found = retain(directory_log_of(self.log), now_ms=now_ms, is_skipped=lambda _: False)
        sweep(directory_log_of(self.log), now_ms=now_ms)
        return [stats.error for stats in found]

    def delete_records(self, topic: str, partition: int, before: int, now_ms: int) -> int:
        """Let a partition begin later."""
        return self.log.delete_records(topic, partition, before, now_ms=now_ms)


class OtherProcess:
    """`Hands` of another process, which lives until `close`; one log at a time."""

    def __init__(self) -> None:
        command = [sys.executable, "-m", "tests.torture.model_hands"]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=Path(__file__).resolve().parents[2],
        )

    def call(self, name: str, *arguments: Any, **options: Any) -> Any:
        """Call a method there; raises what it raised, as an AssertionError."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        pickle.dump((name, arguments, options), self._process.stdin)
        self._process.stdin.flush()
        is_raised, result = pickle.load(self._process.stdout)
        assert not is_raised, f"in another process: {result}"
        return result

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments, **options: self.call(name, *arguments, **options)

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.communicate()


def main() -> None:
    """Do what the standard input says, until it ends."""
    logging.disable(logging.WARNING)
    hands: Hands | None = None
    output, sys.stdout = sys.stdout.buffer, sys.stderr
    while True:
        try:
            name, arguments, options = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        result: tuple[bool, Any]
        try:
            if name == "open":
                hands = Hands(*arguments)
                result = False, None
            else:
                result = False, getattr(hands, name)(*arguments, **options)
        except Exception as fault:
            result = True, f"{type(fault).__name__}: {fault}"
        pickle.dump(result, output)
        output.flush()


if __name__ == "__main__":
    main()
