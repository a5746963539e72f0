"""Format the entries of `dump` as lines; Kafka's tool prints the same for its own files.

Kafka: DumpLogSegments.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kafkalog.inspection.dump_entry import Entry
from kafkalog.inspection.kafka_json import kafka_json
from kafkalog.inspection.remote_log_metadata import remote_log_text


def line(entry: Entry, encode: Callable[[bytes], str]) -> str:
    """Return an entry's line; `encode` turns keys and values into text."""
    kind = entry["type"]
    if kind in ("batch", "message"):
        return _batch(entry)
    if kind == "record":
        return _record(entry, encode)
    if kind == "finding":
        return _finding(entry)
    if kind == "log":
        return f"Log starting offset: {entry['startOffset']}"
    if kind == "metadata snapshot":
        return f"Snapshot end offset: {entry['endOffset']}, epoch: {entry['epoch']}"
    if kind == "empty index":
        return f"{entry['path']} is empty."
    if kind == "sanity check":
        return f"{entry['path']} passed sanity check."
    if kind == "properties":
        return "\n".join(f"{name}: {entry[name]}" for name in entry if name != "type")
    if kind == "commit":
        change = json.dumps(entry["change"], separators=(",", ":"))
        shown = {name: entry[name] for name in ("number", "position", "size", "isPublished")}
        return f"{_pairs(shown)} {change}"
    return _pairs({name: value for name, value in entry.items() if name != "type"}, entry["type"])


def heading(entry: Entry) -> str:
    """Return the heading of findings of one kind in one file; '' for a kind without a heading."""
    titles = {
        "index mismatch": "Mismatches in :{path}",
        "time mismatch": "Found timestamp mismatch in :{path}",
        "time order": "Found out of order timestamp in :{path}",
        "time offset": "The following indexed offsets are not found in :{path}",
        "gap": "Non-consecutive offsets in {path}",
    }
    return titles.get(entry["kind"], "").format(path=Path(entry["path"]).absolute())


def _finding(entry: Entry) -> str:
    match entry["kind"]:
        case "index mismatch":
            return f"  Index offset: {entry['indexOffset']}, log offset: {entry['logOffset']}"
        case "time mismatch":
            times = entry["indexTimestamp"], entry["logTimestamp"]
            return f"  Index timestamp: {times[0]}, log timestamp: {times[1]}"
        case "time order" if "previousTimestamp" in entry:
            times = entry["indexTimestamp"], entry["previousTimestamp"]
            return f"  Index timestamp: {times[0]}, Previously indexed timestamp: {times[1]}"
        case "time offset":
            return f"Indexed offset: {entry['indexOffset']}, found log offset: {entry['logOffset']}"
        case "gap":
            return f"  {entry['before']} is followed by {entry['offset']}"
        case "trailing bytes" | "preallocated":
            name = Path(entry["path"]).name
            return f"Found {entry['size']} invalid bytes at the end of {name}"
    return (
        f"{entry['path']}: at byte {entry['position']}: expected {entry['expected']}, "
        f"found {entry['found']}"
    )


def _batch(entry: Entry) -> str:
    skipped = {"type", "timestampType", "maxTimestamp"}
    words = []
    for name, value in entry.items():
        if name == "timestampType":
            words.append(f"{value}: {entry['maxTimestamp']}")
        elif name == "deleteHorizonMs":
            words.append(f"{name}: {_optional(value)}")
        elif name not in skipped:
            words.append(f"{name}: {_value(value)}")
    return " ".join(words)


def _record(entry: Entry, encode: Callable[[bytes], str]) -> str:
    words = [
        f"| offset: {entry['offset']}",
        f"{entry['timestampType']}: {entry['timestamp']}",
        f"keySize: {entry['keySize']}",
        f"valueSize: {entry['valueSize']}",
    ]
    if "sequence" in entry:
        words.append(f"sequence: {entry['sequence']}")
        words.append(f"headerKeys: [{','.join(entry['headerKeys'])}]")
    if "crc" in entry:
        words.append(f"isValid: {_value(entry['isvalid'])} crc: {entry['crc']}")
    for name in ("endTxnMarker", "coordinatorEpoch", "controlType"):
        if name in entry:
            words.append(f"{name}: {entry[name]}")
    for name, message in entry.get("control", {}).items():
        colon = ":" if name == "LeaderChange" else ""
        words.append(f"{name}{colon} {kafka_json(message)}")
    for name in ("key", "payload"):
        value = entry.get(name)
        if isinstance(value, bytes):
            words.append(f"{name}: {encode(value)}")
        elif value is not None:
            words.append(f"{name}: {_fields(value)}")
        elif name == "payload" and isinstance(entry.get("key"), dict):
            words.append(f"{name}: <DELETE>")
    return " ".join(words)


def _fields(value: Any) -> str:
    """Write a decoded key or value; a sentence stands for one that is not known."""
    return value if isinstance(value, str) else remote_log_text(value) or kafka_json(value)


def _pairs(entry: Entry, kind: str = "") -> str:
    if kind == "producer":
        entry = entry | {"currentTxnFirstOffset": _optional(entry["currentTxnFirstOffset"])}
    return " ".join(f"{name}: {_value(value)}" for name, value in entry.items())


def _optional(value: int | None) -> str:
    """Write an optional number as Java does."""
    return "OptionalLong.empty" if value is None else f"OptionalLong[{value}]"


def _value(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
