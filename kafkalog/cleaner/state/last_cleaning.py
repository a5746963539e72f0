"""Store what the last cleanings of a partition did, for `status` and pictures.

Every successful cleaning writes the note `kl-last-cleaning`, with its figures and those of earlier
ones. Nothing depends on the note: errors of reading and writing it are ignored.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any, Final

from kafkalog.cleaner.state.notes import VERSION, packed, unpacked
from kafkalog.storage_engine.format import layout
from kafkalog.storage_engine.fs import files

if TYPE_CHECKING:
    from kafkalog.cleaner.shelf import PartitionNotes
    from kafkalog.cleaner.state.stats import CleanerStats

EARLIER: Final = "earlier"
"""The name of the earlier cleanings' figures, latest first, if there are any."""
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


def write_last_cleaning(notes: PartitionNotes, stats: CleanerStats, *, ended_ms: int) -> None:
    """Write the figures of a cleaning; ignore a disk that refuses them."""
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
    content: dict[str, object] = asdict(cleaning)
    if earlier := read_cleanings(notes)[: KEPT - 1]:
        content[EARLIER] = [asdict(one) for one in earlier]
    with files.ignoring():
        notes.write(layout.LAST_CLEANING, packed(content))


def read_cleanings(notes: PartitionNotes) -> list[LastCleaning]:
    """Return the remembered cleanings of a partition, the latest first; [] if none is known."""
    try:
        content = unpacked(notes.read(layout.LAST_CLEANING))
    except OSError as raised:
        files.pass_on(raised)
        return []
    if content.get("version") != VERSION:
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
