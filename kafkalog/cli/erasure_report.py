"""The report of an erasure, for those who ask for a proof: a JSON file, and the lines to read.

No key stands in it, only digests: the report would be a trace itself.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

import kafkalog
from kafkalog.cleaner.explain import moment
from kafkalog.cli.output import counted

if TYPE_CHECKING:
    from pathlib import Path

    from kafkalog.cleaner.erasure.erase import Erasure
    from kafkalog.cleaner.erasure.keys import ErasedKeys
    from kafkalog.cleaner.erasure.remains import Remainder
    from kafkalog.cleaner.erasure.traces import Traces

__all__ = ["NOW_WARNING", "lines", "report"]

NOW_WARNING: Final = (
    "with --now the deletions of these keys do not stay for delete.retention.ms: a follower (a "
    "stream, a replica, a table made from the log) that has not read them by now keeps the keys "
    "for good"
)
_DIGESTS: Final = (
    "keys stand here as SHA-256 digests: who can guess a key can tell that it is meant, so where "
    "keys are personal data the digests are too"
)
_HASHES: Final = (
    "key indexes (kl-*.keys) hold 33 bits of a hash of each key of their segment, under a secret "
    "that stands in them; they are replaced with it, so without a record there is no hash"
)
_NOT_LOOKED_AT: Final = (
    "other topics of this log",
    "copies outside of this directory: replicas, backups, snapshots of the file system, sinks, "
    "tables, checkpoints and state of streaming queries",
    "blocks of the disk that removed files had, and files that a process still has open",
    "file names; values and headers as text in another encoding, or compressed by who wrote them",
)


def report(
    root: Path,
    topic: str,
    keys: ErasedKeys,
    before: Traces,
    erasure: Erasure | None,
    *,
    now: bool,
    strict: bool,
) -> dict[str, Any]:
    """Return the report; without an erasure it is that of a dry run."""
    last = before if erasure is None else erasure.after
    counts = before.by_key, last.by_key
    found: dict[str, Any] = {
        "report": "kafkalog erase",
        "version": 1,
        "kafkalog": kafkalog.__version__,
        "time": moment(last.ended_ms),
        "timeMs": last.ended_ms,
        "path": str(root.resolve()),
        "topic": topic,
        "dryRun": erasure is None,
        "now": now,
        "strict": strict,
        "erased": not last.remains,
        "keys": [
            {
                "sha256": hashlib.sha256(key).hexdigest(),
                "before": counts[0][number],
                "after": None if erasure is None else counts[1][number],
            }
            for number, key in enumerate(keys.keys)
        ],
        "before": _look(before, root),
        "deletionsWritten": [],
        "cleaned": [],
        "after": None,
        "notes": [*_notes(keys, before, last, now=now, strict=strict)],
        "about": [_DIGESTS, _HASHES],
        "notLookedAt": list(_NOT_LOOKED_AT),
    }
    if erasure is not None:
        found["deletionsWritten"] = [
            {"partition": number, "offset": first, "nextOffset": following}
            for number, (first, following) in erasure.deletions.items()
        ]
        found["cleaned"] = [
            {
                "partition": stats.partition,
                "recordsRead": stats.records_read,
                "recordsKept": stats.records_kept,
                "error": stats.error,
            }
            for stats in erasure.cleanings
        ]
        found["after"] = _look(erasure.after, root)
    return found


def _look(traces: Traces, root: Path) -> dict[str, Any]:
    return {
        "began": moment(traces.began_ms),
        "beganMs": traces.began_ms,
        "ended": moment(traces.ended_ms),
        "endedMs": traces.ended_ms,
        "files": len(traces.files),
        "bytes": traces.bytes,
        "records": traces.records,
        "recordsFound": traces.found,
        "recordsThatMention": traces.mentions,
        "kinds": [
            {
                "kind": str(total.kind),
                "how": "records" if total.kind.has_batches else "bytes",
                "files": total.files,
                "bytes": total.bytes,
                "records": total.records,
            }
            for total in traces.by_kind
        ],
        "left": [_left(one, root) for one in traces.remains],
    }


def _left(one: Remainder, root: Path) -> dict[str, Any]:
    return {
        "file": _name(one, root),
        "partition": one.partition,
        "what": one.sentence,
        "until": None if one.until_ms is None else moment(one.until_ms),
        "untilMs": one.until_ms,
        "remedy": one.remedy,
    }


def _name(one: Remainder, root: Path) -> str:
    is_below = one.path.is_relative_to(root)
    return str(one.path.relative_to(root)) if is_below else str(one.path)


def _notes(
    keys: ErasedKeys, before: Traces, last: Traces, *, now: bool, strict: bool
) -> Iterator[str]:
    nowhere = len(keys) - len(before.by_key)
    if nowhere:
        count = f"{nowhere} of {counted(len(keys), 'key')}"
        yield f"{count} found nowhere before: is the spelling right, and --encoding?"
    if now:
        yield NOW_WARNING
    if last.mentions and not strict:
        yield (
            f"{counted(last.mentions, 'record')} of other keys with the bytes of a key in key, "
            "value or headers; that is no trace of its own record (with --strict it counts as one)"
        )
    if not keys.is_mention_searched:
        yield "values and headers of other records were not searched: too many keys, or too short"
    short = len(keys) - len(keys.searched)
    if short:
        yield (
            f"{short} of {counted(len(keys), 'key')} compared with the keys of records alone: as "
            "bytes of other files only those are looked for that have eight, six of them neither "
            "00 nor FF"
        )


def lines(found: dict[str, Any]) -> Iterator[str]:
    """Yield a report as lines to read."""
    yield _summary("before", found["before"])
    if found["dryRun"]:
        yield from _lines_left(found["before"])
    else:
        for one in found["deletionsWritten"]:
            count = counted(one["nextOffset"] - one["offset"], "deletion")
            yield f"wrote    {count} to {found['topic']}-{one['partition']}, offset {one['offset']}"
        for one in found["cleaned"]:
            text = f"{one['recordsRead']} records read, {one['recordsKept']} kept"
            yield f"cleaned  {found['topic']}-{one['partition']}: {one['error'] or text}"
        yield _summary("after", found["after"])
        yield from _lines_left(found["after"])
    for text in found["notes"]:
        if text != NOW_WARNING:  # that was told before
            yield f"note     {text}"


def _summary(word: str, look: dict[str, Any]) -> str:
    records = f"{counted(look['recordsFound'], 'record')} found" if look["left"] else "no trace"
    kinds = ", ".join(f"{kind['files']} {kind['kind']}" for kind in look["kinds"])
    return (
        f"{word:<7}  {records}; looked at {counted(look['records'], 'record')} in {look['bytes']} "
        f"bytes of {counted(look['files'], 'file')} ({kinds})"
    )


def _lines_left(look: dict[str, Any]) -> Iterator[str]:
    for one in look["left"]:
        yield f"left     {one['file']}: {one['what']}"
        until = f"until {one['until']}; " if one["until"] is not None else ""
        yield f"           -> {until}{one['remedy']}"
