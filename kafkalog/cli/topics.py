"""Topics: list, create, describe, alter, delete."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from kafkalog.cli.app.arguments import TOPIC_HELP, LogPath, topic_names
from kafkalog.cli.app.opened import open_readable, open_writable
from kafkalog.cli.app.verb_command import VerbCommand, examples
from kafkalog.cli.terminal.output import (
    configs,
    json_row,
    print_json,
    print_line,
    print_table,
)

if TYPE_CHECKING:
    from kafkalog.storage_engine.metadata.state import TopicState

VERBS: Final = {
    "list": ("kafkalog topics list /data/shop", "kafkalog topics list /data/shop --json"),
    "create": (
        "kafkalog topics create /data/shop prices --partitions 4",
        "kafkalog topics create /data/shop audit --config cleanup.policy=delete",
    ),
    "describe": ("kafkalog topics describe /data/shop stock --json",),
    "alter": ("kafkalog topics alter /data/shop stock --config min.cleanable.dirty.ratio=0.2",),
    "delete": ("kafkalog topics delete /data/shop stock",),
}
"""The verbs below `topics`, each with examples."""
EXAMPLES: Final = (VERBS["list"][0], VERBS["create"][0])

_NewName = Annotated[str, typer.Argument(metavar="NAME", show_default=False, help=TOPIC_HELP)]
_Name = Annotated[
    str,
    typer.Argument(metavar="NAME", show_default=False, help=TOPIC_HELP, autocompletion=topic_names),
]
_Json = Annotated[bool, typer.Option("--json", help="One JSON object per topic.")]
_Config = Annotated[
    list[str] | None,
    typer.Option("--config", metavar="NAME=VALUE", help="Kafka's topic configs; repeatable."),
]


def application() -> typer.Typer:
    """Return the verbs below `topics`."""
    topics = typer.Typer(no_args_is_help=True, rich_markup_mode=None)
    for verb in (_list, _create, _describe, _alter, _delete):
        name = verb.__name__.strip("_")
        topics.command(name, cls=VerbCommand, epilog=examples(VERBS[name]))(verb)
    return topics


def _list(path: LogPath, json: _Json = False) -> None:
    """List the topics with their partitions and configs."""
    with open_readable(path) as log:
        topics = [_described(log.describe(name)) for name in log.topics()]
    if json:
        for topic in topics:
            print_json(topic)
        return
    rows = [[t["topic"], len(t["partitions"]), t["id"], _text(t["config"])] for t in topics]
    print_table(["topic", "partitions", "id", "config"], rows)


def _create(
    path: LogPath,
    name: _NewName,
    partitions: Annotated[int, typer.Option(min=1, metavar="N", help="Number of partitions.")] = 1,
    config: _Config = None,
    json: _Json = False,
) -> None:
    """Create a topic, and the log if it is missing.

    cleanup.policy is compact unless --config gives another one.
    """
    with open_writable(path, create=True) as log:
        topic = _described(log.create_topic(name, partitions, configs(config or [])))
    _print(topic, json=json)


def _describe(path: LogPath, name: _Name, json: _Json = False) -> None:
    """Show a topic's id, configs and offsets."""
    with open_readable(path) as log:
        _print(_described(log.describe(name)), json=json)


def _alter(path: LogPath, name: _Name, config: _Config = None, json: _Json = False) -> None:
    """Set configs of a topic; other configs stay."""
    from kafkalog.errors import InvalidInputError

    if not config:
        raise InvalidInputError("nothing to alter: give --config name=value")
    with open_writable(path) as log:
        _print(_described(log.alter_topic(name, configs(config))), json=json)


def _delete(path: LogPath, name: _Name, json: _Json = False) -> None:
    """Delete a topic and its records; --json prints its last state."""
    with open_writable(path) as log:
        topic = _described(log.describe(name))
        log.delete_topic(name)
    if json:
        print_json(topic)


def _described(topic: TopicState) -> dict[str, Any]:
    names = ("log_start_offset", "high_watermark", "last_stable_offset", "leader_epoch")
    partitions = [
        {"partition": number, **json_row(state, *names)} for number, state in topic.present()
    ]
    return {
        "topic": topic.name,
        "id": topic.topic_id,
        "config": dict(topic.config),
        "partitions": partitions,
    }


def _print(topic: dict[str, Any], *, json: bool) -> None:
    if json:
        print_json(topic)
        return
    print_line(f"{topic['topic']}  id {topic['id']}  {_text(topic['config'])}".rstrip())
    columns = ["partition", "log start", "high watermark", "last stable", "leader epoch"]
    print_table(columns, [list(partition.values()) for partition in topic["partitions"]])


def _text(config: dict[str, str]) -> str:
    return " ".join(f"{name}={value}" for name, value in sorted(config.items()))
