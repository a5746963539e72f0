"""One random log in the hands of two cleaners, Kafka's and ours: the same steps, compared by round.

A step appends batches, rolls, deletes records, changes the config, or lets time pass; then both
clean, a round at a time, as long as Kafka finds the log due. Whatever is drawn comes from the seed.

One thing is left out, in which Kafka errs (4.4.0, and since there are transactions). A round that
begins within a segment is told of all transactions which that segment's index names as aborted,
also of those that ended before the round begins; where the offset index lets it pass over their
markers, it takes everything that their producers wrote since for aborted, and its keys are not
mapped: what they supersede stays. So where the map is small and there are transactions, no offset
index has an entry.

Where the map is large, a second log of ours is cleaned by our own means: its batches are merged,
and in every other round its keys do not fit the map, so that they are spilled; in the others
settled segments are left alone. It must have the same records after every round.
"""

from __future__ import annotations

import contextlib
import dataclasses
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import kafkalog
from kafkalog.cleaner.config import CleanerConfig
from kafkalog.cleaner.report.status import status
from kafkalog.cleaner.schedule import manager
from kafkalog.cleaner.shelves import moment_of
from kafkalog.cleaner.state.stats import CleanerStats
from kafkalog.log import KafkaLog
from kafkalog.storage_engine.metadata.state import PartitionState
from kafkalog.storage_engine.place import directory_log_of
from tests.conformance.twin_batches import Taste, Writers, draw_taste
from tests.conformance.twin_kafka import CleanerSettings, KafkaCleaner, Round
from tests.conformance.twin_segments import (
    Segment,
    differences,
    features,
    read_segments,
    record_differences,
)

LARGE_MAP = 24 << 16
"""Bytes of a map that takes in every log that is drawn here, in one round."""
SMALL_MAP = 24 * 16
START_MS = 1_700_000_000_000
ROUNDS_MAX = 30
"""Rounds in a row; a small map may need more of them, and the next step comes all the same."""


@dataclass
class Twin:
    """A log of a seed, twice."""

    seed: int
    kafka: KafkaCleaner
    directory: Path
    rounds: int = 0
    met: set[str] = field(default_factory=set)
    """What there was in what Kafka left, so that it can be told what the draws reach."""
    found: list[str] = field(default_factory=list)
    """How the two differ, from the first round that differed; empty when they do not."""

    def __post_init__(self) -> None:
        self._logs: list[KafkaLog] = []
        self._draw = random.Random(self.seed)
        self._name = f"seed{self.seed}"
        self._now_ms = START_MS
        self._writers = Writers(self._draw, draw_taste(self._draw))
        self._config = _draw_config(self._draw, self.taste)
        self._settings = _draw_settings(self._draw, self.taste)
        if self._settings.map_size < LARGE_MAP and self.taste.transactional:
            self._config["index.interval.bytes"] = str(1 << 30)
        self._theirs = self.directory / f"{self._name}-0"
        self._checkpoint = 0
        self._has_other = self._settings.map_size == LARGE_MAP

    @property
    def taste(self) -> Taste:
        return self._writers.taste

    def __str__(self) -> str:
        return f"seed {self.seed}: {self._config} {self._settings} {self.taste}"

    def run(self) -> Twin:
        """Do all steps, up to the first difference."""
        self.kafka.create(self._now_ms, self._name, self._theirs, self._config)
        with contextlib.ExitStack() as stack:
            for root in ("ours", "other")[: 1 + self._has_other]:
                log = stack.enter_context(kafkalog.open(self.directory / "logs" / root))
                log.create_topic(self._name, 1, self._config)
                self._logs.append(log)
            for _ in range(self._draw.randint(2, 6)):
                self._step()
                if not self.found:
                    self._clean()
                if self.found:
                    break
        self.kafka.forget(self._name)
        return self

    # --- both write ------------------------------------------------------------------------------

    def _step(self) -> None:
        draw = self._draw
        if draw.random() < 0.15:
            self._config["delete.retention.ms"] = _draw_delete_retention(draw, self.taste)
            self.kafka.configure(self._now_ms, self._name, self._config)
            for log in self._logs:
                log.alter_topic(self._name, self._config)
        if draw.random() < 0.2:
            self._writers.leader_epoch += 1
        for _ in range(draw.randint(1, 3)):
            self._pass_time(draw.choice((0, 100, 5_000, 40_000)))
            self._append(self._writers.batches(draw.randint(1, 12), self._now_ms))
        self._append(self._writers.end_transactions(self._now_ms, draw.choice((0.0, 0.5, 1.0))))
        if "delete" in self._config["cleanup.policy"] and draw.random() < 0.15:
            self._delete_records()
        self._roll()
        self._pass_time(draw.choice((0, 1, 1_000, 60_000, 2 * 86_400_000)))
        self.found += differences(read_segments(self._theirs), self._segments(self._logs[0]))

    def _pass_time(self, ms: int) -> None:
        self._now_ms += ms

    def _append(self, data: bytes) -> None:
        if data:
            end = self.kafka.append(self._now_ms, self._name, data)
            for log in self._logs:
                log.append_raw(self._name, 0, data, now_ms=self._now_ms)
                assert log.offsets(self._name)[0][1] == end

    def _delete_records(self) -> None:
        """Delete what is a whole number of segments: both have none of it in their files then."""
        bases = [segment.base for segment in read_segments(self._theirs)]
        offset = self._draw.choice(bases[: len(bases) // 2 + 1])
        start = self.kafka.raise_start(self._now_ms, self._name, offset)
        for log in self._logs:
            log.delete_records(self._name, 0, offset, now_ms=self._now_ms)
            assert log.offsets(self._name)[0][0] == start
            manager.retain(directory_log_of(log), now_ms=self._now_ms)

    def _roll(self) -> None:
        if self._state(self._logs[0]).active_size == 0:
            return
        base = self.kafka.roll(self._now_ms, self._name)
        for log in self._logs:
            with directory_log_of(log).transaction() as transaction:
                transaction.roll(self._name, 0, self._now_ms)
                transaction.publish(self._now_ms)
            assert self._state(log).active_base == base

    # --- both clean ------------------------------------------------------------------------------

    def _clean(self) -> None:
        for _ in range(ROUNDS_MAX):
            kafkas = self.kafka.clean(self._now_ms, self._name, self._checkpoint, self._settings)
            self._compare_plans(kafkas)
            if kafkas.end is None or self.found:
                return
            self._checkpoint = kafkas.end
            self.rounds += 1
            theirs = read_segments(self._theirs)
            self.met |= features(theirs)
            if kafkas.end < kafkas.plan.first_uncleanable_offset:
                self.met.add("a round that ends before what is uncleanable")
            for log, config in zip(self._logs, self._cleaners(), strict=False):
                stats = manager.clean_filthiest(
                    directory_log_of(log), now_ms=self._now_ms, config=config
                )
                self._compare(log, kafkas, stats, theirs)
            if self.found:
                return

    def _cleaners(self) -> tuple[CleanerConfig, CleanerConfig]:
        """Our cleaner as Kafka's is, and with all that Kafka's has not."""
        settings = self._settings
        sizes = (settings.map_size, settings.load_factor, settings.buffer_size)
        other = SMALL_MAP if self.rounds % 2 else LARGE_MAP
        return _cleaner(*sizes, has_all=False), _cleaner(other, *sizes[1:], has_all=True)

    def _compare_plans(self, kafkas: Round) -> None:
        (known,) = status(moment_of(directory_log_of(self._logs[0]), self._now_ms))
        ours = [
            known.first_dirty_offset,
            known.first_uncleanable_offset,
            known.clean_bytes,
            known.dirty_bytes,
        ]
        theirs = list(dataclasses.astuple(kafkas.plan))
        if any(self.taste.codecs):
            del ours[2:], theirs[2:]  # two libraries do not compress to the same size
        if ours != theirs:
            self.found.append(f"plan: Kafka's {kafkas.plan}, ours {ours}")

    def _compare(
        self, log: KafkaLog, kafkas: Round, stats: CleanerStats | None, theirs: list[Segment]
    ) -> None:
        name = log.root.name
        if stats is None or stats.error is not None:
            self.found.append(f"{name}: not cleaned: {stats.error if stats else 'not due'}")
            return
        if log is self._logs[0]:
            self.found += differences(theirs, self._segments(log))
        else:
            self.found += record_differences(theirs, self._segments(log))
        end = self._state(log).first_dirty_offset
        if end != kafkas.end:
            self.found.append(f"{name}: checkpoint: Kafka's {kafkas.end}, ours {end}")

    def _segments(self, log: KafkaLog) -> list[Segment]:
        return read_segments(directory_log_of(log).partition_directory(self._name, 0))

    def _state(self, log: KafkaLog) -> PartitionState:
        return log.describe(self._name).partitions[0]


def _cleaner(
    map_size: int, load_factor: float, buffer_size: int, *, has_all: bool
) -> CleanerConfig:
    return CleanerConfig(
        dedupe_buffer_size=map_size,
        io_buffer_load_factor=load_factor,
        io_buffer_size=buffer_size,
        merge_batches=has_all,
        spill=has_all,
    )


def _draw_delete_retention(draw: random.Random, taste: Taste) -> str:
    # Where the horizon would be past all time there is none. Kafka writes such a batch anew all the
    # same, and with LogAppendTime that changes a base timestamp, which no reader sees.
    forever = str(2**63 - 1) if not any(taste.timestamp_types) else "0"
    return draw.choice(("0", "1000", "60000", "86400000", forever))


def _draw_config(draw: random.Random, taste: Taste) -> dict[str, str]:
    config: dict[str, str] = {
        "cleanup.policy": draw.choice(("compact", "compact,delete")),
        "retention.ms": "-1",
        "min.cleanable.dirty.ratio": "0",
        "internal.segment.bytes": _segment_size(draw, taste),
        "segment.index.bytes": draw.choice(("10485760", "10485760", "200")),
        "index.interval.bytes": draw.choice(("0", "100", "4096")),
        "delete.retention.ms": _draw_delete_retention(draw, taste),
        "file.delete.delay.ms": "0",
        "segment.ms": draw.choice(("604800000", "30000")),
    }
    if draw.random() < 0.2:
        config["min.compaction.lag.ms"] = draw.choice(("1", "5000", "60000"))
    return config


def _segment_size(draw: random.Random, taste: Taste) -> str:
    """Draw a size; where batches are compressed, one that decides nothing.

    Two libraries do not compress to the same size, and sizes say which segments become one.
    """
    batch_size_max = 100 + taste.records_max * (2 * taste.value_size_max + 80)
    return str(1 << 20 if any(taste.codecs) else batch_size_max * draw.choice((1, 2, 8)))


def _draw_settings(draw: random.Random, taste: Taste) -> CleanerSettings:
    map_size = 24 * max(8, draw.choice((taste.keys, taste.keys // 2, 3, 20)))
    return CleanerSettings(
        draw.choice((LARGE_MAP, map_size)),
        draw.choice((0.9, 0.5)),
        draw.choice((512, 4096, 1 << 20)),
    )


def parsed_seeds(text: Mapping[str, str]) -> list[int]:
    """Return the seeds that KAFKALOG_TWIN_SEEDS names, as in `1,5,40-50`; none without it."""
    seeds: list[int] = []
    for part in filter(None, text.get("KAFKALOG_TWIN_SEEDS", "").split(",")):
        first, _, last = part.partition("-")
        seeds += range(int(first), int(last or first) + 1)
    return seeds
