"""Drawn histories whose rows come out of order, and what they come to."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Sequence
from typing import Any, NamedTuple

import pyarrow as pa

from kafkalog.sink.upsert import Batch, Upsert

SELECT = [
    "cast(key as string) as key",
    "get_json_object(cast(value as string), '$.gone') = 'true' as deleted",
    "cast(get_json_object(cast(value as string), '$.version') as bigint) as version",
    "cast(get_json_object(cast(value as string), '$.n') as bigint) as n",
]
_NOW_MS = 1_700_000_000_000
IS_FULL = os.environ.get("KAFKALOG_TABLES") == "full"


class Event(NamedTuple):
    key: str
    version: int | None
    is_gone: bool
    n: int


def drawn() -> list[list[Event]]:
    """Draw histories of three keys each, and deal them out to micro-batches."""
    dice = random.Random(1)
    batches: list[list[Event]] = [[] for _ in range(6 if IS_FULL else 3)]
    for history in range(200 if IS_FULL else 20):
        for key in range(3):
            for n in range(dice.randint(1, 9)):
                event = Event(f"{history}-{key}", dice.randrange(8), dice.random() < 0.3, n)
                dice.choice(batches).append(event)
    for batch in batches:
        dice.shuffle(batch)
    return batches


def in_order(batches: Sequence[Sequence[Event]]) -> list[tuple[str, int | None, int]]:
    """Return the rows that a table ends with if the events come in the order of their versions."""
    latest: dict[str, Event] = {}
    events = [event for batch in batches for event in batch]
    for event in sorted(events, key=lambda each: each.version or 0):  # it keeps equal ones in order
        latest[event.key] = event
    return sorted((each.key, each.version, each.n) for each in latest.values() if not each.is_gone)


def take(
    spark: Any, upsert: Upsert, batches: Sequence[Sequence[Event]], *, first: int = 0, ms: int = 0
) -> None:
    """Let an upsert apply the micro-batches, from number `first` on, `ms` after the first time."""
    offset = 1000 * first
    for number, events in enumerate(batches, first):
        rows = pa.table(
            {
                "key": pa.array([each.key.encode() for each in events], pa.binary()),
                "value": pa.array([document(each) for each in events], pa.binary()),
                "topic": pa.array(["t"] * len(events), pa.string()),
                "partition": pa.array([0] * len(events), pa.int32()),
                "offset": pa.array(range(offset, offset + len(events)), pa.int64()),
                "timestamp": pa.array([0] * len(events), pa.timestamp("us", tz="UTC")),
                "timestampType": pa.array([0] * len(events), pa.int32()),
            }
        )
        offset += len(events)
        batch = Batch("q", number, "run", {"t": {"0": offset}}, _NOW_MS + ms)
        upsert._apply(spark.createDataFrame(rows), batch, None)


def document(event: Event) -> bytes:
    fields = {"gone": "true" if event.is_gone else "false", "version": event.version, "n": event.n}
    return json.dumps(fields).encode()
