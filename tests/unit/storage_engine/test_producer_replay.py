"""Replaying the batches that matter gives what replaying every batch does."""

from __future__ import annotations

import random
from pathlib import Path

from kafkalog.storage_engine.format.batch import iterate_headers
from kafkalog.storage_engine.segment.log_scanner import RECOVER, LogScanner
from kafkalog.storage_engine.segment.segments import list_segments
from kafkalog.storage_engine.transactions.control_record import read_control_record
from kafkalog.storage_engine.transactions.producer_replay import ProducerHistory, replay
from kafkalog.storage_engine.transactions.producer_snapshot import write_snapshot
from kafkalog.storage_engine.transactions.producers import Producers
from kafkalog.storage_engine.transactions.transaction_index import AbortedTransaction
from tests.builders.batch_builder import BuiltBatch, at_times, batch_data, joined, marker
from tests.builders.segment_files import name


def drawn(rng: random.Random, count: int, start: int = 0) -> list[BuiltBatch]:
    """Batches of some producers, with and without transactions, that change their epochs."""
    batches = []
    base = start
    is_open: dict[int, bool] = {}
    epochs: dict[int, int] = {}
    for _ in range(count):
        producer = rng.choice([-1, 1, 2, 3, 4])
        if rng.random() < 0.05:
            epochs[producer] = epochs.get(producer, 0) + 1
        epoch = epochs.get(producer, 0)
        if producer > 2 and is_open.get(producer) and rng.random() < 0.4:
            batches.append(marker(base, rng.randrange(2), producer, timestamp=base, epoch=epoch))
            is_open[producer] = False
        else:
            size = rng.randrange(1, 4)
            batches.append(
                at_times(
                    base,
                    (rng.randrange(1000),) * size,
                    producer_id=producer,
                    epoch=epoch,
                    sequence=rng.choice([base, 2**31 - 2]),
                    transactional=producer > 2,
                )
            )
            is_open[producer] = producer > 2
        base = batches[-1].last_offset + rng.randrange(1, 3)
    return batches


def each_one(data: bytes, producers: Producers) -> list[AbortedTransaction]:
    found = []
    for position, header in iterate_headers(data):
        entry = producers.append(header, read_control_record(data, position, header))
        if entry is not None:
            found.append(entry)
    return found


def test_the_batches_that_matter_tell_all(tmp_path: Path) -> None:
    for seed in range(40):
        data = joined(drawn(random.Random(seed), 120))
        path = tmp_path / "f"
        path.write_bytes(data)
        expected, found = Producers(), Producers()
        aborted = []
        with LogScanner.opened(path, RECOVER, next_offset=0) as scan:
            for part in scan:
                aborted += replay(found, scan, part, start=0)
        assert aborted == each_one(data, expected), seed
        assert found == expected, seed


def test_the_state_at_any_offset_is_that_of_the_batches_below(tmp_path: Path) -> None:
    batches = drawn(random.Random(7), 90)
    cuts = [0, batches[30].base_offset, batches[60].base_offset]
    for base, end in zip(cuts, [*cuts[1:], 10**9], strict=True):
        part = [batch for batch in batches if base <= batch.base_offset < end]
        (tmp_path / name(base, ".log")).write_bytes(joined(part))
    for with_snapshot in (False, True):
        if with_snapshot:
            middle = Producers()
            each_one(joined(batches[:45]), middle)
            write_snapshot(tmp_path, middle)
        for count in (1, 29, 30, 31, 45, 46, 61, 90):
            expected = Producers()
            each_one(joined(batches[:count]), expected)
            history = ProducerHistory(tmp_path, list_segments(tmp_path), log_start=0)
            found = history.at(expected.end_offset)
            assert found == expected, count
            assert history.damage == []


def test_a_control_record_that_does_not_decode_ends_the_log_before_it(tmp_path: Path) -> None:
    good = at_times(0, (1, 2), producer_id=4, transactional=True)
    bad = batch_data([], base_offset=2, attributes=0x30, producer=(4, 0, -1), count=1)
    path = tmp_path / name(0, ".log")
    path.write_bytes(good.data + bad + at_times(9, (1,)).data)
    history = ProducerHistory(tmp_path, list_segments(tmp_path), log_start=0)
    producers = Producers()
    seen: list[int] = []
    (segment,) = list_segments(tmp_path)
    aborted, scan = history.check(
        segment, producers, lambda found: seen.extend(found.table.base_offsets.tolist())
    )
    assert (aborted, seen, scan.position, scan.next_offset) == ([], [0], len(good.data), 2)
    assert scan.fault is not None
    assert producers.end_offset == 2
