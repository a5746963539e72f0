"""The position of a streaming query, read from its checkpoint.

Spark writes `offsets/<batch>` with the ends of a micro-batch before it runs the batch, and
`commits/<batch>` after. Each file appears whole, so both can be read while the query runs (Spark:
OffsetSeqLog, CommitLog).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from urllib.parse import unquote, urlsplit

from kafkalog.datasource.offsets import Offsets, from_json
from kafkalog.errors import InvalidInputError, StorageError
from kafkalog.spark_offset_log import NO_OFFSET, OffsetLogEntry
from kafkalog.storage_engine.fs import files

_ATTEMPTS: Final = 5
"""Spark may remove the files of old batches during a read."""


@dataclass(frozen=True, slots=True)
class QueryCheckpoint:
    """A query's last batches, and the offsets that its sources of topics had reached.

    `committed` and `planned` are the next offsets after the last committed batch and the last
    planned one, by source, as the checkpoint names it (`0`, `1`). Sources with other offsets are
    left out. A batch that does not exist is -1.
    """

    query_id: str | None
    committed_batch: int
    planned_batch: int
    committed: dict[str, Offsets]
    planned: dict[str, Offsets]


def read_checkpoint(directory: str) -> QueryCheckpoint:
    """Read a checkpoint: a path, or a `file:` URI.

    Raises InvalidInputError if it is missing, its version is unknown, or it is not text, and
    StorageError.
    """
    path = _path(directory)
    if not (path / "offsets").is_dir():
        raise InvalidInputError(
            f"{path}: no checkpoint of a streaming query here (it has no directory `offsets`)"
        )
    for attempt in range(_ATTEMPTS):
        try:
            return _read(path)
        except FileNotFoundError as fault:
            if attempt + 1 == _ATTEMPTS:
                raise StorageError(f"{fault.filename}: vanished while it was read") from fault
        except OSError as fault:
            files.pass_on(fault)
            raise StorageError(f"{fault.filename}: {fault.strerror}") from fault
    raise AssertionError


def _path(directory: str) -> Path:
    if not directory.startswith("file:"):
        return Path(directory)
    return Path(unquote(urlsplit(directory).path))


def _read(path: Path) -> QueryCheckpoint:
    # List commits first: the plans of those batches exist by then.
    committed_batch = _last(path / "commits")
    planned_batch = _last(path / "offsets")
    planned = _batch(path, planned_batch)
    committed = planned if committed_batch == planned_batch else _batch(path, committed_batch)
    return QueryCheckpoint(_query_id(path), committed_batch, planned_batch, committed, planned)


def _last(directory: Path) -> int:
    """Return the last batch that has a file in the directory; -1 for none."""
    if not directory.is_dir():
        return -1
    numbers = [int(name) for name in files.list_names(directory) if name.isdecimal()]
    return max(numbers, default=-1)


def _query_id(path: Path) -> str | None:
    try:
        found = json.loads(files.read_file(path / "metadata"))
    except (FileNotFoundError, ValueError, RecursionError):
        return None
    return str(found["id"]) if isinstance(found, dict) and "id" in found else None


def _batch(path: Path, batch: int) -> dict[str, Offsets]:
    if batch < 0:
        return {}
    file = path / "offsets" / str(batch)
    try:
        sources = OffsetLogEntry.parse(_text(file)).sources
    except ValueError as fault:
        raise InvalidInputError(f"{file}: {fault}") from None
    try:
        found = {name: _offsets(text) for name, text in sources.items() if text != NO_OFFSET}
    except RecursionError:
        raise InvalidInputError(
            f"{file}: expected the offsets of a query's sources, found JSON nested too deeply"
        ) from None
    return {source: offsets for source, offsets in found.items() if offsets is not None}


def _text(file: Path) -> str:
    try:
        return files.read_file(file).decode()
    except UnicodeDecodeError as fault:
        raise InvalidInputError(
            f"{file}: expected the offsets of a query's sources in UTF-8, found another byte at "
            f"position {fault.start}"
        ) from None


def _offsets(text: str) -> Offsets | None:
    """Return the offsets of a source of topics; None for other sources."""
    try:
        nested = json.loads(text)
        return from_json(nested) if isinstance(nested, dict) else None
    except (ValueError, InvalidInputError):
        return None
