"""Frames that are decompressed many at a time, against the library that does one."""

from __future__ import annotations

import itertools
import random

import lz4.frame
import numpy as np
import pytest

from kafkalog.storage_engine.format import compression, layout
from kafkalog.storage_engine.records.lz4_frames import codes, frames, kernels

pytestmark = pytest.mark.usefixtures("compared_kernels")

INDEPENDENT = {"block_linked": False, "store_size": False}
SHARE = 1
"""Plain Python gets shorter texts: it takes minutes for the long ones."""


def texts(rng: random.Random) -> list[bytes]:
    """What compresses in every way: not at all, by short and by long distances, by runs."""
    words = [rng.randbytes(rng.randrange(1, 40)) for _ in range(20)]
    return [
        b"",
        b"a",
        b"\0" * rng.randrange(1, 200_000 // SHARE),
        rng.randbytes(rng.randrange(1, 300_000)),
        b"".join(rng.choice(words) for _ in range(rng.randrange(2_000))),
        bytes(rng.randrange(4) for _ in range(rng.randrange(3_000))),
        b"abc" * rng.randrange(1, 50_000 // SHARE),
        b"".join(b'{"id": %d, "name": "user %d"}' % (n, n * 7) for n in range(rng.randrange(900))),
    ]


def decompressed(
    found: list[bytes], *, run_size: int | None = None, limit: int = 1 << 28
) -> list[bytes] | None:
    data = b"".join(found)
    ends = np.cumsum([len(frame) for frame in found], dtype=np.int64)
    starts = np.append(0, ends[:-1])
    result = frames.decompress_frames(data, starts, ends, run_size=run_size, limit=limit)
    if result is None:
        return None
    target, places = result
    bounds = [0, *places.tolist()]
    return [target[a:b].tobytes() for a, b in itertools.pairwise(bounds)]


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("is_linked", [False, True])
@pytest.mark.parametrize("code", [4, 5, 6, 7])
def test_decompress_frames_gives_what_the_library_gives(
    seed: int, is_linked: bool, code: int
) -> None:
    rng = random.Random(seed)
    expected = texts(rng)
    options = {"block_linked": is_linked, "store_size": False, "block_size": code}
    level = rng.choice([0, 9])
    found = [lz4.frame.compress(text, compression_level=level, **options) for text in expected]
    assert [lz4.frame.decompress(frame) for frame in found] == expected
    assert decompressed(found) == expected


def test_decompress_frames_reads_what_is_written_here() -> None:
    expected = texts(random.Random(1))
    assert decompressed([compression.compress(layout.CODEC_LZ4, t) for t in expected]) == expected


def test_a_run_ends_with_the_frame_that_makes_it_so_many_bytes() -> None:
    expected = [b"x" * 1000, b"y" * 1000, b"z" * 1000]
    found = [compression.compress(layout.CODEC_LZ4, text) for text in expected]
    assert decompressed(found, run_size=1) == expected[:1]
    assert decompressed(found, run_size=1001) == expected[:2]
    assert decompressed(found, run_size=2000) == expected[:2]
    assert decompressed(found, run_size=4000) == expected


def test_nothing_is_nothing_decompressed() -> None:
    frame = compression.compress(layout.CODEC_LZ4, b"x" * 99)
    assert decompressed([b"", frame, b""]) == [b"", b"x" * 99, b""]


def test_the_room_grows_with_what_frames_hold_and_the_library_does_the_largest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(frames, "_ROOM_MAX", 1 << 18)
    large = b"x" * (5 << 14)
    frame = compression.compress(layout.CODEC_LZ4, large)
    assert decompressed([frame, frame]) == [large, large]
    assert decompressed([compression.compress(layout.CODEC_LZ4, 5 * large)]) is None
    assert decompressed([frame], limit=len(large)) == [large]
    assert decompressed([frame], limit=len(large) - 1) is None


@pytest.mark.parametrize(
    "options",
    [{"store_size": True}, {"content_checksum": True}, {"block_checksum": True}],
)
def test_frames_that_producers_do_not_write_are_left_to_the_library(
    options: dict[str, bool],
) -> None:
    frame = lz4.frame.compress(b"abcd" * 100, **{**INDEPENDENT, **options})
    assert decompressed([frame]) is None
    assert compression.decompress(layout.CODEC_LZ4, frame, limit=400) == b"abcd" * 100


def test_two_frames_in_one_batch_are_left_to_the_library() -> None:
    frame = compression.compress(layout.CODEC_LZ4, b"abcd" * 100)
    assert decompressed([frame + frame]) is None


@pytest.mark.parametrize("seed", range(300))
def test_damage_is_found_or_gives_what_the_library_gives(seed: int) -> None:
    rng = random.Random(seed)
    text = rng.choice(texts(rng))[:20_000]
    frame = bytearray(compression.compress(layout.CODEC_LZ4, text))
    for _ in range(rng.randrange(1, 4)):
        frame[rng.randrange(len(frame))] = rng.randrange(256)
    cut = bytes(frame[: rng.choice([len(frame), rng.randrange(len(frame) + 1)])])
    found = decompressed([cut, b"", compression.compress(layout.CODEC_LZ4, b"behind")])
    if found is not None and cut:
        # A frame whose checksums are right is whole; what it holds is for the batch's to judge.
        try:
            expected = compression.decompress(layout.CODEC_LZ4, cut, limit=1 << 28)
        except ValueError:
            return  # the library keeps to rules about how a block ends
        assert found[0] == expected


def naive_block(data: bytes, floor: int, out: bytearray) -> bool:
    """Append what a block holds; False for one that is damaged. Nothing before `floor` is seen."""
    rest = iter(data)

    def length(bits: int) -> int:
        size, byte = bits, 255 if bits == 15 else 0
        while byte == 255:
            byte = next(rest)
            size += byte
        return size

    try:
        for token in rest:
            count = length(token >> 4)
            literals = bytes(itertools.islice(rest, count))
            if len(literals) < count:
                return False
            out += literals
            low = next(rest, None)
            if low is None:
                return True
            distance = low | next(rest) << 8
            size = length(token & 15) + 4
            if not 0 < distance <= len(out) - floor:
                return False
            for _ in range(size):
                out.append(out[-distance])
    except StopIteration:
        return False
    return False


def drawn_block(rng: random.Random) -> bytes:
    """Sequences with every kind of length and distance, also such as reach before the block."""

    def more(size: int) -> bytes:
        return b"" if size < 15 else b"\xff" * ((size - 15) // 255) + bytes([(size - 15) % 255])

    data, written = b"", 0
    for left in reversed(range(rng.randrange(1, 8))):
        count = rng.choice([0, 1, 3, 14, 15, 16, 30, 270, 300])
        written += count
        size = rng.choice([4, 5, 8, 17, 18, 19, 34, 273, 300, 530])
        distance = rng.choice([0, 1, 2, 3, 7, 8, 9, 15, 16, 17, written, written + 1, 65535])
        if rng.random() < 0.9:
            distance = min(max(distance, 1), max(written, 1))
        data += bytes([min(count, 15) << 4 | (min(size - 4, 15) if left else 0)]) + more(count)
        data += rng.randbytes(count)
        if left:
            data += distance.to_bytes(2, "little") + more(size - 4)
            written += size
    return data


@pytest.mark.parametrize("seed", range(150))
def test_nothing_is_written_beside_the_target_whatever_a_frame_says(seed: int) -> None:
    rng = random.Random(seed)
    is_linked = rng.random() < 0.5
    descriptor = bytes([0x40 if is_linked else 0x60, 0x40])
    frame = layout.LZ4_MAGIC + descriptor
    frame += bytes([compression.lz4_header_checksum(descriptor)])
    expected, is_sound = bytearray(), True
    for _ in range(rng.randrange(4)):
        block = drawn_block(rng)
        is_stored = rng.random() < 0.2
        frame += (len(block) | is_stored << 31).to_bytes(4, "little") + block
        if is_stored:
            expected += block
        else:
            floor = 0 if is_linked else len(expected)
            is_sound = is_sound and naive_block(block, floor, expected)
    frame += bytes(4)
    guard = 64
    whole = len(expected)
    for room in {0, whole // 2, max(whole - 1, 0), *range(whole, whole + 35, 3)}:
        memory = np.full(room + 2 * guard, 0xA5, dtype=np.uint8)
        target = memory[guard:-guard]
        status, count, size = kernels.decompress_frames(
            np.frombuffer(frame, dtype=np.uint8), np.array([0]), np.array([len(frame)]), 0,
            frames._checksums(), target, 0, 1 << 40, np.empty(1, dtype=np.int64),
        )  # fmt: skip
        assert (memory[:guard] == 0xA5).all()
        assert (memory[-guard:] == 0xA5).all()
        if not is_sound:
            assert status != codes.OK
        elif room < whole:
            assert (status, count, size) == (codes.NO_ROOM, 0, 0)
        else:
            assert (status, count) == (codes.OK, 1)
            assert target[:size].tobytes() == expected


def test_decompress_frames_reports_ranges_outside_of_the_source() -> None:
    source = np.zeros(10, dtype=np.uint8)
    for start, end in ((-1, 5), (5, 4), (0, 11)):
        status, count, size = kernels.decompress_frames(
            source, np.array([start]), np.array([end]), 0, np.zeros(8, dtype=np.int64),
            np.empty(10, dtype=np.uint8), 0, 99, np.empty(1, dtype=np.int64),
        )  # fmt: skip
        assert (status, count, size) == (codes.OTHER, 0, 0)


def test_every_part_of_a_kernel_bears_being_called_alone() -> None:
    # read_u32, read_length, copy_ahead, repeat, decompress_block, decompress_frame
    source = np.frombuffer(bytes([1, 2, 3, 0x84, 255, 255, 7, 9]), dtype=np.uint8)
    assert kernels.read_u32(source, 0) == 0x84030201
    assert kernels.read_length(source, 4, 8, 15) == (15 + 255 + 255 + 7, 7)
    assert kernels.read_length(source, 4, 6, 15)[0] == -1
    for size in (0, 1, 15, 16, 40):
        data = np.frombuffer(bytes(range(100)), dtype=np.uint8)
        for room in (size, size + 16, size + 90):
            target = np.zeros(room, dtype=np.uint8)
            kernels.copy_ahead(target, 0, data, 3, size, 100)
            assert target[:size].tolist() == list(range(3, 3 + size))
    for distance in (1, 2, 7, 8, 15, 16, 30):
        for size in (4, 17, 64):
            for room in (30 + size, 130 + size):
                target = np.zeros(room, dtype=np.uint8)
                target[:30] = range(30)
                kernels.repeat(target, 30, distance, size)
                expected = list(range(30))
                for _ in range(size):
                    expected.append(expected[-distance])
                assert target[: 30 + size].tolist() == expected
