"""The framings of Kafka's codecs: what we write, what we read, what we refuse."""

from __future__ import annotations

import gzip
import random
import struct
import tracemalloc
import zlib

import lz4.frame
import pyarrow as pa
import pytest
import snappy
from hypothesis import given, settings
from hypothesis import strategies as st

from kafkalog.storage_engine.format.compression import compress, decompress, decompressor

NONE, GZIP, SNAPPY, LZ4, ZSTD = range(5)
COMPRESSED = [GZIP, SNAPPY, LZ4, ZSTD]
XERIAL = b"\x82SNAPPY\0" + struct.pack(">ii", 1, 1)
TEXT = b"the quick brown fox " * 5000
NOISE = random.Random(1).randbytes(100_000)
LIMIT = 1 << 20


@pytest.mark.parametrize("codec", range(5))
@pytest.mark.parametrize("data", [b"", b"x", TEXT, NOISE], ids=["empty", "x", "text", "noise"])
def test_what_is_compressed_decompresses(codec: int, data: bytes) -> None:
    for buffer in (data, bytearray(data), memoryview(data)):
        assert decompress(codec, memoryview(compress(codec, buffer)), limit=len(data)) == data


@settings(deadline=None)
@given(
    st.lists(st.binary(max_size=200) | st.sampled_from([TEXT, NOISE])), st.sampled_from(range(5))
)
def test_a_decompressor_reads_one_stream_after_the_other(streams: list[bytes], codec: int) -> None:
    read = decompressor(codec, limit=len(NOISE))
    assert [bytes(read(compress(codec, data))) for data in streams] == streams


@settings(deadline=None)
@given(st.binary(max_size=200), st.sampled_from(COMPRESSED))
def test_no_truncation_reads_as_whole(data: bytes, codec: int) -> None:
    packed = compress(codec, data)
    for cut in range(len(packed)):
        try:
            found = decompress(codec, packed[:cut], limit=LIMIT)
        except ValueError:
            continue
        assert codec == SNAPPY  # an xerial stream has no end mark, the record count tells
        assert data.startswith(found)


@settings(deadline=None, max_examples=200)
@given(st.binary(max_size=60), st.sampled_from(COMPRESSED), st.binary(max_size=8))
def test_any_bytes_are_data_or_a_value_error(data: bytes, codec: int, start: bytes) -> None:
    for stranger in (data, start + compress(codec, data)[len(start) :]):
        try:
            assert len(decompress(codec, stranger, limit=LIMIT)) <= LIMIT
        except ValueError as error:
            message = str(error)
            assert message.startswith("expected ")
            assert ", found " in message


@pytest.mark.parametrize("codec", range(5))
def test_a_bomb_is_refused_at_the_limit(codec: int) -> None:
    packed = compress(codec, bytes(10_000_000))
    assert len(decompress(codec, packed, limit=10_000_000)) == 10_000_000
    for limit in (0, 1000, 9_999_999):
        with pytest.raises(ValueError, match=f"at most {limit} decompressed bytes, found more"):
            decompress(codec, packed, limit=limit)


@pytest.mark.parametrize("codec", COMPRESSED)
def test_the_limit_holds_over_all_members_of_a_stream(codec: int) -> None:
    packed = compress(codec, b"12345") * 3
    assert decompress(codec, packed, limit=15) == b"12345" * 3
    with pytest.raises(ValueError, match="found more"):
        decompress(codec, packed, limit=14)


@pytest.mark.parametrize("codec", [5, 6, 7])
def test_codecs_that_do_not_exist_are_refused(codec: int) -> None:
    with pytest.raises(ValueError, match=f"codec {codec}"):
        decompress(codec, b"", limit=1)
    with pytest.raises(ValueError, match=f"found {codec}"):
        compress(codec, b"")


# --- gzip ----------------------------------------------------------------------------------------
def test_gzip_is_written_as_java_writes_it() -> None:
    packed = compress(GZIP, TEXT)
    assert packed[:10].hex() == "1f8b08000000000000ff"
    assert gzip.decompress(packed) == TEXT
    assert len(compress(GZIP, TEXT, 9)) <= len(compress(GZIP, TEXT, 1))


def test_gzip_members_are_joined() -> None:
    members = gzip.compress(b"one ") + gzip.compress(b"two ") + compress(GZIP, b"three")
    assert decompress(GZIP, members, limit=LIMIT) == b"one two three"
    assert decompress(GZIP, members + b"\0\0", limit=LIMIT) == b"one two three"


def test_gzip_checks_its_checksum() -> None:
    packed = bytearray(compress(GZIP, b"data"))
    packed[-8] ^= 1
    with pytest.raises(ValueError, match="expected a gzip stream"):
        decompress(GZIP, packed, limit=LIMIT)


def test_bare_deflate_is_not_gzip() -> None:
    with pytest.raises(ValueError, match="expected a gzip stream"):
        decompress(GZIP, zlib.compress(b"data"), limit=LIMIT)


# --- snappy --------------------------------------------------------------------------------------
def block(data: bytes) -> bytes:
    packed = snappy.compress(data)
    return struct.pack(">i", len(packed)) + packed


def test_snappy_is_written_as_an_xerial_stream_of_32_kib_blocks() -> None:
    expected = XERIAL + b"".join(block(NOISE[i : i + 32768]) for i in range(0, len(NOISE), 32768))
    assert compress(SNAPPY, NOISE) == expected


def test_raw_snappy_is_read() -> None:
    assert decompress(SNAPPY, snappy.compress(TEXT), limit=LIMIT) == TEXT


def test_joined_xerial_streams_are_read() -> None:
    joined = XERIAL + block(b"a") + block(b"b") + XERIAL + XERIAL + block(b"c")
    assert decompress(SNAPPY, joined, limit=LIMIT) == b"abc"
    assert decompress(SNAPPY, joined + b"\0\0\0", limit=LIMIT) == b"abc"


@pytest.mark.parametrize(
    "stream",
    [
        XERIAL[:12],
        b"\x82SNAPPY\0" + struct.pack(">ii", 0, 1),
        XERIAL + struct.pack(">i", -1),
        XERIAL + struct.pack(">i", 2**31 - 1) + b"x",
        XERIAL + struct.pack(">i", 0),
        XERIAL + struct.pack(">i", 3) + b"\x05zz",
        b"",
        b"\xff\xff\xff\xff\xff\x0f",
        b"\xff\xff\xff\xff\x0f",
    ],
)
def test_damaged_snappy_is_refused(stream: bytes) -> None:
    with pytest.raises(ValueError, match="expected"):
        decompress(SNAPPY, stream, limit=LIMIT)


def test_a_snappy_level_is_refused() -> None:
    with pytest.raises(ValueError, match="no level"):
        compress(SNAPPY, b"", 3)


# --- lz4 -----------------------------------------------------------------------------------------
def test_lz4_is_written_as_a_frame_of_independent_64_kib_blocks() -> None:
    packed = compress(LZ4, TEXT)
    assert packed[:7].hex() == "04224d18604082"
    assert packed[-4:] == bytes(4)
    assert lz4.frame.decompress(packed) == TEXT


def test_lz4_level_9_is_the_fast_compressor_and_others_are_thorough() -> None:
    assert compress(LZ4, TEXT, 9) == compress(LZ4, TEXT)
    for level in (1, 3, 12, 17):
        assert decompress(LZ4, compress(LZ4, TEXT, level), limit=LIMIT) == TEXT
    mixed = bytes(random.Random(2).choices(b"abcdefgh", k=20_000))
    assert len(compress(LZ4, mixed, 12)) < len(compress(LZ4, mixed))


def test_lz4_frames_of_every_kind_are_read() -> None:
    for options in (
        {"block_size": lz4.frame.BLOCKSIZE_MAX4MB, "store_size": True},
        {"content_checksum": True, "block_checksum": True},
        {"block_linked": True},
    ):
        frame = lz4.frame.compress(TEXT, **options)
        assert decompress(LZ4, frame, limit=LIMIT) == TEXT


def test_lz4_checks_block_checksums() -> None:
    frame = bytearray(lz4.frame.compress(b"data" * 9, block_checksum=True, store_size=False))
    frame[12] ^= 1
    with pytest.raises(ValueError, match="expected an lz4 frame"):
        decompress(LZ4, frame, limit=LIMIT)


# --- zstd ----------------------------------------------------------------------------------------
def test_zstd_without_its_size_is_read() -> None:
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, "zstd") as stream:
        stream.write(TEXT)
    packed = sink.getvalue().to_pybytes()
    assert packed[4] & 0xE0 == 0, "the frame tells no size"
    assert decompress(ZSTD, packed, limit=len(TEXT)) == TEXT
    assert decompress(ZSTD, packed * 2, limit=2 * len(TEXT)) == TEXT * 2


def test_what_a_zstd_stream_holds_is_not_copied_once_more() -> None:
    data = random.Random(1).randbytes(8 << 20)
    packed = compress(ZSTD, data)
    assert decompress(ZSTD, packed, limit=8 << 20) == data
    tracemalloc.start()
    try:
        assert len(decompress(ZSTD, packed, limit=8 << 20)) == 8 << 20
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_zstd_levels_are_read() -> None:
    for level in (-5, 1, 3, 19):
        assert decompress(ZSTD, compress(ZSTD, TEXT, level), limit=LIMIT) == TEXT
    assert compress(ZSTD, TEXT, 3) == compress(ZSTD, TEXT)
