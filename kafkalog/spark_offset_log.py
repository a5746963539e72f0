"""Spark's offset log: what a checkpoint's `offsets/<batch>` says of a micro-batch.

Spark writes the file before it runs the micro-batch, and again for no other: a retry has the same
ends. Format v1 has a line per source, in their order. Format v2 names each source on its line, by
its number or by the name that the user gave it, in any order (Spark: OffsetSeqLog, OffsetMap;
SPARK-54583, SPARK-56968).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Final, NamedTuple

NO_OFFSET: Final = "-"
"""In the place of a source that has nothing yet."""


class OffsetLogEntry(NamedTuple):
    """The ends of a micro-batch's sources."""

    sources: dict[str, str]
    """The JSON of each end, or `-`, by the source's name; a source without one has its number."""
    planned_ms: int | None
    """When Spark planned it; None if it does not say."""

    @classmethod
    def parse(cls, text: str) -> OffsetLogEntry:
        """Parse the text of the file; raises ValueError for an unknown version."""
        # Not splitlines(): it also splits at characters that JSON may hold.
        version, metadata, *lines = [*text.split("\n"), ""]
        lines = [line for line in lines if line]
        if version == "v1":
            sources = {str(place): line for place, line in enumerate(lines)}
        elif version == "v2":
            sources = {name: end for name, _, end in (line.partition(":") for line in lines)}
        else:
            raise ValueError(
                f"expected the version v1 or v2 of a query's offsets, found {version[:20]!r}"
            )
        return cls(sources, _planned_ms(metadata))

    @property
    def file_sources(self) -> dict[str, int]:
        """The sources of files, each with the number of its last list of files; -1 for none."""
        return {
            name: number
            for name, end in self.sources.items()
            if (number := _log_offset(end)) is not None
        }

    def ends(self, lists: Mapping[str, str]) -> str:
        """Return the number of sources, a hyphen, and 32 hex digits that no other ends have.

        The order of the sources doesn't matter, nor does that of the keys in their JSON. The end of
        a source of files is only a number, so `lists` has the files behind it, by source.
        """
        canonical = {name: _canonical(end) for name, end in self.sources.items()}
        canonical |= {f"files of {name}": listed for name, listed in lists.items()}
        text = json.dumps(canonical, sort_keys=True, separators=(",", ":"))
        digest = hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
        return f"{len(self.sources)}-{digest}"


def listed_files(text: str, number: int) -> str:
    """Return the files of one list of a source of files, in order, from the text of its log.

    A compacted file of the log has earlier lists too (Spark: FileStreamSourceLog). Raises
    ValueError for a line that is not JSON.
    """
    found = []
    for line in text.split("\n"):
        if f'"batchId":{number}' not in line:  # cheaper than to parse all lines
            continue
        entry = json.loads(line)
        if isinstance(entry, dict) and entry.get("batchId") == number:
            found.append(_canonical(line))
    return "\n".join(sorted(found))


def _log_offset(end: str) -> int | None:
    try:
        found = json.loads(end)
    except (ValueError, RecursionError):
        return None
    if not isinstance(found, dict) or found.keys() != {"logOffset"}:
        return None
    return found["logOffset"] if type(found["logOffset"]) is int else None


def _canonical(end: str) -> str:
    try:
        return json.dumps(json.loads(end), sort_keys=True, separators=(",", ":"))
    except (ValueError, RecursionError):
        return end


def _planned_ms(metadata: str) -> int | None:
    try:
        found = json.loads(metadata)["batchTimestampMs"]
    except (ValueError, LookupError, TypeError, RecursionError):
        return None
    return found if type(found) is int and found > 0 else None
