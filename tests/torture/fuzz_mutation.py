"""Changes inputs: bits, numbers at their extremes, lengths, pieces of other inputs; by a seed.

Inputs are bytes or text. A number is changed where one may stand, in both byte orders and as a
zigzag varint; in text, values and brackets are. Every change keeps the input below a size, so that
what is slow or large in a decoder is the decoder's doing.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Final

SIZE_MAX: Final = 1 << 17
_EDGES: Final = (0, 1, 2, 3, 4, 7, 8, 11, 12, 16, 60, 61, 62, 127, 128, 255, 256, 4095, 4096)
_WIDTHS: Final = (1, 2, 4, 8)
TOKENS: Final[tuple[bytes, ...]] = (
    b"null", b"true", b"-1", b"-2", b"0", b"1", b"1.5", b"1e400", b"-1e400", b"NaN", b"Infinity",
    b"9223372036854775807", b"9223372036854775808", b"-9223372036854775809", b"2147483648",
    b"99999999999999999999", b"9" * 5000, b"100000", b"100001", b"1000000000", b'""', b'"x"',
    b"[]", b"{}", b"[0]", b'{"0":0}', b"[[", b"[" * 20_000, b'{"a":' * 20_000, b"}", b"]", b",",
    b":", b"=", b"\\", b'"', b"\n", b"\r\n", b"\0", b"\xff", b"\xed\xa0\x80", b"\xc2\x85",
    b"\xe2\x80\xa8", b"\xef\xbb\xbf", b'"\\ud800"', b'"\\u0000"', b" ", b"\t", b"#", b"!",
    b"\xd9\xa1", b"\xc2\xb2", b"1_000", b"+1", b"0x1", b"..", b"/", b"../..", b"%", b"-0",
)  # fmt: skip


class Mutator:
    """Draws inputs from seeds; the same ones for the same generator."""

    def __init__(self, draw: random.Random, *, is_text: bool) -> None:
        self._draw = draw
        own = (_token, _token, _number_in_text, _token_over) if is_text else (_number, _varint)
        common = (_flip, _byte, _cut, _remove, _repeat, _insert, _swap)
        self._changes: tuple[Callable[[random.Random, bytearray], None], ...] = (
            *own,
            *own,
            *common,
        )

    def mutated(self, corpus: Sequence[bytes]) -> bytes:
        """Return one of the inputs with up to eight changes, or two of them joined."""
        draw = self._draw
        data = bytearray(draw.choice(corpus))
        if draw.random() < 0.1:
            other = draw.choice(corpus)
            data[draw.randint(0, len(data)) :] = other[draw.randint(0, len(other)) :]
        for _ in range(draw.choice((1, 1, 1, 2, 2, 3, 5, 8))):
            draw.choice(self._changes)(draw, data)
            del data[SIZE_MAX:]
        return bytes(data)


def _place(draw: random.Random, data: bytearray, room: int = 1) -> int:
    """Draw a position; where a file begins there are headers, and they are worth more changes."""
    last = max(0, len(data) - room)
    return draw.randint(0, min(last, 128)) if draw.random() < 0.3 else draw.randint(0, last)


def _flip(draw: random.Random, data: bytearray) -> None:
    if data:
        data[_place(draw, data)] ^= 1 << draw.randrange(8)


def _byte(draw: random.Random, data: bytearray) -> None:
    if data:
        data[_place(draw, data)] = draw.choice((0, 1, 0x7F, 0x80, 0xFF, draw.randrange(256)))


def _number(draw: random.Random, data: bytearray) -> None:
    width = draw.choice(_WIDTHS)
    if len(data) < width:
        return
    at = _place(draw, data, width)
    order = "big" if draw.random() < 0.8 else "little"
    found = int.from_bytes(data[at : at + width], order)  # type: ignore[arg-type]
    value = draw.choice((
        draw.choice(_EDGES), (1 << (8 * width - 1)) - 1, 1 << (8 * width - 1), -1, -2,
        found + draw.choice((-1, 1, 8, -8, 1 << 16)), len(data), len(data) - at, at, 2 * found,
        draw.getrandbits(8 * width),
    ))  # fmt: skip
    value &= (1 << 8 * width) - 1
    data[at : at + width] = value.to_bytes(width, order)  # type: ignore[arg-type]


def _varint(draw: random.Random, data: bytearray) -> None:
    bits = draw.choice((7, 14, 31, 32, 35, 63, 64, 70))
    value = draw.choice((0, 1, 2, (1 << bits) - 1, 1 << (bits - 1), draw.getrandbits(bits)))
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    at = _place(draw, data)
    data[at : at + (len(out) if draw.random() < 0.5 else 1)] = out


def _cut(draw: random.Random, data: bytearray) -> None:
    if draw.random() < 0.3:
        del data[_place(draw, data) :]


def _remove(draw: random.Random, data: bytearray) -> None:
    at = _place(draw, data)
    del data[at : at + draw.choice((1, 2, 4, 8, 16, 64))]


def _repeat(draw: random.Random, data: bytearray) -> None:
    at, size = _place(draw, data), draw.choice((1, 4, 12, 61, 100, 500))
    times = draw.choice((1, 1, 2, 10, 100))
    data[at:at] = data[at : at + size] * times


def _insert(draw: random.Random, data: bytearray) -> None:
    at = _place(draw, data)
    fill = draw.choice((b"\0", b"\xff", bytes([draw.randrange(256)])))
    data[at:at] = fill * draw.choice((1, 2, 4, 8, 61, 1000))


def _swap(draw: random.Random, data: bytearray) -> None:
    size = draw.choice((1, 4, 8, 16))
    if len(data) >= 2 * size:
        one, other = _place(draw, data, size), _place(draw, data, size)
        here, there = data[one : one + size], data[other : other + size]
        data[one : one + size], data[other : other + size] = there, here


def _token(draw: random.Random, data: bytearray) -> None:
    at = _place(draw, data)
    data[at:at] = draw.choice(TOKENS)


def _token_over(draw: random.Random, data: bytearray) -> None:
    """Put a token in the place of what stands between two marks."""
    marks = [place for place, byte in enumerate(data[:4000]) if byte in b'[]{},:="\n ']
    if len(marks) > 1:
        place = draw.randrange(len(marks) - 1)
        data[marks[place] + 1 : marks[place + 1]] = draw.choice(TOKENS)


def _number_in_text(draw: random.Random, data: bytearray) -> None:
    digits = [place for place, byte in enumerate(data[:4000]) if 0x30 <= byte <= 0x39]
    if not digits:
        return
    start = draw.choice(digits)
    end = start
    while end < len(data) and 0x30 <= data[end] <= 0x39:
        end += 1
    data[start:end] = draw.choice(TOKENS)
