"""Check the checksums of key indexes. Damage is a notice, because lookups ignore the index."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from kafkalog.inspection.finding import Finding
from kafkalog.storage_engine.format import layout
from kafkalog.storage_engine.format.checksum import crc32c
from kafkalog.storage_engine.fs import files

_BLOCKS_AT_ONCE: Final = 256


def verify_key_indexes(directory: Path) -> Iterator[Finding]:
    """Yield a notice for each damaged key index of a partition, at its first bad block."""
    for name in sorted(files.list_names(directory)):
        if not layout.is_key_index(name) or name.startswith(layout.SPILL):
            continue  # a spill is being written, or a dead cleaner left it
        path = directory / name
        try:
            fd = files.open_to_read(path)
        except FileNotFoundError:
            continue  # replaced meanwhile
        try:
            position = _first_bad(fd)
        finally:
            os.close(fd)
        if position is not None:
            expected = f"a whole block of {layout.KEYS_BLOCK} bytes with its checksum"
            found = "another one: lookups scan the segment until a cleaning rewrites the index"
            yield Finding(path, position, expected, found, is_damage=False)


def _first_bad(fd: int) -> int | None:
    position = 0
    step = layout.KEYS_BLOCK * _BLOCKS_AT_ONCE
    while data := files.read_at(fd, step, position):
        for start in range(0, len(data), layout.KEYS_BLOCK):
            block = data[start : start + layout.KEYS_BLOCK]
            covered = block[: -layout.CHECKSUM.size]
            if (
                len(block) < layout.KEYS_BLOCK
                or crc32c(covered) != layout.CHECKSUM.unpack(block[-layout.CHECKSUM.size :])[0]
            ):
                return position + start
        position += len(data)
    return None if position else 0
