"""Windows in keys that Kafka Streams wrote (`python -m tests.conformance.streams_topics`)."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from kafkalog import window_columns
from kafkalog.errors import InvalidInputError

START_MS = 1_700_000_000_000
WINDOWS = [(b"ann", 0), (b"b", 0), (b"ann", 0), (b"", 10_000), (b"b", 40_000)]
SESSIONS = [(b"ann", 0, 0), (b"b", 1000, 1000), (b"ann", 0, 0), (b"ann", 0, 2500),
            (b"", 12_000, 12_000), (b"b", 40_000, 40_000)]  # fmt: skip
JOINED = [(b"ann", 0, 1), (b"b", 1000, 2), (b"ann", 2500, 3), (b"", 12_000, 4), (b"b", 40_000, 5)]


def written(topic: str) -> Iterator[tuple[bytes, bytes | None, int]]:
    """Yield (key, value, timestamp) of each record of a topic."""
    for line in Path(__file__).with_name("streams_topics.txt").read_text().splitlines():
        name, key, value, ms = line.split()
        if name == topic:
            yield bytes.fromhex(key[1:]), hex_of(value), int(ms)


def hex_of(text: str) -> bytes | None:
    return None if text == "null" else bytes.fromhex(text[1:])


def keys(topic: str) -> list[bytes]:
    return [key for key, _, _ in written(topic)]


def table(*given: bytes | None, **more: Any) -> pa.Table:
    return pa.table({"key": pa.array(given, pa.binary()), **more})


def at(ms: int) -> datetime:
    return datetime.fromtimestamp((START_MS + ms) / 1000, UTC)


@pytest.mark.parametrize(
    "topic, form", [("app-windows-changelog", "window-store"), ("windowed", "window")]
)
def test_a_time_window_has_a_start(topic: str, form: str) -> None:
    rows = window_columns(table(*keys(topic)), form).to_pylist()
    assert [(row["key"], row["window_start"]) for row in rows] == [(k, at(ms)) for k, ms in WINDOWS]


@pytest.mark.parametrize("topic", ["app-sessions-changelog", "sessioned"])
def test_a_session_has_a_start_and_an_end(topic: str) -> None:
    rows = window_columns(table(*keys(topic)), "session").to_pylist()
    found = [(row["key"], row["window_start"], row["window_end"]) for row in rows]
    assert found == [(key, at(start), at(end)) for key, start, end in SESSIONS]


def test_a_window_of_a_join_has_a_number_that_tells_its_records_apart() -> None:
    rows = window_columns(table(*keys("app-join-left-changelog")), "window-store").to_pylist()
    found = [(row["key"], row["window_start"], row["window_number"]) for row in rows]
    assert found == [(key, at(ms), number) for key, ms, number in JOINED]


def test_a_changelog_has_plain_values_and_the_stores_timestamps_as_its_own() -> None:
    (first, *_) = written("app-counts-changelog")
    assert first == (b"ann", (1).to_bytes(8, "big"), START_MS)


def test_null_keys_stay_null_and_other_columns_stay() -> None:
    (key, *_) = keys("windowed")
    given = table(None, key, None, offset=[1, 2, 3]).slice(1)
    for records in (given, given.combine_chunks().to_batches()[0]):
        found = window_columns(records, "window")
        assert type(found) is type(records)
        assert found.schema.names == ["key", "offset", "window_start"]
        assert found.to_pylist() == [
            {"key": b"ann", "offset": 2, "window_start": at(0)},
            {"key": None, "offset": 3, "window_start": None},
        ]
    assert window_columns(table(), "session").num_rows == 0


@pytest.mark.parametrize(
    "key, form",
    [
        (b"short", "window"),
        (b"a plain key", "window"),
        (keys("sessioned")[3], "window-store"),
        (b"k" + (START_MS).to_bytes(8, "big") + (START_MS + 1).to_bytes(8, "big"), "session"),
    ],
)
def test_a_key_of_another_form_is_an_error_with_its_place(key: bytes, form: str) -> None:
    place = {"topic": ["t", "t"], "partition": [0, 0], "offset": [7, 8]}
    sound = table(None, key, **place)
    with pytest.raises(InvalidInputError, match=rf"^t-0 offset 8: .* found X'{key.hex().upper()}'"):
        window_columns(sound, form)
    with pytest.raises(InvalidInputError, match=r"^window_columns: expected a key with the window"):
        window_columns(table(key), form)


def test_a_wrong_call_says_what_is_right() -> None:
    with pytest.raises(
        InvalidInputError, match="form is one of window-store, session, window, not"
    ):
        window_columns(table(), "hopping")
    with pytest.raises(InvalidInputError, match="there is no column key; the columns are: k"):
        window_columns(pa.table({"k": [b""]}), "window")
    with pytest.raises(InvalidInputError, match="a column window_start already; rename it"):
        window_columns(table(window_start=pa.array([], pa.int64())), "window")
