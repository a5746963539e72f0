"""The ASCII characters that Java's classes of characters stand for, by the names it gives them."""

from __future__ import annotations

import string
import unicodedata
from typing import Final

__all__ = ["ASCII", "DIGITS", "ESCAPES", "LETTERS", "LOWER", "PROPERTIES", "SPACE", "UPPER"]

ASCII: Final = frozenset(map(chr, range(128)))
DIGITS: Final = frozenset(string.digits)
LETTERS: Final = frozenset(string.ascii_letters)
_PUNCTUATION: Final = frozenset(string.punctuation)
_BLANK: Final = frozenset(" \t")
_VERTICAL: Final = frozenset("\n\v\f\r")
SPACE: Final = _BLANK | _VERTICAL
_CONTROL: Final = frozenset(c for c in ASCII if unicodedata.category(c) == "Cc")
ESCAPES: Final = {
    "d": DIGITS,
    "w": LETTERS | DIGITS | {"_"},
    "s": SPACE,
    "h": _BLANK,
    "v": _VERTICAL,
}
"""Escapes for classes; in upper case for their complements."""
UPPER: Final = frozenset(string.ascii_uppercase)
LOWER: Final = frozenset(string.ascii_lowercase)
PROPERTIES: Final = {
    "lower": LOWER,
    "upper": UPPER,
    "ascii": ASCII,
    "alpha": LETTERS,
    "digit": DIGITS,
    "alnum": LETTERS | DIGITS,
    "punct": _PUNCTUATION,
    "graph": LETTERS | DIGITS | _PUNCTUATION,
    "print": ASCII - _CONTROL,
    "blank": _BLANK,
    "cntrl": _CONTROL,
    "xdigit": frozenset(string.hexdigits),
    "space": SPACE,
    "javalowercase": LOWER,
    "javauppercase": UPPER,
    "javaalphabetic": LETTERS,
    "javaletter": LETTERS,
    "javadigit": DIGITS,
    "javaletterordigit": LETTERS | DIGITS,
    "alphabetic": LETTERS,
    "letter": LETTERS,
    "lowercase": LOWER,
    "uppercase": UPPER,
    "white_space": SPACE,
    "whitespace": SPACE,
    "control": _CONTROL,
    "punctuation": frozenset(c for c in ASCII if unicodedata.category(c).startswith("P")),
    "hex_digit": frozenset(string.hexdigits),
    "latin": LETTERS,
    "common": ASCII - LETTERS,
    "basiclatin": ASCII,
    "basic_latin": ASCII,
    "l1": ASCII,
    "all": ASCII,
}
"""For `\\p{...}`, in lower case and without the prefixes Is and In."""
