"""Kafka's compacted log for Spark, with no broker.

`open` gives a log, `copy` copies one. Importing this package loads nothing heavy: no pyarrow, no
Spark. The modules `kafkalog.cleaner`, `kafkalog.errors` and `kafkalog.sink` are loaded when first
used. Whether the kernels are compiled or run as Python is in `__compiled__` (a bool).
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if sys.platform == "win32":
    raise ImportError(
        "kafkalog: its locks and syncs are not those of this system (expected Linux or macOS, "
        "found Windows). Run Python in WSL2, or in a container."
    )

if TYPE_CHECKING:
    from kafkalog import cleaner as cleaner
    from kafkalog import errors as errors
    from kafkalog import sink as sink
    from kafkalog.cleaner.config import CleanerConfig
    from kafkalog.datasource.ktable import KTable
    from kafkalog.datasource.lag import LagListener, offsets_behind_latest
    from kafkalog.datasource.register import register
    from kafkalog.inspection.groups import group_offsets
    from kafkalog.log import KafkaLog
    from kafkalog.sink.order import in_order
    from kafkalog.sink.views.table_view import KTableView
    from kafkalog.storage_engine.copying.copy import CopiedPartition
    from kafkalog.values.columns import value_columns
    from kafkalog.values.debezium import Debezium
    from kafkalog.values.framed_value import value_bytes
    from kafkalog.values.schema_registry import SchemaRegistry
    from kafkalog.values.window_keys import window_columns

    __compiled__: bool

__all__ = [
    "Debezium",
    "KTable",
    "KTableView",
    "LagListener",
    "SchemaRegistry",
    "__compiled__",
    "__version__",
    "copy",
    "group_offsets",
    "in_order",
    "offsets_behind_latest",
    "open",
    "register",
    "value_bytes",
    "value_columns",
    "window_columns",
]

__version__ = "1.0.0rc1"

_ROOMS = ("cleaner", "errors", "sink")
_HOMES = {
    "Debezium": "values.debezium",
    "KTable": "datasource.ktable",
    "KTableView": "sink.views.table_view",
    "LagListener": "datasource.lag",
    "SchemaRegistry": "values.schema_registry",
    "group_offsets": "inspection.groups",
    "in_order": "sink.order",
    "offsets_behind_latest": "datasource.lag",
    "register": "datasource.register",
    "value_bytes": "values.framed_value",
    "value_columns": "values.columns",
    "window_columns": "values.window_keys",
}
"""The modules of names that are imported when they are first used."""


def open(
    path: str | Path | Sequence[str | Path],
    *,
    cleaner: bool | CleanerConfig = False,
    read_only: bool = False,
    create: bool = True,
    options: Mapping[str, str] | None = None,
) -> KafkaLog:
    """Open a log, creating it unless `create` is false; a context manager.

    `path` is a directory, or the URL of a log in an object store: `s3://bucket/prefix`, `gs://` or
    `az://`. Its `options` are Spark's `store.*`; secrets come from the environment.
    `cleaner=True` (or a `kafkalog.cleaner.CleanerConfig`) runs the background cleaner in this
    process until the log is closed. A Kafka broker's log directory is only read, also while the
    broker runs; so is a list of directories, of one broker or of several of a cluster. Raises
    InvalidInputError when `path` is a file or holds no log.
    """
    from kafkalog.log import KafkaLog

    return KafkaLog(path, cleaner=cleaner, read_only=read_only, create=create, options=options)


def copy(
    source: str | Path | Sequence[str | Path],
    destination: str | Path,
    topics: Collection[str] | None = None,
    *,
    source_options: Mapping[str, str] | None = None,
    destination_options: Mapping[str, str] | None = None,
    config: Mapping[str, Mapping[str, str]] | None = None,
    now_ms: int | None = None,
    progress: Callable[[int, int], None] = lambda done, of: None,
) -> list[CopiedPartition]:
    """Copy topics of a log, by default all, to another log; a later call copies what is new.

    Both are directories or URLs, as for `open`, with `store.*` options of their own. The source may
    be a broker's directory, or several. Offsets with their gaps, timestamps, headers, producers,
    transactions and log starts stay. For topics that the destination does not have, ids and configs
    stay too. If the directory does not tell the configs that a broker's topics had, `config` has
    them, by topic, or by `*` for all. A call of `progress` says how many offsets are done, and of
    how many. Returns what was added per partition. Raises InvalidInputError for a destination that
    is not a copy of the source, UnknownTopicError, CorruptBatchError, StorageError. The commits
    before the error stay.
    """
    from kafkalog.storage_engine.copying import copy as copying
    from kafkalog.storage_engine.fs import files
    from kafkalog.storage_engine.log.log import now_of
    from kafkalog.storage_engine.place import open_log

    with (
        open_log(source, read_only=True, create=False, options=source_options) as origin,
        open_log(destination, options=destination_options) as target,
    ):
        at_ms = now_of(now_ms)
        told = files.users_call(progress)
        return copying.copy(origin, target, topics, now_ms=at_ms, config=config, progress=told)


def __dir__() -> list[str]:
    """Return the names that a user may use."""
    return sorted([*__all__, *_ROOMS])


def __getattr__(name: str) -> Any:
    if name == "__compiled__":
        suffixes = importlib.machinery.EXTENSION_SUFFIXES
        sheets = Path(__file__).parent.rglob("*.pxd")
        kernels = [sheet for sheet in sheets if "kernels" in (sheet.stem, sheet.parent.name)]
        return all(any(k.with_suffix(suffix).exists() for suffix in suffixes) for k in kernels)
    if name in _HOMES:
        is_lag = _HOMES[name] == "datasource.lag"
        if is_lag and importlib.util.find_spec("pyspark") is None:
            from kafkalog.extras import install_command

            raise ModuleNotFoundError(
                f"kafkalog.{name} needs the package pyspark: {install_command('spark')}"
            )
        return getattr(importlib.import_module(f"kafkalog.{_HOMES[name]}"), name)
    if name in _ROOMS:
        return importlib.import_module(f"kafkalog.{name}")
    raise AttributeError(f"module 'kafkalog' has no attribute {name!r}")
