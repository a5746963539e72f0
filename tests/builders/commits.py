"""Commits of consumer groups as each release of Kafka wrote them: nothing here is kafkalog's code.

Kafka: OffsetCommitKey.json, OffsetCommitValue.json.
"""

from __future__ import annotations

import struct

from tests.builders.batch_builder import BatchBuilder, BuiltBatch


def text(value: str) -> bytes:
    return struct.pack(">h", len(value.encode())) + value.encode()


def key(group: str = "g", topic: str = "t", partition: int = 0, *, version: int = 1) -> bytes:
    return struct.pack(">h", version) + text(group) + text(topic) + struct.pack(">i", partition)


def value(offset: int, *, version: int = 3, metadata: str = "m", expires: int = 77) -> bytes:
    """Write an OffsetCommitValue as the releases of Kafka did that had its version."""
    data = struct.pack(">hq", version, offset)
    if version == 4:
        size = len(metadata) + 1
        return data + struct.pack(">ib", 5, size) + metadata.encode() + struct.pack(">qb", 1000, 0)
    if version == 3:
        data += struct.pack(">i", 5)
    data += text(metadata) + struct.pack(">q", 1000)
    return data + struct.pack(">q", expires) if version == 1 else data


def commit(offset: int, *records: tuple[bytes, bytes | None], of: int = -1) -> BuiltBatch:
    builder = BatchBuilder(
        base_offset=offset, producer=(of, 0, 0), transactional=of >= 0, leader_epoch=0
    )
    for record in records:
        builder.add(*record)
    return builder.build()
