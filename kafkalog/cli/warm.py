"""Compiles what is compiled at its first use, so that the next process finds it in the cache.

A small log in a temporary directory is written, cleaned and read. numba's cache, and the images of
its machine code that make later processes do without numba, lie beside the package, or in the
user's cache directory where that cannot be written; NUMBA_CACHE_DIR names another place.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Final

from kafkalog.cli.output import note, progress

EXAMPLES: Final = ("kafkalog warm",)
_CODECS: Final = ("uncompressed", "lz4", "zstd")
_NOW_MS = 1_700_000_000_000


def command() -> None:
    """Put every kernel to work once."""
    import kafkalog
    from kafkalog.storage_engine.inspection.verify import verify

    start = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="kafkalog-warm-") as directory:
        root = Path(directory, "log")
        with (
            progress("compiling", lambda: len(_CODECS)) as advance,
            kafkalog.open(root) as log,
        ):
            for codec in _CODECS:
                log.create_topic(codec, config={"compression.type": codec})
                for commit in range(2):
                    pairs = [(f"key-{number}", f"{commit}") for number in range(100)]
                    log.append(codec, [*pairs, ("key-0", None)], now_ms=_NOW_MS + commit)
                log.clean(codec, force=True, now_ms=_NOW_MS + 10)
                for _ in log.latest(codec):
                    pass
                for _ in log.read(codec, 0, include_headers=True):
                    pass
                advance(1)
        for finding in verify(root, deep=True):
            note(str(finding))
    note(f"kernels are ready after {time.perf_counter() - start:.1f} s")
