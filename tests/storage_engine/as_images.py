"""A plugin of pytest: the kernels' tests look at images, linked without numba's dispatchers.

pytest -p tests.storage_engine.as_images tests/*/test_*kernels.py
"""

from __future__ import annotations

import importlib
import os
import tempfile
from pathlib import Path

from kafkalog.storage_engine import machine_code

MODULES = [
    "kafkalog.storage_engine.kernels",
    "kafkalog.storage_engine.lz4_frames.kernels",
    "kafkalog.storage_engine.partitioner.kernels",
    "kafkalog.cleaner.kernels",
    "kafkalog.cleaner.merge.kernels",
]


def replace_kernels() -> None:
    """Put what images link in the place of what numba does."""
    with tempfile.TemporaryDirectory() as directory:
        for name in MODULES:
            module = importlib.import_module(name)
            machine_code.save_image(name, Path(directory), machine_code.fingerprint_of(name))
            image = machine_code.find_image(name, [Path(directory)])
            assert image is not None, name
            compiled = {
                kernel
                for kernel, found in vars(module).items()
                if getattr(found, "overloads", None) and not found.targetoptions.get("forceinline")
            }
            assert set(image.names) == compiled, name  # else a process imports numba for the rest
            for kernel in image.names:
                setattr(module, kernel, getattr(image, kernel))


if not os.environ.get("NUMBA_DISABLE_JIT"):
    replace_kernels()
