"""Verify all files of one partition's directory.

In our logs, each segment is opened together with the state, under the shared segments lock, so
commits and cleanings continue meanwhile. A segment that a cleaning has merged is checked again as a
whole. A broker's directory is listed without a lock.
"""

from __future__ import annotations

import contextlib
import os
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Final

from kafkalog.errors import CorruptLogError
from kafkalog.inspection.dump import properties
from kafkalog.inspection.finding import Finding
from kafkalog.inspection.verify_index import OffsetIndexCheck, TimeIndexCheck
from kafkalog.inspection.verify_key_index import verify_key_indexes
from kafkalog.inspection.verify_kinds import verify_kinds
from kafkalog.inspection.verify_segment import LogCheck, SegmentCheck
from kafkalog.storage_engine.broker.checkpointed import Checkpointed
from kafkalog.storage_engine.broker.loader import open_notice
from kafkalog.storage_engine.broker.losses import find_losses
from kafkalog.storage_engine.format import layout, leader_epochs
from kafkalog.storage_engine.fs import files, locks
from kafkalog.storage_engine.metadata.checkpoints import EPOCH_FIELDS, checkpoint_entries
from kafkalog.storage_engine.metadata.state import PartitionState
from kafkalog.storage_engine.segment.byte_source import FileBytes
from kafkalog.storage_engine.segment.gaps import COPY_AGAIN, moment_fault
from kafkalog.storage_engine.segment.log_scanner import INSPECT, LogScanner
from kafkalog.storage_engine.segment.loss import Loss, lost_adopted
from kafkalog.storage_engine.segment.offset_chain import GapLists, OffsetChain
from kafkalog.storage_engine.segment.segments import SegmentFiles, list_segments, next_offset
from kafkalog.storage_engine.transactions.producer_snapshot import latest_snapshot, parse_snapshot

_TRIES: Final = 100
"""Attempts to list a directory while a broker removes files from it."""
_CLOCK_SLACK_MS: Final = 3_600_000
"""How far ahead a producer's clock may be: Kafka's message.timestamp.after.max.ms."""
_KNOWN: Final = (
    layout.PARTITION_METADATA,
    layout.LEADER_EPOCH_CHECKPOINT,
    layout.LEADER_EPOCH_CHECKPOINT + layout.TEMPORARY,
    layout.PARTITION_METADATA + layout.TEMPORARY,
    "quorum-state",
)


@dataclass(frozen=True, slots=True)
class PartitionFiles:
    """A partition to verify.

    `load_state` returns its state in the journal, None if no journal counts. `topic_id` is the
    expected id, None if unknown. A killed broker had synced the log up to `recovery_point`, None
    for all of it. `checkpointed` is what a broker's root says.
    """

    directory: Path
    load_state: Callable[[], PartitionState] | None = None
    topic_id: str | None = None
    recovery_point: int | None = None
    load_number: Callable[[], int] = lambda: layout.INT64_MAX
    """Returns the number of the journal's last record."""
    now_ms: int = layout.INT64_MAX
    """The present (epoch ms): records of later times are noticed."""
    checkpointed: Checkpointed = field(default_factory=Checkpointed)


@dataclass(slots=True)
class _Opened:
    """A segment with its `.log` open, and the state when it was opened."""

    segment: SegmentFiles
    fd: int
    following: int | None
    first: int
    first_wanted: int
    """Base offset of the segment with the log start; retention deletes the segments before it."""
    state: PartitionState | None
    is_active: bool
    limit: int
    chain: OffsetChain | None
    """The listed gaps of the segment; None if there is no list, or it is damaged."""
    gaps: GapLists | None

    def close(self) -> None:
        os.close(self.fd)
        if self.gaps is not None:
            self.gaps.close()


def verify_partition(
    partition: PartitionFiles, *, deep: bool, progress: Callable[[int], None]
) -> Iterator[Finding]:
    """Yield what is wrong in a partition's directory, and what is odd."""
    directory = partition.directory
    log = LogCheck(deep=deep, progress=progress)
    lost = _losses(partition)
    for loss in lost:
        yield Finding(loss.path, 0, loss.expected, f"{loss.found}: {loss.what}")
    yield from _names(directory, {loss.path for loss in lost})
    canary = directory / layout.CANARY
    if partition.load_state is not None and not canary.exists():
        expected = "the file that a broker's load deletes"
        # Every broker leaves meta.properties in the root.
        if (directory.parent / layout.META_PROPERTIES).exists():
            found = "none: a broker has loaded the directory; take it back with kafkalog adopt"
            yield Finding(canary, 0, expected, found, is_damage=False)
        else:
            found = "none, though no broker was here: the copy lacks it; copy the log again"
            yield Finding(canary, 0, expected, found)
    yield from _metadata(partition)
    yield from _leader_epochs(partition, log)
    yield from _gap_lists(partition)
    last: _Opened | None = None
    wanted: int | None = None
    while True:
        opened = _open(partition, wanted)
        if opened is None:
            break
        last = opened
        try:
            yield from _segment(partition, opened, log)
        finally:
            opened.close()
        if opened.following is None:
            break
        wanted = opened.following
    yield from _against_journal(partition, last, log)
    yield from _snapshots(partition, last)
    yield from verify_key_indexes(directory)
    yield from _future_times(partition, log)
    yield from _open_transactions(partition, log)
    # An empty last segment begins at the end: retention has taken what was before it.
    end = max(log.last_offset + 1, last.segment.base_offset) if last is not None else None
    yield from _epochs_within(partition, log, end)


def _open(partition: PartitionFiles, wanted: int | None) -> _Opened | None:
    """Open the segment with the offset `wanted`, by default the first; None if the log lacks it."""
    for attempt in range(_TRIES):
        try:
            return _open_now(partition, wanted)
        except FileNotFoundError:
            if attempt + 1 == _TRIES or partition.load_state is not None:
                raise
    return None


def _open_now(partition: PartitionFiles, wanted: int | None) -> _Opened | None:
    directory, state = partition.directory, None
    with contextlib.ExitStack() as held:
        if partition.load_state is not None:
            held.enter_context(locks.SegmentsLock(directory).shared())
            state = partition.load_state()
        segments = list_segments(directory)
        if state is not None:
            segments = [s for s in segments if s.base_offset <= state.active_base]
        if not segments:
            return None
        bases = [segment.base_offset for segment in segments]
        place = 0 if wanted is None else max(0, bisect_right(bases, wanted) - 1)
        segment = segments[place]
        fd = files.open_to_read(segment.log)
        limit = os.fstat(fd).st_size
        is_last = place + 1 == len(segments)
        is_active = is_last if state is None else segment.base_offset == state.active_base
        if state is not None and is_active:
            limit = min(limit, state.active_size)
        following = None if is_last else bases[place + 1]
        gaps = chain = None
        if state is not None:
            gaps = GapLists(directory)
            with contextlib.suppress(CorruptLogError):
                chain = gaps.chain(
                    segment.base_offset,
                    None if is_active else limit,
                    next_offset=segment.base_offset,
                    listed_from=state.listed_from,
                )
        start = bases[0] if state is None else state.log_start_offset
        return _Opened(
            segment=segment,
            fd=fd,
            following=following,
            first=bases[0],
            first_wanted=bases[max(0, bisect_right(bases, start) - 1)],
            state=state,
            is_active=is_active,
            limit=limit,
            chain=chain,
            gaps=gaps,
        )


def _gap_lists(partition: PartitionFiles) -> Iterator[Finding]:
    if partition.load_state is None:
        return
    with locks.SegmentsLock(partition.directory).shared():
        swapped_at = partition.load_state().swapped_at
        gaps = GapLists(partition.directory)
    with contextlib.closing(gaps):
        with contextlib.suppress(CorruptLogError):
            fault = moment_fault(gaps.cleaned, partition.load_number(), swapped_at)
            if fault is not None:
                expected, found = fault
                yield Finding(gaps.cleaned.path, 0, expected, f"{found}; {COPY_AGAIN}")
        for file in (gaps.cleaned, gaps.raw):
            try:
                for section in file.sections():
                    for _ in section.data():
                        pass
            except CorruptLogError as fault:
                yield Finding(file.path, fault.position, str(fault.expected), str(fault.found))


def _segment(partition: PartitionFiles, opened: _Opened, log: LogCheck) -> Iterator[Finding]:
    segment = opened.segment
    following = opened.following
    point = partition.recovery_point
    # A killed broker checks its unsynced data at its next start: it rebuilds the indexes and
    # truncates half a batch.
    is_unsynced = point is not None and (following is None or following > point)
    # A power failure may bring back some of the deleted segments, with others missing in between.
    is_deleted = segment.base_offset < opened.first_wanted
    base = segment.base_offset
    check = SegmentCheck(
        scan=LogScanner(
            FileBytes(opened.fd), segment.log, INSPECT, limit=opened.limit, next_offset=base
        ),
        path=segment.log,
        base_offset=base,
        end_offset=layout.INT64_MAX if following is None else following,
        following=_end_of(opened),
        chain=None if is_deleted else opened.chain,
        is_active=opened.is_active or is_unsynced,
        # Where the last segment of a broker is torn, it goes on; elsewhere it drops what follows.
        may_be_torn=opened.is_active and opened.state is None,
    )
    log.transactions.forget_below(opened.first_wanted)
    transactions = log.transactions.begin(
        segment.transaction_index, base, is_ours=opened.is_active and opened.state is not None
    )
    # Adoption takes a broker's indexes as they are.
    is_exact = opened.state is not None and base >= opened.state.listed_from
    index = OffsetIndexCheck(segment.index, base, is_exact=is_exact)
    times = TimeIndexCheck(segment.time_index, base, is_exact=is_exact)
    for finding in transactions:
        yield _softened(finding, is_unsynced)
    for finding in check.findings(index, times, log):
        yield _softened(finding, is_unsynced and finding.path != segment.log)


def _end_of(opened: _Opened) -> int:
    if opened.following is not None:
        return opened.following
    return layout.INT64_MAX if opened.state is None else opened.state.high_watermark


def _softened(finding: Finding, is_rebuilt: bool) -> Finding:
    if not is_rebuilt or not finding.is_damage:
        return finding
    found = f"{finding.found} (the broker's next start rebuilds it)"
    return Finding(finding.path, finding.position, finding.expected, found, is_damage=False)


def _against_journal(
    partition: PartitionFiles, last: _Opened | None, log: LogCheck
) -> Iterator[Finding]:
    if partition.load_state is None:
        return
    state = partition.load_state() if last is None or last.state is None else last.state
    directory = partition.directory
    active = directory / layout.segment_file(state.active_base, layout.LOG)
    if last is None or not last.is_active:
        # A writer recreates an empty active segment after a failure, and may have died before.
        if state.active_size or (last is None and state.high_watermark > state.log_start_offset):
            expected = f"{state.active_size} committed bytes"
            yield Finding(active, 0, expected, "no file: committed records are lost")
        return
    path = last.segment.log
    if last.limit < state.active_size:
        expected = f"{state.active_size} committed bytes"
        yield Finding(path, last.limit, expected, f"{last.limit}: committed records are lost")
        return
    if state.high_watermark > state.log_start_offset and last.first > state.log_start_offset:
        expected = f"a segment with the log start, offset {state.log_start_offset}"
        yield Finding(directory, 0, expected, f"a first segment of base {last.first}")
    if log.end_position < state.active_size:
        return  # the segment's check has reported that it does not end with a batch
    end = max(log.last_offset + 1, state.active_base)
    if state.active_size and end != state.high_watermark:
        expected = f"the high watermark, {state.high_watermark}, as the log's end"
        yield Finding(path, state.active_size, expected, f"offset {end}")
    stable = max(min(log.transactions.open.values(), default=end), state.log_start_offset)
    if state.last_stable_offset > max(stable, state.log_start_offset):
        expected = f"a last stable offset of at most {stable}, where an open transaction begins"
        yield Finding(path, 0, expected, f"{state.last_stable_offset}, in the journal")


def _future_times(partition: PartitionFiles, log: LogCheck) -> Iterator[Finding]:
    """Report records of the future: retention by time waits for them (KAFKA-18929)."""
    if log.latest_ms > partition.now_ms + _CLOCK_SLACK_MS:
        yield Finding(
            log.latest_path,
            0,
            f"timestamps up to the present, {partition.now_ms}",
            f"{log.latest_ms}: until retention.ms after that time, retention by time deletes "
            "neither this segment nor a later one",
            is_damage=False,
        )


def _open_transactions(partition: PartitionFiles, log: LogCheck) -> Iterator[Finding]:
    """Report transactions without a marker in a stopped broker's log.

    If a later snapshot of the producers has ended one, its marker is lost: readers may take aborted
    records for committed ones. The broker has left the others open: they hide what is behind them.
    A cleaning keeps the marker of each transaction that has a batch. Kafka: ProducerStateManager.
    """
    directory, still_open = partition.directory, log.transactions.open
    if not still_open or partition.load_state is not None or partition.checkpointed.is_live:
        return
    known = latest_snapshot(directory, log_start=0, end=log.last_offset + 1)
    ended = {
        producer: first
        for producer, first in still_open.items()
        if first < known.end_offset and not known.is_open(producer, first)
    }
    for producer, first in ended.items():
        expected = (
            f"a marker that ends the transaction of producer {producer} from offset {first} on, "
            f"which the snapshot of offset {known.end_offset} has as ended"
        )
        yield Finding(directory, 0, expected, "none")
    left = [first for producer, first in still_open.items() if producer not in ended]
    if left:
        found = open_notice(min(left), log.last_offset + 1)
        yield Finding(directory, 0, "ended transactions", found, is_damage=False)


def _losses(partition: PartitionFiles) -> tuple[Loss, ...]:
    """Return what is lost of a broker's log, or of what an adoption took."""
    directory, load_state = partition.directory, partition.load_state
    if load_state is not None:
        with locks.SegmentsLock(directory).shared():
            return lost_adopted(directory, load_state(), list_segments(directory))
    for attempt in range(_TRIES):
        try:
            segments = list_segments(directory)
            end = partition.checkpointed.log_start or 0  # a log that ends below is empty
            end = max(end, next_offset(segments[-1])) if segments else end
            return find_losses(directory, segments, partition.checkpointed, end_offset=end)
        except FileNotFoundError:
            if attempt + 1 == _TRIES:
                raise
    return ()


def _names(directory: Path, lost: Collection[Path]) -> Iterator[Finding]:
    """Report names that nothing reads, and what has a name of ours and is no file of a log.

    Nothing reads foreign files, and indexes without a log that was empty.
    """
    names = sorted(files.list_names(directory))
    yield from verify_kinds(directory, filter(_is_of_partition, names))
    logs = {
        parsed[0]
        for name in names
        if (parsed := layout.parse_segment_file(name)) and parsed[1] == layout.LOG
    }
    for name in names:
        parsed = layout.parse_segment_file(name)
        path = directory / name
        if parsed is None:
            if not _is_of_partition(name):
                expected = "a partition's files alone"
                yield Finding(path, 0, expected, "a foreign one", is_damage=False)
        elif (
            parsed[1] not in (layout.LOG, layout.SNAPSHOT)
            and parsed[0] not in logs
            and parsed[2] != layout.DELETED
            and directory / layout.segment_file(parsed[0], layout.LOG) not in lost
        ):
            yield Finding(path, 0, "a log next to the index", "none", is_damage=False)


def _is_of_partition(name: str) -> bool:
    return (
        name in _KNOWN
        or name.startswith(layout.OURS)
        or layout.parse_segment_file(name) is not None
        or layout.parse_metadata_snapshot(name) is not None
    )


def _metadata(partition: PartitionFiles) -> Iterator[Finding]:
    path = partition.directory / layout.PARTITION_METADATA
    try:
        found = properties(path)
    except FileNotFoundError:
        if partition.topic_id is not None:
            yield Finding(path, 0, f"topic id {partition.topic_id}", "no file")
        return
    except CorruptLogError as fault:
        yield Finding(path, fault.position, str(fault.expected), str(fault.found))
        return
    if found.get("version") != "0":
        yield Finding(path, 0, "version 0", str(found.get("version")))
    topic_id = found.get("topic_id", "none")
    if partition.topic_id is not None and topic_id != partition.topic_id:
        yield Finding(path, 0, f"topic id {partition.topic_id}", topic_id)
    elif not layout.is_topic_id(topic_id):
        yield Finding(path, 0, "a topic id of 22 characters", topic_id)


def _leader_epochs(partition: PartitionFiles, log: LogCheck) -> Iterator[Finding]:
    """Check the leader epochs; ignore those of a commit in flight, or of a dead one."""
    path = partition.directory / layout.LEADER_EPOCH_CHECKPOINT
    try:
        data = files.read_file(path)
        entries = [
            (epoch, start) for _, (epoch, start) in checkpoint_entries(path, data, EPOCH_FIELDS)
        ]
    except FileNotFoundError:
        return
    except CorruptLogError as fault:
        yield Finding(path, fault.position, str(fault.expected), str(fault.found))
        return
    if partition.load_state is not None:
        state = partition.load_state()
        entries = leader_epochs.committed(entries, state.high_watermark, state.leader_epoch)
    for before, (epoch, start) in pairwise(entries):
        if epoch <= before[0] or start <= before[1]:
            expected = f"an epoch above {before[0]} from an offset above {before[1]}"
            yield Finding(path, 0, expected, f"epoch {epoch} from {start}")
            return
    log.epochs = entries


def _epochs_within(partition: PartitionFiles, log: LogCheck, end: int | None) -> Iterator[Finding]:
    path = partition.directory / layout.LEADER_EPOCH_CHECKPOINT
    for epoch, start in log.epochs:
        if start < 0 or (end is not None and start > end):
            yield Finding(
                path,
                0,
                f"an epoch that begins at offset {end} or below",
                f"epoch {epoch} from {start}",
                is_damage=partition.recovery_point is None,
            )


def _snapshots(partition: PartitionFiles, last: _Opened | None) -> Iterator[Finding]:
    """Check the producer snapshots; a killed broker may leave half of one."""
    directory, is_damage = partition.directory, partition.recovery_point is None
    names = sorted(files.list_names(directory))
    if last is not None and last.state is not None and last.state.producer_snapshot >= 0:
        wanted = layout.segment_file(last.state.producer_snapshot, layout.SNAPSHOT)
        is_current = partition.load_state is None or partition.load_state() == last.state
        if wanted not in names and is_current:
            yield Finding(directory / wanted, 0, "the producers at the log's end", "no file")
    for name in names:
        parsed = layout.parse_segment_file(name)
        if parsed is None or parsed[1:] != (layout.SNAPSHOT, ""):
            continue
        path = directory / name
        try:
            entries = parse_snapshot(files.read_file(path), path)
        except FileNotFoundError:
            continue  # swept meanwhile
        except CorruptLogError as fault:
            expected, found = str(fault.expected), str(fault.found)
            yield Finding(path, fault.position, expected, found, is_damage)
            continue
        for place, entry in enumerate(entries):
            if max(entry.last_offset, entry.current_txn_first_offset) >= parsed[0]:
                position = layout.SNAPSHOT_HEADER.size + place * layout.SNAPSHOT_ENTRY.size
                expected = f"offsets below {parsed[0]}, the snapshot's"
                found = f"producer {entry.producer_id} at offset {entry.last_offset}"
                yield Finding(path, position, expected, found, is_damage)
