"""CRC-32C, the checksum of Kafka's record batches, of the journal and of staged files.

It is the function of the package crc32c, taken from its extension. The package's `__init__` asks
importlib.metadata for its own version, and that loads email, zipfile and csv: a third of what a
fresh worker needs to import kafkalog.
"""

from __future__ import annotations

from importlib.machinery import PathFinder
from importlib.util import find_spec, module_from_spec
from typing import TYPE_CHECKING

__all__ = ["crc32c"]

if TYPE_CHECKING:
    from crc32c import crc32c
else:

    def _found():
        """Return the extension's function; the package's, where it is laid out in another way."""
        package = find_spec("crc32c")
        places = None if package is None else package.submodule_search_locations
        found = PathFinder.find_spec("crc32c._crc32c", places)
        if found is None or found.loader is None:
            from crc32c import crc32c

            return crc32c
        extension = module_from_spec(found)
        found.loader.exec_module(extension)
        return extension.crc32c

    crc32c = _found()
