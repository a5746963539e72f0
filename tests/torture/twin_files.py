"""What the files of a log say, read byte by byte with none of our code."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final

from crc32c import crc32c

from tests.torture.twin_draws import sizes_of

__all__ = ["are_sound", "gaps", "has_wrong_index", "producers_of", "rising_end", "sound_end"]

_CRC: Final = struct.Struct(">I")
_ENTRY: Final = struct.Struct(">ii")
_PRODUCER: Final = struct.Struct(">qhiqiqiq")


def _is_sound(batch: bytes) -> bool:
    """Return whether a checksum is right: of a batch, or of a message v0 or v1."""
    if batch[16] == 2:
        return len(batch) >= 61 and batch[17:21] == _CRC.pack(crc32c(batch[21:]))
    return batch[12:16] == _CRC.pack(zlib.crc32(batch[16:]))


def _last_offset(batch: bytes) -> int:
    offset: int = struct.unpack_from(">q", batch)[0]
    return offset + (struct.unpack_from(">i", batch, 23)[0] if batch[16] == 2 else 0)


def _sound(data: bytes) -> Iterator[bytes]:
    for position, size in sizes_of(data):
        batch = data[position : position + size]
        if not _is_sound(batch):
            return
        yield batch


def gaps(logs: Iterable[Path], begin: int) -> list[tuple[Path, int, int]]:
    """Return the ranges of offsets at or above one that batches lack, and the file behind each.

    A batch that lacks some of its own offsets makes one too.
    """
    found: list[tuple[Path, int, int]] = []
    following = begin
    for path in logs:
        data = path.read_bytes()
        for position, size in sizes_of(data):
            batch = data[position : position + size]
            first, last = struct.unpack_from(">q", batch)[0], _last_offset(batch)
            if batch[16] == 2 and first > following:
                found.append((path, following, first))
            if (
                batch[16] == 2
                and last >= begin
                and struct.unpack_from(">i", batch, 57)[0] <= (last - first)
            ):
                found.append((path, first, last))
            following = max(following, last + 1)
    return found


def sound_end(path: Path) -> int:
    """Return the offset after the sound batches at the beginning of a segment."""
    end = int(path.stem)
    for batch in _sound(path.read_bytes()):
        end = _last_offset(batch) + 1
    return end


def rising_end(logs: Sequence[Path]) -> int:
    """Return the offset after the batches before the first one that is wrong, also by its offset.

    A batch rises above those before it, and not into the next segment.
    """
    bounds = [*(int(path.stem) for path in logs[1:]), 2**63 - 1]
    end = 0
    for path, bound in zip(logs, bounds, strict=True):
        data, end, read = path.read_bytes(), int(path.stem), 0
        for batch in _sound(data):
            first = struct.unpack_from(">q", batch)[0]
            if first < end or _last_offset(batch) >= bound:
                return end
            end, read = _last_offset(batch) + 1, read + len(batch)
        if read < len(data):
            return end
    return end


def producers_of(snapshots: Iterable[Path]) -> dict[int, list[list[int]]]:
    """Return by producer what snapshots say: epoch, sequence, time, coordinator, first offset."""
    found: dict[int, list[list[int]]] = {}
    for path in snapshots:
        data = path.read_bytes()[10:]
        whole = data[: len(data) // _PRODUCER.size * _PRODUCER.size]
        for number, epoch, sequence, _, _, time, coordinator, first in _PRODUCER.iter_unpack(whole):
            found.setdefault(number, []).append([epoch, sequence, time, coordinator, first])
    return found


def are_sound(logs: Iterable[Path]) -> bool:
    """Return whether each byte of some logs is of a sound batch."""
    found = [path.read_bytes() for path in logs]
    return all(sum(map(len, _sound(data))) == len(data) for data in found)


def has_wrong_index(logs: Iterable[Path]) -> bool:
    """Return whether an offset index has an entry for a position where no batch begins."""
    for path in logs:
        index = path.with_suffix(".index")
        starts = {position for position, _ in sizes_of(path.read_bytes())}
        data = index.read_bytes() if index.exists() else b""
        whole = data[: len(data) // _ENTRY.size * _ENTRY.size]
        if any(position not in starts for _, position in _ENTRY.iter_unpack(whole)):
            return True
    return False
