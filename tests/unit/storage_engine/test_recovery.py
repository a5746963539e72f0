"""A repair that dies at any step loses nothing: whoever loads and repairs again gets the same."""

from __future__ import annotations

import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import pytest

from kafkalog.errors import StorageError
from kafkalog.schema import changelog_schema
from kafkalog.storage_engine.broker.loader import LoadedPartition, load_partition
from kafkalog.storage_engine.broker.recovery import repair_partition
from kafkalog.storage_engine.reading.directory_snapshot import open_snapshot
from kafkalog.storage_engine.segment.segments import list_segments
from kafkalog.storage_engine.transactions.producer_snapshot import snapshot_offsets
from tests.builders.batch_builder import ABORT, COMMIT, at_times, marker
from tests.builders.segment_files import name
from tests.unit.storage_engine import naive
from tests.unit.storage_engine.faults import Died, each_act
from tests.unit.storage_engine.raw_log import Model

INT32_MAX = 2**31 - 1


def load(directory: Path, **changes: object) -> LoadedPartition:
    given = {"log_start": 0, "recovery_point": 0, "is_clean": False, "now_ms": 0, **changes}
    return load_partition(directory, "t", 0, **given)


def read(loaded: LoadedPartition) -> list[int]:
    """The offsets that a reader of committed records gets, without our locks."""
    state, found = loaded.state, []
    with open_snapshot(
        loaded.directory,
        "t",
        0,
        lambda: state,
        locked=False,
        load_aborted=lambda: loaded.aborted,
    ) as snapshot:
        schema = changelog_schema(include_headers=False)
        for rows in snapshot.read(state.log_start_offset, state.last_stable_offset, schema=schema):
            found += rows.column("offset").to_pylist()
    return found


def contents(directory: Path) -> dict[str, bytes]:
    return {
        path.name: path.read_bytes()
        for path in directory.iterdir()
        if not path.name.endswith(".deleted")
    }


def transactions() -> Model:
    """Committed, aborted, one across segments, one left open."""
    model = Model()
    for base in range(0, 200, 10):
        producer = 1 + base // 10 % 3
        model.add([at_times(base, (base,) * 8, producer_id=producer, transactional=True)])
        if base >= 40 and base % 40 == 0:
            kind = ABORT if base % 80 == 0 else COMMIT
            model.add([marker(base + 8, kind, 1 + (base // 10 + 1) % 3, timestamp=base)])
    return model


def written(directory: Path, model: Model, bases: tuple[int, ...]) -> None:
    directory.mkdir()
    for base, end in zip(bases, (*bases[1:], 2**62), strict=True):
        data = b"".join(batch.data for batch in model.batches if base <= batch.base_offset < end)
        (directory / name(base, ".log")).write_bytes(data)
        (directory / name(base, ".index")).write_bytes(b"")
        (directory / name(base, ".timeindex")).write_bytes(b"")


def torn(directory: Path) -> LoadedPartition:
    """Three segments, the middle one damaged in its last batch."""
    written(directory, transactions(), (0, 80, 150))
    path = directory / name(80, ".log")
    path.write_bytes(path.read_bytes()[:-5])
    (directory / name(80, ".txnindex")).write_bytes(b"x" * 34)
    (directory / name(300, ".index")).write_bytes(b"")
    (directory / name(70, ".snapshot")).write_bytes(b"torn")
    (directory / "leader-epoch-checkpoint").write_text("0\n2\n0 0\n4 160\n")
    return load(directory)


def without_an_index(directory: Path) -> LoadedPartition:
    """A clean shutdown, and a segment that lost its `.index`."""
    written(directory, transactions(), (0, 80, 150))
    (directory / name(80, ".index")).unlink()
    return load(directory, is_clean=True)


def half_swapped(directory: Path) -> LoadedPartition:
    """A cleaning of the first two segments died between two renames."""
    written(directory, transactions(), (0, 80, 150))
    whole = (directory / name(0, ".log")).read_bytes()
    whole += (directory / name(80, ".log")).read_bytes()
    (directory / name(0, ".log.swap")).write_bytes(whole)
    (directory / name(0, ".index.swap")).write_bytes(b"")
    (directory / name(0, ".log")).rename(directory / name(0, ".log.deleted"))
    return load(directory)


def below_its_start(directory: Path) -> LoadedPartition:
    written(directory, transactions(), (0, 80, 150))
    return load(directory, log_start=500)


def overflowed(directory: Path) -> LoadedPartition:
    """One segment whose offsets lie further apart than an index can tell, twice."""
    model = Model()
    far = [0, 5, INT32_MAX + 3, INT32_MAX + 9, 3 * INT32_MAX]
    model.add([at_times(base, (base % 1000,) * 2) for base in far])
    written(directory, model, (0,))
    return load(directory)


@pytest.mark.slow
@pytest.mark.parametrize(
    "made", [torn, without_an_index, half_swapped, below_its_start, overflowed]
)
def test_a_repair_may_die_anywhere(tmp_path: Path, made: Callable[[Path], LoadedPartition]) -> None:
    expected = made(tmp_path / "expected")
    records = read(expected)
    repaired = repair_partition(expected)
    assert read(repaired) == records
    assert repaired.recovered == () and repaired.aborted is None
    files = contents(tmp_path / "expected")
    options = {
        "is_clean": made is without_an_index,
        "log_start": 500 if made is below_its_start else 0,
    }
    n = 1
    while True:
        directory = tmp_path / "dying"
        loaded = made(directory)
        fired = each_act(lambda held=loaded: repair_partition(held), n, Died(), after=True)
        again = load(directory, **options)
        assert read(again) == records, n
        final = repair_partition(again)
        found = contents(directory)
        assert {key: data for key, data in found.items() if not key.endswith(".tmp")} == files, n
        assert final.state == repaired.state
        shutil.rmtree(directory)
        if not fired:
            break
        n += 1
    assert n > 5


def test_a_repair_says_what_a_reader_of_the_disk_finds(tmp_path: Path) -> None:
    loaded = torn(tmp_path / "p")
    model = Model(
        [b for b in transactions().batches if b.last_offset < loaded.state.high_watermark],
        loaded.state.high_watermark,
    )
    assert loaded.state.high_watermark == 138
    assert loaded.state.last_stable_offset == model.last_stable_offset
    assert read(loaded) == model.offsets(committed=True)
    aborted = [(a.producer_id, a.first_offset, a.last_offset) for a in loaded.aborted or ()]
    assert aborted == [entry[:3] for entry in model.aborted()]
    repaired = repair_partition(loaded)
    # Whoever loads it now believes the disk: a clean shutdown.
    clean = load(tmp_path / "p", is_clean=True)
    assert clean.state == repaired.state
    assert clean.producers == loaded.producers
    assert (clean.aborted, clean.recovered, clean.damage) == (None, (), ())
    assert read(clean) == model.offsets(committed=True)
    assert repaired.state.producer_snapshot == 138
    assert snapshot_offsets(tmp_path / "p") == [138]


def test_a_sound_partition_is_left_as_it_is(tmp_path: Path) -> None:
    repair_partition(torn(tmp_path / "p"))
    before = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "p").iterdir()}
    repair_partition(load(tmp_path / "p", is_clean=True))
    assert {path.name: path.stat().st_mtime_ns for path in (tmp_path / "p").iterdir()} == before


def test_parts_of_an_overflowed_segment_fit_their_indexes(tmp_path: Path) -> None:
    loaded = overflowed(tmp_path / "p")
    repaired = repair_partition(loaded)
    bases = [segment.base_offset for segment in list_segments(tmp_path / "p")]
    assert bases == [0, INT32_MAX + 3, 3 * INT32_MAX]
    assert repaired.state.active_base == 3 * INT32_MAX
    for segment in list_segments(tmp_path / "p"):
        assert segment.index.exists()
        (_, relative) = struct.unpack(">qi", segment.time_index.read_bytes()[-12:])
        assert 0 <= relative <= INT32_MAX


def test_a_first_batch_too_far_above_its_segment_gets_one_of_its_own(tmp_path: Path) -> None:
    model = Model()
    model.add([at_times(2**40, (1, 2))])
    written(tmp_path / "p", model, (0,))
    repaired = repair_partition(load(tmp_path / "p"))
    bases = [segment.base_offset for segment in list_segments(tmp_path / "p")]
    assert bases == [0, 2**40]
    assert read(repaired) == [2**40, 2**40 + 1]


def test_bytes_behind_the_last_batch_go_also_after_a_clean_shutdown(tmp_path: Path) -> None:
    written(tmp_path / "p", transactions(), (0,))
    path = tmp_path / "p" / name(0, ".log")
    data = path.read_bytes()
    path.write_bytes(data + bytes(300))
    # Entries of the index that lie behind the end, as a cut off tail leaves them.
    (tmp_path / "p" / name(0, ".index")).write_bytes(struct.pack(">ii", 500, len(data) + 20))
    loaded = load(tmp_path / "p", is_clean=True)
    assert loaded.state.active_size == len(data)
    assert loaded.damage and str(path) in loaded.damage[0]
    repair_partition(loaded)
    assert path.read_bytes() == data
    assert (tmp_path / "p" / name(0, ".index")).read_bytes() == b""


def _flipped(data: bytes) -> bytes:
    return data[:-5] + bytes([data[-5] ^ 1]) + data[-4:]


SPOILED_TAILS: dict[str, tuple[Callable[[bytes], bytes], bool]] = {
    "zeros in the last batch and behind it": (lambda data: data[:-9] + bytes(13), True),
    "a torn batch that garbage fills": (lambda data: data[:-9] + b"x" * 40, True),
    "a flipped bit before bytes of no batch": (lambda data: _flipped(data) + bytes(20), True),
    "a flipped bit and no offset index": (_flipped, False),
}


@pytest.mark.parametrize("spoiled, has_index", SPOILED_TAILS.values(), ids=SPOILED_TAILS)
def test_a_log_that_was_shut_down_ends_where_its_repair_cuts_it(
    tmp_path: Path, spoiled: Callable[[bytes], bytes], has_index: bool
) -> None:
    written(tmp_path / "p", transactions(), (0, 80, 150))
    path = tmp_path / "p" / name(150, ".log")
    last = len(transactions().batches[-1].data)
    sound = path.stat().st_size - last
    path.write_bytes(spoiled(path.read_bytes()))
    if not has_index:
        path.with_suffix(".index").unlink()
    repaired = repair_partition(load(tmp_path / "p", is_clean=True))
    state = repaired.state
    assert (state.active_size, path.stat().st_size) == (sound, sound)
    assert state.high_watermark == transactions().batches[-2].last_offset + 1
    assert len(repaired.damage) == 1


def test_a_log_cut_by_somebody_else_meanwhile_is_not_repaired(tmp_path: Path) -> None:
    loaded = torn(tmp_path / "p")
    (tmp_path / "p" / name(80, ".log")).write_bytes(b"")
    with pytest.raises(StorageError, match="shorter than"):
        repair_partition(loaded)
    (tmp_path / "p" / name(80, ".log")).unlink()
    with pytest.raises(StorageError, match="is gone since"):
        repair_partition(loaded)


def test_entries_are_as_far_apart_as_the_topic_wants_them(tmp_path: Path) -> None:
    model = Model()
    model.add([at_times(base, (base,), value_size=300) for base in range(50)])
    written(tmp_path / "p", model, (0,))
    repair_partition(load(tmp_path / "p"), index_interval_bytes=1000)
    data = (tmp_path / "p" / name(0, ".index")).read_bytes()
    size = len(model.batches[0].data)
    step = 1000 // size + 1
    expected = [(offset, offset * size) for offset in range(step, 50, step)]
    assert list(struct.iter_unpack(">ii", data)) == expected
    assert naive.HEADER.size == 61
