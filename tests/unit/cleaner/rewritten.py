"""What the cleaner's writer makes of batches of which some records stay."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from kafkalog.cleaner.rewrite.batch_writer import BatchWriter
from kafkalog.cleaner.rewrite.retention_rules import Retained
from kafkalog.cleaner.state.stats import CleanerStats
from kafkalog.storage_engine.format import layout
from kafkalog.storage_engine.metadata.config import TopicConfig
from kafkalog.storage_engine.records import records
from kafkalog.storage_engine.segment.open_segment import Chunk


def rewritten(data: bytes, keep: Sequence[bool], horizon: int | None = None) -> bytes:
    """Write batches anew, each alone, with the records to keep; one that keeps none is left out.

    With a horizon those that have none get it.
    """
    path = Path("x")
    table, _, _ = records.scan_batches(data)
    found = records.index_records(data, table, path=path, file_position=0)
    flags = np.array(keep, dtype=np.bool_)
    kept = np.bincount(found.batch_index[flags], minlength=len(table))
    none = np.zeros(len(table), dtype=np.bool_)
    has_horizon = (table.attributes & layout.DELETE_HORIZON_BIT) != 0
    retained = Retained(
        keep=flags,
        kept=kept,
        tombstones=np.zeros(len(table), dtype=np.int64),
        stays_empty=none,
        gets_horizon=~has_horizon & (kept > 0) & (horizon is not None),
    )
    with tempfile.TemporaryDirectory() as directory:
        writer = BatchWriter(
            Path(directory),
            int(table.base_offsets[0]),
            TopicConfig.parse({}),
            new_delete_horizon_ms=horizon,
            merges=False,
            stats=CleanerStats("t", 0),
        )
        writer.add(Chunk(data, table, path, 0, 0, 0, 1 << 62), found, retained)
        (output,) = writer.finish(1)
        return output.path(layout.LOG).read_bytes()
