"""Make kafkalog's table of Kafka's messages from the definitions in the jars of a release.

`python -m tests.conformance.message_table` reads the jars of `.peers/broker`, each of which has the
JSON files that Kafka generates its classes from, and writes
`kafkalog/storage_engine/format/messages.json`. The table has names, types and versions alone.

Kafka: generator/src/main/java/org/apache/kafka/message (MessageSpec, FieldSpec), KIP-482.
"""

from __future__ import annotations

import json
import re
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from tests import ROOT

TABLE: Final = ROOT / "kafkalog/storage_engine/format/messages.json"
JARS: Final = ROOT / ".peers/broker"
_COORDINATORS: Final = {
    "__consumer_offsets": "group-coordinator",
    "__transaction_state": "transaction-coordinator",
    "__share_group_state": "share-coordinator",
}
"""The jar whose records a topic has."""
_FRAMED: Final = {"__cluster_metadata": "metadata", "__remote_log_metadata": "storage"}
"""The jar of records whose value says their type."""
_OTHERS: Final = (
    "ConsumerProtocolAssignment",
    "ConsumerProtocolSubscription",
    "KRaftVersionRecord",
    "LeaderChangeMessage",
    "SnapshotFooterRecord",
    "SnapshotHeaderRecord",
    "VotersRecord",
)
"""Messages of the clients' jar: what a member of a group says, and control records."""
_KNOWN: Final = {
    *("name", "type", "versions", "nullableVersions", "taggedVersions", "tag", "default", "fields"),
    *("about", "ignorable", "entityType", "mapKey", "zeroCopy"),
}
"""What a field's definition may have; anything else would change the format unseen."""
_DEFAULTS: Final[Mapping[str, Any]] = {"bool": False, "string": "", "uuid": "A" * 22}


def release(jars: Path) -> str:
    """Return the release of the jars."""
    (clients,) = jars.glob("kafka-clients-*.jar")
    return clients.stem.removeprefix("kafka-clients-")


def made(jars: Path) -> str:
    """Return the text of the table."""
    records: dict[str, dict[str, Any]] = {}
    messages: dict[str, Any] = {}
    for topic, jar in _COORDINATORS.items():
        found = {m["name"]: m for m in _definitions(jars, jar) if "apiKey" in m}
        records[topic] = {
            str(message["apiKey"]): name.removesuffix("Key")
            for name, message in sorted(found.items(), key=lambda item: item[1]["apiKey"])
            if message["type"] == "coordinator-key"
        }
        messages |= {name: _message(message) for name, message in found.items()}
    for topic, jar in _FRAMED.items():
        found = {m["name"]: m for m in _definitions(jars, jar) if m["type"] == "metadata"}
        by_key = sorted(found.values(), key=lambda message: message["apiKey"])
        records[topic] = {str(message["apiKey"]): message["name"] for message in by_key}
        messages |= {name: _message(message) for name, message in found.items()}
    for message in _definitions(jars, "clients"):
        if message["name"] in _OTHERS:
            messages[message["name"]] = _message(message)
    source = f"Apache Kafka {release(jars)}: the message definitions in its jars"
    return _text(source, records, messages)


def _definitions(jars: Path, jar: str) -> Iterator[dict[str, Any]]:
    (path,) = jars.glob(f"kafka-{jar}-[0-9]*.jar")
    with zipfile.ZipFile(path) as archive:
        for name in archive.namelist():
            if re.fullmatch(r"(common/)?(message|metadata)/\w+\.json", name):
                text = archive.read(name).decode()
                yield json.loads(re.sub(r"(?m)^\s*//.*$", "", text))


def _message(given: Mapping[str, Any]) -> dict[str, Any]:
    structs = {struct["name"]: struct["fields"] for struct in given.get("commonStructs", ())}
    return {
        "versions": given["validVersions"],
        "flexible": given["flexibleVersions"],
        "fields": [_field(field, structs) for field in given["fields"]],
    }


def _field(given: Mapping[str, Any], structs: Mapping[str, Any]) -> dict[str, Any]:
    unknown = given.keys() - _KNOWN
    assert not unknown, f"{given['name']}: {unknown} is not known"
    tagged = given.get("taggedVersions")
    versions = given.get("versions", tagged)
    assert tagged in (None, versions), f"{given['name']} is tagged in some versions only"
    kind = given["type"]
    element = kind.removeprefix("[]")
    name = given["name"]
    found = {"name": name[0].lower() + name[1:], "type": kind, "versions": versions}
    fields = given.get("fields", structs.get(element))
    if fields is not None:
        found["type"] = kind.replace(element, "struct")
    if "nullableVersions" in given:
        found["nullable"] = given["nullableVersions"]
    if tagged is not None:
        found |= {"tag": given["tag"], "default": _default(found["type"], given, fields)}
    if fields is not None:
        found["fields"] = [_field(field, structs) for field in fields]
    return found


def _default(kind: str, given: Mapping[str, Any], fields: Any) -> Any:
    """Return a field's default; JSON's null is the type's own, and the text "null" is null."""
    default = given.get("default")
    if default == "null":
        return None
    if default is None and kind == "struct":
        return {
            (name := field["name"])[0].lower() + name[1:]: _default(field["type"], field, ())
            for field in fields
        }
    if default is None:
        return [] if kind.startswith("[]") else _DEFAULTS.get(kind, 0)
    if kind == "bool":
        return str(default) == "true"
    return default if kind in ("string", "uuid") else int(default)


def _text(source: str, records: Mapping[str, Any], messages: Mapping[str, Any]) -> str:
    """Return JSON with a line for each type of record and each field."""
    lines = ["{", f'"source": {json.dumps(source)},', '"records": {']
    for place, (topic, names) in enumerate(records.items()):
        comma = "," if place + 1 < len(records) else ""
        lines.append(f"  {json.dumps(topic)}: {json.dumps(names)}{comma}")
    lines += ["},", '"messages": {']
    for place, (name, message) in enumerate(sorted(messages.items())):
        comma = "," if place + 1 < len(messages) else ""
        head = json.dumps({key: message[key] for key in ("versions", "flexible")})[:-1]
        fields = ",\n    ".join(json.dumps(field) for field in message["fields"])
        lines.append(f'  "{name}": {head}, "fields": [\n    {fields}\n  ]}}{comma}')
    return "\n".join([*lines, "}", "}"]) + "\n"


if __name__ == "__main__":
    TABLE.write_text(made(JARS))
    print(f"{TABLE.relative_to(ROOT)}: {TABLE.stat().st_size} bytes, of Kafka {release(JARS)}")
