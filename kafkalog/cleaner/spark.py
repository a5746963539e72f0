"""Cleaning as a Spark job, with one task per partition.

It is for logs with so many partitions that one machine's background cleaner takes too long. The
tasks take the locks of every cleaner, so that a background cleaner may run, and Spark may repeat a
task. All executors need kafkalog and the same file system, with locks (`kafkalog status` shows
whether it has them). A log in an object store needs no locks: it is enough that all have access.
There the driver regroups first. It works with Spark Connect, and never imports pyspark.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kafkalog.cleaner.config import CleanerConfig
from kafkalog.cleaner.schedule.manager import check_compacted, retain, sweep
from kafkalog.cleaner.schedule.manager import clean as clean_here
from kafkalog.cleaner.schedule.scheduler import choose
from kafkalog.cleaner.shelves import shelf_of
from kafkalog.cleaner.state.stats import CleanerStats
from kafkalog.errors import InvalidInputError
from kafkalog.storage_engine.fs.clock import now_ms
from kafkalog.storage_engine.place import open_log

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import SparkSession

    from kafkalog.cleaner.shelf import Shelf
    from kafkalog.storage_engine.log.log import Log
    from kafkalog.storage_engine.object_store.address import StoreAddress

_SCHEMA = "stats string"


def clean(
    spark: SparkSession,
    path: str | Path,
    topics: Sequence[str] | None = None,
    force: bool = False,
    *,
    config: CleanerConfig | None = None,
    options: Mapping[str, str] | None = None,
) -> list[CleanerStats]:
    """Clean what is due in some or all compacted topics; with `force` all that may be cleaned.

    The filthiest partitions come first. Each task has the whole memory budget of `config`. Then
    the driver applies retention, and sweeps. `options` are those named `store.*`. Returns one
    entry per partition that was cleaned or failed; its `error` has the reason. Raises
    InvalidInputError for a topic that is not compacted, UnknownTopicError, LockedByBrokerError.
    """
    with open_log(path, create=False, options=options) as log:
        names = _names(log, topics)
        shelf = shelf_of(log)
        results, partitions = _chosen(shelf, names, force)
        results += _run(spark, shelf.place, partitions, force, config or CleanerConfig())
        for name in names:
            retain(log, name, now_ms=now_ms(), is_skipped=lambda _: False)
        sweep(log, now_ms=now_ms())
    return results


def _chosen(
    shelf: Shelf, names: Sequence[str | None], force: bool
) -> tuple[list[CleanerStats], list[tuple[str, int]]]:
    """Return the partitions that failed already, and those to clean."""
    failed = [
        stats for name in names for stats in shelf.prepare(name, force=force, now_ms=now_ms())
    ]
    places = {(stats.topic, stats.partition) for stats in failed}
    moment = shelf.moment(now_ms())
    found = [place for name in names for place in choose(moment, name, force=force).partitions]
    return failed, [place for place in found if place not in places]


def _names(log: Log, topics: Sequence[str] | None) -> list[str | None]:
    if topics is None:
        return [None]
    if isinstance(topics, str):
        raise InvalidInputError(f"topics: expected a list of names, found the text {topics!r}")
    for name in topics:
        check_compacted(log, name)
    return list(dict.fromkeys(topics))


def _run(
    spark: SparkSession,
    place: str | StoreAddress,
    partitions: list[tuple[str, int]],
    force: bool,
    config: CleanerConfig,
) -> list[CleanerStats]:
    if not partitions:
        return []
    places = spark.range(0, len(partitions), 1, len(partitions))  # one in each task
    work = partial(_clean_places, place, partitions, force, config)
    rows = places.mapInArrow(work, _SCHEMA).collect()
    return [CleanerStats(**json.loads(row[0])) for row in rows]


def _clean_places(
    root: str | StoreAddress,
    partitions: Sequence[tuple[str, int]],
    force: bool,
    config: CleanerConfig,
    batches: Iterable[pa.RecordBatch],
) -> Iterator[Any]:
    """In a task, clean the partitions whose numbers its rows hold."""
    import pyarrow as pa

    for batch in batches:
        found: list[str] = []
        with open_log(root, create=False) as log:
            for place in batch.column(0).to_pylist():
                topic, partition = partitions[place]
                found += [
                    json.dumps(dataclasses.asdict(stats))
                    for stats in clean_here(
                        log,
                        topic,
                        partition=partition,
                        force=force,
                        now_ms=now_ms(),
                        config=config,
                    )
                ]
        yield pa.record_batch({"stats": pa.array(found, pa.string())})
