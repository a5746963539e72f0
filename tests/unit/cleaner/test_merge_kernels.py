"""The kernels of rewriting, each beside a naive twin, and on records that lie where they must not.

Each call also compares the compiled kernel with its source as Python; `make test-kernels` runs the
file with bounds checks and sanitizers.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kafkalog.cleaner.rewrite.merge import codes
from kafkalog.cleaner.rewrite.merge import kernels as k
from kafkalog.storage_engine.records.records import index_records, scan_batches
from tests.builders.batch_builder import Record, sized, varint
from tests.builders.message_builder import messages
from tests.unit.cleaner.naive_merge import Batch, measured

pytestmark = pytest.mark.usefixtures("compared_kernels")

FIELDS = 9
field = st.none() | st.binary(max_size=40)
headers = st.lists(st.tuples(st.binary(max_size=5), field), max_size=2)
rows_of_a_batch = st.lists(st.tuples(field, field, headers), min_size=1, max_size=8)


def table_of(data: bytes) -> tuple[np.ndarray, np.ndarray, np.ndarray, int]:
    table, _, _ = scan_batches(data)
    found = index_records(data, table, path="x", file_position=0)
    return found.arena, found.fields, found.batch_index, len(table)


def gathered(
    arena: np.ndarray, fields: np.ndarray, rows: list[int]
) -> tuple[np.ndarray, np.ndarray]:
    wanted = np.array(rows, dtype=np.int64)
    copies = np.zeros((FIELDS, len(rows)), dtype=np.int64)
    size = k.gather_records(arena, fields, wanted, np.empty(0, dtype=np.uint8), copies)
    target = np.zeros(size, dtype=np.uint8)
    assert size == 0 or k.gather_records(arena, fields, wanted, target, copies) == size
    return target, copies


@settings(max_examples=60, deadline=None)
@given(contents=rows_of_a_batch, picks=st.lists(st.integers(0, 7), max_size=6))
def test_a_copied_record_is_its_key_value_and_headers(
    contents: list[tuple[bytes | None, bytes | None, list[tuple[bytes, bytes | None]]]],
    picks: list[int],
) -> None:
    items = [Record(i, 100 + i, *row) for i, row in enumerate(contents)]
    data = Batch(0, len(items) - 1, tuple(items), max_timestamp=100).data
    picks = [pick % len(items) for pick in picks]
    target, copies = gathered(*table_of(data)[:2], picks)
    expected = b""
    for place, pick in enumerate(picks):
        item = items[pick]
        start = len(expected)
        expected += (item.key or b"") + sized(item.value) + varint(len(item.headers))
        expected += b"".join(sized(name) + sized(text) for name, text in item.headers)
        assert copies[[0, 1, 2, 3, 4], place].tolist() == [
            start,
            len(expected),
            item.offset,
            item.timestamp,
            start,
        ]
        assert copies[5, place] == (-1 if item.key is None else len(item.key))
        value = copies[6, place]
        if item.value is None:
            assert copies[7, place] == -1
        else:
            assert target[value : value + copies[7, place]].tobytes() == item.value
        header = copies[8, place]
        assert target[header] == 2 * len(item.headers)
    assert target.tobytes() == expected


@settings(max_examples=60, deadline=None)
@given(
    contents=st.lists(st.tuples(field, field), min_size=1, max_size=6),
    magic=st.sampled_from([0, 1]),
)
def test_a_copied_message_has_the_sizes_and_the_header_count_of_v2(
    contents: list[tuple[bytes | None, bytes | None]], magic: int
) -> None:
    items = [Record(i, 7 if magic else -1, *row) for i, row in enumerate(contents)]
    data = messages(magic, items)
    target, copies = gathered(*table_of(data)[:2], list(range(len(items))))
    assert target.tobytes() == b"".join((m.key or b"") + sized(m.value) + b"\0" for m in items)
    assert copies[2].tolist() == [m.offset for m in items]
    assert (target[copies[8]] == 0).all()


@pytest.mark.parametrize(
    ("row", "value"),
    [
        (4, -1),
        (4, 1 << 40),
        (1, 1 << 40),
        (1, -5),
        (5, 1 << 40),
        (6, -1),
        (6, 1 << 40),
        (7, 1 << 40),
    ],
)
@pytest.mark.parametrize("is_message", [False, True])
def test_a_record_outside_its_arena_is_never_read(row: int, value: int, is_message: bool) -> None:
    data = Batch(0, 0, (Record(0, 5, b"key", b"value"),), max_timestamp=5).data
    arena, fields, _, _ = table_of(data)
    if is_message:
        fields[8] = -1
    fields[row, 0] = value
    rows = np.array([0])
    copies = np.zeros((FIELDS, 1), dtype=np.int64)
    assert k.gather_records(arena, fields, rows, np.empty(0, dtype=np.uint8), copies) == -1
    assert k.gather_records(arena, fields, rows, np.zeros(99, dtype=np.uint8), copies) == -1


def test_kernel_returns_a_status_for_missing_rows_and_short_targets() -> None:
    data = Batch(0, 0, (Record(0, 5, b"key", b"value"),), max_timestamp=5).data
    arena, fields, _, _ = table_of(data)
    copies = np.zeros((FIELDS, 1), dtype=np.int64)
    target = np.zeros(99, dtype=np.uint8)
    for row in (-1, 1):
        assert k.gather_records(arena, fields, np.array([row]), target, copies) == -1
    assert k.gather_records(arena, fields, np.array([0]), target[:5].copy(), copies) == -1
    none = np.zeros((FIELDS, 0), dtype=np.int64)
    assert k.gather_records(arena, fields, np.array([0]), target, none) == -1


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(rows_of_a_batch, min_size=1, max_size=4),
    seed=st.integers(0, 2**31),
    share=st.floats(0, 1),
)
def test_what_batches_keep_is_measured(
    sizes: list[list[tuple[bytes | None, bytes | None, list[tuple[bytes, bytes | None]]]]],
    seed: int,
    share: float,
) -> None:
    offset = 0
    batches: list[list[Record]] = []
    data = b""
    for contents in sizes:
        items = [Record(offset + i, 5, *row) for i, row in enumerate(contents)]
        data += Batch(offset, items[-1].offset, tuple(items), max_timestamp=5).data
        offset = items[-1].offset + 1
        batches.append(items)
    _, fields, batch_index, count = table_of(data)
    keep = np.random.default_rng(seed).random(fields.shape[1]) < share
    kept = np.empty((3, count), dtype=np.int64)
    assert k.measure_kept(fields, batch_index, keep, kept) == 0
    for place, items in enumerate(batches):
        stays = [item for item in items if keep[item.offset]]
        assert kept[:, place].tolist() == [
            sum(map(measured, stays)),
            stays[0].offset if stays else -1,
            stays[-1].offset if stays else -1,
        ]


def test_records_of_no_batch_are_not_measured() -> None:
    data = Batch(0, 0, (Record(0, 5, b"key", b"value"),), max_timestamp=5).data
    _, fields, _, _ = table_of(data)
    kept = np.empty((3, 1), dtype=np.int64)
    keep = np.array([True])
    for batch in (-1, 1):
        assert k.measure_kept(fields, np.array([batch], dtype=np.int32), keep, kept) == -1
    assert k.measure_kept(fields, np.array([0], dtype=np.int32), keep[:0], kept) == -1
    assert k.measure_kept(fields, np.array([], dtype=np.int32), keep, kept) == -1


def naive_plan(
    batches: list[tuple[int, int]], target: int
) -> tuple[list[tuple[str, list[int]]], list[int]]:
    """Outputs of batches that are all alike, as (action, size); and what stays open."""
    names = {codes.COPY: "copy", codes.REBUILD: "rebuild", codes.EMPTY: "empty"}
    outputs: list[tuple[str, list[int]]] = []
    group: list[int] = []

    def close() -> None:
        if group:
            alone = len(group) == 1 and batches[group[0]][0] == codes.WHOLE
            outputs.append(("copy" if alone else "rebuild", list(group)))
            group.clear()

    for i, (action, size) in enumerate(batches):
        if action == codes.DROP:
            continue
        if action in names or (action == codes.WHOLE and 2 * size >= target):
            close()
            outputs.append((names.get(action, "copy"), [i]))
            continue
        if sum(batches[j][1] for j in group) + size > target:
            close()
        group.append(i)
        if sum(batches[j][1] for j in group) >= target:
            close()
    return outputs, group


@settings(max_examples=200, deadline=None)
@given(
    batches=st.lists(st.tuples(st.integers(0, 5), st.integers(1, 60)), max_size=30),
    cut=st.integers(0, 30),
)
def test_outputs_are_planned_alike_in_one_run_and_in_two(
    batches: list[tuple[int, int]], cut: int
) -> None:
    names = {codes.COPY: "copy", codes.REBUILD: "rebuild", codes.EMPTY: "empty"}
    table = np.zeros((codes.BATCH_FIELDS, len(batches)), dtype=np.int64)
    for i, (action, size) in enumerate(batches):
        table[:, i] = [action, 0, 0, -1, -1, 0, 10 * i, 10 * i + 9, size]
    group = np.zeros(codes.GROUP_FIELDS, dtype=np.int64)
    found: list[tuple[str, list[int]]] = []
    held: list[int] = []
    for first, end in ((0, min(cut, len(batches))), (min(cut, len(batches)), len(batches))):
        part = np.ascontiguousarray(table[:, first:end])
        outputs = np.zeros((codes.OUTPUT_FIELDS, end - first + 1), dtype=np.int64)
        count, first_open = k.plan_outputs(part, 100, group, outputs)
        for kind, start, stop, is_behind in outputs[:, :count].T.tolist():
            members = [first + i for i in range(start, stop) if part[0, i] != codes.DROP]
            if is_behind:
                members, held = held + members, []
            if kind == codes.COPY:
                found += [("copy", [i]) for i in members]
            else:
                found.append((names[kind], members))
        held += [first + i for i in range(first_open, end - first) if part[0, i] != codes.DROP]
    assert (found, held) == naive_plan(batches, 100)
