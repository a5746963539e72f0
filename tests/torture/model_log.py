"""What a log has to hold, said with lists and dictionaries: the model's side of the model test.

Nothing of the library is known here, and no file is looked at: the machine tells the model what was
acknowledged, and asks it about what it has read. Of a compacted log the model does not say what is
there, since cleaners may take more or less at a time, but what must be, and what must not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

__all__ = ["FOREVER", "Part", "Row", "Topic"]

FOREVER = 1 << 62


class Row(NamedTuple):
    """A record as a reader sees it."""

    offset: int
    timestamp: int
    key: bytes | None
    value: bytes | None


@dataclass
class Part:
    """One partition: all that was ever appended to it, and what has come over it since."""

    written: dict[int, Row] = field(default_factory=dict)
    """By offset, ascending."""
    end: int = 0
    """The high watermark."""
    log_start: int = 0
    open: dict[int, int] = field(default_factory=dict)
    """Producer -> where its open transaction begins."""
    pending: dict[int, list[int]] = field(default_factory=dict)
    """Producer -> the offsets of its open transaction."""
    aborted: set[int] = field(default_factory=set)
    sequences: dict[int, int] = field(default_factory=dict)
    may_go: dict[int, int] = field(default_factory=dict)
    """Offset of a tombstone -> when it may be gone at the earliest."""
    horizon: dict[int, int] = field(default_factory=dict)
    """Offset of a tombstone -> the latest horizon that a cleaning so far may have given it."""
    must_go: dict[int, int] = field(default_factory=dict)
    """Offset of a tombstone -> from when on a cleaning has to take it away."""
    cleanable: int = 0
    """No cleaning so far may have gone beyond this offset."""
    last_cleaning_ms: int = -1

    @property
    def stable(self) -> int:
        """The last stable offset."""
        return max(self.log_start, min(self.open.values(), default=self.end))

    def is_older(self, now_ms: int, age_ms: int) -> bool:
        """Tell whether all that is there has an age, and is older than that (ms; -1 for never).

        Not of a log with transactions, whose markers have times of their own.
        """
        found = [row.timestamp for row in self.written.values() if row.offset >= self.log_start]
        return age_ms >= 0 and not self.sequences and max(found, default=now_ms) < now_ms - age_ms

    # --- what happens ---

    def append(self, rows: Sequence[Row], producer: int | None = None) -> None:
        """Take acknowledged records, with the offsets from the end on."""
        for row in rows:
            assert row.offset == self.end, "the model counts wrong"
            self.written[row.offset] = row
            self.end += 1
            if producer is not None:
                self.open.setdefault(producer, row.offset)
                self.pending.setdefault(producer, []).append(row.offset)

    def mark(self, producer: int, *, commits: bool) -> None:
        """End a transaction; its marker takes an offset."""
        del self.open[producer]
        offsets = self.pending.pop(producer)
        if not commits:
            self.aborted.update(offsets)
        self.end += 1

    def clean(self, now_ms: int, retention_ms: int) -> None:
        """Note that a cleaning begins, whatever comes of it."""
        self.cleanable = max(self.cleanable, self.stable)
        self.last_cleaning_ms = max(self.last_cleaning_ms, now_ms)
        for row in self.written.values():
            if row.value is None:
                before = self.may_go.get(row.offset, FOREVER)
                self.may_go[row.offset] = min(before, now_ms + retention_ms)
                latest = self.horizon.get(row.offset, 0)
                self.horizon[row.offset] = max(latest, now_ms + retention_ms)

    def cleaned(self, clean_to: int) -> None:
        """Note that all below an offset is clean: what has a horizon now keeps it (KIP-534)."""
        for row in self.written.values():
            if row.value is None and row.offset < clean_to:
                self.must_go.setdefault(row.offset, self.horizon[row.offset])

    # --- what must hold ---

    def latest_records(self, end: int | None = None) -> dict[bytes, Row]:
        """Return the latest committed record of every key, deletions too."""
        end = self.stable if end is None else min(end, self.stable)
        found: dict[bytes, Row] = {}
        for row in self.written.values():
            is_seen = self.log_start <= row.offset < end and row.offset not in self.aborted
            if is_seen and row.key is not None:
                found[row.key] = row
        return found

    def latest(self) -> dict[bytes, Row]:
        """Return what `view=latest` has to show."""
        return {key: row for key, row in self.latest_records().items() if row.value is not None}

    def check_offsets(self, found: tuple[int, int, int]) -> None:
        """Hold log start, last stable offset and high watermark against those of a log."""
        expected = (self.log_start, self.stable, self.end)
        assert found == expected, f"(start, stable, end): expected {expected}, found {found}"

    def check_rows(self, rows: Sequence[Row], clean_to: int, touched_to: int) -> None:
        """Check what a reader of uncommitted records finds in the whole partition.

        All below `clean_to` is said to be clean, nothing from `touched_to` on to be touched.
        """
        offsets = [row.offset for row in rows]
        assert offsets == sorted(set(offsets)), f"offsets do not rise: {offsets}"
        for row in rows:
            assert row.offset >= self.log_start, f"{row} lies below the log start {self.log_start}"
            was = self.written.get(row.offset)
            assert row == was, f"written was {was}, found {row}"
        assert clean_to <= max(self.cleanable, self.log_start), (
            f"cleaned to {clean_to}, allowed was {self.cleanable}"
        )
        self._check_all_there(set(offsets), touched_to)
        self._check_clean(rows, clean_to)

    def _check_all_there(self, offsets: set[int], touched_to: int) -> None:
        for row in self.written.values():
            is_wanted = row.offset >= max(self.log_start, touched_to)
            if is_wanted and row.offset not in self.aborted:
                assert row.offset in offsets, f"{row} is gone, and nothing is cleaned there"
        for row in self.latest_records().values():
            if row.offset in offsets:
                continue
            assert row.value is not None or row.offset in self.may_go, f"{row} is gone, uncleaned"
            assert row.value is None, f"{row} is gone, the latest of its key"
            may_go = self.may_go[row.offset]
            assert self.last_cleaning_ms >= may_go, (
                f"the tombstone {row} may go from {may_go} on, cleaned was {self.last_cleaning_ms}"
            )

    def _check_clean(self, rows: Sequence[Row], clean_to: int) -> None:
        latest_records = self.latest_records(clean_to)
        for row in rows:
            if row.offset >= clean_to:
                break
            assert row.offset not in self.aborted, f"{row} was aborted, and all is clean there"
            assert row.key is not None, f"{row} has no key, and all is clean there"
            assert latest_records[row.key] == row, (
                f"{row} is not the latest of its key: {latest_records[row.key]}"
            )

    def check_gone(self, rows: Sequence[Row], clean_to: int, now_ms: int) -> None:
        """Check after a cleaning that no tombstone is left whose time had come before it."""
        for row in rows:
            due_ms = self.must_go.get(row.offset, FOREVER)
            assert row.offset >= clean_to or due_ms > now_ms, f"{row} had to go at {due_ms}"

    def check_read(
        self, found: Sequence[Row], all_rows: Sequence[Row], start: int, end: int
    ) -> None:
        """Hold a read of committed records in a range against those of all that is there."""
        expected = [
            row
            for row in all_rows
            if start <= row.offset < min(end, self.stable) and row.offset not in self.aborted
        ]
        assert list(found) == expected, f"[{start}, {end}): expected {expected}, found {found}"


@dataclass
class Topic:
    """A topic, since it was created the last time."""

    config: dict[str, str]
    parts: list[Part]
    writers: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Writer -> its last batch id, and when that was."""

    @property
    def is_compacted(self) -> bool:
        """Whether cleaners come."""
        return "compact" in self.config["cleanup.policy"]

    @property
    def is_deleted(self) -> bool:
        """Whether retention comes."""
        return "delete" in self.config["cleanup.policy"]

    def number(self, name: str) -> int:
        """Return a config that is a number."""
        return int(self.config[name])
