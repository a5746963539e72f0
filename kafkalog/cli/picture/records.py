"""A page of a partition's records, for the picture; nothing is written.

{"topic": ..., "partition": ..., "logStartOffset": ..., "endOffset": ..., "start": ..., "next": ...,
 "pageSize": ...,
 "records": [{"offset": ..., "timeMs": ..., "key": ..., "value": ...,
              "headers": [[name, value], ...]}, ...]}

A key or a value is null, or a text of at most `TEXT_MAX` characters; bytes that aren't UTF-8 are
shown as `0x` and hexadecimal digits.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from kafkalog.errors import InvalidInputError
from kafkalog.storage_engine.reading import time_offsets

if TYPE_CHECKING:
    import pyarrow as pa

    from kafkalog.storage_engine.log.log import Log

COUNT: Final = 25
"""Records of a page."""
TEXT_MAX: Final = 500


def records_page(log: Log, query: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    """Return the page that a query string asks for.

    `topic` and `partition` name it. `start` is its first offset; without one it is the last page.
    With `latest=1` only the latest record of each key counts. Raises InvalidInputError.
    """
    topic = query.get("topic", [""])[0]
    partition, start = _number(query, "partition"), _number(query, "start")
    if partition is None:
        raise InvalidInputError("partition: expected a number, found nothing")
    is_latest = query.get("latest") == ["1"]
    log.check_partition(topic, partition)
    state = log.describe(topic).partitions[partition]
    first = state.log_start_offset
    end = time_offsets.end_offset(state, time_offsets.READ_COMMITTED)
    if start is None:
        start = first if is_latest else end - COUNT
    start = min(max(start, first), max(end, first))
    found = (
        _latest(log, topic, partition, start) if is_latest else _all(log, topic, partition, start)
    )
    records = [record for _, record in zip(range(COUNT + 1), found, strict=False)]
    following = records.pop()["offset"] if len(records) > COUNT else None
    return {
        "topic": topic,
        "partition": partition,
        "logStartOffset": first,
        "endOffset": end,
        "start": start,
        "next": following,
        "pageSize": COUNT,
        "records": records,
    }


def _number(query: Mapping[str, Sequence[str]], name: str) -> int | None:
    (text,) = query.get(name, ("",))[:1]
    if not text:
        return None
    try:
        return int(text)
    except ValueError:
        raise InvalidInputError(f"{name}: expected a number, found {text[:40]!r}") from None


def _all(log: Log, topic: str, partition: int, start: int) -> Iterator[dict[str, Any]]:
    for batch in log.read(topic, partition, start, include_headers=True):
        yield from _rows(batch)


def _latest(log: Log, topic: str, partition: int, start: int) -> Iterator[dict[str, Any]]:
    from kafkalog.cleaner.config import CleanerConfig
    from kafkalog.cleaner.key_index.latest_view import latest_of_topic

    budget = CleanerConfig().dedupe_buffer_size
    for batch in latest_of_topic(
        log, topic, partition=partition, include_headers=True, budget_bytes=budget
    ):
        yield from (row for row in _rows(batch) if row["offset"] >= start)


def _rows(batch: pa.RecordBatch) -> Iterator[dict[str, Any]]:
    import pyarrow as pa

    times = batch["timestamp"].cast(pa.int64())  # also of times outside Python's calendar
    for row in range(batch.num_rows):
        headers = batch["headers"][row].as_py() or ()
        yield {
            "offset": batch["offset"][row].as_py(),
            "timeMs": times[row].as_py() // 1000,
            "key": _text(batch["key"][row].as_py()),
            "value": _text(batch["value"][row].as_py()),
            "headers": [[header["key"], _text(header["value"])] for header in headers],
        }


def _text(data: bytes | None) -> str | None:
    if data is None:
        return None
    try:
        text = data.decode()
    except UnicodeDecodeError:
        text = f"0x{data[:TEXT_MAX].hex()}"
    return text if len(text) <= TEXT_MAX else f"{text[:TEXT_MAX]}…"
