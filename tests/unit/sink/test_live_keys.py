"""Whether a log has keys with values below given offsets, against a naive dictionary."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from kafkalog.sink.views import live_keys
from kafkalog.sink.views.live_keys import has_live_keys
from kafkalog.storage_engine.directory.directory_log import DirectoryLog
from tests.builders.log_builder import LogBuilder

Written = list[tuple[bytes | None, bytes | None]]


def log_of(directory: Path, records: Written, partition: int = 0) -> DirectoryLog:
    log = LogBuilder(directory).topic(partitions=2, policy="delete")
    return log.append(*records, partition=partition).engine


def naive(records: Written) -> bool:
    latest = {key: value for key, value in records if key is not None}
    return any(value is not None for value in latest.values())


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("span", [1, 3, 1 << 16])
def test_a_key_lives_where_its_latest_record_has_a_value(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int, span: int
) -> None:
    monkeypatch.setattr(live_keys, "_SPAN", span)
    rng = random.Random(seed)
    keys = [None, b"a", b"b", b""]
    records: Written = [(rng.choice(keys), rng.choice([b"v", None, None])) for _ in range(30)]
    with log_of(tmp_path, records) as engine:
        for end in range(31):
            found = has_live_keys(engine, "t", {"0": end}, read_committed=True)
            assert found is naive(records[:end])


def test_each_partition_counts_as_far_as_it_was_applied(tmp_path: Path) -> None:
    with log_of(tmp_path, [(b"a", b"v")], partition=1) as engine:
        assert has_live_keys(engine, "t", {"1": 1}, read_committed=True)
        assert has_live_keys(engine, "t", {"0": 0, "1": 99}, read_committed=False)
        assert not has_live_keys(engine, "t", {"0": 0, "1": 0}, read_committed=True)
        assert not has_live_keys(engine, "t", {}, read_committed=True)


def test_more_deleted_keys_than_are_remembered_count_as_alive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with log_of(tmp_path, [(b"%d" % n, None) for n in range(9)]) as engine:
        monkeypatch.setattr(live_keys, "_KEYS_MAX", 9)
        assert not has_live_keys(engine, "t", {"0": 9}, read_committed=True)
        monkeypatch.setattr(live_keys, "_KEYS_MAX", 8)
        assert has_live_keys(engine, "t", {"0": 9}, read_committed=True)
