"""Operations on a log in an object store, small, and what a model says of each.

The model knows topics, offsets and records, and nothing of objects and commits. An operation that
is done again changes nothing more, but `plain`, which has no writer.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from typing import Any, Final, NamedTuple, TypeAlias
from unittest import mock

import pyarrow as pa

from kafkalog.cleaner.config import CleanerConfig
from kafkalog.cleaner.key_index.key_lookup import KeyLookup
from kafkalog.cleaner.key_index.latest_view import latest_of_topic
from kafkalog.cleaner.objects import upkeep
from kafkalog.cleaner.rewrite.erased_keys import ErasedKeys
from kafkalog.cleaner.schedule import manager
from kafkalog.erasure.erase import erase
from kafkalog.erasure.topic_files import LIVE
from kafkalog.errors import KafkaLogError, StorageError
from kafkalog.storage_engine.copying.copy import copy
from kafkalog.storage_engine.fs import clock
from kafkalog.storage_engine.metadata.writer import Writer, writer_slug
from kafkalog.storage_engine.object_store import object_log
from kafkalog.storage_engine.object_store.address import StoreAddress
from kafkalog.storage_engine.object_store.object_log import ObjectLog
from kafkalog.storage_engine.object_store.regroup import fresh_objects
from kafkalog.storage_engine.object_store.store_state import stored_names
from kafkalog.storage_engine.writing.staged_message import StagedMessage
from kafkalog.storage_engine.writing.staging import StagedWriter
from tests.torture.spoiled_requests import SNAPSHOT_COMMITS
from tests.torture.stores import other

__all__ = [
    "OPERATIONS",
    "Content",
    "Operation",
    "Place",
    "Row",
    "append_and_clean",
    "gone_on",
    "prepare",
    "seen",
]

_NOW_MS: Final = clock.now_ms()
"""The time of the log. A sweep compares it with the times that the store gives to objects."""
_HOUR_MS: Final = 3_600_000
LATER_MS: Final = _NOW_MS + 2 * _HOUR_MS
"""The time of the operations, at which `retention.ms` of `d` is over for what was there before."""
WEEK_MS: Final = _NOW_MS + 8 * 24 * _HOUR_MS
"""The time at which whatever waits to be deleted may be."""
_KEYS: Final = 4
_KEPT: Final = 4_000
"""Partitions whose content is remembered."""
_ERASED: Final = b"k1"
_MERGED: Final = 8
_START: Final = 3
"""The offset at which a deletion of records lets `d` begin."""


class Row(NamedTuple):
    """A record."""

    offset: int
    key: bytes
    value: bytes | None
    timestamp: int
    """Epoch ms."""


class Place(NamedTuple):
    """A partition: where it begins and ends, and its records."""

    start: int
    end: int
    rows: tuple[Row, ...] = ()


Content: TypeAlias = Mapping[str, Any]
"""What a log has: a `Place` by `topic-partition`, a topic's config by its name, a writer's batch id
by `writer`. What its copy has is there too, by names with `copy/` before them."""


# --- the log -------------------------------------------------------------------------------------


def prepare(address: StoreAddress) -> None:
    """Make the log that operations begin with.

    A compacted topic `t` with overwritten and deleted keys, in cleaned, dropped and fresh objects;
    `d`, from which retention takes; `m`, whose small segment objects are to be merged; and `x`, to
    be deleted. An orphan and the claim of a dead cleaner lie beside it.
    """
    plain = {"compression.type": "uncompressed", "retention.ms": "-1"}
    log = ObjectLog(address)
    log.create_topic("t", 2, {**plain, "cleanup.policy": "compact,delete"}, now_ms=_NOW_MS)
    alone = {**plain, "cleanup.policy": "delete", "segment.bytes": "100"}
    log.create_topic("d", 1, {**alone, "retention.ms": str(_HOUR_MS)}, now_ms=_NOW_MS)
    log.create_topic("m", 1, {**plain, "cleanup.policy": "delete"}, now_ms=_NOW_MS)
    log.create_topic("x", 1, plain, now_ms=_NOW_MS)
    _append(log, 0, ("t", "d", "x"))
    manager.clean(log, "t", force=True, now_ms=_NOW_MS)
    for turn in range(_MERGED):
        _append(log, turn, ("m",))
        upkeep.regroup_due(log, force=True, now_ms=_NOW_MS)
    _append(log, 1, ("t", "d"))
    _append(log, 2, ("t", "d"))
    _staged(log, 50, 0)
    log.client.create(f"claims/{log.describe('t').topic_id}-1-0", b"")
    # The operation that comes next writes a snapshot, too.
    while (log.store_state().number + 1) % SNAPSHOT_COMMITS:
        log.alter_topic("x", {"segment.ms": str(_HOUR_MS + log.known_state.number)})


def _append(log: ObjectLog, turn: int, topics: Iterable[str]) -> None:
    for topic in topics:
        log.append(topic, _table(topic, turn), now_ms=_NOW_MS)


def _records(topic: str, turn: int) -> list[tuple[bytes, bytes | None, int]]:
    """Return the (key, value, partition) of a turn."""
    partitions = 2 if topic == "t" else 1
    return [
        (
            b"k%d" % ((turn + n) % _KEYS),
            None if n == turn % 3 else b"%s %d.%d" % (topic.encode(), turn, n) + b"v" * 30,
            n % partitions,
        )
        for n in range(2 * partitions)
    ]


def _table(topic: str, turn: int) -> pa.RecordBatch:
    keys, values, partitions = zip(*_records(topic, turn), strict=True)
    return pa.record_batch(
        {
            "key": pa.array(keys, pa.binary()),
            "value": pa.array(values, pa.binary()),
            "partition": pa.array(partitions, pa.int32()),
        }
    )


def seen(address: StoreAddress) -> Content:
    """Return what another process reads of a log, and of its copy if there is one."""
    found: dict[str, Any] = {}
    for prefix, each in (("", address), ("copy/", other(address, "copy"))):
        try:
            log = ObjectLog(each, create=False)
        except KafkaLogError:
            if not prefix:
                raise
            continue
        found |= {prefix + name: value for name, value in _seen(log, _read_once).items()}
    return found


def _seen(log: ObjectLog, place: Callable[[ObjectLog, str, int], Place]) -> dict[str, Any]:
    state = log.known_state.log
    found: dict[str, Any] = {}
    for topic, known in state.topics.items():
        found[topic] = dict(known.config)
        for number, _ in known.present():
            found[f"{topic}-{number}"] = place(log, topic, number)
    for writer, known_batch in state.writers.items():
        if writer.startswith("torture"):
            found[f"writer {writer}"] = known_batch.batch_id
    return found


def _place(log: ObjectLog, topic: str, number: int) -> Place:
    """Read a partition."""
    read = [row for batch in log.read(topic, number) for row in batch.to_pylist()]
    rows = tuple(
        Row(row["offset"], row["key"], row["value"], _epoch_ms(row["timestamp"])) for row in read
    )
    partition = log.known_state.log.topics[topic].partitions[number]
    return Place(partition.log_start_offset, partition.high_watermark, rows)


_known_places: dict[bytes, Place] = {}


def _read_once(log: ObjectLog, topic: str, number: int) -> Place:
    """Read a partition, once where many logs have the same one.

    What is read of it follows from its state, its extents and the bytes of its objects.
    """
    state = log.known_state
    known = state.log.topics[topic]
    extents = state.extents(known.topic_id, number)
    parts = [repr((topic, known.config, known.partitions[number], *extents)).encode()]
    for name in sorted({each.object_name for each in extents}):
        for each in stored_names(name, state.objects[name]):
            there = log.client.get(each)
            parts.append(b"none" if there is None else hashlib.blake2b(there.data).digest())
    key = hashlib.blake2b(b"\0".join(parts)).digest()
    if key not in _known_places:
        if len(_known_places) >= _KEPT:
            _known_places.clear()
        _known_places[key] = _place(log, topic, number)
    return _known_places[key]


def _epoch_ms(timestamp: datetime) -> int:
    return round(timestamp.timestamp() * 1000)


# --- the operations ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Operation:
    """What is done by an opened log, and what the model makes of the content.

    It is there as a whole or not at all, unless `halfway` says otherwise. One that is not
    repeatable is done again only if it was not done.
    """

    name: str
    run: Callable[[ObjectLog], object]
    """Returns what was read, if anything was."""
    model: Callable[[Content], Content] = lambda content: content
    halfway: Sequence[Callable[[Content], Content]] = ()
    """What the model makes of it when it has begun, if it takes several commits.

    Each place of the log then has what it had before, halfway, or in the end.
    """
    is_repeatable: bool = True


def _staged(log: ObjectLog, batch_id: int, task: int) -> StagedMessage:
    """Stage as a task does that writes to two topics."""
    writer = StagedWriter(
        log,
        log.known_state.log,
        now_ms=lambda: LATER_MS,
        writer_slug=writer_slug("torture", "*"),
        batch_id=batch_id,
        spark_partition=task,
    )
    try:
        for topic in ("t", "d"):
            writer.append(topic, _table(topic, batch_id + task))
        return writer.finish()
    except Exception:
        writer.discard()
        raise


def _writer(batch_id: int) -> Writer:
    """Return the writer of a batch; each has its own, so that they come in any order."""
    return Writer(f"torture{batch_id}", "*", batch_id)


def _commit(log: ObjectLog, batch_id: int) -> None:
    """Commit a micro-batch of two tasks."""
    messages = [_staged(log, batch_id, task) for task in range(2)]
    log.commit(messages, writer=_writer(batch_id), now_ms=LATER_MS)


def _committed(content: Content, batch_id: int) -> Content:
    writer = f"writer {_writer(batch_id).name}"
    if content.get(writer, -1) >= batch_id:
        return content
    found = dict(content)
    for task in range(2):
        for topic in ("t", "d"):
            found = _with_rows(found, topic, batch_id + task)
    return {**found, writer: batch_id}


def _with_rows(content: Content, topic: str, turn: int) -> dict[str, Any]:
    found = dict(content)
    for key, value, number in _records(topic, turn):
        name = f"{topic}-{number}"
        start, end, rows = found[name]
        found[name] = Place(start, end + 1, (*rows, Row(end, key, value, LATER_MS)))
    return found


def _plain(log: ObjectLog) -> None:
    """Append without a writer: a second time it is appended again."""
    log.append("t", _table("t", 80), now_ms=LATER_MS)


def _commit_full(log: ObjectLog) -> None:
    """Commit beyond the limit of fresh objects, so that the commit regroups them."""
    with mock.patch.object(object_log, "FRESH_MAX", 1):
        _commit(log, 61)


def _abort(log: ObjectLog) -> None:
    """Stage a micro-batch, and abort it before its commit."""
    messages = [_staged(log, 70, task) for task in range(2)]
    if not log.abort(messages, writer=_writer(70), now_ms=LATER_MS):
        raise AssertionError("a batch that was never committed is taken for committed")


def _create(log: ObjectLog) -> None:
    log.create_topic("n", 2, {"segment.ms": "7000"}, exist_ok=True, now_ms=LATER_MS)


def _created(content: Content) -> Content:
    empty = Place(0, 0)
    return {
        "n-0": empty,
        "n-1": empty,
        **content,
        "n": {"cleanup.policy": "compact", "segment.ms": "7000"},
    }


def _alter(log: ObjectLog) -> None:
    partitions = 3 if len(log.offsets("t")) < 3 else None
    config = {"max.message.bytes": "77777"}
    log.alter_topic("t", config, partitions, keys_may_move=True, now_ms=LATER_MS)


def _altered(content: Content) -> Content:
    config = {**content["t"], "max.message.bytes": "77777"}
    return {"t-2": Place(0, 0), **content, "t": config}


def _delete_topic(log: ObjectLog) -> None:
    if "x" in log.topics():
        log.delete_topic("x", now_ms=LATER_MS)


def _without_topic(content: Content) -> Content:
    return {name: value for name, value in content.items() if name not in ("x", "x-0")}


def _delete_records(log: ObjectLog) -> None:
    if log.offsets("d")[0][0] < _START:
        log.delete_records("d", 0, _START, now_ms=LATER_MS)


def _cut(content: Content) -> Content:
    return {**content, "d-0": _from(content["d-0"], _START)}


def _from(place: Place, start: int) -> Place:
    start = max(place.start, start)
    return Place(start, place.end, tuple(row for row in place.rows if row.offset >= start))


def _retained(content: Content) -> Content:
    place = content["d-0"]
    old = [row.offset + 1 for row in place.rows if row.timestamp < LATER_MS - _HOUR_MS]
    return {**content, "d-0": _from(place, max(old, default=0))}


def _regroup(log: ObjectLog) -> None:
    upkeep.regroup_due(log, force=True, now_ms=LATER_MS)


def _merge(log: ObjectLog) -> None:
    log.store_state()
    upkeep.merge_due(log, now_ms=LATER_MS)


def _clean(log: ObjectLog) -> None:
    for stats in manager.clean(log, "t", force=True, now_ms=LATER_MS):
        if stats.error is not None:
            raise StorageError(f"not cleaned: {stats.error}")
    left = fresh_objects(log.known_state)  # a warning has told of a missing one
    if left:
        raise StorageError(f"not regrouped: {left}")


def _cleaned(content: Content) -> Content:
    return {
        name: value._replace(rows=latest(value.rows)) if name.startswith("t-") else value
        for name, value in content.items()
    }


def latest(rows: Iterable[Row]) -> tuple[Row, ...]:
    """Return the latest record of each key, by offset."""
    return tuple(sorted({row.key: row for row in rows}.values()))


def _collect(log: ObjectLog) -> None:
    log.collected_ms = None
    upkeep.sweep(log, now_ms=WEEK_MS)


def _pass_by(log: ObjectLog) -> None:
    """Commit until there are two more snapshots, then collect: a stopped process falls behind."""
    for _ in range(2 * SNAPSHOT_COMMITS + 1):
        log.abort([], now_ms=LATER_MS)
    _collect(log)


def _erase(log: ObjectLog) -> None:
    given: dict[str, Any] = {"clock": lambda: LATER_MS, "config": CleanerConfig()}
    found = erase(log, "t", ErasedKeys([_ERASED]), now=True, **given)
    for stats in found.cleanings:
        if stats.error is not None:
            raise StorageError(f"not cleaned: {stats.error}")
    if any(each.found and each.file.kind in LIVE for each in found.after.files):
        raise StorageError(f"still there: {found.after.residuals}")


def _erased(content: Content) -> Content:
    """The partitions with the key are cleaned, after a tombstone if it is not deleted yet."""
    found = dict(content)
    for name, place in content.items():
        if not name.startswith("t-"):
            continue
        last = {row.key: row.value for row in place.rows}
        if _ERASED in last:
            rows = tuple(row for row in latest(place.rows) if row.key != _ERASED)
            end = place.end + (last[_ERASED] is not None)
            found[name] = Place(place.start, end, rows)
    return found


def _half_erased(content: Content) -> Content:
    """The tombstones are written, and nothing is cleaned."""
    found = dict(content)
    for name, place in content.items():
        if name.startswith("t-") and {row.key: row.value for row in place.rows}.get(_ERASED):
            rows = (*place.rows, Row(place.end, _ERASED, None, LATER_MS))
            found[name] = Place(place.start, place.end + 1, rows)
    return found


def _only_cleaned(content: Content) -> Content:
    """The partitions with the key are cleaned, without a tombstone: their reading has failed."""
    return {
        name: Place(place.start, place.end, latest(place.rows))
        if name.startswith("t-") and any(row.key == _ERASED for row in place.rows)
        else place
        for name, place in content.items()
    }


def _cleaned_below_tombstone(content: Content) -> Content:
    """The tombstones are written, and the cleaner left out their object, which was missing."""
    return _half_erased(_only_cleaned(content))


def _copy(log: ObjectLog) -> None:
    copy(log, ObjectLog(other(log.address, "copy")), now_ms=LATER_MS)


def _copied(content: Content) -> Content:
    """The copy gets the records that are new since the last one, and the log starts."""
    found = dict(content)
    for name, value in content.items():
        if name.startswith(("copy/", "writer ")):
            continue
        known = found.get(f"copy/{name}")
        if known is None:
            found[f"copy/{name}"] = value
        elif isinstance(value, Place):
            rows = (*known.rows, *(row for row in value.rows if row.offset >= known.end))
            found[f"copy/{name}"] = _from(Place(known.start, value.end, rows), value.start)
    return found


def _half_copied(content: Content) -> Content:
    """The topics are created, and no record is copied."""
    empty = {
        f"copy/{name}": Place(value.start, value.start) if isinstance(value, Place) else value
        for name, value in content.items()
        if not name.startswith(("copy/", "writer "))
    }
    return {**empty, **content}


def _create_log(log: ObjectLog) -> None:
    ObjectLog(other(log.address, "new"))


def _read(log: ObjectLog) -> object:
    """Open the log and read it in every way; return all that was read."""
    opened = ObjectLog(log.address, create=False)
    found: list[object] = [_seen(opened, _place)]
    for topic in opened.topics():
        found.append(
            [batch.to_pylist() for batch in latest_of_topic(opened, topic, budget_bytes=1 << 20)]
        )
        found.append([opened.offset_for_time(topic, ms) for ms in (_NOW_MS, -3)])
    with KeyLookup(opened, "t") as lookup:
        found += [lookup.get(b"k%d" % n, partition=n % 2) for n in range(_KEYS)]
    return found


def append_and_clean(log: ObjectLog) -> None:
    """Go on: write once more, clean, and delete what nobody needs."""
    log.append("t", _table("t", 90), now_ms=LATER_MS)
    _clean(log)
    log.collected_ms = None
    upkeep.sweep(log, now_ms=WEEK_MS)


def gone_on(content: Content) -> Content:
    """Return the content after `append_and_clean`."""
    return _cleaned(_with_rows(content, "t", 90))


_ALL: Final = (
    Operation("commit", partial(_commit, batch_id=60), partial(_committed, batch_id=60)),
    Operation("full", _commit_full, partial(_committed, batch_id=61)),
    Operation("plain", _plain, partial(_with_rows, topic="t", turn=80), is_repeatable=False),
    Operation("abort", _abort),
    Operation("create", _create, _created),
    Operation("alter", _alter, _altered),
    Operation("delete_topic", _delete_topic, _without_topic),
    Operation("delete_records", _delete_records, _cut),
    Operation("retain", lambda log: log.apply_retention(now_ms=LATER_MS), _retained),
    Operation("regroup", _regroup),
    Operation("merge", _merge),
    Operation("clean", _clean, _cleaned, (lambda content: content,)),
    Operation("sweep", lambda log: log.sweep_staged(now_ms=WEEK_MS)),
    Operation("collect", _collect),
    Operation("pass_by", _pass_by),
    Operation("erase", _erase, _erased, (_half_erased, _only_cleaned, _cleaned_below_tombstone)),
    Operation("copy", _copy, _copied, (_half_copied,)),
    Operation("create_log", _create_log),
    Operation("read", _read),
)
OPERATIONS: Final[Mapping[str, Operation]] = {each.name: each for each in _ALL}
