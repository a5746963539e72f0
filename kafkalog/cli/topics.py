"""Topics: list, create, describe, alter, delete."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import click

from kafkalog.cli.app.arguments import TOPIC_HELP, argument, path_argument, topic_names
from kafkalog.cli.app.opened import open_readable, open_writable
from kafkalog.cli.app.verb_command import VerbCommand, Verbs, examples
from kafkalog.cli.terminal.config_text import config_text, configs
from kafkalog.cli.terminal.output import (
    counted,
    json_row,
    note,
    print_json,
    print_line,
    print_table,
)
from kafkalog.errors import KafkaLogError
from kafkalog.storage_engine.fs import files
from kafkalog.storage_engine.metadata.state import PartitionState

if TYPE_CHECKING:
    from kafkalog.storage_engine.log.log import Log
    from kafkalog.storage_engine.metadata.state import TopicState

VERBS: Final = {
    "list": ("kafkalog topics list /data/shop", "kafkalog topics list /data/shop --json"),
    "create": (
        "kafkalog topics create /data/shop prices --partitions 4",
        "kafkalog topics create /data/shop audit --config cleanup.policy=delete "
        "--config retention.ms=30d",
        "kafkalog topics create /data/shop audit --if-not-exists",
    ),
    "describe": ("kafkalog topics describe /data/shop stock --json",),
    "alter": (
        "kafkalog topics alter /data/shop stock --config min.cleanable.dirty.ratio=0.2",
        "kafkalog topics alter /data/shop stock --delete-config min.cleanable.dirty.ratio",
        "kafkalog topics alter /data/shop views --partitions 4",
    ),
    "delete": ("kafkalog topics delete /data/shop stock",),
}
"""The verbs below `topics`, each with examples."""
EXAMPLES: Final = (VERBS["list"][0], VERBS["create"][0])

_new_name_argument = argument("name", metavar="NAME", help=TOPIC_HELP)
_name_argument = argument("name", metavar="NAME", shell_complete=topic_names, help=TOPIC_HELP)
_json_option = click.option("--json", is_flag=True, help="One JSON object per topic.")
_config_option = click.option(
    "--config", multiple=True, metavar="NAME=VALUE", help="Kafka's topic configs; repeatable."
)


def application(**settings: Any) -> click.Group:
    """Return the verbs below `topics`; `settings` are those of click.Group."""
    topics = Verbs(no_args_is_help=True, **settings)
    for verb in (_list, _create, _describe, _alter, _delete):
        name = verb.__name__.strip("_")
        topics.command(name, cls=VerbCommand, epilog=examples(VERBS[name]))(verb)
    return topics


@path_argument
@_json_option
def _list(path: str, json: bool) -> None:
    """List the topics with their partitions, sizes and configs.

    A cleaning leaves gaps between offsets, so a topic may have fewer records than it has offsets.
    """
    with open_readable(path) as log:
        topics = [_listed(log, log.describe(name)) for name in log.topics()]
    if json:
        for topic in topics:
            print_json(topic)
        return
    columns = ["topic", "partitions", "offsets", "bytes", "id", "config"]
    rows = [[*(t[name] for name in columns[2:5]), config_text(t["config"])] for t in topics]
    names = [[t["topic"], len(t["partitions"])] for t in topics]
    print_table(columns, [[*name, *row] for name, row in zip(names, rows, strict=True)])


@path_argument
@_new_name_argument
@click.option(
    "--partitions", type=click.IntRange(min=1), default=1, metavar="N", help="Number of partitions."
)
@_config_option
@click.option("--if-not-exists", is_flag=True, help="Leave a topic of that name as it is.")
@_json_option
def _create(
    path: str, name: str, partitions: int, config: tuple[str, ...], if_not_exists: bool, json: bool
) -> None:
    """Create a topic, and the log if it is missing.

    cleanup.policy is compact unless --config gives another one.
    """
    with open_writable(path, create=True) as log:
        topic = log.create_topic(name, partitions, configs(config), exist_ok=if_not_exists)
    _print(_described(topic), json=json)


@path_argument
@_name_argument
@_json_option
def _describe(path: str, name: str, json: bool) -> None:
    """Show a topic's id, configs and offsets."""
    with open_readable(path) as log:
        _print(_described(log.describe(name)), json=json)


@path_argument
@_name_argument
@_config_option
@click.option(
    "--delete-config",
    multiple=True,
    metavar="NAME",
    help="A config that gets its default again; repeatable.",
)
@click.option("--partitions", type=int, metavar="N", help="Their new number; it only grows.")
@click.option(
    "--keys-may-move",
    is_flag=True,
    help="Let a compacted topic grow: a key may then have a record in two partitions.",
)
@_json_option
def _alter(
    path: str,
    name: str,
    config: tuple[str, ...],
    delete_config: tuple[str, ...],
    partitions: int | None,
    keys_may_move: bool,
    json: bool,
) -> None:
    """Set or delete configs of a topic, or add partitions; the rest stays.

    Old records stay in their partitions. Later ones go where Kafka's partitioner sends their keys
    among all partitions, so the order of a key's records is known only within each part.
    """
    from kafkalog.errors import InvalidInputError

    both = {setting.partition("=")[0].strip() for setting in config} & {*delete_config}
    if both:
        raise InvalidInputError(f"config {min(both)!r}: it is set and deleted: give one of both")
    changes: dict[str, str | None] = {**configs(config), **dict.fromkeys(delete_config)}
    if not changes and partitions is None:
        raise InvalidInputError(
            "nothing to alter: give --config name=value, --delete-config name or --partitions N"
        )
    with open_writable(path) as log:
        known = len(log.describe(name).partitions)
        topic = log.alter_topic(name, changes, partitions, keys_may_move=keys_may_move)
    if partitions is not None:
        note(
            f"{name}: keys go to {counted(partitions, 'partition')} from now on, and old records "
            f"stay where {counted(known, 'partition')} had them"
        )
    _print(_described(topic), json=json)


@path_argument
@_name_argument
@_json_option
def _delete(path: str, name: str, json: bool) -> None:
    """Delete a topic and its records; --json prints its last state."""
    with open_writable(path) as log:
        topic = _described(log.describe(name))
        log.delete_topic(name)
    if json:
        print_json(topic)


def _listed(log: Log, topic: TopicState) -> dict[str, Any]:
    described = _described(topic)
    offsets = size = 0
    for number in (each["partition"] for each in described["partitions"] if "error" not in each):
        state = topic.partitions[number]
        offsets += state.high_watermark - state.log_start_offset
        with files.ignoring(KafkaLogError):  # a loss of files is for verify to tell
            size += log.size_of(topic.name, number)
    return {**described, "offsets": offsets, "bytes": size}


def _described(topic: TopicState) -> dict[str, Any]:
    names = ("log_start_offset", "high_watermark", "last_stable_offset", "leader_epoch")
    partitions = []
    for number in topic.numbers():
        try:
            found = json_row(topic.partitions[number], *names)
        except (KafkaLogError, OSError) as fault:
            files.pass_on(fault)
            found = {**dict.fromkeys(json_row(PartitionState(), *names)), "error": str(fault)}
            note(f"{topic.name}-{number}: {fault}")
        partitions.append({"partition": number, **found})
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
    print_line(f"{topic['topic']}  id {topic['id']}  {config_text(topic['config'])}".rstrip())
    columns = ["partition", "log start", "high watermark", "last stable", "leader epoch"]
    rows = [[*each.values()][: len(columns)] for each in topic["partitions"]]
    print_table(columns, [["-" if value is None else value for value in row] for row in rows])
