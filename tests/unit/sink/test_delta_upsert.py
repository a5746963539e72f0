"""DeltaUpsert's commit: rows and position together, or nothing; without Spark."""

from __future__ import annotations

import random
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable, Schema, write_deltalake
from pyspark.sql import types

from kafkalog.errors import CommitConflictError, StorageError
from kafkalog.sink.upsert.delta import upsert as delta_module
from kafkalog.sink.upsert.delta.columns import table_schema
from kafkalog.sink.upsert.delta.upsert import DeltaUpsert
from kafkalog.sink.upsert.upsert import Batch
from tests.unit.sink.delta_driver_batches import RAW, Row, apply, batch, driver_batch, rows_of


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "table"


@pytest.fixture
def upsert(path: Path) -> DeltaUpsert:
    return DeltaUpsert(path)


def test_the_table_is_created_and_follows(upsert: DeltaUpsert, path: Path) -> None:
    assert apply(upsert, batch(0), (0, b"a", b"1"), (1, b"b", b"2"))
    assert apply(upsert, batch(1), (2, b"a", b"3"), (3, b"b", "DELETE"), (4, b"c", "DELETE"))
    assert rows_of(path) == [(b"a", b"3")]


def test_rows_and_position_are_one_commit(upsert: DeltaUpsert, path: Path) -> None:
    apply(upsert, batch(0, end=7), (0, b"a", b"1"))
    before = DeltaTable(path).version()
    apply(upsert, batch(1, end=9), (0, b"a", b"2"))
    table = DeltaTable(path)
    assert table.version() == before + 1
    assert table.transaction_version("kafkalog/q") == 1
    assert table.transaction_version("kafkalog/q/t-0") == 9
    assert table.history(1)[0]["userMetadata"] == "kafkalog: micro-batch 1 of query q"
    position = upsert.position("q")
    assert position is not None
    assert (position.batch_id, position.end_offsets, position.time_ms) == (1, {"t": {"0": 9}}, 1001)


def test_a_repeated_batch_changes_nothing(
    upsert: DeltaUpsert, path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    apply(upsert, batch(3), (0, b"a", b"1"))
    version = DeltaTable(path).version()
    assert not apply(upsert, batch(3), (0, b"a", b"other"), (1, b"b", b"2"))
    assert rows_of(path) == [(b"a", b"1")]
    assert DeltaTable(path).version() == version
    assert "micro-batch 3 of query q was applied before" in caplog.text


@pytest.mark.parametrize("rows", [[], [(4, b"nobody", "DELETE")]])
def test_a_batch_that_changes_nothing_advances_the_position(
    upsert: DeltaUpsert, path: Path, rows: list[Row]
) -> None:
    apply(upsert, batch(0, end=1), (0, b"a", b"1"))
    assert apply(upsert, batch(1, end=5), *rows)
    assert rows_of(path) == [(b"a", b"1")]
    position = upsert.position("q")
    assert position is not None
    assert (position.batch_id, position.end_offsets) == (1, {"t": {"0": 5}})
    assert not apply(upsert, batch(1, end=5), *rows)
    assert apply(upsert, batch(2, end=6), (6, b"a", "DELETE"))
    assert not upsert.has_rows()


def test_an_older_checkpoint_is_refused_unless_reset(upsert: DeltaUpsert, path: Path) -> None:
    apply(upsert, batch(57), (0, b"a", b"1"))
    with pytest.raises(CommitConflictError, match=r"committed 57 at \d\d:\d\d, got 3"):
        apply(upsert, batch(3, end=99), (1, b"a", b"2"))
    with pytest.raises(
        CommitConflictError, match=r"t-0 committed up to 58, got 3 in micro-batch 58\. If the topic"
    ):
        apply(upsert, batch(58, end=3), (1, b"a", b"2"))
    assert rows_of(path) == [(b"a", b"1")]
    upsert.reset_writer = True
    assert apply(upsert, batch(3, end=4), (1, b"a", b"2"))
    position = upsert.position("q")
    assert position is not None
    assert (position.batch_id, position.end_offsets) == (3, {"t": {"0": 4}})


def test_queries_have_positions_of_their_own(upsert: DeltaUpsert) -> None:
    assert upsert.positions() == {}
    assert not upsert.has_rows()
    apply(upsert, batch(5, end=50), (0, b"a", b"1"))
    apply(upsert, batch(0, end=7, query_id="other"), (0, b"b", b"1"))
    found = {name: (p.batch_id, p.end_offsets) for name, p in upsert.positions().items()}
    assert found == {"q": (5, {"t": {"0": 50}}), "other": (0, {"t": {"0": 7}})}
    assert upsert.position("nobody") is None
    assert upsert.has_rows()


def test_a_position_has_the_partitions_of_the_last_batch(upsert: DeltaUpsert) -> None:
    both = {"t-x": {"0": 1, "10": 2}, "gone": {"0": 5}}
    apply(upsert, Batch("q", 0, "run", both, 1))
    apply(upsert, Batch("q", 1, "run", {"t-x": {"0": 1, "10": 3}}, 2))
    position = upsert.position("q")
    assert position is not None
    assert position.end_offsets == {"t-x": {"0": 1, "10": 3}}


def test_positions_outlive_checkpoints_and_tidied_logs(upsert: DeltaUpsert, path: Path) -> None:
    DeltaTable.create(
        path,
        Schema.from_json(RAW.json()),
        configuration={"delta.logRetentionDuration": "interval 0 days"},
    )
    apply(upsert, batch(0, query_id="early"), (0, b"a", b"1"))
    for number in range(3):
        apply(upsert, batch(number), (number, b"a", b"%d" % number))
    table = DeltaTable(path)
    table.create_checkpoint()
    apply(upsert, batch(3), (3, b"a", b"3"))
    for file in (path / "_delta_log").glob("*.json"):
        if int(file.stem) <= table.version():
            file.unlink()
    assert {name: p.batch_id for name, p in upsert.positions().items()} == {"early": 0, "q": 3}
    assert not apply(upsert, batch(3), (3, b"a", b"twice"))


def test_replacing_is_one_commit_that_leaves_just_the_batch(
    upsert: DeltaUpsert, path: Path
) -> None:
    apply(upsert, batch(0, query_id="old"), (0, b"a", b"1"), (1, b"b", b"2"))
    version = DeltaTable(path).version()
    rows = [(5, b"c", b"3"), (6, b"d", "DELETE"), (7, b"a", b"4")]
    assert apply(upsert, batch(0, is_replacing=True), *rows)
    assert rows_of(path) == [(b"a", b"4"), (b"c", b"3")]
    assert DeltaTable(path).version() == version + 1
    assert upsert.positions().keys() == {"q"}
    assert apply(upsert, batch(0, query_id="third", is_replacing=True))
    assert rows_of(path) == []


def test_replacing_ends_the_positions_of_all_other_queries(upsert: DeltaUpsert, path: Path) -> None:
    apply(upsert, batch(0, query_id="other"), (0, b"x", b"0"))
    apply(upsert, batch(3, query_id="old", end=40), (0, b"a", b"1"))
    apply(upsert, batch(0, query_id="new", is_replacing=True), (0, b"b", b"1"))
    assert upsert.positions().keys() == {"new"}
    DeltaTable(path).create_checkpoint()
    assert upsert.position("old") is None
    upsert.refuses_gaps = True
    with pytest.raises(CommitConflictError, match="of query old is none, the next is 4"):
        apply(upsert, batch(4, query_id="old", end=41), (1, b"a", b"2"))
    assert rows_of(path) == [(b"b", b"1")]
    assert apply(upsert, batch(0, query_id="old", end=2), (2, b"c", b"1"))
    found = {name: (p.batch_id, p.end_offsets) for name, p in upsert.positions().items()}
    assert found == {"new": (0, {"t": {"0": 1}}), "old": (0, {"t": {"0": 2}})}


def test_only_a_query_without_a_position_replaces(upsert: DeltaUpsert, path: Path) -> None:
    """A faster run of it may have replaced the rows since this one looked."""
    apply(upsert, batch(0), (0, b"a", b"1"))
    assert apply(upsert, batch(1, is_replacing=True), (1, b"b", b"2"))
    assert rows_of(path) == [(b"a", b"1"), (b"b", b"2")]


def test_a_gap_is_found_in_the_transaction(
    upsert: DeltaUpsert, path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The table may be dropped, or put back, while Spark reduces the micro-batch."""
    apply(upsert, batch(0), (0, b"a", b"1"))
    assert apply(upsert, batch(2), (1, b"a", b"2"))
    assert "its last micro-batch of query q is 0, the next is 2" in caplog.text
    upsert.refuses_gaps = True
    with pytest.raises(CommitConflictError, match="of query q is 2, the next is 4"):
        apply(upsert, batch(4), (2, b"a", b"3"))
    assert rows_of(path) == [(b"a", b"2")]
    shutil.rmtree(path)
    with pytest.raises(CommitConflictError, match="of query q is none, the next is 3"):
        apply(upsert, batch(3), (3, b"b", b"1"))
    assert not path.exists()


@pytest.mark.parametrize("is_fast", [False, True])
def test_a_table_that_another_creates_meanwhile_is_looked_at_anew(
    upsert: DeltaUpsert, path: Path, monkeypatch: pytest.MonkeyPatch, is_fast: bool
) -> None:
    monkeypatch.setattr(delta_module, "_PAUSE_S", 0.0)
    real = DeltaTable.create
    rival = DeltaUpsert(path.parent / "." / "table")
    rival.table += "/"  # a lock of its own, as in another process

    def late(*given: Any, **more: Any) -> Any:
        monkeypatch.setattr(DeltaTable, "create", real)
        real(path, Schema.from_json(RAW.json()))
        if is_fast:
            apply(rival, batch(0), (0, b"a", b"winner"))
        return real(*given, **more)

    monkeypatch.setattr(DeltaTable, "create", late)
    assert apply(upsert, batch(0), (0, b"a", b"1")) is not is_fast
    assert rows_of(path) == [(b"a", b"winner" if is_fast else b"1")]
    assert DeltaTable(path).version() == 1


def test_the_last_batch_planned_anew_may_reach_less_far_in_a_partition(
    upsert: DeltaUpsert, path: Path
) -> None:
    def planned(batch_id: int, first: int, second: int) -> Batch:
        return Batch("q", batch_id, "run", {"t": {"0": first, "1": second}}, 1000)

    apply(upsert, planned(0, 100, 60), (0, b"a", b"1"))
    assert apply(upsert, planned(0, 110, 50), (0, b"a", b"2"))
    assert rows_of(path) == [(b"a", b"2")]
    assert not apply(upsert, planned(0, 105, 50), (0, b"a", b"3"))
    words = "t-0 committed up to 110, got 105 .*the topic was created again.*a crash took Spark's"
    with pytest.raises(CommitConflictError, match=words):
        apply(upsert, planned(1, 105, 70), (0, b"a", b"4"))
    assert apply(upsert, planned(1, 110, 60), (0, b"a", b"4"))


def test_a_refusal_of_an_unchanged_table_is_not_tried_again(path: Path) -> None:
    appends: Any = {"delta.appendOnly": "true"}
    DeltaTable.create(path, Schema.from_json(RAW.json()), configuration=appends)
    upsert = DeltaUpsert(path)
    apply(upsert, batch(0), (0, b"a", b"1"))
    reads = 0

    def driver_batches() -> Iterator[pa.RecordBatch]:
        nonlocal reads
        reads += 1
        yield driver_batch([(1, b"a", b"2")], ["key", "value"], [pa.binary()] * 2)

    started = time.monotonic()
    with pytest.raises(StorageError, match=r"the table refuses micro-batch 1; .*append-only"):
        upsert.apply(batch(1), RAW, driver_batches)
    assert reads == 1
    assert time.monotonic() - started < 5
    assert rows_of(path) == [(b"a", b"1")]


def test_a_failure_midway_leaves_the_table_and_the_position_as_they_were(
    upsert: DeltaUpsert, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kafkalog.sink.upsert.delta.rows._IN_MEMORY_SIZE", 0)
    apply(upsert, batch(0), (0, b"a", b"1"))
    version = DeltaTable(path).version()

    def failing() -> Iterator[pa.RecordBatch]:
        for offset in range(3):
            row = (offset, b"b%d" % offset, b"2")
            yield driver_batch([row], ["key", "value"], [pa.binary()] * 2)
        raise RuntimeError("a task failed")

    for which in (batch(1), batch(0, query_id="new", is_replacing=True)):
        with pytest.raises(RuntimeError, match=r"^a task failed$"):
            upsert.apply(which, RAW, failing)
    assert rows_of(path) == [(b"a", b"1")]
    assert DeltaTable(path).version() == version
    assert upsert.position("q") is not None


class Interference:
    """Another writer, which commits whenever DeltaUpsert has looked at the position."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, acts: Sequence[Callable[[], object]]):
        self.acts = list(acts)
        self.attempts = 0
        real = delta_module.application_transactions

        def looked(*given: Any) -> Any:
            found = real(*given)
            self.attempts += 1
            if self.acts:
                act, self.acts = self.acts[0], self.acts[1:]
                act()
            return found

        monkeypatch.setattr(delta_module, "application_transactions", looked)
        monkeypatch.setattr(delta_module, "_PAUSE_S", 0.0)


@pytest.mark.parametrize("is_replacing", [False, True])
@pytest.mark.parametrize("keep", [0, 1 << 20])
def test_a_commit_in_between_makes_all_be_done_anew(
    upsert: DeltaUpsert, path: Path, monkeypatch: pytest.MonkeyPatch, is_replacing: bool, keep: int
) -> None:
    monkeypatch.setattr("kafkalog.sink.upsert.delta.rows._IN_MEMORY_SIZE", keep)
    apply(upsert, batch(0), (0, b"a", b"1"))
    other = pa.table({"key": [b"x"], "value": [b"9"]})

    def write() -> None:
        write_deltalake(
            path, other.cast(pa.schema(DeltaTable(path).schema().to_arrow())), mode="append"
        )

    interference = Interference(monkeypatch, [write, write])
    which = batch(0, query_id="new", is_replacing=True) if is_replacing else batch(1)
    assert apply(upsert, which, (1, b"a", b"2"), (2, b"b", b"3"))
    assert interference.attempts == 3
    kept = [] if is_replacing else [(b"x", b"9")] * 2
    assert rows_of(path) == [(b"a", b"2"), (b"b", b"3"), *kept]


@pytest.mark.parametrize("rows", [[(1, b"a", b"2")], []])
def test_two_runs_of_one_query_apply_a_batch_once(
    upsert: DeltaUpsert, path: Path, monkeypatch: pytest.MonkeyPatch, rows: list[Row]
) -> None:
    apply(upsert, batch(0), (0, b"a", b"1"))
    rival = DeltaUpsert(path.parent / "." / "table")
    rival.table += "/"  # a lock of its own, as in another process

    def win() -> None:
        apply(rival, batch(1), (1, b"a", b"winner"))

    Interference(monkeypatch, [win])
    assert not apply(upsert, batch(1), *rows)
    assert rows_of(path) == [(b"a", b"winner")]


def test_endless_conflicts_end_in_an_error(
    upsert: DeltaUpsert, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    apply(upsert, batch(0), (0, b"a", b"1"))

    def touch() -> None:
        table = DeltaTable(path)
        table.create_write_transaction([], "append", table.schema())

    Interference(monkeypatch, [touch] * 12)
    with pytest.raises(StorageError, match="each of 12 attempts to commit met another writer's"):
        apply(upsert, batch(1), (1, b"a", b"2"))
    assert rows_of(path) == [(b"a", b"1")]


@pytest.mark.slow
def test_queries_of_one_process_take_turns_on_a_table(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(delta_module, "_ATTEMPTS", 1)

    def follow(query_id: str) -> None:
        for number in range(5):
            key = f"{query_id}{number}".encode()
            apply(DeltaUpsert(path), batch(number, query_id=query_id), (number, key, b"1"))

    threads = [threading.Thread(target=follow, args=(name,)) for name in "xyz"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(rows_of(path)) == 15
    assert {p.batch_id for p in DeltaUpsert(path).positions().values()} == {4}


def test_a_directory_that_cannot_be_a_table_is_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    upsert = DeltaUpsert(tmp_path / "file" / "table")
    with pytest.raises(StorageError, match=r"Delta table .*file/table: "):
        apply(upsert, batch(0), (0, b"a", b"1"))


@pytest.mark.slow
@pytest.mark.parametrize("is_text", [False, True])
def test_any_sequence_of_changes_leaves_the_latest_of_each_key(path: Path, is_text: bool) -> None:
    """Keys share long beginnings, of which Delta's file statistics keep only some."""
    chance = random.Random(is_text)
    letters: Sequence[Any] = (
        ["é", "\U0010ffff", "", "z"] if is_text else [b"\xff", b"\0", b"", b"z"]
    )
    start = letters[0] * 40
    keys = sorted({start + letters[n % 4] * (n // 4) for n in range(4, 60)})
    kinds = [types.StringType() if is_text else types.BinaryType(), types.BinaryType()]
    arrow = [pa.string() if is_text else pa.binary(), pa.binary()]
    columns = table_schema(["key", "value"], kinds)
    upsert, expected = DeltaUpsert(path), dict[Any, bytes]()
    for number in range(12):
        changes = dict.fromkeys(chance.sample(keys, chance.randint(0, 12)), b"%d" % number)
        rows: list[Row] = []
        for key, value in changes.items():
            is_deleted = chance.random() < 0.3
            rows.append((0, key, "DELETE" if is_deleted else value))
            expected[key] = value
            if is_deleted:
                del expected[key]
        cut = len(rows) // 2
        driver_batches = [
            driver_batch(part, ["key", "value"], arrow) for part in (rows[:cut], rows[cut:])
        ]
        assert upsert.apply(
            batch(number), columns, lambda driver_batches=driver_batches: iter(driver_batches)
        )
        if number == 6:
            DeltaTable(path).create_checkpoint()
    assert rows_of(path) == sorted(expected.items())
