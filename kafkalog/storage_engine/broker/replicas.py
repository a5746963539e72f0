"""The replicas of a partition on the disks of several brokers, and the one that is believed.

It is the one that Kafka's rules would make the leader: the replica with the highest leader epoch,
and of those the longest. Every follower with the same epoch has a beginning of it, so it has all
records that any in-sync replica on these disks had. Among equals one without losses comes first.

Kafka's controller elects from the in-sync replicas in its metadata instead. Any of them has what
all had acknowledged, so the elected one may be shorter, or serve a divergent tail (see below). But
killed brokers may have torn logs, and an election of one of them would lose records that others
have (KIP-966).

A follower is truncated to where its log agrees with the leader's (KIP-101, KIP-279). Its records
above are its *divergent tail*: records that the leader never had, or no longer has.

Kafka: LeaderEpochFileCache.endOffsetFor, AbstractFetcherThread.getOffsetTruncationState.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

from kafkalog.errors import KafkaLogError
from kafkalog.storage_engine.format import layout, leader_epochs
from kafkalog.storage_engine.fs import files
from kafkalog.storage_engine.metadata import checkpoints

if TYPE_CHECKING:
    from kafkalog.storage_engine.broker.loader import LoadedPartition


def properties_of(root: Path) -> tuple[Mapping[str, str], str | None]:
    """Return the `meta.properties` of a broker's directory, and why they are not known, if so."""
    for name in (layout.META_PROPERTIES, layout.META_ASIDE):
        if (root / name).exists():
            try:
                return checkpoints.read_properties(root / name), None
            except (KafkaLogError, OSError) as fault:
                files.pass_on(fault)
                return {}, str(fault)
    return {}, None


def brokers_of(roots: Sequence[Path]) -> Mapping[Path, str]:
    """Return the node id of the broker that each of several directories is of; {} for one alone.

    A directory that does not say it, such as a copy, counts as a broker, by its own path.
    """
    if len(roots) < 2:
        return {}
    properties = {root: properties_of(root)[0] for root in roots}
    return {
        root: each.get("node.id") or each.get("broker.id") or str(root)
        for root, each in properties.items()
    }


class Election(NamedTuple):
    """The replica that is believed, and how the others differ."""

    leader: LoadedPartition
    lacks_committed: bool
    """Whether a broker had acknowledged records that no replica has."""
    notice: str
    """Which replica is read and why; '' if all agree and nothing is missing."""


def elect(
    replicas: Sequence[LoadedPartition],
    faults: Sequence[str] = (),
    *,
    acknowledged: int = 0,
    brokers: Mapping[Path, str] = MappingProxyType({}),
    in_sync: Collection[str] = (),
) -> Election:
    """Return which of a partition's replicas is believed; see the module.

    `faults` say why others cannot be read, and `acknowledged` is the highest high watermark of any
    broker. `brokers` says whose each root is. `in_sync` are the brokers that had every record, by
    the cluster's metadata.
    """
    leader = max(replicas, key=_rank)  # the first one among equals
    epoch, end, _ = _rank(leader)
    texts = [text for each in replicas if (text := _difference(each, leader))] + [*faults]
    if end < acknowledged:
        texts.append(
            f"a broker had acknowledged all below offset {acknowledged}, and the records from "
            f"{end} on are on none of these disks"
        )
    readable = {brokers.get(each.directory.parent) for each in replicas}
    if in_sync and readable.isdisjoint(in_sync):
        texts.append(
            f"the in-sync replicas were on the brokers {', '.join(sorted(in_sync))}, and none of "
            "them can be read here, so the last records may be missing"
        )
    why = "it is the longest of the highest leader epoch"
    if any(_rank(each)[0] < epoch for each in replicas):
        why = "it has the highest leader epoch"
    name = layout.partition_directory(leader.topic, leader.partition)
    chosen = f"{name}: {leader.directory} is read, because {why} (epoch {epoch}, log end {end})"
    return Election(leader, end < acknowledged, "; ".join([chosen, *texts]) if texts else "")


def _end(replica: LoadedPartition) -> int:
    """Return where the records end; the loader keeps the offsets of a lost end (`losses`)."""
    end = replica.state.high_watermark
    for loss in reversed(replica.lost):
        if loss.end >= end:
            end = min(end, loss.start)
    return end


def _rank(replica: LoadedPartition) -> tuple[int, int, int]:
    """Return the leader epoch, the log end and minus the number of losses."""
    end = _end(replica)
    known, _ = checkpoints.known_leader_epochs(replica.directory)
    # A leader notes its epoch at its log's end before it has a record of it.
    epochs = [epoch for epoch, start in known if start <= end]
    return max([replica.state.leader_epoch, *epochs]), end, -len(replica.lost)


def _difference(replica: LoadedPartition, leader: LoadedPartition) -> str:
    """Return what a replica has that the leader has not, or lacks; '' if they agree."""
    end, leader_end = _end(replica), _end(leader)
    agreed = leader_epochs.agreed_end(
        list(replica.leader_epochs), end, list(leader.leader_epochs), leader_end
    )
    if agreed < end:
        return (
            f"{replica.directory} has a divergent tail: its records from offset {agreed} to "
            f"{end - 1}, of leader epoch {replica.state.leader_epoch}, are not in the leader's log"
        )
    if end < leader_end:
        return f"{replica.directory} ends at offset {end}"
    return f"{replica.directory} has lost records" if replica.lost else ""
