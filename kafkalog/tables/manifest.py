"""The manifest of a materialized table: its files, and their moment.

A location has `manifest-<20 digits>.json`, made once, and `data/<version>-<random>/*.parquet`. The
manifest with the highest number counts. The number of a file's directory is that of the manifest
for which it was written, so no later manifest than that names it for the first time.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, Self

from kafkalog.errors import StorageError
from kafkalog.tables.table_moment import TableMoment

FORMAT: Final = 1
_PREFIX, _SUFFIX, _DIGITS = "manifest-", ".json", 20
_BROKEN = (ValueError, TypeError, LookupError, AttributeError, RecursionError)


class TableFile(NamedTuple):
    """A Parquet file of a table, its path below the location."""

    path: str
    rows: int
    size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """One version of a table."""

    version: int
    moment: TableMoment
    made_ms: int
    definition: Mapping[str, Any]
    """The arguments from which the columns come."""
    schema: Mapping[str, Any]
    """The columns of the files, as Spark's StructType writes them in JSON."""
    columns: Sequence[str]
    """The columns of the table; the files have others too if these lack one of the next three."""
    place_columns: Sequence[str]
    """The columns with a row's key, partition and offset."""
    readers: Sequence[str]
    """The readers' schemas that a registry gave for the columns."""
    files: Sequence[TableFile]
    deletions: Sequence[TableFile]
    """The files with the versions of deleted rows, if rows have versions."""

    @property
    def paths(self) -> set[str]:
        """The paths of all files."""
        return {file.path for file in (*self.files, *self.deletions)}

    def encode(self) -> bytes:
        """Return the content of the manifest's file."""
        content = {
            "format": FORMAT,
            "version": self.version,
            **self.moment.as_json(),
            "made_ms": self.made_ms,
            "definition": self.definition,
            "schema": self.schema,
            "columns": [*self.columns],
            "place_columns": [*self.place_columns],
            "readers": [*self.readers],
            "files": [file._asdict() for file in self.files],
            "deletions": [file._asdict() for file in self.deletions],
        }
        return json.dumps(content).encode()

    @classmethod
    def decode(cls, where: str, data: bytes) -> Self:
        """Return the manifest in a file. Raises StorageError, also for an unknown format."""
        try:
            given = json.loads(data)
            if given["format"] != FORMAT:
                raise StorageError(
                    f"{where}: the manifest of a materialized table has another format (expected "
                    f"{FORMAT}, found {given['format']}). Use the release that wrote it."
                )
            return cls(
                version=int(given["version"]),
                moment=TableMoment.of_json(given),
                made_ms=int(given["made_ms"]),
                definition=dict(given["definition"]),
                schema=dict(given["schema"]),
                columns=[*map(str, given["columns"])],
                place_columns=[*map(str, given["place_columns"])],
                readers=[*map(str, given.get("readers", []))],
                files=_files(given["files"]),
                deletions=_files(given.get("deletions", [])),
            )
        except _BROKEN as fault:
            raise StorageError(
                f"{where}: this is not the manifest of a materialized table ({fault!r}). Remove "
                "the location, and materialize the table again."
            ) from fault


def _files(given: Sequence[Mapping[str, Any]]) -> list[TableFile]:
    return [TableFile(each["path"], int(each["rows"]), int(each["size"])) for each in given]


def manifest_name(version: int) -> str:
    """Return the name of a version's manifest."""
    return f"{_PREFIX}{version:0{_DIGITS}}{_SUFFIX}"


def version_of_manifest(name: str) -> int | None:
    """Return the version whose manifest has this name; None for another file."""
    digits = name.removeprefix(_PREFIX).removesuffix(_SUFFIX)
    is_one = len(digits) == _DIGITS and digits.isdecimal() and digits.isascii()
    return int(digits) if is_one and name == manifest_name(int(digits)) else None


def version_of_data(path: str) -> int | None:
    """Return the version for which a file, or its directory, was written; None for another one."""
    kind, _, rest = path.partition("/")
    digits = rest.partition("-")[0]
    return int(digits) if kind == "data" and digits.isdecimal() and digits.isascii() else None
