"""When a log can complete the files of a materialized table, and that it then does so rightly.

`Table` is a table in memory that does without Spark what a query does: rows as of a moment, less
the keys that have changed since, and those changes.
"""

from __future__ import annotations

import os
import random
import shutil
from pathlib import Path

import pytest

from kafkalog.cleaner.key_index.latest_view import latest
from kafkalog.errors import IncompleteTableError
from kafkalog.schema import chosen_columns
from kafkalog.tables.table_moment import PartitionMoment, TableMoment, mark_of, marks_of
from tests.builders.log_builder import NOW_MS
from tests.unit.rules.places import DAY_MS, DIRECTORY, Place

HISTORIES = 1_000 if os.environ.get("KAFKALOG_TABLES") == "full" else 12
COLUMNS = ("key", "value", "offset")
Rows = dict[tuple[int, bytes], tuple[bytes | None, int]]


class Table:
    """The rows of a topic as of the moment at which it was made."""

    def __init__(self, place: Place, lineage: str = "a") -> None:
        state = place.engine.state()
        topic = state.topic("t")
        ends = {number: held.last_stable_offset for number, held in topic.present()}
        self.rows = rows_of(place)
        mark = mark_of("/table", lineage, "t")
        known = state.writers.get(mark)
        number = 1 if known is None else known.batch_id + 1
        place.engine.change(
            lambda change: change.record_writer(mark, number, 0, NOW_MS), now_ms=NOW_MS
        )
        offsets = {n: [at for (p, _), (_, at) in self.rows.items() if p == n] for n in ends}
        self.moment = TableMoment(
            "t",
            topic.topic_id,
            mark,
            number,
            {n: PartitionMoment(end, min(offsets[n], default=None)) for n, end in ends.items()},
        )

    def fault(self, place: Place) -> str | None:
        return self.moment.fault(place.engine.state())

    def completed(self, place: Place) -> Rows:
        """Return the rows, less the keys that changed since, and those changes."""
        changed = rows_of(place, self.moment)
        merged = {**self.rows, **changed}
        return {key: row for key, row in merged.items() if row[0] is not None}

    def is_right(self, place: Place) -> bool:
        """Whether the log completes it to its latest records; False if it refuses."""
        if self.fault(place) is not None:
            return False
        assert self.completed(place) == rows_of(place)
        return True


def rows_of(place: Place, since: TableMoment | None = None) -> Rows:
    """Return the latest records, or those of the keys that changed since a moment."""
    found: Rows = {}
    for number, held in place.engine.describe("t").present():
        start = None if since is None else since.start(number, held.log_start_offset)
        with place.engine.snapshot("t", number, whole=True) as snapshot:
            for batch in latest(
                snapshot,
                held.high_watermark,
                since=start,
                budget_bytes=1 << 20,
                schema=chosen_columns(COLUMNS),
                with_tombstones=since is not None,
            ):
                for key, value, offset in zip(*batch.to_pydict().values(), strict=True):
                    found[number, key] = value, offset
    return found


def filled(place: Place, **config: object) -> Place:
    return place.topic(**config).append(*[(f"k{i}", "1") for i in range(6)])


def test_changes_and_deletions_complete_a_table(place: Place) -> None:
    table = Table(filled(place))
    place.append(("k0", "2"), ("k1", None), ("new", "3"))
    assert table.is_right(place)
    assert (0, b"k1") not in table.completed(place)


def test_a_cleaning_that_keeps_the_deletions_lets_a_table_be(place: Place) -> None:
    table = Table(filled(place))
    place.append(("k0", None), ("k1", "2")).clean(now_ms=NOW_MS)
    assert table.is_right(place)


def test_a_deletion_that_is_cleaned_away_ends_a_table(place: Place) -> None:
    table = Table(filled(place))
    place.append(("k0", None), ("k1", "2")).clean(now_ms=NOW_MS)
    place.append(("k2", "2")).clean(now_ms=NOW_MS + 3 * DAY_MS)
    assert table.completed(place) != rows_of(place)
    assert "deletions below" in str(table.fault(place))


def test_a_deletion_from_before_the_moment_may_be_cleaned_away(place: Place) -> None:
    filled(place).append(("k0", None))
    table = Table(place)
    place.append(("k1", "2")).clean(now_ms=NOW_MS)
    place.append(("k2", "2")).clean(now_ms=NOW_MS + 3 * DAY_MS)
    assert table.is_right(place)


def test_a_deletion_that_a_later_record_replaces_ends_no_table(place: Place) -> None:
    table = Table(filled(place))
    place.append(("k0", None), ("k0", "2")).clean(now_ms=NOW_MS)
    place.append(("k3", "2")).clean(now_ms=NOW_MS + 3 * DAY_MS)
    assert table.is_right(place)


def test_a_retention_of_deletions_that_was_short_for_a_moment_ends_a_table(place: Place) -> None:
    table = Table(filled(place))
    place.append(("k0", None))
    place.log.alter_topic("t", config={"delete.retention.ms": "0"})
    place.clean(now_ms=NOW_MS)
    place.append(("k1", "2")).clean(now_ms=NOW_MS + 5000)
    place.log.alter_topic("t", config={"delete.retention.ms": str(DAY_MS)})
    assert not table.is_right(place)


def test_an_erasure_at_once_ends_a_table_that_has_the_key(place: Place) -> None:
    table = Table(filled(place))
    place.log.erase("t", ["k0"], now=True)
    assert not table.is_right(place)


def test_a_log_that_begins_above_a_row_ends_a_table(place: Place) -> None:
    table = Table(filled(place, cleanup_policy="compact,delete"))
    place.append(("k5", "2"))
    assert table.is_right(place)
    place.log.delete_records("t", 0, 3)
    assert "above the row at 0" in str(table.fault(place))


def test_a_log_that_begins_below_the_rows_lets_a_table_be(place: Place) -> None:
    filled(place, cleanup_policy="compact,delete").append(*[(f"k{i}", None) for i in range(5)])
    table = Table(place)
    place.append(("k0", "2")).log.delete_records("t", 0, 5)
    assert table.is_right(place)


def test_a_topic_that_is_created_again_ends_a_table(place: Place) -> None:
    table = Table(filled(place))
    place.log.delete_topic("t")
    assert "does not exist" in str(table.fault(place))
    filled(place).append(*[(f"z{i}", "1") for i in range(9)])
    assert not table.is_right(place)


def test_the_rows_of_an_added_partition_come_from_the_log(place: Place) -> None:
    table = Table(filled(place))
    place.log.alter_topic("t", partitions=3, keys_may_move=True)
    place.append(*[(f"q{i}", "1") for i in range(9)])
    assert table.is_right(place)
    assert {number for number, _ in table.completed(place)} == {0, 1, 2}


def test_a_mark_that_the_log_has_not_is_another_logs(place: Place) -> None:
    table = Table(filled(place))
    second = Table(place)
    place.engine.change(lambda change: change.end_writer(table.moment.mark), now_ms=NOW_MS)
    assert "another log" in str(table.fault(place))
    with pytest.raises(IncompleteTableError, match=r"/table: the log can no longer complete"):
        second.moment.check_log(place.engine.state())
    assert [*marks_of(place.engine.state(), "t")] == []


def test_a_mark_is_found_by_its_topic_and_belongs_to_one_place(place: Place) -> None:
    filled(place)
    Table(place, "b")
    assert [*marks_of(place.engine.state(), "t")] == [mark_of("/table", "b", "t")]
    assert [*marks_of(place.engine.state(), "other")] == []


def test_an_older_copy_that_went_beyond_the_moment_ends_a_table(tmp_path: Path) -> None:
    """Only a directory is copied as files; each refresh leaves a mark in the log."""
    root = tmp_path / "log"
    place = filled(Place(DIRECTORY, root))
    before = Table(place)
    place.close()
    shutil.copytree(root, tmp_path / "copy")
    place = Place(DIRECTORY, root)
    place.to("t").append(("k0", None), ("k1", None))
    table = Table(place)
    place.close()
    shutil.rmtree(root)
    (tmp_path / "copy").rename(root)
    place = Place(DIRECTORY, root).to("t")
    assert not table.is_right(place)
    place.append(("y0", "1"), ("y1", "2"), ("y2", "3"))
    assert table.completed(place) != rows_of(place)
    assert "an older copy was put back" in str(table.fault(place))
    assert before.is_right(place)  # of what both copies have
    place.close()


@pytest.mark.parametrize("seed", range(HISTORIES))
def test_a_table_is_right_or_refused_in_any_history(place: Place, seed: int) -> None:
    rng = random.Random(seed)
    now_ms = NOW_MS
    place.topic(partitions=2, cleanup_policy="compact,delete", segment_bytes=400)
    tables: list[Table] = []
    was_right = 0
    for _ in range(rng.randint(8, 20)):
        now_ms += rng.choice([0, 1000, DAY_MS // 2])
        match rng.choice("aaaaacctttdre"):
            case "a":
                keys = rng.choices(range(12), k=rng.randint(1, 6))
                rows = [(f"k{k}", None if rng.random() < 0.3 else str(now_ms)) for k in keys]
                place.append(*rows, now_ms=now_ms)
            case "c":
                place.log.clean("t", force=True, now_ms=now_ms)
            case "t":
                tables = [*tables[-3:], Table(place, rng.choice("ab"))]
            case "d":
                number = rng.randrange(2)
                first, end = place.log.offsets("t")[number]
                place.log.delete_records("t", number, rng.randint(first, end))
            case "r":
                short = rng.random() < 0.5
                config = {"delete.retention.ms": "0" if short else str(DAY_MS)}
                place.log.alter_topic("t", config=config)
            case "e":
                place.log.erase("t", [f"k{rng.randrange(12)}"], now=True)
        was_right += sum(table.is_right(place) for table in tables)
    assert was_right or not tables or len(tables) < 3
