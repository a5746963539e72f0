"""The settings of the cleaner; those of a topic are in `storage_engine.metadata.config`."""

from __future__ import annotations

import dataclasses
import difflib
import math
import numbers
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final, Self

from kafkalog.errors import InvalidInputError

_SLOT_SIZE = 24


@dataclass(frozen=True, slots=True, kw_only=True)
class CleanerConfig:
    """Kafka's `log.cleaner.*` configs, and one of retention. Raises InvalidInputError."""

    enable: bool = True
    """log.cleaner.enable: if false, nothing is compacted, but retention runs (C141)."""
    threads: int = 1
    """log.cleaner.threads: how many partitions a background cleaner cleans at the same time. With 0
    nothing is compacted, as in Kafka."""
    dedupe_buffer_size: int = 128 << 20
    """log.cleaner.dedupe.buffer.size: bytes the offset maps of all threads may take."""
    io_buffer_load_factor: float = 0.9
    """log.cleaner.io.buffer.load.factor: share of the map's slots that may be taken."""
    io_buffer_size: int = 1 << 20
    """log.cleaner.io.buffer.size: bytes that all threads read at once; larger batches are read
    whole."""
    io_max_bytes_per_second: float = math.inf
    """log.cleaner.io.max.bytes.per.second: maximum rate of reads and writes of all threads."""
    backoff_ms: int = 15_000
    """log.cleaner.backoff.ms: pause of a thread that has found nothing to clean."""
    retention_check_interval_ms: int = 300_000
    """log.retention.check.interval.ms: how often retention runs for topics without compact."""
    spill: bool = True
    """kafkalog.cleaner.spill: write keys beyond the budget to a temporary file, and rewrite the log
    once. If false, a round ends when the map is full, as in Kafka."""
    merge_batches: bool = True
    """kafkalog.cleaner.merge.batches: merge small batches into larger ones. If false, every batch
    is filtered in its place, as in Kafka."""

    def __post_init__(self) -> None:
        for field in _NAMES_OF:
            value, kind = getattr(self, field), _kind(field)
            if not isinstance(value, kind.type) or isinstance(value, bool) != (kind.type is bool):
                raise _refused(field, kind.word, repr(value))
        for field, least in _LEAST.items():
            if getattr(self, field) < least:
                raise _refused(field, f"at least {least}", str(getattr(self, field)))
        load_factor = self.io_buffer_load_factor
        if not 0.0 < load_factor < 1.0:
            raise _refused("io_buffer_load_factor", "a number between 0 and 1", str(load_factor))
        slots = math.ceil(1 / load_factor)
        least = _SLOT_SIZE * slots * max(1, self.threads)
        if self.dedupe_buffer_size < least:
            raise _refused(
                "dedupe_buffer_size",
                f"at least {_SLOT_SIZE * slots} bytes a thread, room for one key, so {least}",
                str(self.dedupe_buffer_size),
            )
        if not self.io_max_bytes_per_second > 0.0:
            raise _refused(
                "io_max_bytes_per_second", "a number above 0", str(self.io_max_bytes_per_second)
            )

    @classmethod
    def parse(cls, config: Mapping[str, str]) -> Self:
        """Parse Kafka's names and values, like `log.cleaner.threads`; raises InvalidInputError."""
        values: dict[str, Any] = {}
        for name, text in config.items():
            field = _FIELDS.get(name)
            if field is None:
                near = difflib.get_close_matches(name, NAMES, 3)
                hint = (
                    f"did you mean {' or '.join(near)}?" if near else "known: " + ", ".join(NAMES)
                )
                raise InvalidInputError(f"unknown config of the cleaner {name!r}; {hint}")
            kind = _kind(field)
            try:
                values[field] = kind.parse(text)
            except ValueError:
                raise InvalidInputError(f"{name}: expected {kind.word}, found {text!r}") from None
        return cls(**values)

    def of_one_thread(self) -> Self:
        """Return the settings of one thread, with its share of both buffers (C101)."""
        count = max(1, self.threads)
        return dataclasses.replace(
            self,
            threads=1,
            dedupe_buffer_size=self.dedupe_buffer_size // count,
            io_buffer_size=max(1, self.io_buffer_size // count),
        )


def _refused(field: str, expected: str, found: str) -> InvalidInputError:
    """Return an error that names the setting as in Python and in a configuration."""
    return InvalidInputError(f"{_NAMES_OF[field]} ({field}): expected {expected}, found {found}")


def _bool(text: str) -> bool:
    value = text.strip().lower()
    if value not in ("true", "false"):
        raise ValueError(text)
    return value == "true"


@dataclass(frozen=True, slots=True)
class _Kind:
    parse: Callable[[str], Any]
    word: str
    type: type


_KINDS: Final = MappingProxyType(
    {
        int: _Kind(int, "a whole number", numbers.Integral),
        float: _Kind(float, "a number", numbers.Real),
        bool: _Kind(_bool, "true or false", bool),
    }
)


def _kind(field: str) -> _Kind:
    """Return the kind of a setting: that of its default."""
    return _KINDS[type(CleanerConfig.__dataclass_fields__[field].default)]


_NAMES_OF: Final = MappingProxyType(
    {
        "enable": "log.cleaner.enable",
        "threads": "log.cleaner.threads",
        "dedupe_buffer_size": "log.cleaner.dedupe.buffer.size",
        "io_buffer_load_factor": "log.cleaner.io.buffer.load.factor",
        "io_buffer_size": "log.cleaner.io.buffer.size",
        "io_max_bytes_per_second": "log.cleaner.io.max.bytes.per.second",
        "backoff_ms": "log.cleaner.backoff.ms",
        "retention_check_interval_ms": "log.retention.check.interval.ms",
        "spill": "kafkalog.cleaner.spill",
        "merge_batches": "kafkalog.cleaner.merge.batches",
    }
)
_FIELDS: Final = MappingProxyType({name: field for field, name in _NAMES_OF.items()})
_LEAST: Final = MappingProxyType(
    {"threads": 0, "io_buffer_size": 1, "backoff_ms": 0, "retention_check_interval_ms": 1}
)
NAMES: Final = tuple(_FIELDS)
"""The names of all settings."""
