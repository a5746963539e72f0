"""What the machine of the model test draws: configs, rows, deaths, and who acts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

from hypothesis import strategies as st

from kafkalog.cleaner import CleanerConfig

__all__ = [
    "ACTIONS",
    "BUDGET",
    "BY",
    "CELLS",
    "CHANGE",
    "CLEANERS",
    "CONFIG",
    "DEATH",
    "EVERY_KEY",
    "KEYS",
    "MATRIX",
    "PLACE",
    "ROWS",
    "SHARE",
]

NEVER: Final = str(2**63 - 1)
KEYS: Final = st.integers(0, 7)
EVERY_KEY: Final = [b"k%d" % key for key in range(8)]
ACTIONS: Final = st.lists(
    st.tuples(
        st.integers(0, 1),
        st.one_of(
            st.booleans(), st.lists(st.one_of(KEYS, KEYS, KEYS, st.none()), min_size=1, max_size=6)
        ),
    ),
    min_size=1,
    max_size=12,
)
"""Producer, and the keys of its next batch, or whether its transaction is committed."""
BY: Final = st.integers(0, 2)
PLACE: Final = st.integers(0, 5)
SHARE: Final = st.integers(0, 8)
DEATH: Final = st.one_of(
    *[st.none()] * 8,
    *(st.tuples(st.integers(1, last), st.booleans()) for last in (8, 60)),
)
"""At which durable act, and whether it is still done; None for none."""
ROWS: Final = st.lists(
    st.tuples(st.integers(0, 2), KEYS, st.sampled_from([-1, 0, 1, 30]), st.integers(0, 2000)),
    min_size=1,
    max_size=20,
)
"""Partition, key, size of the value (-1: a tombstone), age."""
CONFIGS: Final[Mapping[str, list[str]]] = {
    "cleanup.policy": ["compact", "compact,delete", "compact", "compact,delete", "delete"],
    "segment.bytes": ["150", "300", "600", "5000", "1073741824"],
    "compression.type": ["producer", "uncompressed", "gzip", "snappy", "lz4", "zstd"],
    "message.timestamp.type": ["CreateTime", "LogAppendTime"],
    "delete.retention.ms": ["0", "1000", "86400000"],
    "file.delete.delay.ms": ["0", "60000"],
    "retention.ms": ["-1", "1000", "86400000"],
    "min.cleanable.dirty.ratio": ["0", "0.5"],
    "max.compaction.lag.ms": [NEVER, "1000"],
    "index.interval.bytes": ["0", "4096"],
    "flush.messages": [NEVER, "50"],
    "kafkalog.cleaner.merge.batches": ["true", "false"],
}
CONFIG: Final = st.fixed_dictionaries({k: st.sampled_from(v) for k, v in CONFIGS.items()})
CHANGE: Final = st.sampled_from([(k, v) for k, values in CONFIGS.items() for v in values])
BUDGETS: Final = (24 * 3, 24 * 6, 1 << 20)
BUDGET: Final = st.sampled_from(BUDGETS)
MATRIX: Final = ("compression.type", "segment.bytes", "message.timestamp.type")
CELLS: Final = len(BUDGETS) * math.prod(len(CONFIGS[name]) for name in MATRIX)
"""How many there are of these and of the budgets."""
CLEANERS: Final = st.builds(
    CleanerConfig,
    dedupe_buffer_size=BUDGET,
    io_buffer_size=st.sampled_from([100, 1000, 1 << 20]),
    spill=st.booleans(),
    merge_batches=st.booleans(),
)
Action = tuple[int, bool | list[int | None]]
Death = tuple[int, bool] | None
Rows = list[tuple[int, int, int, int]]
