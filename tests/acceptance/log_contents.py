"""What a log holds, as plain values, for tests that compare it before and after."""

from __future__ import annotations

from pathlib import Path

from kafkalog.inspection.verify import verify
from kafkalog.log import KafkaLog

__all__ = ["damage", "latest_records", "records"]

Record = tuple[int, int, bytes | None, bytes | None]
"""Partition, offset, key and value."""


def records(log: KafkaLog, topic: str) -> list[Record]:
    """Return every record of a topic, in order."""
    found: list[Record] = []
    for number in log.offsets(topic):
        for rows in log.read(topic, number):
            columns = (rows[name].to_pylist() for name in ("offset", "key", "value"))
            found += [(number, *record) for record in zip(*columns, strict=True)]
    return found


def latest_records(log: KafkaLog, topic: str) -> dict[bytes, bytes]:
    """Return the latest value of every key."""
    found: dict[bytes, bytes] = {}
    for rows in log.latest(topic):
        found.update(zip(rows["key"].to_pylist(), rows["value"].to_pylist(), strict=True))
    return found


def damage(root: Path) -> list[str]:
    """Return what `verify` takes for damage."""
    return [str(finding) for finding in verify(root, deep=True) if finding.is_damage]
