"""A log to search for occurrences of a key, and files that are put into it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from kafkalog.erasure.occurrences import Occurrences
from kafkalog.erasure.topic_files import FileKind
from kafkalog.log import KafkaLog
from kafkalog.storage_engine.place import directory_log_of
from tests.builders.batch_builder import Record, batch_data
from tests.builders.log_builder import LogBuilder

KEY = b"user-4711"
NOW = 1_700_000_000_000
BASE = "00000000000000000777"
"""Of a segment that the log does not have."""


@contextlib.contextmanager
def searched_log(root: Path) -> Iterator[KafkaLog]:
    """Yield a log without the key in topic `t`, which was cleaned; `others` has it."""
    log = LogBuilder(root, now_ms=NOW).topic("others").append((KEY, "theirs"))
    log.topic("t", segment_bytes=300)
    log.commits([(f"user-{n}", f"turn {turn}") for n in range(10)] for turn in range(5)).clean()
    with log as opened:
        yield opened


def directory(log: KafkaLog) -> Path:
    return directory_log_of(log).partition_directory("t", 0)


def kinds(occurrences: Occurrences) -> set[FileKind]:
    return {file.file.kind for file in occurrences.files if not file.is_clear}


def batch(*keys: bytes, value: bytes | None = b"v", codec: int = 0) -> bytes:
    return batch_data((Record(i, NOW, key, value) for i, key in enumerate(keys)), codec=codec)
