"""Why is it not compacting? Explain what prevents each partition's cleaning, in sentences.

Each finding is a sentence about the partition now, with the time or number that decides, and a
remedy if there is one. The first finding is the answer. Only names, sizes, index ends and small
files are read, and the header of an open transaction's first batch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from kafkalog.cleaner.dedup.log_to_clean import CleaningPlan
from kafkalog.cleaner.report.reported import reported
from kafkalog.cleaner.report.reported_log import BROKERS, COPY
from kafkalog.cleaner.state.uncleanable import fault_reason
from kafkalog.errors import KafkaLogError
from kafkalog.storage_engine.format import layout
from kafkalog.storage_engine.fs import files

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kafkalog.cleaner.report.reported_log import ReportedLog, ReportedPartition
    from kafkalog.storage_engine.log.log import Log
    from kafkalog.storage_engine.metadata.state import PartitionState

_CLEAN = "`kafkalog clean {path} {topic} --force`"
_REFUSALS = frozenset({"policy", "broker", "unreadable", "paused", "uncleanable"})
"""Codes of what keeps every cleaner away."""
_DECIDE = ("min.cleanable.dirty.ratio", "min.compaction.lag.ms", "segment.bytes", "segment.ms")
"""Configs that decide when a partition is cleaned, whose defaults a broker may set."""
_NOW = "`kafkalog clean {path} {topic}` cleans it once, now"
_ALTER = "`kafkalog topics alter {path} {topic} --config "


@dataclass(frozen=True, slots=True)
class Reason:
    """A fact about a partition, and what would change it."""

    code: str
    """A word for programs: policy, broker, unreadable, cleaning, paused, uncleanable, due, cleaner,
    no cleaner, empty, all clean, active segment, transaction, lag, pin, ratio, tombstones,
    unknown."""
    sentence: str
    remedy: str | None = None
    until_ms: int | None = None
    """When it ends without help (epoch ms), if that is known."""
    commands: tuple[str, ...] = ()
    """The command lines in the remedy, in their order."""


@dataclass(frozen=True, slots=True)
class Explanation:
    """Why a partition is cleaned or not; the first finding is the answer."""

    topic: str
    partition: int
    is_due: bool
    """Whether the next background cleaner that looks for work will clean it."""
    findings: tuple[Reason, ...]

    @property
    def answer(self) -> str:
        """The answer in a few words."""
        codes = {finding.code for finding in self.findings}
        if "cleaning" in codes:
            return "is being cleaned"
        if self.is_due:
            if "cleaner" not in codes:
                return "is due, and no cleaner runs" if "no cleaner" in codes else "is due"
            return "will be tried again" if "uncleanable" in codes else "will be cleaned"
        if codes & {"empty", "all clean"}:
            return "is clean"
        return "is not cleaned now" if codes & _REFUSALS else "is not due"


def explain(
    engine: Log, topic: str, now_ms: int, found: ReportedLog | None = None
) -> list[Explanation]:
    """Explain each partition of a topic, with the plans of now; raises UnknownTopicError."""
    log = reported(engine, now_ms) if found is None else found
    return [_explained(log, topic, partition) for partition in engine.describe(topic).numbers()]


def explain_topics(engine: Log, topic: str | None, now_ms: int) -> list[Explanation]:
    """Explain each partition of a topic, or of all (None); raises UnknownTopicError."""
    return explain_reported(reported(engine, now_ms), topic)


def explain_reported(log: ReportedLog, topic: str | None) -> list[Explanation]:
    """Explain each partition of a topic, or of all, as of a report; raises UnknownTopicError."""
    names = sorted(log.state.topics) if topic is None else [log.state.topic(topic).name]
    return [
        _explained(log, name, partition)
        for name in names
        for partition in log.state.topics[name].numbers()
    ]


def utc_time(time_ms: int) -> str:
    """Return a time (epoch ms) as `2026-11-21 14:02:07 UTC`."""
    try:
        return f"{datetime.fromtimestamp(time_ms // 1000, UTC):%Y-%m-%d %H:%M:%S} UTC"
    except (OverflowError, ValueError, OSError):
        return f"{time_ms} ms"


def _explained(reported: ReportedLog, topic: str, partition: int) -> Explanation:
    now_ms = reported.now_ms
    try:
        log, state = reported.of(topic, partition)
    except (OSError, KafkaLogError) as fault:
        files.pass_on(fault)
        text = f"It cannot be read: {fault_reason(fault)}."
        remedy = "`kafkalog verify {path} {topic}` shows what is damaged"
        unreadable = _told(Reason("unreadable", text, remedy), reported, topic)
        return Explanation(topic, partition, False, (unreadable,))
    place = reported.partition(topic, partition)
    found = [*_refusals(reported, place, log, now_ms)]
    known, mark = reported.state.topics[topic], place.mark()
    is_tried = not place.is_paused() and (mark is None or mark.is_due(known.config, now_ms))
    is_tried &= all(one.code == "uncleanable" for one in found)
    if log.config.is_compacted:
        if log.is_eligible and known.knows_defaults:
            reasons = [*_reasons_to_clean(log)]
            reasons += [one for _, one in _barriers(reported, log, state)]
        else:
            reasons = [*waits(reported, log, state)]
        # Where cleaners are kept away, what helps otherwise does not.
        found += [one if not found else replace(one, remedy=None) for one in reasons]
        if is_tried:
            found += _cleaners(log, state, place, reported.is_cleaner_running)
        if known.knows_defaults:
            found += _tombstones(log, place, now_ms)
    findings = tuple(_told(one, reported, topic) for one in found)
    return Explanation(topic, partition, log.is_eligible and is_tried, findings)


def _told(found: Reason, reported: ReportedLog, topic: str) -> Reason:
    """Return a finding with names in its remedy, whose commands are between backticks."""
    if found.remedy is None:
        return found
    parts = [
        part.replace("{path}", reported.root).replace("{topic}", topic)
        for part in found.remedy.split("`")
    ]
    return replace(found, remedy="".join(parts), commands=tuple(parts[1::2]))


# --- what keeps every cleaner away ---------------------------------------------------------------


def _refusals(
    reported: ReportedLog, place: ReportedPartition, log: CleaningPlan, now_ms: int
) -> Iterator[Reason]:
    if reported.owner == COPY:
        yield Reason(
            "broker",
            "It is in a copy of a broker's partitions, which kafkalog only reads.",
            "`kafkalog adopt {path}`",
        )
        return
    if reported.owner == BROKERS:
        yield Reason(
            "broker",
            "It is in a Kafka broker's directory, which kafkalog only reads: the broker cleans it.",
            "stop the broker, then `kafkalog adopt {path}`",
        )
        return
    if not log.config.is_compacted:
        if log.config.cleanup_policy:
            text = f"Its cleanup.policy is {','.join(sorted(log.config.cleanup_policy))}"
        else:
            text = "Its cleanup.policy is empty, which means no cleanup at all"
        yield Reason(
            "policy",
            f"{text}, and only topics with compact are compacted.",
            _ALTER + "cleanup.policy=compact`",
        )
        return
    if place.is_being_cleaned():
        yield Reason("cleaning", "Some process cleans it, or deletes from it, at this moment.")
    if place.is_paused():
        yield Reason(
            "paused",
            "Some process keeps cleaners away from it (abort_and_pause).",
            "it ends with that process, at the latest",
        )
    mark = place.mark()
    if mark is not None:
        known = reported.state.topic(log.topic).config
        since = f" since {utc_time(mark.since_ms)}" if mark.since_ms else ""
        times = f", {mark.failures} times in a row" if mark.failures > 1 else ""
        is_retried = mark.retry_at_ms < layout.INT64_MAX
        if mark.is_due(known, now_ms):
            retry = " The next cleaner tries again."
        elif is_retried:
            retry = f" Cleaners leave it alone until {utc_time(mark.retry_at_ms)}."
        else:
            retry = " Cleaners leave it alone."
        yield Reason(
            "uncleanable",
            f"It is uncleanable{since}{times}: {mark.reason.rstrip('.')}.{retry}",
            "`kafkalog verify {path} {topic}` shows damage; once the reason is gone, a cleaning "
            "with --force does not wait",
            mark.retry_at_ms if is_retried else None,
        )


# --- what brings a cleaner -----------------------------------------------------------------------


def _reasons_to_clean(log: CleaningPlan) -> Iterator[Reason]:
    config = log.config
    if log.dirty_ratio > config.min_cleanable_dirty_ratio:
        yield Reason(
            "due",
            f"It is due: its dirty ratio is {log.dirty_ratio:.2f} "
            f"({_size(log.cleanable_bytes)} of {_size(log.cleanable_bytes + log.clean_bytes)}), "
            f"above min.cleanable.dirty.ratio {config.min_cleanable_dirty_ratio:g}.",
            _NOW,
        )
    if log.cleanable_bytes > 0 and log.compaction_delay_ms > 0:
        yield Reason(
            "due",
            f"It is due: max.compaction.lag.ms ({duration(config.max_compaction_lag_ms)}) passed "
            f"{duration(log.compaction_delay_ms)} ago.",
            _NOW,
        )
    if log.is_horizon_due and log.earliest_delete_horizon_ms is not None:
        yield Reason(
            "due",
            "It is due: the delete horizon of a tombstone passed at "
            f"{utc_time(log.earliest_delete_horizon_ms)}.",
            _NOW,
        )
    elif log.is_horizon_due:
        yield Reason(
            "due",
            "It is due: a broker has cleaned it, and only a cleaning finds out when its "
            "tombstones may go.",
            _NOW,
        )


def _cleaners(
    log: CleaningPlan, state: PartitionState, place: ReportedPartition, is_running: bool | None
) -> Iterator[Reason]:
    if not log.has_work and log.first_dirty_offset >= state.high_watermark:
        return
    if is_running:
        if log.is_eligible:
            yield Reason(
                "cleaner", "A background cleaner runs; it takes the filthiest partition first."
            )
    elif is_running is not None:
        text = "No background cleaner runs on this log, in any process"
        remedy = "keep one running with `kafkalog cleaner {path}`, or kafkalog.open(path, "
        remedy += "cleaner=True)"
        if not place.may_clean():
            text += ", and this one may not write the directory"
            remedy = f"run one on a host and as a user that may write {place.place}"
        yield Reason("no cleaner", f"{text}.", remedy)


# --- what lets it wait ---------------------------------------------------------------------------


def waits(reported: ReportedLog, log: CleaningPlan, state: PartitionState) -> Iterator[Reason]:
    """Yield what a partition that is not cleaned now waits for; the first one is the answer."""
    place = reported.partition(log.topic, log.partition)
    if state.high_watermark <= state.log_start_offset:
        yield Reason("empty", "It is empty.")
        return
    if log.first_dirty_offset >= state.high_watermark:
        yield Reason(
            "all clean", f"All of it is clean, up to offset {state.high_watermark}.{_last(place)}"
        )
        return
    known = reported.state.topics[log.topic]
    if not known.knows_defaults:
        # Its cleaner is the broker, with configs of its own; it knows no pins.
        yield from (finding for _, finding in _transaction(reported, log, state))
        unknown = [name for name in _DECIDE if name not in known.config]
        if unknown:
            yield Reason(
                "unknown",
                f"Whether it is due is not known, because its {', '.join(unknown)} may be the "
                "broker's own, which are in no log directory.",
            )
        elif log.dirty_ratio > log.config.min_cleanable_dirty_ratio:
            yield next(_reasons_to_clean(log))
        else:
            yield _ratio(log, place)
        return
    if log.is_due:
        yield _awaited(log)
    elif log.cleanable_bytes > 0:
        yield _ratio(log, place)
    # The barrier at the lowest offset comes first.
    barriers = [*_barriers(reported, log, state), *_active_segment(log, state)]
    yield from (finding for _, finding in sorted(barriers, key=lambda barrier: barrier[0]))


def _barriers(
    reported: ReportedLog, log: CleaningPlan, state: PartitionState
) -> Iterator[tuple[int, Reason]]:
    """Yield what holds records back outside the active segment, each with its offset."""
    yield from _transaction(reported, log, state)
    yield from _lag(log, reported.now_ms)
    yield from _pin(reported, log, state)


def _awaited(log: CleaningPlan) -> Reason:
    bound = "; max.compaction.lag.ms bounds the wait"
    is_bounded = log.config.max_compaction_lag_ms < layout.INT64_MAX
    return Reason(
        "pin",
        "It would be due, but tasks read the changelog of a snapshot of this log: no background "
        "cleaning begins until they have ended.",
        f"it ends with those tasks{bound if is_bounded else ''}; {_CLEAN} does not wait",
    )


def _ratio(log: CleaningPlan, place: ReportedPartition) -> Reason:
    wanted = log.config.min_cleanable_dirty_ratio
    text = (
        f"Its dirty ratio is {log.dirty_ratio:.2f} ({_size(log.cleanable_bytes)} of "
        f"{_size(log.cleanable_bytes + log.clean_bytes)}), and has to exceed "
        f"min.cleanable.dirty.ratio, {wanted:g}"
    )
    if wanted < 1.0:
        missing = int(log.clean_bytes * wanted / (1.0 - wanted)) + 1 - log.cleanable_bytes
        text += f": with {_size(max(missing, 1))} more in closed segments it does"
    return Reason(
        "ratio",
        f"{text}.{_last(place)}",
        f"{_ALTER}min.cleanable.dirty.ratio={max(0.0, log.dirty_ratio * 0.9):.2g}`, or {_CLEAN}",
    )


def _active_segment(log: CleaningPlan, state: PartitionState) -> Iterator[tuple[int, Reason]]:
    base = max(state.active_base, log.first_dirty_offset)
    if base >= state.high_watermark:
        return
    share = "The rest is" if log.has_closed_dirty else "Everything dirty is"
    config = log.config
    sizes = f"{_size(state.active_size)} of {_size(config.segment_bytes)}"
    if state.active_size >= config.segment_bytes:
        what_ends_it = f"it has reached segment.bytes ({sizes}), so the next append begins"
    else:
        latest = " at the latest" if config.segment_jitter_ms else ""
        what_ends_it = (
            f"an append that would take it above segment.bytes ({sizes}), or that is more than "
            f"{duration(config.segment_lifetime_ms)} after its first batch (segment.ms, "
            f"max.compaction.lag.ms){latest}, begins"
        )
    yield (
        base,
        Reason(
            "active segment",
            f"{share} in the active segment, from offset {base} on, which is not cleaned; "
            f"{what_ends_it} another one.",
            f"{_CLEAN} closes it first; a smaller segment.bytes or segment.ms closes it sooner",
        ),
    )


def _transaction(
    reported: ReportedLog, log: CleaningPlan, state: PartitionState
) -> Iterator[tuple[int, Reason]]:
    stable = state.last_stable_offset
    if stable >= state.high_watermark:
        return
    whose, since = "A transaction", ""
    header = reported.batch_at(log.topic, log.partition, stable)
    if header is not None and header.producer_id >= 0:
        whose = f"The transaction of producer {header.producer_id}"
    if header is not None and header.max_timestamp >= 0:
        since = f", since {utc_time(header.max_timestamp)}"
    yield (
        stable,
        Reason(
            "transaction",
            f"{whose} is open from offset {stable} on{since}, and no cleaning goes past it.",
            "it ends with its producer's marker: append what followed in the log it came from, "
            "`kafkalog append {path} {topic} --raw FILE --partition " + f"{log.partition}`",
        ),
    )


def _lag(log: CleaningPlan, now_ms: int) -> Iterator[tuple[int, Reason]]:
    if log.lagging is None:
        return
    lag = log.config.min_compaction_lag_ms
    base, latest = log.lagging
    yield (
        base,
        Reason(
            "lag",
            f"min.compaction.lag.ms ({duration(lag)}) keeps offset {base} and what "
            f"follows from being cleaned until {utc_time(latest + lag)} at least.",
            f"{_ALTER}min.compaction.lag.ms={max(0, now_ms - latest)}`",
            latest + lag,
        ),
    )


def _pin(
    reported: ReportedLog, log: CleaningPlan, state: PartitionState
) -> Iterator[tuple[int, Reason]]:
    offset, until_ms = reported.pin(log.topic, log.partition)
    if offset < min(state.active_base, state.last_stable_offset):
        # After its lease, a pin holds as long as a reader uses it.
        is_leased = until_ms > reported.now_ms
        until = f"until {utc_time(until_ms)}, or later if the reader continues"
        yield (
            max(offset, log.first_dirty_offset),
            Reason(
                "pin",
                f"A reader has pinned a snapshot at offset {offset}, and no cleaning goes past "
                f"that {until if is_leased else 'as long as a task reads it'}.",
                "it ends with the readers of that snapshot; once they have ended, "
                "kafkalog clean --force does not wait",
                until_ms if is_leased else None,
            ),
        )


# --- what else is true ---------------------------------------------------------------------------


def _tombstones(log: CleaningPlan, place: ReportedPartition, now_ms: int) -> Iterator[Reason]:
    horizon = log.earliest_delete_horizon_ms
    if horizon is None or horizon <= now_ms:
        return
    last = place.last_cleaning()
    count = last.tombstones if last and last.end_offset == log.first_dirty_offset else 0
    what = f"{count} tombstone{'s' * (count != 1)}" if count else "Tombstones"
    yield Reason(
        "tombstones",
        f"{what} wait{'s' * (count == 1)} for the delete horizon that a cleaning has set, by the "
        f"delete.retention.ms of that time; the first may go at {utc_time(horizon)}.",
        None,
        horizon,
    )


def _last(place: ReportedPartition) -> str:
    last = place.last_cleaning()
    return "" if last is None else f" It was cleaned last at {utc_time(last.ended_ms)}."


def _size(size: int) -> str:
    value, units = float(size), ["bytes", "KiB", "MiB", "GiB", "TiB"]
    while value >= 1024 and len(units) > 1:
        value /= 1024
        del units[0]
    return f"{size} bytes" if units[0] == "bytes" else f"{value:.1f} {units[0]}"


def duration(duration_ms: int) -> str:
    """Return milliseconds in the largest unit that is at least one."""
    for name, size in (("day", 86_400_000), ("hour", 3_600_000), ("minute", 60_000)):
        if duration_ms >= size:
            value = f"{duration_ms / size:.1f}".removesuffix(".0")
            return f"{value} {name}{'s' * (value != '1')}"
    return f"{duration_ms / 1000:g} s"
