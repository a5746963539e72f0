"""Makes every call of a kernel twice: compiled, and as Python. Both must do the same."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import types
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest

import kafkalog
from tests import kernel_builds

_PACKAGE: Final = Path(kafkalog.__file__).parent
MODULES: Final = [
    ".".join(sheet.with_suffix("").relative_to(kernel_builds.ROOT).parts)
    for sheet in kernel_builds.SHEETS
]


@contextlib.contextmanager
def compared() -> Iterator[None]:
    """Let each kernel, wherever it is called from, be compared with its own source."""
    with pytest.MonkeyPatch.context() as patch:
        for name in MODULES:
            module, source = importlib.import_module(name), as_python(name)
            for kernel, python in vars(source).items():
                if hasattr(python, "__wrapped__") and hasattr(module, kernel):
                    patch.setattr(module, kernel, _both(getattr(module, kernel), python))
        yield


def as_python(name: str) -> types.ModuleType:
    """Return a kernel file as Python, even if it is compiled."""
    path = _PACKAGE.parent.joinpath(*name.split(".")).with_suffix(".py")
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "kafkalog: the kernels are not compiled")
        spec.loader.exec_module(module)
    return module


def _both(compiled: Callable[..., Any], python: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(python)
    def call(*given: Any) -> Any:
        copies: dict[int, Any] = {}
        for value in given:  # an array that is given twice stays one
            if isinstance(value, np.ndarray):
                copies.setdefault(id(value), value.copy())
        expected = python(*(copies.get(id(value), value) for value in given))
        found = compiled(*given)
        assert found == expected, f"{python.__name__}: compiled {found}, as Python {expected}"
        for value in given:
            if id(value) in copies:
                same = np.array_equal(value, copies[id(value)])
                assert same, f"{python.__name__} writes something else when it is compiled"
        return found

    return call
