"""Decode the records of Kafka's own topics, and its control records, for a dump.

Keys and values become the fields of Kafka's messages, under the names that kafka-dump-log prints. A
record of an unknown type has a sentence in place of its key. One that does not decode, which is
damage, has it too. Records of the metadata of the cluster, and of tiered storage, have no keys, and
the sentence in place of the value.

Kafka: DumpLogSegments (OffsetsMessageParser, TransactionLogMessageParser,
ClusterMetadataLogMessageParser, ShareGroupStateMessageParser, RemoteMetadataLogMessageParser),
ControlRecordUtils.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

from kafkalog.inspection.dump_entry import RecordDecoder
from kafkalog.storage_engine.format import layout
from kafkalog.storage_engine.format.message import (
    Message,
    read_key,
    read_message,
    read_metadata,
    read_value,
    read_versioned,
)

_TOPICS: Final = {
    RecordDecoder.OFFSETS: layout.GROUPS_TOPIC,
    RecordDecoder.TRANSACTION_LOG: layout.TRANSACTIONS_TOPIC,
    RecordDecoder.SHARE_GROUP_STATE: layout.SHARE_STATE_TOPIC,
    RecordDecoder.CLUSTER_METADATA: layout.METADATA_TOPIC,
    RecordDecoder.REMOTE_LOG_METADATA: layout.REMOTE_LOG_TOPIC,
}
_WITHOUT_KEYS: Final = {RecordDecoder.CLUSTER_METADATA, RecordDecoder.REMOTE_LOG_METADATA}
_CONTROLS: Final = {
    "LEADER_CHANGE": ("LeaderChange", "LeaderChangeMessage"),
    "SNAPSHOT_HEADER": ("SnapshotHeader", "SnapshotHeaderRecord"),
    "SNAPSHOT_FOOTER": ("SnapshotFooter", "SnapshotFooterRecord"),
    "KRAFT_VERSION": ("KRaftVersion", "KRaftVersionRecord"),
    "KRAFT_VOTERS": ("KRaftVoters", "VotersRecord"),
}
_CONSUMER_PROTOCOL: Final = "consumer"
_MEMBER_FIELDS: Final = {
    "subscription": "ConsumerProtocolSubscription",
    "assignment": "ConsumerProtocolAssignment",
}
_WORD_START: Final = re.compile(r"(?<!^)(?=[A-Z])")


def decoded_record(
    decoder: RecordDecoder, offset: int, key: bytes | None, value: bytes | None
) -> Mapping[str, Any]:
    """Return the `key` and the `payload` of a record; a tombstone's payload is null, as None.

    Returns `isDecoded`, which is false, for one that does not decode.
    """
    topic = _TOPICS[decoder]
    if decoder in _WITHOUT_KEYS:
        return _framed(topic, offset, value)
    try:
        if key is None:
            raise ValueError("expected a key, found null")
        number, name, fields = read_key(topic, key)
        if name is None:
            return {"key": f"Unknown record type {number} at offset {offset}, skipping."}
        found: Message = {"key": {"type": str(number), "data": fields}, "payload": None}
        if value is not None:
            version, message = read_value(name, value)
            if name == "GroupMetadata":
                _decode_members(message)
            found["payload"] = {"version": str(version), "data": message}
    except ValueError as fault:
        return {"key": f"Error at offset {offset}, skipping. {fault}", "isDecoded": False}
    return found


def _framed(topic: str, offset: int, value: bytes | None) -> Mapping[str, Any]:
    place = offset if topic == layout.METADATA_TOPIC else f"offset {offset}"
    try:
        if value is None:
            raise ValueError("expected a value, found null")
        number, name, version, message = read_metadata(value, topic)
    except ValueError as fault:
        return {"payload": f"Error at {place}, skipping. {fault}", "isDecoded": False}
    if name is None:
        return {"payload": f"Error at {place}, skipping. Unknown metadata record type {number}"}
    kind = _WORD_START.sub("_", name).upper()
    return {"payload": {"type": kind, "version": version, "data": message}}


def _decode_members(message: Message) -> None:
    """Replace what each member of a classic group says by its fields, where it is Kafka's own."""
    if message["protocolType"] != _CONSUMER_PROTOCOL:
        return
    for member in message["members"]:
        for field, name in _MEMBER_FIELDS.items():
            try:
                member[field] = read_versioned(name, member[field])[1]
            except ValueError:
                continue  # as Kafka's tool does


def decoded_control(name: str, value: bytes | None) -> Mapping[str, Message] | None:
    """Return the message of a control record by Kafka's name; None for another type, or damage."""
    if name not in _CONTROLS or value is None:
        return None
    title, message = _CONTROLS[name]
    try:
        return {title: read_message(message, 0, value)[0]}
    except ValueError:
        return None
