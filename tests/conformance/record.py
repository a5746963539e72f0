"""One record, whoever read it: a Kafka consumer, kafkalog, or Kafka's dump of a file."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa
from confluent_kafka import Consumer, KafkaError, Message, TopicPartition

CREATE_TIME, LOG_APPEND_TIME = 0, 1
_POLL_SECONDS = 30


class Record(NamedTuple):
    offset: int
    timestamp: int
    timestamp_type: int
    key: bytes | None
    value: bytes | None
    headers: tuple[tuple[str, bytes | None], ...] = ()


def of_kafkalog(batches: Iterable[pa.RecordBatch]) -> list[Record]:
    """Return what kafkalog read with headers."""
    records = []
    for batch in batches:
        for row in batch.to_pylist():
            headers = tuple((h["key"], h["value"]) for h in row["headers"] or ())
            milliseconds = round(row["timestamp"].timestamp() * 1000)
            kind = row["timestampType"]
            records.append(
                Record(row["offset"], milliseconds, kind, row["key"], row["value"], headers)
            )
    return records


def record_of(message: Message) -> Record:
    """Return what a Kafka consumer got."""
    kind, timestamp = message.timestamp()
    headers = tuple(message.headers() or ())
    return Record(message.offset(), timestamp, kind - 1, message.key(), message.value(), headers)


def consumed(
    bootstrap: str, topic: str, partition: int, *, start: int = 0, committed: bool = True
) -> list[Record]:
    """Return what a Kafka consumer gets of a partition, from `start` to its end."""
    place = (topic, partition)
    return consumed_all(bootstrap, {place: start}, committed=committed)[place]


def consumed_all(
    bootstrap: str, starts: Mapping[tuple[str, int], int], *, committed: bool = True
) -> dict[tuple[str, int], list[Record]]:
    """Return what a Kafka consumer gets of partitions, each from its start to its end."""
    consumer = Consumer(
        {
            "bootstrap.servers": bootstrap,
            "group.id": "tests",
            "enable.auto.commit": False,
            "enable.partition.eof": True,
            "auto.offset.reset": "error",
            "check.crcs": True,
            "fetch.wait.max.ms": 10,
            "isolation.level": "read_committed" if committed else "read_uncommitted",
        }
    )
    records: dict[tuple[str, int], list[Record]] = {place: [] for place in starts}
    unfinished = set(starts)
    try:
        consumer.assign([TopicPartition(*place, start) for place, start in starts.items()])
        while unfinished:
            message = consumer.poll(_POLL_SECONDS)
            assert message is not None, f"nothing from the broker for {_POLL_SECONDS} s"
            error = message.error()
            place = message.topic(), message.partition()
            if error is None:
                records[place].append(record_of(message))
            elif error.code() == KafkaError._PARTITION_EOF:
                unfinished.discard(place)
            else:
                raise AssertionError(str(error))
    finally:
        consumer.close()
    return records


class DumpedRecord(NamedTuple):
    """What DumpLogSegments prints of a record; keys, values and header names are text."""

    offset: int
    timestamp: int
    timestamp_type: int
    key: bytes | None
    value: bytes | None
    header_names: tuple[str, ...]


_RECORD = re.compile(
    r"\| offset: (?P<offset>\d+) (?P<kind>CreateTime|LogAppendTime): (?P<timestamp>-?\d+) "
    r"keySize: (?P<key_size>-?\d+) valueSize: (?P<value_size>-?\d+) .*?"
    r"headerKeys: \[(?P<headers>[^\]]*)\](?P<data>.*)"
)


def dumped(output: str) -> dict[Path, list[DumpedRecord]]:
    """Return the records of each file out of what DumpLogSegments printed with its data."""
    records: dict[Path, list[DumpedRecord]] = {}
    path = Path()
    for line in output.splitlines():
        if line.startswith("Dumping "):
            path = Path(line.removeprefix("Dumping "))
        elif line.startswith("| "):
            records.setdefault(path, []).append(_dumped_record(line))
    return records


def _dumped_record(line: str) -> DumpedRecord:
    match = _RECORD.fullmatch(line)
    assert match, line
    rest = match["data"]
    fields: list[bytes | None] = []
    # Sizes say where a field ends, so a field may hold anything that is one character a byte.
    for label, size in (
        (" key: ", int(match["key_size"])),
        (" payload: ", int(match["value_size"])),
    ):
        if size < 0:
            fields.append(None)
            continue
        assert rest.startswith(label), line
        fields.append(rest[len(label) :][:size].encode())
        rest = rest[len(label) + size :]
    assert not rest, line
    return DumpedRecord(
        int(match["offset"]),
        int(match["timestamp"]),
        LOG_APPEND_TIME if match["kind"] == "LogAppendTime" else CREATE_TIME,
        fields[0],
        fields[1],
        tuple(filter(None, match["headers"].split(","))),
    )
