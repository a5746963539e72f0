"""The cleaner's own settings; a topic's are in `storage_engine.config`."""

from __future__ import annotations

from dataclasses import dataclass

from kafkalog.errors import InvalidInputError

__all__ = ["CleanerConfig"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CleanerConfig:
    """Kafka's `log.cleaner.*` configs, and one of retention. Raises InvalidInputError."""

    dedupe_buffer_size: int = 128 << 20
    """log.cleaner.dedupe.buffer.size: bytes the offset map may take."""
    io_buffer_load_factor: float = 0.9
    """log.cleaner.io.buffer.load.factor: share of the map's slots that may be taken."""
    io_buffer_size: int = 1 << 20
    """log.cleaner.io.buffer.size: bytes of a log read at once; a larger batch is read whole."""
    backoff_ms: int = 15_000
    """log.cleaner.backoff.ms: the pause of the thread when nothing is left to clean."""
    retention_check_interval_ms: int = 300_000
    """log.retention.check.interval.ms: how often retention looks at topics without compact."""

    def __post_init__(self) -> None:
        if self.dedupe_buffer_size < 24:
            raise InvalidInputError(
                f"dedupe_buffer_size: expected at least 24 bytes, found {self.dedupe_buffer_size}"
            )
        if not 0.0 < self.io_buffer_load_factor < 1.0:
            raise InvalidInputError(
                "io_buffer_load_factor: expected a number between 0 and 1, "
                f"found {self.io_buffer_load_factor}"
            )
        if self.retention_check_interval_ms < 1:
            raise InvalidInputError(
                "retention_check_interval_ms: expected at least 1, "
                f"found {self.retention_check_interval_ms}"
            )
        if self.io_buffer_size < 1 or self.backoff_ms < 0:
            raise InvalidInputError(
                "io_buffer_size and backoff_ms: expected at least 1 and 0, "
                f"found {self.io_buffer_size} and {self.backoff_ms}"
            )
