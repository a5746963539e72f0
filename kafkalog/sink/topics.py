"""The topic of a write, created by the driver before any task runs, or by the commit."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from kafkalog.errors import InvalidInputError
from kafkalog.sink.columns import SinkColumns
from kafkalog.sink.options import SinkOptions
from kafkalog.sink.shared_log import engine_of, store_of
from kafkalog.storage_engine.metadata.config import TopicConfig
from kafkalog.storage_engine.metadata.state import TopicState

if TYPE_CHECKING:
    from kafkalog.storage_engine.writing.staging import NewTopic, StagedMessage

__all__ = ["new_topics", "options_without_effect", "prepare_topic", "topics_to_create"]


def prepare_topic(options: SinkOptions, columns: SinkColumns) -> None:
    """Create the log and the option's topic; raises InvalidInputError if it needs keys."""
    store = store_of(options.root)
    if options.topic is None:
        return
    known = store.state().topics.get(options.topic)
    config = options.topic_config if known is None else known.config
    if columns.key < 0 and TopicConfig.parse(config).is_compacted:
        raise InvalidInputError(
            f"topic {options.topic!r} is compacted (cleanup.policy has compact) and the rows have "
            "no column 'key': give every row a key, or create the topic with "
            "topic.cleanup.policy=delete"
        )
    if known is None:
        engine_of(options.root).create_topic(
            options.topic, options.num_partitions, options.topic_config, exist_ok=True
        )


def new_topics(options: SinkOptions) -> Mapping[str, NewTopic]:
    """Return how tasks treat missing topics; the name `*` means any topic that a row names."""
    from kafkalog.storage_engine.writing.staging import NewTopic

    if options.topic is not None:
        return {}
    return {"*": NewTopic(options.num_partitions, options.topic_config)}


def topics_to_create(
    options: SinkOptions, staged: Iterable[StagedMessage]
) -> Mapping[str, NewTopic]:
    """Return the topics that tasks have written to and the log does not have."""
    from kafkalog.storage_engine.writing.staging import NewTopic

    new = NewTopic(options.num_partitions, options.topic_config)
    names = {
        name for message in staged for name, topic_id in message.topic_ids.items() if not topic_id
    }
    return dict.fromkeys(sorted(names), new)


def options_without_effect(options: SinkOptions, topic: TopicState) -> list[str]:
    """Return the options for a new topic that differ from the existing one, with its values."""
    found = []
    real, asked = TopicConfig.parse(topic.config), TopicConfig.parse(options.topic_config)
    for option, given in sorted(options.given_for_topics.items()):
        if option == "numPartitions":
            if options.num_partitions != len(topic.partitions):
                found.append(f"{option}={options.num_partitions} (it has {len(topic.partitions)})")
            continue
        name = option.removeprefix("topic.")
        has, wanted = (getattr(config, name.replace(".", "_")) for config in (real, asked))
        if has != wanted:
            has = ",".join(sorted(has)) if isinstance(has, frozenset) else has
            found.append(f"{option}={given} (it has {has})")
    return found
