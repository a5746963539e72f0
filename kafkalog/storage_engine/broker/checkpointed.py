"""The root of a broker's directory, as it speaks of one of its partitions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

from kafkalog.storage_engine.format import layout

_REMOTE_CACHE: Final = "remote-log-index-cache"
"""A directory of brokers with tiered storage. Kafka: RemoteIndexCache."""
_COMPACTED: Final = frozenset(layout.INTERNAL_TOPICS) - {
    layout.METADATA_DIRECTORY.rpartition("-")[0]
}


@dataclass(frozen=True, slots=True)
class Checkpointed:
    """The offsets in the root's checkpoints, None without an entry, and how the broker stopped."""

    recovery_point: int | None = None
    """The broker had synced everything below. After a clean shutdown, the log's end."""
    high_watermark: int | None = None
    """The broker had acknowledged everything below."""
    log_start: int | None = None
    """Only if the first segment begins below it."""
    first_dirty: int | None = None
    """The cleaner has cleaned everything below, so an entry means that the topic was compacted."""
    is_always_compacted: bool = False
    """The topic is one of Kafka's own that are compacted, whatever the checkpoint says."""
    is_clean: bool = False
    is_live: bool = False
    is_tiered: bool = False
    """The log may begin in remote storage (KIP-405), below its first local segment."""

    @classmethod
    def of(
        cls,
        offsets: Mapping[str, Mapping[tuple[str, int], int]],
        partition: tuple[str, int],
        config: Mapping[str, str],
        *,
        root: Path,
        is_clean: bool,
        is_live: bool = False,
    ) -> Self:
        """Return what the checkpoints, by their names, say; `config` is the topic's, if known."""
        is_tiered = config.get("remote.storage.enable") == "true" or (root / _REMOTE_CACHE).is_dir()
        return cls(
            recovery_point=offsets[layout.RECOVERY_POINT_CHECKPOINT].get(partition),
            high_watermark=offsets[layout.REPLICATION_CHECKPOINT].get(partition),
            log_start=offsets[layout.LOG_START_CHECKPOINT].get(partition),
            first_dirty=offsets[layout.CLEANER_CHECKPOINT].get(partition),
            is_always_compacted=partition[0] in _COMPACTED,
            is_clean=is_clean,
            is_live=is_live,
            is_tiered=is_tiered,
        )
