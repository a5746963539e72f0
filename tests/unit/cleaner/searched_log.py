"""A log to search for occurrences of a key, and files that are put into it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa

import kafkalog
from kafkalog.erasure.occurrences import Occurrences
from kafkalog.erasure.topic_files import FileKind
from kafkalog.log import KafkaLog
from kafkalog.storage_engine.engine import engine_of
from kafkalog.storage_engine.writing.staging import StagedMessage, StagedWriter
from kafkalog.storage_engine.writing.writer import writer_slug
from tests.builders.batch_builder import Record, batch_data

KEY = b"user-4711"
NOW = 1_700_000_000_000
BASE = "00000000000000000777"
"""Of a segment that the log does not have."""


@contextlib.contextmanager
def searched_log(root: Path) -> Iterator[KafkaLog]:
    """Yield a log without the key in topic `t`, which was cleaned; `others` has it."""
    with kafkalog.open(root) as opened:
        opened.create_topic("t", config={"segment.bytes": "300"})
        opened.create_topic("others")
        for turn in range(5):
            rows = [(f"user-{n}", f"turn {turn}") for n in range(10)]
            opened.append("t", rows, now_ms=NOW)
        opened.append("others", [(KEY, "theirs")], now_ms=NOW)
        opened.clean("t", force=True, now_ms=NOW)
        yield opened


def directory(log: KafkaLog) -> Path:
    return engine_of(log).partition_directory("t", 0)


def kinds(occurrences: Occurrences) -> set[FileKind]:
    return {file.file.kind for file in occurrences.files if not file.is_clear}


def batch(*keys: bytes, value: bytes | None = b"v", codec: int = 0) -> bytes:
    return batch_data((Record(i, NOW, key, value) for i, key in enumerate(keys)), codec=codec)


def stage(
    log: KafkaLog, topic: str, writer: str = "w", target: str = "*", batch_id: int = 0
) -> StagedMessage:
    slug = writer_slug(writer, target)
    staging = StagedWriter(
        log.root, engine_of(log).state(), now_ms=lambda: NOW, writer_slug=slug, batch_id=batch_id
    )
    rows = {"key": pa.array([KEY], pa.binary()), "value": pa.array([b"v"], pa.binary())}
    staging.append(topic, pa.RecordBatch.from_pydict(rows))
    return staging.finish()
