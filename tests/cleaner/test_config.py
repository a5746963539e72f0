from __future__ import annotations

import math
from dataclasses import fields

import pytest

from kafkalog.cleaner import CleanerConfig
from kafkalog.cleaner.config import NAMES
from kafkalog.errors import InvalidInputError


def test_the_defaults_are_kafkas_except_for_the_buffer_of_a_log() -> None:
    config = CleanerConfig()
    assert (config.enable, config.threads, config.dedupe_buffer_size) == (True, 1, 134_217_728)
    assert (config.io_buffer_load_factor, config.backoff_ms) == (0.9, 15_000)
    assert config.io_max_bytes_per_second == math.inf
    assert config.retention_check_interval_ms == 300_000


def test_kafkas_names_are_read() -> None:
    found = CleanerConfig.parse(
        {
            "log.cleaner.enable": "False",
            "log.cleaner.threads": "3",
            "log.cleaner.dedupe.buffer.size": "1000",
            "log.cleaner.io.buffer.load.factor": "0.5",
            "log.cleaner.io.buffer.size": "2000",
            "log.cleaner.io.max.bytes.per.second": "1.7976931348623157E308",
            "log.cleaner.backoff.ms": "0",
            "log.retention.check.interval.ms": "1",
            "kafkalog.cleaner.spill": "false",
            "kafkalog.cleaner.merge.batches": "false",
        }
    )
    assert found == CleanerConfig(
        enable=False,
        threads=3,
        dedupe_buffer_size=1000,
        io_buffer_load_factor=0.5,
        io_buffer_size=2000,
        io_max_bytes_per_second=1.7976931348623157e308,
        backoff_ms=0,
        retention_check_interval_ms=1,
        spill=False,
        merge_batches=False,
    )
    assert CleanerConfig.parse({}) == CleanerConfig()


def test_every_setting_has_a_name() -> None:
    assert len(NAMES) == len(fields(CleanerConfig))


@pytest.mark.parametrize(("name", "text", "told"), [
    ("log.cleaner.threads", "two", "a whole number"),
    ("log.cleaner.threads", "-1", "at least 0"),
    ("log.cleaner.enable", "yes", "true or false"),
    ("log.cleaner.io.buffer.load.factor", "much", "a number"),
    ("log.cleaner.io.buffer.load.factor", "1", "between 0 and 1"),
    ("log.cleaner.thread", "1", "did you mean log.cleaner.threads"),
    ("log.cleaner.delete.retention.ms", "1", "unknown config of the cleaner"),
])  # fmt: skip
def test_a_wrong_setting_is_told_with_its_name_or_range(name: str, text: str, told: str) -> None:
    with pytest.raises(InvalidInputError, match=told):
        CleanerConfig.parse({name: text})
