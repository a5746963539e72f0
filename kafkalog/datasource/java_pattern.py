"""Java's regular expressions (java.util.regex.Pattern) as Python's, for names of topics.

`subscribePattern` is an expression of Java wherever a job comes from. The names it is matched with
are short and plain ASCII, which makes a full translation possible: a class of characters, whatever
its syntax (`[a-z&&[^aeiou]]`, `\\p{Alpha}`, `\\h`), is the set of ASCII characters in it, and what
the flags for lines and for Unicode say makes no difference. Case is spelt out: under `(?i)` the
letter `a` becomes `[Aa]`.

What Python cannot do is refused: look-behind of variable length, `\\N{...}`, `\\b{g}`.
"""

from __future__ import annotations

import re
import string
import unicodedata
from collections.abc import Iterable
from functools import cache
from typing import Final

from kafkalog.datasource.java_characters import (
    ASCII,
    DIGITS,
    ESCAPES,
    LETTERS,
    LOWER,
    PROPERTIES,
    SPACE,
    UPPER,
)
from kafkalog.errors import InvalidInputError

__all__ = ["python_pattern"]

_CHARACTERS: Final = {"t": "\t", "n": "\n", "r": "\r", "f": "\f", "a": "\a", "e": "\x1b"}
_ANCHORS: Final = {"b": r"\b", "B": r"\B", "A": r"\A", "G": r"\A", "z": r"\Z", "Z": r"\Z"}
"""A name has no line ends, and it is searched once: `\\G` is its start."""
_OPENERS: Final = ("?:", "?=", "?!", "?<=", "?<!", "?>")
_FLAGS: Final = re.compile(r"\(\?([idmsuxU]*)(?:-([idmsuxU]*))?([:)])")
_NAME: Final = re.compile(r"\(\?<([a-zA-Z][a-zA-Z0-9]*)>")
_QUANTIFIER: Final = re.compile(r"(?:[*+?]|\{\d+(?:,\d*)?\})[+?]?")
_NUMBERS: Final = (
    (re.compile(r"x([0-9a-fA-F]{2})|x\{([0-9a-fA-F]+)\}|u([0-9a-fA-F]{4})"), 16),
    (re.compile(r"0([0-3]?[0-7]{1,2})"), 8),
)


@cache
def python_pattern(pattern: str) -> str:
    """Return Python's expression that finds in ASCII texts without line ends what Java's finds.

    Raises InvalidInputError, which says what is wrong or cannot be.
    """
    try:
        translator = _Translator(_unquoted(pattern))
        translated = translator.translate()
        re.compile(translated, re.ASCII)
    except _Unsupported as fault:
        raise InvalidInputError(f"subscribePattern {pattern!r}: {fault}") from None
    except re.error as fault:
        raise InvalidInputError(
            f"subscribePattern {pattern!r}: no regular expression that Python can do: {fault}"
        ) from None
    except (RecursionError, OverflowError):
        raise InvalidInputError(
            f"subscribePattern {pattern[:80]!r}: too deep or too large a regular expression"
        ) from None
    return translated


class _Unsupported(Exception):
    """Says what is wrong with a pattern."""


def _unquoted(pattern: str) -> str:
    r"""Replace `\Q...\E` by escaped characters, as Java does first of all."""
    parts: list[str] = []
    position = 0
    while position < len(pattern):
        if pattern.startswith(r"\Q", position):
            end = pattern.find(r"\E", position + 2)
            quoted = pattern[position + 2 : end if end >= 0 else None]
            parts += [c if c.isalnum() else "\\" + c for c in quoted]
            position = end + 2 if end >= 0 else len(pattern)
        else:
            size = 2 if pattern[position] == "\\" else 1
            parts.append(pattern[position : position + size])
            position += size
    return "".join(parts)


class _Translator:
    """Reads a Java pattern once, from left to right."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.position = 0
        self.groups = 0

    def translate(self) -> str:
        translated = self._alternatives(frozenset())
        if self.position < len(self.text):
            raise _Unsupported(f"unmatched `)` at {self.position}")
        return translated

    def _alternatives(self, flags: frozenset[str]) -> str:
        """Translate up to the `)` that closes the group, or to the end."""
        parts: list[str] = []
        while self.position < len(self.text) and self.text[self.position] != ")":
            if self._skip_comments(flags):
                continue
            change = _FLAGS.match(self.text, self.position)
            if self.text[self.position] == "|":
                self.position += 1
                parts.append("|")
            elif change is not None and change[3] == ")":
                self.position = change.end()
                flags = _changed(flags, change)
            else:
                atom = self._atom(flags)
                self._skip_comments(flags)
                quantifier = _QUANTIFIER.match(self.text, self.position)
                if quantifier is not None:
                    self.position = quantifier.end()
                    atom = (
                        f"(?:{atom}){quantifier[0]}" if _is_anchor(atom) else atom + quantifier[0]
                    )
                parts.append(atom)
        return "".join(parts)

    def _skip_comments(self, flags: frozenset[str]) -> bool:
        """Under the flag x: go past white space and comments."""
        start = self.position
        while "x" in flags and self.position < len(self.text):
            if self.text[self.position] == "#":
                end = self.text.find("\n", self.position)
                self.position = len(self.text) if end < 0 else end + 1
            elif self.text[self.position] in SPACE:
                self.position += 1
            else:
                break
        return self.position > start

    def _atom(self, flags: frozenset[str]) -> str:
        character = self.text[self.position]
        if character == "(":
            return self._group(flags)
        if character == "[":
            self.position += 1
            return _emitted(self._class(flags))
        if character == "\\":
            return self._escape(flags)
        if character in "*+?{":
            raise _Unsupported(f"dangling {character!r} at {self.position}")
        self.position += 1
        return character if character in "^$." else _emitted(_cases(character, flags))

    def _group(self, flags: frozenset[str]) -> str:
        named = _NAME.match(self.text, self.position)
        change = _FLAGS.match(self.text, self.position)
        kind = next((k for k in _OPENERS if self.text.startswith(k, self.position + 1)), None)
        if named is not None:
            self.position = named.end()
            self.groups += 1
            opener = f"(?P<{named[1]}>"
        elif kind is not None:
            self.position += 1 + len(kind)
            opener = f"({kind}"
        elif change is not None:
            self.position = change.end()
            flags = _changed(flags, change)
            opener = "(?:"
        elif self.text.startswith("(?", self.position):
            raise _Unsupported(f"unknown group {self.text[self.position : self.position + 4]!r}")
        else:
            self.position += 1
            self.groups += 1
            opener = "("
        body = self._alternatives(flags)
        if self.position >= len(self.text):
            raise _Unsupported("unclosed group")
        self.position += 1
        return f"{opener}{body})"

    def _escape(self, flags: frozenset[str]) -> str:
        following = self.text[self.position + 1 : self.position + 2]
        if following and following in "123456789":
            return self._back_reference(flags)
        if following == "k":
            name = re.compile(r"\\k<([a-zA-Z][a-zA-Z0-9]*)>").match(self.text, self.position)
            if name is None:
                raise _Unsupported(r"`\k` is not followed by <name>")
            self.position = name.end()
            return _referring(f"(?P={name[1]})", flags)
        if following and following in _ANCHORS:
            if self.text.startswith("{", self.position + 2):
                raise _Unsupported(rf"`\{following}{{...}}` cannot be translated")
            self.position += 2
            return _ANCHORS[following]
        if following == "R":
            self.position += 2
            return r"(?:\r\n|[\n\v\f\r])"
        if following == "X":
            self.position += 2
            return r"[\x00-\x7f]"
        return _emitted(self._characters(flags))

    def _back_reference(self, flags: frozenset[str]) -> str:
        """Java takes as many digits as there are groups so far."""
        self.position += 2
        number = int(self.text[self.position - 1])
        while self.text[self.position : self.position + 1] in tuple(string.digits):
            longer = 10 * number + int(self.text[self.position])
            if longer > self.groups:
                break
            number, self.position = longer, self.position + 1
        if number > self.groups:
            return _emitted(frozenset())  # of a group that is not there yet: Java finds nothing
        return _referring(rf"(?:\{number})", flags)

    def _characters(self, flags: frozenset[str]) -> frozenset[str]:
        """Return what an escape stands for, in a class or outside."""
        self.position += 1
        if self.position >= len(self.text):
            raise _Unsupported(r"ends in `\`")
        letter = self.text[self.position]
        self.position += 1
        if letter.lower() in ESCAPES:
            found = ESCAPES[letter.lower()]
            return found if letter.islower() else ASCII - found
        if letter in "pP":
            found = self._property(flags)
            return found if letter == "p" else ASCII - found
        if letter in _CHARACTERS:
            return frozenset(_CHARACTERS[letter])
        if letter == "c":
            self.position += 1
            return frozenset(chr(ord(self.text[self.position - 1 : self.position] or "\0") ^ 64))
        for number, base in _NUMBERS:
            match = number.match(self.text, self.position - 1)
            if match is not None:
                self.position = match.end()
                code = int(next(filter(None, match.groups())), base)
                return _cases(chr(code), flags) if code < 128 else frozenset()
        if letter in LETTERS | DIGITS:
            raise _Unsupported(rf"the escape `\{letter}` is unknown or cannot be translated")
        return _cases(letter, flags)

    def _property(self, flags: frozenset[str]) -> frozenset[str]:
        match = re.compile(r"\{([^}]*)\}|(.)").match(self.text, self.position)
        if match is None:
            raise _Unsupported(r"`\p` without a property")
        self.position = match.end()
        name = match[1] if match[1] is not None else match[2]
        word = re.sub(r"^(?:Is|In|\w+=)", "", name)
        found = PROPERTIES.get(word.lower())
        if found is None:
            found = frozenset(c for c in ASCII if unicodedata.category(c).startswith(word or "-"))
        if not found:
            raise _Unsupported(rf"the property `\p{{{name}}}` has no characters of topic names")
        if "i" in flags and found in (LOWER, UPPER):
            return LETTERS
        return found

    def _class(self, flags: frozenset[str]) -> frozenset[str]:
        """Return the characters of a class, whose `[` has been read; reads its `]`."""
        is_negated = self.text.startswith("^", self.position)
        self.position += is_negated
        found = self._operand(flags)
        self.position += 1
        return ASCII - found if is_negated else found

    def _operand(self, flags: frozenset[str]) -> frozenset[str]:
        """Return the characters of all that stands before the `]` of a class.

        What is right of `&&` ends at the next `&&` only while it is classes in brackets; from the
        first other member on it goes to the `]`, with what intersections it has (JDK 17).
        """
        found: frozenset[str] | None = None
        while found is None or not self.text.startswith("]", self.position):
            if self._skip_comments(flags):
                continue
            if self.position >= len(self.text):
                raise _Unsupported("unclosed class")
            if not self.text.startswith("&&", self.position):
                member = self._member(flags)
                found = member if found is None else found | member
                continue
            self.position += 2
            right: frozenset[str] = frozenset()
            if self.text[self.position : self.position + 1] in ("", "]", "&"):
                raise _Unsupported("`&&` with nothing behind it")
            while self.text[self.position : self.position + 1] not in ("", "]", "&"):
                if self.text[self.position] == "[":
                    right |= self._member(flags)
                elif not self._skip_comments(flags):
                    right |= self._operand(flags)
            found = right if found is None else found & right
        return found

    def _member(self, flags: frozenset[str]) -> frozenset[str]:
        """Return the characters of one part of a class: a class, an escape, a range, a letter."""
        if self.text[self.position] == "[":
            self.position += 1
            return self._class(flags)
        first = self._single(flags)
        if isinstance(first, frozenset):
            return first
        following = self.text[self.position : self.position + 2]
        if following[:1] != "-" or following[1:] in ("", "]", "["):
            return _cases(first, flags)
        self.position += 1
        last = self._single(flags)
        if isinstance(last, frozenset) or last < first:
            raise _Unsupported(f"bad range in a class, from {first!r}")
        members = map(chr, range(ord(first), min(ord(last), 127) + 1))
        return frozenset(case for member in members for case in _cases(member, flags))

    def _single(self, flags: frozenset[str]) -> str | frozenset[str]:
        """Return a character, or the set an escape stands for."""
        if self.text[self.position : self.position + 1] == "\\":
            is_property = self.text[self.position + 1 : self.position + 2] in ("p", "P")
            found = self._characters(flags if is_property else frozenset())
            return next(iter(found)) if len(found) == 1 else found
        self.position += 1
        return self.text[self.position - 1]


def _is_anchor(atom: str) -> bool:
    return atom in ("^", "$") or atom in _ANCHORS.values()


def _changed(flags: frozenset[str], change: re.Match[str]) -> frozenset[str]:
    return (flags | set(change[1])) - set(change[2] or "")


def _cases(character: str, flags: frozenset[str]) -> frozenset[str]:
    if "i" in flags and character in LETTERS:
        return frozenset((character.lower(), character.upper()))
    return frozenset(character)


def _referring(reference: str, flags: frozenset[str]) -> str:
    return f"(?i:{reference})" if "i" in flags else reference


def _emitted(characters: Iterable[str]) -> str:
    members = sorted(characters)
    if not members:
        return r"[^\s\S]"
    if len(members) == 1:
        return re.escape(members[0])
    return f"[{''.join(map(re.escape, members))}]"
