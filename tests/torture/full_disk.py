"""Fill the disk under an upsert; table, dead letters and position change together or not at all.

A table in SQLite, its dead-letter topic and SQLite's temporary files are on a small disk (a tmpfs).
Micro-batches with new, changed, deleted and bad records go there, by the call that Spark makes for
each. For every one the disk is full at first, and then it has one block more each time, until the
micro-batch lands. Each write of an upsert that needs a block has thus been refused once.

After each refusal there is room again. The error must be one line that names the database or the
log. The table and its position must be as before. The dead letters of the micro-batch must all be
there, or none. The upsert continues in the same process, or as if in a new one. Once it lands, the
table has what a model says, each dead letter is there once, and a repetition changes nothing.

    python -m tests.torture.full_disk [--quick] [--seed N] [--only DISK]

The program needs root, to mount a disk; without it, it says so and ends. A DISK is a number, whose
draws `--only` repeats. `make kill-test` runs the same with a Spark query and its checkpoint.
"""

from __future__ import annotations

import json
import os
import random
import sys
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pytest

from kafkalog.errors import StorageError
from kafkalog.sink.upsert import Batch, SQLiteUpsert
from kafkalog.sink.upsert.bad_records import Refusal, plan_number
from kafkalog.storage_engine.directory.directory_log import DirectoryLog
from kafkalog.storage_engine.metadata.writer import Writer, writer_slug
from kafkalog.storage_engine.writing.staging import StagedWriter
from tests.acceptance.mounts import Disk, disk
from tests.torture import Tally, parser
from tests.torture.memory import forget
from tests.torture.rows import Rows
from tests.torture.rows import batch as record_batch
from tests.torture.scratch import scratch
from tests.unit.sink.sqlite_rows import LEADING, batch, query

__all__ = ["main", "refused_upserts"]

TARGET: Final = 1_000
QUICK: Final = 40
_BATCHES: Final = 4
"""Micro-batches of one disk."""
_BLOCKS_MAX: Final = 400
NAMES: Final = ["key", "value"]
KINDS: Final = ["TEXT", "TEXT"]
LETTERS: Final = "bad"
_CHECKED: Final = "CREATE TABLE stock (key TEXT PRIMARY KEY, value TEXT CHECK (value < 'z'))"
_CHILD: Final = "from tests.torture.full_disk import child; child()"
_RECORDS: Any = object()
"""The records as Spark has them, which `leave_out_refused` does not need here."""
Record = tuple[int, str, str | None]
"""(offset, key, value); a deletion has no value, and the table refuses one that begins with z."""


class Upsert(SQLiteUpsert):
    """An upsert whose dead letters are committed to the log as the sink does it, without Spark."""

    def __init__(self, directory: Path) -> None:
        self.log = directory / "log"
        super().__init__(
            directory / "follow.db",
            "stock",
            timeout_s=0.2,
            path=self.log,
            on_bad_record=f"deadletter:{LETTERS}",
        )

    def leave_out_refused(self, df: Any, batch: Batch, refused: Sequence[Refusal]) -> None:
        plan = plan_number(batch.batch_id, batch.end_offsets, 0)
        with DirectoryLog(self.log) as engine:
            engine.create_topic(LETTERS, 1, {"cleanup.policy": "delete"}, exist_ok=True)
            staged = StagedWriter(
                engine,
                engine.state(),
                now_ms=lambda: batch.now_ms,
                writer_slug=writer_slug("upsert", "*"),
                batch_id=plan,
                spark_partition=0,
            )
            letters: Rows = [(b"%d" % each.offset, each.reason.encode()) for each in refused]
            try:
                staged.append(LETTERS, record_batch(letters))
                message = staged.finish()
            except BaseException:
                staged.discard()
                raise
            engine.commit([message], writer=Writer("upsert", "*", plan), reset_writer=True)

    def take_records(self, number: int, records: Sequence[Record]) -> bool:
        """Apply a micro-batch as Spark has it applied."""
        rows = [(value is None, "t", 0, offset, None) for offset, _, value in records]
        leading = [
            pa.array(column, kind)
            for column, kind in zip(zip(*rows, strict=True), LEADING.values(), strict=True)
        ]
        own = [pa.array([record[place] for record in records], pa.string()) for place in (1, 2)]
        arrived = pa.RecordBatch.from_arrays([*leading, *own], names=[*LEADING, *NAMES])
        return self.apply(batch(number), NAMES, KINDS, [arrived], df=_RECORDS)

    def letters(self) -> list[int]:
        """Return the offsets of the records whose dead letters are in the log."""
        if not self.log.exists():
            return []
        with DirectoryLog(self.log, read_only=True) as engine:
            if LETTERS not in engine.topics():
                return []
            found = engine.read(LETTERS, 0, None, columns=("key",))
            return [int(key) for each in found for key in each.column(0).to_pylist()]

    def shown(self) -> tuple[Any, ...]:
        """Return the rows of the table, and its positions."""
        database = Path(self.database)
        return query(database, "SELECT * FROM stock ORDER BY key"), self.positions()


class Life:
    """A disk, and the micro-batches that go there."""

    def __init__(self, small: Disk, seed: int, number: int) -> None:
        self.refused = self.letters_waited = 0
        self.faults: list[str] = []
        self._disk = small
        self._dice = random.Random(f"{seed} {number}")
        self._model: dict[str, str] = {}
        self._letters: list[int] = []
        self._upsert = Upsert(small.mount_point)
        query(Path(self._upsert.database), _CHECKED)
        DirectoryLog(self._upsert.log).close()

    def run(self) -> None:
        """Bring the micro-batches one after the other, up to a fault."""
        for number in range(_BATCHES):
            self._bring(number)
            if self.faults:
                return

    def _bring(self, number: int) -> None:
        records = self._drawn(number)
        before = self._upsert.shown()
        bad = [offset for offset, _, value in records if value is not None and value > "z"]
        for blocks in range(_BLOCKS_MAX):
            self._disk.leave(blocks)
            error = ""
            try:
                self._upsert.take_records(number, records)
            except (StorageError, OSError) as fault:
                error = str(fault)
            finally:
                self._disk.relieve()
            if self._dice.random() < 0.3:  # another process goes on
                forget()
                self._upsert = Upsert(self._disk.mount_point)
            if not error:
                break
            self.refused += 1
            self._check_refused(error, before, bad)
            if self.faults:
                return
        else:
            self.faults.append(f"micro-batch {number} never fits")
            return
        self._letters += bad
        for _, key, value in records:
            if value is None:
                self._model.pop(key, None)
            elif value < "z":
                self._model[key] = value
        self._check_landed(number, records)

    def _check_refused(self, error: str, before: tuple[Any, ...], bad: list[int]) -> None:
        if "\n" in error or str(self._disk.mount_point) not in error:
            self.faults.append(f"the error is not one line that names a file: {error!r}")
        if self._upsert.shown() != before:
            self.faults.append(f"the table or its position has changed, after: {error}")
        letters = self._upsert.letters()
        if letters not in (self._letters, [*self._letters, *bad]):
            self.faults.append(f"dead letters: {letters}, expected {bad} beside {self._letters}")
        self.letters_waited += letters != self._letters

    def _check_landed(self, number: int, records: Sequence[Record]) -> None:
        for turn in ("it landed", "it came again"):
            rows, positions = self._upsert.shown()
            if dict(rows) != self._model or len(rows) != len(self._model):
                self.faults.append(f"{turn}: the table has {[key for key, _ in rows]}")
            if positions["q"].batch_id != number:
                self.faults.append(f"{turn}: the position is {positions}")
            if (letters := self._upsert.letters()) != self._letters:
                self.faults.append(f"{turn}: dead letters: {letters}, expected {self._letters}")
            if turn == "it landed" and self._upsert.take_records(number, records):
                self.faults.append("a repetition was applied")
        if query(Path(self._upsert.database), "PRAGMA integrity_check") != [("ok",)]:
            self.faults.append("SQLite finds the file damaged")

    def _drawn(self, number: int) -> list[Record]:
        """Draw records, one of each key: as many as Spark leaves, and some that the table refuses.

        A key has a bad record only where it is new, so that no earlier one takes its place.
        """
        dice, records = self._dice, list[Record]()
        keys = dice.sample(range(20), dice.randrange(3, 12))
        for place, key in enumerate(keys):
            value = dice.randbytes(dice.choice((5, 300, 2_000))).hex()
            offset = 100 * number + place
            if dice.random() < 0.2 and f"k{key}" in self._model:
                records.append((offset, f"k{key}", None))
            elif dice.random() < 0.25:
                records.append((offset, f"new{offset}", f"z{value}"))
            else:
                records.append((offset, f"k{key}", value))
        return records


def child() -> None:
    """Live on the disk that is mounted at the first argument; print what came of it."""
    place, seed, number = Path(sys.argv[1]), *map(int, sys.argv[2:])
    os.environ["SQLITE_TMPDIR"] = str(place)
    life = Life(Disk("self", place), seed, number)
    life.run()
    counts = {"refused": life.refused, "letters": life.letters_waited}
    print(json.dumps({**counts, "faults": life.faults}))


def refused_upserts(directory: Path, seed: int, number: int) -> dict[str, Any]:
    """Have one life on a disk of its own, in a process that sees it."""
    with ExitStack() as held:
        small = held.enter_context(disk(directory / f"disk-{number}", "size=16m"))
        found: dict[str, Any] = json.loads(small.run(_CHILD, str(seed), str(number)))
        return found


def main(arguments: list[str] | None = None) -> None:
    """Run the program."""
    options = parser("full_disk", __doc__).parse_args(arguments)
    tally = Tally("full_disk", "upserts refused by a full disk", options, TARGET)
    wanted = QUICK if options.quick else TARGET
    totals: Counter[str] = Counter()
    number = int(options.only or 0)
    with scratch("full-disk") as directory:
        while True:
            try:
                found = refused_upserts(directory, options.seed, number)
            except pytest.skip.Exception as reason:
                tally.skipped = str(reason)
                break
            totals.update({"disks": 1, "with dead letters before": found["letters"]})
            tally.tried(found["refused"])
            if found["faults"]:
                tally.violated(str(number), f"disk {number}: {'; '.join(found['faults'])}")
            if options.only or tally.count >= wanted:
                break
            number += 1
    tally.more |= totals
    tally.report()


if __name__ == "__main__":
    main(sys.argv[1:])
