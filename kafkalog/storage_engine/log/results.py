"""The results of a commit and of retention, whatever the kind of log."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

STAGED_RETENTION_MS = 7 * 24 * 60 * 60 * 1000
"""A staged file this old is named by no query that is alive."""


@dataclass(frozen=True, slots=True)
class CommitResult:
    """The result of a commit: (first, next) offset per (topic, partition), empty if `skipped`."""

    skipped: bool
    rows: int
    offsets: Mapping[tuple[str, int], tuple[int, int]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RetentionStats:
    """The result of retention in one partition."""

    topic: str
    partition: int
    log_start_offset: int = 0
    """The new log start."""
    segments: int = 0
    """The number of removed segments."""
    bytes_removed: int = 0
    """The bytes of their `.log` files."""
    error: str | None = None
    """The reason of a failure, which leaves the partition unchanged; None after success."""
