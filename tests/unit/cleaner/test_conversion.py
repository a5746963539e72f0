"""Messages v0 and v1 become batches v2 when they are rewritten, as Kafka 4 converts them.

The old bytes are built, and the new ones read, by the naive encoders of `tests.storage_engine`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kafkalog.cleaner.rewrite.batch_writer import BatchWriter
from kafkalog.cleaner.state.stats import CleanerStats
from kafkalog.storage_engine.format import layout
from kafkalog.storage_engine.metadata.config import TopicConfig
from kafkalog.storage_engine.records import records
from kafkalog.storage_engine.segment.open_segment import Chunk
from tests.builders.batch_builder import GZIP, LZ4, NONE, SNAPPY, Record
from tests.builders.message_builder import messages, wrapper
from tests.unit.cleaner import naive_merge
from tests.unit.cleaner.naive_merge import APPEND_TIME, Batch, Fate
from tests.unit.cleaner.test_merge import decided

HORIZON = 9_000


def converted(
    directory: Path,
    data: bytes,
    fates: Sequence[Fate],
    *,
    merges: bool = False,
    config: TopicConfig | None = None,
) -> list[Batch]:
    """What a writer makes of the bytes of a segment, read back."""
    table, _, _ = records.scan_batches(data)
    assert len(table) == len(fates)
    config = config or TopicConfig()
    writer = BatchWriter(
        directory,
        0,
        config,
        new_delete_horizon_ms=HORIZON,
        merges=merges,
        stats=CleanerStats("t", 0),
    )
    chunk = Chunk(data, table, Path("x.log"), 0, 0, 0, 1 << 62)
    found = records.index_records(data, table, path="x.log", file_position=0)
    writer.add(chunk, found, decided(table, found, fates))
    (output,) = writer.finish(1)
    assert writer.is_changed
    return naive_merge.read_log(output.path(layout.LOG).read_bytes())


def all_of(*records: Record) -> Fate:
    return Fate(frozenset(m.offset for m in records))


def of(*records: Record, attributes: int = 0, horizon: int | None = None) -> Batch:
    """The batch v2 that Kafka makes of them."""
    return Batch(
        records[0].offset,
        records[-1].offset,
        records,
        attributes,
        -1,
        horizon,
        max(m.timestamp for m in records),
    )


OLD = [Record(3, -1, b"a", b"1"), Record(5, -1, b"b", b""), Record(6, -1, None, b"3")]
NEWER = [Record(m.offset, 1000 - m.offset, m.key, m.value) for m in OLD]


@pytest.mark.parametrize(("magic", "records"), [(0, OLD), (1, NEWER)])
def test_every_message_becomes_a_batch_of_its_one_record(
    tmp_path: Path, magic: int, records: list[Record]
) -> None:
    found = converted(tmp_path, messages(magic, records), [all_of(m) for m in records])
    assert found == [of(m) for m in records]


@pytest.mark.parametrize("codec", [GZIP, SNAPPY, LZ4])
@pytest.mark.parametrize(("magic", "records"), [(0, OLD), (1, NEWER)])
def test_a_wrapper_becomes_one_batch_of_its_codec_from_the_first_to_the_last_record_kept(
    tmp_path: Path, magic: int, records: list[Record], codec: int
) -> None:
    data = wrapper(magic, codec, records)
    assert converted(tmp_path, data, [all_of(*records)]) == [of(*records, attributes=codec)]
    kept = records[1:2]
    assert converted(tmp_path, data, [all_of(*kept)]) == [of(*kept, attributes=codec)]


def test_records_of_v0_have_no_time_and_the_type_create_time(tmp_path: Path) -> None:
    (found,) = converted(tmp_path, wrapper(0, GZIP, OLD), [all_of(*OLD)])
    assert not found.attributes & APPEND_TIME
    assert {r.timestamp for r in found.records} == {-1}
    assert found.max_timestamp == -1


def test_a_wrapper_of_append_time_stays_one(tmp_path: Path) -> None:
    data = wrapper(1, GZIP, NEWER, append_time=77)
    (found,) = converted(tmp_path, data, [all_of(*NEWER[:2])])
    assert found.attributes == GZIP | APPEND_TIME
    assert found.max_timestamp == 77
    assert [r.timestamp for r in found.records] == [77, 77]


def test_a_tombstone_among_messages_gets_a_horizon_at_once(tmp_path: Path) -> None:
    gone = Record(9, 50, b"k", None)
    fate = Fate(frozenset({9}), gets_horizon=True)
    (found,) = converted(tmp_path, messages(1, [gone]), [fate])
    assert found == of(gone, horizon=HORIZON)


def test_messages_that_keep_nothing_leave_nothing_even_at_the_high_watermark(
    tmp_path: Path,
) -> None:
    # Kafka raises here, and the partition is uncleanable from then on.
    data = messages(1, NEWER[:1]) + wrapper(1, GZIP, NEWER[1:])
    found = converted(tmp_path, data, [all_of(NEWER[0]), Fate(frozenset(), stays_empty=True)])
    assert found == [of(NEWER[0])]


def test_converted_batches_are_merged_like_others(tmp_path: Path) -> None:
    data = messages(1, NEWER[:2]) + wrapper(1, GZIP, NEWER[2:])
    fates = [all_of(m) for m in NEWER]
    found = converted(tmp_path, data, fates, merges=True)
    assert found == [of(*NEWER[:2]), of(NEWER[2], attributes=GZIP)]
    config = TopicConfig.parse({"compression.type": "zstd"})
    (one,) = converted(tmp_path, data, fates, merges=True, config=config)
    assert one == of(*NEWER, attributes=layout.CODEC_ZSTD)


values = st.none() | st.binary(max_size=200)


@settings(
    max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    sets=st.lists(
        st.tuples(
            st.sampled_from([0, 1]),
            st.sampled_from([NONE, GZIP, SNAPPY, LZ4]),
            st.lists(st.tuples(st.integers(1, 9), values, values, st.booleans()), min_size=1),
        ),
        min_size=1,
        max_size=4,
    )
)
def test_records_offsets_and_times_of_any_messages_are_what_they_were(
    tmp_path: Path, sets: list[tuple[int, int, list[tuple[int, bytes | None, bytes | None, bool]]]]
) -> None:
    offset = 0
    data = b""
    fates: list[Fate] = []
    expected: list[Batch] = []
    for magic, codec, rows in sets:
        items = []
        kept = []
        for step, key, value, stays in rows:
            offset += step
            items.append(Record(offset, 7 * offset if magic else -1, key, value))
            kept += items[-1:] if stays else []
        if codec == NONE:
            data += messages(magic, items)
            fates += [all_of(*[m for m in kept if m is item]) for item in items]
            expected += [of(m) for m in kept]
        else:
            data += wrapper(magic, codec, items)
            fates.append(all_of(*kept))
            expected += [of(*kept, attributes=codec)] if kept else []
    assert converted(tmp_path, data, fates) == expected
