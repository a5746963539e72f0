"""Drawn logs in the hands of Kafka's own classes and of ours: all that both say must be the same.

    python -m tests.torture.twin [--quick] [--jobs N] [--only CASE]

A log is drawn: several producers, transactions, tombstones, odd times, deletes within a batch,
leaders that change. Kafka writes it as a follower or as a leader, or we do, or its messages v0, v1
and batches are laid into files. Then files are lost, cut, flipped, or another segment's, the log is
torn, a swap has died in some step. The checkpoints of the root and the mark of a clean shutdown are
drawn too.

Both sides get the same bytes. Kafka's LogLoader, UnifiedLog and Cleaner run in a Java process, with
no broker around them (`tests/conformance/LogCleanerTwin.java`). Ours reads the directory as it is,
and then adopts it. Both clean it, delete by time and size, and stop. Then each loads what the other
has left.

After each step the program compares log start, end and last stable offset, all records in both
isolation levels, the offset for each time about a record's, leader epochs and producers. A
difference is a violation, unless a rule of `twin_rules` knows it. Each rule is as narrow as it can
be, and names a sentence of docs/limits.md.
"""

from __future__ import annotations

import logging
import os
import random
import shutil
import sys
from collections import Counter
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Final

import kafkalog
from kafkalog.cleaner.config import CleanerConfig
from kafkalog.cleaner.schedule import manager
from kafkalog.errors import KafkaLogError, StorageError
from kafkalog.log import KafkaLog
from kafkalog.storage_engine.broker.checkpointed import Checkpointed
from kafkalog.storage_engine.broker.loader import LoadedPartition, load_partition
from kafkalog.storage_engine.metadata import checkpoints
from kafkalog.storage_engine.ownership.adopt import adopt
from kafkalog.storage_engine.ownership.release import release
from kafkalog.storage_engine.place import directory_log_of
from tests.conformance import twin_kafka
from tests.conformance.twin_kafka import KafkaCleaner, KafkaRefusedError
from tests.torture import Tally
from tests.torture.drawn_logs import Judged, judge, options_of
from tests.torture.scratch import scratch
from tests.torture.twin_ages import Age, Retention, are_explained
from tests.torture.twin_draws import LARGE_MAP, TOPIC, Drawn, draw_log, held_by
from tests.torture.twin_rules import ENDS, rule_of
from tests.torture.twin_spoils import spoil
from tests.torture.twin_views import (
    Difference,
    View,
    difference_of_losses,
    differences,
    kafkas_view,
    our_view,
)

_LOGS: Final = 3_000
_QUICK: Final = 40
_PORTION: Final = 10
_ROUNDS_MAX: Final = 4
_LATER_MS: Final = (0, 1_000, 200_000, 2 * 86_400_000)


class Pair:
    """One log, in both hands."""

    def __init__(self, seed: int, case: int, kafka: KafkaCleaner, directory: Path) -> None:
        self.case = case
        self._draw = random.Random(f"{seed}:{case}")
        self._kafka = kafka
        self._directory = directory
        self.found: list[Difference] = []
        """Differences that no rule knows."""
        self.known: Counter[str] = Counter()
        self.compared = 0
        self.drawn = draw_log(self._draw, kafka, directory / "drawn", "drawn")
        spoil(self._draw, self.drawn, kafka)
        self.drawn.write_root()
        self._now_ms = self.drawn.now_ms
        self._first_dirty = self.drawn.first_dirty

    def __str__(self) -> str:
        drawn = self.drawn
        told = f"{drawn.style}, {'clean' if drawn.is_clean else 'killed'}, start {drawn.log_start}"
        told += f", recovery point {drawn.recovery_point}, dirty from {drawn.first_dirty}"
        return f"{told}, {'; '.join(drawn.spoiled) or 'unspoiled'}"

    def run(self) -> None:
        """Compare after each step, up to the first one with a difference."""
        kafkas = Path(shutil.copytree(self.drawn.root, self._directory / "kafkas"))
        ours = Path(shutil.copytree(self.drawn.root, self._directory / "ours"))
        theirs = self._load("loaded", kafkas, self.drawn)
        if theirs is None or not self._open("loaded", ours, theirs, self.drawn):
            return
        adopt(ours, config={TOPIC: self.drawn.config}, now_ms=self._now_ms)
        with kafkalog.open(ours) as log:
            self._compare("adopted", theirs, our_view(log, theirs.times))
            if "compact" in self.drawn.config["cleanup.policy"] and not self._is_over:
                self._clean(log)
            if not self._is_over:
                self._retain(log)
            if self._is_over:
                self._kafka.drop("kafkas")
                return
            theirs = kafkas_view(self._kafka, "kafkas", self._now_ms)
            mine = our_view(log, theirs.times)
            self._compare("in the end", theirs, mine)
        self._kafka.close("kafkas")
        if not self._is_over:
            release(ours, now_ms=self._now_ms)
            self._exchange(kafkas, ours, theirs, mine)

    @property
    def _is_over(self) -> bool:
        """Whether the two cannot go on alike."""
        return bool(self.found) or any(rule in self.known for rule in ENDS)

    # --- both load -------------------------------------------------------------------------------

    def _load(self, stage: str, root: Path, drawn: Drawn) -> View | None:
        name = root.name
        try:
            self._kafka.load(
                self._now_ms,
                name,
                root / f"{TOPIC}-0",
                drawn.config,
                is_clean=drawn.is_clean,
                log_start=drawn.log_start,
                recovery_point=drawn.recovery_point,
            )
        except KafkaRefusedError as fault:
            told = self._refusal(self.drawn.root if stage == "loaded" else root)
            self._note(Difference(stage, "load", str(fault), told))
            return None
        return kafkas_view(self._kafka, name, self._now_ms)

    def _refusal(self, root: Path) -> str:
        try:
            with kafkalog.open(root) as log:
                return str(log.offsets(TOPIC)[0])
        except KafkaLogError as fault:
            return f"{type(fault).__name__}: {fault}"

    def _open(self, stage: str, root: Path, theirs: View, drawn: Drawn) -> bool:
        """Read a directory as it is; returns whether nothing differs."""
        try:
            with kafkalog.open(root) as log:
                loaded = _loaded(root, drawn, self._now_ms)
                if loaded.lost:
                    self._losses(stage, root, theirs, loaded, log)
                    return False
                self._compare(stage, theirs, our_view(log, theirs.times, loaded, self._now_ms))
        except KafkaLogError as fault:
            told = f"{type(fault).__name__}: {fault}"
            self._note(Difference(stage, "load", f"[{theirs.start}, {theirs.end})", told))
            return False
        return not self.found

    def _losses(
        self, stage: str, root: Path, theirs: View, loaded: LoadedPartition, log: KafkaLog
    ) -> None:
        """Compare what is left, and the losses with what was there; an adoption has to refuse."""
        self.compared += 1
        kafkas = self._directory / "kafkas" / f"{TOPIC}-0"
        gone = self.drawn.held - held_by(kafkas.glob("*.log"))
        for found in difference_of_losses(stage, theirs, loaded.lost, log, gone):
            self._note(found)
        try:
            adopt(root, config={TOPIC: self.drawn.config}, now_ms=self._now_ms)
        except StorageError as fault:
            if loaded.lost[0].what in str(fault) and "nothing was changed" in str(fault):
                return
        self.found.append(Difference(stage, "adopt", "", "no refusal of a log with losses"))

    def _compare(self, stage: str, theirs: View, ours: View) -> None:
        self.compared += 1
        for difference in differences(stage, theirs, ours):
            self._note(difference)
            if self._is_over:
                return  # the others follow from it

    def _note(self, difference: Difference) -> None:
        name = "ours" if difference.stage == "ours in their hands" else "kafkas"
        difference = replace(difference, directory=self._directory / name / f"{TOPIC}-0")
        rule = rule_of(difference, self.drawn)
        if rule is None:
            self.found.append(difference)
        else:
            self.known[rule] += 1

    # --- both work -------------------------------------------------------------------------------

    def _clean(self, log: KafkaLog) -> None:
        checkpoint = self.drawn.first_dirty
        config = CleanerConfig(merge_batches=self._draw.random() < 0.5)
        for number in range(_ROUNDS_MAX):
            self._now_ms += self._draw.choice(_LATER_MS)
            try:
                kafkas = self._kafka.clean(self._now_ms, "kafkas", checkpoint, LARGE_MAP)
                told = str(kafkas.end)
            except KafkaRefusedError as fault:
                told = str(fault)
            else:
                if kafkas.end is None:
                    return
            stats = manager.clean_filthiest(
                directory_log_of(log), now_ms=self._now_ms, config=config
            )
            end = log.describe(TOPIC).partitions[0].first_dirty_offset
            ours = str(None if stats is None else stats.error or end)
            if told != ours:
                self._note(Difference(f"round {number}", "round", told, ours))
                return
            assert kafkas.end is not None
            checkpoint = self._first_dirty = kafkas.end
            theirs = kafkas_view(self._kafka, "kafkas", self._now_ms)
            self._compare(f"round {number}", theirs, our_view(log, theirs.times))
            if self.found:
                return

    def _retain(self, log: KafkaLog) -> None:
        self._now_ms += self._draw.choice(_LATER_MS)
        kafkas = self._directory / "kafkas" / f"{TOPIC}-0"
        ages = [Age(*age) for age in self._kafka.ages(self._now_ms, "kafkas")]
        log_start, end = log.offsets(TOPIC)[0]
        is_explained = are_explained(ages, kafkas)
        files = Path(self._directory, "ours", f"{TOPIC}-0").glob("*.log")
        sizes = {int(path.stem): path.stat().st_size for path in files}
        told = Retention(ages, self.drawn.config, log_start, end, self._now_ms, is_explained, sizes)
        try:
            start: int | str = self._kafka.retain(self._now_ms, "kafkas")
        except KafkaRefusedError as fault:
            start = str(fault)
        directory_log_of(log).apply_retention(now_ms=self._now_ms)
        ours = log.offsets(TOPIC)[0][0]
        if start != ours:
            self._note(Difference("retention", "start", start, ours, retention=told))

    # --- each loads what the other has left ------------------------------------------------------

    def _exchange(self, kafkas: Path, ours: Path, theirs: View, mine: View) -> None:
        left = Drawn(kafkas, "", self.drawn.config, self._now_ms, theirs.start, is_clean=True)
        left.recovery_point = theirs.end
        left.first_dirty = self._first_dirty
        left.write_root()
        restarted = Path(shutil.copytree(kafkas, self._directory / "restarted"))
        again = self._load("their restart", restarted, left)
        if again is None or not self._open("theirs in our hands", kafkas, again, left):
            return
        returned = self._load("ours in their hands", ours, left)
        if returned is not None:
            if mine.start < mine.end:  # else no epoch is left after another restart
                mine = replace(mine, epochs=again.epochs, producers=again.producers)
            self._compare("ours in their hands", returned, mine)
        self._kafka.drop("restarted")
        self._kafka.drop("ours")


def _loaded(root: Path, drawn: Drawn, now_ms: int) -> LoadedPartition:
    offsets, _ = checkpoints.known_offsets(root)
    key = (TOPIC, 0)
    return load_partition(
        root / f"{TOPIC}-0",
        TOPIC,
        0,
        log_start=drawn.log_start,
        recovery_point=drawn.recovery_point,
        is_clean=drawn.is_clean,
        now_ms=now_ms,
        checkpointed=Checkpointed.of(offsets, key, {}, root=root, is_clean=drawn.is_clean),
    )


@cache
def kafka_of(scratch: str) -> KafkaCleaner:
    """Start the Java process of this process; it ends when its input does."""
    logging.disable()
    return KafkaCleaner(Path(scratch) / f"kafka-{os.getpid()}").__enter__()


def judged(cases: tuple[int, ...], seed: int, directory: str) -> Judged:
    """Return what comes of some logs."""
    result = Judged()
    kafka = kafka_of(directory)
    for case in cases:
        place = Path(directory) / f"{os.getpid()}-{case}"
        place.mkdir()
        told = ""
        try:
            pair = Pair(seed, case, kafka, place)
            told = str(pair)
            pair.run()
        except Exception as fault:  # whatever it is, it is a fault of one of both
            result.faults.append((case, f"{told}: {type(fault).__name__}: {fault}"))
            for name in ("drawn", "kafkas", "restarted", "ours"):
                kafka.drop(name)
        else:
            result.counts["comparisons"] += pair.compared
            result.counts["alike"] += not pair.found and not pair.known
            result.counts["explained by a limit"] += not pair.found and bool(pair.known)
            result.counts.update(pair.known.keys())
            result.faults += [(case, f"{pair}: {difference}") for difference in pair.found]
        result.count += 1
        shutil.rmtree(place, ignore_errors=True)
    return result


def main(arguments: list[str] | None = None) -> None:
    """Draw, compare and report."""
    options = options_of("twin", __doc__, arguments, logs=_LOGS)
    tally = Tally("twin", "logs in Kafka's hands and in ours", options, target=_LOGS)
    reason = twin_kafka.fault()
    if reason:
        tally.skipped = reason
        tally.report()
        raise SystemExit(1 if os.environ.get("CI") else 0)
    with scratch("twin") as directory:
        place = str(directory)
        counts = judge(judged, place, options, tally, quick=_QUICK, size=_PORTION)
        if kafka_of.cache_info().currsize:
            kafka_of(place).__exit__(None, None, None)
            kafka_of.cache_clear()
    for name in ("comparisons", "alike", "explained by a limit"):
        tally.more[name.replace(" ", "_")] = counts.pop(name, 0)
    print(f"twin: {tally.more['alike']:,} logs without a difference", file=sys.stderr)
    for rule, count in counts.most_common():
        print(f"twin: {count:,} logs: {rule}", file=sys.stderr)
    tally.report()


if __name__ == "__main__":
    main()
