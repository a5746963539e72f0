"""Tell whose a directory or a bucket is that another system with Kafka's protocol has written.

- *Redpanda* has `kafka/<topic>/<partition>_<revision>/<base offset>-<term>-v1.log`. Its batches are
  not Kafka's: the header is little-endian, and has a checksum of its own.
- *Tansu* has `clusters/<name>/topics/<topic>/partitions/<number>/records/<offset>.batch` in an
  object store, or tables in PostgreSQL or SQLite.
- *AutoMQ* has its records in an object store, in a format of its own. Its directory has Kafka's
  metadata log, which `broker.metadata_log` reads.

Redpanda: storage/fs_utils, model/record.h. Tansu: tansu-storage, dynostore. AutoMQ: S3StreamRecord.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from itertools import islice
from pathlib import Path
from typing import Final

from kafkalog.storage_engine.fs import files

_REDPANDA: Final = re.compile(r"\d+-\d+-v\d+\.log")
_LEVELS: Final = 4
"""The segments of Redpanda lie so deep in its data directory."""
_LOOKED_AT: Final = 20
"""Names of a level, to stay quick in any directory."""
TANSU_CLUSTERS: Final = "clusters"
_TANSU: Final = frozenset({"groups", "producers", "topic-metadata", "topics"})
"""Names below a cluster, of which Tansu has several."""
_TO_READ: Final = (
    "kafkalog does not read it. Copy its topics with a Kafka client, or to a Kafka broker"
)


def other_system(path: Path) -> str:
    """Return whose the directory or the file is, as the end of a message; '' for no known system.

    Only names are read.
    """
    if _REDPANDA.fullmatch(path.name):
        return _said("a segment of Redpanda")
    with files.ignoring():
        if not path.is_dir():
            return ""
        if _has_redpanda(path, _LEVELS):
            return _said("a directory of Redpanda")
        for below in _directories(path / TANSU_CLUSTERS):
            if is_tansu(_names(below)):
                return tansu()
    return ""


def is_tansu(names: Collection[str]) -> bool:
    """Return whether the names below a cluster are Tansu's."""
    return len(_TANSU.intersection(names)) > 1


def tansu() -> str:
    """Return that Tansu has written it, as the end of a message."""
    return _said("storage of Tansu")


def automq() -> str:
    """Return what AutoMQ's records in the metadata of a cluster mean."""
    return (
        "the cluster was AutoMQ's: its metadata is here, and its topics' records lie in an object "
        "store, in a format that kafkalog does not read"
    )


def _said(what: str) -> str:
    return f"; it is {what}, and its format is not Kafka's: {_TO_READ}"


def _has_redpanda(path: Path, levels: int) -> bool:
    names = _names(path)
    if any(map(_REDPANDA.fullmatch, names)):
        return True
    return levels > 1 and any(_has_redpanda(each, levels - 1) for each in _directories(path))


def _names(path: Path) -> list[str]:
    with files.scan(path) as entries:
        return [entry.name for entry in islice(entries, _LOOKED_AT)]


def _directories(path: Path) -> list[Path]:
    if not path.is_dir():
        return []
    with files.scan(path) as entries:
        found = [each.name for each in islice(entries, _LOOKED_AT) if files.is_directory(each)]
    return [path / name for name in sorted(found)]
