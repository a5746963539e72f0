"""Batches are refilled from their neighbours by the rules, and by no others.

Every case is written by a naive twin, too (`naive_merge`), and read back by its own reader.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from kafkalog.cleaner.rewrite import batch_writer
from kafkalog.cleaner.rewrite.batch_writer import BatchWriter
from kafkalog.cleaner.rewrite.merge import plan as merge_plan
from kafkalog.cleaner.rewrite.merge.group import Group
from kafkalog.cleaner.rewrite.retention_rules import Retained
from kafkalog.cleaner.schedule.manager import clean as engine_clean
from kafkalog.cleaner.state.stats import CleanerStats
from kafkalog.storage_engine.directory.directory_log import DirectoryLog
from kafkalog.storage_engine.format import layout
from kafkalog.storage_engine.format.batch import iterate_headers
from kafkalog.storage_engine.metadata.config import TopicConfig
from kafkalog.storage_engine.records import records
from kafkalog.storage_engine.segment.open_segment import Chunk
from tests.builders.batch_builder import Record
from tests.unit.cleaner import naive_merge
from tests.unit.cleaner.naive import dump
from tests.unit.cleaner.naive_merge import (
    APPEND_TIME,
    CONTROL,
    TRANSACTIONAL,
    Batch,
    Fate,
    rewritten,
)

NEW_HORIZON = 9_000
LZ4, ZSTD = layout.CODEC_LZ4, layout.CODEC_ZSTD


def decided(
    table: records.BatchTable, found: records.RecordTable, fates: Sequence[Fate]
) -> Retained:
    """The columns that say what a list of fates says."""
    keep: npt.NDArray[np.bool_] = np.array(
        [
            offset in fates[batch].kept
            for batch, offset in zip(
                found.batch_index.tolist(), found.offsets.tolist(), strict=True
            )
        ],
        dtype=np.bool_,
    )
    count = len(table)
    return Retained(
        keep=keep,
        kept=np.bincount(found.batch_index[keep], minlength=count).astype(np.int64),
        tombstones=np.bincount(
            found.batch_index[keep & (found.value_sizes < 0)], minlength=count
        ).astype(np.int64),
        stays_empty=np.array([fate.stays_empty for fate in fates]),
        gets_horizon=np.array([fate.gets_horizon for fate in fates]),
    )


@dataclass
class Written:
    batches: list[Batch]
    data: bytes
    is_changed: bool
    stats: CleanerStats


def write(
    directory: Path,
    batches: Sequence[tuple[Batch, Fate]],
    *,
    cuts: Sequence[int] = (),
    merges: bool = True,
    config: TopicConfig | None = None,
) -> Written:
    """Put batches through a writer, in runs that end at `cuts`."""
    config = config or TopicConfig()
    stats = CleanerStats("t", 0)
    writer = BatchWriter(
        directory,
        batches[0][0].base,
        config,
        new_delete_horizon_ms=NEW_HORIZON,
        merges=merges,
        stats=stats,
    )
    for first, end in zip([0, *cuts], [*cuts, len(batches)], strict=True):
        data = b"".join(batch.data for batch, _ in batches[first:end])
        table, _, _ = records.scan_batches(data)
        chunk = Chunk(data, table, Path("x.log"), 0, 0, 0, 1 << 62)
        found = records.index_records(data, table, path="x.log", file_position=0)
        if len(table):
            writer.add(
                chunk, found, decided(table, found, [fate for _, fate in batches[first:end]])
            )
    outputs = writer.finish(1)
    data = b"".join(output.path(layout.LOG).read_bytes() for output in outputs)
    assert stats.bytes_written == len(data)
    return Written(naive_merge.read_log(data), data, writer.is_changed, stats)


# --- random logs ---------------------------------------------------------------------------------
small = st.integers(0, 3)
binary = st.binary(max_size=30)


@st.composite
def cases(draw: st.DrawFn) -> list[tuple[Batch, Fate]]:
    found = []
    offset = draw(small)
    for _ in range(draw(st.integers(1, 12))):
        base = offset
        kind = draw(
            st.sampled_from([0] * 6 + [APPEND_TIME, TRANSACTIONAL, TRANSACTIONAL | CONTROL])
        )
        append_time = draw(st.sampled_from([5, 6]))
        items = []
        for _ in range(draw(st.integers(0, 4))):
            offset += draw(small)
            headers = [(b"h", draw(st.none() | binary))] if draw(small) == 0 else []
            timestamp = append_time if kind & APPEND_TIME else draw(st.integers(-1, 1 << 41))
            value = draw(st.none() | binary)
            items.append(Record(offset, timestamp, draw(st.none() | binary), value, headers))
            offset += 1
        offset += draw(small)
        if offset == base:
            offset += 1
        if draw(st.integers(0, 15)) == 0:
            offset += 2**31 - 5 if draw(st.booleans()) else 2**30
            offset = min(offset, base + 2**31)
        horizon = draw(st.sampled_from([None, None, 7000, 8000]))
        top = max((r.timestamp for r in items), default=append_time)
        codec = 0 if kind & CONTROL or not items else draw(st.sampled_from([0, LZ4, LZ4, ZSTD]))
        batch = Batch(
            base,
            offset - 1,
            tuple(items),
            kind | codec,
            draw(st.sampled_from([0, 0, 0, 1])),
            horizon if items else None,
            top,
            draw(st.sampled_from([(-1, -1, -1), (-1, -1, -1), (7, 1, 3)])),
        )
        kept = frozenset(r.offset for r in items if draw(small) > 0 or draw(st.booleans()))
        has_tombstone = any(r.value is None for r in items if r.offset in kept)
        gets = bool(kept) and horizon is None and (has_tombstone and draw(small) > 0)
        found.append((batch, Fate(kept, draw(st.booleans()), gets)))
        offset += draw(st.sampled_from([0, 0, 1, 50]))
    return found


@pytest.mark.slow
@settings(
    max_examples=200,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    case=cases(),
    cuts=st.lists(st.integers(0, 12), max_size=3),
    target=st.sampled_from([1, 60, 120, 300, 10_000]),
    merges=st.booleans(),
)
@example(
    case=[(Batch(0, 0, (Record(0, 5, b"a", b"b"),), max_timestamp=5), Fate(frozenset({0})))],
    cuts=[],
    target=300,
    merges=True,
)
def test_batches_are_written_as_the_naive_twin_writes_them(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    case: list[tuple[Batch, Fate]],
    cuts: list[int],
    target: int,
    merges: bool,
) -> None:
    monkeypatch.setattr(merge_plan, "MERGE_SIZE", target)
    places = sorted({cut for cut in cuts if 0 < cut < len(case)})
    expected = rewritten(case, new_horizon=NEW_HORIZON, target=target if merges else 0)
    written = write(tmp_path, case, cuts=places, merges=merges)
    assert written.batches == expected
    stays = [batch for batch, _ in case] == expected
    assert written.is_changed == (not stays)
    if not written.batches or not merges:
        return
    # Again, with all that stays staying: not a byte is another.
    first = [
        (batch, Fate(frozenset(r.offset for r in batch.records), not batch.records))
        for batch in written.batches
        if batch.producer[0] < 0
        or batch.attributes & (TRANSACTIONAL | CONTROL)
        or not batch.records
    ]
    if len(first) == len(written.batches):
        again = write(tmp_path, first)
        assert [b.base for b in again.batches] == [b.base for b in written.batches]
        assert not again.is_changed


# --- rule by rule --------------------------------------------------------------------------------
def small_batch(base: int, *, value: bytes | None = b"value", **fields: object) -> Batch:
    """A batch of one record in two offsets; its time is its offset, but for LogAppendTime."""
    timestamp = fields.get("max_timestamp", base)
    record = Record(base, timestamp, b"k%d" % base, value)
    batch = Batch(base, base + 1, (record,), max_timestamp=timestamp)
    return dataclasses.replace(batch, **fields)


def staying(*batches: Batch) -> list[tuple[Batch, Fate]]:
    return [(batch, Fate(frozenset(r.offset for r in batch.records))) for batch in batches]


def bounds(written: Written) -> list[tuple[int, int]]:
    return [(batch.base, batch.last) for batch in written.batches]


def test_neighbours_become_one_batch_from_the_first_base_to_the_last_offset(
    tmp_path: Path,
) -> None:
    found = write(tmp_path, staying(small_batch(0), small_batch(5), small_batch(9)))
    assert bounds(found) == [(0, 10)]
    assert [r.offset for r in found.batches[0].records] == [0, 5, 9]
    assert [r.timestamp for r in found.batches[0].records] == [0, 5, 9]
    assert found.batches[0].max_timestamp == 9
    assert found.stats.batches_rewritten == 1


def test_a_batch_between_two_that_is_gone_does_not_part_them(tmp_path: Path) -> None:
    case = staying(small_batch(0), small_batch(2), small_batch(4))
    case[1] = (case[1][0], Fate(frozenset()))
    assert bounds(write(tmp_path, case)) == [(0, 5)]


UNLIKE: dict[str, tuple[dict[str, object], dict[str, object]]] = {
    "codec": ({}, {"attributes": LZ4}),
    "timestamp type": ({"max_timestamp": 7}, {"attributes": APPEND_TIME, "max_timestamp": 7}),
    "leader epoch": ({"epoch": 1}, {"epoch": 2}),
    "append time": (
        {"attributes": APPEND_TIME, "max_timestamp": 7},
        {"attributes": APPEND_TIME, "max_timestamp": 8},
    ),
    "delete horizon": ({"horizon": 70}, {"horizon": 71}),
    "a tombstone without horizon": ({"horizon": 70}, {"value": None}),
    "a transaction": ({}, {"attributes": TRANSACTIONAL, "producer": (7, 0, 0)}),
    "a control batch": ({}, {"attributes": TRANSACTIONAL | CONTROL, "producer": (7, 0, -1)}),
}


@pytest.mark.parametrize("what", UNLIKE)
@pytest.mark.parametrize("swapped", [False, True])
def test_batches_that_no_one_header_can_stand_for_stay_apart(
    tmp_path: Path, what: str, swapped: bool
) -> None:
    first, second = reversed(UNLIKE[what]) if swapped else UNLIKE[what]
    case = staying(small_batch(0, **first), small_batch(2, **second))
    found = write(tmp_path, case)
    assert found.batches == [batch for batch, _ in case]
    assert not found.is_changed


ALIKE: dict[str, dict[str, object]] = {
    "codec": {"attributes": ZSTD},
    "append time": {"attributes": APPEND_TIME, "max_timestamp": 7},
    "delete horizon": {"horizon": 70, "value": None},
    "leader epoch": {"epoch": 3},
}


@pytest.mark.parametrize("what", ALIKE)
def test_what_is_the_same_in_all_stays_what_it_is(tmp_path: Path, what: str) -> None:
    case = staying(*(small_batch(base, **ALIKE[what]) for base in (0, 2, 4)))
    (found,) = write(tmp_path, case).batches
    source = case[0][0]
    assert (found.attributes, found.epoch, found.horizon) == (
        source.attributes,
        source.epoch,
        source.horizon,
    )
    assert found.records == tuple(r for batch, _ in case for r in batch.records)


@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_batch_without_tombstone_takes_the_delete_horizon_of_its_neighbours(
    tmp_path: Path, place: int
) -> None:
    batches = [small_batch(base, horizon=70, value=None) for base in (0, 2, 4)]
    batches[place] = small_batch(2 * place)
    (found,) = write(tmp_path, staying(*batches)).batches
    assert found.horizon == 70


def test_offsets_of_a_batch_span_less_than_two_to_the_31(tmp_path: Path) -> None:
    near, far = small_batch(2**31 - 2), small_batch(2**31 - 1)
    assert bounds(write(tmp_path, staying(small_batch(0), near))) == [(0, 2**31 - 1)]
    assert len(write(tmp_path, staying(small_batch(0), far)).batches) == 2


def test_only_a_producers_last_batch_keeps_its_producer(tmp_path: Path) -> None:
    batches = [small_batch(base, producer=(7, 1, base)) for base in (0, 2, 4)]
    case = staying(*batches)
    case[2] = (batches[2], dataclasses.replace(case[2][1], stays_empty=True))
    found = write(tmp_path, case).batches
    assert [(b.base, b.last, b.producer) for b in found] == [
        (0, 3, (-1, -1, -1)),
        (4, 5, (7, 1, 4)),
    ]


def test_a_producers_batch_that_meets_no_other_keeps_its_producer(tmp_path: Path) -> None:
    case = staying(small_batch(0, producer=(7, 1, 3)), small_batch(2, epoch=9))
    assert write(tmp_path, case).batches == [batch for batch, _ in case]


def test_a_batch_that_is_half_full_is_copied_byte_for_byte(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    large = small_batch(2, value=b"v" * 80)
    monkeypatch.setattr(merge_plan, "MERGE_SIZE", 2 * naive_merge.measured(large.records[0]))
    case = staying(small_batch(0), large, small_batch(4))
    found = write(tmp_path, case)
    assert found.data == b"".join(batch.data for batch, _ in case)
    monkeypatch.setattr(merge_plan, "MERGE_SIZE", merge_plan.MERGE_SIZE + 1)
    assert len(write(tmp_path, case).batches) < 3


@pytest.mark.parametrize("cuts", [(), (1,), (1, 2), (2,), (3,), (1, 2, 3)])
def test_batches_are_merged_across_chunks_and_runs(tmp_path: Path, cuts: tuple[int, ...]) -> None:
    case = staying(*(small_batch(2 * i) for i in range(4)))
    assert bounds(write(tmp_path, case, cuts=cuts)) == [(0, 7)]


def test_what_is_held_back_is_smaller_than_one_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(merge_plan, "MERGE_SIZE", 1000)
    held: list[int] = []
    add = Group.add

    def noted(self: Group, *arguments: object) -> None:
        add(self, *arguments)
        held.append(sum(len(part.arena) for part in self._parts))

    monkeypatch.setattr(Group, "add", noted)
    case = staying(*(small_batch(2 * i, value=b"v" * (37 * i % 1500)) for i in range(60)))
    write(tmp_path, case, cuts=range(1, 60))
    assert held
    assert max(held) < 1000


def test_what_was_merged_is_found_full_and_copied_by_the_next_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(merge_plan, "MERGE_SIZE", 500)
    case = staying(*(small_batch(2 * i, value=b"v" * (37 * i % 190)) for i in range(100)))
    first = write(tmp_path, case, cuts=(40,))
    assert 10 < len(first.batches) < 40
    again = write(tmp_path, staying(*first.batches), cuts=(5,))
    assert again.data == first.data
    assert not again.is_changed


def test_no_merged_batch_exceeds_max_message_bytes(tmp_path: Path) -> None:
    dice = random.Random(1)
    case = staying(*(small_batch(2 * i, value=dice.randbytes(40)) for i in range(100)))
    for size in (70, 100, 400, 2000):
        config = TopicConfig.parse({"max.message.bytes": str(size), "compression.type": "snappy"})
        found = write(tmp_path, case, config=config)
        for _, header in iterate_headers(found.data):
            assert header.size <= size or header.records_count == 1
        assert [r for b in found.batches for r in b.records] == [
            r for b, _ in case for r in b.records
        ]


def test_batches_that_do_not_fit_together_become_two(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(merge_plan, "merge_size", lambda config: 1 << 20)
    monkeypatch.setattr(batch_writer, "merge_size", lambda config: 1 << 20)
    dice = random.Random(1)
    case = staying(*(small_batch(2 * i, value=dice.randbytes(40)) for i in range(50)))
    config = TopicConfig.parse({"max.message.bytes": "700"})
    found = write(tmp_path, case, config=config)
    sizes = [header.size for _, header in iterate_headers(found.data)]
    assert max(sizes) <= 700
    assert [r for b in found.batches for r in b.records] == [r for b, _ in case for r in b.records]


# --- codecs and switches -------------------------------------------------------------------------
def test_a_batch_written_anew_takes_the_codec_that_the_topic_names(tmp_path: Path) -> None:
    case = staying(small_batch(0, attributes=LZ4), small_batch(2), small_batch(4, epoch=1))
    config = TopicConfig.parse({"compression.type": "zstd"})
    found = write(tmp_path, case, config=config).batches
    assert [(b.base, b.last, b.attributes) for b in found] == [(0, 3, ZSTD), (4, 5, 0)]
    config = TopicConfig.parse({"compression.type": "uncompressed"})
    found = write(tmp_path, case, config=config).batches
    assert [(b.base, b.last, b.attributes) for b in found] == [(0, 3, 0), (4, 5, 0)]


@pytest.mark.parametrize(
    ("codec", "low", "high"), [("gzip", "1", "9"), ("lz4", "9", "17"), ("zstd", "1", "19")]
)
def test_the_topics_compression_level_is_used(
    tmp_path: Path, codec: str, low: str, high: str
) -> None:
    dice = random.Random(1)
    text = b"".join(dice.choice([b"alpha ", b"beta ", b"gamma "]) for _ in range(3000))
    case = staying(*(small_batch(2 * i, value=text[1000 * i :][:1000]) for i in range(15)))
    sizes = []
    for level in (low, high):
        config = TopicConfig.parse({"compression.type": codec, f"compression.{codec}.level": level})
        sizes.append(len(write(tmp_path, case, config=config).data))
    assert sizes[1] < sizes[0]


def test_a_topic_may_say_that_its_batches_stay_where_they_are(tmp_path: Path) -> None:
    case = staying(small_batch(0), small_batch(2))
    config = TopicConfig.parse({"kafkalog.cleaner.merge.batches": "false"})
    assert bounds(write(tmp_path, case, config=config)) == [(0, 1), (2, 3)]
    assert bounds(write(tmp_path, case, merges=False)) == [(0, 1), (2, 3)]


@pytest.mark.parametrize("merges", [False, True])
def test_a_batch_that_loses_records_alone_keeps_its_offsets_and_producer(
    tmp_path: Path, merges: bool
) -> None:
    items = tuple(Record(i, 100 - i, b"%d" % i, b"v", [(b"h", None)]) for i in range(3, 9))
    batch = Batch(1, 12, items, LZ4, 5, None, 97, (7, 2, 11))
    (found,) = write(tmp_path, [(batch, Fate(frozenset({4, 7})))], merges=merges).batches
    assert found == dataclasses.replace(batch, records=(items[1], items[4]), max_timestamp=96)


def test_an_empty_header_parts_its_neighbours_and_stays_the_same_bytes(tmp_path: Path) -> None:
    empty = Batch(2, 3, (), 0, 0, None, 55, (7, 1, 3))
    case = [*staying(small_batch(0)), (empty, Fate(frozenset(), stays_empty=True))]
    case += staying(small_batch(4))
    found = write(tmp_path, case)
    assert found.data == b"".join(batch.data for batch, _ in case)
    assert not found.is_changed


# --- several rounds, through the engine ----------------------------------------------------------
def rows_of(engine: DirectoryLog) -> dict[int, tuple[object, ...]]:
    table = pa.Table.from_batches(list(engine.read("t", 0)))
    names = ("offset", "key", "value", "timestamp", "timestampType")
    columns = [table[name].to_pylist() for name in names]
    return {row[0]: row for row in zip(*columns, strict=True)}


@pytest.mark.slow
@pytest.mark.parametrize("time_type", ["CreateTime", "LogAppendTime"])
@pytest.mark.parametrize("codec", ["producer", "lz4"])
def test_no_tombstone_goes_early_or_late_and_no_time_changes_over_many_rounds(
    tmp_path: Path, time_type: str, codec: str
) -> None:
    dice = random.Random(f"{time_type} {codec}")
    config = {
        "cleanup.policy": "compact",
        "compression.type": codec,
        "delete.retention.ms": "100",
        "segment.bytes": "20000",
        "message.timestamp.type": time_type,
    }
    engine = DirectoryLog(tmp_path)
    engine.create_topic("t", 1, config)
    expected: dict[int, tuple[object, ...]] = {}
    horizons: dict[int, int] = {}
    for now in range(1_000, 2_000, 50):  # horizons of two rounds are open at a time
        for _ in range(dice.randrange(1, 12)):
            before = engine.offsets("t")[0][1]
            pairs = [
                (
                    f"k{dice.randrange(300)}",
                    None if dice.random() < 0.3 else "v" * dice.randrange(60),
                )
                for _ in range(dice.randrange(1, 6))
            ]
            engine.append("t", pairs, now_ms=now)
            expected |= {o: row for o, row in rows_of(engine).items() if o >= before}
        (stats,) = engine_clean(engine, force=True, now_ms=now)
        assert stats.error is None
        latest = {row[1]: offset for offset, row in expected.items()}
        expected = {o: row for o, row in expected.items() if latest[row[1]] == o}
        for offset, row in list(expected.items()):
            if row[2] is None and now >= horizons.setdefault(offset, now + 100):
                del expected[offset]
        assert rows_of(engine) == expected
    batches = [b for b in dump(engine) if b.records]
    assert len(batches) < len(expected) / 3
