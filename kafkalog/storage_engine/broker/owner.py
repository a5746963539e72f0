"""Find out whether directories belong to a broker, to nobody, or to us."""

from __future__ import annotations

import logging
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from kafkalog.errors import InvalidInputError
from kafkalog.storage_engine.broker.replicas import properties_of
from kafkalog.storage_engine.format import layout
from kafkalog.storage_engine.metadata import address, directory_signs

if TYPE_CHECKING:
    from kafkalog.storage_engine.broker.broker_directory import BrokerDirectories

_logger = logging.getLogger(__name__)
_NOTED: Final[set[Path]] = set()
"""Copies that this process has noted."""


def open_broker(roots: Sequence[Path]) -> BrokerDirectories | None:
    """Return the directories of brokers, or None for ours; several must be those of a cluster.

    A copy of a broker's partitions, which has no owner's file, is read as a stopped broker's.
    """
    with address.looking():
        copies = [root for root in roots if directory_signs.is_copy(root)]
        is_broker = [root in copies or address.is_broker_directory(root) for root in roots]
    if len(roots) > 1 and not all(is_broker):
        root = roots[is_broker.index(False)]
        directory_signs.check_is_directory(root)
        raise InvalidInputError(
            f"{root}: no Kafka broker's log directory (it has no {layout.META_PROPERTIES}, or is a "
            "log of kafkalog); several directories can only be read together if they are those of "
            f"one cluster's brokers{directory_signs.nearby(root)}"
        )
    if not is_broker[0]:
        return None
    _check_one_cluster(roots)
    from kafkalog.storage_engine.broker.broker_directory import BrokerDirectories

    return BrokerDirectories(roots, copies=copies)


def left_by_adoption(roots: Sequence[Path]) -> BrokerDirectories:
    """Return what the adoption of directories has left to their broker: Kafka's own topics."""
    from kafkalog.storage_engine.broker.broker_directory import BrokerDirectories

    return BrokerDirectories(roots, is_adopted=True)


def check_has_log(roots: Sequence[Path], creating: str = directory_signs.TO_CREATE) -> None:
    """Raise InvalidInputError if the directories have no log, and StorageError for a lost one.

    `creating` says how to create one. Opens no file. Notes once if the log is a copy.
    """
    found = open_broker(roots)
    if found is None:
        directory_signs.check_is_log(roots[0], creating)
    else:
        note_copies(found)


def note_copies(found: BrokerDirectories) -> None:
    """Log a notice for each copy among the directories, once per process."""
    for root in found.copies:
        if root not in _NOTED:
            _NOTED.add(root)
            _logger.warning(
                "%s: read as a copy of a broker's partitions, for it has neither %s nor `%s`. To "
                "write to it, run: kafkalog adopt %s",
                root,
                layout.META_PROPERTIES,
                layout.COMMIT,
                shlex.quote(str(root)),
            )


def _check_one_cluster(roots: Sequence[Path]) -> None:
    """Raise InvalidInputError for directories of two clusters; warn of those that do not say it."""
    names = []
    for root in roots if len(roots) > 1 else ():
        properties, fault = properties_of(root)
        if fault is not None:
            _logger.warning("%s; which broker's directory it is, is not known", fault)
        if cluster := properties.get("cluster.id"):
            names.append((root, cluster))
    for root, cluster in names:
        if cluster != names[0][1]:
            raise InvalidInputError(
                f"{root}: its cluster.id is {cluster}, that of {names[0][0]} is {names[0][1]}: "
                "these are log directories of two clusters; read them one by one"
            )
