"""The leader epochs of a partition: (epoch, the first offset that carries it), ascending.

A consumer asks where the epoch of its last record ended, and so finds out that a log was cut; which
is true only as long as the list is cut with the log, at both ends.

Kafka: LeaderEpochFileCache.
"""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["Epochs", "assigned", "committed", "in_order", "trimmed", "truncated"]

Epochs = list[tuple[int, int]]


def assigned(epochs: Epochs, epoch: int, start_offset: int) -> Epochs:
    """Return the epochs once a batch of `epoch` has come at `start_offset`.

    Epochs that are not below the new one, or begin at or above its offset, make way for it: the
    batch that came last is right. Kafka: LeaderEpochFileCache.assign.
    """
    if epochs and epochs[-1][0] == epoch and epochs[-1][1] <= start_offset:
        return epochs
    kept = len(epochs)
    while kept and (epochs[kept - 1][0] >= epoch or epochs[kept - 1][1] >= start_offset):
        kept -= 1
    return [*epochs[:kept], (epoch, start_offset)]


def in_order(entries: Iterable[tuple[int, int]]) -> Epochs:
    """Return the epochs that stay when these are assigned one after the other."""
    epochs: Epochs = []
    for epoch, start_offset in entries:
        epochs = assigned(epochs, epoch, start_offset)
    return epochs


def truncated(epochs: Epochs, end_offset: int) -> Epochs:
    """Return the epochs that begin below the end of the log.

    Kafka: LeaderEpochFileCache.truncateFromEndAsyncFlush.
    """
    return [entry for entry in epochs if entry[1] < end_offset]


def committed(entries: Epochs, high_watermark: int) -> Epochs:
    """Return the epochs that a list from the disk says of the committed log.

    Without those that a commit in flight, or a dead one, has added; the ones that these replace are
    still in the list.
    """
    return in_order(truncated(entries, high_watermark))


def trimmed(epochs: Epochs, log_start_offset: int) -> Epochs:
    """Return the epochs without those that ended at or below the log start.

    The one it lies in begins there. Kafka: LeaderEpochFileCache.truncateFromStartAsyncFlush.
    """
    passed = [entry for entry in epochs if entry[1] <= log_start_offset]
    if not passed:
        return epochs
    return [(passed[-1][0], log_start_offset), *epochs[len(passed) :]]
