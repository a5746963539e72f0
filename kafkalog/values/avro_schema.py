"""Avro schemas: the bytes of a value, and where one schema cannot be read as another.

The rules are those of the Avro specification ("Schema Resolution", "Parsing Canonical Form"). A
clash is something that Avro resolves without an error, but into other values.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

_NAMED: Final = ("record", "error", "enum", "fixed")


class AvroType:
    """A schema with full names in it, as `json.loads` gives it, and the types that it names."""

    def __init__(self, schema: Any) -> None:
        self._names: dict[str, dict[str, Any]] = {}
        self._recursive: list[str] = []
        self.tree = self._resolved(schema, "", ())

    def _resolved(self, schema: Any, space: str, inside: tuple[str, ...]) -> Any:
        if isinstance(schema, list):
            return [self._resolved(branch, space, inside) for branch in schema]
        if isinstance(schema, str):
            full = _full(schema, space)
            known = full if full in self._names else schema
            if known in inside:
                self._recursive.append(known)
            return known
        kind = schema["type"]
        if kind not in _NAMED:
            if not isinstance(kind, str):  # {"type": {"type": "long", ...}}
                return self._resolved(kind, space, inside)
            parts = {part: schema[part] for part in ("items", "values") if part in schema}
            return schema | {p: self._resolved(each, space, inside) for p, each in parts.items()}
        full = _full(schema["name"], schema.get("namespace", space))
        space = full.rpartition(".")[0]
        node = schema | {"name": full, "type": "record" if kind == "error" else kind}
        node["aliases"] = [_full(each, space) for each in schema.get("aliases", ())]
        self._names[full] = node
        if "fields" in schema:
            node["fields"] = [
                field | {"type": self._resolved(field["type"], space, (*inside, full))}
                for field in schema["fields"]
            ]
        return node

    def of(self, node: Any) -> Any:
        """Return the definition of a type that is given by its name."""
        return self._names.get(node, node) if isinstance(node, str) else node

    @property
    def recursive(self) -> str | None:
        """The name of a record that contains itself, if there is one."""
        return self._recursive[0] if self._recursive else None

    def record(self) -> Any:
        """Return the schema, or its one branch if it is a union with null."""
        if isinstance(self.tree, list):
            branches = [self.of(each) for each in self.tree if each != "null"]
            return branches[0] if len(branches) == 1 else self.tree
        return self.tree

    def bytes_form(self) -> str:
        """Return text that two schemas share if they mean the same bytes.

        It has no documentation, no defaults, no aliases and no logical types, which do not matter
        in a writer's schema.
        """
        return json.dumps(_bytes_form(self.tree), sort_keys=True)

    def fields_alike(self, same: Callable[[str], str]) -> tuple[str, str] | None:
        """Return two fields of one record whose names `same` makes equal; None without any."""
        for node in self._names.values():
            first: dict[str, str] = {}
            for name in (field["name"] for field in node.get("fields", ())):
                if same(name) in first:
                    return first[same(name)], name
                first[same(name)] = name
        return None


def _full(name: str, space: str) -> str:
    return name if "." in name or not space else f"{space}.{name}"


def _bytes_form(node: Any) -> Any:
    if isinstance(node, list):
        return [_bytes_form(branch) for branch in node]
    if isinstance(node, str):
        return node
    kept = {key: node[key] for key in ("size", "symbols") if key in node}
    kept |= {key: _bytes_form(node[key]) for key in ("items", "values") if key in node}
    if "fields" in node:
        kept["fields"] = [[field["name"], _bytes_form(field["type"])] for field in node["fields"]]
    if node["type"] in _NAMED:
        kept["name"] = node["name"]
    return {"type": node["type"], **kept} if kept else node["type"]


def is_same_record(writer: AvroType, reader: AvroType) -> bool:
    """Return whether two schemas name the same record, by the reader's aliases too.

    Spark does not compare the names: it reads a record of another name if the fields allow it.
    """
    ours, theirs = reader.record(), writer.tree
    if not _is_record(ours):
        return True
    branches = theirs if isinstance(theirs, list) else [theirs]
    return any(_is_record(each) and _have_one_name(each, ours) for each in map(writer.of, branches))


def name_of(schema: AvroType) -> str:
    """Return how errors call a schema: the name of its record, or its type."""
    node = schema.record()
    if isinstance(node, list):
        return "a union"
    return node if isinstance(node, str) else str(node.get("name", node["type"]))


def clashes(writer: AvroType, reader: AvroType) -> list[str]:
    """Return what would be read as other values, each with the name of its field.

    That is a decimal of another scale or with less room, and a time of another unit.
    """
    ours = reader.record()
    return list(_clashes((writer, reader), writer.tree, ours, "", frozenset()))


def _clashes(
    types: tuple[AvroType, AvroType], wrote: Any, reads: Any, path: str, seen: frozenset[Any]
) -> Iterator[str]:
    writer, reader = types
    wrote, reads = writer.of(wrote), reader.of(reads)
    if isinstance(wrote, list) or isinstance(reads, list):
        for one in wrote if isinstance(wrote, list) else [wrote]:
            for other in reads if isinstance(reads, list) else [reads]:
                if _are_alike(writer.of(one), reader.of(other)):
                    yield from _clashes(types, one, other, path, seen)
        return
    if not isinstance(wrote, Mapping) or not isinstance(reads, Mapping):
        return
    meant, taken = _meaning(wrote), _meaning(reads)
    if meant and taken and (meant[:2] != taken[:2] or meant[2] > taken[2]):
        yield f"{path or 'the value'} is written as {_words(wrote)} and read as {_words(reads)}"
    for part in ("items", "values"):
        if part in wrote and part in reads:
            inner = f"{path}[]"
            yield from _clashes(types, wrote[part], reads[part], inner, seen)
    names = (wrote.get("name"), reads.get("name"))
    if "fields" in wrote and "fields" in reads and names not in seen:
        written = {field["name"]: field["type"] for field in wrote["fields"]}
        for field in reads["fields"]:
            for name in (field["name"], *field.get("aliases", ())):
                if name in written:
                    inner = f"{path}.{field['name']}".lstrip(".")
                    yield from _clashes(types, written[name], field["type"], inner, seen | {names})
                    break


def _meaning(node: Mapping[str, Any]) -> tuple[str, int, int] | None:
    """Return logical type, scale and precision; None without a logical type."""
    kind = node.get("logicalType")
    if kind is None:
        return None
    if kind == "decimal":
        return kind, node.get("scale", 0), node.get("precision", 0)
    return kind, 0, 0


def _words(node: Mapping[str, Any]) -> str:
    kind = str(node["logicalType"])
    if kind == "decimal":
        return f"decimal({node.get('precision')},{node.get('scale', 0)})"
    return kind


def _is_record(node: Any) -> bool:
    return isinstance(node, Mapping) and node["type"] == "record"


def _have_one_name(wrote: Mapping[str, Any], reads: Mapping[str, Any]) -> bool:
    is_same = wrote["name"].rpartition(".")[2] == reads["name"].rpartition(".")[2]
    return is_same or wrote["name"] in reads["aliases"]


def _are_alike(wrote: Any, reads: Any) -> bool:
    """Return whether a branch of a union may be read as another one."""
    one, other = (each["type"] if isinstance(each, Mapping) else each for each in (wrote, reads))
    if one != other:
        return (one, other) in {("int", "long"), ("fixed", "bytes"), ("bytes", "fixed")}
    return one not in _NAMED or _have_one_name(wrote, reads)
