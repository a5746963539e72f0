"""The processes around a log under torture.

`python -m tests.acceptance.torture_processes append|read|clean|delete LOG SECONDS SEED`; each
prints one line of JSON when its time is over.
"""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import kafkalog
from kafkalog.cleaner import CleanerConfig
from kafkalog.cleaner.key_index.latest_view import latest
from kafkalog.cleaner.schedule.manager import clean_filthiest, retain, sweep
from kafkalog.log import KafkaLog
from kafkalog.schema import changelog_schema
from kafkalog.storage_engine.place import directory_log_of
from kafkalog.storage_engine.reading.partition_snapshot import PartitionSnapshot
from tests.acceptance.torture_script import PARTITIONS, TOPIC, Commit, Raw, Record, Script

TINY = 24 * 40
"""Bytes for 36 keys: nearly every cleaning has more."""


def append(path: Path, seconds: float, seed: int) -> dict[str, Any]:
    """Take step after step; transactions stay open at the end."""
    script = Script(seed)
    deadline = time.monotonic() + seconds
    with kafkalog.open(path) as log:
        while time.monotonic() < deadline:
            take(log, script.next())
            time.sleep(0.002)
    return {"steps": script.steps}


def take(log: KafkaLog, step: Commit | Raw) -> None:
    if isinstance(step, Raw):
        log.append_raw(TOPIC, step.partition, step.batch.data)
    else:
        log.append(TOPIC, step.records)


def clean(path: Path, seconds: float, seed: int) -> dict[str, Any]:
    """Clean without a pause, with much memory and with little, in rounds and with a spill."""
    draw = random.Random(seed)
    deadline = time.monotonic() + seconds
    rounds = spilled = 0
    errors: list[str] = []
    with kafkalog.open(path) as log:
        while time.monotonic() < deadline:
            config = CleanerConfig(
                dedupe_buffer_size=draw.choice([TINY, 1 << 20]), spill=draw.random() < 0.7
            )
            now_ms = time.time_ns() // 1_000_000
            stats = clean_filthiest(directory_log_of(log), now_ms=now_ms, config=config)
            errors += [
                entry.error for entry in retain(directory_log_of(log), now_ms=now_ms) if entry.error
            ]
            sweep(directory_log_of(log), now_ms=now_ms)
            if stats is None:
                continue
            errors += [stats.error] if stats.error else []
            rounds += stats.rounds
            spilled += stats.spilled_bytes > 0
    return {"rounds": rounds, "spilled": spilled, "errors": errors}


def delete(path: Path, seconds: float, seed: int) -> dict[str, Any]:
    """Let partitions begin later and later; say from where on."""
    draw = random.Random(seed)
    deadline = time.monotonic() + seconds
    starts = [0] * PARTITIONS
    with kafkalog.open(path) as log:
        while time.monotonic() < deadline:
            number = draw.randrange(PARTITIONS)
            state = log.describe(TOPIC).partitions[number]
            stable = max(state.last_stable_offset, state.log_start_offset)
            before = draw.randint(state.log_start_offset, stable)
            if draw.random() < 0.8:  # mostly a little
                before = min(before, state.log_start_offset + 50)
            starts[number] = log.delete_records(TOPIC, number, before)
            time.sleep(draw.uniform(0, 0.4))
    return {"starts": starts}


# --- reading -------------------------------------------------------------------------------------


def read(path: Path, seconds: float, seed: int) -> dict[str, Any]:
    """Read all partitions again and again, and check each time what is found."""
    reader = Reader(kafkalog.open(path, read_only=True), Script(seed))
    deadline = time.monotonic() + seconds
    count = 0
    while time.monotonic() < deadline:
        reader.check()
        count += 1
        time.sleep(0.02)
    return {"readings": count}


class Reader:
    """Checks a log against its script."""

    def __init__(self, log: KafkaLog, script: Script) -> None:
        self.log, self.script = log, script
        self._seen = [(0, 0, 0)] * PARTITIONS

    def check(self, *, is_over: bool = False) -> list[dict[int, Record]]:
        """Read every partition; returns what was found. With `is_over` the script has ended."""
        return [self.check_partition(number, is_over=is_over) for number in range(PARTITIONS)]

    def check_partition(self, number: int, *, is_over: bool = False) -> dict[int, Record]:
        """Nothing but what was written and may be seen, nothing twice, no latest record gone."""
        with directory_log_of(self.log).snapshot(TOPIC, number, whole=True) as snapshot:
            state = snapshot.state
            high_watermark = state.high_watermark
            found = rows_of(snapshot, self._changelog(snapshot))
            latest_values = rows_of(snapshot, self._latest(snapshot))
        partition = self.script.partitions[number]
        if not is_over:
            self.script.extend_to(number, high_watermark)
        stable = partition.stable[high_watermark]
        assert state.last_stable_offset == stable
        start = state.log_start_offset
        seen = (high_watermark, start, state.first_dirty_offset)
        assert all(map(int.__le__, self._seen[number], seen)), (self._seen[number], seen)
        self._seen[number] = seen

        written = {
            offset: record
            for offset, record in enumerate(partition.visible[:stable])
            if record is not None and offset >= start
        }
        wrong = {o: r for o, r in found.items() if written.get(o) != r}
        assert not wrong, (number, start, stable, sorted(wrong))
        cleaned_to = max(state.first_dirty_offset, state.cleaning_offset)
        missing = {o for o in written if o >= cleaned_to} - found.keys()
        assert not missing, (number, cleaned_to, missing)
        latest_records = {key: offset for offset, (key, _) in written.items()}
        gone = {o for o in latest_records.values() if o not in found}
        assert all(written[o][1] is None for o in gone), (number, start, cleaned_to, gone)
        clean_keys = [key for o, (key, _) in found.items() if o < state.first_dirty_offset]
        assert len(clean_keys) == len(set(clean_keys))
        expected = {o: written[o] for o in latest_records.values() if written[o][1] is not None}
        assert latest_values == expected
        return found

    @staticmethod
    def _changelog(snapshot: PartitionSnapshot) -> Any:
        start = snapshot.state.log_start_offset
        end = max(start, snapshot.state.last_stable_offset)
        return snapshot.read(start, end, schema=changelog_schema())

    @staticmethod
    def _latest(snapshot: PartitionSnapshot) -> Any:
        end = snapshot.state.high_watermark
        return latest(snapshot, end, budget_bytes=1 << 20, schema=changelog_schema())


def rows_of(snapshot: PartitionSnapshot, batches: Any) -> dict[int, Record]:
    """Collect rows by offset; none twice, and a changelog's in order."""
    found: dict[int, Record] = {}
    for rows in batches:
        offsets = rows["offset"].to_pylist()
        assert not found.keys() & set(offsets) and len(offsets) == len(set(offsets))
        pairs = zip(rows["key"].to_pylist(), rows["value"].to_pylist(), strict=True)
        found.update(zip(offsets, pairs, strict=True))
    assert list(found) == sorted(found)
    return found


ROLES: dict[str, Callable[[Path, float, int], dict[str, Any]]] = {
    "append": append,
    "clean": clean,
    "delete": delete,
    "read": read,
}

if __name__ == "__main__":
    role, log_path, duration, number_of_seed = sys.argv[1:]
    print(json.dumps(ROLES[role](Path(log_path), float(duration), int(number_of_seed))))
