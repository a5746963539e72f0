"""Fuzz targets that are a log in an object store: one object is changed, and the log is used.

Checksums are valid, so this is what a program that wrote nonsense would leave behind. A store in
memory has the objects; what it refuses is not repeated for long.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Final
from unittest import mock

from kafkalog.cleaner.key_index.key_lookup import KeyLookup
from kafkalog.cleaner.key_index.latest_view import latest_of_topic
from kafkalog.cleaner.schedule import manager
from kafkalog.inspection.verify_store import verify_store
from kafkalog.storage_engine.format import layout
from kafkalog.storage_engine.object_store.address import StoreAddress
from kafkalog.storage_engine.object_store.mixed_object import footer_of
from kafkalog.storage_engine.object_store.numbered_object import NumberedObject
from tests.torture import fuzz_checksums
from tests.torture.fuzz_target import Case, Target, exhaust, refusing
from tests.torture.spoiled_requests import short_patience
from tests.torture.stored_log import KEYS, StoredLog, opened
from tests.unit.storage_engine.sample_root import NOW_MS

_LAST_COMMIT: Final = "commit-15"
_LAST_SNAPSHOT: Final = "snapshot-12"


def targets() -> list[Target]:
    """Return them all."""
    numbered, sides = fuzz_checksums.numbered, fuzz_checksums.sides
    batches = fuzz_checksums.batches
    return [
        _target("stored_log", "log", mend=numbered),
        _target("stored_boundary", "boundary", mend=numbered),
        _target("stored_commit", _LAST_COMMIT, mend=numbered, weight=2.0),
        _target("stored_snapshot", _LAST_SNAPSHOT, mend=numbered, weight=2.0),
        Target(name="stored_change", begin=_change, is_text=True, weight=2.0),
        Target(name="mixed_footer", begin=_footer, mend=fuzz_checksums.footer),
        _target("mixed_object", "mixed-4", mend=fuzz_checksums.footer),
        _target("segment_object", "segment-1", mend=batches),
        _target("cleaned_object", "segment-4", mend=batches),
        _target("side_object", "side-1", mend=sides),
        _target("side_of_cleaned", "side-4", mend=sides),
    ]


def _target(
    name: str, changed: str, *, mend: Callable[[bytes], bytes], weight: float = 1.0
) -> Target:
    def begin(directory: Path) -> Case:
        with short_patience():
            log = StoredLog(directory)

        def decode(data: bytes) -> None:
            with short_patience():
                _use(log.changed(changed, data))

        return Case(decode, [log.content(changed)])

    return Target(name=name, begin=begin, mend=mend, weight=weight)


def _change(directory: Path) -> Case:
    """The last commit changes anything that JSON can say."""
    with short_patience():
        log = StoredLog(directory)
    head = layout.STORED_HEADER
    names = [name for name in log.names if name.startswith("commit-")]
    seeds = [log.content(name)[head.size :] for name in names]
    *_, number, token = head.unpack_from(log.content(_LAST_COMMIT))
    more = {"dropped": [], "forgotten": ["x"], "swept": 3, "cleaned": {"a-0": [1, 2, {"a": "b"}]}}
    seeds.append(json.dumps({"time_ms": 5, **more}).encode())
    empty = NumberedObject(layout.STORED_COMMIT_MAGIC, number, token).encode()[: head.size]

    def decode(payload: bytes) -> None:
        with short_patience():
            _use(log.changed(_LAST_COMMIT, fuzz_checksums.numbered(empty + payload)))

    return Case(decode, seeds)


def _footer(directory: Path) -> Case:
    with short_patience():
        seed = StoredLog(directory).content("mixed-4")
    return Case(lambda data: footer_of("memory://log", data), [seed])


# As in `fuzz_roots`: what is bounded is what one number in an object can ask for.
@mock.patch.object(layout, "PARTITIONS_MAX", 1_000)
def _use(address: StoreAddress) -> None:
    """Read everything there is, in every way; then check, clean and append."""
    log = opened(address)
    for topic in list(log.topics())[:3]:
        with refusing():
            exhaust(latest_of_topic(log, topic, budget_bytes=1 << 20))
            log.offset_for_time(topic, NOW_MS)
            for level in ("read_committed", "read_uncommitted"):
                exhaust(log.read(topic, 0, isolation_level=level, include_headers=True))
        with refusing(), KeyLookup(log, topic) as lookup:
            for key in KEYS[:2]:
                with refusing():
                    lookup.get(key, partition=0)
    with refusing():
        exhaust(verify_store(log, deep=True))
    with refusing():
        manager.clean(log, force=True, now_ms=NOW_MS)
    with refusing():
        log.append("u", [(b"new", b"v")], now_ms=NOW_MS)
