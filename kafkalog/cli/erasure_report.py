"""The report of an erasure: a JSON file for those who ask for a proof.

It has digests instead of keys, since a key in it would be an occurrence. `kafkalog erase` prints
its lines.
"""

from __future__ import annotations

import hashlib
import json
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from rich.filesize import decimal

import kafkalog
from kafkalog.cleaner.report.explain import utc_time
from kafkalog.cleaner.rewrite.erased_keys import BYTES_MIN
from kafkalog.cli.terminal.output import counted, json_row
from kafkalog.erasure.residuals import ERASE
from kafkalog.erasure.topic_files import LIVE, FileKind
from kafkalog.storage_engine.format import layout
from kafkalog.storage_engine.object_store.address import is_store_url

if TYPE_CHECKING:
    from kafkalog.cleaner.rewrite.erased_keys import ErasedKeys
    from kafkalog.erasure.erase import Erasure
    from kafkalog.erasure.occurrences import Occurrences
    from kafkalog.erasure.residuals import Residual

NOW_WARNING: Final = (
    "with --now the deletions of these keys do not stay for delete.retention.ms: a follower (a "
    "stream, a replica, a table made from the log) that has not read them by now keeps the keys "
    "for good"
)
_DIGESTS: Final = (
    "keys are given as SHA-256 digests: a guessed key can be checked against them, so if keys are "
    "personal data, the digests are too"
)
_HASHES: Final = (
    "key indexes (kl-*.keys, or a part of a .side object) hold 33 bits of a hash of each key of "
    "their segment, under a secret in the same file; they are replaced with the segment, so no "
    "hash outlives its record"
)
_PARTITIONS_SHOWN: Final = 8
_NOT_LOOKED_AT: Final = (
    "other topics of this log",
    "copies outside of this directory: replicas, backups, snapshots of the file system, sinks, "
    "tables, checkpoints and state of streaming queries",
    "blocks of the disk that removed files had, and files that a process still has open",
    "file names; values and headers in another text encoding, or compressed by their writer",
)
_NOT_LOOKED_AT_IN_STORE: Final = (
    _NOT_LOOKED_AT[0],
    "copies outside of this address: replicas and inventories of the bucket, backups, sinks, "
    "tables, checkpoints and state of streaming queries",
    "earlier versions of deleted objects, where the bucket keeps versions or has soft deletes, and "
    "unfinished multipart uploads",
    "names of objects; values and headers in another text encoding, or compressed by their writer",
)


def report(
    root: Path | str,
    topic: str,
    keys: ErasedKeys,
    before: Occurrences,
    erasure: Erasure | None,
    *,
    now: bool,
    strict: bool,
) -> dict[str, Any]:
    """Return the report; without an erasure it is that of a dry run."""
    last = before if erasure is None else erasure.after
    counts = before.by_key, last.by_key
    deletions = {} if erasure is None else erasure.deletions
    cleanings = () if erasure is None else erasure.cleanings
    return {
        "report": "kafkalog erase",
        "version": 1,
        "kafkalog": kafkalog.__version__,
        "time": utc_time(last.ended_ms),
        "timeMs": last.ended_ms,
        "path": str(root.resolve() if isinstance(root, Path) else root),
        "topic": topic,
        "dryRun": erasure is None,
        "now": now,
        "strict": strict,
        "erased": not last.residuals,
        "keys": [
            {
                "sha256": hashlib.sha256(key).hexdigest(),
                "before": counts[0][number],
                "after": None if erasure is None else counts[1][number],
            }
            for number, key in enumerate(keys.keys)
        ],
        "before": _look(before, root, is_dry=erasure is None),
        "deletionsWritten": [
            {"partition": number, "offset": first, "nextOffset": following}
            for number, (first, following) in deletions.items()
        ],
        "cleaned": [
            json_row(stats, "partition", "records_read", "records_kept", "error")
            for stats in cleanings
        ],
        "after": None if erasure is None else _look(erasure.after, root, is_dry=False),
        "deletionsLeft": [] if erasure is None else _deletions_left(erasure.after),
        "notes": [*_notes(keys, before, last, now=now, strict=strict)],
        "about": [_DIGESTS, _HASHES],
        "notLookedAt": [*(_NOT_LOOKED_AT if isinstance(root, Path) else _NOT_LOOKED_AT_IN_STORE)],
    }


def text(found: dict[str, Any]) -> str:
    """Return a report as indented JSON, with one line per key, as there may be very many."""
    keys = ",\n".join(f"    {json.dumps(key)}" for key in found["keys"])
    return (
        json.dumps({**found, "keys": []}, indent=2).replace(
            '"keys": []', f'"keys": [\n{keys}\n  ]', 1
        )
        + "\n"
    )


def _deletions_left(occurrences: Occurrences) -> list[dict[str, Any]]:
    """Return per partition the offset that followers must reach, and when its tombstones may go."""
    left: dict[int, dict[str, Any]] = {}
    for file in occurrences.files:
        number = file.file.partition
        if number is None or file.horizon_ms is None or file.file.kind not in LIVE:
            continue
        known = left.setdefault(number, {"partition": number, "nextOffset": 0, "untilMs": 0})
        known["nextOffset"] = max(known["nextOffset"], file.last_offset + 1)
        known["untilMs"] = max(known["untilMs"], file.horizon_ms)
    return [
        {**left[number], "untilMs": None}
        if left[number]["untilMs"] == layout.INT64_MAX
        else left[number]
        for number in sorted(left)
    ]


def _look(occurrences: Occurrences, root: Path | str, *, is_dry: bool) -> dict[str, Any]:
    return {
        "began": utc_time(occurrences.began_ms),
        "beganMs": occurrences.began_ms,
        "ended": utc_time(occurrences.ended_ms),
        "endedMs": occurrences.ended_ms,
        "asOf": {
            "journalRecord": occurrences.record_number,
            "highWatermarks": {str(n): end for n, end in occurrences.high_watermarks.items()},
        },
        "files": occurrences.file_count,
        "bytes": occurrences.bytes,
        "records": occurrences.records,
        "recordsFound": occurrences.found,
        "recordsThatMention": occurrences.mentions,
        "kinds": [
            {
                "kind": str(total.kind),
                "how": "records" if total.kind.has_batches else "bytes",
                "files": total.files,
                "bytes": total.bytes,
                "records": total.records,
                "recordsFound": total.found,
            }
            for total in occurrences.by_kind
        ],
        "left": [_left(one, root, is_dry=is_dry) for one in occurrences.residuals],
    }


def _left(one: Residual, root: Path | str, *, is_dry: bool) -> dict[str, Any]:
    return {
        "file": _name(one, root),
        "partition": one.partition,
        "what": one.sentence,
        "until": None if one.until_ms is None else utc_time(one.until_ms),
        "untilMs": one.until_ms,
        "remedy": "run without --dry-run" if is_dry and one.remedy == ERASE else one.remedy,
    }


def _name(one: Residual, root: Path | str) -> str:
    is_below = isinstance(root, Path) and one.path.is_relative_to(root)
    return str(one.path.relative_to(root)) if is_below else str(one.path)


def _notes(
    keys: ErasedKeys, before: Occurrences, last: Occurrences, *, now: bool, strict: bool
) -> Iterator[str]:
    nowhere = len(keys) - len(before.by_key)
    if nowhere:
        which = _which(nowhere, keys)
        yield f"{which} found nowhere before: is the spelling right, and --encoding?"
    if now:
        yield NOW_WARNING
    if last.mentions and not strict:
        verb = "of another key has" if last.mentions == 1 else "of other keys have"
        yield (
            f"{counted(last.mentions, 'record')} {verb} the bytes of a key in key, value or "
            "headers; that is not an occurrence of its own record (with --strict it counts as one)"
        )
    if keys.mention_gap:
        yield f"values and headers of other records were not searched: {keys.mention_gap}"
    short = len(keys) - len(keys.searched)
    if short:
        yield (
            f"{_which(short, keys)} compared with the keys of records alone: as bytes of other "
            f"files only those are looked for that have {BYTES_MIN}, six of them neither 00 nor FF"
        )
    if any(file.file.kind is FileKind.STAGED_FOR_ANY and file.found for file in last.files):
        yield (
            "a file that a task has staged does not name its topics: what was found in one in the "
            "root may be another topic's"
        )


def _which(count: int, keys: ErasedKeys) -> str:
    """Return `the key was`, `1 of 2 keys was`, `2 of 2 keys were`."""
    if len(keys) == 1:
        return "the key was"
    return f"{count} of {len(keys)} keys {'was' if count == 1 else 'were'}"


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
    unit = "commit {}" if is_store_url(path) else "record {} of the journal"
    yield f"as of    {_as_of(look, found['topic'], unit)}"
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


def _as_of(look: dict[str, Any], topic: str, unit: str) -> str:
    """Return `record 7 of the journal (t-0 to offset 5, t-1 to offset 8)`, or `commit 7 (...)`."""
    as_of = look["asOf"]
    ends = [f"{topic}-{number} to offset {end}" for number, end in as_of["highWatermarks"].items()]
    if as_of["journalRecord"] is None:
        return _listed(ends)
    return f"{unit.format(as_of['journalRecord'])} ({_listed(ends)})"


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
