"""`maxOffsetsPerTrigger`: the size of a micro-batch (Spark: KafkaMicroBatchStream.rateLimit)."""

from __future__ import annotations

import math
from collections.abc import Mapping

from kafkalog.datasource.offsets import Offsets, TopicPartition


def limit_offsets(
    begin: Mapping[TopicPartition, int], end: Mapping[TopicPartition, int], limit: int
) -> Offsets:
    """Return `end`, lowered so that about `limit` offsets lie between it and `begin`.

    Each partition gets a share in proportion to its waiting offsets, at least one offset; a share
    above one is rounded down. The sum may therefore differ a little from the limit. A partition
    whose end is not beyond its begin keeps its end. Shares are computed in double precision in
    Spark's order, so that both make the same batches.
    """
    waiting = {p: end[p] - begin[p] for p in end if end[p] > begin[p]}
    total = float(sum(waiting.values()))
    limited = dict(end)
    if total < 1:
        return limited
    for partition, size in waiting.items():
        share = limit * (size / total)
        count = math.ceil(share) if share < 1 else math.floor(share)
        limited[partition] = min(end[partition], begin[partition] + count)
    return limited
