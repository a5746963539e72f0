"""The partitions in the log directories of brokers, and which of them belong to the log.

A topic that was deleted and created again has another id. A disk that was away meanwhile still has
partitions of the old topic (KAFKA-14616). A broker renames those to `-stray`. Here they are *set
aside*: they stay where they are, and nobody reads, copies or adopts them. These rules decide:

- The right id is the one in the cluster's metadata, if that is here and has a topic of the name.
- Without it, the id of most partitions is taken. Among equals it is the id of the latest record,
  then that of the lowest partition.
- A partition without an id belongs to its topic: Kafka before 2.8 had none.
- Two topics with one id are read by their names, because nothing says whose id it is.
- A partition that lies in two directories of one broker is in neither, because nothing tells which
  one is right. In those of several brokers it has *replicas*; `replicas` chooses among them.

If only `-future` is left of a partition, it was being moved to another disk. It is set aside too: a
broker may not have copied all of it (KIP-113).

Kafka: LogManager.isStrayKraftReplica, LogManager.recoverAbandonedFutureLogs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

from kafkalog.errors import KafkaLogError
from kafkalog.storage_engine.broker import metadata_log
from kafkalog.storage_engine.broker.metadata_log import BrokerTopic, ClusterMetadata
from kafkalog.storage_engine.broker.replicas import brokers_of
from kafkalog.storage_engine.format import layout
from kafkalog.storage_engine.fs import files
from kafkalog.storage_engine.metadata import checkpoints
from kafkalog.storage_engine.metadata.other_systems import automq
from kafkalog.storage_engine.segment.segment_times import largest_timestamp
from kafkalog.storage_engine.segment.segments import list_segments

Key: TypeAlias = tuple[str, int]
"""Topic and partition."""


@dataclass(frozen=True, slots=True)
class FoundPartitions:
    """The partitions in the directories of one broker, or of several."""

    directories: Mapping[Key, Path]
    """The partitions of the log; of several replicas, the first one."""
    topic_ids: Mapping[str, str | None]
    """The id of each topic; None if no partition has one."""
    set_aside: Mapping[Path, tuple[Key, str]]
    """The other directories, each with the partition in its name and the reason."""
    guesses: Mapping[str, str] = field(default_factory=dict)
    """Topics of which nothing says whether their id is the right one, each with the reason."""
    deleted: tuple[str, ...] = ()
    """Topics that the cluster's metadata does not have, although it is here."""
    id_faults: tuple[str, ...] = ()
    """Why the ids of partitions are not known, if a file should say them."""
    replicas: Mapping[Key, Sequence[Path]] = field(default_factory=dict)
    """All directories of the partitions that several brokers have."""
    shared_ids: tuple[str, ...] = ()
    """A sentence for each id that several topics have."""

    @property
    def notices(self) -> list[str]:
        """A sentence for each thing that a broker would not have so."""
        aside = [f"{path}: set aside: {why}" for path, (_, why) in sorted(self.set_aside.items())]
        deleted = [
            f"topic {name!r}: the cluster's metadata here does not have it, so it was deleted, or "
            "the metadata is older"
            for name in self.deleted
        ]
        return [*aside, *deleted, *self.id_faults, *self.shared_ids]

    def internal(self) -> FoundPartitions:
        """Return what of this belongs to Kafka's own topics."""
        topics = layout.INTERNAL_TOPICS
        return FoundPartitions(
            {key: path for key, path in self.directories.items() if key[0] in topics},
            {name: topic_id for name, topic_id in self.topic_ids.items() if name in topics},
            {path: found for path, found in self.set_aside.items() if found[0][0] in topics},
        )

    def named(self) -> list[Key]:
        """Return the partitions that some directory is named after, whether it counts or not."""
        aside = {key for key, _ in self.set_aside.values() if key[1] < layout.PARTITIONS_MAX}
        return sorted({*self.directories, *aside})

    def reason(self, key: Key) -> str | None:
        """Return why a partition is not in the log although a directory has its name."""
        found = [f"{path} is set aside: {why}" for path, (k, why) in self.set_aside.items()]
        keys = [key for key, _ in self.set_aside.values()]
        return next((text for text, each in zip(found, keys, strict=True) if each == key), None)


def find_partitions(roots: Sequence[Path], known: Mapping[str, BrokerTopic]) -> FoundPartitions:
    """Return the partitions in brokers' directories; `known` is what their metadata says.

    Raises OSError for a directory that cannot be listed.
    """
    candidates: list[tuple[Key, Path]] = []
    futures: list[tuple[Key, Path]] = []
    for root in roots:
        with files.scan(root) as entries:
            names = sorted(entry.name for entry in entries if files.is_directory(entry))
        for name in names:
            key = layout.parse_partition_directory(name)
            future = layout.parse_future_directory(name)
            if key is not None and name != layout.METADATA_DIRECTORY:
                candidates.append((key, root / name))
            elif future is not None:
                futures.append((future, root / name))
    return decide(candidates, known, futures=futures, brokers=brokers_of(roots))


def topics_in_metadata(roots: Iterable[Path]) -> tuple[Mapping[str, BrokerTopic], list[str]]:
    """Return the topics in the roots' newest metadata log, and what is not known of them."""
    notices = []
    newest = ClusterMetadata()
    for root in roots:
        try:
            found = metadata_log.read_metadata(root)
        except (KafkaLogError, OSError) as fault:
            files.pass_on(fault)
            notices.append(f"{root}: topics' ids and configs are not known: {fault}")
            continue
        if found.is_automq:
            notices.append(f"{root}: {automq()}")
        if found.topics and found.end > newest.end:
            newest = found
    return newest.topics, notices


def decide(
    candidates: Sequence[tuple[Key, Path]],
    known: Mapping[str, BrokerTopic],
    *,
    futures: Iterable[tuple[Key, Path]] = (),
    brokers: Mapping[Path, str] | None = None,
) -> FoundPartitions:
    """Return which of the directories with a partition's name belong to the log.

    `futures` are the `-future` directories next to them. `brokers` says whose each root is; by
    default, all are those of one broker.
    """
    aside: dict[Path, tuple[Key, str]] = {}
    named: dict[str, list[tuple[Key, Path, str | None]]] = {}
    id_faults: list[str] = []
    for key, path in candidates:
        if key[1] >= layout.PARTITIONS_MAX:
            aside[path] = key, f"no topic has a partition above {layout.PARTITIONS_MAX}"
            continue
        topic_id, fault = checkpoints.known_topic_id(path)
        named.setdefault(key[0], []).append((key, path, topic_id))
        if fault is not None:
            id_faults.append(fault)
    directories: dict[Key, Path] = {}
    replicas: dict[Key, Sequence[Path]] = {}
    topic_ids: dict[str, str | None] = {}
    guesses: dict[str, str] = {}
    for name, found in sorted(named.items()):
        right, basis = _right_id(found, known.get(name))
        topic_ids[name] = right
        if basis == _NOTHING:
            guesses[name] = "its partitions have different ids"
        ours: dict[Key, list[Path]] = {}
        for key, path, topic_id in found:
            if topic_id not in (None, right):
                why = f"it is of the topic {topic_id}, and {basis} {right} as the topic {name!r}"
                aside[path] = key, f"{why}; {_TO_READ}"
            else:
                ours.setdefault(key, []).append(path)
        for key, paths in ours.items():
            owners = [(brokers or {}).get(path.parent, "") for path in paths]
            for path, owner in zip(paths, owners, strict=True):
                if owners.count(owner) > 1:
                    places = zip(paths, owners, strict=True)
                    other = next(each for each, o in places if o == owner and each != path)
                    why = f"the same partition is in {other}; read the directories alone"
                    aside[path] = key, why
            if kept := [path for path in paths if path not in aside]:
                directories[key] = kept[0]
            if len(kept) > 1:
                replicas[key] = kept
    for key, path in futures:
        if key not in directories and all(key != each for each, _ in aside.values()):
            text = f"only this is left of {layout.partition_directory(*key)}, which a broker was "
            text += f"moving to another disk, and it may not have all records; {_TO_READ}"
            aside[path] = key, text
    shared = []
    for topic_id, names in _with_one_id(topic_ids).items():
        text = f"the topics {' and '.join(names)} have one id, {topic_id}"
        shared.append(f"{text}, which is that of one of them at most")
        guesses |= dict.fromkeys(names, text)
    deleted = tuple(name for name in topic_ids if known and name not in known)
    return FoundPartitions(
        directories,
        topic_ids,
        aside,
        guesses,
        deleted,
        tuple(id_faults),
        replicas,
        tuple(shared),
    )


def _with_one_id(topic_ids: Mapping[str, str | None]) -> Mapping[str, Sequence[str]]:
    """Return the ids that several topics have, with their names."""
    names: dict[str, list[str]] = {}
    for name, topic_id in topic_ids.items():
        if topic_id is not None:
            names.setdefault(topic_id, []).append(name)
    return {topic_id: each for topic_id, each in names.items() if len(each) > 1}


_TO_READ = "to read it, copy it to another directory, named as the partition, and read that one"
_NOTHING = "nothing says which id is the right one, so that of the lowest partition is taken:"


def _right_id(
    found: Sequence[tuple[Key, Path, str | None]], known: BrokerTopic | None
) -> tuple[str | None, str]:
    """Return the id of the topic, and what says so."""
    if known is not None:
        return known.topic_id, "the cluster's metadata has"
    counts = Counter(topic_id for _, _, topic_id in found if topic_id is not None)
    if len(counts) < 2:
        return next(iter(counts), None), ""
    most = max(counts.values())
    equals = [topic_id for topic_id, count in counts.items() if count == most]
    if len(equals) == 1:
        return equals[0], "most partitions here have"
    times = dict.fromkeys(equals, layout.NO_TIMESTAMP)
    for _, path, topic_id in found:
        if topic_id in times:
            times[topic_id] = max(times[topic_id], _latest_ms(path))
    latest = [topic_id for topic_id in equals if times[topic_id] == max(times.values())]
    if len(latest) == 1:
        return latest[0], "the latest record here has"
    lowest = min((key, topic_id) for key, _, topic_id in found if topic_id in latest)
    return lowest[1], _NOTHING


def _latest_ms(directory: Path) -> int:
    """Return the largest timestamp in the last segments of a partition; -1 if none is readable."""
    try:
        filled = [segment for segment in list_segments(directory) if segment.size]
        return largest_timestamp(filled[-1], filled[-1].size) if filled else layout.NO_TIMESTAMP
    except (KafkaLogError, OSError) as fault:
        files.pass_on(fault)
        return layout.NO_TIMESTAMP
