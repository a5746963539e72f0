"""The mark of a partition that could not be cleaned: why, since when, and when to try again.

The file `kl-uncleanable` in the partition's directory outlives the process, so a restart does not
beat on a broken disk, and an operator sees the reason. A change of the topic's configs, or a forced
cleaning, tries at once; success removes the mark. Kafka keeps such marks in memory (C131, C132).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from kafkalog.storage_engine import files, layout

__all__ = ["Uncleanable", "clear_uncleanable", "mark_uncleanable", "read_uncleanable"]

_VERSION = 1
_FIRST_BACKOFF_MS = 60_000
_LAST_BACKOFF_MS = 3_600_000


@dataclass(frozen=True, slots=True)
class Uncleanable:
    """Why a partition is not cleaned."""

    reason: str
    failures: int = 1
    """In a row."""
    since_ms: int = 0
    retry_at_ms: int = layout.INT64_MAX
    config: Mapping[str, str] | None = None
    """The topic's configs at the last failure."""

    def is_due(self, config: Mapping[str, str], now_ms: int) -> bool:
        """Whether to try again."""
        return now_ms >= self.retry_at_ms or (
            self.config is not None and dict(self.config) != dict(config)
        )


def read_uncleanable(directory: Path) -> Uncleanable | None:
    """Return a partition's mark; None when it has none. A mark that cannot be read is one too."""
    path = directory / layout.UNCLEANABLE
    try:
        content = json.loads(path.read_bytes())
        if content.pop("version") != _VERSION:
            return Uncleanable(f"{path}: written by a newer release; use that one")
        return Uncleanable(**content)
    except FileNotFoundError:
        return None
    except (ValueError, TypeError, KeyError, AttributeError):
        return Uncleanable(f"{path}: expected a mark of the cleaner; remove the file to go on")


def mark_uncleanable(
    directory: Path, reason: str, config: Mapping[str, str], *, now_ms: int
) -> Uncleanable:
    """Mark a partition, or count one more failure; the pause doubles from a minute to an hour."""
    before = read_uncleanable(directory)
    failures = 1 if before is None else before.failures + 1
    backoff_ms = min(_FIRST_BACKOFF_MS << min(failures - 1, 10), _LAST_BACKOFF_MS)
    mark = Uncleanable(
        reason=reason,
        failures=failures,
        since_ms=now_ms if before is None else before.since_ms,
        retry_at_ms=now_ms + backoff_ms,
        config=dict(config),
    )
    content = json.dumps({"version": _VERSION, **asdict(mark)}).encode() + b"\n"
    files.write_atomically(directory / layout.UNCLEANABLE, content)
    return mark


def clear_uncleanable(directory: Path) -> None:
    """Remove a partition's mark."""
    path = directory / layout.UNCLEANABLE
    if path.exists():
        files.remove(path)
        files.sync_directory(directory)
