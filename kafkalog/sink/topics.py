"""The topic of a write, created by the driver before any task runs, or by the commit."""

from __future__ import annotations

from kafkalog.errors import InvalidInputError
from kafkalog.sink.columns import SinkColumns
from kafkalog.sink.options import SinkOptions
from kafkalog.sink.shared_log import shared_log, shared_readable
from kafkalog.storage_engine.metadata.config import TopicConfig
from kafkalog.storage_engine.metadata.state import TopicState


def prepare_topic(options: SinkOptions, columns: SinkColumns) -> None:
    """Create the log and the option's topic; raises InvalidInputError if it needs keys."""
    state = shared_readable(options.root).state()
    if options.topic is None:
        return
    known = state.topics.get(options.topic)
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
