"""Files beside the logs, damaged: what they are there for is done, and judged.

None of them holds a record that is in the log, so every log reads whole whatever is in them. What
else is harmless depends on whose word a file is:

- `.keys`, `kl-spilling`, `kl-last-cleaning`: an index, a count and a report, without which all goes
  on. Keys are found, a cleaning keeps the latest records; a number told to people may be another.
- `kl-pin-*`, `kl-ended-pins`: it is the moment that was pinned, or refused.
- `.staged`, and the indexes beside it: a commit takes the rows that were staged, or nothing.
- `kl-meta.properties`, `kl-cleanshutdown`: a broker's own, who judges them himself. He gets back
  what is in them, byte for byte. `kl-adopted-topics`: a release says more or less to people.
- `kl-partition.metadata`: the topic's id, or nothing is written to the partition.
- `kl-commit.released`: what an adoption remembers is as it was, or is said to be lost.
- `__cluster_metadata-0`: configs are a person's choice that the controller has logged. Those of an
  earlier moment count where its log ends at the damage, as with Kafka, and no others.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import ClassVar, Final
from unittest import mock

import pyarrow as pa

import kafkalog
from kafkalog.cleaner.config import CleanerConfig
from kafkalog.errors import KafkaLogError
from kafkalog.log import KafkaLog
from kafkalog.storage_engine.directory import pin_file, pins, staged_directory
from kafkalog.storage_engine.directory.directory_log import DirectoryLog
from kafkalog.storage_engine.format import layout
from kafkalog.storage_engine.metadata import checkpoints
from kafkalog.storage_engine.metadata.remote_log_starts import (
    RemoteLogStart,
    write_remote_log_starts,
)
from kafkalog.storage_engine.metadata.writer import Writer
from kafkalog.storage_engine.ownership.adopt import adopt
from kafkalog.storage_engine.ownership.release import release
from kafkalog.storage_engine.place import directory_log_of
from kafkalog.storage_engine.writing.staged_message import StagedMessage
from kafkalog.storage_engine.writing.staging import StagedWriter
from tests.unit.storage_engine import test_metadata_log as controller
from tests.unit.storage_engine.damage import (
    Damage,
    Judge,
    check_keys,
    check_lookups,
    check_read,
    kind_of,
    read,
    rows_of,
)
from tests.unit.storage_engine.sample_root import (
    NOW_MS,
    Log,
    Root,
    Row,
    Segment,
    log_name,
    some,
    stored,
)
from tests.unit.storage_engine.times import offset_since

_DAY_MS: Final = 86_400_000
_MEMORY: Final = 100
"""Bytes, of a cleaner: too few for the keys of the sample."""
_CLEAN_SHUTDOWN: Final = b'{"version":0,"brokerEpoch":77}'


@dataclass
class BesideJudge(Judge):
    """Does what the damaged file is there for, in place or on a copy."""

    kinds: ClassVar[tuple[str, ...]]

    @classmethod
    def of(cls, directory: Path) -> BesideJudge:
        """Make a root with such files, and its judge."""
        # A journal of 8 KiB, so that a copy of the root costs little.
        with mock.patch.object(layout, "JOURNAL_SIZE", 8 << 10):
            return cls(cls.root_in(directory / "root"), directory / "copy")

    @classmethod
    def root_in(cls, path: Path) -> Root:
        raise NotImplementedError

    def files(self) -> list[Path]:
        return [name for name in self.root.files() if kind_of(name) in self.kinds]

    def _write(self, name: Path, position: int) -> None:
        """Nothing more: reading is no use of these files."""

    def _check_whole(self, path: Path) -> KafkaLog:
        """Every record is read and found, which none of these files may prevent."""
        log = kafkalog.open(path, read_only=True, create=False)
        for one in self.root.logs.values():
            sound = Damage(0)
            for committed in (True, False):
                assert check_read(directory_log_of(log), one, sound, committed=committed) == "whole"
            assert check_lookups(directory_log_of(log), one, sound) == "whole"
        return log


def _small() -> Log:
    """Three segments of few records: what lies beside them is what is damaged."""
    segments = [Segment(log_name(n), n, [stored(some(n, 4, tombstone=n == 4))]) for n in (0, 4, 8)]
    return Log("small", 0, segments, config={"cleanup.policy": "compact"})


# --- a cleaned log -------------------------------------------------------------------------------


@dataclass
class CleanedJudge(BesideJudge):
    """A log after a cleaning, with a pin, and one that has ended.

    It is read by the pins, looked up, and cleaned once more.
    """

    kinds = (layout.KEYS, layout.PIN, layout.ENDED_PINS, layout.LAST_CLEANING, layout.SPILLING)
    pins: dict[str, pin_file.Pin | None] = field(init=False)
    count: int = field(init=False)

    @classmethod
    def root_in(cls, path: Path) -> Root:
        root = Root(path, logs=[_small()])
        _pinned(path, layout.ENDED_PINS, is_kept=True)
        assert pins.sweep_pins(path, NOW_MS + pins.LEASE_MS) == 1
        (done,) = kafkalog.open(path, create=False).clean("small", force=True, now_ms=NOW_MS)
        assert done.error is None
        _pinned(path, layout.PIN)
        (path / "small-0" / layout.SPILLING).write_bytes(b'{"version": 1, "deaths": 1}\n')
        return root

    def __post_init__(self) -> None:
        self.pins = {kind: _pinned(self.root.path, kind) for kind in _PINNED}
        self.count = len(read(DirectoryLog(self.root.path), self._log, committed=False))

    @property
    def _log(self) -> Log:
        return self.root.logs["small-0"]

    def _read(self, name: Path, position: int) -> str:
        log = kafkalog.open(self.root.path, read_only=True, create=False)
        assert not set(check_keys(directory_log_of(log), self._log, Damage(0)))
        if kind_of(name) == layout.KEYS:
            return "whole"
        assert log.explain("small", now_ms=NOW_MS)
        assert len(read(directory_log_of(log), self._log, committed=False)) == self.count
        if kind_of(name) not in _PINNED:
            return "whole"
        path, pinned = self.root.path / name, self.pins[kind_of(name)]
        is_missing = not path.exists() or path.stat().st_size == 0
        try:
            found = _pinned(self.root.path, kind_of(name))
        except KafkaLogError:
            return "refused"
        assert found is not None and pinned is not None
        assert is_missing or found == pinned, f"{found} instead of {pinned}"
        return "whole"

    def _write(self, name: Path, position: int) -> None:
        """A cleaning whose memory has no room for the keys, with a record more to clean."""
        log = kafkalog.open(self.root.copy(self.scratch), create=False)
        log._config = CleanerConfig(dedupe_buffer_size=_MEMORY)
        log.append("small", pa.table({"key": [b"k1"], "value": [b"newer"]}), now_ms=NOW_MS)
        newer = stored([Row(self._log.end, NOW_MS, b"k1", b"newer")])
        longer = replace(
            self._log, segments=[*self._log.segments, Segment("", newer.base, [newer])]
        )
        before = _latest(log)
        log.clean("small", force=True, now_ms=NOW_MS + _DAY_MS)
        assert _latest(log) == before
        assert not set(check_keys(directory_log_of(log), longer, Damage(0)))


def _latest(log: KafkaLog) -> list[Row]:
    return sorted(rows_of(log.latest("small", include_headers=True)))


_PINNED: Final = (layout.PIN, layout.ENDED_PINS)


def _pinned(path: Path, kind: str, *, is_kept: bool = False) -> pin_file.Pin | None:
    """Pin the action of a kind of file; that of the ended ones leaves no file, unless `is_kept`.

    It never sweeps: files that were damaged and put back have the time of this host, so they would
    count as ended.
    """
    log = kafkalog.open(path, create=False)
    action = pins.Action("app", kind)
    never = mock.patch.object(pins, "_SWEEPS_ONE_IN", 1 << 62)
    try:
        with never:
            return pins.pin(path, action, directory_log_of(log).state, NOW_MS)
    finally:
        if kind == layout.ENDED_PINS and not is_kept:
            (path / action.file_name()).unlink(missing_ok=True)


# --- ours, a broker's, and ours again ------------------------------------------------------------


def _adopted(path: Path) -> Root:
    """A log that was a broker's, whose cluster has a topic's config in three batches, and is ours.

    Its controller has a snapshot, too; the broker was shut down in good order.
    """
    root = Root(path, logs=[_small()])
    root.give_to_a_broker()
    text = checkpoints.read_topic_id(path / "small-0")
    assert text is not None
    topic_id = base64.urlsafe_b64decode(text + "==")
    (path / layout.CLEAN_SHUTDOWN).write_bytes(_CLEAN_SHUTDOWN)
    (path / layout.METADATA_DIRECTORY).mkdir()
    made, directory = controller, path / layout.METADATA_DIRECTORY
    snapshot = made.batch(0, [made.topic("small", topic_id), made.partition(0, topic_id)])
    (directory / f"{2:020d}-{1:010d}.checkpoint").write_bytes(snapshot)
    settings = [("cleanup.policy", "delete"), ("retention.ms", "-1"), ("retention.ms", "900")]
    values = [made.batch(2 + n, [made.config("small", *one)]) for n, one in enumerate(settings)]
    (directory / log_name(2)).write_bytes(b"".join(values))
    adopt(path, now_ms=NOW_MS)
    return root


_KEPT: Final = {"delete.retention.ms": str(layout.INT64_MAX), "segment.ms": "1234567"}
_CONFIGS: Final = (
    {"cleanup.policy": "", "retention.ms": "-1", **_KEPT},
    {"cleanup.policy": "delete", "retention.ms": "-1", **_KEPT},
    {"cleanup.policy": "delete", "retention.ms": "900", **_KEPT},
)
"""After the controller's batches, with what was set while the log was ours."""


@dataclass
class AdoptedJudge(BesideJudge):
    """A log that a broker is given back, which died while its topic was about to get an id."""

    kinds = (
        layout.ADOPTED_TOPICS,
        layout.META_ASIDE,
        layout.CLEAN_ASIDE,
        layout.METADATA_ASIDE,
        layout.REMOTE_LOG_STARTS,
    )

    @classmethod
    def root_in(cls, path: Path) -> Root:
        root = _adopted(path)
        announced = (path / "small-0" / layout.PARTITION_METADATA).read_bytes()
        (path / "small-0" / layout.METADATA_ASIDE).write_bytes(announced)
        other = checkpoints.partition_metadata("AAAAAAAAAAAAAAAAAAAAAQ")
        (path / "small-0" / layout.PARTITION_METADATA).write_bytes(other)
        topic_id = announced.decode().split()[-1]
        write_remote_log_starts(path, {("small", 0): RemoteLogStart(topic_id, 0, 0)})
        return root

    def _read(self, name: Path, position: int) -> str:
        path = self.root.copy(self.scratch)
        topic_id = self._check_whole(path).describe("small").topic_id
        brokers = {
            aside: (path / aside).read_bytes() if (path / aside).exists() else None
            for aside in (layout.META_ASIDE, layout.CLEAN_ASIDE)
        }
        try:
            release(path, now_ms=NOW_MS)
        except KafkaLogError:
            self._check_whole(path)
            return "refused"
        back = path / layout.META_PROPERTIES
        assert (back.read_bytes() if back.exists() else None) == brokers[layout.META_ASIDE]
        if not back.exists():
            adopt(path, now_ms=NOW_MS)  # nobody's directory otherwise
        self._check_whole(path)
        assert checkpoints.read_topic_id(path / "small-0") == topic_id
        is_clean = path / (layout.CLEAN_SHUTDOWN if back.exists() else layout.CLEAN_ASIDE)
        assert is_clean.read_bytes() == (
            brokers[layout.CLEAN_ASIDE] or checkpoints.CLEAN_SHUTDOWN_CONTENT
        )
        return "whole"


@dataclass
class ReleasedJudge(BesideJudge):
    """A log that was released, and is adopted again."""

    kinds = (
        layout.COMMIT_RELEASED,
        f"{layout.METADATA_DIRECTORY} .log",
        f"{layout.METADATA_DIRECTORY} .checkpoint",
    )

    @classmethod
    def root_in(cls, path: Path) -> Root:
        root = _adopted(path)
        log = kafkalog.open(path, create=False)
        log.alter_topic("small", {"segment.ms": "1234567"})
        with directory_log_of(log).transaction() as transaction:
            transaction.record_writer("app small", 7, 3, NOW_MS)
            transaction.publish(NOW_MS)
        log.close()
        release(path, now_ms=NOW_MS)
        return root

    def _read(self, name: Path, position: int) -> str:
        path = self.root.copy(self.scratch)
        self._check_whole(path)
        try:
            report = adopt(path, now_ms=NOW_MS)
        except KafkaLogError:
            self._check_whole(path)
            return "refused"
        state = directory_log_of(self._check_whole(path)).state()
        is_lost = any(" is lost: " in notice for notice in report.notices)
        is_lost |= not (path / layout.COMMIT_RELEASED).exists()
        remembered = {name: (w.batch_id, w.rows) for name, w in state.writers.items()}
        assert is_lost or remembered == {"app small": (7, 3)}, f"writers {remembered}"
        configs = [
            {key: one for key, one in config.items() if not is_lost or key != "segment.ms"}
            for config in _CONFIGS
        ]
        found = dict(state.topics["small"].config)
        assert found in configs, f"a config that nobody has set: {found}"
        if is_lost:
            return "refused"
        return "whole" if found == _CONFIGS[-1] else "short"


# --- what is about to be committed ---------------------------------------------------------------


@dataclass
class StagedJudge(BesideJudge):
    """A batch that two tasks have staged: a run that becomes a segment, and a small one."""

    kinds = (layout.STAGED, layout.STAGED_INDEX, layout.STAGED_TIME_INDEX)
    messages: list[StagedMessage] = field(init=False)
    sound: dict[Path, bytes] = field(init=False)

    @classmethod
    def root_in(cls, path: Path) -> Root:
        config = {"cleanup.policy": "delete", "index.interval.bytes": "100"}
        return Root(path, logs=[Log("small", 0, [Segment(log_name(0), 0, [])], config=config)])

    def __post_init__(self) -> None:
        with mock.patch.object(staged_directory, "SEGMENT_RUN_SIZE", 200):
            self.messages = [self._staged(task, rows) for task, rows in enumerate(_STAGED)]
        self.sound = {name: (self.root.path / name).read_bytes() for name in self.files()}
        assert {kind_of(name) for name in self.sound} == {*self.kinds}

    def _staged(self, task: int, rows: Sequence[Row]) -> StagedMessage:
        log = kafkalog.open(self.root.path, create=False)
        writer = StagedWriter(
            directory_log_of(log),
            directory_log_of(log).state(),
            now_ms=lambda: NOW_MS,
            writer_slug="app",
            batch_id=0,
            spark_partition=task,
            batch_size=120,
        )
        columns = {
            "key": pa.array([row.key for row in rows], pa.binary()),
            "value": pa.array([row.value for row in rows], pa.binary()),
            "timestamp": pa.array([row.timestamp for row in rows], pa.timestamp("ms")),
            "partition": pa.array([0] * len(rows), pa.int32()),
        }
        writer.append("small", pa.record_batch(columns))
        return writer.finish()

    def _read(self, name: Path, position: int) -> str:
        path = self.root.copy(self.scratch)
        try:
            self._commit(path)
            outcome = "whole"
        except KafkaLogError:
            assert self._rows(path) == []
            for file, data in self.sound.items():
                (path / file).write_bytes(data)
            self._commit(path)
            outcome = "refused"
        wanted = [row for rows in _STAGED for row in rows]
        found = self._rows(path)
        assert found == wanted, f"{found} instead of {wanted}"
        with directory_log_of(kafkalog.open(path, create=False)).snapshot("small", 0) as view:
            for row in wanted:
                offset = offset_since(view, row.timestamp)
                assert offset == row.offset, f"time {row.timestamp} at {offset}"
        return outcome

    def _commit(self, path: Path) -> None:
        log = kafkalog.open(path, create=False)
        directory_log_of(log).commit(self.messages, writer=Writer("app", "*", 0), now_ms=NOW_MS)
        log.close()

    def _rows(self, path: Path) -> list[Row]:
        log = kafkalog.open(path, read_only=True, create=False)
        return read(directory_log_of(log), self.root.logs["small-0"], committed=False)


def _rows(first: int, count: int) -> list[Row]:
    return [Row(n, 1000 + n, b"k%d" % n, b"value %d" % n) for n in range(first, first + count)]


_STAGED: Final = (_rows(0, 16), _rows(16, 3))

JUDGES: Final[dict[str, type[BesideJudge]]] = {
    "cleaned": CleanedJudge,
    "adopted": AdoptedJudge,
    "released": ReleasedJudge,
    "staged": StagedJudge,
}
