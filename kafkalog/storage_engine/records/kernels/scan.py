"""Find the batches of a buffer and read their headers.

A batch of messages v0 or v1 is a message. A position is compared with the end of the buffer before
a byte is read.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kafkalog.storage_engine.format import layout, ops
from kafkalog.storage_engine.records import codes

if TYPE_CHECKING:
    from kafkalog.storage_engine.format.ops import Bytes, Table


def scan_message(buffer: Bytes, position: int, magic: int, table: Table, i: int) -> None:
    """Fill column `i` of `scan_batches` for a message v0 or v1, but for the first rows."""
    attributes = buffer[position + layout.MESSAGE_ATTRIBUTES_POSITION]
    for row in range(3, 12):
        table[row, i] = -1
    table[3, i] = 0
    table[5, i] = attributes & layout.CODEC_MASK
    if magic == 1:
        table[5, i] = attributes & (layout.CODEC_MASK | layout.TIMESTAMP_TYPE_BIT)
        table[6, i] = ops.big_64(buffer, position + layout.MESSAGE_TIMESTAMP_POSITION)
        table[7, i] = table[6, i]
    if attributes & layout.CODEC_MASK == 0:
        table[11, i] = 1
    crc = ops.big_32(buffer, position + layout.MESSAGE_CRC_POSITION)
    table[12, i] = crc & ops.LOW_32


def count_batches(buffer: Bytes) -> tuple[int, int, int]:
    """Return (number of complete batches, position after the last, why the scan ended).

    A message v0 or v1 counts as a batch.
    """
    position = 0
    count = 0
    while buffer.shape[0] - position >= layout.LOG_OVERHEAD:
        size = layout.LOG_OVERHEAD + ops.big_32(buffer, position + layout.LENGTH_POSITION)
        if size < layout.MESSAGE_SIZE_MIN_V0:
            return count, position, codes.SCAN_LENGTH
        if buffer.shape[0] - position <= layout.MAGIC_POSITION:
            break
        magic = buffer[position + layout.MAGIC_POSITION]
        if magic > layout.MAGIC:
            return count, position, codes.SCAN_MAGIC
        if (magic == layout.MAGIC and size < layout.BATCH_OVERHEAD) or (
            magic == 1 and size < layout.MESSAGE_SIZE_MIN_V1
        ):
            return count, position, codes.SCAN_LENGTH
        if size > buffer.shape[0] - position:
            break
        count += 1
        position += size
    return count, position, codes.SCAN_END


def scan_batches(buffer: Bytes, table: Table) -> None:
    """Fill `table` (14 fields, b batches) with the headers of the batches `count_batches` found.

    The rows are those of `tables.BatchTable`, in its order, but for the last offset, which is a
    delta, and the base offset of a wrapper, which is its last.
    """
    position = 0
    for i in range(table.shape[1]):
        size = layout.LOG_OVERHEAD + ops.big_32(buffer, position + layout.LENGTH_POSITION)
        base_offset = ops.big_64(buffer, position)
        table[0, i] = position
        table[1, i] = size
        table[2, i] = base_offset
        magic = buffer[position + layout.MAGIC_POSITION]
        table[13, i] = magic
        if magic != layout.MAGIC:
            scan_message(buffer, position, magic, table, i)
            position += size
            continue
        table[3, i] = ops.big_32(buffer, position + layout.LAST_OFFSET_DELTA_POSITION)
        table[4, i] = ops.big_32(buffer, position + layout.EPOCH_POSITION)
        table[5, i] = ops.big_16(buffer, position + layout.ATTRIBUTES_POSITION)
        table[6, i] = ops.big_64(buffer, position + layout.BASE_TIMESTAMP_POSITION)
        table[7, i] = ops.big_64(buffer, position + layout.MAX_TIMESTAMP_POSITION)
        table[8, i] = ops.big_64(buffer, position + layout.PRODUCER_ID_POSITION)
        table[9, i] = ops.big_16(buffer, position + layout.PRODUCER_EPOCH_POSITION)
        table[10, i] = ops.big_32(buffer, position + layout.BASE_SEQUENCE_POSITION)
        table[11, i] = ops.big_32(buffer, position + layout.RECORDS_COUNT_POSITION)
        table[12, i] = ops.big_32(buffer, position + layout.CRC_POSITION) & ops.LOW_32
        position += size


ops.plain(globals())
