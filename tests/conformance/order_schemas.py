"""Thirty versions of an Avro schema, each with what evolution allows, and records of each.

The last version reads the values of all of them, by the Avro specification's "Schema Resolution".
"""

from __future__ import annotations

import datetime as dt
import json
import random
from decimal import Decimal
from typing import Any

VERSIONS = 30
MONEY = {
    "type": "record",
    "name": "Money",
    "namespace": "com.m",
    "fields": [{"name": "cents", "type": "long"}],
}
ADDRESS_SUBJECT, MONEY_SUBJECT = "com.a.Address", "com.m.Money"
KEY = {
    "type": "record",
    "name": "OrderKey",
    "namespace": "com.o",
    "fields": [{"name": "region", "type": "string"}, {"name": "no", "type": "long"}],
}


def address() -> dict[str, Any]:
    """A type that refers to another subject's."""
    return {
        "type": "record",
        "name": "Address",
        "namespace": "com.a",
        "fields": [{"name": "street", "type": "string"}, {"name": "rent", "type": "com.m.Money"}],
    }


def _field(name: str, kind: Any, **more: Any) -> dict[str, Any]:
    return {"name": name, "type": kind, **more}


def _record(name: str, fields: list[Any]) -> dict[str, Any]:
    return {"type": "record", "name": name, "fields": fields}


def _decimal(precision: int) -> dict[str, Any]:
    return {"type": "bytes", "logicalType": "decimal", "precision": precision, "scale": 2}


def version(number: int) -> dict[str, Any]:
    """Return version 1 to 30: promotions, defaults, removals, aliases, unions, enums, nesting."""
    last = number == VERSIONS
    symbols = ["NEW", "DONE", "OTHER"] if number > 12 else ["NEW", "GONE", "DONE"]
    state: dict[str, Any] = {"type": "enum", "name": "State", "symbols": symbols}
    if number > 12:
        state["default"] = "OTHER"
    item = [_field("sku", "string"), _field("n", "int" if number < 20 else "long")]
    if number > 15:
        item.append(_field("unit", "string", default="pc"))
    node = _record("Node", [_field("v", "int"), _field("next", ["null", "Node"], default=None)])
    fields = [
        _field("id", "int" if number < 8 else "long"),
        _field("price", ["int", "long", "float", "double"][min(number // 5, 3)]),
        _field("title", "string", aliases=["name"]) if number > 9 else _field("name", "string"),
        _field("state", state),
        _field("amount", _decimal(12 if last else 10)),
        _field("at", {"type": "long", "logicalType": "timestamp-micros"}),
        _field("day", {"type": "int", "logicalType": "date"}),
        _field("home", "com.a.Address"),
        _field("total", "com.m.Money"),
        _field("tree", node),
        _field("attrs", {"type": "map", "values": "int" if number < 14 else "long"}),
        _field("items", {"type": "array", "items": _record("Item", item)}),
    ]
    if number > 5:
        note = "string" if number < 11 else ["null", "string"]
        fields.append(_field("note", note, **({} if number < 11 else {"default": None})))
    if number > 17:
        fields.append(_field("checked", "boolean", default=True))
    if number % 3 == 0 and not last:
        fields.insert(number % 7, _field(f"old_{number}", ["null", "double"], default=None))
    if number % 4 == 0:
        fields.reverse()
    return {
        "type": "record",
        "name": "Order",
        "namespace": "com.o",
        "doc": f"version {number}",
        "fields": fields,
    }


def text(schema: Any) -> str:
    return json.dumps(schema)


def record(number: int, seed: int) -> dict[str, Any]:
    """Return a record of a version."""
    draw = random.Random(seed)
    moment = dt.datetime(2026, 1, 1, tzinfo=dt.UTC)
    found: dict[str, Any] = {
        "id": draw.randrange(-(2**31), 2**31),
        "price": draw.randrange(-1000, 1000),
        "name" if number <= 9 else "title": draw.choice(["", "fig", "žluť", "x" * 40]),
        "state": draw.choice(["NEW", "DONE"] + (["GONE"] if number <= 12 else ["OTHER"])),
        "amount": Decimal(draw.randrange(-(10**9), 10**9)).scaleb(-2),
        "at": moment + dt.timedelta(microseconds=draw.randrange(10**14)),
        "day": dt.date(1960, 1, 1) + dt.timedelta(days=draw.randrange(40000)),
        "home": {"street": draw.choice(["A", "B"]), "rent": {"cents": draw.randrange(10**12)}},
        "total": {"cents": draw.randrange(100)},
        "tree": {"v": 1, "next": draw.choice([None, {"v": 2, "next": None}])},
        "attrs": {draw.choice("abc"): draw.randrange(-5, 5) for _ in range(draw.randrange(3))},
        "items": [
            {"sku": "s", "n": draw.randrange(9), **({"unit": "kg"} if number > 15 else {})}
            for _ in range(draw.randrange(3))
        ],
    }
    if number > 5:
        found["note"] = draw.choice(["hello", "hello" if number < 11 else None])
    if number > 17:
        found["checked"] = draw.random() < 0.5
    if number % 3 == 0 and number != VERSIONS:
        found[f"old_{number}"] = draw.choice([None, 1.5])
    return found
