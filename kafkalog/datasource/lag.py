"""How far streaming queries are behind their log, from the progress that Spark reports.

Spark's own Kafka source puts three numbers in the `metrics` of a progress; a source in Python
cannot, so they are computed from the same progress here.
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

__all__ = ["LagListener", "offsets_behind_latest"]

_LOGGER = logging.getLogger(__name__)
_ONE_DECIMAL: Final = Decimal("0.1")


def offsets_behind_latest(progress: Any) -> list[dict[str, str]]:
    """Return {min,max,avg}OffsetsBehindLatest of each source, as Spark's Kafka source has them.

    `progress` is that of a `StreamingQueryListener`, or `query.lastProgress` (a dict, or None). All
    numbers are text, the average with one decimal (`"3.0"`). Over the partitions of `latestOffset`
    each is the count of offsets from `endOffset` to it; one that was not read yet counts from 0. A
    map is empty where a source has read nothing, or where its offsets are none of topics
    (Spark: KafkaMicroBatchStream.metrics).
    """
    sources = _field(progress, "sources") if progress is not None else None
    return [_behind(source) for source in sources or ()]


class LagListener(StreamingQueryListener):
    """Logs and keeps how far each query is behind: `spark.streams.addListener(LagListener())`.

    `latest` holds, by the query's id, the maps of its last progress, one for each source.
    """

    def __init__(self, level: int = logging.INFO) -> None:
        self.level = level
        self.latest: dict[str, list[dict[str, str]]] = {}
        self._guard = threading.Lock()

    def onQueryStarted(self, event: Any) -> None:
        """Do nothing: there is no progress yet."""

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
        """Do nothing: what was said last still holds, or less."""

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
    """Return the offsets of a progress, None where there are none or they are of other sources."""
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
