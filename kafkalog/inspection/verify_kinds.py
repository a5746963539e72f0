"""Report links, pipes, devices and huge files under the names of a log's files.

Readers and writers refuse them where they need the file, so nobody waits for one, or takes its
bytes for the log's.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from kafkalog.inspection.finding import Finding
from kafkalog.storage_engine.format import layout
from kafkalog.storage_engine.fs import files


def verify_kinds(directory: Path, names: Iterable[str]) -> Iterator[Finding]:
    """Yield damage for each named file of a log that isn't a regular file, or is too large."""
    for name in names:
        path = directory / name
        try:
            files.size_of(path, as_a_whole=not _is_read_in_pieces(name))
        except files.NotOfALogError as fault:
            yield Finding(path, 0, fault.expected, fault.found)
        except FileNotFoundError:
            continue  # removed meanwhile


def _is_read_in_pieces(name: str) -> bool:
    """Return whether no reader holds a file of this name as a whole."""
    parsed = layout.parse_segment_file(name)
    return (
        name.startswith((layout.COMMIT, layout.SPILL))
        or name.endswith((layout.STAGED, layout.KEYS))
        or layout.parse_metadata_snapshot(name) is not None
        or (parsed is not None and parsed[1] == layout.LOG)
    )
