"""The lag of streaming queries behind their log, from the progress that Spark reports.

Spark's own Kafka source puts three numbers into the `metrics` of a progress. A Python source
cannot, so they are computed here from the same progress.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Mapping
from decimal import ROUND_HALF_UP, Decimal
from typing import Any, Final

from pyspark.sql.streaming.listener import StreamingQueryListener

from kafkalog.datasource.offsets import Offsets, from_json
from kafkalog.errors import InvalidInputError

_LOGGER = logging.getLogger(__name__)
_ONE_DECIMAL: Final = Decimal("0.1")


def offsets_behind_latest(progress: Any) -> list[dict[str, str]]:
    """Return {min,max,avg}OffsetsBehindLatest of each source, like Spark's Kafka source.

    `progress` is that of a `StreamingQueryListener`, or `query.lastProgress` (a dict, or None). All
    numbers are text, the average with one decimal (`"3.0"`). They count the offsets of each
    partition from `endOffset` to `latestOffset`, or from 0 for a partition not yet read. A map is
    empty if the source has read nothing or has no topics (Spark: KafkaMicroBatchStream.metrics).
    """
    sources = _field(progress, "sources") if progress is not None else None
    return [_behind(source) for source in sources or ()]


class LagListener(StreamingQueryListener):
    """Logs each query's lag and keeps it in `latest`, by query id: a map per source."""

    def __init__(self, level: int = logging.INFO) -> None:
        self.level = level
        self.latest: dict[str, list[dict[str, str]]] = {}
        self._guard = threading.Lock()

    def onQueryStarted(self, event: Any) -> None:
        """Do nothing: a query that has just started makes no progress."""

    def onQueryProgress(self, event: Any) -> None:
        """Log a line for each source with offsets of topics."""
        progress = event.progress
        behind = offsets_behind_latest(progress)
        with self._guard:
            self.latest[str(progress.id)] = behind
        for place, numbers in enumerate(behind):
            if numbers:
                _LOGGER.log(
                    self.level,
                    "query %s, batch %s, source %d: offsets behind latest: min %s, max %s, avg %s",
                    progress.name or progress.id,
                    progress.batchId,
                    place,
                    numbers["minOffsetsBehindLatest"],
                    numbers["maxOffsetsBehindLatest"],
                    numbers["avgOffsetsBehindLatest"],
                )

    def onQueryIdle(self, event: Any) -> None:
        """Do nothing: the last lag still holds."""

    def onQueryTerminated(self, event: Any) -> None:
        """Forget the query."""
        with self._guard:
            self.latest.pop(str(event.id), None)


def _behind(source: Any) -> dict[str, str]:
    latest, consumed = _offsets(source, "latestOffset"), _offsets(source, "endOffset")
    if not latest or consumed is None:
        return {}
    behind = [offset - consumed.get(partition, 0) for partition, offset in latest.items()]
    return {
        "minOffsetsBehindLatest": str(min(behind)),
        "maxOffsetsBehindLatest": str(max(behind)),
        "avgOffsetsBehindLatest": _rounded(sum(behind) / len(behind)),
    }


def _offsets(source: Any, name: str) -> Offsets | None:
    """Return the offsets of a progress; None for other sources, or if it lacks them so far."""
    found = _field(source, name)
    try:
        nested = json.loads(found) if isinstance(found, str) else found
        return from_json(nested) if isinstance(nested, Mapping) else None
    except (ValueError, RecursionError, InvalidInputError):
        return None


def _field(holder: Any, name: str) -> Any:
    if hasattr(holder, name):
        return getattr(holder, name)
    return holder.get(name) if isinstance(holder, Mapping) else None


def _rounded(number: float) -> str:
    """Return a number as a progress shows it (Spark: SourceProgress)."""
    return str(Decimal(repr(number)).quantize(_ONE_DECIMAL, ROUND_HALF_UP))
