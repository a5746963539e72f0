from __future__ import annotations

import math
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

import kafkalog
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
    with pytest.raises(InvalidInputError, match=name):
        CleanerConfig.parse({name: text})


@pytest.mark.parametrize(("field", "value", "name"), [
    ("threads", "2", "log.cleaner.threads"),
    ("threads", 1.5, "log.cleaner.threads"),
    ("threads", True, "log.cleaner.threads"),
    ("threads", None, "log.cleaner.threads"),
    ("threads", -1, "log.cleaner.threads"),
    ("enable", "no", "log.cleaner.enable"),
    ("enable", 1, "log.cleaner.enable"),
    ("spill", 0, "kafkalog.cleaner.spill"),
    ("merge_batches", "true", "kafkalog.cleaner.merge.batches"),
    ("dedupe_buffer_size", 1e9, "log.cleaner.dedupe.buffer.size"),
    ("dedupe_buffer_size", 10, "log.cleaner.dedupe.buffer.size"),
    ("io_buffer_load_factor", "0.5", "log.cleaner.io.buffer.load.factor"),
    ("io_buffer_load_factor", math.nan, "log.cleaner.io.buffer.load.factor"),
    ("io_buffer_size", 0, "log.cleaner.io.buffer.size"),
    ("io_max_bytes_per_second", False, "log.cleaner.io.max.bytes.per.second"),
    ("io_max_bytes_per_second", 0, "log.cleaner.io.max.bytes.per.second"),
    ("backoff_ms", -1, "log.cleaner.backoff.ms"),
    ("backoff_ms", 1.0, "log.cleaner.backoff.ms"),
    ("retention_check_interval_ms", 0, "log.retention.check.interval.ms"),
])  # fmt: skip
def test_a_wrong_value_is_told_with_both_its_names_and_what_was_expected(
    field: str, value: Any, name: str
) -> None:
    with pytest.raises(InvalidInputError) as raised:
        CleanerConfig(**{field: value})
    assert str(raised.value).startswith(f"{name} ({field}): expected ")
    assert "found " in str(raised.value)


@pytest.mark.parametrize("cleaner", ["yes", 1, 0, None, {"threads": 2}, CleanerConfig])
def test_a_cleaner_is_wanted_or_not_or_configured(tmp_path: Path, cleaner: Any) -> None:
    with pytest.raises(InvalidInputError, match="expected True, False or a CleanerConfig, found"):
        kafkalog.open(tmp_path / "log", cleaner=cleaner)
    assert not (tmp_path / "log").exists()
