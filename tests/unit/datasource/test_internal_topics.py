"""A pattern never reads the topics that Kafka keeps for itself; their names do."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.datasource.logs import read_batch
from tests.unit.datasource.streaming_query import StreamingQuery
from tests.unit.storage_engine.broker_root import BrokerRoot

INTERNAL = ("__consumer_offsets", "__transaction_state", "__share_group_state")
ORDINARY = ("t", "__consumer_offsets_of_mine", "_schemas")


@pytest.fixture(params=[*INTERNAL, "all"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    broker = BrokerRoot(tmp_path / "kafka-logs")
    for number, name in enumerate(ORDINARY):
        broker.partition(f"{name}-0", bases=(0,), end=10, topic_id=f"{number}" * 21 + "Q")
    for number, name in enumerate(INTERNAL if request.param == "all" else [request.param]):
        broker.partition(f"{name}-0", bases=(0,), end=20, topic_id=f"{number}" * 21 + "A")
    return broker.path


@pytest.mark.parametrize(
    ("pattern", "found"),
    [(".*", ORDINARY), ("__.*", ORDINARY[1:2]), ("_", ORDINARY[1:]), ("state|t$", ("t",))],
)
def test_a_pattern_reads_no_internal_topic(
    root: Path, pattern: str, found: tuple[str, ...]
) -> None:
    rows = read_batch(root, subscribePattern=pattern)
    assert {row["topic"] for row in rows} == set(found)
    assert len(rows) == 10 * len(found)
    streaming = StreamingQuery(root, {"subscribePattern": pattern, "startingOffsets": "earliest"})
    streaming.start()
    assert {row["topic"] for row in streaming.drain()} == set(found)


def test_an_internal_topic_is_read_by_its_name(root: Path) -> None:
    (name, *_) = (name for name in INTERNAL if (root / f"{name}-0").exists())
    assert len(read_batch(root, subscribe=name)) == 20
