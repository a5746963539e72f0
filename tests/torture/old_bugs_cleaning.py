"""Bugs in what is cleaned and written at all: more keys than memory, far offsets, large batches."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any, Final

import pytest

from kafkalog.cleaner.config import CleanerConfig
from kafkalog.cleaner.dedup import latest_records
from kafkalog.cleaner.rewrite import batch_writer, cleaned_segment, retention_rules
from kafkalog.errors import CorruptBatchError
from kafkalog.storage_engine.format import layout
from kafkalog.storage_engine.segment import open_segment
from kafkalog.storage_engine.writing import active_segment
from tests.torture.old_bug import OldBug, replace

__all__ = ["CLEANING"]

Patch = pytest.MonkeyPatch
clean: Any = import_module(
    "kafkalog.cleaner.rewrite.clean"
)  # the package has a function of that name
_FILE: Final = "cleaner/test_regressions.py::"


# --- more keys than memory -----------------------------------------------------------------------


def _kafka_3587(patch: Patch) -> None:
    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def find(view: Any, log: Any, **options: Any) -> Any:
            ends = [*(s.base_offset for s in log.segments[1:]), log.end]
            widest = max(b - s.base_offset for s, b in zip(log.segments, ends, strict=True))
            slots = options["config"].dedupe_buffer_size // 24
            if widest > slots * options["config"].io_buffer_load_factor:
                raise ValueError(f"{widest} messages in a segment, the offset map has {slots}")
            return original(view, log, **options)

        return find

    replace(patch, clean, "find_latest_records", make)


def _kafka_3894(patch: Patch) -> None:
    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def build(view: Any, start: int, end: int, *arguments: Any, **options: Any) -> int:
            found: int = original(view, start, end, *arguments, **options | {"on_full": None})
            if found < end and view.segments[0].base_offset <= found:
                raise ValueError("not even one segment fits into the offset map")
            return found

        return build

    replace(patch, latest_records, "build_offset_map", make)


def _redpanda_16952(patch: Patch) -> None:
    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def build(view: Any, start: int, end: int, *arguments: Any, **options: Any) -> int:
            found: int = original(view, start, end, *arguments, **options)
            whole = [s.base_offset for s in view.segments if s.base_offset <= found]
            return end if found == end else max(start, *whole)

        return build

    replace(patch, latest_records, "build_offset_map", make)


def _redpanda_24323(patch: Patch) -> None:
    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def finish(self: Any, horizon: int | None) -> None:
            if self.end >= self.snapshot.state.active_base:
                original(self, horizon)

        return finish

    replace(patch, clean._Publisher, "finish", make)


def _redpanda_13982(patch: Patch) -> None:
    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def group(segments: Any, **options: Any) -> Any:
            return [[segment] for part in original(segments, **options) for segment in part]

        return group

    replace(patch, clean, "group_segments_by_size", make)


# --- missing and far offsets ---------------------------------------------------------------------


def _kafka_8764(patch: Patch) -> None:
    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def build(view: Any, start: int, end: int, offset_map: Any, **options: Any) -> int:
            found: int = original(view, start, end, offset_map, **options)
            lasts = [
                int(chunk.table.last_offsets[-1]) + 1 for chunk in view.chunks(start, found)
            ]  # where no record was looked at, nothing says that there is none
            return min(found, max([start, *lasts]))

        return build

    replace(patch, latest_records, "build_offset_map", make)


def _kafka_5413(patch: Patch) -> None:
    def fitting(_: Any, sizes: Any, last_offsets: Any) -> int:
        return len(sizes)

    patch.setattr(cleaned_segment.CleanedSegment, "count_fitting", fitting)


def _kafka_4451(patch: Patch) -> None:
    class Wrapping(struct.Struct):
        def pack(self, *numbers: int) -> bytes:
            fields = zip(self.format.removeprefix(">"), numbers, strict=True)
            return super().pack(
                *((n + 2**31) % 2**32 - 2**31 if c == "i" else n for c, n in fields)
            )

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def has_room(self: Any, size: int, time: int, base_offset: int, last_offset: int) -> bool:
            near = min(last_offset, self.base_offset + layout.INT32_MAX)
            room: bool = original(self, size, time, min(base_offset, near), near)
            return room

        return has_room

    replace(patch, active_segment.ActiveSegment, "has_room", make)
    for name in ("OFFSET_INDEX_ENTRY", "TIME_INDEX_ENTRY"):
        patch.setattr(layout, name, Wrapping(getattr(layout, name).format))


def _kafka_12889(patch: Patch) -> None:
    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def group(segments: Any, **options: Any) -> Any:
            found = []
            for part in original(segments, **options):
                is_wide = part[-1].base_offset - part[0].base_offset > layout.INT32_MAX // 2
                found += [[segment] for segment in part] if is_wide else [part]
            return found

        return group

    replace(patch, clean, "group_segments_by_size", make)


# --- batches too large ---------------------------------------------------------------------------


def _limited(patch: Patch, limit: Callable[[Any], int]) -> None:
    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def decisions(self: Any, start: int, end: int, active: Any) -> Iterator[Any]:
            for chunk in self.snapshot.chunks(start, end, chunk_size=self.chunk_size):
                if (chunk.table.sizes > limit(self)).any():
                    raise ValueError("a message larger than the buffer may be")
            yield from original(self, start, end, active)

        return decisions

    replace(patch, retention_rules.RetentionRules, "retained", make)


def _kafka_4019(patch: Patch) -> None:
    _limited(patch, lambda rules: int(rules.chunk_size))


def _kafka_6834(patch: Patch) -> None:
    # What the topic of the test takes, the smallest of all those that are cleaned with patches.
    _limited(patch, lambda rules: max(1000, int(rules.chunk_size)))


def _kafka_5316(patch: Patch) -> None:
    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def note(self: Any, batches: Any) -> None:
            if any(len(batch.data) > self._config.max_message_bytes for batch in batches):
                raise BufferError("the records that stay do not fit their buffer")
            original(self, batches)

        return note

    replace(patch, batch_writer.BatchWriter, "_note_rebuilt", make)


# --- damage --------------------------------------------------------------------------------------


def _crabka_bad_batch(patch: Patch) -> None:
    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def chunks(self: Any, *arguments: Any) -> Iterator[Any]:
            try:
                yield from original(self, *arguments)
            except CorruptBatchError:
                return

        return chunks

    replace(patch, open_segment.OpenSegment, "chunks", make)


def _redpanda_26182(patch: Patch) -> None:
    patch.setattr(CleanerConfig, "__post_init__", lambda _: None)


_MORE_KEYS: Final = _FILE + "test_a_segment_with_more_keys_than_memory_is_cleaned_to_its_end"
_RUNNING: Final = "cleaner/test_regressions_running.py::"
CLEANING: Final = (
    OldBug(
        name="KAFKA-3587",
        what="a segment with more offsets than the map has room for is given up",
        patch=_kafka_3587,
        tests=(_MORE_KEYS,),
        sign="messages in a segment, the offset map has",
    ),
    OldBug(
        name="KAFKA-3894",
        what="a segment with more keys than the map has room for is given up",
        patch=_kafka_3894,
        tests=(_MORE_KEYS,),
        sign="not even one segment fits",
    ),
    OldBug(
        name="Redpanda 16952",
        what="a round whose map is full ends where the segment begins, and is done again",
        patch=_redpanda_16952,
        tests=(_MORE_KEYS + "[False]",),
        sign="assert 61 <= 60",
    ),
    OldBug(
        name="Redpanda 24323",
        what="a round that ended early does not move the first dirty offset",
        patch=_redpanda_24323,
        tests=(_MORE_KEYS + "[False]",),
        sign="assert 61 <= 60",
    ),
    OldBug(
        name="Redpanda 26182",
        what="a budget without room for one key is taken",
        patch=_redpanda_26182,
        tests=(_RUNNING + "test_no_memory_for_one_key_is_refused_before_anything_runs",),
        sign="DID NOT RAISE",
    ),
    OldBug(
        name="Redpanda 13982",
        what="segments are never joined",
        patch=_redpanda_13982,
        tests=(_FILE + "test_a_log_that_is_overwritten_for_ever_keeps_its_size",),
        sign=r"len\(\{\(201, 7\), \(201, 9\)",
    ),
    OldBug(
        name="KAFKA-8764",
        what="a round ends behind the last batch that it met, not where offsets are missing",
        patch=_kafka_8764,
        tests=(
            _FILE + "test_missing_offsets_are_passed_once",
            "cleaner/test_log_cleaner_rules.py::test_a_cleaning_goes_past_missing_offsets",
        ),
        sign=r"end_offset == (active|30)|assert stats is not None|end_offset > start",
    ),
    OldBug(
        name="KAFKA-5413, KAFKA-6264",
        what="a cleaned segment takes offsets that no index of its base can tell",
        patch=_kafka_5413,
        tests=(_FILE + "test_a_segment_whose_offsets_no_index_can_tell_is_cleaned",),
        sign=r"format requires -2147483648 <= number",
    ),
    OldBug(
        name="KAFKA-4451",
        what="an empty segment takes far offsets, and its index has them modulo 2^32",
        patch=_kafka_4451,
        tests=(
            _FILE + "test_a_copy_of_a_compacted_log_with_far_offsets_has_sound_indexes",
            "storage_engine/test_follower_rules.py::"
            "test_an_empty_segment_far_below_takes_no_offset_that_it_cannot_tell",
            "storage_engine/test_raw_append.py::test_an_offset_span_that_no_index_can_count_rolls",
        ),
        sign=r"assert sound\(tmp_path\)|assert 2\*\*40 in bases|== \[0, 3_000_000_000\]",
    ),
    OldBug(
        name="KAFKA-12889",
        what="segments far apart are not joined, be they empty",
        patch=_kafka_12889,
        tests=(_FILE + "test_segments_without_records_do_not_pile_up",),
        sign=r"assert len\(sizes\(engine\)\) <= 4",
    ),
    OldBug(
        name="KAFKA-4019",
        what="a batch larger than the cleaner's buffer ends the round",
        patch=_kafka_4019,
        tests=(
            _FILE + "test_batches_beyond_what_the_topic_takes_are_cleaned[False-1]",
            _FILE + "test_batches_beyond_what_the_topic_takes_are_cleaned[True-1]",
        ),
        sign="a message larger than the buffer may be",
    ),
    OldBug(
        name="KAFKA-6834",
        what="the buffer grows to max.message.bytes only, and a larger batch ends the round",
        patch=_kafka_6834,
        tests=(
            _FILE + "test_batches_beyond_what_the_topic_takes_are_cleaned[False-1]",
            _FILE + "test_batches_beyond_what_the_topic_takes_are_cleaned[True-1]",
        ),
        sign="a message larger than the buffer may be",
    ),
    OldBug(
        name="KAFKA-5316",
        what="what remains of a batch must not be larger than max.message.bytes",
        patch=_kafka_5316,
        tests=(_FILE + "test_a_batch_that_grows_by_being_compressed_anew_is_written",),
        sign="do not fit their buffer",
    ),
    OldBug(
        name="crabka, a bad batch",
        what="a batch whose checksum is wrong is taken for the end of its segment",
        patch=_crabka_bad_batch,
        tests=(_FILE + "test_what_lies_behind_a_bad_batch_is_never_dropped",),
        sign=r"assert None is not None",
    ),
)
