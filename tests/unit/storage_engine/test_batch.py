"""The 61 bytes before a batch's records."""

from __future__ import annotations

import struct
from typing import Any

import pytest
from crc32c import crc32c
from hypothesis import given
from hypothesis import strategies as st

from kafkalog.storage_engine.format import batch as b
from kafkalog.storage_engine.format import layout
from kafkalog.storage_engine.format.stamping import stamp
from tests.builders import batch_builder
from tests.builders.batch_builder import Record, batch_data
from tests.unit.storage_engine import naive

RECORDS = [Record(40, 5000, b"k", b"v"), Record(42, 5003, None, b"")]
BATCH = batch_data(RECORDS, last_offset=49, leader_epoch=3)


def signed(bits: int) -> st.SearchStrategy[int]:
    return st.integers(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)


FIELDS = st.tuples(
    *map(signed, (64, 32, 32, 8)),
    st.integers(0, 2**32 - 1),
    *map(signed, (16, 32, 64, 64, 64, 16, 32, 32)),
)


@given(FIELDS)
def test_a_parsed_header_has_the_fields_that_were_written(fields: tuple[int, ...]) -> None:
    data = naive.HEADER.pack(*fields)
    header = b.parse_header(b"??" + data, 2)
    assert header == b.BatchHeader(*fields)


def test_a_header_knows_its_range_and_its_bits() -> None:
    header = b.parse_header(BATCH)
    assert (header.size, header.base_offset, header.last_offset) == (len(BATCH), 40, 49)
    assert (header.next_offset, header.leader_epoch, header.records_count) == (50, 3, 2)
    assert (header.codec, header.timestamp_type) == (0, 0)
    assert not header.is_transactional
    assert not header.is_control
    header = b.parse_header(batch_data([], attributes=0x7C, base_timestamp=77))
    assert (header.codec, header.timestamp_type) == (4, 1)
    assert header.is_transactional
    assert header.is_control


def test_a_stamp_changes_offset_and_epoch_and_no_checksum() -> None:
    target = bytearray(b"..." + BATCH)
    stamp(target, 3, 1 << 40, 8)
    assert bytes(target[3:]) == batch_data(
        [Record(r.offset - 40 + (1 << 40), r.timestamp, r.key, r.value) for r in RECORDS],
        base_offset=1 << 40,
        last_offset=(1 << 40) + 9,
        leader_epoch=8,
    )
    assert b.parse_header(target, 3).base_offset == 1 << 40


def test_new_batches_are_sealed_as_the_twin_seals_them() -> None:
    sections = [
        batch_builder.section(RECORDS, 40, 5000),
        batch_builder.section(RECORDS[:1], 40, 5000),
    ]
    target = bytearray(b"before" + b"".join(bytes(61) + section for section in sections))
    sizes = [61 + len(section) for section in sections]
    batches = [(6, sizes[0], 40, 2, 5000, 5003, 8), (6 + sizes[0], sizes[1], 40, 1, 5000, 5000, 0)]
    b.seal_batches(memoryview(target), batches)
    log_append_time = batch_data(RECORDS, last_offset=41, attributes=8)
    assert bytes(target) == b"before" + log_append_time + batch_data(RECORDS[:1])


def test_headers_are_iterated_up_to_the_first_incomplete_batch() -> None:
    data = BATCH + BATCH
    whole = [(0, b.parse_header(BATCH)), (len(BATCH), b.parse_header(BATCH))]
    assert list(b.iterate_headers(data)) == whole
    assert list(b.iterate_headers(data[: len(BATCH) + 70])) == whole[:1]
    for cut in range(len(BATCH)):
        assert list(b.iterate_headers(data[: len(BATCH) + cut])) == whole[:1]


@pytest.mark.parametrize("patch", [(8, struct.pack(">i", 48)), (16, b"\x03"), (8, b"\xff")])
def test_headers_are_iterated_up_to_what_is_not_a_batch(patch: tuple[int, bytes]) -> None:
    wrong = bytearray(BATCH)
    wrong[patch[0] : patch[0] + len(patch[1])] = patch[1]
    assert len(list(b.iterate_headers(BATCH + bytes(wrong) + BATCH))) == 1


@pytest.mark.parametrize("cut", range(len(BATCH)))
def test_no_truncation_of_a_batch_has_a_header(cut: int) -> None:
    assert b.read_header(BATCH[:cut], 0, cut) is None


# What lies outside the checksum, and what then catches a change of it. A changed offset or epoch is
# a valid batch elsewhere: the log notices a wrong offset, nobody a wrong epoch (in Kafka neither).
UNCOVERED: dict[range, str | None] = {
    range(8): None,  # base_offset
    range(8, 12): "length",  # a shorter batch has another checksum
    range(12, 16): None,  # partition_leader_epoch
    range(16, 17): "magic",
    range(17, 21): "checksum",
}


@pytest.mark.parametrize("position", range(len(BATCH)))
@pytest.mark.parametrize("flip", [0x01, 0x80, 0xFF])
def test_every_changed_byte_is_noticed_or_lies_outside_the_checksum(
    position: int, flip: int
) -> None:
    wrong = bytearray(BATCH)
    wrong[position] ^= flip
    caught_by: Any = "checksum"
    for places, by in UNCOVERED.items():
        if position in places:
            caught_by = by
    header = b.read_header(wrong, 0, len(wrong))
    if caught_by == "magic":
        assert header is None
    elif header is None:
        assert caught_by == "length"
    else:
        is_sound = crc32c(wrong[layout.ATTRIBUTES_POSITION : header.size]) == header.crc
        assert is_sound == (caught_by is None)
