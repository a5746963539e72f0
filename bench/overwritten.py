"""A log of records of 100 bytes whose keys are overwritten: what cleaners are compared on.

Keys are numbers of eight digits, values JSON documents of 92 bytes, batches 16 KiB before
compression, as Kafka's producer fills them. The last segment is closed: all can be cleaned.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from kafkalog.storage_engine.directory.directory_log import DirectoryLog
from kafkalog.storage_engine.format import layout
from kafkalog.storage_engine.log.log import Log

__all__ = ["TOPIC", "append", "build", "digest", "link", "partition_of", "roll", "table"]

Int64s = npt.NDArray[np.int64]

TOPIC: Final = "t"
NOW_MS: Final = 1_700_000_000_000
BATCH_SIZE: Final = 16 * 1024
STEP: Final = 200_000
"""Records of one commit."""
_VALUE: Final = (
    b'{"id": 00000000, "balance": 0000000, "status": "active", "updated": 0000000000000, "x": 0.75}'
)
_SIZE: Final = 92


def build(root: Path, numbers: Int64s, config: Mapping[str, str]) -> int:
    """Write a log of one record for each number, the number being its key; returns its end."""
    with DirectoryLog(root) as engine:
        engine.create_topic(TOPIC, 1, {"cleanup.policy": "compact", **config})
        append(engine, numbers)
        return roll(engine)


def append(engine: Log, numbers: Int64s) -> None:
    """Append one record for each number."""
    start = engine.describe(TOPIC).partitions[0].high_watermark
    for first in range(0, len(numbers), STEP):
        part = numbers[first : first + STEP]
        columns = table(part, start + first)
        engine.append(TOPIC, columns, now_ms=NOW_MS + start + first, batch_size=BATCH_SIZE)


def roll(engine: DirectoryLog) -> int:
    """Close the active segment; returns the log's end."""
    with engine.transaction() as transaction:
        transaction.roll(TOPIC, 0, NOW_MS)
        transaction.publish(NOW_MS)
    return engine.describe(TOPIC).partitions[0].high_watermark


def table(numbers: Int64s, start: int) -> pa.Table:
    """Return rows with these numbers as keys, which will have the offsets from `start` on."""
    count = len(numbers)
    values = np.empty((count, _SIZE), dtype=np.uint8)
    values[:] = np.frombuffer(_VALUE[:_SIZE], dtype=np.uint8)
    dice = np.random.default_rng(start)
    _write(values[:, 7:15], numbers)
    _write(values[:, 28:35], dice.integers(0, 10_000_000, count))
    _write(values[:, 68:81], NOW_MS + start + np.arange(count))
    keys = np.empty((count, 8), dtype=np.uint8)
    _write(keys, numbers)
    return pa.table({"key": _column(keys), "value": _column(values)})


def _write(digits: npt.NDArray[np.uint8], numbers: Int64s) -> None:
    width = digits.shape[1]
    for place in range(width):
        digits[:, width - 1 - place] = ord("0") + numbers // 10**place % 10


def _column(rows: npt.NDArray[np.uint8]) -> Any:
    count, width = rows.shape
    places = width * np.arange(count + 1, dtype=np.int32)
    data = [pa.py_buffer(places.tobytes()), pa.py_buffer(rows.tobytes())]
    return pa.Array.from_buffers(pa.binary(), count, [None, *data])


def partition_of(root: Path) -> Path:
    """Return the directory of the partition."""
    return root / f"{TOPIC}-0"


def link(source: Path, target: Path) -> Path:
    """Copy a log; what is never written again, closed segments, is linked. Returns the copy."""

    def put(from_: str, to: str) -> None:
        if from_.endswith(layout.LOG) and Path(from_).stat().st_size:
            os.link(from_, to)
        else:
            shutil.copy2(from_, to)

    shutil.copytree(source, target, copy_function=put)
    return target


def digest(batches: Iterable[pa.RecordBatch]) -> tuple[int, str]:
    """Return how many records there are, and a digest of their offsets, keys and values.

    None of them may be null.
    """
    count = 0
    digests = {name: hashlib.blake2b() for name in ("offset", "key", "value", "sizes")}
    for batch in batches:  # which the two logs have in different places
        count += batch.num_rows
        digests["offset"].update(batch["offset"].to_numpy(zero_copy_only=False).tobytes())
        sizes = np.empty((batch.num_rows, 2), dtype=np.int32)
        for number, name in enumerate(("key", "value")):
            column = batch[name]
            places = np.frombuffer(column.buffers()[1], dtype=np.int32)[column.offset :]
            places = places[: len(column) + 1]
            sizes[:, number] = np.diff(places)
            digests[name].update(memoryview(column.buffers()[2])[places[0] : places[-1]])
        digests["sizes"].update(sizes.tobytes())
    return count, "-".join(found.hexdigest()[:16] for found in digests.values())
