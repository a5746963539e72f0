"""Store what the last cleanings of a partition did, for `status` and pictures.

Every successful cleaning writes the file `kl-last-cleaning` in the partition's directory, with its
figures and those of earlier ones. Nothing depends on the file: errors of reading and writing it are
ignored.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from kafkalog.storage_engine.format import layout
from kafkalog.storage_engine.fs import files

if TYPE_CHECKING:
    from kafkalog.cleaner.state.stats import CleanerStats

_VERSION: Final = 1
EARLIER: Final = "earlier"
"""The name of the earlier cleanings' figures, latest first; older files lack it."""
KEPT: Final = 32
"""Number of cleanings to remember."""


@dataclass(frozen=True, slots=True)
class LastCleaning:
    """The time and figures of a cleaning; sizes are bytes of `.log` files."""

    ended_ms: int
    """Epoch ms."""
    elapsed_ms: int
    start_offset: int
    """First dirty offset before."""
    end_offset: int
    """First dirty offset after."""
    rounds: int
    records_read: int
    records_kept: int
    bytes_read: int
    bytes_written: int
    tombstones: int
    """Tombstones that wait for their delete horizon."""


def write_last_cleaning(directory: Path, stats: CleanerStats, *, ended_ms: int) -> None:
    """Write the figures of a cleaning; ignore a disk that refuses them."""
    content = told(stats, ended_ms, read_cleanings(directory)).encode() + b"\n"
    with files.ignoring():
        files.write_atomically(directory / layout.LAST_CLEANING, content)


def told(stats: CleanerStats, ended_ms: int, earlier: Sequence[LastCleaning] | None = None) -> str:
    """Return the content of the file: the figures of a cleaning, and those of earlier ones."""
    cleaning = LastCleaning(
        ended_ms=ended_ms,
        elapsed_ms=round(stats.elapsed_ms),
        start_offset=stats.start_offset,
        end_offset=stats.end_offset,
        rounds=stats.rounds,
        records_read=stats.records_read,
        records_kept=stats.records_kept,
        bytes_read=stats.bytes_read,
        bytes_written=stats.bytes_written,
        tombstones=stats.tombstones_kept,
    )
    content = {"version": _VERSION, **asdict(cleaning)}
    if earlier is not None:
        content[EARLIER] = [asdict(one) for one in earlier[: KEPT - 1]]
    return json.dumps(content)


def read_last_cleaning(directory: Path) -> LastCleaning | None:
    """Return the last cleaning of a partition; None if it is unknown."""
    return next(iter(read_cleanings(directory)), None)


def read_cleanings(directory: Path) -> list[LastCleaning]:
    """Return the remembered cleanings of a partition, the latest first."""
    try:
        return cleanings_of(files.read_file(directory / layout.LAST_CLEANING))
    except OSError as raised:
        files.pass_on(raised)
        return []


def cleanings_of(text: str | bytes) -> list[LastCleaning]:
    """Return the cleanings that the content of the file tells; [] if it tells none."""
    try:
        content = json.loads(text)
    except (ValueError, RecursionError):
        return []
    if not isinstance(content, dict) or content.get("version") != _VERSION:
        return []
    last = _cleaning(content)
    if last is None:
        return []
    earlier = content.get(EARLIER, [])
    known = [_cleaning(one) for one in earlier] if isinstance(earlier, list) else []
    return [last, *(one for one in known if one is not None)]


def _cleaning(figures: Any) -> LastCleaning | None:
    if not isinstance(figures, dict):
        return None
    values = [figures.get(field.name) for field in fields(LastCleaning)]
    known = [value for value in values if isinstance(value, int)]
    return LastCleaning(*known) if len(known) == len(values) else None
