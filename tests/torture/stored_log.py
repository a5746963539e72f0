"""A small log in an object store with each kind of object, and copies with one of them changed."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from kafkalog.cleaner.objects import upkeep
from kafkalog.cleaner.schedule import manager
from kafkalog.storage_engine.copying.copy import copy
from kafkalog.storage_engine.directory.directory_log import DirectoryLog
from kafkalog.storage_engine.format import layout
from kafkalog.storage_engine.object_store import object_log
from kafkalog.storage_engine.object_store.address import StoreAddress
from kafkalog.storage_engine.object_store.object_log import ObjectLog
from tests.torture.stores import Stores, memory_address
from tests.unit.storage_engine import sample_root
from tests.unit.storage_engine.sample_root import NOW_MS, Root

__all__ = ["KEYS", "TOPICS", "StoredLog", "opened"]

TOPICS: Final = ("t", "u")
"""`t` has transactions and all codecs, as a copy of a directory; `u` is compacted."""
_PLAIN: Final = {"compression.type": "uncompressed", "index.interval.bytes": "100"}
_LAST: Final = (3, 1)
"""The turn and the number of the last commit."""
_NONE: Final = (1, 1)
"""Nothing is written then, so that no snapshot comes with the last commit."""
KEYS: Final = tuple(b"k%d" % number for number in range(5))


class StoredLog:
    """The log; its objects have short names, which are the same each time it is made.

    They are `log`, `boundary`, `commit-N`, `snapshot-N`, `mixed-N`, `segment-N` and `side-N`.
    """

    def __init__(self, directory: Path) -> None:
        address = memory_address()
        log = _prepare(directory / "root", address)
        self._earlier = Stores(address)
        log.append("u", _rows(*_LAST), now_ms=NOW_MS + _LAST[0])
        self._stores = Stores(address)
        self.names: Mapping[str, str] = dict(_named(self._stores.objects))
        """The names of the objects in the store by the short ones."""

    def content(self, name: str) -> bytes:
        """Return what is in an object."""
        return self._stores.objects[self.names[name]]

    def earlier(self) -> StoreAddress:
        """Return the address of a copy of the log before its last commit."""
        return self._earlier.fresh()

    def changed(self, name: str, data: bytes | None) -> StoreAddress:
        """Return the address of a copy in which an object has other bytes, or is missing."""
        return self._stores.fresh({self.names[name]: data})


def _prepare(directory: Path, address: StoreAddress) -> ObjectLog:
    """Write all but the last commit."""
    log = object_log.ObjectLog(address)
    root = Root(directory, logs=[sample_root.varied()])
    copy(DirectoryLog(root.path, read_only=True, create=False), log, now_ms=NOW_MS)
    log.create_topic("u", 1, _PLAIN, now_ms=NOW_MS)
    for turn, number in itertools.product(range(4), range(2)):
        if (turn, number) == (2, 0):
            manager.clean(log, "u", force=True, now_ms=NOW_MS)
        if (turn, number) == (3, 0):
            upkeep.regroup_due(log, force=True, now_ms=NOW_MS)
        if (turn, number) not in (_LAST, _NONE):
            log.append("u", _rows(turn, number), now_ms=NOW_MS + turn)
    return log


def _rows(turn: int, number: int) -> list[tuple[bytes, bytes | None]]:
    keys = KEYS[(turn + number) % 2 :]
    return [(key, None if n == turn else b"%d.%d" % (turn, n)) for n, key in enumerate(keys)]


def _named(objects: Mapping[str, bytes]) -> Iterator[tuple[str, str]]:
    """Yield short names and names, in an order that does not depend on what is random in these."""
    numbers: dict[str, int] = {}
    for name in sorted(objects, key=lambda name: (name.split("/")[:2], len(objects[name]))):
        parsed = layout.parse_stored_name(name)
        if parsed is not None:
            yield f"{'snapshot' if parsed[1] else 'commit'}-{parsed[0]}", name
            continue
        kind = {".mixed": "mixed", ".log": "segment", ".side": "side"}.get(Path(name).suffix)
        if kind is None:
            yield name.removeprefix(layout.OURS), name
            continue
        numbers[kind] = numbers.get(kind, 0) + 1
        yield f"{kind}-{numbers[kind]}", name


def opened(address: StoreAddress) -> ObjectLog:
    """Open a log with the client that `short_patience` has put in place."""
    return object_log.ObjectLog(address, create=False)
