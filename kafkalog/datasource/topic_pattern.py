r"""`subscribePattern`: a regular expression that Python and Java read alike.

Jobs bring the Java expression that they gave to `format("kafka")`. Names of topics are plain ASCII,
and most expressions for them mean the same in both languages. A construct that only one language
has, or that means something else in the other, is refused by name: classes such as `\p{Alpha}`,
quotations `\Q...\E`, named groups, `[a&&b]`. Java: java.util.regex.Pattern.
"""

from __future__ import annotations

import re
from functools import cache
from typing import Final

from kafkalog.errors import InvalidInputError

_ESCAPES: Final = frozenset("dDwWsSbBAZtnrfaxu123456789")
"""Letters and digits that mean the same in both languages after a backslash."""
_NOT_IN_CLASSES: Final = frozenset("bBAZ123456789")
_OPERATORS: Final = frozenset({"&&", "--", "||", "~~"})
"""Sets of Java, or of a later Python, in a class of characters."""
_GROUP: Final = re.compile(r"\(\?(?:[:=!>]|<[=!]|[ims]*(?:-[ims]+)?[:)])")
_COUNT: Final = re.compile(r"\{\d+(?:,\d*)?\}")


@cache
def topic_pattern(pattern: str) -> re.Pattern[str]:
    """Compile the expression, found anywhere in a name; raises InvalidInputError."""
    construct = _refused(pattern)
    if construct is not None:
        raise InvalidInputError(
            f"subscribePattern {pattern!r}: {construct!r} does not mean the same in Python and in "
            "Java. Write it with other means, or list the topics with subscribe."
        )
    try:
        return re.compile(pattern, re.ASCII)
    except re.error as fault:
        raise InvalidInputError(
            f"subscribePattern {pattern!r}: not a regular expression of Python: {fault}"
        ) from None
    except (RecursionError, OverflowError):
        raise InvalidInputError(
            f"subscribePattern {pattern[:80]!r}: too deep or too large a regular expression"
        ) from None


def _refused(pattern: str) -> str | None:
    """Return the first construct that the languages read differently; None without one."""
    position, class_start = 0, -1
    while position < len(pattern):
        part = pattern[position : position + 2]
        is_class = class_start >= 0
        if part[0] == "\\":
            letter = part[1:]
            is_known = letter in _ESCAPES and not (is_class and letter in _NOT_IN_CLASSES)
            if letter.isalnum() and not is_known:
                return part
            position += 1
        elif is_class:
            if part in _OPERATORS or part[0] == "[":
                return part
            if part[0] == "]" and position > class_start:
                class_start = -1
        elif part[0] == "[":
            class_start = position + (2 if part == "[^" else 1)
            position = class_start - 1
        elif part == "(?" and not _GROUP.match(pattern, position):
            return pattern[position : position + 4]
        elif part[0] == "{" and not _COUNT.match(pattern, position):
            return part
        position += 1
    return None
