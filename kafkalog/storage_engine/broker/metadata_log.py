"""Read the topics from KRaft's metadata: their names, ids, numbers of partitions and configs.

The controller keeps them in a partition like any other, `__cluster_metadata-0`. It has snapshots of
everything up to an offset (`<offset>-<epoch>.checkpoint`), and the log after it. Both are batches
v2 whose record values are framed messages; only those about topics are read here.

A topic's config has what was set for it, not the brokers' own defaults. With several controllers,
the last records may not be agreed upon yet; the files do not show it. If there are logs of several
controllers, the one with the highest leader epoch counts, then the longest.

Kafka: MetadataRecordSerde, ReplicationControlManager, ConfigurationControlManager, Snapshots.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Final

from kafkalog.errors import CorruptBatchError, CorruptLogError, StorageError
from kafkalog.storage_engine.format import layout, message
from kafkalog.storage_engine.format.message_fields import MessageFields
from kafkalog.storage_engine.fs import files
from kafkalog.storage_engine.segment.byte_source import FileBytes
from kafkalog.storage_engine.segment.log_scanner import METADATA, LogScanner


@dataclass(frozen=True, slots=True)
class Assignment:
    """The brokers that have a partition, by their node ids, as far as the metadata says it."""

    replicas: Sequence[int] = ()
    in_sync: Sequence[int] = ()
    """The replicas that had every committed record (Kafka: isr)."""
    directories: Sequence[str] = ()
    """The id of the log directory of each replica (KIP-858); older metadata has none."""


_ASSIGNED: Final = {"replicas": "replicas", "in_sync": "isr", "directories": "directories"}


@dataclass(frozen=True, slots=True)
class BrokerTopic:
    """A topic in the cluster's metadata."""

    name: str
    topic_id: str
    """22 characters, as in `partition.metadata`."""
    partitions: int
    config: Mapping[str, str] = field(default_factory=dict)
    """The configs that were set for this topic, by Kafka's names."""
    records: Mapping[int, Sequence[bytes]] = field(default_factory=dict, compare=False, repr=False)
    """The records about each partition, undecoded, because few readers need them."""

    def assignment(self, partition: int) -> Assignment:
        """Return which brokers have a partition; a record of a later version says nothing."""
        found = Assignment()
        for value in self.records.get(partition, ()):
            with contextlib.suppress(ValueError):
                fields = message.read_metadata(value)[3]
                changed = {
                    ours: tuple(fields[theirs])
                    for ours, theirs in _ASSIGNED.items()
                    if fields.get(theirs) is not None  # null: as it was
                }
                found = replace(found, **changed)
        return found


@dataclass(frozen=True, slots=True)
class ClusterMetadata:
    """The topics in a metadata log, by name, and how far the log goes."""

    topics: Mapping[str, BrokerTopic] = field(default_factory=dict)
    end: tuple[int, int] = (-1, -1)
    """The leader epoch and the offset of the last record."""
    is_automq: bool = False
    """Whether it has records of AutoMQ, whose topics lie in an object store."""


def read_topics(directory: Path) -> Mapping[str, BrokerTopic]:
    """Return the topics of `read_metadata`."""
    return read_metadata(directory).topics


def read_metadata(directory: Path) -> ClusterMetadata:
    """Return the metadata in a log directory; without topics if it has no metadata log.

    `directory` is the broker's `metadata.log.dir`, which has `__cluster_metadata-0`, or the latter
    itself. The controller may be running: a torn last batch is ignored. Raises CorruptLogError, and
    StorageError for metadata of another format.
    """
    directory, names = _listing(directory)
    snapshots = {found: n for n in names if (found := layout.parse_metadata_snapshot(n))}
    bases = layout.base_offsets(names, layout.LOG)
    topics = _Topics()
    start, end = 0, (-1, -1)
    if snapshots:
        (start, epoch), name = max(snapshots.items())
        end = epoch, start - 1
        for _, path, position, value in _values(directory / name, is_last=False):
            topics.replay(path, position, value)
    for place, base_offset in enumerate(bases):
        is_last = place + 1 == len(bases)
        if not is_last and bases[place + 1] <= start:
            continue
        log = directory / layout.segment_file(base_offset, layout.LOG)
        for (epoch, offset), path, position, value in _values(log, is_last=is_last):
            if offset >= start:
                end = epoch, offset
                topics.replay(path, position, value)
    return ClusterMetadata(topics.known(), end, topics.is_automq)


def has_metadata(directory: Path) -> bool:
    """Return whether `read_topics` would find a metadata log."""
    names = _listing(directory)[1]
    has_snapshot = any(layout.parse_metadata_snapshot(name) for name in names)
    return has_snapshot or bool(layout.base_offsets(names, layout.LOG))


def _listing(directory: Path) -> tuple[Path, list[str]]:
    if directory.name != layout.METADATA_DIRECTORY:
        directory = directory / layout.METADATA_DIRECTORY
    try:
        return directory, files.list_names(directory)
    except (FileNotFoundError, NotADirectoryError):
        return directory, []


def _values(path: Path, *, is_last: bool) -> Iterator[tuple[tuple[int, int], Path, int, bytes]]:
    """Yield ((epoch, offset), path, position of its batch, value) of the records of a file."""
    with files.closing(files.open_to_read(path)) as fd:
        source = FileBytes(fd)
        scan = LogScanner(source, path, METADATA, limit=source.size())
        for found in scan:
            table = found.table
            if table.has_messages:
                position = found.position_of(int(table.is_message.argmax()))
                raise CorruptBatchError(path, position, f"magic {layout.MAGIC}", "a lower one")
            is_data = ~table.is_control & (table.counts != 0)
            for records in found.records(is_data.nonzero()[0]):
                for row, offset in enumerate(records.offsets.tolist()):
                    batch = int(records.batch_index[row])
                    place = int(table.leader_epochs[batch]), offset
                    yield place, path, found.position_of(batch), records.value(row) or b""
        scan.look_at_tail()
        if scan.fault is not None and not (is_last and scan.is_torn):
            raise scan.fault


class _Topics:
    def __init__(self) -> None:
        self._names: dict[str, str] = {}  # by topic id
        self._partitions: dict[str, int] = {}  # by topic id
        self._records: dict[str, dict[int, list[bytes]]] = {}  # by topic id and partition
        self._configs: dict[str, dict[str, str]] = {}  # by name
        self._pending: list[tuple[Path, int, bytes]] | None = None
        """Records of the controller's open transaction; None outside of one."""
        self.is_automq = False

    def known(self) -> dict[str, BrokerTopic]:
        return {
            name: BrokerTopic(
                name,
                topic_id,
                self._partitions.get(topic_id, 0),
                MappingProxyType(self._configs.get(name, {})),
                MappingProxyType(self._records.get(topic_id, {})),
            )
            for topic_id, name in sorted(self._names.items(), key=lambda item: item[1])
        }

    def replay(self, path: Path, position: int, value: bytes) -> None:
        fields = MessageFields(value)
        try:
            version, api_key, _ = fields.unsigned(), fields.unsigned(), fields.unsigned()
            if version != layout.METADATA_FRAME_VERSION:
                raise StorageError(
                    f"{path}: at byte {position}: a metadata record has the frame version "
                    f"{version}, this release of kafkalog reads {layout.METADATA_FRAME_VERSION}; "
                    "use a newer release"
                )
            if api_key == layout.BEGIN_TRANSACTION_RECORD:
                self._pending = []
            elif api_key in (layout.END_TRANSACTION_RECORD, layout.ABORT_TRANSACTION_RECORD):
                pending, self._pending = self._pending or [], None
                for record in pending if api_key == layout.END_TRANSACTION_RECORD else ():
                    self.replay(*record)
            elif self._pending is not None:
                self._pending.append((path, position, value))
            else:
                self._replay(api_key, fields, value)
        except ValueError as fault:
            raise CorruptLogError(path, position, "a metadata record", fault) from None

    def _replay(self, api_key: int, fields: MessageFields, value: bytes) -> None:
        # These are the first fields of all existing versions of these records.
        if api_key == layout.TOPIC_RECORD:
            name, topic_id = fields.compact_text(), fields.uuid()
            if name is None:
                raise ValueError("a topic without a name")
            self._names[topic_id] = name
        elif api_key in (layout.PARTITION_RECORD, layout.PARTITION_CHANGE_RECORD):
            number = fields.integer(4)
            topic_id = fields.uuid()
            self._partitions[topic_id] = max(self._partitions.get(topic_id, 0), number + 1)
            self._records.setdefault(topic_id, {}).setdefault(number, []).append(value)
        elif api_key == layout.CONFIG_RECORD:
            self._configure(fields)
        elif api_key == layout.REMOVE_TOPIC_RECORD:
            topic_id = fields.uuid()
            name = self._names.pop(topic_id, None)
            self._partitions.pop(topic_id, None)
            self._records.pop(topic_id, None)
            if name is not None:
                self._configs.pop(name, None)
        elif api_key in layout.AUTOMQ_RECORDS:
            self.is_automq = True

    def _configure(self, fields: MessageFields) -> None:
        resource_type = fields.bytes_of(1)[0]
        resource, name, value = fields.compact_text(), fields.compact_text(), fields.compact_text()
        if resource_type != layout.CONFIG_OF_TOPIC or resource is None or name is None:
            return
        config = self._configs.setdefault(resource, {})
        if value is None:
            config.pop(name, None)
        else:
            config[name] = value
