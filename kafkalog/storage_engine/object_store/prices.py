"""What the requests to an object store cost: one table, for the planner and for reports."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from kafkalog.storage_engine.object_store.client import DELETE, GET, HEAD, LIST, PUT


@dataclass(frozen=True, slots=True)
class Prices:
    """The price of a request, in dollars; deletes are free."""

    put: float
    """Of a PUT or a LIST."""
    get: float
    """Of a GET or a HEAD."""

    def of(self, counts: Mapping[str, int]) -> float:
        """Return what requests cost, counted by kind."""
        each = {PUT: self.put, LIST: self.put, GET: self.get, HEAD: self.get, DELETE: 0.0}
        return sum(each[kind] * count for kind, count in counts.items())


S3_STANDARD: Final = Prices(put=5e-6, get=4e-7)
"""Amazon S3 Standard, us-east-1."""
