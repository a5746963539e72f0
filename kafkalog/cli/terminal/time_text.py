"""A time as it is typed and shown.

Typed, it is a date, a time with its zone, epoch milliseconds, or an age.
"""

from __future__ import annotations

import re
from datetime import UTC, datetime
from typing import Final

from kafkalog.errors import InvalidInputError

UNITS: Final = {"ms": 1, "s": 1_000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}
_AGO: Final = re.compile(r"-([0-9]{1,12})(ms|s|m|h|d)")
_EPOCH: Final = re.compile(r"[0-9]{1,18}")
_DATE: Final = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}")
_FORMS: Final = (
    "2026-11-22 (midnight in UTC), 2026-11-22T10:00:00Z, epoch milliseconds, or how long ago: "
    "-90s, -15m, -1h, -7d"
)


def utc_text(time_ms: int) -> str:
    """Return a time (epoch ms) in UTC, or its milliseconds outside Python's calendar."""
    try:
        moment = datetime.fromtimestamp(time_ms / 1000, UTC)
    except (ValueError, OverflowError, OSError):
        return str(time_ms)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def epoch_ms(text: str, *, now_ms: int, option: str) -> int:
    """Return a time in epoch milliseconds (UTC midnight for a date); 0 for one before 1970.

    Raises InvalidInputError for a text of another form, and for a time without a zone, which would
    differ between machines. The error names the option.
    """
    ago = _AGO.fullmatch(text)
    if ago is not None:
        return max(now_ms - int(ago[1]) * UNITS[ago[2]], 0)
    if _EPOCH.fullmatch(text):
        return int(text)
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise InvalidInputError(f"{option} {text!r}: expected a moment: {_FORMS}") from None
    if _DATE.fullmatch(text):
        moment = moment.replace(tzinfo=UTC)
    if moment.tzinfo is None:
        raise InvalidInputError(
            f"{option} {text!r}: has no zone: end it in Z (UTC), or in +01:00; a moment is {_FORMS}"
        )
    return max(round(moment.timestamp() * 1000), 0)
