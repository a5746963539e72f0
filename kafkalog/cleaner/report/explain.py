"""Why is it not compacting? Explain what prevents each partition's cleaning, in sentences.

Each finding is a sentence about the partition now, with the time or number that decides, and a
remedy if there is one. The first finding is the answer. Only names, sizes, index ends and small
files are read, and the header of an open transaction's first batch.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final

from kafkalog.cleaner.plan import OBSTACLES, Why, unknown_configs
from kafkalog.cleaner.report.judged import Judged, judged
from kafkalog.cleaner.state.uncleanable import fault_reason
from kafkalog.errors import KafkaLogError
from kafkalog.storage_engine.format import layout
from kafkalog.storage_engine.fs import files

if TYPE_CHECKING:
    from kafkalog.cleaner.shelf import Moment
    from kafkalog.storage_engine.format.batch import BatchHeader

_CLEAN = "`kafkalog clean {path} {topic} --force`"
_REFUSALS = frozenset({"policy", "broker", "unreadable", "paused", "uncleanable"})
"""Codes of what keeps every cleaner away."""
_KEEP = "`kafkalog cleaner {path}`, or kafkalog.open(path, cleaner=True)"
_NOW = "`kafkalog clean {path} {topic}` cleans it once, now"
_ALTER = "`kafkalog topics alter {path} {topic} --config "


@dataclass(frozen=True, slots=True)
class Reason:
    """A fact about a partition, and what would change it."""

    code: str
    """A word for programs: policy, broker, unreadable, cleaning, paused, uncleanable, due, cleaner,
    no cleaner, cleaner unknown, empty, all clean, active segment, transaction, lag, pin, ratio,
    tombstones, unknown."""
    sentence: str
    remedy: str | None = None
    until_ms: int | None = None
    """When it ends without help (epoch ms), if that is known."""
    commands: tuple[str, ...] = ()
    """The command lines in the remedy, in their order."""
    is_obstacle: bool = False
    """Whether it may keep a forced cleaning away from records."""


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


def explain(moment: Moment, topic: str | None = None) -> list[Explanation]:
    """Explain each partition of a topic, or of all, at one moment; raises UnknownTopicError."""
    return [
        _unreadable(moment, known.name, partition, found)
        if isinstance(found, Exception)
        else _explained(partition, found)
        for known, partition, found in judged(moment, topic, asks_cleaners=True)
    ]


def reason_of(why: Why, at: Judged) -> Reason:
    """Return the sentence of a fact, and what would change it."""
    found = replace(_SENTENCES[why](at), is_obstacle=why in OBSTACLES)
    return _with_names(found, at.moment, at.known.name)


def utc_time(time_ms: int) -> str:
    """Return a time (epoch ms) as `2026-11-21 14:02:07 UTC`."""
    try:
        return f"{datetime.fromtimestamp(time_ms // 1000, UTC):%Y-%m-%d %H:%M:%S} UTC"
    except (OverflowError, ValueError, OSError):
        return f"{time_ms} ms"


def _explained(partition: int, at: Judged) -> Explanation:
    verdict = at.verdict
    refusals = [reason_of(why, at) for why in verdict.refusals]
    reasons = [reason_of(why, at) for why in verdict.reasons]
    if refusals:  # where cleaners are kept away, what helps otherwise does not
        reasons = [replace(one, remedy=None, commands=()) for one in reasons]
    others = [reason_of(why, at) for why in verdict.others]
    findings = (*refusals, *reasons, *others)
    return Explanation(at.known.name, partition, verdict.is_due, findings)


def _unreadable(moment: Moment, topic: str, partition: int, fault: Exception) -> Explanation:
    text = f"It cannot be read: {fault_reason(fault)}."
    remedy = f"{moment.verify} shows what is damaged"
    finding = _with_names(Reason("unreadable", text, remedy, is_obstacle=True), moment, topic)
    return Explanation(topic, partition, False, (finding,))


def _with_names(found: Reason, moment: Moment, topic: str) -> Reason:
    """Return a finding with names in its remedy, whose commands are between backticks."""
    if found.remedy is None:
        return found
    parts = [
        part.replace("{path}", shlex.quote(moment.root)).replace("{topic}", topic)
        for part in found.remedy.split("`")
    ]
    return replace(found, remedy="".join(parts), commands=tuple(parts[1::2]))


# --- what keeps every cleaner away ---------------------------------------------------------------


def _policy(at: Judged) -> Reason:
    policy = at.plan.config.cleanup_policy
    text = "Its cleanup.policy is empty, so nothing in it is ever cleaned up."
    if policy:
        named = ",".join(sorted(policy))
        text = f"Its cleanup.policy is {named}, and only topics with compact are compacted."
    return Reason(
        "policy",
        text,
        _ALTER + "cleanup.policy=compact`",
    )


def _uncleanable(at: Judged) -> Reason:
    mark = at.mark
    assert mark is not None
    since = f" since {utc_time(mark.since_ms)}" if mark.since_ms else ""
    times = f", {mark.failures} times in a row" if mark.failures > 1 else ""
    is_retried = mark.retry_at_ms < layout.INT64_MAX
    if mark.is_due(at.known.config, at.moment.now_ms):
        retry = " The next cleaner tries again."
    elif is_retried:
        retry = f" Cleaners leave it alone until {utc_time(mark.retry_at_ms)}."
    else:
        retry = " Cleaners leave it alone."
    return Reason(
        "uncleanable",
        f"It is uncleanable{since}{times}: {mark.reason.rstrip('.')}.{retry}",
        f"{at.moment.verify} shows damage; once the reason is gone, a cleaning with --force does "
        "not wait",
        mark.retry_at_ms if is_retried else None,
    )


# --- what brings a cleaner -----------------------------------------------------------------------


def _above_ratio(at: Judged) -> Reason:
    wanted = at.plan.config.min_cleanable_dirty_ratio
    text = f"its dirty ratio is {_ratio(at)}, above min.cleanable.dirty.ratio {wanted:g}"
    if at.plan.closing_bytes:
        text += (
            f", counted with the active segment ({_size(at.plan.closing_bytes)}), which the cleaner"
            " closes because the topic sets no segment.bytes"
        )
    return _due(f"{text}.")


def _max_lag(at: Judged) -> Reason:
    lag, delay = at.plan.config.max_compaction_lag_ms, at.plan.compaction_delay_ms
    return _due(f"max.compaction.lag.ms ({duration(lag)}) passed {duration(delay)} ago.")


def _horizon(at: Judged) -> Reason:
    time = utc_time(at.plan.earliest_delete_horizon_ms or 0)
    return _due(f"the delete horizon of a tombstone passed at {time}.")


def _due(text: str) -> Reason:
    return Reason("due", f"It is due: {text}", _NOW)


def _no_cleaner(at: Judged) -> Reason:
    text = "No background cleaner runs on this log, in any process"
    remedy = f"keep one running with {_KEEP}"
    if not at.moment.may_clean(at.plan.topic, at.plan.partition):
        text += ", and this one may not write the directory"
        place = at.moment.notes(at.plan.topic, at.plan.partition).place
        remedy = f"run one on a host and as a user that may write {place}"
    return Reason("no cleaner", f"{text}.", remedy)


def _cleaner_unknown(at: Judged) -> Reason:
    return Reason(
        "cleaner unknown",
        "Whether a background cleaner runs on this log is not known, because no lock shows it.",
        f"if in doubt, start one, because any number may run: {_KEEP}",
    )


# --- what lets it wait ---------------------------------------------------------------------------


def _unknown(at: Judged) -> Reason:
    return Reason(
        "unknown",
        f"Whether it is due is not known, because its {', '.join(unknown_configs(at.known))} may "
        "be the broker's own, which are in no log directory.",
    )


def _readers(at: Judged) -> Reason:
    bound = "; max.compaction.lag.ms bounds the wait"
    is_bounded = at.plan.config.max_compaction_lag_ms < layout.INT64_MAX
    return Reason(
        "pin",
        "It would be due, but tasks read the changelog of a snapshot of this log: no background "
        "cleaning begins until they have ended.",
        f"it ends with those tasks{bound if is_bounded else ''}; {_CLEAN} does not wait",
    )


def _below_ratio(at: Judged) -> Reason:
    plan = at.plan
    wanted = plan.config.min_cleanable_dirty_ratio
    text = (
        f"Its dirty ratio is {_ratio(at)}, and has to exceed min.cleanable.dirty.ratio, {wanted:g}"
    )
    if wanted < 1.0:
        missing = int(plan.clean_bytes * wanted / (1.0 - wanted)) + 1 - plan.cleanable_bytes
        where = "" if plan.config.closes_by_itself else " in closed segments"
        text += f": with {_size(max(missing, 1))} more{where} it does"
    tenths = math.ceil(round(plan.dirty_ratio * 10, 6)) - 1  # the highest below the ratio
    remedy = f"{_CLEAN} does not wait"
    if tenths > 0:
        remedy += (
            f"; {_ALTER}min.cleanable.dirty.ratio={tenths / 10:g}` lets cleaners come sooner from "
            "now on, and rewrite more bytes for each byte appended"
        )
    return Reason("ratio", f"{text}.{_last(at)}", remedy)


def _active_segment(at: Judged) -> Reason:
    state, config = at.plan.state, at.plan.config
    base = max(state.active_base, at.plan.first_dirty_offset)
    share = "The rest is" if at.plan.has_closed_dirty else "Everything dirty is"
    where = f"{share} in the active segment, from offset {base} on, which is not cleaned"
    if config.closes_by_itself and at.known.knows_defaults:
        text = (
            f"{where} yet. That segment has {_size(state.active_size)}. Because the topic sets no "
            f"segment.bytes, the cleaner closes it once {_closing(at)}."
        )
        return Reason("active segment", text, f"{_CLEAN} closes it first")
    sizes = f"{_size(state.active_size)} of {_size(config.segment_bytes)}"
    if state.active_size >= config.segment_bytes:
        what_ends_it = f"it has reached segment.bytes ({sizes}), so the next append begins"
    else:
        latest = " at the latest" if config.segment_jitter_ms else ""
        is_segment_ms = config.segment_ms <= config.max_compaction_lag_ms
        age = "segment.ms" if is_segment_ms else "max.compaction.lag.ms"
        what_ends_it = (
            f"an append that would take it above segment.bytes ({sizes}), or that is more than "
            f"{duration(config.segment_lifetime_ms)} after its first batch ({age}){latest}, begins"
        )
    return Reason(
        "active segment",
        f"{where}; {what_ends_it} another one.",
        f"{_CLEAN} closes it first; a smaller segment.bytes or segment.ms closes it sooner",
    )


def _closing(at: Judged) -> str:
    """Return what has to come before the cleaner closes the active segment."""
    plan, least = at.plan, at.moment.closing_min
    wanted = plan.config.min_cleanable_dirty_ratio
    size = f"it has {_size(least)}, as less would save too little room"
    ratio = f"the dirty ratio, counted with it, exceeds min.cleanable.dirty.ratio, {wanted:g}"
    if plan.barriers():
        return f"{size}, and once {ratio}. What is held back does not count"
    is_small, is_below = plan.free_bytes < least, plan.ratio_with_active <= wanted
    if is_below:
        ratio += f"; now it is {plan.ratio_with_active:.2f}"
    if is_small == is_below:
        return f"{size}, and once {ratio}"
    return size if is_small else ratio


def _transaction(at: Judged) -> Reason:
    stable = at.plan.state.last_stable_offset
    whose, since = "A transaction", ""
    header = _header_at(at, stable)
    if header is not None and header.producer_id >= 0:
        whose = f"The transaction of producer {header.producer_id}"
    if header is not None and header.max_timestamp >= 0:
        since = f", since {utc_time(header.max_timestamp)}"
    return Reason(
        "transaction",
        f"{whose} is open from offset {stable} on{since}, and no cleaning goes past it.",
        "it ends with its producer's marker: append what followed in the log it came from, "
        "`kafkalog append {path} {topic} --raw FILE --partition " + f"{at.plan.partition}`",
    )


def _header_at(at: Judged, offset: int) -> BatchHeader | None:
    """Return the header of the batch at an offset; None if it cannot be read."""
    try:
        with at.moment.snapshot(at.plan.topic, at.plan.partition, offset) as snapshot:
            for segment in snapshot.open_segments(offset, snapshot.state.high_watermark):
                for _, header in segment.batches_from(offset):
                    return header
    except (OSError, KafkaLogError) as raised:
        files.pass_on(raised)
    return None


def _min_lag(at: Judged) -> Reason:
    lag = at.plan.config.min_compaction_lag_ms
    base, latest = at.plan.lagging or (0, 0)
    return Reason(
        "lag",
        f"min.compaction.lag.ms ({duration(lag)}) keeps offset {base} and what "
        f"follows from being cleaned until {utc_time(latest + lag)} at least.",
        f"it ends by itself; {_ALTER}min.compaction.lag.ms=0`, Kafka's default, keeps nothing back "
        "from now on",
        latest + lag,
    )


def _pin(at: Judged) -> Reason:
    offset, until_ms = at.plan.pinned
    # After its lease, a pin holds as long as a reader uses it.
    is_leased = until_ms > at.moment.now_ms
    until = f"until {utc_time(until_ms)}, or later if the reader continues"
    return Reason(
        "pin",
        f"A reader has pinned a snapshot at offset {offset}, and no cleaning goes past "
        f"that {until if is_leased else 'as long as a task reads it'}.",
        "it ends with the readers of that snapshot; once they have ended, "
        "kafkalog clean --force does not wait",
        until_ms if is_leased else None,
    )


def _tombstones(at: Judged) -> Reason:
    horizon, count = at.plan.earliest_delete_horizon_ms or 0, at.tombstones or 0
    what = f"{count} tombstone{'s' * (count != 1)}" if count else "Tombstones"
    them = "it" if count == 1 else "them"
    return Reason(
        "tombstones",
        f"{what} stay{'s' * (count == 1)} for followers to see, for the delete.retention.ms that "
        f"held when a cleaning first met {them}; the first may go at {utc_time(horizon)}.",
        None,
        horizon,
    )


_SENTENCES: Final[Mapping[Why, Callable[[Judged], Reason]]] = {
    Why.COPY: lambda at: Reason(
        "broker",
        "It is in a copy of a broker's partitions, which kafkalog only reads.",
        "`kafkalog adopt {path}`",
    ),
    Why.BROKERS: lambda at: Reason(
        "broker",
        "It is in a Kafka broker's directory, which kafkalog only reads: the broker cleans it.",
        "stop the broker, then `kafkalog adopt {path}`",
    ),
    Why.POLICY: _policy,
    Why.CLEANING: lambda at: Reason(
        "cleaning", "A process is cleaning it, or deleting from it, at this moment."
    ),
    Why.PAUSED: lambda at: Reason(
        "paused",
        "A process keeps cleaners away from it (abort_and_pause).",
        "it ends with that process, at the latest",
    ),
    Why.UNCLEANABLE: _uncleanable,
    Why.ABOVE_RATIO: _above_ratio,
    Why.MAX_LAG: _max_lag,
    Why.HORIZON: _horizon,
    Why.HORIZON_UNKNOWN: lambda at: _due(
        "a broker has cleaned it, and only a cleaning finds out when its tombstones may go."
    ),
    Why.CLEANER: lambda at: Reason(
        "cleaner", "A background cleaner runs; it takes the filthiest partition first."
    ),
    Why.NO_CLEANER: _no_cleaner,
    Why.CLEANER_UNKNOWN: _cleaner_unknown,
    Why.EMPTY: lambda at: Reason("empty", "It is empty."),
    Why.ALL_CLEAN: lambda at: Reason(
        "all clean", f"All of it is clean, up to offset {at.plan.state.high_watermark}.{_last(at)}"
    ),
    Why.UNKNOWN: _unknown,
    Why.READERS: _readers,
    Why.BELOW_RATIO: _below_ratio,
    Why.TRANSACTION: _transaction,
    Why.MIN_LAG: _min_lag,
    Why.PIN: _pin,
    Why.ACTIVE_SEGMENT: _active_segment,
    Why.TOMBSTONES: _tombstones,
}


# --- what sentences are made of ------------------------------------------------------------------


def _ratio(at: Judged) -> str:
    plan = at.plan
    sizes = f"{_size(plan.dirty_bytes)} dirty of {_size(plan.dirty_bytes + plan.clean_bytes)}"
    return f"{plan.dirty_ratio:.2f} ({sizes})"


def _last(at: Judged) -> str:
    return "" if at.last is None else f" It was cleaned last at {utc_time(at.last.ended_ms)}."


def _size(size: int) -> str:
    value, units = float(size), ["bytes", "KiB", "MiB", "GiB", "TiB"]
    while value >= 1024 and len(units) > 1:
        value /= 1024
        del units[0]
    return (
        f"{size} bytes"
        if units[0] == "bytes"
        else f"{value:.1f}".removesuffix(".0") + f" {units[0]}"
    )


def duration(duration_ms: int) -> str:
    """Return milliseconds in the largest unit that is at least one."""
    for name, size in (("day", 86_400_000), ("hour", 3_600_000), ("minute", 60_000)):
        if duration_ms >= size:
            value = f"{duration_ms / size:.1f}".removesuffix(".0")
            return f"{value} {name}{'s' * (value != '1')}"
    return f"{duration_ms / 1000:g} s"
