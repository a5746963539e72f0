"""Each operation does what it is called, in every variant of the log; else nothing is tried."""

from __future__ import annotations

import errno
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from kafkalog.errors import StorageError
from kafkalog.storage_engine.directory.active_segment import ActiveSegment
from kafkalog.storage_engine.format import layout
from tests.torture.acts import Allocate, Names, Resize, Sync, Write
from tests.torture.checks import PartitionRows, Snapshot, snapshot
from tests.torture.disk import Disk
from tests.torture.recorder import Recorder
from tests.torture.workloads import (
    OPERATIONS,
    VARIANTS,
    Opened,
    begin,
    prepare,
    random_sequences,
    sequences,
    small_files,
)


@dataclass(frozen=True)
class Done:
    """What an operation was seen to do."""

    log: Opened
    before: Snapshot
    after: Snapshot
    recorder: Recorder
    bases: tuple[Mapping[str, list[int]], Mapping[str, list[int]]]
    """The base offsets of each partition's segments, before and after."""

    def rows(self, name: str = "t", number: int = 0) -> tuple[PartitionRows, PartitionRows]:
        """Return a partition as it was, and as it is."""
        return self.before[name].partitions[number], self.after[name].partitions[number]

    def grown(self) -> set[str]:
        """Return the partitions that got records."""
        return {
            f"{name}-{number}"
            for name, topic in self.after.items()
            for number, now in topic.partitions.items()
            if name in self.before
            and now.high_watermark > self.before[name].partitions[number].high_watermark
        }

    def names(self, suffix: str) -> set[str]:
        """Return the names with that end that files got."""
        return {
            name
            for act in self.recorder.acts
            if isinstance(act, Names)
            for _, name, number in act.changes
            if number is not None and name.endswith(suffix)
        }


def bases(root: Path) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for log in sorted(root.glob("*/*" + layout.LOG)):
        found.setdefault(log.parent.name, []).append(int(log.stem))
    return found


def perform(root: Path, *operations: str, variant: str = "plain") -> Done:
    """Do some operations on a new log, and watch the last one."""
    with small_files():
        prepare(root, variant)
        log = Opened(root, begin(variant))
        for name in operations[:-1]:
            log.perform(name)
        before, old = snapshot(log.engine), bases(root)
        with Recorder(root) as recorder:
            log.perform(operations[-1])
        return Done(log, before, snapshot(log.engine), recorder, (old, bases(root)))


def has_rolled(done: Done) -> bool:
    """The active segments are closed, and empty ones follow them."""
    old, new = done.bases
    ends = {
        where: done.rows(where[0], int(where[-1]))[1].high_watermark for where in ("t-0", "d-0")
    }
    return all(new[where] == [*old[where], end] for where, end in ends.items())


def has_adopted(done: Done) -> bool:
    """Staged files are segments now, renamed and not copied."""
    old, new = done.bases
    staged = done.names(layout.STAGED)
    return done.grown() == {"t-1"} and len(staged) == len(new["t-1"]) - len(old["t-1"]) == 2


def has_swapped(done: Done) -> bool:
    """Obsolete records are gone, by files that came in the place of others."""
    was, now = done.rows()
    return bool(len(now.rows) < len(was.rows) and done.names(layout.SWAP))


def has_merged(done: Done) -> bool:
    """There are fewer segments, and not for want of records."""
    old, new = done.bases
    return has_swapped(done) and len(new["t-0"]) < len(old["t-0"])


def has_retained(done: Done) -> bool:
    """The oldest segments of the topic with the policy delete are on their way."""
    was, now = done.rows("d")
    return now.log_start > was.log_start and bool(done.names(layout.DELETED))


def has_deleted_records(done: Done) -> bool:
    """The log begins within a segment."""
    was, now = done.rows("d")
    return was.log_start < now.log_start and now.log_start not in done.bases[1]["d-0"]


def has_a_new_topic(done: Done) -> bool:
    """The topic of that name has another config, and none of the records."""
    was, now = done.rows("x")
    is_new = done.before["x"].config != done.after["x"].config
    return is_new and bool(was.rows) and now.high_watermark == 0


def has_checkpoints(done: Done) -> bool:
    """They are written, and what waited to be removed is removed."""
    waiting = list(done.log.root.glob("*/*" + layout.LOG + layout.DELETED))
    return bool(done.names(layout.RECOVERY_POINT_CHECKPOINT)) and not waiting


def is_relaxed(done: Done) -> bool:
    """The records are there, and a power cut could take them."""
    return done.grown() == {"r-0"} and bool(done.log.engine.state().unsynced)


def was_handed_over(done: Done) -> bool:
    """For a time there was no journal, as a broker has none."""
    return done.before == done.after and bool(done.names(layout.COMMIT_RELEASED))


def has_cut(done: Done) -> bool:
    """What was written is cut off, as by the next holder, and nothing of it is seen."""
    cut = [act for act in done.recorder.acts if isinstance(act, Resize)]
    written = [act for act in done.recorder.acts if isinstance(act, Write)]
    return done.before == done.after and len(cut) >= 3 and len(written) >= 3


def has_transactions(done: Done) -> bool:
    """Of two transactions one is seen, the other is noted as aborted, and the gap before them."""
    was, now = done.rows("t", 1)
    new = set(now.rows) - set(was.rows)
    is_committed = len(new) == 2 and now.high_watermark == was.high_watermark + 7
    return is_committed and all(map(done.names, (layout.TRANSACTION_INDEX, layout.RAW_GAPS)))


def has_copied(done: Done) -> bool:
    """A new topic has the records of another log, with their gaps, by several commits."""
    if done.before.keys() == done.after.keys():
        return False
    now = done.after["c"].partitions[0]
    syncs = [act for act in done.recorder.acts if isinstance(act, Sync)]
    return now.high_watermark > len(now.rows) > 3 and len(syncs) > 3


def has_erased(done: Done) -> bool:
    """A key that was deleted has no tombstone any more; no file waits for its removal."""
    was, now = ({row[1] for row in state.rows} for state in done.rows())
    waiting = list(done.log.root.glob("t-0/*" + layout.LOG + layout.DELETED))
    return was - now == {b"k4"} and has_swapped(done) and not waiting


def has_pinned(done: Done) -> bool:
    """It was cleaned while a pin was there, which got its name by a link."""
    numbers = [
        number
        for act in done.recorder.acts
        if isinstance(act, Names)
        for _, name, number in act.changes
        if name.startswith(layout.PIN) and number is not None
    ]
    return has_swapped(done) and len(numbers) == 2 and numbers[0] == numbers[1]


SIGNS: dict[str, Callable[[Done], bool]] = {
    "append": lambda done: done.grown() == {"t-0", "t-1"},
    "adopt": has_adopted,
    "roll": has_rolled,
    "commit": lambda done: done.grown() == {"t-0", "t-1", "d-0"},
    "clean": has_swapped,
    "merge": has_merged,
    "retain": has_retained,
    "delete_records": has_deleted_records,
    "topic": has_a_new_topic,
    "alter": lambda done: done.before["t"].config != done.after["t"].config,
    "checkpoint": has_checkpoints,
    "close": lambda done: bool(done.names(layout.RECOVERY_POINT_CHECKPOINT)),
    "relaxed": is_relaxed,
    "release_adopt": was_handed_over,
    "refuse": has_cut,
    "wide": lambda done: done.grown() == {"t-0", "t-1", "d-0"},
    "transact": has_transactions,
    "pin": has_pinned,
    "delete_topic": lambda done: {*done.before} - {*done.after} == {"x"},
    "grow": lambda done: (
        [len(each["d"].partitions) for each in (done.before, done.after)] == [1, 2]
    ),
    "copy": has_copied,
    "erase": has_erased,
}


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("name", OPERATIONS)
def test_an_operation_does_what_it_is_called(tmp_path: Path, name: str, variant: str) -> None:
    assert SIGNS[name](perform(tmp_path / "log", name, variant=variant))


def test_the_signs_are_not_those_of_every_operation(tmp_path: Path) -> None:
    done = perform(tmp_path / "log", "relaxed")
    assert [name for name, sign in SIGNS.items() if sign(done)] == ["relaxed"]


def test_a_checkpoint_removes_what_a_cleaning_left(tmp_path: Path) -> None:
    done = perform(tmp_path / "log", "clean", "retain", "checkpoint")
    gone = [act for act in done.recorder.acts if isinstance(act, Names) and act.made is None]
    assert has_checkpoints(done) and len(gone) > 6


@pytest.mark.parametrize(
    ("name", "suffix"),
    [("append", layout.LOG), ("clean", layout.CLEANED), ("adopt", layout.STAGED)],
)
def test_records_of_the_large_variant_are_torn_at_sectors(
    tmp_path: Path, name: str, suffix: str
) -> None:
    recorder = perform(tmp_path / "log", name, variant="large").recorder
    disk, suffixes = Disk(recorder.begin), dict[int, str]()
    torn = Counter[str]()
    for act in recorder.acts:
        if isinstance(act, Names):
            suffixes.update((n, Path(name).suffix) for _, name, n in act.changes if n is not None)
        if isinstance(act, Write) and b"vvv" in act.data:
            torn[suffixes.get(act.file, layout.LOG)] += sum(
                kind == "cut" for kind, _ in disk.tears(act)
            )
        disk.apply(act)
    assert torn[suffix] >= 2


def test_room_is_made_and_cut_where_segments_are_preallocated(tmp_path: Path) -> None:
    acts = perform(tmp_path / "log", "roll", variant="preallocated").recorder.acts
    assert {type(act) for act in acts} >= {Allocate, Resize}


def test_the_next_commit_of_a_full_journal_rewrites_it(tmp_path: Path) -> None:
    done = perform(tmp_path / "log", "alter", variant="full")
    assert layout.COMMIT in done.names(layout.COMMIT)


def test_of_many_syncs_all_are_done_though_one_of_them_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[ActiveSegment] = []

    def failing(self: ActiveSegment) -> None:
        synced.append(self)
        raise OSError(errno.EIO, "broken", "a file")

    with small_files():
        prepare(tmp_path)
        monkeypatch.setattr(ActiveSegment, "sync", failing)
        for name, count in (("commit", 1), ("wide", 3)):
            synced.clear()
            with pytest.raises(StorageError, match="a file"):
                Opened(tmp_path).perform(name)
            assert len(synced) == count


def test_records_have_times_of_their_own_and_a_retry_other_ones(tmp_path: Path) -> None:
    with small_files():
        prepare(tmp_path)
        log = Opened(tmp_path)
        before = snapshot(log.engine)
        log.perform("append")
        log.perform_again("append", later_ms=7)
        log.perform("commit")
        rows = set(snapshot(log.engine)["t"].partitions[0].rows)
    times = [
        row[3] - log.moment.now_ms for row in sorted(rows - set(before["t"].partitions[0].rows))
    ]
    assert len(set(times)) > 3 and max(times) <= 0 and times != sorted(times)


def test_sequences_are_all_there_are_and_drawn_ones_follow_from_the_seed() -> None:
    assert len(list(sequences(2))) == 12 + 144
    assert len(set(sequences(3, least=3))) == 12**3
    assert list(random_sequences(1, 9, 3)) == list(random_sequences(1, 9, 3))
    assert list(random_sequences(1, 9, 3)) != list(random_sequences(2, 9, 3))
