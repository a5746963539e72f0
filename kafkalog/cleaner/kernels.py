"""The cleaner's hot loops: key hashes, the table of offsets, and who survives.

n = records, b = batches, s = slots. Every kernel takes plain arrays and returns plain numbers or a
status; none allocates more than its caller gave it. Keys are read only after their place has been
compared with the arena's size, so no further bounds check is compiled in.

A slot is three unsigned words: the two halves of the key's hash, and the offset plus one. Zero in
the third word means that the slot is free, so a table fresh from the operating system is empty and
its memory is taken up page by page.
"""

from __future__ import annotations

from functools import partial
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba import config, njit, types
from numba.core import cgutils
from numba.extending import intrinsic
from numba.np.arrayobj import make_array

RELEASE = "0.1.0"
"""Part of what numba's cache is keyed by: a new release never runs an old release's code."""

Bytes: TypeAlias = npt.NDArray[np.uint8]
Integers: TypeAlias = npt.NDArray[np.int64]
Words: TypeAlias = npt.NDArray[np.uint64]
Flags: TypeAlias = npt.NDArray[np.bool_]
Indexes: TypeAlias = npt.NDArray[np.int32]
Word: TypeAlias = Any  # uint64, whose arithmetic the checker sees otherwise than the compiler

kernel: Any = partial(njit, cache=True, nogil=True, _nrt=False)
inlined: Any = partial(kernel, forceinline=True)

BYTES = types.Array(types.uint8, 1, "C", readonly=True)  # accepts writable arrays too
INTEGERS = types.Array(types.int64, 1, "C", readonly=True)
WORDS = types.Array(types.uint64, 1, "C", readonly=True)
FLAGS = types.Array(types.bool_, 1, "C", readonly=True)
INDEXES = types.Array(types.int32, 1, "C", readonly=True)
HASHES_OUT = types.Array(types.uint64, 2, "C")
ROWS = types.Array(types.uint64, 2, "C", readonly=True)
SLOTS = types.Array(types.uint64, 2, "C")
INTEGERS_OUT = types.Array(types.int64, 1, "C")
FLAGS_OUT = types.Array(types.bool_, 1, "C")
BYTES_OUT = types.Array(types.uint8, 1, "C")

_TURN = 8
"""Bits of a hash that a level of spilled keys is split by; `BUCKETS` in `spill.key_runs`."""
_TOP = np.uint64(64 - _TURN)
_U1 = np.uint64(1)
_U8 = np.uint64(8)
_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)
_AHEAD = 12
"""Records whose slots are asked for before they are looked at. The table is larger than any cache,
and a slot that has to be waited for took three times as long as all else (measured)."""

if getattr(config, "DISABLE_JIT", False):

    def prefetch(slots: Words, slot: Any) -> None:
        """Do nothing: there is no cache to fill."""

else:
    # Numba passes its own types to an intrinsic, for which there are no stubs.
    @intrinsic
    def prefetch(typing_context, slots, slot):  # type: ignore[no-untyped-def]
        """Ask for a slot's memory; a hint, so that any number may be given."""
        signature = types.void(slots, types.uint64)

        def codegen(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
            pointer, word = ir.IntType(8).as_pointer(), ir.IntType(32)
            table = make_array(signature.args[0])(context, builder, arguments[0])
            bytes_in = builder.mul(arguments[1], ir.Constant(ir.IntType(64), 24))
            place = builder.gep(builder.bitcast(table.data, pointer), [bytes_in])
            function = cgutils.get_or_insert_function(
                builder.module,
                ir.FunctionType(ir.VoidType(), [pointer, word, word, word]),
                "llvm.prefetch.p0i8",
            )
            hints = [ir.Constant(word, hint) for hint in (0, 3, 1)]  # to read, keep, data
            builder.call(function, [place, *hints])
            return context.get_dummy_value()

        return signature, codegen


@inlined()
def _turn(word: Word, bits: int) -> Word:
    return (word << np.uint64(bits)) | (word >> np.uint64(64 - bits))


@inlined()
def _round(v0: Word, v1: Word, v2: Word, v3: Word) -> tuple[Word, Word, Word, Word]:
    v0 += v1
    v1 = _turn(v1, 13) ^ v0
    v0 = _turn(v0, 32)
    v2 += v3
    v3 = _turn(v3, 16) ^ v2
    v0 += v3
    v3 = _turn(v3, 21) ^ v0
    v2 += v1
    v1 = _turn(v1, 17) ^ v2
    v2 = _turn(v2, 32)
    return v0, v1, v2, v3


@inlined()
def _word(arena: Bytes, position: Word) -> Word:
    """Eight bytes as a little-endian word; the compiler makes one load of it."""
    word = np.uint64(arena[position])
    word |= np.uint64(arena[position + _U1]) << np.uint64(8)
    word |= np.uint64(arena[position + np.uint64(2)]) << np.uint64(16)
    word |= np.uint64(arena[position + np.uint64(3)]) << np.uint64(24)
    word |= np.uint64(arena[position + np.uint64(4)]) << np.uint64(32)
    word |= np.uint64(arena[position + np.uint64(5)]) << np.uint64(40)
    word |= np.uint64(arena[position + np.uint64(6)]) << np.uint64(48)
    word |= np.uint64(arena[position + np.uint64(7)]) << np.uint64(56)
    return word


@kernel(types.int64(BYTES, INTEGERS, INTEGERS, WORDS, HASHES_OUT))
def hash_keys(
    arena: Bytes, positions: Integers, sizes: Integers, secret: Words, hashes: Words
) -> int:
    """Write SipHash-2-4 with 128 bits of output of every key into `hashes`.

    arena uint8; positions int64 (n); sizes int64 (n), -1 for no key; secret uint64 (2);
    hashes uint64 (n, 2), a row per record, untouched where there is no key. Returns -1, or the
    index of the first record whose key does not lie inside the arena.
    """
    limit = arena.shape[0]
    k0 = secret[0]
    k1 = secret[1]
    for i in range(positions.shape[0]):
        size = sizes[i]
        if size < 0:
            continue
        if positions[i] < 0 or positions[i] > limit - size:
            return i
        v0 = k0 ^ np.uint64(0x736F6D6570736575)
        v1 = k1 ^ np.uint64(0x646F72616E646F6D) ^ np.uint64(0xEE)
        v2 = k0 ^ np.uint64(0x6C7967656E657261)
        v3 = k1 ^ np.uint64(0x7465646279746573)
        position = np.uint64(positions[i])
        for _ in range(size >> 3):
            word = _word(arena, position)
            position += _U8
            v3 ^= word
            v0, v1, v2, v3 = _round(v0, v1, v2, v3)
            v0, v1, v2, v3 = _round(v0, v1, v2, v3)
            v0 ^= word
        word = np.uint64(size & 0xFF) << np.uint64(56)
        shift = np.uint64(0)
        for _ in range(size & 7):
            word |= np.uint64(arena[position]) << shift
            position += _U1
            shift += _U8
        v3 ^= word
        v0, v1, v2, v3 = _round(v0, v1, v2, v3)
        v0, v1, v2, v3 = _round(v0, v1, v2, v3)
        v0 ^= word
        v2 ^= np.uint64(0xEE)
        for _ in range(4):
            v0, v1, v2, v3 = _round(v0, v1, v2, v3)
        hashes[i, 0] = v0 ^ v1 ^ v2 ^ v3
        v1 ^= np.uint64(0xDD)
        for _ in range(4):
            v0, v1, v2, v3 = _round(v0, v1, v2, v3)
        hashes[i, 1] = v0 ^ v1 ^ v2 ^ v3
    return -1


@kernel(types.int64(BYTES, INTEGERS, INTEGERS, INTEGERS, BYTES, types.int64, types.int64))
def find_key(
    arena: Bytes,
    positions: Integers,
    sizes: Integers,
    offsets: Integers,
    key: Bytes,
    start: int,
    end: int,
) -> int:
    """Return the index of the last record with that key and start <= offset < end, -1 for none.

    arena uint8; positions, sizes, offsets int64 (n); key uint8. A key that does not lie inside the
    arena is none.
    """
    size = key.shape[0]
    last = arena.shape[0] - size
    for i in range(positions.shape[0] - 1, -1, -1):
        if sizes[i] != size or offsets[i] < start or offsets[i] >= end:
            continue
        position = positions[i]
        if position < 0 or position > last:
            continue
        is_alike = True
        for place in range(size):
            if arena[position + place] != key[place]:
                is_alike = False
                break
        if is_alike:
            return i
    return -1


@inlined()
def _home(slots: Words, high: Word) -> Any:
    """The slot where the search for a key begins."""
    return ((high >> _HALF) * np.uint64(slots.shape[0])) >> _HALF


@inlined()
def _find(slots: Words, high: Word, low: Word) -> Any:
    """The slot of a key, or the free one where it would go; -1 when the table is full."""
    count = np.uint64(slots.shape[0])
    slot = _home(slots, high)
    for _ in range(slots.shape[0]):
        if slots[slot, 2] == 0 or (slots[slot, 0] == high and slots[slot, 1] == low):
            return np.int64(slot)
        slot += _U1
        if slot == count:
            slot = np.uint64(0)
    return np.int64(-1)


@inlined()
def _set_bit(bits: Bytes, place: Any) -> None:
    """Set a bit, if there is such a one."""
    byte = place >> 3
    if place >= 0 and byte < bits.shape[0]:
        bits[byte] |= np.uint8(1 << (place & 7))


@kernel(
    types.UniTuple(types.int64, 3)(
        SLOTS,
        ROWS,
        INTEGERS,
        INTEGERS,
        *[types.int64] * 5,
        *[types.uint64] * 2,
        BYTES_OUT,
        types.int64,
    )
)
def put_offsets(
    slots: Words,
    hashes: Words,
    sizes: Integers,
    offsets: Integers,
    first: int,
    start: int,
    end: int,
    capacity: int,
    size: int,
    mask: Word,
    prefix: Word,
    bits: Bytes,
    bits_start: int,
) -> tuple[int, int, int]:
    """Put the offsets of records `first`.. with start <= offset < end; a later one replaces.

    A record without a key, or whose second hash word under `mask` is not `prefix`, is passed over.
    The first record to put while `size` keys are in the table and `size` is the capacity ends the
    work, also when its key is there already (Kafka: CleanerOffsetMap filling, rule C12).
    bits: a bit for each offset from `bits_start` on, set for offsets that are replaced.
    Returns (index of the record that ended it or n, size, index of the last put or -1).
    """
    last = -1
    ahead = offsets.shape[0] - _AHEAD
    for i in range(first, offsets.shape[0]):
        if i < ahead:
            prefetch(slots, _home(slots, hashes[i + _AHEAD, 0]))
        if sizes[i] < 0 or offsets[i] < start or offsets[i] >= end:
            continue
        if hashes[i, 1] & mask != prefix:
            continue
        if size >= capacity:
            return i, size, last
        slot = _find(slots, hashes[i, 0], hashes[i, 1])
        if slot < 0:
            return i, size, last
        if slots[slot, 2] == 0:
            slots[slot, 0] = hashes[i, 0]
            slots[slot, 1] = hashes[i, 1]
            size += 1
        else:
            _set_bit(bits, np.int64(slots[slot, 2]) - 1 - bits_start)
        slots[slot, 2] = np.uint64(offsets[i] + 1)
        last = i
    return offsets.shape[0], size, last


@kernel(types.void(SLOTS, ROWS, INTEGERS_OUT))
def get_offsets(slots: Words, hashes: Words, out: Integers) -> None:
    """Write the offset of every hash (n, 2) into `out` int64 (n); -1 where it is absent."""
    for i in range(hashes.shape[0]):
        slot = _find(slots, hashes[i, 0], hashes[i, 1])
        out[i] = -1 if slot < 0 else np.int64(slots[slot, 2]) - 1


@kernel(types.void(SLOTS, ROWS, INTEGERS, INTEGERS, types.int64, FLAGS_OUT))
def mark_superseded(
    slots: Words,
    hashes: Words,
    key_sizes: Integers,
    offsets: Integers,
    latest_offset: int,
    flags: Flags,
) -> None:
    """Say of which records the table has a higher offset; rules C51 and C52.

    flags bool (n): False also beyond `latest_offset` and where there is no key.
    """
    ahead = offsets.shape[0] - _AHEAD
    for i in range(offsets.shape[0]):
        if i < ahead:
            prefetch(slots, _home(slots, hashes[i + _AHEAD, 0]))
        flags[i] = False
        if key_sizes[i] >= 0 and offsets[i] <= latest_offset:
            slot = _find(slots, hashes[i, 0], hashes[i, 1])
            flags[i] = slot >= 0 and np.int64(slots[slot, 2]) - 1 > offsets[i]


@kernel(types.void(BYTES, types.int64, INTEGERS, FLAGS_OUT))
def test_bits(bits: Bytes, start: int, offsets: Integers, flags: Flags) -> None:
    """Say which offsets int64 (n) have their bit set; the first bit is that of `start`."""
    for i in range(offsets.shape[0]):
        place = offsets[i] - start
        byte = place >> 3
        flags[i] = False
        if place >= 0 and byte < bits.shape[0]:
            flags[i] = bits[byte] >> (place & 7) & 1 != 0


@kernel(types.void(BYTES, types.int64, INTEGERS, INTEGERS, INTEGERS, FLAGS_OUT))
def find_covered(
    bits: Bytes, start: int, firsts: Integers, lasts: Integers, counts: Integers, flags: Flags
) -> None:
    """Say of which ranges of offsets, firsts to lasts int64 (b), exactly `counts` bits are set.

    Of a range that is not all of it among the bits it is False. Ranges do not overlap, so the work
    is never more than looking at every bit once.
    """
    for i in range(firsts.shape[0]):
        flags[i] = False
        place = firsts[i] - start
        end = lasts[i] - start + 1
        if place < 0 or end < place or end > 8 * bits.shape[0]:
            continue
        found: Any = 0
        while place < end:
            if place & 7 == 0 and end - place >= 8:
                byte = np.int64(bits[place >> 3])
                byte -= byte >> 1 & 0x55
                byte = (byte & 0x33) + (byte >> 2 & 0x33)
                found += (byte + (byte >> 4)) & 0x0F
                place += 8
            else:
                found += bits[place >> 3] >> (place & 7) & 1
                place += 1
        flags[i] = found == counts[i]


@kernel(
    types.int64(
        FLAGS, INTEGERS, INTEGERS, INTEGERS, INDEXES, FLAGS, FLAGS, types.int64,
        FLAGS_OUT, INTEGERS_OUT, INTEGERS_OUT,
    )
)  # fmt: skip
def keep_records(
    superseded: Flags,
    key_sizes: Integers,
    value_sizes: Integers,
    offsets: Integers,
    batch_index: Indexes,
    is_control: Flags,
    is_expired: Flags,
    latest_offset: int,
    keep: Flags,
    kept: Integers,
    tombstones: Integers,
) -> int:
    """Decide record by record; Kafka: Cleaner.shouldRetainRecord, rules C51 to C58 and C65.

    superseded bool (n); batch_index int32 (n), below b; is_control bool (b); is_expired bool (b):
    the batch's delete horizon has come. Out: keep bool (n); kept, tombstones int64 (b), added to
    what each batch keeps. Returns the count of records dropped because they have no key.
    """
    keyless = 0
    for i in range(offsets.shape[0]):
        batch = batch_index[i]
        stay = True
        if offsets[i] <= latest_offset and not is_control[batch]:
            if key_sizes[i] < 0:
                keyless += 1
                stay = False
            else:
                stay = not superseded[i] and not (value_sizes[i] < 0 and is_expired[batch])
        keep[i] = stay
        if stay:
            kept[batch] += 1
            if value_sizes[i] < 0 and not is_control[batch]:
                tombstones[batch] += 1
    return keyless


@kernel(
    types.UniTuple(types.int64, 4)(
        INTEGERS, INTEGERS, INTEGERS, *[types.int64] * 4, *[INTEGERS_OUT] * 3
    )
)
def choose_index_entries(
    sizes: Integers,
    last_offsets: Integers,
    max_timestamps: Integers,
    since: int,
    interval: int,
    top: int,
    top_offset: int,
    rows: Integers,
    tops: Integers,
    top_offsets: Integers,
) -> tuple[int, int, int, int]:
    """Choose the batches that get an index entry; one decision per batch.

    since: bytes since the last entry; top, top_offset: the largest timestamp so far and the last
    offset of its batch. Out: rows int64 (b), which batches; tops, top_offsets int64 (b), the
    largest timestamp there. Returns (count of entries, since, top, top_offset).
    Kafka: LogSegment.append.
    """
    count = 0
    for i in range(sizes.shape[0]):
        if max_timestamps[i] > top:
            top = max_timestamps[i]
            top_offset = last_offsets[i]
        if since > interval:
            rows[count] = i
            tops[count] = top
            top_offsets[count] = top_offset
            count += 1
            since = 0
        since += sizes[i]
    return count, since, top, top_offset


# --- spilled keys: rows are slots on disk, (hash, hash, offset + 1) ------------------------------


@kernel(types.int64(SLOTS))
def compact_slots(slots: Words) -> int:
    """Move the taken slots to the front, in their order; returns how many. The rest is stale."""
    count = 0
    for slot in range(slots.shape[0]):
        if slots[slot, 2] != 0:
            for word in range(3):
                slots[count, word] = slots[slot, word]
            count += 1
    return count


@kernel(types.void(SLOTS, INTEGERS_OUT, INTEGERS_OUT))
def group_rows(rows: Words, starts: Integers, heads: Integers) -> None:
    """Order rows by the top 8 bits of their first word, in place.

    Out: starts int64 (257), where each bucket begins; heads int64 (256) is room to work in.
    """
    for bucket in range(257):
        starts[bucket] = 0
    for i in range(rows.shape[0]):
        starts[np.int64(rows[i, 0] >> _TOP) + 1] += 1
    for bucket in range(256):
        starts[bucket + 1] += starts[bucket]
        heads[bucket] = starts[bucket]
    for bucket in range(256):
        while heads[bucket] < starts[bucket + 1]:
            i = heads[bucket]
            home = np.int64(rows[i, 0] >> _TOP)
            j = heads[home]  # a row that is not at home yet goes where its bucket's next one lies
            heads[home] += 1
            if i != j:
                for word in range(3):
                    rows[i, word], rows[j, word] = rows[j, word], rows[i, word]


@kernel(
    types.UniTuple(types.int64, 2)(
        SLOTS, ROWS, types.int64, types.int64, types.int64, BYTES_OUT, types.int64
    )
)
def put_rows(
    slots: Words,
    rows: Words,
    first: int,
    size: int,
    capacity: int,
    bits: Bytes,
    bits_start: int,
) -> tuple[int, int]:
    """Put rows `first`.. into the table, the highest offset of a key wins.

    Their first word is turned by the 8 bits that they have in common, or the table would crowd.
    bits: as in `put_offsets`.
    Returns (the row that found the table full, or their count; how many keys are in it).
    """
    ahead = rows.shape[0] - _AHEAD
    for i in range(first, rows.shape[0]):
        if i < ahead:
            prefetch(slots, _home(slots, _turn(rows[i + _AHEAD, 0], _TURN)))
        high = _turn(rows[i, 0], _TURN)
        slot = _find(slots, high, rows[i, 1])
        if slot < 0:
            return i, size
        if slots[slot, 2] == 0:
            if size >= capacity:
                return i, size
            slots[slot, 0] = high
            slots[slot, 1] = rows[i, 1]
            slots[slot, 2] = rows[i, 2]
            size += 1
            continue
        loser = min(rows[i, 2], slots[slot, 2])
        slots[slot, 2] = max(rows[i, 2], slots[slot, 2])
        if loser < slots[slot, 2]:
            _set_bit(bits, np.int64(loser) - 1 - bits_start)
    return rows.shape[0], size


@kernel(types.int64(SLOTS, ROWS, INTEGERS_OUT))
def probe_rows(slots: Words, rows: Words, out: Integers) -> int:
    """Write the offsets of rows whose key is in the table at a higher offset; returns how many.

    out int64 (n): room for all of them.
    """
    count = 0
    ahead = rows.shape[0] - _AHEAD
    for i in range(rows.shape[0]):
        if i < ahead:
            prefetch(slots, _home(slots, _turn(rows[i + _AHEAD, 0], _TURN)))
        slot = _find(slots, _turn(rows[i, 0], _TURN), rows[i, 1])
        if slot >= 0 and slots[slot, 2] > rows[i, 2]:
            out[count] = np.int64(rows[i, 2]) - 1
            count += 1
    return count


@kernel(types.UniTuple(types.int64, 2)(SLOTS, types.int64, INTEGERS_OUT))
def drain_offsets(slots: Words, first: int, out: Integers) -> tuple[int, int]:
    """Write the offsets in slots `first`.. until `out` is full; returns (next slot, count)."""
    count = 0
    for slot in range(first, slots.shape[0]):
        if slots[slot, 2] == 0:
            continue
        if count == out.shape[0]:
            return slot, count
        out[count] = np.int64(slots[slot, 2]) - 1
        count += 1
    return slots.shape[0], count


@kernel(types.int64(INTEGERS, INTEGERS, types.int64, FLAGS_OUT))
def mark_present(offsets: Integers, window: Integers, first: int, flags: Flags) -> int:
    """Set the flags of those offsets that are in the window, both ascending.

    Looks at window[first:] as far as it lies at or below the last offset; returns where it ended.
    """
    count = offsets.shape[0]
    end: int = window.shape[0]
    low = 0
    for j in range(first, end):
        wanted = window[j]
        if count == 0 or wanted > offsets[count - 1]:
            return j
        step = 1  # gallop: neighbours in one are near each other in the other
        high = low
        while high < count and offsets[high] < wanted:
            low = high + 1
            high += step
            step *= 2
        high = min(high, count)
        while low < high:
            middle = (low + high) // 2
            if offsets[middle] < wanted:
                low = middle + 1
            else:
                high = middle
        if low < count and offsets[low] == wanted:
            flags[low] = True
    return end
