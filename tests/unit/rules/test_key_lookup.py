"""Lookups of single keys, against a dictionary that has read the whole log."""

from __future__ import annotations

import os
import random
import threading

import pyarrow as pa
import pytest

from kafkalog.cleaner.key_index import key_lookup, tail_index
from kafkalog.cleaner.key_index.key_lookup import KeyLookup, Record
from kafkalog.datasource.ktable import KTable
from kafkalog.errors import CorruptLogError, InvalidInputError, UnknownTopicError
from kafkalog.schema import HEADERS
from kafkalog.storage_engine.format import layout
from tests.builders.log_builder import NOW_MS
from tests.unit.rules.acts import Written
from tests.unit.rules.places import Place

HISTORIES = 200 if os.environ.get("KAFKALOG_TABLES") == "full" else 4
CONFIG = {"segment_bytes": 4096, "compression_type": "lz4"}


@pytest.fixture
def filled(place: Place) -> Place:
    """Return a log of topic `t` with one partition and small segments."""
    return place.topic(**CONFIG)


def put(place: Place, *pairs: tuple[str, str | None], partition: int = 0) -> Place:
    return place.append(*pairs, partition=partition, batch_size=600)


def value(record: Record | None) -> str | None:
    return None if record is None or record.value is None else record.value.decode()


def test_a_lookup_finds_the_latest_value_wherever_it_is(filled: Place) -> None:
    put(filled, ("a", "1"), ("b", "1"), ("c", "1")).clean()
    put(filled, ("b", "2"))
    put(filled, ("c", None))
    log = filled.log
    assert value(log.lookup("t", "a")) == "1"
    assert value(log.lookup("t", b"b")) == "2"
    assert [log.lookup("t", key) for key in ("c", "d", "")] == [None] * 3


def test_a_record_tells_where_it_stands(filled: Place) -> None:
    filled.append(("a", "1"))
    expected = Record("t", 0, 0, NOW_MS, b"a", b"1")
    assert filled.log.lookup("t", "a") == expected
    filled.clean()
    assert filled.log.lookup("t", "a") == expected


def test_headers_come_along(filled: Place) -> None:
    headers = pa.array([[{"key": "h", "value": b"1"}, {"key": "h", "value": None}]], HEADERS)
    filled.log.append("t", pa.table({"key": ["a"], "value": ["1"], "headers": headers}))
    found = filled.clean().log.lookup("t", "a")
    assert found is not None
    assert found.headers == (("h", b"1"), ("h", None))


@pytest.mark.slow
def test_drawn_logs_give_what_a_dictionary_gives(filled: Place) -> None:
    dice = random.Random(1)
    table: dict[str, str | None] = {}
    with KeyLookup(filled.engine, "t") as lookup:
        for step in range(12):
            for _ in range(3):
                pairs = [
                    (f"key-{dice.randrange(300)}", None if dice.random() < 0.2 else f"{step}-{i}")
                    for i in range(60)
                ]
                put(filled, *pairs)
                table.update(pairs)
            if dice.random() < 0.6:
                filled.clean()
            for key in [f"key-{i}" for i in range(0, 310, 3)]:
                assert value(lookup.get(key)) == table.get(key), (step, key)
                assert value(filled.log.lookup("t", key)) == table.get(key), (step, key)
            keys = [f"key-{i}" for i in range(310)]
            found = lookup.get_many(keys)
            assert {key: value(record) for key, record in found.items()} == {
                key: table.get(key) for key in keys
            }, step
    assert any(filled.sections(layout.KEYS))


def test_many_keys_give_what_each_gives(place: Place) -> None:
    log = place.topic(partitions=3, **CONFIG).log
    log.append("t", [(f"key-{i}", f"{i}" * 20, [("n", b"1")] * (i % 2)) for i in range(900)])
    place.clean()
    log.append("t", [(f"key-{i}", None if i % 3 else "new") for i in range(0, 900, 20)])
    keys: list[str | bytes] = [f"key-{i}" for i in range(0, 1000, 35)]
    keys += [b"key-20", "key-20", ""]
    with KTable(None, place.where, "t") as table:
        found = table.lookup_many(keys)
        assert list(found) == list(dict.fromkeys(keys))
        assert found == {key: table.lookup(key) for key in keys}
        assert table.lookup_many([]) == {}
        placed = table.lookup_many(["key-14"], partition=1)["key-14"]
        assert placed == table.lookup("key-14", partition=1)


def test_the_error_of_many_keys_names_the_damaged_batch(filled: Place) -> None:
    put(filled, *((f"key-{i}", f"{i}") for i in range(500))).clean()
    filled.spoil(0, -1)
    name = next(iter(filled.content()))
    with (
        KeyLookup(filled.engine, "t") as lookup,
        pytest.raises(CorruptLogError, match=rf"{name}.*at byte"),
    ):
        lookup.get_many(f"key-{i}" for i in range(500))


def test_a_cleaned_segment_is_not_scanned(filled: Place) -> None:
    put(filled, *((f"key-{i}", "v" * 50) for i in range(500))).clean()
    with KeyLookup(filled.engine, "t") as lookup:
        assert value(lookup.get("key-7")) == "v" * 50
        assert lookup.get("nobody") is None
        assert lookup.scanned_bytes == 0
        put(filled, ("key-8", "new"))
        assert value(lookup.get("key-7")) == "v" * 50
        assert 0 < lookup.scanned_bytes < 200


def test_lookups_after_retention_find_what_is_left(filled: Place) -> None:
    for step in range(6):
        put(filled, *((f"key-{step}-{i}", "v" * 80) for i in range(60)))
    filled.clean()
    before = len(filled.sections(layout.KEYS))
    assert before > 2
    filled.log.alter_topic("t", {"cleanup.policy": "compact,delete"})
    filled.log.delete_records("t", 0, 200)
    filled.engine.apply_retention("t", now_ms=NOW_MS)
    assert len(filled.sections(layout.KEYS)) < before
    assert filled.log.lookup("t", "key-0-0") is None
    assert value(filled.log.lookup("t", "key-5-59")) == "v" * 80


def test_records_below_the_log_start_are_not_found(filled: Place) -> None:
    put(filled, ("a", "1"), ("b", "1")).clean()
    filled.log.alter_topic("t", {"cleanup.policy": "compact,delete"})
    filled.log.delete_records("t", 0, 1)
    assert filled.log.lookup("t", "a") is None
    assert value(filled.log.lookup("t", "b")) == "1"


def test_the_key_is_looked_for_where_the_default_partitioner_sends_it(place: Place) -> None:
    place.topic(partitions=5, **CONFIG).append(*((f"key-{i}", f"{i}") for i in range(60))).clean()
    with KeyLookup(place.engine, "t") as lookup:
        for number in range(60):
            assert value(lookup.get(f"key-{number}")) == str(number)


def test_a_record_sent_elsewhere_is_found_in_its_partition(place: Place) -> None:
    place.topic(partitions=3, **CONFIG)
    put(place, ("a", "1"), partition=1)
    put(place, ("a", "2"), partition=2)
    assert value(place.log.lookup("t", "a", partition=1)) == "1"
    assert value(place.log.lookup("t", "a", partition=2)) == "2"
    with pytest.raises(InvalidInputError, match="there is no 3"):
        place.log.lookup("t", "a", partition=3)


def test_an_argument_that_is_not_a_key_or_a_topic_is_refused(filled: Place) -> None:
    log = filled.log
    with pytest.raises(InvalidInputError, match="a key is bytes or text, found int"):
        log.lookup("t", 7)
    with pytest.raises(InvalidInputError, match="cannot be encoded as UTF-8"):
        log.lookup("t", "\ud800")
    for partition in ("0", 1.5, True, b"0"):
        with pytest.raises(InvalidInputError, match="partition: expected a whole number, found"):
            log.lookup("t", "a", partition=partition)
    with pytest.raises(UnknownTopicError, match="'u' does not exist"):
        log.lookup("u", "a")


def test_who_has_closed_it_looks_nothing_up(filled: Place) -> None:
    put(filled, ("a", "1"))
    lookup = KeyLookup(filled.engine, "t")
    assert value(lookup.get("a")) == "1"
    lookup.close()
    with pytest.raises(InvalidInputError, match="is closed: create another one"):
        lookup.get("a")


def test_a_topic_made_anew_is_another_one(filled: Place) -> None:
    put(filled, ("a", "1"))
    with KeyLookup(filled.engine, "t") as lookup:
        assert value(lookup.get("a")) == "1"
        filled.log.delete_topic("t")
        filled.topic(**CONFIG)
        assert lookup.get("a") is None


def test_aborted_and_open_transactions_do_not_count(place: Place) -> None:
    log = Written.create(place)
    log.data(1, 2, 3, 4)
    log.transact(7, 1)
    log.commit(7)
    log.transact(7, 2)
    log.abort(7)
    log.roll()
    log.data(9)

    def found(*keys: int) -> list[int | None]:
        with KeyLookup(place.engine, "t") as lookup:
            records = [lookup.get(b"%d" % key) for key in keys]
        return [None if record is None else record.offset for record in records]

    assert found(1, 2, 3, 9) == [4, 1, 2, 8]
    log.clean()
    assert found(1, 2, 3, 9) == [4, 1, 2, 8]
    assert any(place.sections(layout.KEYS))
    log.transact(7, 3)  # open: the last stable offset stays before it
    log.data(4)
    assert found(3, 4) == [2, 3]
    log.commit(7)
    assert found(3, 4) == [9, 10]


def test_lookups_go_on_while_the_log_is_written_and_cleaned(filled: Place) -> None:
    """A key that is there all the time is always found, and its value never goes back."""
    put(filled, *((f"key-{i}", "0") for i in range(200)))
    reader = filled.other()
    faults: list[object] = []
    done = threading.Event()

    def look() -> None:
        last = 0
        try:
            with KeyLookup(reader._log, "t") as lookup:
                while not done.is_set():
                    found = value(lookup.get("key-100"))
                    assert found is not None
                    assert int(found) >= last
                    last = int(found)
        except BaseException as fault:
            faults.append(fault)

    thread = threading.Thread(target=look)
    thread.start()
    for step in range(1, 9):
        put(filled, *((f"key-{i}", str(step)) for i in range(step % 3, 200, 2 + step % 4)))
        put(filled, ("key-100", str(step)))
        if step % 2:
            filled.clean()
    done.set()
    thread.join()
    assert faults == []


def test_uncleaned_records_are_scanned_once_and_then_those_that_came(filled: Place) -> None:
    put(filled, *((f"key-{i}", "v" * 50) for i in range(500)))
    with KeyLookup(filled.engine, "t") as lookup:
        assert lookup.get("nobody") is None
        once = lookup.scanned_bytes
        assert value(lookup.get("key-7")) == "v" * 50
        assert lookup.scanned_bytes == 2 * once > 0
        assert lookup.get("nobody") is None
        assert value(lookup.get("key-499")) == "v" * 50
        assert lookup.scanned_bytes == 2 * once
        put(filled, ("key-7", "new"))
        assert value(lookup.get("key-7")) == "new"
        assert value(lookup.get("key-8")) == "v" * 50
        assert 2 * once < lookup.scanned_bytes < 2 * once + 200
        filled.roll()
        put(filled, ("key-8", "new"))
        filled.clean()
        put(filled, ("key-9", "newer"))
        known = lookup.scanned_bytes
        assert [value(lookup.get(f"key-{i}")) for i in (7, 8, 9)] == ["new", "new", "newer"]
        assert lookup.scanned_bytes < known + 200


def test_a_log_keeps_what_a_lookup_needs_for_the_next_one(filled: Place) -> None:
    put(filled, ("a", "1"))
    for _ in range(3):
        assert value(filled.log.lookup("t", "a")) == "1"
    assert filled.log._lookups is not None
    assert filled.log._lookups.ask("t", lambda kept: kept.scanned_bytes) > 0
    filled.log.delete_topic("t")
    with pytest.raises(UnknownTopicError):
        filled.log.lookup("t", "a")
    assert filled.log._lookups._kept == {}


def test_more_uncleaned_records_than_memory_may_hold_are_scanned(
    filled: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(key_lookup, "_TAILS_MAX", 100 * tail_index.OFFSET_BYTES)
    with KeyLookup(filled.engine, "t") as lookup:
        for count in (100, 101):
            put(filled, *((f"key-{i}", "v") for i in range(count - filled.state().high_watermark)))
            for _ in range(3):
                assert value(lookup.get("key-0")) == "v"
            known = lookup.scanned_bytes
            assert value(lookup.get("key-0")) == "v"
            assert (lookup.scanned_bytes > known) == (count == 101)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(HISTORIES))
def test_drawn_histories_give_through_one_kept_lookup_what_a_scan_gives(
    place: Place, seed: int
) -> None:
    dice = random.Random(seed)
    config = {
        "cleanup_policy": "compact,delete",
        "segment_bytes": dice.choice([300, 1500, 1 << 30]),
    }
    log = Written.create(place, **config)
    reader = place.other()
    now_ms = 0
    asked = [b"%d" % key for key in range(13)]
    for step in range(60):
        keys = [dice.randrange(12) for _ in range(dice.randint(1, 6))]
        producer = dice.choice([7, 8])
        match dice.choice("ddddttttcaraCCgxT" if step % 20 else "ddtt"):
            case "d":
                log.data(*keys, tombstones=dice.random() < 0.2)
            case "t":
                log.transact(producer, *keys)
            case "c" if producer in log.running:
                log.commit(producer)
            case "a" if producer in log.running:
                log.abort(producer)
            case "r":
                log.roll()
            case "C":
                now_ms += dice.choice([0, 90_000_000])
                assert all(s.error is None for s in place.log.clean("t", force=True, now_ms=now_ms))
            case "g":
                place.regroup()
            case "x":
                state = place.state()
                before = dice.randint(state.log_start_offset, state.last_stable_offset)
                place.log.delete_records("t", 0, before)
                place.engine.apply_retention("t", now_ms=now_ms)
            case "T" if dice.random() < 0.3:
                place.log.delete_topic("t")
                log = Written.create(place, **config)
        latest = scanned(place)
        for key in dice.sample(asked, 3):
            found = reader.lookup("t", key)
            assert (found and found.offset) == latest.get(key), (step, key)
        many = reader._lookups.ask("t", lambda kept: kept.get_many(asked))
        assert {k: found and found.offset for k, found in many.items()} == {
            key: latest.get(key) for key in asked
        }, step


def scanned(place: Place) -> dict[bytes, int]:
    """Return the offset of the latest record of each key that has one, and no tombstone."""
    latest: dict[bytes, int | None] = {}
    end = place.state().last_stable_offset
    for batch in place.log.read("t", 0, place.state().log_start_offset, end):
        columns = (batch[name].to_pylist() for name in ("key", "value", "offset"))
        for key, data, offset in zip(*columns, strict=True):
            latest[key] = None if data is None else offset
    return {key: offset for key, offset in latest.items() if offset is not None}
