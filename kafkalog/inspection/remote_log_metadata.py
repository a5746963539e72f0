"""Write a record of `__remote_log_metadata` as kafka-dump-log does: as Java's toString has it.

Kafka: RemoteLogSegmentMetadata, RemoteLogSegmentMetadataUpdate, RemotePartitionDeleteMetadata and
RemoteLogSegmentMetadataSnapshot (toString), RemoteLogSegmentState, RemotePartitionDeleteState.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

_TAIL: Final = (
    "segmentLeaderEpochs={segmentLeaderEpochs}, segmentSizeInBytes={segmentSizeInBytes}, "
    "customMetadata={customMetadata}, state={remoteLogSegmentState}, txnIdxEmpty={txnIndexEmpty}}}"
)
_LINES: Final = {
    "REMOTE_LOG_SEGMENT_METADATA_RECORD": (
        "RemoteLogSegmentMetadata{{remoteLogSegmentId={remoteLogSegmentId}, "
        "startOffset={startOffset}, endOffset={endOffset}, brokerId={brokerId}, "
        f"maxTimestampMs={{maxTimestampMs}}, eventTimestampMs={{eventTimestampMs}}, {_TAIL}"
    ),
    "REMOTE_LOG_SEGMENT_METADATA_UPDATE_RECORD": (
        "RemoteLogSegmentMetadataUpdate{{remoteLogSegmentId={remoteLogSegmentId}, "
        "customMetadata={customMetadata}, state={remoteLogSegmentState}, "
        "eventTimestampMs={eventTimestampMs}, brokerId={brokerId}}}"
    ),
    "REMOTE_PARTITION_DELETE_METADATA_RECORD": (
        "RemotePartitionDeleteMetadata{{topicPartition={topicIdPartition}, "
        "state={remotePartitionDeleteState}, eventTimestampMs={eventTimestampMs}, "
        "brokerId={brokerId}}}"
    ),
    "REMOTE_LOG_SEGMENT_METADATA_SNAPSHOT_RECORD": (
        "RemoteLogSegmentMetadataSnapshot{{segmentId={segmentId}, startOffset={startOffset}, "
        f"endOffset={{endOffset}}, maxTimestampMs={{maxTimestampMs}}, {_TAIL}"
    ),
}
_STATES: Final = {
    "remoteLogSegmentState": (
        "COPY_SEGMENT_STARTED",
        "COPY_SEGMENT_FINISHED",
        "DELETE_SEGMENT_STARTED",
        "DELETE_SEGMENT_FINISHED",
    ),
    "remotePartitionDeleteState": (
        "DELETE_PARTITION_MARKED",
        "DELETE_PARTITION_STARTED",
        "DELETE_PARTITION_FINISHED",
    ),
}


def remote_log_text(payload: Mapping[str, Any]) -> str | None:
    """Return the text of a decoded record; None for one of another topic."""
    line = _LINES.get(str(payload.get("type")))
    if line is None:
        return None
    fields = {"txnIndexEmpty": False, **payload["data"]}
    return line.format_map({name: _text(name, value) for name, value in fields.items()})


def _text(name: str, value: Any) -> str:
    match name:
        case "remoteLogSegmentId":
            place = _partition(value["topicIdPartition"])
            return f"RemoteLogSegmentId{{topicIdPartition={place}, id={value['id']}}}"
        case "topicIdPartition":
            return _partition(value)
        case "segmentLeaderEpochs":
            starts = {each["leaderEpoch"]: each["offset"] for each in value}
            return f"{{{', '.join(f'{epoch}={starts[epoch]}' for epoch in sorted(starts))}}}"
        case "customMetadata":
            size = "" if value is None else f"[CustomMetadata{{{len(value)} bytes}}]"
            return f"Optional{size or '.empty'}"
        case "txnIndexEmpty":
            return str(value).lower()
        case "remoteLogSegmentState" | "remotePartitionDeleteState":
            known = _STATES[name]
            return known[value] if 0 <= value < len(known) else str(value)
    return str(value)


def _partition(value: Mapping[str, Any]) -> str:
    return f"{value['id']}:{value['name']}-{value['partition']}"
