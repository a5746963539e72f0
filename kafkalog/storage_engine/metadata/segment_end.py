"""The rule that says when a segment takes no more batches; the same for files and for objects.

Kafka: LogSegment.shouldRoll (conformance R1 to R4), LogConfig.randomSegmentJitter.
"""

from __future__ import annotations

import hashlib

from kafkalog.storage_engine.metadata.config import TopicConfig


def lifetime_ms(config: TopicConfig, topic_id: str, directory: str, base_offset: int) -> int:
    """Return how long after its first batch a segment takes more of them.

    `segment.jitter.ms` draws from [0, jitter) by the segment's name, so every process gets the
    same; `directory` is the name of the partition's directory.
    """
    longest_ms = config.segment_lifetime_ms
    jitter_ms = min(config.segment_jitter_ms, config.segment_ms)
    if jitter_ms == 0:
        return longest_ms
    name = f"{topic_id}/{directory}/{base_offset}"
    digest = hashlib.blake2b(name.encode(), digest_size=8).digest()
    return longest_ms - int.from_bytes(digest, "big") % jitter_ms


def has_time(first_ms: int, time_ms: int, longest_ms: int) -> bool:
    """Return whether a batch of largest timestamp `time_ms` comes within a segment's lifetime.

    `first_ms` is that of the segment's first batch; without one (-1) no time has passed.
    """
    return first_ms < 0 or time_ms - first_ms <= longest_ms


def has_bytes(config: TopicConfig, size: int, batch_size: int) -> bool:
    """Return whether a segment of `size` bytes, more than none, takes a batch's bytes too."""
    return size <= config.segment_bytes - batch_size
