"""What a scan yields, and what it does with each kind of fault."""

from __future__ import annotations

import itertools
import os
import random
import struct
import tracemalloc
from dataclasses import dataclass
from pathlib import Path

import pytest
from crc32c import crc32c

from kafkalog.storage_engine.format import layout
from kafkalog.storage_engine.segment import log_scanner
from kafkalog.storage_engine.segment.byte_source import ByteSource, FileBytes, HeldBytes
from kafkalog.storage_engine.segment.log_scanner import (
    RECOVER,
    REPLAY,
    FaultAction,
    FaultKind,
    FaultPolicy,
    LogScanner,
)
from tests.builders.batch_builder import Record, at_times, batch, joined
from tests.builders.message_builder import message, wrapper

BATCHES = [at_times(base, (base,) * 3, value_size=base) for base in range(0, 90, 3)]

# --- the table of faults -------------------------------------------------------------------------


@dataclass(frozen=True)
class Scanned:
    """What a scan has come to: (position, is it valid) of its batches, its end, its fault."""

    batches: list[tuple[int, bool]]
    position: int
    next_offset: int
    kind: FaultKind | None


def plain_scan(data: bytes, limit: int, policy: FaultPolicy) -> Scanned:
    """Go through the bytes of batches v2 one by one: the rules in their simplest form."""
    found: list[tuple[int, bool]] = []
    position, next_offset = 0, 0

    def ended(kind: FaultKind | None) -> Scanned:
        return Scanned(found, position, next_offset, kind)

    while position < limit:
        rest = data[position:limit]
        if limit > len(data) and len(rest) < 12:
            return ended(FaultKind.SHORT)
        if len(rest) < 17:
            return ended(FaultKind.TORN)
        base, length, _, magic, crc, _, delta = struct.unpack_from(">qiibIhi", rest)
        if magic != 2 or length + 12 < 61:
            return ended(FaultKind.FRAME)
        if position + 12 + length > limit:
            return ended(FaultKind.TORN)
        if position + 12 + length > len(data):
            return ended(FaultKind.SHORT)
        is_valid = True
        if policy.checksum is not FaultAction.IGNORE and crc32c(rest[21 : 12 + length]) != crc:
            if policy.checksum is not FaultAction.SKIP:
                return ended(FaultKind.CHECKSUM)
            is_valid = False
        if policy.order is not FaultAction.IGNORE and base < next_offset:
            if policy.order is not FaultAction.SKIP:
                return ended(FaultKind.ORDER)
            is_valid = False
        found.append((position, is_valid))
        position += 12 + length
        next_offset = base + delta + 1
    return ended(None)


def scanned(path: Path, limit: int, policy: FaultPolicy, **options: bool) -> Scanned:
    with path.open("rb") as file:
        return scanned_source(FileBytes(file.fileno()), path, limit, policy, **options)


def scanned_source(
    source: ByteSource, path: Path, limit: int, policy: FaultPolicy, **options: bool
) -> Scanned:
    found: list[tuple[int, bool]] = []
    scan = LogScanner(source, path, policy, limit=limit, **options)
    for batches in scan:
        places = [batches.position_of(number) for number in range(len(batches.table))]
        found += zip(places, batches.is_valid.tolist(), strict=True)
    assert (scan.fault is None) == (scan.kind is None)
    assert scan.fault is None or scan.fault.position == scan.position
    return Scanned(found, scan.position, scan.next_offset, scan.kind)


def with_faults() -> dict[str, tuple[bytes, int]]:
    """A log with each fault, and with several: its bytes, and where it is to end."""
    parts = [one.data for one in BATCHES[:12]]
    sound = b"".join(parts)

    def changed(number: int, place: int, new: bytes) -> bytes:
        part = bytearray(parts[number])
        part[place : place + len(new)] = new
        return b"".join([*parts[:number], bytes(part), *parts[number + 1 :]])

    checksum = changed(5, 80, b"?")
    low = (4).to_bytes(8, "big")
    return {
        "none": (sound, len(sound)),
        "an earlier limit": (sound, len(sound) - 7),
        "a torn header": (sound + parts[0][:16], len(sound) + 16),
        "a torn batch": (sound[:-1], len(sound) - 1),
        "a short file": (sound[:-1], len(sound)),
        "a file that is much shorter": (sound[:400], len(sound)),
        "an unknown magic": (changed(6, 16, b"\x09"), len(sound)),
        "a length that is too small": (changed(6, 8, bytes(4)), len(sound)),
        "a length beyond the end": (changed(6, 8, b"\x7f\xff\xff\xff"), len(sound)),
        "a wrong checksum": (checksum, len(sound)),
        "a wrong checksum of the first": (changed(0, 70, b"?"), len(sound)),
        "offsets that fall": (changed(7, 0, low), len(sound)),
        "offsets that fall before a wrong checksum": (changed(2, 0, low)[:-3] + b"???", len(sound)),
        "a wrong checksum before a torn batch": (checksum[:-9], len(sound) - 9),
        "zeros behind": (sound + bytes(900), len(sound) + 900),
    }


POLICIES = [FaultPolicy(*actions) for actions in itertools.product(FaultAction, FaultAction)]


def test_bytes_in_memory_are_scanned_as_a_file_is(tmp_path: Path) -> None:
    path = tmp_path / "0.log"
    for data, limit in with_faults().values():
        path.write_bytes(data)
        for policy in (RECOVER, REPLAY):
            found = scanned_source(HeldBytes(data), path, limit, policy)
            assert found == scanned(path, limit, policy)


@pytest.mark.parametrize("chunk_size", [64, 500, 1 << 20])
@pytest.mark.parametrize("name", with_faults())
def test_every_policy_does_with_every_fault_what_the_plain_scan_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, chunk_size: int
) -> None:
    monkeypatch.setattr(log_scanner, "CHUNK_SIZE", chunk_size)
    monkeypatch.setattr(log_scanner, "LARGE_SIZE", 130)  # some batches are larger
    data, limit = with_faults()[name]
    path = tmp_path / "f"
    path.write_bytes(data)
    for policy in POLICIES:
        expected = plain_scan(data, limit, policy)
        assert scanned(path, limit, policy) == expected, policy
        assert scanned(path, limit, policy, needs_records=False) == expected, policy


@pytest.mark.parametrize(("tail", "kind"), [
    (bytes(900), FaultKind.ZEROS),
    (bytes(5), FaultKind.ZEROS),
    (bytes(900) + b"x", FaultKind.FRAME),
    (b"", None),
])  # fmt: skip
def test_a_tail_of_zeros_is_told_from_other_bytes(
    tmp_path: Path, tail: bytes, kind: FaultKind | None
) -> None:
    path = tmp_path / "f"
    path.write_bytes(joined(BATCHES) + tail)
    with LogScanner.opened(path, RECOVER, next_offset=0) as scan:
        assert sum(len(found.table) for found in scan) == len(BATCHES)
        scan.look_at_tail()
        assert (scan.kind, scan.is_torn) == (kind, kind is FaultKind.ZEROS)


# --- a scan that ends at the first fault ---------------------------------------------------------


def ends(path: Path, *, check: bool = True) -> tuple[int, int, tuple[str, str] | None]:
    with LogScanner.opened(path, RECOVER if check else REPLAY, next_offset=0) as scan:
        positions = []
        for found in scan:
            positions += (found.table.positions + found.file_position).tolist()
        sizes = sorted(positions)
        assert sizes == positions
    fault = None if scan.fault is None else (str(scan.fault.expected), str(scan.fault.found))
    return scan.position, scan.next_offset, fault


@pytest.mark.parametrize("chunk_size", [64, 300, 1 << 20])
def test_a_scan_ends_at_the_first_byte_that_is_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk_size: int
) -> None:
    monkeypatch.setattr(log_scanner, "CHUNK_SIZE", chunk_size)
    data = joined(BATCHES)
    starts = [len(joined(BATCHES[:count])) for count in range(len(BATCHES) + 1)]
    path = tmp_path / "f"
    path.write_bytes(data)
    assert ends(path) == (len(data), 90, None)
    rng = random.Random(5)
    for _ in range(60):
        place = rng.randrange(len(data))
        damaged = bytearray(data)
        damaged[place] ^= rng.randrange(1, 256)
        path.write_bytes(damaged)
        number = sum(start <= place for start in starts) - 1
        end, next_offset, fault = ends(path)
        in_batch = place - starts[number]
        if end == starts[number]:
            assert next_offset == 3 * number and fault is not None
        else:  # bytes that no checksum covers: a base offset that still rises, a leader epoch
            assert in_batch < 8 or 12 <= in_batch < 16
            assert end >= starts[number + 1]


def test_a_torn_end_and_zeros_are_not_batches(tmp_path: Path) -> None:
    data = joined(BATCHES)
    last = len(joined(BATCHES[:-1]))
    path = tmp_path / "f"
    for size in range(last + 1, len(data)):
        path.write_bytes(data[:size])
        assert ends(path)[:2] == (last, 87)
    for count in (1, 17, 61, 5000):
        path.write_bytes(data + bytes(count))
        end, _, fault = ends(path)
        assert end == len(data)
        assert fault is not None and fault[0] == "a record batch"


def test_without_checks_only_what_stands_around_a_batch_counts(tmp_path: Path) -> None:
    data = bytearray(joined(BATCHES))
    data[100] ^= 1
    path = tmp_path / "f"
    path.write_bytes(data)
    assert ends(path, check=False) == (len(data), 90, None)


def test_messages_and_batches_may_follow_each_other(tmp_path: Path) -> None:
    first = message(1, 0, b"k", b"v", timestamp=5)
    old = first + wrapper(1, 1, [Record(n, 5, b"k", b"v") for n in (1, 2, 3)])
    new = at_times(4, (1, 2)).data
    path = tmp_path / "f"
    path.write_bytes(old + new)
    assert ends(path) == (len(old + new), 6, None)
    damaged = bytearray(old + new)
    damaged[len(old) - 1] ^= 1
    damaged[-1] ^= 1
    path.write_bytes(damaged)
    end, next_offset, _ = ends(path)
    assert (end, next_offset) == (len(first), 1)


def test_a_batch_beyond_the_last_offset_there_can_be_ends_the_scan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The checksum does not cover the base offset: a flipped bit, and the last is too high."""
    data = bytearray(joined(BATCHES))
    second = len(joined(BATCHES[:1]))
    data[second : second + 8] = layout.INT64_MAX.to_bytes(8, "big")
    path = tmp_path / "f"
    path.write_bytes(data)
    for chunk_size in (1 << 20, 64):  # the second one is read as a large batch
        monkeypatch.setattr(log_scanner, "CHUNK_SIZE", chunk_size)
        end, next_offset, fault = ends(path)
        assert (end, next_offset) == (second, 3)
        assert fault is not None and "offset" in fault[1]


def test_a_large_batch_is_checked_piece_by_piece(tmp_path: Path) -> None:
    large = batch(0, 1, size=24 << 20).data
    path = tmp_path / "f"
    path.write_bytes(large + at_times(1, (1,)).data)
    tracemalloc.start()
    assert ends(path)[1:] == (2, None)
    assert tracemalloc.get_traced_memory()[1] < 8 << 20
    tracemalloc.stop()
    damaged = bytearray(large)
    damaged[20 << 20] ^= 1
    path.write_bytes(damaged)
    end, next_offset, fault = ends(path)
    assert (end, next_offset) == (0, 0)
    assert fault is not None and fault[0].startswith("checksum")


def test_a_length_that_no_file_has_costs_no_memory(tmp_path: Path) -> None:
    data = bytearray(at_times(0, (1,)).data)
    data[8:12] = (2**31 - 1).to_bytes(4, "big")
    path = tmp_path / "f"
    with path.open("wb") as file:
        file.write(data)
        file.truncate(2**31 - 1)
    tracemalloc.start()
    assert ends(path)[:2] == (0, 0)
    assert tracemalloc.get_traced_memory()[1] < 8 << 20
    tracemalloc.stop()


def test_a_file_truncated_during_the_scan_ends_there(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_bytes(joined(BATCHES))
    with LogScanner.opened(path, RECOVER, next_offset=0) as scan:
        os.truncate(path, 0)
        assert list(scan) == []
    assert (scan.position, scan.kind) == (0, FaultKind.SHORT)
