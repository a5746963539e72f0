"""Which files are live, at every point where a swap, or its repair, may have been interrupted."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from kafkalog.errors import CorruptLogError
from kafkalog.storage_engine.format import layout
from kafkalog.storage_engine.fs import files
from kafkalog.storage_engine.segment.byte_source import FileBytes
from kafkalog.storage_engine.segment.index import OffsetIndex
from kafkalog.storage_engine.segment.locate import header_at, headers, locate
from kafkalog.storage_engine.segment.segments import glance_at_segments, list_segments, next_offset
from kafkalog.storage_engine.segment.swaps import finish_swaps, retire, sweep_deleted
from tests.builders.batch_builder import BuiltBatch, Record, batch, empty
from tests.builders.message_builder import messages, wrapper
from tests.builders.segment_files import name, write_segment

SUFFIXES = [".log", ".index", ".timeindex"]
Content = list[tuple[int, bytes, bytes]]


def small(first: int, count: int) -> list[BuiltBatch]:
    return [batch(offset, 1) for offset in range(first, first + count)]


SOURCES = {0: small(0, 10), 10: small(10, 10), 20: small(20, 10)}
ACTIVE = {30: small(30, 5)}


@dataclass(frozen=True)
class Outputs:
    """What a cleaning makes of the sources: its segments, each with their batches."""

    segments: dict[int, list[BuiltBatch]]


ONE = Outputs({0: [*small(4, 2), *small(17, 1), *small(28, 2)]})
INSIDE = Outputs({0: small(4, 2), 15: [*small(17, 1), *small(28, 2)]})
ON_A_BOUNDARY = Outputs({0: small(4, 5), 20: small(27, 3)})
THREE = Outputs({0: small(4, 2), 10: small(15, 3), 23: [*small(23, 2), empty(29, 29)]})
EVERY = {"one": ONE, "inside": INSIDE, "boundary": ON_A_BOUNDARY, "three": THREE}


def swap_steps(directory: Path, outputs: Outputs) -> Iterator[tuple[str, Callable[[], object]]]:
    """The steps of a cleaning, as Kafka takes them: (phase it ends in, act)."""

    def rename(base: int, suffix: str, old: str, new: str) -> Callable[[], object]:
        return lambda: (directory / name(base, suffix + old)).rename(
            directory / name(base, suffix + new)
        )

    bases = sorted(outputs.segments)
    for base in bases:
        yield (
            "cleaned",
            lambda base=base: write_segment(
                directory, base, outputs.segments[base], stage=".cleaned", interval=0
            ),
        )
    for base in reversed(bases):
        for suffix in SUFFIXES:
            last = base == bases[0] and suffix == SUFFIXES[-1]
            yield "swap" if last else "cleaned", rename(base, suffix, ".cleaned", ".swap")
    for base, suffix in itertools.product(SOURCES, [*SUFFIXES, ".snapshot"]):
        yield "swap", rename(base, suffix, "", ".deleted")
    for base, suffix in itertools.product(bases, SUFFIXES):
        yield "swap", rename(base, suffix, ".swap", "")
    for base, suffix in itertools.product(SOURCES, SUFFIXES):
        yield "swap", (directory / name(base, suffix + ".deleted")).unlink


def count_steps(outputs: Outputs) -> int:
    return len(list(swap_steps(Path(), outputs)))


def make_sources(directory: Path) -> None:
    for base, batches in (SOURCES | ACTIVE).items():
        write_segment(directory, base, batches, interval=100)
        (directory / name(base, ".snapshot")).write_bytes(b"producers")
    for other in ("leader-epoch-checkpoint", "partition.metadata", layout.CANARY):
        (directory / other).write_text("0\n")


def run_steps(directory: Path, outputs: Outputs, count: int) -> str:
    """Take the first steps of a cleaning; returns the phase."""
    make_sources(directory)
    taken = "cleaned"
    for phase, act in itertools.islice(swap_steps(directory, outputs), count):
        act()
        taken = phase
    return taken


def content(directory: Path) -> Content:
    """Base offset, log and offset index of each live segment."""
    return [
        (
            segment.base_offset,
            segment.log.read_bytes(),
            segment.index.read_bytes() if segment.index.exists() else b"",
        )
        for segment in list_segments(directory)
    ]


def logs(found: Content) -> dict[int, bytes]:
    return {base: log for base, log, _ in found}


def expected_logs(phase: str, outputs: Outputs) -> dict[int, bytes]:
    live = (SOURCES if phase == "cleaned" else outputs.segments) | ACTIVE
    return {base: b"".join(b.data for b in live[base]) for base in sorted(live)}


def snapshot(directory: Path) -> dict[str, tuple[int, int, int]]:
    return {
        entry.name: (entry.stat().st_ino, entry.stat().st_mtime_ns, entry.stat().st_size)
        for entry in os.scandir(directory)
    }


EVERY_POINT = [
    pytest.param(outputs, count, id=f"{kind}-{count}")
    for kind, outputs in EVERY.items()
    for count in range(count_steps(outputs) + 1)
]


@pytest.mark.parametrize(("outputs", "count"), EVERY_POINT)
def test_a_swap_cut_short_anywhere_shows_all_sources_or_all_cleaned(
    tmp_path: Path, outputs: Outputs, count: int
) -> None:
    phase = run_steps(tmp_path, outputs, count)
    before = snapshot(tmp_path)
    listed = content(tmp_path)
    assert logs(listed) == expected_logs(phase, outputs)
    assert snapshot(tmp_path) == before, "listing changed the disk"

    finish_swaps(tmp_path)
    assert content(tmp_path) == listed
    assert not list(tmp_path.glob("*.swap")) + list(tmp_path.glob("*.cleaned"))
    live = {path.name for path in tmp_path.glob("*.log")}
    assert live == {name(base, ".log") for base in expected_logs(phase, outputs)}
    finished = snapshot(tmp_path)
    finish_swaps(tmp_path)
    assert snapshot(tmp_path) == finished


class Death(Exception):
    pass


@pytest.mark.parametrize(("outputs", "count"), EVERY_POINT)
def test_a_repair_cut_short_anywhere_can_be_repeated(
    tmp_path: Path, outputs: Outputs, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    phase = run_steps(tmp_path, outputs, count)
    wanted = expected_logs(phase, outputs)
    acts = {key: getattr(files, key) for key in ("rename", "remove")}
    for death in itertools.count(1):
        calls = itertools.count(1)

        def dying(act: Callable[..., None], calls: Iterator[int], death: int) -> object:
            def run(*arguments: object) -> None:
                if next(calls) > death:
                    raise Death
                act(*arguments)

            return run

        for key, act in acts.items():
            monkeypatch.setattr(files, key, dying(act, calls, death))
        try:
            finish_swaps(tmp_path)
        except Death:
            assert logs(content(tmp_path)) == wanted
            continue
        break
    assert logs(content(tmp_path)) == wanted


def test_names_are_synced_before_what_made_them_valid_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    for key in ("rename", "remove", "sync_directory"):
        act = getattr(files, key)

        def spy(*paths: Path, act: Callable[..., None] = act, key: str = key) -> None:
            calls.append("sync" if key == "sync_directory" else paths[-1].suffix)
            act(*paths)

        monkeypatch.setattr(files, key, spy)
    run_steps(tmp_path, INSIDE, 2 + 6)
    write_segment(tmp_path, 50, small(50, 1), stage=".cleaned")
    write_segment(tmp_path, 50, small(50, 1), stage=".swap")
    finish_swaps(tmp_path)
    steps = [key for key, _ in itertools.groupby(calls)]
    final = [".log", "sync", *[".index", ".timeindex"] * 2, "sync"]
    first = "sync"  # what the dead process named
    assert steps == [first, ".swap", "sync", ".cleaned", "sync", ".deleted", "sync", *final]


# --- the crash points one by one, as tables of files ---------------------------------------------


def write_as(directory: Path, base: int, batches: list[BuiltBatch], names: list[str]) -> None:
    """Write a segment, and only the files whose endings are given."""
    scratch = directory / "scratch"
    scratch.mkdir()
    write_segment(scratch, base, batches, interval=100)
    for ending in names:
        suffix = "." + ending.split(".")[1]
        (scratch / name(base, suffix)).rename(directory / name(base, ending))
    for left in scratch.iterdir():
        left.unlink()
    scratch.rmdir()


CLEANED = ONE.segments[0]
POINTS = {
    "K1": ([".log.cleaned", ".index.cleaned", ".timeindex.cleaned"], "", "sources"),
    "K1, log only": ([".log.cleaned"], "", "sources"),
    "K1, index only": ([".index.cleaned"], "", "sources"),
    "K2": ([".log.swap", ".index.cleaned", ".timeindex.cleaned"], "", "sources"),
    "K2, one to go": ([".log.swap", ".index.swap", ".timeindex.cleaned"], "", "sources"),
    "K3": ([".log.swap", ".index.swap", ".timeindex.swap"], "", "cleaned"),
    "K3, no indexes": ([".log.swap"], "", "cleaned"),
    "K4": ([".log.swap", ".index.swap", ".timeindex.swap"], ".deleted", "cleaned"),
    "K5": ([".log", ".index.swap", ".timeindex.swap"], ".deleted", "cleaned"),
    "K5, one to go": ([".log", ".index", ".timeindex.swap"], ".deleted", "cleaned"),
    "K6": ([".log", ".index", ".timeindex"], ".deleted", "cleaned"),
}


@pytest.mark.parametrize("point", POINTS)
def test_crash_point(tmp_path: Path, point: str) -> None:
    outputs, sources_stage, winner = POINTS[point]
    for base, batches in SOURCES.items():
        write_as(tmp_path, base, batches, [suffix + sources_stage for suffix in SUFFIXES])
    write_as(tmp_path, 0, CLEANED, outputs)
    write_segment(tmp_path, 30, ACTIVE[30])
    listed = content(tmp_path)
    assert logs(listed) == expected_logs("cleaned" if winner == "sources" else "swap", ONE)
    finish_swaps(tmp_path)
    assert content(tmp_path) == listed


@pytest.mark.parametrize(
    ("higher", "lower", "winner"),
    [
        (".cleaned", ".cleaned", "sources"),
        (".swap", ".cleaned", "sources"),
        (".swap", ".swap", "outputs"),
    ],
)
def test_crash_point_k8_outputs_are_renamed_in_descending_order(
    tmp_path: Path, higher: str, lower: str, winner: str
) -> None:
    make_sources(tmp_path)
    write_segment(tmp_path, 0, INSIDE.segments[0], stage=lower)
    write_segment(tmp_path, 15, INSIDE.segments[15], stage=higher)
    phase = "cleaned" if winner == "sources" else "swap"
    assert logs(content(tmp_path)) == expected_logs(phase, INSIDE)
    finish_swaps(tmp_path)
    assert logs(content(tmp_path)) == expected_logs(phase, INSIDE)


def test_a_cleaned_file_above_a_swap_does_not_undo_it(tmp_path: Path) -> None:
    make_sources(tmp_path)
    write_segment(tmp_path, 0, CLEANED, stage=".swap")
    write_segment(tmp_path, 30, small(30, 1), stage=".cleaned")
    assert logs(content(tmp_path)) == expected_logs("swap", ONE)
    finish_swaps(tmp_path)
    assert logs(content(tmp_path)) == expected_logs("swap", ONE)
    assert not list(tmp_path.glob("*.cleaned"))


def test_sources_above_what_the_swap_spans_survive(tmp_path: Path) -> None:
    make_sources(tmp_path)
    write_segment(tmp_path, 0, small(4, 2), stage=".swap")  # next offset 6
    listed = content(tmp_path)
    assert [base for base, _, _ in listed] == [0, 10, 20, 30]
    assert listed[0][1] == b"".join(b.data for b in small(4, 2))
    finish_swaps(tmp_path)
    assert content(tmp_path) == listed


def test_an_empty_swap_replaces_only_its_own_base(tmp_path: Path) -> None:
    make_sources(tmp_path)
    write_segment(tmp_path, 10, [], stage=".swap", indexes=False)
    listed = content(tmp_path)
    assert [(base, len(log)) for base, log, _ in listed if base == 10] == [(10, 0)]
    assert [base for base, _, _ in listed] == [0, 10, 20, 30]
    assert listed[1][2] == b"", "the index of the replaced segment"
    finish_swaps(tmp_path)
    assert content(tmp_path) == listed


@pytest.mark.parametrize("place", [4, 7, 23, 26])
@pytest.mark.parametrize("bit", [1, 0x10, 0x40, 0x80])
def test_damaged_offsets_of_a_swap_take_no_sound_segment_along(
    tmp_path: Path, place: int, bit: int
) -> None:
    """Whichever batch has them: in its base offset, which no checksum covers, or the last one."""
    batches = [b.data for b in ONE.segments[0]]
    for number, data in enumerate(batches):
        damaged = bytearray(data)
        damaged[place] ^= bit
        directory = tmp_path / str(number)
        directory.mkdir()
        make_sources(directory)
        swap = directory / name(0, ".log.swap")
        swap.write_bytes(b"".join([*batches[:number], damaged, *batches[number + 1 :]]))
        bases = [segment.base_offset for segment in list_segments(directory)]
        is_last = number + 1 == len(batches)
        assert bases == [0, 30] or ((bases[0], bases[-1]) == (0, 30) and (is_last or place == 23))
        before = sorted(path.name for path in directory.iterdir())
        try:
            finish_swaps(directory)
        except CorruptLogError as fault:
            assert is_last and "offsets below 30, where the last segment begins" in str(fault)
            assert sorted(path.name for path in directory.iterdir()) == before
        assert [segment.base_offset for segment in list_segments(directory)] == bases


def test_where_the_active_segment_is_lost_a_swap_replaces_the_last_one(tmp_path: Path) -> None:
    make_sources(tmp_path)
    (tmp_path / name(30, ".log")).unlink()
    write_segment(tmp_path, 0, ONE.segments[0], stage=".swap")
    assert [segment.base_offset for segment in list_segments(tmp_path)] == [0]
    finish_swaps(tmp_path)
    assert [segment.base_offset for segment in list_segments(tmp_path)] == [0]


def test_an_index_without_a_log_is_not_a_segment(tmp_path: Path) -> None:
    write_segment(tmp_path, 0, small(0, 3))
    (tmp_path / name(99, ".index")).write_bytes(b"")
    (tmp_path / name(98, ".log.deleted")).write_bytes(b"")
    (tmp_path / "kl-99.keys").write_bytes(b"")
    assert [s.base_offset for s in list_segments(tmp_path)] == [0]


def test_segments_are_listed_ascending_with_their_sizes(tmp_path: Path) -> None:
    for base in (500, 0, 1 << 40):
        write_segment(tmp_path, base, small(base, 2))
    found = list_segments(tmp_path)
    assert [s.base_offset for s in found] == [0, 500, 1 << 40]
    assert [s.size for s in found] == [s.log.stat().st_size for s in found]
    assert found[2].index == tmp_path / "00000001099511627776.index"


def test_a_glance_sees_the_live_segments_and_nothing_while_a_cleaner_is_at_work(
    tmp_path: Path,
) -> None:
    make_sources(tmp_path)
    (tmp_path / name(0, ".log.deleted")).write_bytes(b"x")
    assert glance_at_segments(tmp_path) == list_segments(tmp_path)
    for stage in (".swap", ".cleaned"):
        path = tmp_path / name(10, f".timeindex{stage}")
        path.write_bytes(b"")
        assert glance_at_segments(tmp_path) is None
        path.unlink()


def test_finishing_a_swap_leaves_producer_snapshots_to_whoever_knows_the_journal(
    tmp_path: Path,
) -> None:
    run_steps(tmp_path, ONE, 4)
    before = sorted(p.name for p in tmp_path.glob("*.snapshot"))
    finish_swaps(tmp_path)
    assert sorted(p.name for p in tmp_path.glob("*.snapshot")) == before
    assert len(before) == 4


# --- retiring ------------------------------------------------------------------------------------


def test_retired_files_are_renamed_and_swept_after_the_delay(tmp_path: Path) -> None:
    make_sources(tmp_path)
    retire(tmp_path, [0, 10, 77])
    assert [s.base_offset for s in list_segments(tmp_path)] == [20, 30]
    retired = list(tmp_path.glob("*.deleted"))
    assert len(retired) == 2 * 3 + 1  # and the canary
    now_ms = max(path.stat().st_ctime_ns for path in retired) // 1_000_000
    assert sweep_deleted(tmp_path, older_than_ms=60_000, now_ms=now_ms + 50_000) == 0
    assert sweep_deleted(tmp_path, older_than_ms=60_000, now_ms=now_ms + 60_000) == 6
    assert [p.name for p in tmp_path.glob("*.deleted")] == [layout.CANARY]


def test_retiring_only_some_files_leaves_the_others(tmp_path: Path) -> None:
    make_sources(tmp_path)
    retire(tmp_path, [0], suffixes=(layout.SNAPSHOT,))
    assert not (tmp_path / name(0, ".snapshot")).exists()
    assert (tmp_path / name(0, ".log")).exists()


# --- offsets in a segment ------------------------------------------------------------------------


@pytest.mark.parametrize("indexes", [True, False])
@pytest.mark.parametrize("size", [10, 9000])
def test_the_next_offset_is_that_after_the_last_whole_batch(
    tmp_path: Path, indexes: bool, size: int
) -> None:
    batches = [batch(100 + 10 * i, 5, size=size, last=109 + 10 * i) for i in range(20)]
    write_segment(tmp_path, 100, batches, indexes=indexes)
    [segment] = list_segments(tmp_path)
    assert next_offset(segment) == 300
    with segment.log.open("r+b") as log:
        log.truncate(segment.size - 1)
    assert next_offset(segment) == 290
    segment.log.write_bytes(b"")
    assert next_offset(segment) == 100


@pytest.mark.parametrize("magic", [0, 1])
@pytest.mark.parametrize("codec", [0, 1])
def test_the_next_offset_after_messages_is_that_of_the_last_one(
    tmp_path: Path, magic: int, codec: int
) -> None:
    """A wrapper's header tells of its last message alone."""
    data = b""
    for first in (100, 103, 120):
        some = [Record(offset, 1, b"k", b"v") for offset in range(first, first + 3)]
        data += wrapper(magic, codec, some) if codec else messages(magic, some)
        (tmp_path / name(100, ".log")).write_bytes(data)
        [segment] = list_segments(tmp_path)
        assert next_offset(segment) == first + 3


def test_headers_are_those_of_all_batches_large_and_small(tmp_path: Path) -> None:
    sizes = [1, 20_000, 1, 1, 8_100, 8_200, 70_000, 3, *[500] * 200, 140_000, 1]
    batches = [batch(i, 1, size=size) for i, size in enumerate(sizes)]
    write_segment(tmp_path, 0, batches)
    path = tmp_path / name(0, ".log")
    lengths = [len(b.data) for b in batches]
    starts = list(itertools.accumulate(lengths, initial=0))
    source = FileBytes(os.open(path, os.O_RDONLY))
    try:
        limit = path.stat().st_size
        found = [(position, header.base_offset) for position, header in headers(source, 0, limit)]
        assert found == list(zip(starts[:-1], range(len(sizes)), strict=True))
        assert len(list(headers(source, 0, limit - 1))) == len(sizes) - 1
        assert header_at(source, starts[3], starts[4] - 1) is None
        assert header_at(source, starts[3] + 1, limit) is None
        assert header_at(source, limit, limit) is None
    finally:
        source.close()


def test_locate_believes_only_entries_that_their_batch_confirms(tmp_path: Path) -> None:
    batches = small(0, 50)
    entries = write_segment(tmp_path, 0, batches, interval=0).offsets
    [segment] = list_segments(tmp_path)
    index = OffsetIndex(segment.index, 0)
    source = FileBytes(os.open(segment.log, os.O_RDONLY))
    try:
        for offset, position in entries:
            assert locate(source, segment.size, index, offset) == position
        moved = b"".join(
            (offset + 1).to_bytes(4, "big") + position.to_bytes(4, "big")
            for offset, position in entries
        )
        segment.index.write_bytes(moved)
        assert locate(source, segment.size, index, 40) == 0
        assert locate(source, 0, index, 40) == 0
    finally:
        source.close()
