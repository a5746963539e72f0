"""The steps of the model test: what may be done to a log, in any order."""

from __future__ import annotations

from typing import Any, Final

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule

from kafkalog.cleaner import CleanerConfig
from kafkalog.cleaner.rewrite import unchanged_segments
from kafkalog.errors import CommitConflictError
from kafkalog.storage_engine.metadata.writer import Writer
from kafkalog.storage_engine.place import directory_log_of
from tests.builders.batch_builder import ABORT, COMMIT, BatchBuilder, Record, marker
from tests.torture.model_copies import copied_log, copy_back
from tests.torture.model_draws import (
    ACTIONS,
    BUDGET,
    BY,
    CHANGE,
    CLEANERS,
    CONFIG,
    DEATH,
    EVERY_KEY,
    KEYS,
    PLACE,
    ROWS,
    SHARE,
    Action,
    Death,
    Rows,
)
from tests.torture.model_hands import Wanted
from tests.torture.model_log import Part, Row, Topic
from tests.torture.model_state import LogAndModel, key_of

__all__ = ["LogMachine"]

TOPICS_MAX: Final = 2
QUIET_MAX: Final = 8
"""Cleanings at one moment, after which nothing is left to do: a round to find what is obsolete,
and one each for what waits for the one before it."""


class LogMachine(LogAndModel):
    """Whatever users, cleaners, time and deaths do."""

    # --- topics ----------------------------------------------------------------------------------

    @initialize(
        now_ms=st.sampled_from([10**12, 4 * 10**12]),  # files are younger, or old: swept or not
        worthwhile=st.sampled_from([0, 2]),
        partitions=st.integers(1, 3),
        config=CONFIG,
    )
    def begin(self, now_ms: int, worthwhile: int, partitions: int, config: dict[str, str]) -> None:
        self.now_ms = now_ms
        self._patch.setattr(unchanged_segments, "WORTHWHILE", worthwhile)
        self._create(0, partitions, config, None)

    @rule(by=BY, place=PLACE, partitions=st.integers(1, 3), config=CONFIG, death=DEATH)
    def come_or_go(
        self, by: int, place: int, partitions: int, config: dict[str, str], death: Death
    ) -> None:
        """A topic is created where there is room for one, else one is deleted."""
        if len(self.topics) == TOPICS_MAX:
            self._delete(by, place, death)
        else:
            self._create(by, partitions, config, death)

    def _create(self, by: int, partitions: int, config: dict[str, str], death: Death) -> None:
        topic = "u" if "t" in self.topics else "t"
        self._do(by, death, lambda hands: hands.create(topic, partitions, config, self.now_ms))
        found = self._looking().config(topic)
        assert found == config or (found is None and death is not None), found
        if found is not None:
            self.topics[topic] = Topic(config, [Part() for _ in range(partitions)])
            self._look(topic)

    def _delete(self, by: int, place: int, death: Death) -> None:
        name, _ = self._topic(place)
        self._do(by, death, lambda hands: hands.delete(name, self.now_ms))
        found = self._looking().config(name)
        assert found is None or death is not None, found
        if found is None:
            del self.topics[name]

    @precondition(lambda self: self.topics)
    @rule(by=BY, place=PLACE, change=CHANGE, death=DEATH)
    def alter(self, by: int, place: int, change: tuple[str, str], death: Death) -> None:
        name, topic = self._topic(place)
        then = topic.config | dict([change])
        self._do(by, death, lambda hands: hands.alter(name, dict([change]), self.now_ms))
        found = self._looking().config(name)
        assert found == then or (found == topic.config and death is not None), found
        topic.config = found

    # --- writing ---------------------------------------------------------------------------------

    @precondition(lambda self: self.topics)
    @rule(
        by=BY,
        place=PLACE,
        commits=st.lists(ROWS, min_size=1, max_size=4),
        size=st.sampled_from([50, 65_536]),
        death=DEATH,
    )
    def append(self, by: int, place: int, commits: list[Rows], size: int, death: Death) -> None:
        """Some commits, the last of which may be a death."""
        name, topic = self._topic(place)
        for rows in commits[:-1]:
            self._append(by, name, self._wanted(topic, rows), size, None)
        self._append(by, name, self._wanted(topic, commits[-1]), size, death)

    def _append(self, by: int, name: str, wanted: list[Wanted], size: int, death: Death) -> None:
        done = self._do(
            by, death, lambda hands: hands.append(name, wanted, None, size, self.now_ms)
        )
        self._settle(name, wanted, is_done=done is not None)

    @precondition(lambda self: self.topics)
    @rule(by=BY, again=BY, place=PLACE, rows=ROWS, writer=st.integers(0, 1), death=DEATH)
    def append_once(
        self,
        by: int,
        again: int,
        place: int,
        rows: Rows,
        writer: int,
        death: Death,
    ) -> None:
        """A writer's batch comes, and again at once, maybe after a death; and then an older one."""
        name, topic = self._topic(place)
        wanted = self._wanted(topic, rows)
        batch_id = topic.writers.get(f"w{writer}", (-1, 0))[0] + 1
        batch = Writer(f"w{writer}", name, batch_id)

        def work(hands: Any) -> Any:
            return hands.append(name, wanted, batch, 65_536, self.now_ms)

        done = self._do(by, death, work)
        assert done is None or not done.skipped, "a new batch was skipped"
        is_there = self._settle(name, wanted, is_done=done is not None)
        skipped = self._do(again, None, work).skipped
        assert skipped == is_there, f"the batch is there: {is_there}, it was skipped: {skipped}"
        self._settle(name, [] if is_there else wanted, is_done=True)
        topic.writers[f"w{writer}"] = batch_id, self.now_ms
        if batch_id > 0:
            older = Writer(f"w{writer}", name, batch_id - 1)
            with pytest.raises((CommitConflictError, AssertionError), match="older than the log"):
                self.hands[again].append(name, wanted, older, 65_536, self.now_ms)

    @precondition(lambda self: self.topics)
    @rule(by=BY, place=PLACE, number=st.integers(0, 2), actions=ACTIONS, death=DEATH)
    def transact(
        self, by: int, place: int, number: int, actions: list[Action], death: Death
    ) -> None:
        """Batches and markers of two producers; the last of them may be a death."""
        name, topic = self._topic(place)
        number %= len(topic.parts)
        part = topic.parts[number]
        for place, (producer, action) in enumerate(actions):
            then = death if place + 1 == len(actions) else None
            if not isinstance(action, bool):
                self._go_on(by, name, number, producer, action, then)
            elif producer in part.open:
                kind = COMMIT if action else ABORT
                batch = marker(part.end, kind, producer, timestamp=self.now_ms)
                if self._append_raw(by, then, name, number, batch):
                    part.mark(producer, commits=action)
        self._look(name)

    def _go_on(
        self,
        by: int,
        name: str,
        number: int,
        producer: int,
        keys: list[int | None],
        death: Death,
    ) -> None:
        """A batch of a transaction, which begins with it or goes on."""
        part = self.topics[name].parts[number]
        rows = [
            Row(part.end + i, self.now_ms, key_of(key), self._value(3))
            for i, key in enumerate(keys)
        ]
        sequence = part.sequences.get(producer, 0)
        batch = BatchBuilder(
            base_offset=part.end,
            transactional=True,
            producer=(producer, 0, sequence),
            leader_epoch=0,
            records=[Record(row.offset, row.timestamp, row.key, row.value) for row in rows],
        )
        if self._append_raw(by, death, name, number, batch.build()):
            part.append(rows, producer)
            part.sequences[producer] = sequence + len(rows)

    # --- reading ---------------------------------------------------------------------------------

    @precondition(lambda self: self.topics)
    @rule(
        by=BY,
        place=PLACE,
        start=SHARE,
        end=SHARE,
        key=KEYS,
        budget=BUDGET,
    )
    def read(self, by: int, place: int, start: int, end: int, key: int, budget: int) -> None:
        """A range, a table, and a key."""
        name, topic = self._topic(place)
        hands = self.hands[by]
        for number, part in enumerate(topic.parts):
            span = part.end - part.log_start
            first, last = sorted(part.log_start + span * share // 8 for share in (start, end))
            everything = hands.rows(name, number)
            part.check_read(
                hands.rows(name, number, first, last, committed=True), everything, first, last
            )
            found = hands.rows(name, number, first, last)
            assert found == [row for row in everything if first <= row.offset < last], found
            expected = part.latest()
            rows = hands.latest(name, number, budget)
            assert len(rows) == len(expected), f"latest: expected {expected}, found {rows}"
            table = {row.key: row for row in rows}
            assert table == expected, f"latest: expected {expected}, found {rows}"
            one = hands.lookup(name, key_of(key), number)
            assert one == expected.get(b"k%d" % key), f"lookup: expected {expected}, found {one}"
            many = hands.lookups(name, EVERY_KEY, number)
            assert many == expected, f"lookups: expected {expected}, found {many}"

    @precondition(lambda self: self.topics)
    @rule(
        commit_bytes=st.sampled_from([1, 400, 1 << 20]),
        later=st.sampled_from([0, 1, 8]),
        cleanings=st.lists(st.tuples(CLEANERS, st.booleans()), max_size=2),
        start=SHARE,
        end=SHARE,
        budget=BUDGET,
    )
    def copy(
        self,
        commit_bytes: int,
        later: int,
        cleanings: list[tuple[CleanerConfig, bool]],
        start: int,
        end: int,
        budget: int,
    ) -> None:
        """The log is copied into a store, which is cleaned, and that one into a directory."""
        log = directory_log_of(self.hands[0].log)
        with copied_log(log, commit_bytes, later, self.now_ms) as store:
            store.check(self.topics, start, end, budget)
            for config, force in cleanings:
                store.clean(config, self.now_ms, force=force)
                store.check(self.topics, start, end, budget)
            with copy_back(store, self.now_ms) as back:
                for name, topic in self.topics.items():
                    for number in range(len(topic.parts)):
                        for level in (False, True):
                            found = back.rows(name, number, committed=level)
                            assert found == store.rows(name, number, committed=level)
                        assert back.producers(name, number) == store.producers(name, number)
        self.counts["copies"] += 1

    # --- cleaning and deleting -------------------------------------------------------------------

    @rule(by=BY, config=CLEANERS, force=st.booleans(), death=DEATH)
    def clean(self, by: int, config: CleanerConfig, force: bool, death: Death) -> None:
        self._cleaning_begins()
        done = self._do(by, death, lambda hands: hands.clean(config, self.now_ms, force=force))
        self._cleaned(done or [], config)
        for name, topic in self.topics.items():
            self._look(name)
            if done is not None and force and topic.is_compacted:
                states = self._looking().states(name)
                for part, state in zip(topic.parts, states, strict=True):
                    assert part.stable < part.end or state.first_dirty_offset == part.end, state

    @rule(by=BY, config=CLEANERS)
    def clean_until_quiet(self, by: int, config: CleanerConfig) -> None:
        """At one moment there is an end of it."""
        self._cleaning_begins()
        for _ in range(QUIET_MAX):
            done = self.hands[by].clean(config, self.now_ms, force=False)
            self._cleaned(done, config)
            if not done:
                break
        assert not done, f"cleaned {QUIET_MAX} times, and again: {done}"
        for name, topic in self.topics.items():
            self._look(name)
            for number in range(len(topic.parts) if topic.is_compacted else 0):
                self._check_gone(name, number)

    @precondition(lambda self: self.topics)
    @rule(by=BY, again=BY, place=PLACE, rows=ROWS, config=CLEANERS)
    def clean_until_gone(
        self,
        by: int,
        again: int,
        place: int,
        rows: Rows,
        config: CleanerConfig,
    ) -> None:
        """What is deleted stays for its time, however often it is cleaned, and then goes."""
        retention_ms = self._topic(place)[1].number("delete.retention.ms")
        self.clean(by, config, True, None)
        if retention_ms > 0:
            self.wait(retention_ms - 1)
            self.append(again, place, [rows], 65_536, None)
            self.clean(again, config, True, None)
            self.wait(1)
        self.clean_until_quiet(by, config)

    @rule(by=BY, config=CLEANERS, death=DEATH)
    def clean_filthiest(self, by: int, config: CleanerConfig, death: Death) -> None:
        self._cleaning_begins()
        done = self._do(by, death, lambda hands: hands.clean_filthiest(config, self.now_ms))
        assert done is None or done.error is None, done
        for name in self.topics:
            self._look(name)

    @rule(by=BY, death=DEATH)
    def retain(self, by: int, death: Death) -> None:
        looking = self._looking()
        before = {
            (name, number): looking.rows(name, number)
            for name, topic in self.topics.items()
            for number in range(len(topic.parts))
        }
        done = self._do(by, death, lambda hands: hands.retain(self.now_ms))
        assert not any(done or []), done
        for name, topic in self.topics.items():
            states = looking.states(name)
            for number, (part, state) in enumerate(zip(topic.parts, states, strict=True)):
                start, age_ms = state.log_start_offset, topic.number("retention.ms")
                assert part.log_start <= start <= part.end, state
                gone = [row for row in before[name, number] if row.offset < start]
                if start > part.log_start:
                    assert topic.is_deleted and age_ms >= 0, state
                    assert all(row.timestamp < self.now_ms - age_ms for row in gone), gone
                part.log_start = start
                if done is not None and topic.is_deleted and part.is_older(self.now_ms, age_ms):
                    assert start == part.end, f"expired, and still there: {state}"
            self._look(name)

    @precondition(lambda self: any(topic.is_deleted for topic in self.topics.values()))
    @rule(by=BY, place=PLACE, number=st.integers(0, 2), share=SHARE, death=DEATH)
    def delete_records(self, by: int, place: int, number: int, share: int, death: Death) -> None:
        names = [name for name, topic in sorted(self.topics.items()) if topic.is_deleted]
        name = names[place % len(names)]
        number %= len(self.topics[name].parts)
        part = self.topics[name].parts[number]
        before = part.end * share // 8
        then = max(part.log_start, before)
        done = self._do(
            by, death, lambda hands: hands.delete_records(name, number, before, self.now_ms)
        )
        assert done in (None, then), done
        found = self._looking().states(name)[number].log_start_offset
        assert found == then or (found == part.log_start and done is None), found
        part.log_start = found
        self._look(name)

    # --- time, and ends --------------------------------------------------------------------------

    @rule(ms=st.sampled_from([1, 1000, 86_400_000]))
    def wait(self, ms: int) -> None:
        self.now_ms += ms

    @rule(by=st.integers(0, 1), closes=st.booleans())
    def reopen(self, by: int, closes: bool) -> None:
        self.hands[by].reopen(closes=closes)
        for name in self.topics:
            self._look(name)
