"""The requests of a cleaner and of lookups, as a proxy before a server counts them."""

from __future__ import annotations

from collections import Counter

import pyarrow as pa
import pytest

from kafkalog.cleaner.key_index.key_lookup import KeyLookup
from kafkalog.cleaner.objects import upkeep
from kafkalog.cleaner.schedule import manager
from kafkalog.inspection.verify_store import verify_store
from kafkalog.storage_engine.object_store import fetched_ranges
from kafkalog.storage_engine.object_store.address import StoreAddress
from kafkalog.storage_engine.object_store.collector import collect
from kafkalog.storage_engine.object_store.object_log import ObjectLog
from tests.object_store_proxy import StoreProxy, kind_of

pytestmark = pytest.mark.slow
NOW_MS = 1_700_000_000_000
DAY_MS = 86_400_000
OBJECTS = 6


@pytest.mark.parametrize("partitions", [1, 12])
def test_an_object_costs_one_get_to_regroup_and_two_to_clean(
    s3_address: StoreAddress, store_proxy: StoreProxy, partitions: int
) -> None:
    log = ObjectLog(s3_address)
    log.create_topic("t", partitions)
    for number in range(OBJECTS):
        rows = {
            "key": [b"%d" % (row % 2) for row in range(4) for _ in range(partitions)],
            "value": [b"%d" % number] * (4 * partitions),
            "partition": pa.array([*range(partitions)] * 4, pa.int32()),
        }
        log.append("t", pa.table(rows), now_ms=NOW_MS)
    store_proxy.reset()
    upkeep.regroup_due(log, now_ms=NOW_MS, force=True)
    counts = Counter(map(kind_of, store_proxy.requests))
    assert (counts["GET mixed"], counts["GET log"], counts["GET side"]) == (OBJECTS, 0, 0)
    assert (counts["PUT log"], counts["PUT side"], counts["PUT commit"]) == (
        *(partitions, partitions),
        1,
    )
    assert not any(kind.startswith("LIST") for kind in counts)
    store_proxy.reset()
    assert len(manager.clean(log, force=True, now_ms=NOW_MS)) == partitions
    counts = Counter(map(kind_of, store_proxy.requests))
    assert (counts["GET mixed"], counts["GET log"], counts["GET side"]) == (
        0,
        *(partitions, partitions),
    )
    assert counts["PUT log"] == counts["PUT side"] == partitions
    assert counts["PUT commit"] == partitions + 1  # one closes all active segments, by force
    assert not any(kind.startswith("LIST") for kind in counts)
    collected = collect(log, now_ms=NOW_MS + 8 * DAY_MS)
    assert (collected.dropped, collected.orphans) == (OBJECTS + partitions, 0)
    assert [*verify_store(log, deep=True)] == []
    read = [row for n in range(partitions) for b in log.read("t", n) for row in b.to_pylist()]
    assert len(read) == 2 * partitions and {row["value"] for row in read} == {b"5"}


def test_a_key_of_many_segments_is_looked_up_by_three_gets(
    s3_address: StoreAddress, store_proxy: StoreProxy
) -> None:
    log = ObjectLog(s3_address)
    log.create_topic("t", 1, {"segment.bytes": "100000", "compression.type": "uncompressed"})
    keys = [b"%d" % number for number in range(30_000)]
    log.append("t", [(key, key) for key in keys], now_ms=NOW_MS)
    manager.clean(log, force=True, now_ms=NOW_MS)
    assert len(log.store_state().objects) > 5
    with KeyLookup(log, "t") as lookup:
        assert lookup.get("0") is not None  # it fetches the filters of all
        for key in (b"7", b"12345", b"29999"):
            store_proxy.reset()
            record = lookup.get(key)
            assert record is not None and record.value == key
            assert {*store_proxy.counts} == {"GET"} and store_proxy.counts["GET"] <= 3 + 1


def test_a_lookup_in_large_segments_fetches_one_batch(
    s3_address: StoreAddress, store_proxy: StoreProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetched_ranges, "RANGE_SIZE", 4 << 10)
    log = ObjectLog(s3_address)
    log.create_topic("t", config={"cleanup.policy": "compact", "compression.type": "uncompressed"})
    for first in (0, 3000):
        keys = [b"%d" % key for key in range(first, first + 3000)]
        log.append("t", pa.table({"key": keys, "value": keys}), now_ms=NOW_MS, batch_size=1024)
    manager.clean(log, "t", now_ms=NOW_MS + DAY_MS, force=True)
    with KeyLookup(log, "t") as lookup:
        lookup.get("0")
        for key in (b"7", b"1234", b"5999"):
            store_proxy.reset()
            record = lookup.get(key)
            assert record is not None and record.value == key
            assert store_proxy.requests and store_proxy.counts["GET"] <= 3
            assert Counter(map(kind_of, store_proxy.requests))["GET log"] == 1
