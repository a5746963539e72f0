"""The loops of rewriting: what batches keep, which of them become one, and the copy of records.

Arrays in, arrays out, and a status: nothing here raises or allocates. b = batches, n = records.
Records are read only after their place has been compared with the arena's size.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kafkalog.cleaner.rewrite.merge import codes
from kafkalog.storage_engine.format import layout, ops
from kafkalog.storage_engine.records.kernels import encode

if TYPE_CHECKING:
    from kafkalog.storage_engine.format.ops import Bytes, Flags, Int32s, Int64s, Table


def measure_kept(records: Table, batch_index: Int32s, keep: Flags, kept: Table) -> int:
    """Measure what each batch keeps; -1 for a record of no batch, or before its own key, else 0.

    records: int64 (9, n) of `RecordTable.fields`; batch_index: int32 (n,); keep: bool (n,)
    kept: int64 (3, b), written: bytes, first and last offset of the records that stay; 0, -1 and
    -1 for none
    """
    for i in range(kept.shape[1]):
        kept[0, i] = 0
        kept[1, i] = -1
        kept[2, i] = -1
    if batch_index.shape[0] != records.shape[1] or keep.shape[0] != records.shape[1]:
        return -1
    for i in range(records.shape[1]):
        if not keep[i]:
            continue
        batch = batch_index[i]
        if batch < 0 or batch >= kept.shape[1] or records[1, i] < records[4, i]:
            return -1
        # A message v0 or v1 costs the few bytes more that its sizes take: no matter here.
        kept[0, batch] += records[1, i] - records[4, i] + codes.RECORD_OVERHEAD
        if kept[1, batch] < 0:
            kept[1, batch] = records[2, i]
        kept[2, batch] = records[2, i]
    return 0


def _joins(batches: Table, i: int, group: Int64s, target: int) -> int:
    """Return whether batch `i` may become part of the group, 1 or 0; see `plan_outputs`."""
    if (
        batches[1, i] != group[3]
        or batches[2, i] != group[4]
        or batches[3, i] != group[5]
        or batches[8, i] > target - group[10]
        or batches[7, i] - group[8] > layout.INT32_MAX
    ):
        return 0
    if batches[4, i] == group[6]:
        return 1
    # One field holds the horizon of all: the side that has none must not need one.
    if batches[4, i] < 0 and batches[5, i] == 0:
        return 1
    if group[6] < 0 and group[7] == 0:
        return 1
    return 0


def _put_output(outputs: Table, count: int, kind: int, first: int, end: int, carried: int) -> int:
    """Write an output after `count` others and return their number; copies side by side are one."""
    if (
        kind == codes.COPY
        and count > 0
        and carried == 0
        and outputs[0, count - 1] == codes.COPY
        and outputs[2, count - 1] == first
        and outputs[3, count - 1] == 0
    ):
        outputs[2, count - 1] = end
        return count
    outputs[0, count] = kind
    outputs[1, count] = first
    outputs[2, count] = end
    outputs[3, count] = carried
    return count + 1


def _close_group(
    group: Int64s, outputs: Table, count: int, first: int, end: int, carried: int
) -> int:
    """Make the open group an output; one batch alone that stays as it is is a copy."""
    if group[0] == 0:
        return count
    group[0] = 0
    kind = codes.COPY if group[1] == 1 and group[2] == 1 else codes.REBUILD
    return _put_output(outputs, count, kind, first, end, carried)


def plan_outputs(batches: Table, target: int, group: Int64s, outputs: Table) -> tuple[int, int]:
    """Say what is written for a run of batches: which as they are, and which as one.

    A batch that may be merged becomes part of the open group if all of this holds:

    - attributes, leader epoch and append time are the same;
    - both sizes together do not exceed the target;
    - the offsets span less than 2^31;
    - the delete horizons are equal, or the side without a horizon holds no tombstone.

    If not, it begins a new group. A batch that stays as it is and is half full already is copied.

    batches: int64 (9, b): action, attributes, leader epoch, append time (-1 for CreateTime),
    delete horizon (-1 none), tombstones, base offset, last offset, size
    target: bytes, as `measure_kept` counts them
    group: int64 (11,), the open group, brought along from run to run: is open, batches, is the
    one batch as it was, attributes, epoch, append time, horizon, tombstones, base offset, last
    offset, size
    outputs: int64 (4, b + 1), written: COPY, REBUILD or EMPTY; first batch; end of the batches;
    whether they are behind those of the group that was open before this run
    Returns the number of outputs, and the first batch of this run that is in the group that is
    still open (b for none).
    """
    b = batches.shape[1]
    count = 0
    first = 0
    end = 0
    carried = group[0]
    for i in range(b):
        action = batches[0, i]
        if action == codes.DROP:
            continue
        if action == codes.WHOLE and batches[8, i] >= target - batches[8, i]:
            action = codes.COPY
        if action != codes.WHOLE and action != codes.CHANGED:
            count = _close_group(group, outputs, count, first, end, carried)
            carried = 0
            count = _put_output(outputs, count, action, i, i + 1, 0)
            continue
        if group[0] == 1 and _joins(batches, i, group, target) == 1:
            if end == 0:  # so far all of it lies in runs before
                first = i
            end = i + 1
            group[1] += 1
            group[6] = max(group[6], batches[4, i])
            group[7] += batches[5, i]
            group[9] = batches[7, i]
            group[10] += batches[8, i]
        else:
            count = _close_group(group, outputs, count, first, end, carried)
            carried = 0
            first = i
            end = i + 1
            group[0] = 1
            group[1] = 1
            group[2] = 1 if action == codes.WHOLE else 0
            for field in range(5):
                group[3 + field] = batches[1 + field, i]
            group[8] = batches[6, i]
            group[9] = batches[7, i]
            group[10] = batches[8, i]
        if group[10] >= target:  # nothing will fit: not to be held in memory for long
            count = _close_group(group, outputs, count, first, end, carried)
            carried = 0
    if group[0] == 0 or end == 0:
        first = b
    return count, first


def gather_records(
    arena: Bytes, records: Table, rows: Int64s, target: Bytes, gathered: Table
) -> int:
    """Copy the records `rows` one behind the other and return their bytes; -1 for a fault.

    A record's key is copied, then its value and headers as a batch v2 has them. A message v0 or v1
    gets that form too.

    records: int64 (9, n) of `RecordTable.fields`, and gathered: int64 (9, r), written, the same for
    the copies, which begin with the key
    target: written; when it is empty the bytes are only counted
    """
    position = 0
    for i in range(rows.shape[0]):
        row = rows[i]
        if row < 0 or row >= records.shape[1]:
            return -1
        key = records[4, row]
        key_size = max(records[5, row], 0)
        value = records[6, row]
        value_size = records[7, row]
        end = records[1, row]
        is_message = records[8, row] == -1
        if key < 0 or end > arena.shape[0] or key_size > end - key:
            return -1
        if value < key or max(value_size, 0) > end - value:
            return -1
        size = end - key
        if is_message:
            size = key_size + encode.varint_size(value_size) + max(value_size, 0) + 1
        if target.shape[0] == 0:
            position += size
            continue
        if size > target.shape[0] - position or i >= gathered.shape[1]:
            return -1
        gathered[0, i] = position
        gathered[1, i] = position + size
        gathered[2, i] = records[2, row]
        gathered[3, i] = records[3, row]
        gathered[4, i] = position
        gathered[5, i] = records[5, row]
        gathered[7, i] = value_size
        if is_message:
            ops.copy_bytes(target, position, arena, key, key_size)
            position = encode.write_varint(target, position + key_size, value_size)
            gathered[6, i] = position
            ops.copy_bytes(target, position, arena, value, max(value_size, 0))
            position += max(value_size, 0)
            gathered[8, i] = position
            target[position] = 0  # no headers
            position += 1
        else:
            ops.copy_bytes(target, position, arena, key, size)
            gathered[6, i] = position + value - key
            gathered[8, i] = position + records[8, row] - key
            position += size
    return position


ops.plain(globals())
