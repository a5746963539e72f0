"""Where we differ from Kafka on purpose: each rule knows one kind of difference.

A rule has a sentence of docs/limits.md, and as narrow a test as can be written of when it holds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final

from tests.builders.segment_files import name
from tests.torture.twin_ages import true_time
from tests.torture.twin_draws import Drawn, held_by, sizes_of
from tests.torture.twin_files import (
    are_sound,
    gaps,
    has_wrong_index,
    producers_of,
    rising_end,
    sound_end,
)
from tests.torture.twin_views import Difference

__all__ = ["ENDS", "RULES", "rule_of"]

_AS_FOUND: Final = ("loaded", "adopted")
"""Stages before anybody has written."""
_OF_INDEXES: Final = ("lose_index", "shorten_index", "flip_index", "zero_index", "stale_index")
_Rule = Callable[[Difference, Drawn], bool]


def _time_is_told(found: Difference, _: Drawn) -> bool:
    return found.what == "times" and found.is_told


def _markers_decide(found: Difference, _: Drawn) -> bool:
    return found.what == "committed" and found.is_told


def _index_is_a_hint(found: Difference, drawn: Drawn) -> bool:
    is_wrong = any("index" in act for act in drawn.spoiled)
    return found.what in ("uncommitted", "committed") and found.is_told and is_wrong


def _producers_are_kept(found: Difference, drawn: Drawn) -> bool:
    """After a clean shutdown Kafka removes all snapshots where an offset index is missing."""
    is_missing = any(not path.with_suffix(".index").exists() for path in drawn.logs())
    if not (drawn.is_clean and is_missing and found.stage in _AS_FOUND):
        return False
    is_forgotten = found.what == "producers" and not found.theirs
    return is_forgotten or (found.what == "stable" and found.is_told)


def _producers_are_of_a_snapshot(found: Difference, drawn: Drawn) -> bool:
    """Kafka replays the batches from a missing index on, of which a compaction has taken some."""
    is_missing = any(not path.with_suffix(".index").exists() for path in drawn.logs())
    if drawn.is_clean or not is_missing or found.what != "producers":
        return False
    known = producers_of(drawn.directory.glob("*.snapshot"))
    return found.theirs.keys() <= found.ours.keys() and all(
        entry == found.theirs.get(number) or [*entry] in known.get(number, ())
        for number, entry in found.ours.items()
    )


def _end_is_behind_the_index(found: Difference, drawn: Drawn) -> bool:
    """After a clean shutdown Kafka looks for the end behind the index's last entry alone."""
    wrong = (*_OF_INDEXES, "tear")
    is_wrong = any(act.split()[0] in wrong for act in drawn.spoiled)
    if not (drawn.is_clean and is_wrong and found.stage in _AS_FOUND):
        return False
    return found.what == "end" and bool(found.theirs < found.ours)


def _lie_below_the_start(found: Difference, drawn: Drawn) -> bool:
    """Kafka recovers a segment that begins below the log start without what was before it."""
    bases = drawn.bases()
    if found.stage not in _AS_FOUND or drawn.log_start <= bases[0]:
        return False
    if found.what == "stable":
        return bool(found.ours == drawn.log_start < found.theirs)
    return (
        not drawn.is_clean
        and found.what == "producers"
        and all(
            _is_same_producer(entry, found.ours.get(number), drawn.log_start)
            for number, entry in found.theirs.items()
        )
    )


def _is_same_producer(
    other: Sequence[int], mine: Sequence[int] | None, log_start: int = -1
) -> bool:
    """Return whether two entries are one, but for the coordinator's epoch of an earlier marker.

    A transaction may have begun in a segment below the log start.
    """
    if mine is None:
        return False
    if -1 < mine[4] < min(other[4], log_start):
        mine = [*mine[:4], other[4]]
    is_same = [*other[:3], other[4]] == [*mine[:3], mine[4]]
    if other[1] == -1:  # nothing but a marker of it was found
        is_same = [other[0], *other[2:]] == [mine[0], *mine[2:]]
    return is_same and (other[3] == mine[3] or -1 in (other[3], mine[3]))


def _offset_is_wrong(found: Difference, drawn: Drawn) -> bool:
    """No checksum covers a base offset. Kafka takes one far away for an overflow, and gives up."""
    is_flipped = any(act.startswith("flip_log") for act in drawn.spoiled)
    return found.what == "load" and is_flipped and "Split operation" in found.theirs


def _time_index_is_a_hint(found: Difference, _: Drawn) -> bool:
    """Kafka deletes by the last entries of the time indexes, and we by the batches."""
    told = found.retention
    if told is None or not told.is_explained:
        return False
    theirs, ours = told.start(lambda age: age.believed), told.start(true_time)
    return (found.theirs, found.ours) == (theirs, ours)


def _batches_are_fuller(found: Difference, _: Drawn) -> bool:
    """A cleaning has merged batches, so retention.bytes has room for more records."""
    told = found.retention
    ours = None if told is None else told.with_our_sizes()
    if told is None or ours is None or told.config["retention.bytes"] == "-1":
        return False
    starts = told.start(lambda age: age.believed), ours.start(true_time)
    return told.is_explained and (found.theirs, found.ours) == starts


def _magic_is_unknown(found: Difference, drawn: Drawn) -> bool:
    """Neither the checksum nor Kafka cares for a magic byte above 2."""
    if found.what != "end" or found.stage not in _AS_FOUND:
        return False
    logs = [path for path in drawn.logs() if int(path.stem) <= found.ours]
    data = logs[-1].read_bytes()
    starts = [place for place, _ in sizes_of(data) if data[place + 16] > 2]
    return found.ours == sound_end(logs[-1]) and bool(starts)


def _roll_is_refused(found: Difference, drawn: Drawn) -> bool:
    """The last segment has no sound batch, so the next one would have its base offset."""
    told = found.retention
    if told is None or "Trying to roll a new log segment" not in str(found.theirs):
        return False
    last = told.ages[-1]
    data = (drawn.directory / name(last.base, ".log")).read_bytes()
    is_torn = bool(data) and sound_end(drawn.directory / name(last.base, ".log")) == last.base
    return is_torn and found.ours == told.end == last.base


def _index_stops_a_round(found: Difference, _: Drawn) -> bool:
    """Kafka's cleaner begins to read where an offset index says, also if no batch begins there."""
    if found.what != "round" or "CorruptRecordException" not in found.theirs:
        return False
    assert found.directory is not None
    logs = sorted(found.directory.glob("*.log"))
    return found.ours.isdigit() and are_sound(logs) and has_wrong_index(logs)


def _damaged_end_is_cut(found: Difference, drawn: Drawn) -> bool:
    """After a clean shutdown Kafka compares no checksums."""
    if not (found.what == "end" and found.stage in _AS_FOUND and drawn.is_clean):
        return False
    return bool(found.ours < found.theirs and found.ours == sound_end(drawn.logs()[-1]))


def _first_snapshot_is_at_the_start(found: Difference, drawn: Drawn) -> bool:
    """A broker that is killed may have deleted what is below its first snapshot."""
    first = drawn.bases()[0]
    has_snapshot = (drawn.directory / name(first, ".snapshot")).exists()
    if found.what != "producers" or drawn.is_clean or not drawn.log_start < first:
        return False
    return has_snapshot and found.ours.items() <= found.theirs.items()


def _wrong_offset_is_the_end(found: Difference, drawn: Drawn) -> bool:
    """No checksum covers a base offset, and Kafka takes any that its indexes can hold."""
    if found.what not in ("end", "a loss") or drawn.is_clean or found.stage not in _AS_FOUND:
        return False
    if held_by(drawn.logs()) <= drawn.held:
        return False
    bases = drawn.bases()
    first = max((n for n, base in enumerate(bases) if base <= drawn.recovery_point), default=0)
    ends = rising_end(drawn.logs()[first:])
    return ends == (found.ours if found.lost is None else found.lost.start)


def _wrong_offset_stops_a_round(found: Difference, drawn: Drawn) -> bool:
    is_wrong = not held_by(drawn.logs()) <= drawn.held
    return found.what == "round" and is_wrong and "LogCleaningAborted" in found.theirs


def _end_of_a_loss_is_behind(found: Difference, drawn: Drawn) -> bool:
    """Kafka's log ends below the last batches, or begins anew, because an index says so."""
    if found.what != "records beside losses" or not drawn.is_clean:
        return False
    is_prefix = found.theirs == found.ours[: len(found.theirs)]
    return bool(is_prefix and has_wrong_index(drawn.logs()))


def _stable_is_a_batch(found: Difference, _: Drawn) -> bool:
    """Kafka looks up the batch of the first open transaction, and takes that one's base offset."""
    if found.what != "stable" or found.directory is None:
        return False
    logs = sorted(found.directory.glob("*.log"))
    reached = [first for first, last in held_by(logs) if last >= found.ours]
    return bool(found.theirs == min(reached, default=int(logs[-1].stem)))  # it may be torn


def _damage_is_a_loss(found: Difference, drawn: Drawn) -> bool:
    """The records behind damage in a segment, up to the next one, are out of reach."""
    if found.what != "a loss" or found.lost is None:
        return False
    ends = {sound_end(path) for path in drawn.logs() if not are_sound([path])}
    return found.lost.start in ends and found.lost.end in (*drawn.bases(), drawn.recovery_point)


def _hole_is_a_loss(found: Difference, drawn: Drawn) -> bool:
    """Only edges of segments have gaps, so nothing shows a compaction."""
    if found.what != "a loss" or found.lost is None or found.theirs != "nothing gone, still []":
        return False
    place = (found.lost.start, found.lost.end)
    if place == (drawn.log_start, drawn.bases()[0]):
        return any(act.startswith(("lose_segment", "move_log_start")) for act in drawn.spoiled)
    begin = max(drawn.first_dirty, drawn.log_start)
    holes = gaps(drawn.logs(), begin)
    is_edge = all(int(path.stem) == end for path, _, end in holes)
    return is_edge and any(place == hole[1:] for hole in holes)


def _index_tells_a_loss(found: Difference, drawn: Drawn) -> bool:
    """The index of another segment lies in the place of that of an empty `.log`."""
    if found.what != "a loss" or found.lost is None or found.theirs != "nothing gone, still []":
        return False
    path = drawn.directory / name(found.lost.start, ".log")
    is_strange = any(
        act.startswith("stale_index") and act.endswith(path.with_suffix(".index").name)
        for act in drawn.spoiled
    )
    return is_strange and path.exists() and not path.stat().st_size


def _marker_is_gone(found: Difference, drawn: Drawn) -> bool:
    """A segment or an index is spoiled, and what is left of a transaction contradicts its index."""
    if found.what != "committed" or "in the .txnindex files" not in str(found.ours):
        return False
    is_spoiled = any(".txnindex" in act for act in drawn.spoiled)
    return is_spoiled or bool(drawn.held - held_by(drawn.logs()))


def _loss_is_told(found: Difference, _: Drawn) -> bool:
    return found.what == "a loss" and found.theirs == ""


def _damage_is_raised(found: Difference, drawn: Drawn) -> bool:
    """Kafka passes over what is less than a batch at the end of a segment that is not the last."""
    is_torn = any(act.split()[0] in ("tear", "tear_to_zeros", "flip_log") for act in drawn.spoiled)
    if not is_torn or found.what not in ("uncommitted", "committed", "times"):
        return False
    return "CorruptBatchError" in str(found.ours)


def _producer_had_expired(found: Difference, _: Drawn) -> bool:
    """A load of Kafka's forgets a producer that has expired at a snapshot, for a later batch."""
    if found.what != "producers" or found.theirs.keys() != found.ours.keys():
        return False
    forgetful, other = found.theirs, found.ours
    if found.stage == "ours in their hands":  # held against what Kafka has loaded of its own
        forgetful, other = other, forgetful
    return all(_is_same_producer(entry, other[key]) for key, entry in forgetful.items())


def _snapshot_has_no_segment(found: Difference, drawn: Drawn) -> bool:
    """Its segment is lost: Kafka removes it, and replays the batches below."""
    if found.what != "producers" or found.stage not in _AS_FOUND:
        return False
    bases = drawn.bases()
    strays = [path for path in drawn.directory.glob("*.snapshot") if int(path.stem) not in bases]
    known = producers_of(strays)
    is_lost = any(int(path.stem) > bases[-1] for path in strays)
    return is_lost and all(
        entry == found.theirs.get(number) or [*entry] in known.get(number, ())
        for number, entry in found.ours.items()
    )


def _epochs_begin_at_the_start(found: Difference, _: Drawn) -> bool:
    if found.what != "epochs" or not found.theirs or not found.ours:
        return False
    start = found.ours[0][1]
    before = [epoch for epoch, first in found.theirs if first <= start]
    after = [entry for entry in found.theirs if entry[1] > start]
    return bool(before) and [[before[-1], start], *after] == found.ours


def _epochs_are_lost(found: Difference, drawn: Drawn) -> bool:
    return found.what == "epochs" and not (drawn.directory / "leader-epoch-checkpoint").exists()


def _damage_is_no_refusal(found: Difference, drawn: Drawn) -> bool:
    return (
        found.what == "load"
        and drawn.is_clean
        and "CorruptRecordException" in found.theirs
        and found.ours.startswith("(")
    )


def _damage_is_not_cleaned(found: Difference, drawn: Drawn) -> bool:
    is_damaged = any(act.split()[0] in ("flip_log", "tear") for act in drawn.spoiled)
    return found.what == "round" and is_damaged and "the file is damaged" in found.ours


def _damage_below_the_start_stops_no_round(found: Difference, drawn: Drawn) -> bool:
    """Kafka's cleaner copies the segments below the log start, too."""
    if found.what != "round" or found.theirs.isdigit() or not found.ours.isdigit():
        return False
    assert found.directory is not None
    logs = sorted(found.directory.glob("*.log"))
    ends = [int(path.stem) for path in logs[1:]]
    damaged = [end for path, end in zip(logs, ends, strict=False) if not are_sound([path])]
    return bool(damaged) and damaged[-1] <= drawn.log_start and are_sound(logs[-1:])


def _old_tombstones_stay(found: Difference, drawn: Drawn) -> bool:
    """Our cleaner converts a message v0 or v1 first, and then judges it like any batch."""
    if not found.stage.startswith("round") or found.rows is None:
        return False
    theirs, ours = found.rows
    more = [row for row in ours if row not in theirs]
    is_old = all(row[0] < drawn.old_end and row[3] is None for row in more)
    return bool(more) and is_old and [row for row in ours if row not in more] == theirs


_FILES: Final = (
    "In a broker's directory kafkalog believes the batches, while Kafka believes "
    "files without a checksum."
)
_LOOKUP: Final = (
    "A lookup by time searches all segments. Kafka searches only one, so it finds "
    "nothing if the records there lie below the log start."
)
_DAMAGE: Final = (
    "If a log is damaged in its midst, an error names the place. Kafka passes over "
    "less than a batch at the end of an older segment."
)
_CLEANS: Final = (
    "The cleaner doesn't clean a damaged log. Kafka's doesn't notice, because it "
    "compares no checksums."
)
_BELOW: Final = "Damage below the log start stops Kafka's cleaner, but not kafkalog's."
_EMPTY: Final = (
    "If an offset index has entries and its `.log` is empty, records are lost, even "
    "if it's the index of another segment."
)
_LOADS: Final = (
    "After a clean shutdown, Kafka refuses a log with stray bytes behind its end, or with a base "
    "offset that is far off."
)
_LOADS_SOUND: Final = "Instead, kafkalog loads the sound part and names the rest."
_LOSSES: Final = (
    "A broker's directory that has lost records says so, and cannot be adopted. Kafka "
    "continues without a word."
)
_FULLER: Final = (
    "The cleaner keeps the same records at the same offsets as Kafka's, in fewer and fuller "
    "batches. More of them therefore fit into `retention.bytes`."
)
_MAGIC: Final = (
    "A batch whose magic byte is above 2 counts as damaged, while Kafka reads it as "
    "one of format 2."
)
_STRAYS: Final = (
    "A producer snapshot counts even if no segment begins there. Kafka removes it, "
    "unless it's the last one."
)
_HOLES: Final = (
    "A gap between two segments, or before the first, counts as lost. It does not if "
    "the cleaner's checkpoint, or a gap within a segment, shows a compaction."
)
_STABLE: Final = (
    "The last stable offset is that of the first open transaction, or the log start "
    "if that is higher. Kafka may take the base offset of the batch there."
)
_FIRST: Final = (
    "If a broker was killed after it had deleted segments, kafkalog forgets the "
    "producers that only the snapshot at the first segment knows."
)
_OFFSETS: Final = (
    "Recovery ends a log before a batch whose offset lies below those before it, or "
    "in the next segment. Kafka may read on, empty the segment, or stop its cleaner "
    "there."
)
_ROLL: Final = (
    "Retention removes the last segment even if its file has no sound batch, while Kafka's fails."
)
_PRODUCERS: Final = (
    "In three cases Kafka forgets producers and open transactions, and kafkalog does not. An "
    "offset index is missing; their batches lie below the log start; they have expired before a "
    "later batch."
)
_EPOCHS: Final = (
    "The list of leader epochs begins at the log start. If it's lost, Kafka lists "
    "those of the segments that it recovers first."
)
_TOMBSTONES: Final = (
    "A tombstone of message format v0 or v1 gets a delete horizon like any other. "
    "Kafka removes it at the first cleaning if its file is old enough."
)
RULES: Final[Mapping[str, tuple[str, _Rule]]] = {
    "a lookup by time is told by the records": (_LOOKUP, _time_is_told),
    "markers tell which transactions were aborted": (_FILES, _markers_decide),
    "an offset index is a hint": (_FILES, _index_is_a_hint),
    "the end is behind a wrong index": (_FILES, _end_is_behind_the_index),
    "a time index is a hint": (_FILES, _time_index_is_a_hint),
    "a lost offset index loses no producers": (_PRODUCERS, _producers_are_kept),
    "the producers of a snapshot are kept": (_PRODUCERS, _producers_are_of_a_snapshot),
    "a producer's batches lie below the log start": (_PRODUCERS, _lie_below_the_start),
    "a producer had expired": (_PRODUCERS, _producer_had_expired),
    "leader epochs begin at the log start": (_EPOCHS, _epochs_begin_at_the_start),
    "lost leader epochs": (_EPOCHS, _epochs_are_lost),
    "a damaged tail is no refusal": (_LOADS, _damage_is_no_refusal),
    "a wrong base offset": (_LOADS, _offset_is_wrong),
    "the first snapshot is at the start": (_FIRST, _first_snapshot_is_at_the_start),
    "a wrong base offset is the end": (_OFFSETS, _wrong_offset_is_the_end),
    "a wrong base offset stops no round": (_OFFSETS, _wrong_offset_stops_a_round),
    "the end of a loss is behind a wrong index": (_FILES, _end_of_a_loss_is_behind),
    "a damaged end is cut": (_LOADS_SOUND, _damaged_end_is_cut),
    "batches are fuller": (_FULLER, _batches_are_fuller),
    "an unknown magic": (_MAGIC, _magic_is_unknown),
    "a snapshot has no segment": (_STRAYS, _snapshot_has_no_segment),
    "a loss is told": (_LOSSES, _loss_is_told),
    "damage is a loss": (_LOSSES, _damage_is_a_loss),
    "a marker is gone": (_DAMAGE, _marker_is_gone),
    "a hole is a loss": (_HOLES, _hole_is_a_loss),
    "a last stable offset of a batch": (_STABLE, _stable_is_a_batch),
    "a roll is refused": (_ROLL, _roll_is_refused),
    "a wrong offset index stops no round": (_FILES, _index_stops_a_round),
    "damage within a log is raised": (_DAMAGE, _damage_is_raised),
    "a damaged log is not cleaned": (_CLEANS, _damage_is_not_cleaned),
    "damage below the log start stops no round": (_BELOW, _damage_below_the_start_stops_no_round),
    "an index tells a loss": (_EMPTY, _index_tells_a_loss),
    "old tombstones have a horizon": (_TOMBSTONES, _old_tombstones_stay),
}
"""By name, the sentence and the test."""
ENDS: Final = (
    "markers tell which transactions were aborted",
    "an offset index is a hint",
    "a lost offset index loses no producers",
    "the end is behind a wrong index",
    "damage within a log is raised",
    "a damaged log is not cleaned",
    "a producer's batches lie below the log start",
    "old tombstones have a horizon",
    "a damaged end is cut",
    "a time index is a hint",
    "a marker is gone",
    "the first snapshot is at the start",
    "a wrong base offset is the end",
    "a wrong base offset stops no round",
    "a roll is refused",
    "a wrong offset index stops no round",
    "damage below the log start stops no round",
    "a snapshot has no segment",
    "batches are fuller",
    "an unknown magic",
)
"""Rules after which the two cannot clean, delete and stop with the same result."""


def rule_of(difference: Difference, drawn: Drawn) -> str | None:
    """Return the name of the rule that knows a difference."""
    return next((name for name, (_, knows) in RULES.items() if knows(difference, drawn)), None)
