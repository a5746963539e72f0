"""Where we differ from Kafka on purpose: each rule knows one kind of difference.

A rule has a sentence of docs/limits.md, and as narrow a test as can be written of when it holds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final

from tests.torture.twin_draws import Drawn
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
            _is_same_producer(entry, found.ours.get(number))
            for number, entry in found.theirs.items()
        )
    )


def _is_same_producer(other: Sequence[int], mine: Sequence[int] | None) -> bool:
    """Return whether two entries are one, but for the coordinator's epoch of an earlier marker."""
    if mine is None:
        return False
    is_same = [*other[:3], other[4]] == [*mine[:3], mine[4]]
    return is_same and (other[3] == mine[3] or -1 in (other[3], mine[3]))


def _offset_is_wrong(found: Difference, drawn: Drawn) -> bool:
    """No checksum covers a base offset. Kafka takes one far away for an overflow, and gives up."""
    is_flipped = any(act.startswith("flip_log") for act in drawn.spoiled)
    return found.what == "load" and is_flipped and "Split operation" in found.theirs


def _time_index_is_a_hint(found: Difference, drawn: Drawn) -> bool:
    is_wrong = any(".timeindex" in act for act in drawn.spoiled)
    return found.stage == "retention" and is_wrong


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
    return all(_is_same_producer(entry, found.ours[key]) for key, entry in found.theirs.items())


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


def _old_tombstones_stay(found: Difference, drawn: Drawn) -> bool:
    """Our cleaner converts a message v0 or v1 first, and then judges it like any batch."""
    if not found.stage.startswith("round") or found.rows is None:
        return False
    theirs, ours = found.rows
    more = [row for row in ours if row not in theirs]
    is_old = all(row[0] < drawn.old_end and row[3] is None for row in more)
    return bool(more) and is_old and [row for row in ours if row not in more] == theirs


_FILES: Final = (
    "A broker's directory is read by what its batches say. Kafka believes files without a checksum:"
)
_LOOKUP: Final = (
    "A lookup by time searches all segments. Kafka searches one, and finds nothing if its records "
    "lie below the log start."
)
_DAMAGE: Final = (
    "Damage within a log raises an error that names the place. Kafka passes over less than a batch "
    "at the end of an older segment."
)
_CLEANS: Final = "The cleaner does not clean a log that is damaged. Kafka's compares no checksums."
_LOADS: Final = (
    "Kafka does not load a log with bytes of no batch behind its end after a clean shutdown, or "
    "with a base offset that is far off."
)
_PRODUCERS: Final = (
    "Kafka forgets producers and open transactions in three cases, and kafkalog does not: if an "
    "offset index is missing after a clean shutdown, if their batches lie below the log start, "
    "and if they have expired before a later batch."
)
_EPOCHS: Final = (
    "The list of leader epochs begins at the log start. If it is lost, Kafka lists those of the "
    "segments that it recovers first."
)
_TOMBSTONES: Final = (
    "A tombstone of message format v0 or v1 gets a delete horizon, as any other. Kafka removes it "
    "at the first cleaning if its file is old enough."
)
RULES: Final[Mapping[str, tuple[str, _Rule]]] = {
    "a lookup by time is told by the records": (_LOOKUP, _time_is_told),
    "markers tell which transactions were aborted": (_FILES, _markers_decide),
    "an offset index is a hint": (_FILES, _index_is_a_hint),
    "the end is behind a wrong index": (_FILES, _end_is_behind_the_index),
    "a time index is a hint": (_FILES, _time_index_is_a_hint),
    "a lost offset index loses no producers": (_PRODUCERS, _producers_are_kept),
    "a producer's batches lie below the log start": (_PRODUCERS, _lie_below_the_start),
    "a producer had expired": (_PRODUCERS, _producer_had_expired),
    "leader epochs begin at the log start": (_EPOCHS, _epochs_begin_at_the_start),
    "lost leader epochs": (_EPOCHS, _epochs_are_lost),
    "a damaged tail is no refusal": (_LOADS, _damage_is_no_refusal),
    "a wrong base offset": (_LOADS, _offset_is_wrong),
    "damage within a log is raised": (_DAMAGE, _damage_is_raised),
    "a damaged log is not cleaned": (_CLEANS, _damage_is_not_cleaned),
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
)
"""Rules after which the two cannot clean, delete and stop with the same result."""


def rule_of(difference: Difference, drawn: Drawn) -> str | None:
    """Return the name of the rule that knows a difference."""
    return next((name for name, (_, knows) in RULES.items() if knows(difference, drawn)), None)
