"""The cleaner's hot loops: key hashes, the table of offsets, and who survives.

n = records, b = batches, s = slots. Every kernel takes plain arrays and returns plain numbers or a
status; none allocates more than its caller gave it. Keys are read only after their place has been
compared with the arena's size, so no further bounds check is compiled in.

A slot is three unsigned words: the two halves of the key's hash, and the offset plus one. Zero in
the third word means that the slot is free. A table fresh from the operating system is therefore
empty, and its memory is taken up page by page.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kafkalog.cleaner.dedup import codes
from kafkalog.storage_engine.format import ops

if TYPE_CHECKING:
    from kafkalog.storage_engine.format.ops import Bytes, Flags, Int32s, Int64s, Rows, Word, Words


def _round(v0: Word, v1: Word, v2: Word, v3: Word) -> tuple[Word, Word, Word, Word]:
    v0 = ops.add(v0, v1)
    v1 = ops.turn(v1, 13) ^ v0
    v0 = ops.turn(v0, 32)
    v2 = ops.add(v2, v3)
    v3 = ops.turn(v3, 16) ^ v2
    v0 = ops.add(v0, v3)
    v3 = ops.turn(v3, 21) ^ v0
    v2 = ops.add(v2, v1)
    v1 = ops.turn(v1, 17) ^ v2
    v2 = ops.turn(v2, 32)
    return v0, v1, v2, v3


def hash_keys(arena: Bytes, positions: Int64s, sizes: Int64s, secret: Words, hashes: Rows) -> int:
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
        v0 = k0 ^ ops.SIP_0
        v1 = k1 ^ ops.SIP_1 ^ 0xEE
        v2 = k0 ^ ops.SIP_2
        v3 = k1 ^ ops.SIP_3
        position = positions[i]
        for _ in range(size >> 3):
            word = ops.little_64(arena, position)
            position += 8
            v3 ^= word
            v0, v1, v2, v3 = _round(v0, v1, v2, v3)
            v0, v1, v2, v3 = _round(v0, v1, v2, v3)
            v0 ^= word
        word = size & 0xFF
        word <<= 56
        for place in range(size & 7):
            byte = arena[position + place]
            word |= byte << (8 * place)
        v3 ^= word
        v0, v1, v2, v3 = _round(v0, v1, v2, v3)
        v0, v1, v2, v3 = _round(v0, v1, v2, v3)
        v0 ^= word
        v2 ^= 0xEE
        for _ in range(4):
            v0, v1, v2, v3 = _round(v0, v1, v2, v3)
        hashes[i, 0] = v0 ^ v1 ^ v2 ^ v3
        v1 ^= 0xDD
        for _ in range(4):
            v0, v1, v2, v3 = _round(v0, v1, v2, v3)
        hashes[i, 1] = v0 ^ v1 ^ v2 ^ v3
    return -1


def _home(slots: Rows, high: Word) -> int:
    """The slot where the search for a key begins."""
    return ((high >> 32) * slots.shape[0]) >> 32


def _find(slots: Rows, high: Word, low: Word) -> int:
    """The slot of a key, or the free one where it would go; -1 when the table is full."""
    count = slots.shape[0]
    slot = _home(slots, high)
    for _ in range(slots.shape[0]):
        if (slots[slot, 0] == high and slots[slot, 1] == low) or slots[slot, 2] == 0:
            return slot
        slot += 1
        if slot == count:
            slot = 0
    return -1


def _set_bit(bits: Bytes, place: int) -> None:
    """Set a bit, if it exists."""
    byte = place >> 3
    if place >= 0 and byte < bits.shape[0]:
        bits[byte] |= 1 << (place & 7)


def put_offsets(
    slots: Rows,
    hashes: Rows,
    sizes: Int64s,
    offsets: Int64s,
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
    A full table ends the work at the next record to put, even if its key is there already (Kafka:
    CleanerOffsetMap filling, rule C12).
    bits: a bit for each offset from `bits_start` on, set for offsets that are replaced.
    Returns (index of the record that ended it or n, size, index of the last put or -1).
    """
    last = -1
    ahead = offsets.shape[0] - codes.AHEAD
    for i in range(first, offsets.shape[0]):
        if i < ahead:
            ops.prefetch(slots, _home(slots, hashes[i + codes.AHEAD, 0]))
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
            _set_bit(bits, ops.signed(slots[slot, 2]) - 1 - bits_start)
        slots[slot, 2] = ops.word(offsets[i] + 1)
        last = i
    return offsets.shape[0], size, last


def get_offsets(slots: Rows, hashes: Rows, out: Int64s) -> None:
    """Write the offset of every hash (n, 2) into `out` int64 (n); -1 where it is absent."""
    ahead = hashes.shape[0] - codes.AHEAD
    for i in range(hashes.shape[0]):
        if i < ahead:
            ops.prefetch(slots, _home(slots, hashes[i + codes.AHEAD, 0]))
        slot = _find(slots, hashes[i, 0], hashes[i, 1])
        out[i] = -1 if slot < 0 else ops.signed(slots[slot, 2]) - 1


def mark_obsolete(
    slots: Rows,
    hashes: Rows,
    key_sizes: Int64s,
    offsets: Int64s,
    latest_offset: int,
    flags: Flags,
) -> None:
    """Say of which records the table has a higher offset; rules C51 and C52.

    flags bool (n): False also beyond `latest_offset` and where there is no key.
    """
    ahead = offsets.shape[0] - codes.AHEAD
    for i in range(offsets.shape[0]):
        if i < ahead:
            ops.prefetch(slots, _home(slots, hashes[i + codes.AHEAD, 0]))
        flags[i] = False
        if key_sizes[i] >= 0 and offsets[i] <= latest_offset:
            slot = _find(slots, hashes[i, 0], hashes[i, 1])
            flags[i] = slot >= 0 and ops.signed(slots[slot, 2]) - 1 > offsets[i]


def test_bits(bits: Bytes, start: int, offsets: Int64s, flags: Flags) -> None:
    """Say which offsets int64 (n) have their bit set; the first bit is that of `start`."""
    for i in range(offsets.shape[0]):
        place = offsets[i] - start
        byte = place >> 3
        flags[i] = False
        if place >= 0 and byte < bits.shape[0]:
            flags[i] = bits[byte] >> (place & 7) & 1


def find_covered(
    bits: Bytes, start: int, firsts: Int64s, lasts: Int64s, counts: Int64s, flags: Flags
) -> None:
    """Say of which ranges of offsets, firsts to lasts int64 (b), exactly `counts` bits are set.

    A range that is not wholly among the bits gives False. Ranges do not overlap, so the work is
    never more than looking at every bit once.
    """
    for i in range(firsts.shape[0]):
        flags[i] = False
        place = firsts[i] - start
        end = lasts[i] - start + 1
        if place < 0 or end < place or end > 8 * bits.shape[0]:
            continue
        found = 0
        while place < end:
            if place & 7 == 0 and end - place >= 8:
                byte = bits[place >> 3]
                byte -= byte >> 1 & 0x55
                byte = (byte & 0x33) + (byte >> 2 & 0x33)
                found += (byte + (byte >> 4)) & 0x0F
                place += 8
            else:
                found += bits[place >> 3] >> (place & 7) & 1
                place += 1
        flags[i] = found == counts[i]


def keep_records(
    obsolete: Flags,
    key_sizes: Int64s,
    value_sizes: Int64s,
    offsets: Int64s,
    batch_index: Int32s,
    is_control: Flags,
    is_expired: Flags,
    latest_offset: int,
    keep: Flags,
    kept: Int64s,
    tombstones: Int64s,
) -> int:
    """Decide record by record; Kafka: Cleaner.shouldRetainRecord, rules C51 to C58 and C65.

    obsolete bool (n); batch_index int32 (n), below b; is_control bool (b); is_expired bool (b):
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
                stay = not obsolete[i] and not (value_sizes[i] < 0 and is_expired[batch])
        keep[i] = stay
        if stay:
            kept[batch] += 1
            if value_sizes[i] < 0 and not is_control[batch]:
                tombstones[batch] += 1
    return keyless


ops.plain(globals())
