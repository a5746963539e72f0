"""The broker that the tests of this directory share."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.conformance.kafka import KafkaBroker, fault
from tests.schema_registry_server import schema_registry  # noqa: F401 - a fixture


@pytest.fixture(scope="session")
def peers() -> None:
    """Skip where there is no Kafka, unless this is CI, where there has to be one."""
    reason = fault()
    if reason and os.environ.get("CI"):
        pytest.fail(reason)
    if reason:
        pytest.skip(reason)


@pytest.fixture(scope="session")
def kafka(peers: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[KafkaBroker]:
    """Yield a running broker; a test that stops it starts it again."""
    with KafkaBroker(tmp_path_factory.mktemp("kafka")) as broker:
        yield broker
