"""An entry of a dump: a dict with `type` first, and what a dump is to print."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Final, TypeAlias

from kafkalog.storage_engine.format import layout

Entry: TypeAlias = dict[str, Any]

NUMBER_MAX: Final = layout.INT32_MAX
"""The largest `max_bytes`, which means the whole file."""


class RecordDecoder(StrEnum):
    """The topic whose records a `.log` has; it decides how keys and values are decoded."""

    OFFSETS = "offsets"
    CLUSTER_METADATA = "cluster-metadata"
    TRANSACTION_LOG = "transaction-log"
    SHARE_GROUP_STATE = "share-group-state"
    REMOTE_LOG_METADATA = "remote-log-metadata"


@dataclass(frozen=True, slots=True)
class DumpOptions:
    """Choose what a dump prints; the names are those of Kafka's options.

    `deep_iteration` prints records too, `print_data_log` with their keys and values. For an index
    `verify_index_only` yields findings alone. `index_sanity_check` looks at its size and its last
    entry. `max_bytes` counts from the beginning of a `.log`. A `decoder` prints records with keys
    and values as the fields of Kafka's messages.
    """

    print_data_log: bool = False
    deep_iteration: bool = False
    verify_index_only: bool = False
    index_sanity_check: bool = False
    max_bytes: int = NUMBER_MAX
    decoder: RecordDecoder | None = None

    @property
    def is_deep(self) -> bool:
        """Whether records are decoded."""
        return self.deep_iteration or self.print_data_log or self.decoder is not None


def finding(path: Path, kind: str, position: int, expected: object, found: object) -> Entry:
    """Return the entry for a problem at a byte of a file."""
    return {
        "type": "finding",
        "kind": kind,
        "path": str(path),
        "position": position,
        "expected": expected,
        "found": found,
    }


def is_damage(entry: Entry) -> bool:
    """Return whether an entry reports damage; gaps from cleaning and preallocated zeros do not."""
    if entry.get("isDecoded") is False:
        return True
    return entry["type"] == "finding" and entry["kind"] not in {"gap", "preallocated"}
