"""Compress and decompress the record section of a batch, in Kafka's framings.

========  ===================================  ==================================================
codec     written                              read
========  ===================================  ==================================================
gzip      one member, no name, no time         any number of members
snappy    an xerial stream, 32 KiB blocks      the same, also joined ones; one raw snappy block
lz4       one frame, independent 64 KiB        any number of frames
          blocks, no checksums
zstd      one frame                            any number of frames, with or without their size
========  ===================================  ==================================================

Because the input is untrusted, every function here stops at `limit` decompressed bytes and raises
LimitExceededError. For data that is not a complete stream of its codec it raises ValueError.

Kafka: the Compression classes. Their lz4 frames in messages v0 have a wrong header checksum, which
`decompress` can ignore.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from functools import partial
from typing import Any, Final

from kafkalog.storage_engine.format import layout
from kafkalog.storage_engine.format.batch import Buffer

SIZE_MAX: Final = 1 << 28
"""Largest decompressed size of a batch's record section. Kafka has no such limit; ours bounds the
memory that a bomb takes."""
XERIAL_BLOCK_SIZE: Final = 32 * 1024
"""Uncompressed bytes of one block (Kafka: SnappyOutputStream's default)."""
LZ4_FAST_LEVEL: Final = 9
"""Kafka's default lz4 level; it selects the fast compressor, all others the thorough one."""
LZ4_THOROUGH_LEVELS: Final = (3, 12)
"""The levels of the lz4 library's thorough compressor."""
ZSTD_LEVEL: Final = 3
READ_SIZE_MIN: Final = 64 * 1024
LZ4_LIKELY_RATIO: Final = 8
"""A frame's content is seldom larger than this many times its size."""
_XXH32_PRIMES: Final = (0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D, 0x27D4EB2F, 0x165667B1)


class LimitExceededError(ValueError):
    """The content is larger than the caller's limit, and may be sound."""


def compress(codec: int, data: Buffer, level: int | None = None) -> bytes:
    """Return `data` in the framing of `codec` (a `layout.CODEC_*`); level None is Kafka's default.

    Raises ValueError for an unknown codec or level.
    """
    if codec == layout.CODEC_NONE:
        return bytes(data)
    writer = _WRITERS.get(codec)
    if writer is None:
        raise ValueError(f"codec: expected 0 to 4, found {codec}")
    return writer(data, level)


def decompress(
    codec: int, data: Buffer, *, limit: int, is_lz4_header_checked: bool = True
) -> bytes | memoryview:
    """Return the decompressed content of `data`, at most `limit` bytes.

    Raises ValueError, with the expected and the found, for an unknown codec and for a stream that
    is damaged or incomplete; LimitExceededError for one that exceeds the limit.
    """
    if codec == layout.CODEC_NONE:
        if len(data) > limit:
            raise _too_large(limit)
        return bytes(data)
    reader = _READERS.get(codec)
    if reader is None:
        raise ValueError(f"expected a codec from 0 to 4, found codec {codec}")
    if codec == layout.CODEC_LZ4 and not is_lz4_header_checked:
        data = _with_lz4_header_checksum(data)
    return reader(data, limit)


def decompressor(codec: int, *, limit: int) -> Callable[[Buffer], bytes | memoryview]:
    """Return a function that decompresses one stream after the other, as `decompress` does.

    It keeps the library's context of lz4 from call to call. After an error, do not call it again.
    """
    if codec == layout.CODEC_LZ4:
        return _lz4_decompressor(limit)
    return partial(decompress, codec, limit=limit)


def _too_large(limit: int) -> LimitExceededError:
    return LimitExceededError(f"expected at most {limit} decompressed bytes, found more")


def _gzip_compress(data: Buffer, level: int | None) -> bytes:
    # Our own header, because zlib's contains the operating system and the level.
    deflate = zlib.compressobj(-1 if level is None else level, zlib.DEFLATED, -zlib.MAX_WBITS)
    body = deflate.compress(data) + deflate.flush()
    trailer = layout.GZIP_TRAILER.pack(zlib.crc32(data), len(data) & 0xFFFF_FFFF)
    return layout.GZIP_HEADER + body + trailer


def _gzip_decompress(data: Buffer, limit: int) -> bytes:
    parts = []
    size = 0
    rest: Buffer = data
    while True:
        member = zlib.decompressobj(zlib.MAX_WBITS | 16)
        try:
            # One byte more than the limit distinguishes "exactly the limit" from "more".
            part = member.decompress(rest, limit - size + 1)
        except zlib.error as error:
            raise ValueError(f"expected a gzip stream, found {error}") from error
        size += len(part)
        if size > limit:
            raise _too_large(limit)
        parts.append(part)
        if not member.eof:
            raise ValueError("expected the end of a gzip stream, found the end of the data")
        rest = member.unused_data
        # Java's reader ignores other bytes after the last member.
        if rest[:2] != layout.GZIP_HEADER[:2]:
            return parts[0] if len(parts) == 1 else b"".join(parts)


def _snappy_compress(data: Buffer, level: int | None) -> bytes:
    import snappy

    if level is not None:
        raise ValueError(f"expected no level for snappy, found {level}")
    parts = [layout.XERIAL_HEADER.pack(layout.XERIAL_MAGIC, 1, 1)]
    with memoryview(data) as view:
        for start in range(0, len(view), XERIAL_BLOCK_SIZE):
            block = snappy.compress(bytes(view[start : start + XERIAL_BLOCK_SIZE]))
            parts += (layout.XERIAL_BLOCK.pack(len(block)), block)
    return b"".join(parts)


def _snappy_decompress(data: Buffer, limit: int) -> bytes:
    data = bytes(data)
    if not data.startswith(layout.XERIAL_MAGIC):
        return _snappy_block(data, limit)
    parts = []
    size = 0
    position = 0
    while len(data) - position >= layout.XERIAL_BLOCK.size:
        if data.startswith(layout.XERIAL_MAGIC, position):  # a stream begins, or another one
            if len(data) - position < layout.XERIAL_HEADER.size:
                raise ValueError("expected an xerial header of 16 bytes, found the end of the data")
            _, version, _ = layout.XERIAL_HEADER.unpack_from(data, position)
            if version < 1:
                raise ValueError(f"expected xerial version 1 or later, found {version}")
            position += layout.XERIAL_HEADER.size
            continue
        (block_size,) = layout.XERIAL_BLOCK.unpack_from(data, position)
        position += layout.XERIAL_BLOCK.size
        if not 0 <= block_size <= len(data) - position:
            raise ValueError(
                f"expected a snappy block of at most {len(data) - position} bytes, "
                f"found one of {block_size}"
            )
        part = _snappy_block(data[position : position + block_size], limit, size)
        size += len(part)
        position += block_size
        parts.append(part)
    return b"".join(parts)


def _snappy_block(block: bytes, limit: int, size_before: int = 0) -> bytes:
    import snappy

    # A block begins with its uncompressed size; check it before allocating.
    size = 0
    for i, byte in enumerate(block[:5]):
        size |= (byte & 0x7F) << (7 * i)
        if byte < 0x80:
            break
    else:
        raise ValueError("expected a snappy block, found no size at its start")
    if size > limit - size_before:
        raise _too_large(limit)
    try:
        return bytes(snappy.decompress(block))
    except snappy.UncompressError as error:
        raise ValueError("expected a snappy block, found damaged data") from error


def _lz4_compress(data: Buffer, level: int | None) -> bytes:
    import lz4.frame

    if level is None or level == LZ4_FAST_LEVEL:
        library_level = 0
    else:
        library_level = min(max(level, LZ4_THOROUGH_LEVELS[0]), LZ4_THOROUGH_LEVELS[1])
    compressed: bytes = lz4.frame.compress(
        data,
        compression_level=library_level,
        block_size=lz4.frame.BLOCKSIZE_MAX64KB,
        block_linked=False,
        store_size=False,
    )
    return compressed


def _lz4_decompress(data: Buffer, limit: int) -> bytes:
    return _lz4_decompressor(limit)(data)


def _lz4_decompressor(limit: int) -> Callable[[Buffer], bytes]:
    from lz4.frame import create_decompression_context, decompress_chunk

    context = create_decompression_context()

    def decompress(data: Buffer) -> bytes:
        parts: list[bytes] = []
        rest: Buffer = data
        left = limit + 1  # one byte past the limit tells "exactly the limit" from "more"
        # The library allocates the room that it gets, so the room grows with what the frames hold.
        room = max(READ_SIZE_MIN, LZ4_LIKELY_RATIO * len(data))
        while True:
            try:
                part, used, is_ended = decompress_chunk(
                    context, rest, max_length=room if room < left else left
                )
            except RuntimeError as error:
                raise ValueError(f"expected an lz4 frame, found {error}") from error
            left -= len(part)
            if left <= 0:
                raise _too_large(limit)
            if is_ended and used == len(rest) and not parts:  # nearly always
                return part  # type: ignore[no-any-return]  # lz4 has no types: this is bytes
            if not is_ended and not used and not part:
                raise ValueError("expected the end of an lz4 frame, found the end of the data")
            parts.append(part)
            rest = memoryview(rest)[used:]
            if not is_ended:
                room *= 2
            elif rest[: len(layout.LZ4_MAGIC)] != layout.LZ4_MAGIC:
                return b"".join(parts)

    return decompress


def _with_lz4_header_checksum(data: Buffer) -> bytes:
    """Return an lz4 frame with a right header checksum; other data unchanged."""
    start = layout.LZ4_FLAGS_POSITION
    if len(data) <= start or bytes(data[:start]) != layout.LZ4_MAGIC:
        return bytes(data)
    flags = data[start]
    end = start + layout.LZ4_DESCRIPTOR_SIZE
    end += 8 * bool(flags & layout.LZ4_CONTENT_SIZE_BIT)
    end += 4 * bool(flags & layout.LZ4_DICTIONARY_BIT)
    if len(data) <= end:
        return bytes(data)
    mended = bytearray(data)
    mended[end] = (_xxh32(bytes(data[start:end])) >> 8) & 0xFF
    return bytes(mended)


def _xxh32(data: bytes) -> int:
    result = _XXH32_PRIMES[4] + len(data)
    words = len(data) // 4 * 4
    for i in range(0, words, 4):
        result += int.from_bytes(data[i : i + 4], "little") * _XXH32_PRIMES[2]
        result = _rotated(result, 17) * _XXH32_PRIMES[3]
    for byte in data[words:]:
        result += byte * _XXH32_PRIMES[4]
        result = _rotated(result, 11) * _XXH32_PRIMES[0]
    for shift, prime in ((15, _XXH32_PRIMES[1]), (13, _XXH32_PRIMES[2]), (16, 1)):
        result &= 0xFFFF_FFFF
        result = (result ^ (result >> shift)) * prime
    return result & 0xFFFF_FFFF


def _rotated(number: int, count: int) -> int:
    number &= 0xFFFF_FFFF
    return (number << count | number >> (32 - count)) & 0xFFFF_FFFF


def _zstd_compress(data: Buffer, level: int | None) -> bytes:
    import pyarrow as pa

    codec = pa.Codec("zstd", ZSTD_LEVEL if level is None else level)
    compressed: bytes = codec.compress(data, asbytes=True)
    return compressed


def _zstd_decompress(data: Buffer, limit: int) -> bytes | memoryview:
    import pyarrow as pa

    if not data:
        raise ValueError("expected a zstd stream, found no data")
    # Use a stream: there may be several frames, and their sizes need not be known.
    parts: list[Any] = []
    size = 0
    read_size = max(READ_SIZE_MIN, 8 * len(data))
    try:
        with pa.CompressedInputStream(pa.BufferReader(data), "zstd") as stream:
            # Not `read`: if it fails, pyarrow leaks its buffer.
            while (part := stream.read_buffer(min(read_size, limit - size + 1))).size:
                size += part.size
                if size > limit:
                    raise _too_large(limit)
                parts.append(part)
    except OSError as error:
        raise ValueError(f"expected a zstd stream, found {error}") from error
    if len(parts) != 1:
        return b"".join(parts)
    return memoryview(parts[0]).cast("B").toreadonly()  # like bytes, without a copy


_WRITERS: Final[dict[int, Callable[[Buffer, int | None], bytes]]] = {
    layout.CODEC_GZIP: _gzip_compress,
    layout.CODEC_SNAPPY: _snappy_compress,
    layout.CODEC_LZ4: _lz4_compress,
    layout.CODEC_ZSTD: _zstd_compress,
}
_READERS: Final[dict[int, Callable[[Buffer, int], bytes | memoryview]]] = {
    layout.CODEC_GZIP: _gzip_decompress,
    layout.CODEC_SNAPPY: _snappy_decompress,
    layout.CODEC_LZ4: _lz4_decompress,
    layout.CODEC_ZSTD: _zstd_decompress,
}
