"""A directory has one owner: a Kafka broker, or kafkalog (`adopt` and `release`).

A broker owns a directory that has `meta.properties`; we own one that has `commit`. Between the two
lie steps in an order such that a process may die between any of them, and no other starts to write:
see `adopt` and `release`, the modules. Whatever was under way, either one, called again, goes on.
"""

from __future__ import annotations

from kafkalog.storage_engine.broker.adopt import AdoptReport, adopt
from kafkalog.storage_engine.broker.release import Progress, ReleaseReport, release

__all__ = ["AdoptReport", "Progress", "ReleaseReport", "adopt", "release"]
