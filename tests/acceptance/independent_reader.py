"""Reads a log directory with aiokafka's decoder, which shares no code with kafkalog.

`python -m tests.acceptance.independent_reader DIR [TOPIC] [--compare]` goes through every byte of
every `.log` and exits 1 at the first fault: a wrong checksum, bytes that are no batch, an offset
that does not rise. `--compare` also demands that kafkalog's `latest` gives the same latest values.

Made for a log at rest: of a cleaning that died half-way, it takes the old files for the log.
"""

from __future__ import annotations

import argparse
import struct
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aiokafka.errors import CorruptRecordException
from aiokafka.record.memory_records import MemoryRecords

LENGTH = struct.Struct(">i")
"""Of every format: how many bytes follow the 8 of the offset and the 4 of this field."""
OVERHEAD = 12


class IndependentFault(AssertionError):
    """What the reader found wrong; the message names the file."""


@dataclass
class TopicContents:
    """What the `.log` files of one topic hold."""

    latest_records: dict[bytes, bytes] = field(default_factory=dict)
    """The latest value of every key whose latest record is no tombstone."""
    files: int = 0
    size: int = 0
    batches: int = 0
    records: int = 0
    tombstones: int = 0
    control_records: int = 0
    codecs: set[int] = field(default_factory=set)


def read_log(root: Path, topic: str | None = None) -> dict[str, TopicContents]:
    """Read all topics of a directory, or one; raises IndependentFault."""
    topics: dict[str, TopicContents] = {}
    owners: dict[tuple[str, bytes], int] = {}
    for directory in sorted(path for path in root.iterdir() if path.is_dir()):
        name, dash, number = directory.name.rpartition("-")
        if not dash or not number.isdigit() or topic not in (None, name):
            continue
        contents = topics.setdefault(name, TopicContents())
        for key, value in read_partition(directory, contents):
            if owners.setdefault((name, key), int(number)) != int(number):
                raise IndependentFault(f"{directory}: key {key!r} lies in another partition too")
            if value is None:
                contents.latest_records.pop(key, None)
            else:
                contents.latest_records[key] = value
    return topics


def read_partition(
    directory: Path, contents: TopicContents
) -> Iterator[tuple[bytes, bytes | None]]:
    """Yield (key, value) of every keyed data record in offset order; counts into `contents`."""
    next_offset = 0
    for path in sorted(directory.glob("*.log")):
        base_offset = int(path.stem)
        if base_offset < next_offset:
            raise IndependentFault(f"{path}: begins below offset {next_offset}, already seen")
        next_offset = base_offset
        data = path.read_bytes()
        contents.files += 1
        contents.size += len(data)
        batches = 0
        for batch, is_control in _batches(path, data):
            batches += 1
            for record in _records(path, batch):
                if record.offset < next_offset:
                    raise IndependentFault(
                        f"{path}: offset {record.offset} where at least {next_offset} is due"
                    )
                next_offset = record.offset + 1
                if is_control:
                    contents.control_records += 1
                    continue
                contents.records += 1
                contents.tombstones += record.value is None
                if record.key is not None:
                    yield record.key, record.value
            # A cleaned batch spans offsets that it no longer holds.
            if batch.next_offset < next_offset:
                raise IndependentFault(f"{path}: a record lies beyond its batch's last offset")
            next_offset = batch.next_offset
            contents.codecs.add(batch.compression_type)
        contents.batches += batches
        expected = _count_batches(path, data)
        if batches != expected:
            raise IndependentFault(f"{path}: {expected} batches, aiokafka reads {batches}")


def _batches(path: Path, data: bytes) -> Iterator[tuple[Any, bool]]:
    records = MemoryRecords(data)
    try:
        while records.has_next():
            batch = records.next_batch()
            if not batch.validate_crc():
                raise IndependentFault(f"{path}: wrong CRC in the batch at {batch.base_offset}")
            yield batch, batch.is_control_batch
    except CorruptRecordException as fault:
        raise IndependentFault(f"{path}: {fault}") from fault


def _records(path: Path, batch: Any) -> Iterator[Any]:
    try:
        yield from batch
    except Exception as fault:  # a decompressor has errors of its own
        raise IndependentFault(
            f"{path}: the batch at {batch.base_offset} does not decode: {fault!r}"
        ) from fault


def _count_batches(path: Path, data: bytes) -> int:
    """Count batches by their lengths alone; they must end where the file ends."""
    count = position = 0
    while position < len(data):
        if len(data) - position < OVERHEAD:
            raise IndependentFault(f"{path}: {len(data) - position} bytes left over at {position}")
        (length,) = LENGTH.unpack_from(data, position + 8)
        if length <= 0 or position + OVERHEAD + length > len(data):
            raise IndependentFault(f"{path}: no whole batch at byte {position}")
        position += OVERHEAD + length
        count += 1
    return count


def latest_of_kafkalog(root: Path, topic: str) -> dict[bytes, bytes]:
    """Return the latest value per key as kafkalog itself reads it."""
    import kafkalog

    found: dict[bytes, bytes] = {}
    for rows in kafkalog.open(root, read_only=True).latest(topic):
        keys, values = rows["key"].to_pylist(), rows["value"].to_pylist()
        assert found.keys().isdisjoint(keys)
        found.update(zip(keys, values, strict=True))
    return found


def main(arguments: list[str] | None = None) -> int:
    """Print what each topic holds; returns the exit status."""
    parser = argparse.ArgumentParser(prog="independent_reader", description=__doc__)
    parser.add_argument("directory", type=Path, metavar="DIR")
    parser.add_argument("topic", nargs="?", metavar="TOPIC")
    parser.add_argument("--compare", action="store_true", help="compare with kafkalog's latest")
    options = parser.parse_args(arguments)
    if not options.directory.is_dir():
        parser.error(f"{options.directory}: no directory")
    try:
        topics = read_log(options.directory, options.topic)
    except IndependentFault as fault:
        print(fault, file=sys.stderr)
        return 1
    if not topics:
        print(f"{options.directory}: no such topic, or none at all", file=sys.stderr)
        return 1
    status = 0
    for name, contents in topics.items():
        print(
            f"{name}: {contents.files} files, {contents.size} bytes, {contents.batches} batches, "
            f"{contents.records} records ({contents.tombstones} tombstones), "
            f"{len(contents.latest_records)} keys, codecs {sorted(contents.codecs)}: "
            "checksums valid, offsets rising, nothing left over"
        )
        if options.compare:
            is_same = latest_of_kafkalog(options.directory, name) == contents.latest_records
            status |= not is_same
            print(f"{name}: kafkalog's latest is {'the same' if is_same else 'DIFFERENT'}")
    return status


if __name__ == "__main__":
    sys.exit(main())
