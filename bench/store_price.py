"""The price of compacting 1 TB in an object store, from the requests of a small log.

All sizes are those of a large log, divided by one number: the objects, the limit of one regroup,
and the segment objects. The requests are therefore as many as one regroup of 1 GiB sends, and the
cleaning after it. Run: `python -m bench.store_price [PARTITIONS ...]`.
"""

from __future__ import annotations

import random
import sys
import time
from collections import Counter
from secrets import token_hex

import pyarrow as pa

from kafkalog.cleaner.objects import upkeep
from kafkalog.cleaner.objects.regroup_plan import GET_PRICE, price_of
from kafkalog.cleaner.schedule import manager
from kafkalog.storage_engine.fs import clock
from kafkalog.storage_engine.object_store import regroup
from kafkalog.storage_engine.object_store.client import GET
from kafkalog.storage_engine.object_store.object_log import ObjectLog

TERABYTE = 10**12
OBJECT = 8 << 20
OBJECTS = 128
"""Objects of one regroup: 1 GiB."""


def counted(partitions: int) -> tuple[Counter[str], Counter[str], int, int]:
    """Compact a log of 128 objects.

    Returns the requests of the regrouping, those of the cleaning, how many segment objects this
    had, and the bytes of the large log.
    """
    scale = OBJECT // max(8 << 10, 160 * partitions)
    vars(regroup)["SEGMENT_SIZE_MAX"] = (64 << 20) // scale
    vars(regroup)["REGROUP_BYTES"] = 2 * OBJECTS * OBJECT // scale
    log = ObjectLog(f"memory://{token_hex(8)}/log")
    log.create_topic("t", partitions)
    chance = random.Random(partitions)
    size = max(8, OBJECT // scale // partitions - 90)
    for _ in range(OBJECTS):
        rows = {
            "key": [chance.randbytes(8) for _ in range(partitions)],
            "value": [chance.randbytes(size) for _ in range(partitions)],
            "partition": pa.array(range(partitions), pa.int32()),
        }
        log.append("t", pa.RecordBatch.from_pydict(rows))
    written = sum(each.size for each in log.store_state().objects.values()) * scale
    before, now_ms = Counter(log.client.counts), clock.now_ms() + 60_000
    upkeep.regroup_due(log, force=True, now_ms=now_ms)
    regrouped, inputs = Counter(log.client.counts), len(log.known_state.objects)
    manager.clean(log, force=True, now_ms=now_ms)
    return regrouped - before, Counter(log.client.counts) - regrouped, inputs, written


def main(partitions: list[int]) -> None:
    """Print a line for each number of partitions."""
    for count in partitions:
        started = time.process_time()
        regroup_requests, requests, inputs, size = counted(count)
        share = TERABYTE / size
        price = price_of(regroup_requests + requests) * share
        more = GET_PRICE * (count - 1) * OBJECTS * share
        print(
            f"{count} partitions, 1 TB of 8 MiB objects: to regroup {dict(regroup_requests)} for "
            f"{OBJECTS} objects ({regroup_requests[GET] / OBJECTS:.2f} GETs each), to clean "
            f"{dict(requests)} for {inputs} segment objects ({requests[GET] / inputs:.2f} GETs "
            f"each, with those after the commits), {price:.2f} $ at S3 Standard; "
            f"{price + more:.2f} $ with one GET for each partition of an object "
            f"({time.process_time() - started:.0f} s of a processor)"
        )


if __name__ == "__main__":
    main([int(each) for each in sys.argv[1:]] or [12, 50])
