"""A real Kafka broker that serves the very files of a log of ours."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from kafkalog.storage_engine import layout
from kafkalog.storage_engine.broker.ownership import release
from kafkalog.storage_engine.clock import now_ms
from tests.peers.kafka import KafkaBroker

__all__ = ["broker_of"]


@contextmanager
def broker_of(root: Path, topics: Mapping[str, int], scratch: Path) -> Iterator[KafkaBroker]:
    """Run a broker on a copy of the log `root`, which nobody writes; `topics`: their partitions.

    It learns the topics first, stops, finds the copy under their ids in the place of what it had,
    and loads it as after a clean shutdown.
    """
    with KafkaBroker(scratch / "kafka") as broker:
        for topic, count in topics.items():
            # Nothing is deleted or cleaned while it is read.
            broker.create_topic(topic, count, {"cleanup.policy": "delete", "retention.ms": "-1"})
        broker.stop()
        place, copy = broker.log_dir, scratch / "released"
        shutil.copytree(root, copy)
        ids = {topic: _topic_id(place / f"{topic}-0") for topic in topics}
        release(
            copy, topic_ids=ids, meta_properties=place / layout.META_PROPERTIES, now_ms=now_ms()
        )
        shutil.rmtree(place)
        copy.rename(place)
        broker.start()
        yield broker


def _topic_id(directory: Path) -> str:
    lines = (directory / "partition.metadata").read_text().splitlines()
    return next(line.removeprefix("topic_id: ") for line in lines if line.startswith("topic_id"))
