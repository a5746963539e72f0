"""A log beside its model, and what the steps of the model test are made of.

Three engines have the same log: two of this process and one of another. Whoever acts, another one
looks. A step of this process may be its death: at a drawn durable act everything stops there, and a
new engine goes on with what is on the disk. Then the step is either done or not, never half.
"""

from __future__ import annotations

import shutil
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
from hypothesis.stateful import RuleBasedStateMachine

from kafkalog.cleaner import CleanerConfig
from kafkalog.inspection.verify import verify
from tests.builders.batch_builder import BuiltBatch
from tests.torture.model_draws import MATRIX, Death, Rows
from tests.torture.model_hands import Hands, OtherProcess, Wanted
from tests.torture.model_log import Row, Topic
from tests.torture.scratch import memory_disk
from tests.unit.storage_engine.faults import Died, each_act

__all__ = ["LogAndModel", "key_of"]


class LogAndModel(RuleBasedStateMachine):
    """A log, its model, and the steps between their states."""

    counts: ClassVar[Counter[str]] = Counter()
    """Of what was tried."""
    cells: ClassVar[set[tuple[str | int, ...]]] = set()
    """Of the matrix of codecs, segment sizes, kinds of timestamps and budgets: what was cleaned."""
    other: ClassVar[OtherProcess | None] = None
    """Started by the first example, and used by all; see `end`."""

    def __init__(self) -> None:
        super().__init__()
        self.counts["examples"] += 1
        self.root = Path(tempfile.mkdtemp(prefix="kafkalog-model-", dir=memory_disk()))
        self.hands: list[Any] = [Hands(self.root), Hands(self.root)]
        if type(self).other is None:
            type(self).other = OtherProcess()
        assert type(self).other is not None
        self.hands.append(type(self).other)
        self.hands[2].call("open", self.root)
        self.topics: dict[str, Topic] = {}
        self.values = 0
        self.looks = 0
        self.now_ms = 0
        self._patch = pytest.MonkeyPatch()

    @classmethod
    def end(cls) -> None:
        """End the other process."""
        if cls.other is not None:
            cls.other.close()
            cls.other = None

    def check_invariants(self, *arguments: Any, **options: Any) -> None:
        """Count the steps: this is called before the first one, and after each."""
        self.counts["steps"] += 1
        super().check_invariants(*arguments, **options)

    def teardown(self) -> None:
        """Look for damage, and remove everything."""
        self._patch.undo()
        try:
            self.hands[0].log.close()
            damage = [str(found) for found in verify(self.root, deep=True) if found.is_damage]
            assert not damage, damage
        finally:
            shutil.rmtree(self.root, ignore_errors=True)

    def _topic(self, place: int) -> tuple[str, Topic]:
        names = sorted(self.topics)
        name = names[place % len(names)]
        return name, self.topics[name]

    def _looking(self) -> Any:
        """Return the next engine that looks at what another one has done."""
        self.looks += 1
        return self.hands[self.looks % 3]

    def _do(self, by: int, death: Death, work: Callable[[Any], Any]) -> Any:
        """Let an engine do some work; returns what came of it, None where it died."""
        hands, found = self.hands[by], []
        if death is None or by == 2:
            return work(hands)
        n, after = death
        if each_act(lambda: found.append(work(hands)), n, Died(), after=after):
            hands.reopen(closes=False)
            self.counts["deaths"] += 1
            return None
        return found[0]

    def _value(self, size: int) -> bytes:
        self.values += 1
        return b"%d" % self.values * size

    def _wanted(self, topic: Topic, rows: Rows) -> list[Wanted]:
        return [
            (
                number % len(topic.parts),
                b"k%d" % key,
                None if size < 0 else self._value(size),
                self.now_ms - age,
            )
            for number, key, size, age in rows
        ]

    def _settle(self, name: str, wanted: list[Wanted], *, is_done: bool) -> bool:
        """Find out whether rows are there, all or none, and tell the model; then look."""
        topic = self.topics[name]
        counts = [sum(row[0] == number for row in wanted) for number in range(len(topic.parts))]
        ends = [state.high_watermark for state in self._looking().states(name)]
        before = [part.end for part in topic.parts]
        after = [end + count for end, count in zip(before, counts, strict=True)]
        assert ends == after or (ends == before and not is_done), f"{before}, {after}: {ends}"
        is_there = ends == after
        if is_there:
            is_now = topic.config["message.timestamp.type"] == "LogAppendTime"
            for number, key, value, time in wanted:
                part = topic.parts[number]
                part.append([Row(part.end, self.now_ms if is_now else time, key, value)])
        self._look(name)
        return is_there

    def _append_raw(self, by: int, death: Death, name: str, number: int, batch: BuiltBatch) -> bool:
        """Append a batch; returns whether it is there."""
        data, end = batch.data, self.topics[name].parts[number].end
        self._do(by, death, lambda hands: hands.append_raw(name, number, data, self.now_ms))
        found = self._looking().states(name)[number].high_watermark
        assert found == batch.last_offset + 1 or (found == end and death is not None), found
        return bool(found == batch.last_offset + 1)

    def _cleaning_begins(self) -> None:
        for topic in self.topics.values():
            for part in topic.parts if topic.is_compacted else ():
                part.clean(self.now_ms, topic.number("delete.retention.ms"))

    def _cleaned(self, done: list[Any], config: CleanerConfig) -> None:
        for stats in done:
            assert stats.error is None, stats.error
            self._check_gone(stats.topic, stats.partition)
            topic = self.topics[stats.topic]
            self.counts["partitions_cleaned"] += 1
            self.cells.add((*map(topic.config.__getitem__, MATRIX), config.dedupe_buffer_size))
            clean_to = self._looking().states(stats.topic)[stats.partition].first_dirty_offset
            topic.parts[stats.partition].cleaned(clean_to)

    def _check_gone(self, name: str, number: int) -> None:
        hands = self._looking()
        clean_to = hands.states(name)[number].first_dirty_offset
        self.topics[name].parts[number].check_gone(hands.rows(name, number), clean_to, self.now_ms)

    def _look(self, name: str) -> None:
        """Let another engine see whether all is as it should be."""
        hands = self._looking()
        states = hands.states(name)
        for number, (part, state) in enumerate(zip(self.topics[name].parts, states, strict=True)):
            start, stable = state.log_start_offset, state.last_stable_offset
            part.check_offsets((start, stable, state.high_watermark))
            rows = hands.rows(name, number)
            part.check_rows(rows, state.first_dirty_offset, state.cleaned_to)
            committed = hands.rows(name, number, committed=True)
            part.check_read(committed, rows, start, state.high_watermark)


def key_of(number: int | None) -> bytes | None:
    return None if number is None else b"k%d" % number
