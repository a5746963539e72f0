"""The lines that `kafkalog erase` prints of its report."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from typing import Any, Final

from rich.filesize import decimal

from kafkalog.cleaner.report.explain import utc_time
from kafkalog.cli.erasure_report import NOW_WARNING
from kafkalog.cli.terminal.output import counted

_PARTITIONS_SHOWN: Final = 8


def lines(found: dict[str, Any]) -> Iterator[str]:
    """Yield the lines of a report."""
    yield _summary("before", found["before"])
    if found["dryRun"]:
        yield from _lines_left(found["before"])
    else:
        for one in found["deletionsWritten"]:
            count = counted(one["nextOffset"] - one["offset"], "deletion")
            yield f"wrote    {count} to {found['topic']}-{one['partition']}, offset {one['offset']}"
        for one in found["cleaned"]:
            text = f"{counted(one['recordsRead'], 'record')} read, {one['recordsKept']} kept"
            yield f"cleaned  {found['topic']}-{one['partition']}: {one['error'] or text}"
        yield _summary("after", found["after"])
        yield from _lines_left(found["after"])
    for text in found["notes"]:
        if text != NOW_WARNING:  # printed before
            yield f"note     {text}"


def last_lines(found: dict[str, Any], path: str) -> Iterator[str]:
    """Yield the result and the next steps; `path` is the log's, as it was given."""
    look = found["before"] if found["dryRun"] else found["after"]
    yield f"as of    {_as_of(look, found['topic'])}"
    count = counted(len(found["keys"]), "key")
    if found["dryRun"]:
        there = sum(key["before"] > 0 for key in found["keys"])
        if there:
            yield f"{counted(there, 'key')} found; nothing was changed; run without --dry-run"
        elif found["erased"]:
            yield f"no occurrence of {count}; nothing was changed"
        else:
            yield "no key found, but not all could be looked at, see above; nothing was changed"
    elif found["erased"]:
        yield f"erased   no occurrence of {count} is left in {path}"
    elif found["deletionsLeft"]:
        yield from _next_steps(found, path)


def _next_steps(found: dict[str, Any], path: str) -> Iterator[str]:
    left = found["deletionsLeft"]
    ends = _listed([f"{found['topic']}-{one['partition']}: {one['nextOffset']}" for one in left])
    yield (
        f"next     1. kafkalog status {shlex.quote(path)} --checkpoint DIR, for every follower: is "
        f"it at these offsets, or past them? ({ends})"
    )
    times = [one["untilMs"] for one in left]
    when = "later" if None in times else f"at {utc_time(max(times))}"
    yield f"next     2. then the same command with --now; or, without it, again {when}"


def _as_of(look: dict[str, Any], topic: str) -> str:
    """Return `record 7 of the journal (t-0 to offset 5, t-1 to offset 8)`."""
    as_of = look["asOf"]
    ends = [f"{topic}-{number} to offset {end}" for number, end in as_of["highWatermarks"].items()]
    if as_of["journalRecord"] is None:
        return _listed(ends)
    return f"record {as_of['journalRecord']} of the journal ({_listed(ends)})"


def _listed(texts: list[str]) -> str:
    more = len(texts) - _PARTITIONS_SHOWN
    shown = ", ".join(texts[:_PARTITIONS_SHOWN])
    return f"{shown} and {more} more, see the report" if more > 0 else shown


def _summary(word: str, look: dict[str, Any]) -> str:
    records = (
        f"{counted(look['recordsFound'], 'record')} found" if look["left"] else "no occurrence"
    )
    kinds = ", ".join(
        f"{kind['files']} {kind['kind']} of {decimal(kind['bytes'])}" for kind in look["kinds"]
    )
    return (
        f"{word:<7}  {records}; looked at {counted(look['records'], 'record')} in "
        f"{decimal(look['bytes'])} of {counted(look['files'], 'file')} ({kinds})"
    )


def _lines_left(look: dict[str, Any]) -> Iterator[str]:
    for one in look["left"]:
        yield f"left     {one['file']}: {one['what']}"
        until = f"until {one['until']}; " if one["until"] is not None else ""
        yield f"           -> {until}{one['remedy']}"
