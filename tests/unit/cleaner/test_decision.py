"""Who is active, and what stays of a batch beyond its records."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from kafkalog.cleaner.rewrite.active_producers import ActiveProducers, active_producers
from kafkalog.storage_engine.records.records import scan_batches
from kafkalog.storage_engine.records.tables import BatchTable
from kafkalog.storage_engine.transactions.producers import ProducerEntry
from tests.builders.batch_builder import CONTROL, TRANSACTIONAL
from tests.unit.cleaner.naive import Batch, batch
from tests.unit.cleaner.transactional_log import DAY, Log


def table(*batches: Batch) -> BatchTable:
    return scan_batches(b"".join(item.data for item in batches))[0]


# --- active producers ----------------------------------------------------------------------------


def test_the_last_batch_of_a_producer_is_the_one_with_its_last_offset() -> None:
    producers = ActiveProducers(
        [ProducerEntry(9, 0, 5, last_offset=4), ProducerEntry(3, 0, 5, last_offset=1)]
    )
    found = producers.are_last(
        table(
            batch(0, [("a", "1"), ("b", "1")], producer=3, sequence=4),
            batch(2, [("a", "1")], producer=3, sequence=6),
            batch(3, [("a", "1"), ("b", "1")], producer=9, sequence=4),
            batch(5, [("a", "1")]),
            batch(6, [("a", "1")], producer=5, sequence=0),
            batch(7, [("a", "1")], producer=99, sequence=0),
        )
    )
    assert found.tolist() == [True, False, True, False, False, False]


def test_without_data_the_markers_of_a_producers_epoch_are_its_last() -> None:
    marker = TRANSACTIONAL | CONTROL
    batches = (
        batch(0, [("a", "1")], producer=3, attributes=marker),
        batch(1, [("a", "1")], producer=3, attributes=TRANSACTIONAL, sequence=0),
    )
    for epoch, expected in [(0, [True, False]), (1, [False, False])]:
        producers = ActiveProducers([ProducerEntry(3, epoch)])
        assert producers.are_last(table(*batches)).tolist() == expected


def test_nobody_is_active_where_nobody_has_an_id() -> None:
    found = ActiveProducers().are_last(table(batch(0, [("a", "1")])))
    assert found.dtype == np.bool_
    assert found.tolist() == [False]


def test_a_producer_is_active_for_a_day_and_as_long_as_its_transaction(tmp_path: Path) -> None:
    log = Log.create(tmp_path)
    log.data(1, producer=1, time=1_000)
    log.transact(2, 1, time=1_000)
    state = log.engine.describe("t").partitions[0]
    probe = table(
        batch(0, [("1", "")], producer=1, sequence=0), batch(1, [("1", "")], producer=2, sequence=0)
    )
    for now, expected in [(999 + DAY, [True, True]), (1_000 + DAY, [False, True])]:
        assert active_producers(log.directory, state, now).are_last(probe).tolist() == expected


def test_a_lost_snapshot_is_made_up_for_from_the_log(tmp_path: Path) -> None:
    log = Log.create(tmp_path)
    log.data(1, producer=1)
    log.data(1)
    log.roll()
    for path in log.directory.glob("*.snapshot"):
        path.unlink()
    log.clean()
    assert log.last_offsets() == [0, 1]


def test_what_an_active_producer_appends_meanwhile_counts_for_the_next_group(
    tmp_path: Path,
) -> None:
    log = Log.create(tmp_path, segment_bytes="75")
    log.data(9)
    log.roll()
    log.data(1, producer=1)
    log.roll()
    log.data(1)
    log.roll()
    is_done = False

    def append() -> None:
        nonlocal is_done
        if not is_done and list(log.directory.glob("*.cleaned")):
            is_done = True
            log.data(2, producer=1)

    log.clean(check_abort=append)
    assert is_done
    assert log.last_offsets() == [0, 2, 3]


# --- batches -------------------------------------------------------------------------------------
