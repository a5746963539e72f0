"""A staged file that becomes a segment: its batches get their place in the log, in place.

In a run the base offsets count from 0, and each batch begins where the last one ended.
"""

from __future__ import annotations

import os
from pathlib import Path

from kafkalog.errors import StorageError
from kafkalog.storage_engine.format import batch, layout
from kafkalog.storage_engine.format.stamping import stamp
from kafkalog.storage_engine.fs import files
from kafkalog.storage_engine.metadata.state import check_log_end


def read_staged_header(
    data: batch.Buffer, position: int, remaining: int, base_offset: int
) -> batch.BatchHeader | None:
    """Return the header of the batch at `position`, if it has that offset of its run, or None.

    Messages v0 and v1 cannot be stamped.
    """
    header = batch.read_header(data, position, remaining)
    if header is None or (header.magic, header.base_offset) != (layout.MAGIC, base_offset):
        return None
    return header if header.last_offset_delta >= 0 else None


def stamp_staged_segment(directory: Path, log: Path, base_offset: int, leader_epoch: int) -> int:
    """Stamp every batch of a staged segment in place, sync it, and return the next offset.

    `directory` is the partition's, for a StorageError.
    """
    with files.closing(files.open_to_write(log)) as fd:
        size, position, next_offset = os.fstat(fd).st_size, 0, base_offset
        while position < size:
            head = bytearray(files.read_at(fd, layout.BATCH_OVERHEAD, position))
            header = read_staged_header(head, 0, size - position, next_offset - base_offset)
            if header is None:
                what = f"a staged segment has no next batch at byte {position}"
                raise StorageError(f"{directory}: {what}; run the batch again")
            end_offset = next_offset + header.last_offset_delta + 1
            check_log_end(directory, end_offset)
            if end_offset - 1 - base_offset > layout.INT32_MAX:
                raise StorageError(
                    f"{directory}: expected at most 2^31 rows in a staged segment, found more by "
                    f"byte {position} of {log.name}: its indexes count offsets in 32 bits; write "
                    "the batch in smaller parts"
                )
            stamp(head, 0, next_offset, leader_epoch)
            files.write_at(fd, memoryview(head)[: layout.MAGIC_POSITION], position)
            next_offset = end_offset
            position += header.size
        files.sync_file(fd)
        return next_offset
