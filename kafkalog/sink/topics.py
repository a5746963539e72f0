"""The topic of a write, created by the driver before any task runs, or by the commit."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from pathlib import Path

from kafkalog.errors import InvalidInputError
from kafkalog.sink.columns import SinkColumns
from kafkalog.sink.options import SinkOptions
from kafkalog.sink.shared_log import shared_log, shared_readable
from kafkalog.storage_engine.metadata.config import TopicConfig
from kafkalog.storage_engine.metadata.state import State, TopicState
from kafkalog.storage_engine.place import check_has_log

_log = logging.getLogger("kafkalog.sink")


def prepare_topic(options: SinkOptions, columns: SinkColumns) -> None:
    """Create the log and the option's topic, with a warning.

    Raises InvalidInputError if the topic needs keys, or is missing and must not be created.
    """
    if not options.creates:
        root = options.root
        place = [root] if isinstance(root, Path) else root
        check_has_log(place, "kafkalog.open(path), or without create=false")
    state = shared_readable(options.root).state()
    if options.topic is None:
        return
    known = state.topics.get(options.topic) if options.creates else state.topic(options.topic)
    config = options.new_topic.config if known is None else known.config
    if columns.key < 0 and TopicConfig.parse(config).needs_keys:
        raise InvalidInputError(
            f"topic {options.topic!r} is compacted (cleanup.policy has compact) and the rows have "
            "no column 'key': give every row a key, or create the topic with "
            "topic.cleanup.policy=delete"
        )
    if known is None:
        new = options.new_topic
        shared_log(options.root).create_topic(
            options.topic, new.partitions, new.config, exist_ok=True
        )
        warn_of_created(options, [options.topic], state)


def warn_of_created(options: SinkOptions, names: Iterable[str], before: State) -> None:
    """Warn of topics that a write has created in a log: the name, or the path, may be a typo."""
    count = options.new_topic.partitions
    for name in sorted(names):
        _log.warning(
            "%s: topic %r is new, with %d partition%s (the topics before: %s). To let a write "
            "create no topic and no log, set create=false.",
            options.root,
            name,
            count,
            "" if count == 1 else "s",
            before.known_topics,
        )


def options_without_effect(options: SinkOptions, topic: TopicState) -> list[str]:
    """Return the options for a new topic that differ from the existing one, with its values."""
    found = []
    real, asked = TopicConfig.parse(topic.config), TopicConfig.parse(options.new_topic.config)
    for option, given in sorted(options.given_for_topics.items()):
        if option == "numPartitions":
            if options.new_topic.partitions != len(topic.partitions):
                found.append(
                    f"{option}={options.new_topic.partitions} (it has {len(topic.partitions)})"
                )
            continue
        name = option.removeprefix("topic.")
        has, wanted = (getattr(config, name.replace(".", "_")) for config in (real, asked))
        if has != wanted:
            has = ",".join(sorted(has)) if isinstance(has, frozenset) else has
            found.append(f"{option}={given} (it has {has})")
    return found
