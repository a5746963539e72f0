"""A group of consumers, as Kafka's group coordinator knows it, and its positions.

Kafka: Group.GroupType, OffsetAndMetadata, ShareGroupOffset.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum


class GroupType(StrEnum):
    """How the members of a group share its partitions.

    A *simple* group only commits positions, and never had a member. Kafka lists it as a classic
    one. Kafka: Group.GroupType, KIP-848, KIP-932, KIP-1071.
    """

    SIMPLE = "simple"
    CLASSIC = "classic"
    CONSUMER = "consumer"
    SHARE = "share"
    STREAMS = "streams"


@dataclass(frozen=True, slots=True)
class GroupPosition:
    """The offset from which a group continues in a partition.

    `offset` is that of the next record, or a share group's start offset. `end` is the partition's
    high watermark, or None if the partition is not here. Times are epoch ms, or None if the record
    does not have them. Only commits of old consumers have an `expire_timestamp`. All others expire
    by the broker's own config.
    """

    topic: str
    partition: int
    offset: int
    end: int | None
    leader_epoch: int | None = None
    commit_timestamp: int | None = None
    expire_timestamp: int | None = None
    metadata: str = ""
    delivered: int | None = None
    """Of a share group: the records from the start offset on whose delivery is complete."""

    @property
    def lag(self) -> int | None:
        """The records from the position to the end; None where the end is not known.

        It is below 0 where the log ends before the position, as in kafka-consumer-groups: records
        that the group has read are not here.
        """
        if self.end is None:
            return None
        return self.end - self.offset - (self.delivered or 0)


@dataclass(slots=True)
class ConsumerGroup:
    """A group: its type, what its members speak, how many there are, and its positions."""

    name: str
    type: GroupType = GroupType.SIMPLE
    protocol: str | None = None
    """The protocol type of a classic group: `consumer`, `connect` and others."""
    members: int = 0
    positions: list[GroupPosition] = field(default_factory=list)
    """By topic and partition."""

    @property
    def lag(self) -> int | None:
        """The sum over the positions whose end is known; None without one."""
        known = [position.lag for position in self.positions if position.lag is not None]
        return sum(known) if known else None

    @property
    def last_commit(self) -> int | None:
        """The time of the last commit, epoch ms."""
        times = [p.commit_timestamp for p in self.positions if p.commit_timestamp is not None]
        return max(times, default=None)
