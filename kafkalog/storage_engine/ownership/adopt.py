"""`adopt`: turn a broker's directory into a log of ours, to be written and cleaned.

The steps are in an order that permits the process to die after any of them:

1. Lock `.lock` exclusively: the broker is stopped.
2. Load every partition as the broker would, without writing. Faults of the directory show before
   anything has changed.
3. Create the guard and move `meta.properties` aside. **From here on no broker starts on the
   directory**, so none ever sees a partition that is half repaired.
4. Move `.kafka_cleanshutdown` aside. Repair the partitions: truncate a torn tail, rebuild indexes.
   Create our lock files and the canary in each.
5. Create `commit` with everything that was found: **from here on the log is ours**.

A run that finds the guard and no `commit` continues. Internal topics, partitions of another topic
of the same name (`found_partitions`), and directories whose names end in `-delete`, `-stray` or
`-future`, stay unchanged for the broker's return.

*Leader epoch*: our appends have the last epoch in `leader-epoch-checkpoint`. `adopt` does not raise
it, because the cluster's controller does not know us. A consumer that had read a higher epoch would
later ask the broker for its end; the broker would not know it, and the consumer would be reset.
With the epoch unchanged its position remains valid: our offsets follow those of the broker, the
only leader of that epoch.

*Config*: the topic's config in the cluster's metadata, if that is here and has the same topic id.
Without a known policy a topic is neither cleaned nor deleted from until `alter_topic` sets one.
Without a known `retention.ms` or `delete.retention.ms`, records and tombstones are kept. The
broker's own defaults (`log.retention.hours` and the like) are in no log directory, and Kafka's
default would delete what they may keep.

*A log that was ours before*: writers, configs, and the lowest ends of snapshots after cleanings
come from the old journal (`kl-commit.released`), for topics with unchanged ids.

Kafka: LogManager.loadLogs, LogLoader.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kafkalog.errors import CorruptLogError, InvalidInputError, StorageError
from kafkalog.storage_engine.broker import metadata_log
from kafkalog.storage_engine.broker.checkpointed import Checkpointed
from kafkalog.storage_engine.broker.found_partitions import decide
from kafkalog.storage_engine.broker.loader import LoadedPartition, load_partition
from kafkalog.storage_engine.broker.metadata_log import BrokerTopic
from kafkalog.storage_engine.broker.recovery import repair_partition
from kafkalog.storage_engine.directory.recorded_records import journal_of
from kafkalog.storage_engine.directory.transaction import Transaction
from kafkalog.storage_engine.format import layout
from kafkalog.storage_engine.fs import files, locks
from kafkalog.storage_engine.metadata import checkpoints, config
from kafkalog.storage_engine.metadata.directory_signs import check_is_directory, partitions_to_adopt
from kafkalog.storage_engine.metadata.journal import Journal
from kafkalog.storage_engine.metadata.new_topic import new_topic_id
from kafkalog.storage_engine.metadata.remote_log_starts import (
    RemoteLogStart,
    read_remote_log_starts,
    write_remote_log_starts,
)
from kafkalog.storage_engine.metadata.state import Change, PartitionState, State, TopicState
from kafkalog.storage_engine.ownership.adopted_topics import WITHOUT_ID, write_adopted_topics
from kafkalog.storage_engine.ownership.release import LOCK_WAIT_S, Progress
from kafkalog.storage_engine.segment import swaps

_NO_POLICY: Final = {"cleanup.policy": ""}
_KEEP_ALL: Final = {
    **_NO_POLICY,
    "retention.ms": "-1",
    "delete.retention.ms": str(layout.INT64_MAX),
}
"""What keeps every record, for configs that are not known."""
_READ_AS_FOUND = (layout.PARTITION_METADATA, layout.LEADER_EPOCH_CHECKPOINT)
ALL_TOPICS = "*"


@dataclass(frozen=True, slots=True)
class AdoptReport:
    """The result of `adopt`."""

    root: Path
    adopted_already: bool
    """It was ours before, and nothing was done."""
    topics: tuple[str, ...]
    partitions: int
    was_clean: bool
    """Whether the broker had a clean shutdown."""
    damage: tuple[str, ...] = ()
    """Damaged data that was truncated."""
    notices: tuple[str, ...] = ()


def adopt(
    root: Path,
    *,
    config: Mapping[str, Mapping[str, str]] | None = None,
    metadata: Path | None = None,
    now_ms: int,
    progress: Progress | None = None,
) -> AdoptReport:
    """Take over a stopped broker's log directory.

    `config` has topic configs by topic, or by `*` for all. The cluster's metadata overrides `*`,
    and a topic's own config overrides both. `metadata` is the directory in the broker's
    `metadata.log.dir`, if that is another one. Raises LockedByBrokerError while a broker runs.
    InvalidInputError is raised for a directory that is not a broker's or has no partitions, an
    unknown topic, a wrong config, or a `metadata` without a metadata log. StorageError means that
    records are gone; StorageError and CorruptLogError, files that a broker could not load either.
    Then nothing has changed, or the next run continues.
    """
    root = Path(root).absolute()
    check_is_directory(root)
    if (root / layout.COMMIT).exists() and not _lost_canaries(root):
        return _adopted_already(root, config or {}, metadata)
    partitions_to_adopt(root)  # do not even write a lock file to a foreign directory
    if metadata is not None and not metadata_log.has_metadata(metadata):
        raise InvalidInputError(
            f"{metadata}: no metadata log here: expected the broker's metadata.log.dir, with a "
            f"directory {layout.METADATA_DIRECTORY} that has a .log or .checkpoint file"
        )
    with files.disk_faults(root), locks.RootLock(root).exclusive(wait_s=LOCK_WAIT_S) as check_lock:
        if (root / layout.COMMIT).exists():
            if not _lost_canaries(root):
                return _adopted_already(root, config or {}, metadata)
            _set_aside(root, check_lock, now_ms)
        adopting = _Adopting(root, metadata, now_ms)
        adopting.load(config or {}, progress)
        adopting.keep_brokers_out()
        check_lock()
        adopting.repair()
        check_lock()
        return adopting.record()


def _adopted_already(
    root: Path, given: Mapping[str, Mapping[str, str]], metadata: Path | None
) -> AdoptReport:
    topics = journal_of(root).published().topics
    count = sum(len(list(topic.present())) for topic in topics.values())
    unset = [
        f"the config of {name!r}"
        for name, wanted in given.items()
        if any(
            topic not in topics or wanted.items() - topics[topic].config.items()
            for topic in (topics if name == ALL_TOPICS else [name])
        )
    ]
    if metadata is not None:
        unset.append(f"what {metadata} says")
    notices = [
        f"the log is ours already, so {what} was not set; use `kafkalog topics alter`"
        for what in unset
    ]
    return AdoptReport(
        root, True, tuple(sorted(topics)), count, was_clean=True, notices=tuple(notices)
    )


def _lost_canaries(root: Path) -> bool:
    """Return whether a broker has loaded our log, so that `commit` is stale.

    The broker deletes the canaries of the partitions that it loads, and directories of topics that
    were deleted or that its cluster does not know.
    """
    topics = journal_of(root).published().topics.values()
    directories = [
        root / layout.partition_directory(topic.name, number)
        for topic in topics
        for number, _ in topic.present()
    ]
    return any(not (directory / layout.CANARY).exists() for directory in directories)


def _set_aside(root: Path, check_lock: Callable[[], None], now_ms: int) -> None:
    """Treat a stale `commit` like that of a released log.

    First truncates partitions that no broker has loaded, because our uncommitted data there must
    not become valid.
    """
    journal = journal_of(root)
    state = journal.recover()
    transaction = Transaction(root, journal, state, check_lock)
    for topic in state.topics.values():
        for number, _ in topic.present():
            directory = root / layout.partition_directory(topic.name, number)
            if (directory / layout.CANARY).exists():
                with locks.SegmentsLock(directory).exclusive():
                    swaps.finish_swaps(directory)
                transaction.appender(topic.name, number, now_ms).finish()
    transaction.close()
    files.rename(root / layout.COMMIT, root / layout.COMMIT_RELEASED)
    files.sync_directory(root)


class _Adopting:
    """One run; the caller holds the root lock exclusively."""

    def __init__(self, root: Path, metadata: Path | None, now_ms: int) -> None:
        self.root = root
        self._now_ms = now_ms
        self._known = metadata_log.read_topics(metadata or root)
        self._notices: list[str] = []
        self._loaded: dict[tuple[str, int], LoadedPartition] = {}
        self._ids: dict[str, str] = {}
        self._found_ids: Mapping[str, str | None] = {}
        self._drawn: set[str] = set()
        self._configs: dict[str, dict[str, str]] = {}
        self._remote: dict[tuple[str, int], RemoteLogStart] = {}
        self._remote_before = read_remote_log_starts(root)
        """Those of a run that died."""
        self.was_clean = checkpoints.is_clean(root)
        self._before = self._journal_before()

    def _journal_before(self) -> State:
        path = self.root / layout.COMMIT_RELEASED
        if path.exists():
            try:
                return Journal(path).published()
            except (StorageError, CorruptLogError) as fault:
                self._notices.append(f"what this log held when it was ours is lost: {fault}")
        return State()

    def load(self, given: Mapping[str, Mapping[str, str]], progress: Progress | None) -> None:
        offsets, notices = checkpoints.known_offsets(self.root)
        self._notices += notices
        found = self._decide()
        for done, (key, directory) in enumerate(found.items()):
            if progress is not None:
                progress(directory.name, done, len(found))
            known = self._known.get(key[0])
            checkpointed = Checkpointed.of(
                offsets,
                key,
                {} if known is None else known.config,
                root=self.root,
                is_clean=self.was_clean,
            )
            self._loaded[key] = load_partition(
                directory,
                *key,
                log_start=checkpointed.log_start,
                recovery_point=checkpointed.recovery_point,
                is_clean=self.was_clean,
                first_dirty=checkpointed.first_dirty or 0,
                now_ms=self._now_ms,
                checkpointed=checkpointed,
            )
            if checkpointed.is_tiered and checkpointed.log_start is not None:
                self._note_remote(key, checkpointed.log_start)
        if progress is not None:
            progress("", len(found), len(found))
        self._check_not_lost()
        self._note_gone()
        self._note_old_broker()
        topics = sorted({topic for topic, _ in found})
        for name in given:
            if name != ALL_TOPICS and name not in topics:
                raise InvalidInputError(
                    f"topic {name!r} is not in this directory; the topics here are: "
                    f"{', '.join(topics[:20]) or 'none'}"
                )
        for topic in topics:
            self._ids[topic] = self._topic_id(topic)
            self._configs[topic] = self._config(topic, given)
        self._found()

    def _note_remote(self, key: tuple[str, int], log_start: int) -> None:
        """Remember where a log begins in remote storage, and its epochs from there."""
        loaded = self._loaded[key]
        first = loaded.state.log_start_offset
        if log_start < first:
            epochs, _ = checkpoints.known_leader_epochs(loaded.directory)
            if key in self._remote_before:
                epochs = self._remote_before[key].whole(epochs)
            below = tuple((epoch, start) for epoch, start in epochs if start < first)
            self._remote[key] = RemoteLogStart("", log_start, first, below)

    def _check_not_lost(self) -> None:
        """Raise StorageError if records are gone: an adoption would erase what shows it."""
        lost = [loss for loaded in self._loaded.values() for loss in loaded.lost]
        if lost:
            more = f" (and {len(lost) - 1} more losses)" if len(lost) > 1 else ""
            directory = lost[0].path.parent
            raise StorageError(
                f"{lost[0]}{more}; nothing was changed. Restore it from a copy or another replica. "
                f"To go on without this partition, move {directory} away"
            )

    def _note_gone(self) -> None:
        for topic in self._before.topics.values():
            for number, _ in topic.present():
                if (topic.name, number) not in self._loaded:
                    name = layout.partition_directory(topic.name, number)
                    self._notices.append(f"{name} was here when the log was ours, and is gone")

    def _note_old_broker(self) -> None:
        """Say that a broker before 0.11, which had no leader epochs, cannot read batches v2."""
        # Kafka 0.8 had no meta.properties yet.
        signs = layout.META_PROPERTIES, layout.META_ASIDE, layout.REPLICATION_CHECKPOINT
        if self._before.topics or not any((self.root / name).exists() for name in signs):
            return
        paths = [each.directory / layout.LEADER_EPOCH_CHECKPOINT for each in self._loaded.values()]
        if paths and not any(path.exists() for path in paths):
            self._notices.append(
                f"no partition has a {layout.LEADER_EPOCH_CHECKPOINT}, so the broker is older than "
                "Kafka 0.11, and cannot read what kafkalog appends or cleans: give the directory "
                "to a newer one afterwards"
            )

    def _decide(self) -> Mapping[tuple[str, int], Path]:
        """Return the partitions that are of their topics, sorted; the others stay as they are."""
        candidates = [
            (key, self.root / layout.partition_directory(*key))
            for key in partitions_to_adopt(self.root)
        ]
        found = decide(candidates, self._known)
        self._notices += found.notices
        for topic, why in sorted(found.guesses.items()):
            here = ", ".join(path.name for key, path in candidates if key[0] == topic)
            raise StorageError(
                f"{self.root}: nothing says which id the topic {topic!r} had, because {why} "
                f"(in {here}). Give the broker's metadata.log.dir (--metadata), or adopt a copy of "
                "the directory without the others."
            )
        if candidates and not found.directories:
            raise StorageError(
                f"{self.root}: no partition here is of a topic in the cluster's metadata: "
                f"{found.notices[0]}"
            )
        self._found_ids = found.topic_ids
        return found.directories

    def _topic_id(self, topic: str) -> str:
        """Return the common id of a topic's partitions, or a new id if none has one."""
        found = self._found_ids[topic]
        if found is not None:
            return found
        self._drawn.add(topic)
        self._notices.append(f"topic {topic!r} had no id: one was drawn")
        return new_topic_id()

    def _of(self, topic: str) -> dict[int, LoadedPartition]:
        return {number: found for (name, number), found in self._loaded.items() if name == topic}

    def _config(self, topic: str, given: Mapping[str, Mapping[str, str]]) -> dict[str, str]:
        """Return a topic's config; raises InvalidInputError for a wrong one in the arguments."""
        metadata = self._metadata(topic)
        before = self._topic_before(topic)
        known: dict[str, str] = {}
        if before is not None:
            known.update(before.config)
        known.update(given.get(ALL_TOPICS, {}))
        if metadata is not None:
            known.update(self._usable(topic, metadata.config))
        known.update(given.get(topic, {}))
        kept = _KEEP_ALL if before is None else _NO_POLICY  # a topic of ours has our defaults
        wanted = {**kept, **known}
        self._note_unknown(topic, config.TopicConfig.parse(wanted), kept.keys() - known.keys())
        return wanted

    def _note_unknown(self, topic: str, found: config.TopicConfig, unknown: Set[str]) -> None:
        """Say what is kept because a config is not known, where the policy makes it matter."""
        to_set = f"--config '{topic}:{{}}=...' or `kafkalog topics alter` sets it"
        if not found.cleanup_policy:
            self._notices.append(
                f"topic {topic!r}: its cleanup.policy is not known, so it is neither cleaned nor "
                "deleted from until you set it"
            )
        if found.is_deleted and "retention.ms" in unknown:
            self._notices.append(
                f"topic {topic!r}: its retention.ms is not known, so no record is deleted for its "
                f"age; {to_set.format('retention.ms')}"
            )
        if found.is_compacted and "delete.retention.ms" in unknown:
            self._notices.append(
                f"topic {topic!r}: its delete.retention.ms is not known, so a tombstone stays "
                f"unless the broker has set its end; {to_set.format('delete.retention.ms')}"
            )

    def _topic_before(self, topic: str) -> TopicState | None:
        """Return a topic's state when the log was ours, if it is the same topic."""
        known = self._before.topics.get(topic)
        return known if known is not None and known.topic_id == self._ids.get(topic) else None

    def _metadata(self, topic: str) -> BrokerTopic | None:
        found = self._known.get(topic)
        return found if found is not None and found.topic_id == self._ids[topic] else None

    def _usable(self, topic: str, found: Mapping[str, str]) -> dict[str, str]:
        usable = config.usable(found)
        left_out = [f"{name}={found[name]}" for name in sorted(found.keys() - usable.keys())]
        if left_out:
            self._notices.append(
                f"topic {topic!r}: kafkalog does not act upon {', '.join(left_out)}"
            )
        return usable

    def keep_brokers_out(self) -> None:
        """Create the guard, and move away the files that a broker needs to start."""
        root = self.root
        if not (root / layout.GUARD).is_dir():
            files.make_directory(root / layout.GUARD)
        files.sync_directory(root)  # includes the names of a dead run
        starts = {
            key: start._replace(topic_id=self._ids[key[0]]) for key, start in self._remote.items()
        }
        write_remote_log_starts(root, starts)  # before the epochs are trimmed
        if (root / layout.META_PROPERTIES).exists():
            if not self.was_clean and (root / layout.CLEAN_ASIDE).exists():
                files.remove(root / layout.CLEAN_ASIDE)  # of an earlier adoption
                files.sync_directory(root)
            files.rename(root / layout.META_PROPERTIES, root / layout.META_ASIDE)
            files.sync_directory(root)
        if (root / layout.CLEAN_SHUTDOWN).exists():
            files.rename(root / layout.CLEAN_SHUTDOWN, root / layout.CLEAN_ASIDE)
            files.sync_directory(root)

    def repair(self) -> None:
        """Repair the partitions on disk as loaded, and add our own files."""
        for key, loaded in self._loaded.items():
            interval = config.TopicConfig.parse(self._configs[key[0]]).index_interval_bytes
            repaired = repair_partition(loaded, index_interval_bytes=interval)
            self._loaded[key] = repaired
            directory = repaired.directory
            # `commit` will depend on them, and their writer may have died before a sync.
            for path in map(directory.joinpath, _READ_AS_FOUND):
                if path.exists():
                    files.sync_path(path)
            if repaired.topic_id is None:
                content = checkpoints.partition_metadata(self._ids[key[0]])
                files.write_atomically(directory / layout.PARTITION_METADATA, content)
            ours = (
                layout.SEGMENTS_LOCK,
                layout.SEGMENTS_TURNSTILE,
                layout.CLEANER_LOCK,
                layout.CANARY,
            )
            for path in (directory / name for name in ours):
                if not path.exists():
                    files.create(path)
            # Lists from the time when the log was ours may describe files that are gone.
            stale = [directory / name for name in (layout.GAPS, layout.RAW_GAPS)]
            stale = [path for path in stale if path.exists()]
            stale += [directory / n for n in files.list_names(directory) if layout.is_key_index(n)]
            for path in stale:
                files.remove(path)
            files.sync_directory(directory)

    def _found(self) -> State:
        """Return the loaded log as a state; raises StorageError if the journal refuses it."""
        change = Change()
        for topic, topic_id in self._ids.items():
            here = self._of(topic)
            metadata = self._metadata(topic)
            known = self._topic_before(topic)
            # This number distributes keys, so it includes the partitions of other brokers.
            count = max(
                max(here) + 1,
                metadata.partitions if metadata else 0,
                len(known.partitions) if known else 0,
            )
            absent = set(range(count)) - here.keys()
            change.topic(topic, topic_id, count, self._configs[topic], absent)
            for number, loaded in here.items():
                change.partition(topic, number, self._state(topic, number, loaded.state))
        for writer, entry in self._before.writers.items():
            if self._is_still_true(writer):
                change.writer(writer, entry)
        change.forgotten_writers.update(self._before.forgotten_writers)
        try:
            return State().apply(1, change.record(self._now_ms))
        except ValueError as fault:
            raise StorageError(
                f"{self.root}: kafkalog cannot keep this directory as a log ({fault}). Move away "
                "what does not belong here."
            ) from fault

    def record(self) -> AdoptReport:
        state = self._found()
        checkpoints.write_root_checkpoints(self.root, state)
        write_adopted_topics(self.root, self._broker_ids(), state)
        Journal.create(self.root / layout.COMMIT, state)
        damage = [line for loaded in self._loaded.values() for line in loaded.damage]
        self._notices += [line for loaded in self._loaded.values() for line in loaded.notices]
        return AdoptReport(
            self.root,
            False,
            tuple(sorted(self._ids)),
            len(self._loaded),
            self.was_clean,
            tuple(damage),
            tuple(self._notices),
        )

    def _broker_ids(self) -> dict[str, str]:
        """Return the topics by the ids that the broker's cluster knows, as far as possible."""
        clusters = {topic.topic_id for topic in self._known.values()}
        if clusters:
            return {name: found for name, found in self._ids.items() if found in clusters}
        return self._ids | dict.fromkeys(self._drawn, WITHOUT_ID)

    def _is_still_true(self, writer: str) -> bool:
        target = writer.rpartition(" ")[2]
        return target == "*" or self._topic_before(target) is not None

    def _state(self, topic: str, number: int, state: PartitionState) -> PartitionState:
        first_dirty = min(
            max(state.first_dirty_offset, state.log_start_offset), state.high_watermark
        )
        cleaning = first_dirty
        known = self._topic_before(topic)
        if known is not None and number < len(known.partitions):
            cleaning = max(cleaning, known.partitions[number].cleaned_to)
        return dataclasses.replace(
            state,
            first_dirty_offset=first_dirty,
            cleaning_offset=min(cleaning, state.high_watermark),
            leader_epoch=max(state.leader_epoch, 0),
            listed_from=state.high_watermark,
            # Its checkpoint may be lost, or behind; it never cleans its active segment.
            deletions_gone_to=max(cleaning, state.active_base),
        )
