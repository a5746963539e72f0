"""What damage makes of a log in an object store: read in every way, cleaned, written to, judged.

- The log's mark, a commit, a snapshot and the boundary are needed to open the log, or not read at
  all: old commits lie behind a snapshot.
- The last commit may be missing: the log then is as it was before that commit, as a store can tell
  nobody that an object was there. That is the one damage that is `short`.
- A mixed object and a segment object hold records of certain partitions; all others read whole. The
  commit has positions, offsets and sizes, so no base offset in an object counts.
- A side object has indexes: a lookup finds the right record, or none of it is believed.
- No checksum covers a batch's leader epoch, which `Judge` does not compare either.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Self

from kafkalog.cleaner.key_index.key_lookup import KeyLookup
from kafkalog.cleaner.schedule import manager
from kafkalog.errors import KafkaLogError
from kafkalog.inspection.verify_store import verify_store
from kafkalog.storage_engine.object_store.address import StoreAddress
from kafkalog.storage_engine.object_store.object_log import ObjectLog
from tests.torture.spoiled_requests import short_patience
from tests.torture.stored_log import KEYS, TOPICS, StoredLog, opened
from tests.unit.storage_engine.damage import Hung, deadline
from tests.unit.storage_engine.sample_root import NOW_MS

__all__ = ["StoredJudge"]


class _Root(NamedTuple):
    """Where the objects lie as files, by their short names."""

    path: Path


@dataclass
class _Whole:
    """What a sound log has: by topic its records, by key the latest one, by time an offset."""

    rows: Mapping[str, list[Any]]
    lookups: Mapping[bytes, Any]
    times: Mapping[str, Any]

    @classmethod
    def of(cls, log: ObjectLog) -> Self:
        """Read a sound log."""
        return cls(
            {topic: _rows(log, topic) for topic in TOPICS},
            {key: _lookup(log, key) for key in KEYS},
            {topic: _times(log, topic) for topic in TOPICS},
        )


class StoredJudge:
    """Does what `Judge` does of a directory, with the objects of a store; see there."""

    def __init__(self, directory: Path) -> None:
        with short_patience():
            self._log = StoredLog(directory)
            self._earlier = _Whole.of(opened(self._log.earlier()))
            log = opened(self._log.changed("boundary", self._log.content("boundary")))
            self._whole = _Whole.of(log)
            self._topics = {name: self._topics_of(log, name) for name in self._log.names}
        self.root = _Root(directory / "objects")
        self.root.path.mkdir()
        for name in self._log.names:
            (self.root.path / name).write_bytes(self._log.content(name))
        numbers = [int(name[7:]) for name in self._log.names if name.startswith("commit-")]
        self._last = f"commit-{max(numbers)}"
        self.outcomes: Counter[tuple[str, str]] = Counter()
        self.faults: list[str] = []

    def _topics_of(self, log: ObjectLog, name: str) -> set[str]:
        """Return the topics that have records in an object, or indexes; of all others, all."""
        kind = name.partition("-")[0]
        if kind not in ("mixed", "segment", "side"):
            return {*TOPICS}
        stored = self._log.names[name].removesuffix(".side")
        state = log.known_state
        ids = {
            extent.topic_id
            for object_name, each in state.objects.items()
            if object_name.startswith(stored)
            for extent in each.extents
        }
        return {topic for topic in TOPICS if state.log.topic(topic).topic_id in ids}

    def files(self) -> list[Path]:
        """Return the short names of the objects to be damaged."""
        return [Path(name) for name in sorted(self._log.names)]

    def judge(self, name: Path, data: bytes | None, position: int, *, write: bool) -> str:
        """Judge one object with other content (None: missing)."""
        try:
            with deadline(), short_patience():
                address = self._log.changed(str(name), data)
                outcome = self._read(address, str(name), is_missing=data is None)
                if write:
                    self._write(address)
        except (Exception, Hung) as fault:
            size = "missing" if data is None else f"{len(data)} bytes"
            told = f"{type(fault).__name__}: {fault}"
            self.faults.append(f"{name} damaged at byte {position} ({size}): {told}")
            outcome = "WRONG"
        self.outcomes[f"stored {str(name).partition('-')[0]}", outcome] += 1
        return outcome

    def _read(self, address: StoreAddress, name: str, *, is_missing: bool) -> str:
        is_short = is_missing and name == self._last
        whole = self._earlier if is_short else self._whole
        try:
            log = opened(address)
        except KafkaLogError:
            return "refused"
        found = {"short" if is_short else "whole"}
        for topic in TOPICS:
            try:
                rows = _rows(log, topic)
                times = _times(log, topic)
            except KafkaLogError:
                assert topic in self._topics[name], f"{topic} cannot be read"
                found.add("refused")
                continue
            wanted = whole.rows[topic]
            wrong = [row for row in rows if row not in wanted]
            assert not wrong, f"{topic}: wrong records {wrong}"
            assert rows == wanted, f"{topic}: {len(rows)} records instead of {len(wanted)}"
            assert times == whole.times[topic], f"{topic}: times {times}"
        for key, wanted in whole.lookups.items():
            try:
                record = _lookup(log, key)
            except KafkaLogError:
                found.add("refused")
                continue
            assert record == wanted, f"key {key!r}: {record} instead of {wanted}"
        return "refused" if "refused" in found else found.pop()

    def _write(self, address: StoreAddress) -> None:
        """Verify, clean and append; the latest records stay, or an error is raised."""
        try:
            log = opened(address)
            before = _latest(_rows(log, "u"))
        except KafkaLogError:
            return
        list(verify_store(log, deep=True))
        try:
            manager.clean(log, "u", force=True, now_ms=NOW_MS)
            log.append("u", [(b"new", b"v")], now_ms=NOW_MS)
        except KafkaLogError:
            return
        after = _latest(_rows(log, "u"))
        assert after.pop(b"new")["value"] == b"v"
        assert after == before, f"after a cleaning: {after} instead of {before}"


def _rows(log: ObjectLog, topic: str) -> list[Any]:
    return [
        (level, row)
        for level in ("read_committed", "read_uncommitted")
        for batch in log.read(topic, 0, isolation_level=level, include_headers=True)
        for row in batch.to_pylist()
    ]


def _times(log: ObjectLog, topic: str) -> list[Any]:
    """Return the offset and the timestamp of the first record since `NOW_MS` by partition."""
    found = log.offset_for_time(topic, NOW_MS)
    return [(number, each and each[:2]) for number, each in found.items()]


def _latest(rows: list[Any]) -> dict[bytes, Any]:
    return {row["key"]: row for level, row in rows if level == "read_committed"}


def _lookup(log: ObjectLog, key: bytes) -> object:
    with KeyLookup(log, "u") as lookup:
        return lookup.get(key, partition=0)
