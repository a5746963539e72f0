"""What all tests of the programs share: each function has its turn every third day.

The programs themselves run each day (`make torture-quick`). So do the tests with the mark
`everyday`, which are of the library.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.day import todays


@pytest.fixture(autouse=True)
def heard() -> Iterator[None]:
    """Let what a program silences, here or in a fixture of a whole file, be heard again."""
    yield
    logging.disable(logging.NOTSET)
    logging.getLogger("kafkalog").setLevel(logging.NOTSET)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the functions of other days, unless this folder or a part of it is named."""
    here = Path(__file__).parent
    asked = [config.invocation_params.dir / word.partition("::")[0] for word in config.args]
    if config.option.keyword or any(here in (path, *path.parents) for path in asked):
        return
    ours = [item for item in items if here in item.path.parents]
    names = dict.fromkeys(
        item.nodeid.partition("[")[0] for item in ours if not item.get_closest_marker("everyday")
    )
    left_out = {*names} - {*todays(names, 3)}
    others = [item for item in items if item.nodeid.partition("[")[0] in left_out]
    items[:] = [item for item in items if item.nodeid.partition("[")[0] not in left_out]
    config.hook.pytest_deselected(items=others)
