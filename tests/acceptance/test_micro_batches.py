"""What judges the killed queries sees each loss: of a micro-batch, and of an upsert of any age."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.acceptance.input_files import KEYS, RECORDS_PER_FILE, input_rows
from tests.acceptance.micro_batches import (
    MicroBatches,
    Row,
    TableRow,
    check_table,
    check_topic,
    latest_of,
    part_of,
    running_counts,
)

PARTITIONS = 2
BATCHES = 40
Batches = list[list[Row]]


@pytest.fixture(scope="module")
def inputs() -> Batches:
    draw = random.Random(7)
    return [input_rows(draw, number * RECORDS_PER_FILE) for number in range(BATCHES)]


def topic_of(batches: Batches) -> dict[int, list[Row]]:
    """Return the partitions of a topic with these micro-batches."""
    return {
        number: [row for rows in batches for row in rows if part_of(row, PARTITIONS) == number]
        for number in range(PARTITIONS)
    }


def lost(batches: Batches, number: int) -> Batches:
    return [*batches[:number], *batches[number + 1 :]]


def doubled(batches: Batches, number: int) -> Batches:
    return [*batches[: number + 1], *batches[number:]]


def doubled_late(batches: Batches, number: int) -> Batches:
    return [*batches, batches[number]]


def swapped(batches: Batches, number: int) -> Batches:
    first, second = batches[number : number + 2] if number + 1 < BATCHES else (batches[-1], [])
    return [*batches[:number], second, first, *batches[number + 2 :]]


def halved(batches: Batches, number: int) -> Batches:
    return [*batches[:number], batches[number][::2], *batches[number + 1 :]]


@pytest.mark.parametrize("of", [list, running_counts], ids=["records", "counts"])
def test_a_topic_with_each_micro_batch_once_passes_in_any_order_within_one(
    inputs: Batches, of: Callable[[Batches], Batches]
) -> None:
    batches = of(inputs)
    check_topic("t", topic_of([rows[::-1] for rows in batches]), batches)


@pytest.mark.parametrize("number", [0, 3, BATCHES - 2])
@pytest.mark.parametrize("harm", [lost, doubled, doubled_late, swapped, halved])
@pytest.mark.parametrize("of", [list, running_counts], ids=["records", "counts"])
def test_a_harmed_micro_batch_is_seen(
    inputs: Batches,
    of: Callable[[Batches], Batches],
    harm: Callable[[Batches, int], Batches],
    number: int,
) -> None:
    batches = of(inputs)
    with pytest.raises(AssertionError, match=r"^t-\d"):
        check_topic("t", topic_of(harm(batches, number)), batches)


def test_a_lost_last_micro_batch_is_seen(inputs: Batches) -> None:
    batches = running_counts(inputs)
    with pytest.raises(AssertionError, match=rf"micro-batch {BATCHES - 1} made"):
        check_topic("t", topic_of(batches[:-1]), batches)


@pytest.mark.parametrize("of", [list, running_counts], ids=["records", "counts"])
def test_a_lost_upsert_of_any_age_is_seen(
    inputs: Batches, of: Callable[[Batches], Batches]
) -> None:
    batches = of(inputs)
    partitions = topic_of(batches)
    check_table("t", table_of(batches, None), partitions)
    for number in range(BATCHES):
        with pytest.raises(AssertionError, match=r"^t: not there"):
            check_table("t", table_of(batches, number), partitions)


def table_of(batches: Batches, lost_one: int | None) -> list[TableRow]:
    """Return the table that upserts of all micro-batches but one make, record by record."""
    ends = [0] * PARTITIONS
    table: dict[str, TableRow] = {}
    for batch_id, rows in enumerate(batches):
        for key, value in rows:
            number = part_of((key, value), PARTITIONS)
            offset, ends[number] = ends[number], ends[number] + 1
            if batch_id == lost_one:
                continue
            table.pop(key, None)
            if value is not None:
                table[key] = (key, value.encode(), number, offset)
    return list(table.values())


def test_a_third_of_the_records_has_a_key_used_once(inputs: Batches) -> None:
    rows = [row for batch in inputs for row in batch]
    keys = [key for key, _ in rows]
    assert 3 * sum(key.startswith("once-") for key in keys) == len(rows)
    assert len(set(keys)) <= len(rows) // 3 + KEYS
    assert len(latest_of(topic_of(inputs))) > len(rows) // 4


def test_micro_batches_are_those_of_the_checkpoint(tmp_path: Path) -> None:
    source, checkpoint = tmp_path / "source", tmp_path / "checkpoint"
    files, offsets = checkpoint / "sources" / "0", checkpoint / "offsets"
    for directory in (source, files, offsets):
        directory.mkdir(parents=True)
    for number in range(6):
        row = {"key": f"k{number}", "value": None if number == 4 else "v"}
        (source / f"{number:07d}.json").write_text(json.dumps(row))

    def entry(number: int, at: int) -> str:
        path = f"file://{source}/{number:07d}.json"
        return json.dumps({"path": path, "timestamp": 1, "batchId": at})

    def end(batch_id: int, at: int) -> None:
        (offsets / f"{batch_id}").write_text(f'v1\n{{"conf":{{}}}}\n{{"logOffset":{at}}}')

    batches = MicroBatches(checkpoint, source)
    end(0, 0)
    batches.note()
    (offsets / "0").unlink()  # as Spark does in time
    # The driver died after it had listed file 2, before there was a micro-batch of it.
    for batch_id, at in {1: 2, 2: 3}.items():
        end(batch_id, at)
    kept = [entry(0, 0), entry(1, 0), entry(2, 1)]
    (files / "1.compact").write_text("\n".join(["v1", *kept]))
    (files / "1").write_text("\n".join(["v1", kept[-1]]))
    (files / "2").write_text("\n".join(["v1", entry(3, 2)]))
    (files / "3").write_text("\n".join(["v1", entry(4, 3), entry(5, 3)]))

    assert batches.rows() == [
        [("k0", "v"), ("k1", "v")],
        [("k2", "v"), ("k3", "v")],
        [("k4", None), ("k5", "v")],
    ]
    (source / "0000006.json").write_text('{"key": "k6", "value": "v"}')
    with pytest.raises(AssertionError):
        batches.rows()
