"""A row that PostgreSQL refuses, and why."""

from __future__ import annotations

from typing import NamedTuple

from kafkalog.sink.upsert.bad_records import Refusal


class Misfit(NamedTuple):
    """The record of a refused row; its place is null if a `select` function drops it."""

    topic: str | None
    partition: int | None
    offset: int | None
    key: object
    reason: str

    def __str__(self) -> str:
        """Return it as errors say it; the record is its key if its place is not known."""
        record = (
            f"the row of key {self.key!r:.200}"
            if self.offset is None
            else f"the record at {self.topic}-{self.partition} offset {self.offset}"
        )
        return f"{record} does not fit: {self.reason}"

    def refusal(self) -> Refusal:
        """Return it for `BadRecords`, which never leaves out rows of a `select` function."""
        assert self.topic is not None and self.partition is not None and self.offset is not None
        return Refusal(self.topic, self.partition, self.offset, self.reason)
