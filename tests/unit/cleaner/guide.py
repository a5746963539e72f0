"""The cleaner's guide, its blocks of code, and the topic that its examples use."""

from __future__ import annotations

import re
from pathlib import Path

import kafkalog
from kafkalog.log import KafkaLog
from kafkalog.storage_engine.place import directory_log_of
from tests import ROOT

GUIDE = (ROOT / "docs" / "cleaner.md").read_text()


def blocks(language: str) -> list[str]:
    found = re.findall(rf"^```{language}\n(.*?)^```$", GUIDE, re.M | re.S)
    assert found
    return found


def shop(root: Path) -> KafkaLog:
    """A topic that was cleaned once, and is a bit dirty again."""
    log = kafkalog.open(root)
    log.create_topic("stock")
    for i in range(20):
        log.append("stock", [(f"item-{n}", f"{i}") for n in range(100)])
    log.clean("stock", force=True)
    log.append("stock", [(f"item-{n}", "x") for n in range(40)])
    with directory_log_of(log).transaction() as transaction:
        transaction.roll("stock", 0, 0)
        transaction.publish(0)
    log.append("stock", [("item-1", "y")])
    return log
