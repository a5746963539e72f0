"""Bugs of threads, choices and races; the tests are those of test_regressions_running.py mostly."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import replace as changed
from importlib import import_module
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest

from kafkalog.cleaner.dedup import log_to_clean
from kafkalog.cleaner.schedule import partition_cleaner, pause, scheduler, thread
from kafkalog.cleaner.state import first_dirty_offset, uncleanable
from kafkalog.storage_engine.format import layout
from kafkalog.storage_engine.fs import locks
from kafkalog.storage_engine.metadata import checkpoints
from kafkalog.storage_engine.metadata.config import TopicConfig
from kafkalog.storage_engine.writing import retention
from tests.torture.old_bug import OldBug, replace

__all__ = ["RUNNING"]

Patch = pytest.MonkeyPatch
clean: Any = import_module(
    "kafkalog.cleaner.rewrite.clean"
)  # the package has a function of that name
_FILE: Final = "cleaner/test_regressions_running.py::"
_MODULES: Final = ("tests.unit.cleaner.test_pause", "tests.unit.cleaner.test_regressions_running")


class _Fatal(BaseException):
    """What no handler expects."""


def _mortal(patch: Patch) -> None:
    """Let a thread that dies be the end."""
    patch.setattr(thread.CleanerThread, "_replace", lambda *_: None)


def _kafka_7215(patch: Patch) -> None:
    def mark(_: Any, topic: str, __: int, fault: Exception) -> str:
        raise _Fatal(topic) from fault

    _mortal(patch)
    patch.setattr(partition_cleaner.PartitionCleaner, "_mark", mark)


def _kafka_8725(patch: Patch) -> None:
    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def plan(*arguments: Any, **options: Any) -> Any:
            try:
                return original(*arguments, **options)
            except Exception as fault:
                raise _Fatal from fault

        return plan

    _mortal(patch)
    replace(patch, scheduler.Plans, "of", make)


def _linkedin_535(patch: Patch) -> None:
    patch.setattr(uncleanable.Uncleanable, "is_due", lambda *_: False)


def _kafka_19895(patch: Patch) -> None:
    def is_due(self: Any, _: Any, now_ms: int) -> bool:
        return bool(now_ms >= self.retry_at_ms)

    patch.setattr(uncleanable.Uncleanable, "is_due", is_due)


def _doubled_pause(patch: Patch) -> None:
    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def clean_round(*arguments: Any, **options: Any) -> Any:
            return original(*arguments, **{**options, "only_if_due": False})

        return clean_round

    patch.setattr(partition_cleaner, "may_be_cleaned", lambda *_: True)
    replace(patch, partition_cleaner, "clean_round", make)


# --- where the dirty section begins --------------------------------------------------------------


def _kafka_9826(patch: Patch) -> None:
    def make(original: Any) -> Any:
        def found(self: Any) -> bool:
            is_beyond = self.first_dirty_offset > self.segments[-1].base_offset
            return bool(original.fget(self) or is_beyond)

        return property(found)

    for name in ("is_eligible", "has_work"):
        replace(patch, log_to_clean.LogToClean, name, make)


def _kafka_6266(patch: Patch) -> None:
    def heal(engine: Any, *, now_ms: int) -> int:
        found = list(first_dirty_offset._invalid(engine.state()))
        for topic, partition, state in found:
            config = TopicConfig.parse(engine.describe(topic).config)
            offset = first_dirty_offset.valid_first_dirty_offset(state)
            first_dirty_offset._tell(config, topic, partition, state, offset)
        return len(found)

    patch.setattr(scheduler, "heal_first_dirty_offsets", heal)


def _kafka_7400(patch: Patch) -> None:
    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def count(segments: Any, state: Any, config: Any, now_ms: int) -> int:
            return original(segments, state, config, now_ms) if config.is_deleted else 0

        return count

    replace(patch, retention, "count_expired", make)


def _refuse(patch: Patch, is_refused: Callable[[Any, int], bool]) -> None:
    """Let a plan be impossible for some states."""

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def plan(*names: Any, state: Any, **options: Any) -> Any:
            if is_refused(state, first_dirty_offset.valid_first_dirty_offset(state)):
                raise ValueError("the range ends before it starts")
            return original(*names, state=state, **options)

        return plan

    for module in (scheduler, clean):
        replace(patch, module, "log_to_clean", make)


def _kafka_9133(patch: Patch) -> None:
    _refuse(patch, lambda state, first_dirty: first_dirty > state.active_base)


def _kafka_8724(patch: Patch) -> None:
    _refuse(patch, lambda state, first_dirty: first_dirty > state.last_stable_offset)


# --- ratios --------------------------------------------------------------------------------------


def _kafka_6030(patch: Patch) -> None:
    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def plan(*names: Any, **options: Any) -> Any:
            log = original(*names, **options)
            sizes = np.array([log.clean_bytes, log.cleanable_bytes]).astype(np.int32).tolist()
            return changed(log, clean_bytes=sizes[0], cleanable_bytes=sizes[1])

        return plan

    replace(patch, scheduler, "log_to_clean", make)


def _kafka_2660(patch: Patch) -> None:
    def ratio(self: Any) -> float:
        dirty: int = self.cleanable_bytes + self.uncleanable_bytes
        return dirty / int(self.clean_bytes + dirty)

    patch.setattr(log_to_clean.LogToClean, "dirty_ratio", property(ratio))


# --- races ---------------------------------------------------------------------------------------


def _marked(patch: Patch) -> set[Path]:
    """Let a pause be a mark of its directory; returns the marks."""
    paused: set[Path] = set()

    @contextlib.contextmanager
    def abort_and_pause(engine: Any, topic: str, partition: int) -> Iterator[None]:
        directory = engine.partition_directory(topic, partition)
        paused.add(directory)
        with locks.FileLock(directory / layout.CLEANER_LOCK).exclusive():
            time.sleep(0.002)
        try:
            yield
        finally:
            paused.discard(directory)  # whoever else has paused it

    tests = [import_module(name) for name in _MODULES]
    for module in (pause, *tests):
        patch.setattr(module, "abort_and_pause", abort_and_pause)
    for module in (pause, scheduler, partition_cleaner, *tests):
        patch.setattr(module, "is_paused", lambda directory: directory in paused)
    return paused


def _kafka_7441(patch: Patch) -> None:
    _marked(patch)


def _kafka_6568(patch: Patch) -> None:
    paused = _marked(patch)

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def clean(self: Any, topic: str, partition: int, **options: Any) -> Any:
            try:
                return original(self, topic, partition, **options)
            finally:
                paused.discard(self.engine.partition_directory(topic, partition))

        return clean

    replace(patch, partition_cleaner.PartitionCleaner, "clean", make)


def _kafka_7322(patch: Patch) -> None:
    class Ignored(locks.FileLock):
        @contextlib.contextmanager
        def exclusive(self, *, wait: bool = True) -> Iterator[bool]:
            yield True

    patch.setattr(retention, "locks", _Locks(Ignored))


class _Locks:
    """The module `locks` with another class for locks of files."""

    def __init__(self, file_lock: type[locks.FileLock]) -> None:
        self.FileLock = file_lock
        self.SegmentsLock = locks.SegmentsLock
        self.RootLock = locks.RootLock


def _kafka_8362(patch: Patch) -> None:
    patch.setattr(checkpoints, "write_cleaner_checkpoint", lambda *_: None)


_LOOKED_AT: Final = _FILE + "test_a_partition_that_cannot_even_be_looked_at_does_not_end_the_thread"
_STOPPED = r"eventually\(lambda: status\(engine, 1_000.*state == .clean.\)|assert thread\.is_alive"
"""The thread has ended, before it did its work or after."""

RUNNING: Final = (
    OldBug(
        name="KAFKA-7215",
        what="a fault of one partition ends the thread, and no other takes its place",
        patch=_kafka_7215,
        tests=(_FILE + "test_a_partition_that_fails_leaves_the_thread_and_the_others_alone",),
        sign=_STOPPED,
    ),
    OldBug(
        name="KAFKA-8725",
        what="a fault while a partition is planned ends the thread",
        patch=_kafka_8725,
        tests=(
            f"{_LOOKED_AT}[no directory]",
            f"{_LOOKED_AT}[no plan]",
        ),
        sign=_STOPPED,
    ),
    OldBug(
        name="LinkedIn 535",
        what="a partition that failed is left alone for good",
        patch=_linkedin_535,
        tests=(_FILE + "test_a_partition_that_failed_is_tried_again_without_a_restart",),
        sign=r"eventually\(lambda: thread.failures == 2\)",
    ),
    OldBug(
        name="KAFKA-19895",
        what="a change of the topic's configs does not end the pause after a failure",
        patch=_kafka_19895,
        tests=(_FILE + "test_a_changed_config_ends_the_quarantine",),
        sign=r"eventually\(lambda: thread.cleanings == 1\)",
    ),
    OldBug(
        name="a fault found twice",
        what="a cleaner that waited for another one does not look whether there is still work",
        patch=_doubled_pause,
        tests=(_FILE + "test_a_fault_is_found_by_one_cleaner_of_several",),
        sign=r"watch=be_quicker\) is None",
    ),
    OldBug(
        name="KAFKA-9826",
        what="a first dirty offset above the active segment's base makes a partition due",
        patch=_kafka_9826,
        tests=(
            _FILE + "test_a_first_dirty_offset_within_the_active_segment_makes_no_endless_loop",
        ),
        sign=r"assert clean_filthiest\(engine, now_ms=10\*\*6\) is None",
    ),
    OldBug(
        name="KAFKA-6266",
        what="a first dirty offset outside of the log is told, and stays as it is",
        patch=_kafka_6266,
        tests=(_FILE + "test_a_first_dirty_offset_that_was_reset_is_told_once",),
        sign=r"assert 5 == 1",
    ),
    OldBug(
        name="KAFKA-7400",
        what="without the policy delete retention looks at no log start",
        patch=_kafka_7400,
        tests=(
            _FILE + "test_segments_below_the_log_start_go_also_where_nothing_is_deleted_by_time",
        ),
        sign=r"eventually\(lambda: thread.segments_deleted >= 1\)",
    ),
    OldBug(
        name="KAFKA-9133",
        what="a dirty section that begins in the active segment is an error",
        patch=_kafka_9133,
        tests=(
            _FILE + "test_a_log_start_in_the_active_segment_leaves_nothing_to_clean_and_no_fault",
        ),
        sign=r"the range ends before it starts",
    ),
    OldBug(
        name="KAFKA-8724",
        what="a dirty section that begins above the last stable offset is an error",
        patch=_kafka_8724,
        tests=(
            _FILE + "test_offsets_in_any_order_are_a_range_or_nothing[0-7-0]",
            _FILE + "test_offsets_in_any_order_are_a_range_or_nothing[5-10-0]",
        ),
        sign=r"the range ends before it starts",
    ),
    OldBug(
        name="KAFKA-6030",
        what="sums of bytes have 32 bits",
        patch=_kafka_6030,
        tests=(_FILE + "test_a_ratio_of_more_than_two_gib_is_a_ratio",),
        sign=r"assert \(-1073741824, 1073741824\) == \(3221225472, 9663676416\)",
    ),
    OldBug(
        name="KAFKA-2660",
        what="the active segment counts as dirty",
        patch=_kafka_2660,
        tests=(_FILE + "test_the_active_segment_is_in_no_ratio",),
        sign=r"assert \(0, 0.98\d+\) == \(0, 0.0\)",
    ),
    OldBug(
        name="KAFKA-6568",
        what="a cleaner that ends removes the mark of whoever has paused it",
        patch=_kafka_6568,
        tests=(
            "cleaner/test_pause.py::test_a_cleaning_at_work_lets_go_and_leaves_the_log_right[1]",
        ),
        sign=r"assert clean\(engine, now_ms=1\) == \[\]",
    ),
    OldBug(
        name="KAFKA-7441",
        what="a pause is a mark, which whoever ends one removes",
        patch=_kafka_7441,
        tests=(
            _FILE + "test_pausers_retention_and_cleaners_may_meet_in_any_order",
            "cleaner/test_pause.py::test_pausers_count_by_themselves",
        ),
        sign=r"where False = is_paused",
    ),
    OldBug(
        name="KAFKA-7322",
        what="retention takes no notice of a cleaner at work",
        patch=_kafka_7322,
        tests=(_FILE + "test_a_policy_that_changes_at_any_moment_leaves_one_at_work",),
        sign=r"assert other.apply_retention|apply_retention",
    ),
    OldBug(
        name="KAFKA-8362",
        what="the checkpoint is not written when a partition goes",
        patch=_kafka_8362,
        tests=(_FILE + "test_the_checkpoint_of_a_partition_that_is_gone_goes_with_it",),
        sign=r"assert \{\('t', 0\): 10, \('u', 0\): 10\} == \{\('u', 0\): 10\}",
    ),
)
