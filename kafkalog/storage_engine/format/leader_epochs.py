"""The leader epochs of a partition: (epoch, its first offset), ascending.

A consumer asks for the end of its last record's epoch, and so notices that a log was truncated. The
list must therefore be truncated with the log, at both ends.

Kafka: LeaderEpochFileCache.
"""

from __future__ import annotations

from collections.abc import Iterable

Epochs = list[tuple[int, int]]


def assigned(epochs: Epochs, epoch: int, start_offset: int) -> Epochs:
    """Return the epochs after a batch of `epoch` at `start_offset`.

    Removes epochs that are not below the new one, or begin at or above its offset: the latest batch
    is right. Kafka: LeaderEpochFileCache.assign.
    """
    if epochs and epochs[-1][0] == epoch and epochs[-1][1] <= start_offset:
        return epochs
    kept = len(epochs)
    while kept and (epochs[kept - 1][0] >= epoch or epochs[kept - 1][1] >= start_offset):
        kept -= 1
    return [*epochs[:kept], (epoch, start_offset)]


def in_order(entries: Iterable[tuple[int, int]]) -> Epochs:
    """Return the epochs that remain after assigning these one by one."""
    epochs: Epochs = []
    for epoch, start_offset in entries:
        epochs = assigned(epochs, epoch, start_offset)
    return epochs


def truncated(epochs: Epochs, end_offset: int) -> Epochs:
    """Return the epochs that begin below the end of the log.

    Kafka: LeaderEpochFileCache.truncateFromEndAsyncFlush.
    """
    return [entry for entry in epochs if entry[1] < end_offset]


def committed(entries: Epochs, high_watermark: int, epoch: int) -> Epochs:
    """Return the epochs of the committed log, from a list on disk; `epoch` is the current one.

    Omits the epochs of a commit in flight, or a dead one; the list still has the ones that they
    replace. The current epoch may begin at the high watermark: if all records are deleted.
    """
    kept = truncated(entries, high_watermark)
    if not kept and high_watermark and (epoch, high_watermark) in entries:
        kept = [(epoch, high_watermark)]
    return in_order(kept)


def trimmed(epochs: Epochs, log_start_offset: int) -> Epochs:
    """Return the epochs without those that ended at or below the log start.

    The current one begins there. Kafka: LeaderEpochFileCache.truncateFromStartAsyncFlush.
    """
    passed = [entry for entry in epochs if entry[1] <= log_start_offset]
    if not passed:
        return epochs
    return [(passed[-1][0], log_start_offset), *epochs[len(passed) :]]


def agreed_end(epochs: Epochs, end: int, leader: Epochs, leader_end: int) -> int:
    """Return the offset to which a follower's log agrees with its leader's.

    `epochs` and `end` are the follower's. The log that first ends the highest epoch of both
    decides. A log without epochs agrees up to its end. Kafka: KIP-101, KIP-279.
    """
    common = {epoch for epoch, _ in epochs} & {epoch for epoch, _ in leader}
    if not epochs or not leader:
        return min(end, leader_end)
    if not common:  # nothing is known of what lies below the leader's first epoch
        return min(end, leader[0][1])
    return min(_end_of(max(common), epochs, end), _end_of(max(common), leader, leader_end))


def _end_of(epoch: int, epochs: Epochs, end: int) -> int:
    """Return where an epoch ends. Kafka: LeaderEpochFileCache.endOffsetFor."""
    return next((start for each, start in epochs if each > epoch), end)
