"""The application transactions of a Delta table, where an upsert keeps its positions.

Delta's log stores the last version per application id, in the commit that carries the rows. An
upsert uses

    kafkalog/<query id>                        version: the micro-batch's id
    kafkalog/<query id>/<topic>-<partition>    version: the partition's end offset

all with the time of the micro-batch. The first is -1 once another query has replaced the rows.

The Delta library does not list the application ids. They are read from the log's files, as the
Delta protocol lays them out: the last checkpoint and the commits after it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from kafkalog.sink.query import EndOffsets
from kafkalog.sink.upsert.position import Position

if TYPE_CHECKING:
    import pyarrow.fs
    from deltalake import DeltaTable, Transaction

    from kafkalog.sink.upsert.upsert import Batch

__all__ = [
    "ApplicationTransaction",
    "application_transactions",
    "ends_of",
    "positions_of",
    "transactions_of_batch",
]

_OURS = "kafkalog/"
_LOG = "_delta_log"
_COMMIT = re.compile(r"(\d{20})\.json")
_CHECKPOINT = re.compile(r"(\d{20})\.checkpoint(?:\.(\d{10})\.(\d{10})|\.[0-9a-f-]{36})?\.parquet")
_ATTEMPTS = 3
_REPLACED = -1


class ApplicationTransaction(NamedTuple):
    """The last version that an application has committed."""

    version: int
    time_ms: int


def application_transactions(
    table: DeltaTable, storage_options: Mapping[str, str] | None = None
) -> dict[str, ApplicationTransaction]:
    """Return the transactions of upserts, by application id, at the table's version or a later one.

    Raises FileNotFoundError if files of the log are missing, and the faults of reading them.
    """
    from deltalake.fs import DeltaStorageHandler
    from pyarrow.fs import PyFileSystem

    handler = DeltaStorageHandler(table.table_uri, dict(storage_options or {}))
    files: pyarrow.fs.FileSystem = PyFileSystem(handler)
    for attempt in range(_ATTEMPTS):
        try:
            return _read(files, table.version())
        except FileNotFoundError:  # a new checkpoint let another process remove older commits
            if attempt == _ATTEMPTS - 1:
                raise
    raise AssertionError


def transactions_of_batch(batch: Batch, replaced: Iterable[str] = ()) -> list[Transaction]:
    """Return a commit's transactions; they end the positions of the queries `replaced`."""
    from deltalake import Transaction

    own = f"{_OURS}{batch.query_id}"
    ends = [
        Transaction(f"{own}/{topic}-{partition}", offset, batch.now_ms)
        for topic, partitions in batch.end_offsets.items()
        for partition, offset in partitions.items()
    ]
    ended = [Transaction(f"{_OURS}{name}", _REPLACED, batch.now_ms) for name in replaced]
    return [Transaction(own, batch.batch_id, batch.now_ms), *ends, *ended]


def positions_of(found: Mapping[str, ApplicationTransaction]) -> dict[str, Position]:
    """Return each query's position, by query id; only the last micro-batch's partitions count."""
    return {
        query_id: Position(last.version, ends_of(found, query_id, last.time_ms), last.time_ms)
        for name, last in found.items()
        if "/" not in (query_id := name.removeprefix(_OURS)) and last.version != _REPLACED
    }


def ends_of(
    found: Mapping[str, ApplicationTransaction], query_id: str, time_ms: int | None = None
) -> EndOffsets:
    """Return the end offsets of a query: all that it ever had, or those recorded at `time_ms`."""
    ends: EndOffsets = {}
    start = f"{_OURS}{query_id}/"
    for name, last in found.items():
        if name.startswith(start) and time_ms in {None, last.time_ms}:
            topic, _, partition = name.removeprefix(start).rpartition("-")
            ends.setdefault(topic, {})[partition] = last.version
    return ends


def _read(files: pyarrow.fs.FileSystem, least: int) -> dict[str, ApplicationTransaction]:
    from pyarrow.fs import FileSelector

    names = [info.base_name for info in files.get_file_info(FileSelector(_LOG))]
    base, checkpoint = _last_checkpoint(names)
    found: dict[str, ApplicationTransaction] = {}
    for name in checkpoint:
        for action in _of_checkpoint(files, f"{_LOG}/{name}"):
            _note(found, action)
    present = {int(match[1]) for match in map(_COMMIT.fullmatch, names) if match}
    for number in range(base + 1, max(least, *present, 0) + 1):
        if number not in present:
            raise FileNotFoundError(f"{_LOG}/{number:020d}.json is missing")
        for action in _of_commit(files, f"{_LOG}/{number:020d}.json"):
            _note(found, action)
    return found


def _last_checkpoint(names: Sequence[str]) -> tuple[int, list[str]]:
    """Return the version and files of the last complete checkpoint; (-1, []) without one."""
    whole: dict[int, list[str]] = {}
    parts: dict[tuple[int, int], list[str]] = {}
    for name in names:
        match = _CHECKPOINT.fullmatch(name)
        if match is None:
            continue
        if match[2] is None:
            whole[int(match[1])] = [name]
        else:
            parts.setdefault((int(match[1]), int(match[3])), []).append(name)
    for (number, count), found in parts.items():
        if len(found) == count:
            whole.setdefault(number, found)
    return max(whole.items(), default=(-1, []))


def _of_checkpoint(files: pyarrow.fs.FileSystem, path: str) -> Iterator[dict[str, Any]]:
    import pyarrow.parquet as pq

    with files.open_input_file(path) as file:
        content = pq.ParquetFile(file)
        if "txn" not in content.schema_arrow.names:
            return
        column = content.read(columns=["txn"]).column("txn")
        yield from column.drop_null().to_pylist()


def _of_commit(files: pyarrow.fs.FileSystem, path: str) -> Iterator[dict[str, Any]]:
    with files.open_input_file(path) as file:
        content = file.read()
    for line in content.splitlines():
        if b'"txn"' in line and (action := json.loads(line).get("txn")) is not None:
            yield action


def _note(found: dict[str, ApplicationTransaction], action: Mapping[str, Any]) -> None:
    name = action["appId"]
    if name is not None and name.startswith(_OURS):
        time_ms = action.get("lastUpdated") or 0
        found[name] = ApplicationTransaction(action["version"], time_ms)
