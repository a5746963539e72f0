"""The micro-batches of a query over JSON files, and what of them a topic and a table must hold.

Spark's checkpoint says which files each micro-batch has read. All else is worked out here, without
Spark and without the log's code, and each difference is an AssertionError.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from tests.unit.storage_engine import naive

Row = tuple[str, str | None]
"""A key and a value."""
TableRow = tuple[str, bytes, int, int]
"""A key, a value, and the partition and offset of its record."""


class MicroBatches:
    """The micro-batches of the query with this `checkpoint`, over the files of `source`.

    Spark forgets how far its older micro-batches went, so `note` has to be called while it runs.
    """

    def __init__(self, checkpoint: Path, source: Path) -> None:
        self._offsets, self._files = checkpoint / "offsets", checkpoint / "sources" / "0"
        self._source = source
        self._ends: dict[int, int] = {}
        """The end of each micro-batch in the log of files that the source keeps."""

    def note(self) -> None:
        """Note the ends of micro-batches that are new; a file there is never written again."""
        with suppress(FileNotFoundError):  # not there yet, or removed by now
            for path in self._offsets.iterdir():
                if path.name.isdigit() and int(path.name) not in self._ends:
                    end = json.loads(path.read_text().splitlines()[-1])["logOffset"]
                    self._ends[int(path.name)] = end

    def rows(self) -> list[list[Row]]:
        """Return the rows that each micro-batch has read; every file must be in one of them."""
        self.note()
        assert sorted(self._ends) == list(range(len(self._ends))), sorted(self._ends)
        listed: dict[str, int] = {}
        for path in self._files.glob("[0-9]*"):
            for line in path.read_text().splitlines()[1:]:
                entry = json.loads(line)
                name = Path(entry["path"]).name
                assert listed.setdefault(name, entry["batchId"]) == entry["batchId"], name
        assert sorted(listed) == sorted(path.name for path in self._source.glob("[0-9]*.json"))
        found: list[list[Row]] = []
        start = -1
        for batch_id in range(len(self._ends)):
            end = self._ends[batch_id]
            names = sorted(name for name, number in listed.items() if start < number <= end)
            found.append([row for name in names for row in rows_of(self._source / name)])
            start = end
        assert all(number <= start for number in listed.values())
        return found


def rows_of(path: Path) -> list[Row]:
    """Return the rows of a file of JSON lines."""
    lines = map(json.loads, path.read_text().splitlines())
    return [(line["key"], line["value"]) for line in lines]


def running_counts(batches: Iterable[Sequence[Row]]) -> list[list[Row]]:
    """Return by micro-batch each key that it has, with how many rows have had it by then."""
    counts: Counter[str] = Counter()
    found: list[list[Row]] = []
    for rows in batches:
        counts.update(key for key, _ in rows)
        found.append([(key, str(counts[key])) for key in sorted({key for key, _ in rows})])
    return found


def check_topic(
    topic: str, partitions: Mapping[int, Sequence[Row]], batches: Sequence[Sequence[Row]]
) -> None:
    """Each partition must have its rows of all micro-batches, one micro-batch after the other.

    Within a micro-batch the order is free. `partitions` are the rows in the order of offsets.
    """
    for number, found in partitions.items():
        offset = 0
        for batch_id, rows in enumerate(batches):
            there = Counter(row for row in rows if part_of(row, len(partitions)) == number)
            here = Counter(found[offset : offset + there.total()])
            assert here == there, (
                f"{topic}-{number} from offset {offset}: micro-batch {batch_id} made {len(rows)} "
                f"rows; not there {examples(there - here)}, instead {examples(here - there)}"
            )
            offset += there.total()
        assert offset == len(found), f"{topic}-{number}: {len(found) - offset} rows too many"


def part_of(row: Row, count: int) -> int:
    """Return the partition that a row belongs to."""
    return naive.partition(row[0].encode(), count)


def latest_of(partitions: Mapping[int, Sequence[Row]]) -> list[TableRow]:
    """Return the table that a topic makes, in the order of keys."""
    latest = {
        key: (key, value, number, offset)
        for number, rows in partitions.items()
        for offset, (key, value) in enumerate(rows)
    }
    return sorted(
        (key, value.encode(), number, offset)
        for key, value, number, offset in latest.values()
        if value is not None
    )


def check_table(
    table: str, found: Iterable[TableRow], partitions: Mapping[int, Sequence[Row]]
) -> None:
    """A table must hold the latest record of each key of its topic, and nothing else."""
    here, there = Counter(found), Counter(latest_of(partitions))
    assert here == there, (
        f"{table}: not there {examples(there - here)}, instead {examples(here - there)}"
    )


def examples(rows: Counter[Row] | Counter[TableRow]) -> str:
    """Return how many rows these are, and some of them."""
    return f"{rows.total()}: {sorted(map(str, rows))[:5]}"
