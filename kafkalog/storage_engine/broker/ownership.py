"""A directory has one owner: a Kafka broker, or kafkalog (`adopt` and `release`).

A broker owns a directory with `meta.properties`; we own one with `commit`. The steps in between
have an order that permits the process to die anywhere, without another one starting to write; see
the modules `adopt` and `release`. A repeated call of either continues the work.
"""

from __future__ import annotations

from kafkalog.storage_engine.broker.adopt import AdoptReport, adopt
from kafkalog.storage_engine.broker.release import Progress, ReleaseReport, release

__all__ = ["AdoptReport", "Progress", "ReleaseReport", "adopt", "release"]
