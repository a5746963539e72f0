"""The treatment of options that the source does not use; names match in any letter case."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from kafkalog.errors import InvalidInputError
from kafkalog.spark_options import OF_A_READ, are_for_both, of_a_write
from kafkalog.storage_engine.metadata.address import PATHS

INERT_INTEGERS: Final = (
    "kafkaConsumer.pollTimeoutMs",
    "fetchOffset.numRetries",
    "fetchOffset.retryIntervalMs",
)
INERT: Final = (*INERT_INTEGERS, "groupIdPrefix")
"""Options of Spark's Kafka source that tune its network client; they have no effect here."""
FORBIDDEN: Final = {
    "kafka.auto.offset.reset": (
        "set startingOffsets to earliest or latest instead: where a query goes on is kept by Spark"
    ),
    "kafka.key.deserializer": (
        "keys are delivered as bytes: deserialize them with DataFrame operations"
    ),
    "kafka.value.deserializer": (
        "values are delivered as bytes: deserialize them with DataFrame operations"
    ),
    "kafka.enable.auto.commit": "where a query goes on is kept by Spark",
    "kafka.interceptor.classes": "no Kafka client is involved",
}
"""Options that Spark's Kafka source refuses, and what to do instead."""
CLIENT_PREFIX: Final = "kafka."
_CREATE_TABLE: Final = "provider"
"""Spark adds this name, and the table's properties, to the options of CREATE TABLE."""


def check_names(options: Mapping[str, str]) -> list[str]:
    """Refuse unknown and forbidden lower-case names; return those without effect, sorted."""
    supported = {PATHS, *(name.lower() for name in OF_A_READ)}
    inert = {name.lower(): name for name in INERT}
    ignored: list[str] = []
    writes = are_for_both(options)
    for name in sorted(options):
        if name in supported or (writes and of_a_write(name)):
            continue
        if name in FORBIDDEN:
            raise InvalidInputError(
                f"Kafka option {name.removeprefix(CLIENT_PREFIX)!r} is not supported: "
                f"{FORBIDDEN[name]}"
            )
        if name in inert or name.startswith(CLIENT_PREFIX):
            ignored.append(inert.get(name, name))
        elif _CREATE_TABLE not in options:
            raise _unknown(name)
    return ignored


def _unknown(name: str) -> InvalidInputError:
    if given := of_a_write(name):
        # Spark has not said yet whether it is a read or a write.
        return InvalidInputError(
            f"option {given} is an option of a write, while subscribe, subscribePattern and assign "
            "are options of a read: leave out what does not belong here (a view that takes INSERT "
            "has subscribe and topic, and they name the same topic)"
        )
    from difflib import get_close_matches

    known = {known.lower(): known for known in (*OF_A_READ, *INERT)}
    near = [known[match] for match in get_close_matches(name, known, n=2)]
    hint = f", did you mean {' or '.join(near)}?" if near else ""
    return InvalidInputError(
        f"unknown option {name!r}{hint}; known options: {', '.join(OF_A_READ)}, "
        "and kafka.* (client options, without effect)"
    )
