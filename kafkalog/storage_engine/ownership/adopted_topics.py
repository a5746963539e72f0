"""The topics that a broker's cluster knows, kept while its directory is ours.

A broker knows a topic by its id. When it gets the directory back, it puts aside topics that were
created here since the adoption, and creates topics again that were deleted here. Both are reported
by `release`, as are partitions that were added here. Each line of the file has a topic, its id and
its number of partitions; `-` stands for the id of a topic that had none. A log without the file was
adopted by an earlier release of kafkalog, or never.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from kafkalog.errors import KafkaLogError
from kafkalog.storage_engine.broker import metadata_log
from kafkalog.storage_engine.format import layout
from kafkalog.storage_engine.fs import files
from kafkalog.storage_engine.metadata.state import State

WITHOUT_ID: Final = "-"
_SHOWN = 20
_COUNT: Final = re.compile(r"[0-9]{1,10}")


def write_adopted_topics(root: Path, ids: Mapping[str, str], state: State) -> None:
    """Write the topic ids that the broker's cluster knows; `state` has the topics.

    `WITHOUT_ID` is that of a topic without one.
    """
    lines = [
        f"{topic} {topic_id} {len(state.topics[topic].partitions)}\n"
        for topic, topic_id in sorted(ids.items())
    ]
    files.write_atomically(root / layout.ADOPTED_TOPICS, "".join(lines).encode())


def _read(root: Path) -> dict[str, tuple[str, int]] | None:
    """Return {topic: (id, partitions)}; None without the file. Skips malformed lines."""
    try:
        lines = files.read_file(root / layout.ADOPTED_TOPICS).decode(errors="replace").splitlines()
    except FileNotFoundError:
        return None
    rows = [tokens for line in lines if len(tokens := line.split()) == 3]
    return {topic: (topic_id, int(n)) for topic, topic_id, n in rows if _COUNT.fullmatch(n)}


def differences(root: Path, state: State, given: Mapping[str, str]) -> list[str]:
    """Report the topics that the broker does not know, or that it will create again.

    `given` has the ids that the release gives to topics: those of the cluster.
    """
    adopted = _read(root)
    unnamed = {name for name, (topic_id, _) in (adopted or {}).items() if topic_id == WITHOUT_ID}
    try:
        cluster = {t.topic_id: t.partitions for t in metadata_log.read_topics(root).values()}
    except (KafkaLogError, OSError) as raised:
        files.pass_on(raised)
        cluster = {}
    ids = {name: given.get(name, topic.topic_id) for name, topic in state.topics.items()}
    if adopted is None and not cluster:
        if ids.keys() <= given.keys():
            return []
        return [
            "a topic that was created here since the adoption is unknown to the broker, which "
            "renames its directories to -stray: create it there and give --topic-ids; one that was "
            "deleted here comes back empty unless it is deleted there"
        ]
    adopted = {name: entry for name, entry in (adopted or {}).items() if name not in unnamed}
    known = cluster or dict(adopted.values())
    notices = [
        f"the broker knows {known[ids[name]]} of the {len(topic.partitions)} partitions of the "
        f"topic {name}, and renames the directories of those added here to -stray: copy their "
        "records to another topic first"
        for name, topic in sorted(state.topics.items())
        if len(topic.partitions) > known.get(ids[name], layout.PARTITIONS_MAX)
    ]
    unknown = sorted(name for name in ids.keys() - given.keys() if ids[name] not in known)
    without_id = [name for name in unknown if name in unnamed and not cluster]
    if without_id:
        notices.append(
            f"{_listed(without_id)} had no id at the adoption: a broker without topic ids (before "
            "Kafka 2.8) takes them as they are; another one renames the directories to -stray, "
            "unless --topic-ids gives it those of its cluster"
        )
    created = [name for name in unknown if name not in without_id]
    if created:
        notices.append(
            f"the broker does not know {_listed(created)}, and renames the directories to -stray: "
            "create them there and give --topic-ids"
        )
    gone = {topic_id: name for name, (topic_id, _) in adopted.items()}
    gone |= {t.topic_id: t.name for t in state.deleting.values() if t.topic_id in known}
    if cluster:
        gone = {topic_id: name for topic_id, name in gone.items() if topic_id in cluster}
    deleted = sorted(gone[topic_id] for topic_id in gone.keys() - set(ids.values()))
    if deleted:
        notices.append(
            f"{_listed(deleted)} deleted here will come back empty, unless deleted there: delete "
            "them with kafka-topics"
        )
    return notices


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"the topics {', '.join(names[:_SHOWN])}{more}"
