"""Makes checksums valid again after a change, so that what lies behind them is reached.

Each function takes a file's content as it was changed, and returns it with the checksums that its
own lengths and counts ask for; where these lead nowhere, the rest stays as it is.
"""

from __future__ import annotations

import json
import zlib

from crc32c import crc32c

from kafkalog.storage_engine.format import layout


def batches(data: bytes) -> bytes:
    """Set the checksums of record batches v2, and of messages v0 and v1."""
    mended = bytearray(data)
    position = 0
    while position + layout.MESSAGE_SIZE_MIN_V0 <= len(mended):
        length = _int(mended, position + layout.LENGTH_POSITION)
        end = position + layout.LOG_OVERHEAD + length
        if not position + layout.ATTRIBUTES_POSITION <= end <= len(mended):
            break
        if mended[position + layout.MAGIC_POSITION] < layout.MAGIC:
            at, start = layout.MESSAGE_CRC_POSITION, layout.MAGIC_POSITION
            crc = zlib.crc32(memoryview(mended)[position + start : end])
        else:
            at, start = layout.CRC_POSITION, layout.ATTRIBUTES_POSITION
            crc = crc32c(memoryview(mended)[position + start : end])
        layout.CHECKSUM.pack_into(mended, position + at, crc)
        position = end
    return bytes(mended)


def snapshot(data: bytes) -> bytes:
    """Set that of a producer snapshot, and its version."""
    mended = bytearray(data)
    if len(mended) >= layout.SNAPSHOT_HEADER.size:
        mended[:2] = layout.SNAPSHOT_VERSION.to_bytes(2, "big")
        crc = crc32c(memoryview(mended)[layout.SNAPSHOT_CRC_END :])
        layout.CHECKSUM.pack_into(mended, 2, crc)
    return bytes(mended)


def journal(data: bytes) -> bytes:
    """Set that of the published end, and of every record."""
    mended = bytearray(data)
    if len(mended) < layout.JOURNAL_RECORDS_POSITION:
        return data
    start = layout.JOURNAL_PUBLISHED_POSITION
    ends = [layout.JOURNAL_RECORDS_POSITION]
    head = layout.JOURNAL_RECORD
    while ends[-1] + head.size <= len(mended):
        length, _, number = head.unpack_from(mended, ends[-1])
        end = ends[-1] + head.size + length
        if not length or end > len(mended):
            break
        payload = memoryview(mended)[ends[-1] + head.size : end]
        crc = crc32c(payload, crc32c(layout.JOURNAL_NUMBER.pack(number)))
        layout.CHECKSUM.pack_into(mended, ends[-1] + 4, crc)
        ends.append(end)
    published = int.from_bytes(mended[start : start + 8], "big")
    if published not in ends and published % 2:  # half of the wrong ends stay as they are
        mended[start : start + 8] = ends[-1].to_bytes(8, "big")
    end = start + layout.JOURNAL_PUBLISHED.size
    layout.CHECKSUM.pack_into(mended, end, crc32c(memoryview(mended)[start:end]))
    return bytes(mended)


def gaps(data: bytes) -> bytes:
    """Set those of a list of gaps: of its parts, then of its table."""
    mended = bytearray(data)
    header, part = layout.GAPS_HEADER, layout.GAPS_PART
    if len(mended) < header.size:
        return data
    count = int.from_bytes(mended[12:16], "big")
    end = header.size + count * part.size
    position = end + layout.CHECKSUM.size
    if position > len(mended):
        return data
    for at in range(header.size, end, part.size):
        size = part.unpack_from(mended, at)[3] * layout.GAP.size
        crc = crc32c(memoryview(mended)[position : position + size])
        layout.CHECKSUM.pack_into(mended, at + part.size - layout.CHECKSUM.size, crc)
        position += size
    layout.CHECKSUM.pack_into(mended, end, crc32c(memoryview(mended)[:end]))
    return bytes(mended)


def blocks(data: bytes) -> bytes:
    """Set those of the blocks of a key index."""
    mended = bytearray(data)
    covered = layout.KEYS_BLOCK - layout.CHECKSUM.size
    for start in range(0, len(mended) - layout.KEYS_BLOCK + 1, layout.KEYS_BLOCK):
        crc = crc32c(memoryview(mended)[start : start + covered])
        layout.CHECKSUM.pack_into(mended, start + covered, crc)
    return bytes(mended)


def numbered(data: bytes) -> bytes:
    """Set that of an object of a commit log, and its version."""
    head = layout.STORED_HEADER
    if len(data) < head.size:
        return data
    magic, _, _, number, token = head.unpack_from(data)
    payload = data[head.size :]
    crc = crc32c(payload, crc32c(layout.STORED_CHECKED.pack(number, token)))
    return head.pack(magic, layout.STORED_VERSION, crc, number, token) + payload


def footer(data: bytes) -> bytes:
    """Set that of the footer of a mixed object, its size too, and those of its batches."""
    trailer = layout.MIXED_TRAILER
    end = len(data) - trailer.size
    if end < 0:
        return data
    size, *_ = trailer.unpack_from(data, end)
    size = min(size, end)
    runs = batches(data[: end - size])
    payload = data[end - size : end]
    last = trailer.pack(size, crc32c(payload), layout.MIXED_VERSION, layout.MIXED_MAGIC)
    return runs + payload + last


def sides(data: bytes) -> bytes:
    """Set those of the table of a side object, and of its sections as far as the table is one."""
    header = layout.SIDE_HEADER
    if len(data) < header.size:
        return data
    _, _, size, _ = header.unpack_from(data)
    table, rest = data[header.size : header.size + size], data[header.size + size :]
    try:
        held, position = [], 0
        for name, length, _ in json.loads(table):
            held.append([name, length, crc32c(rest[position : position + length])])
            position += length
        mended = json.dumps(held).encode()
        table = mended if len(mended) == len(table) or size <= len(data) else table
    except (ValueError, TypeError, RecursionError):
        pass
    head = header.pack(layout.SIDE_MAGIC, layout.SIDE_VERSION, len(table), crc32c(table))
    return head + table + rest


def pin(data: bytes) -> bytes:
    """Set that of a pin."""
    try:
        content = json.loads(data)
        content.pop("crc")
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError):
        return data
    content["crc"] = crc32c(_json(content))
    return _json(content) + b"\n"


def ended_pins(data: bytes) -> bytes:
    """Set that of the list of ended pins, which may lack its first line."""
    lines = data.partition(b"\n")[2] if data.startswith(b"kl-ended-pins") else data
    return b"kl-ended-pins 1 %08x\n" % crc32c(lines) + lines


def _json(content: object) -> bytes:
    return json.dumps(content, separators=(",", ":")).encode()


def _int(data: bytearray, position: int) -> int:
    return int.from_bytes(data[position : position + 4], "big", signed=True)
