"""Every bad record is found, in each form of columns and each target; `test_framed_values` runs it.

The mix is drawn, the expectation is made from what was drawn, and the query starts again midway.
"""

from __future__ import annotations

import json
import random
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import kafkalog
from kafkalog.sink.upsert import DeltaUpsert, PostgresUpsert, SQLiteUpsert, Upsert
from tests.log_place import log_in
from tests.postgres_server import postgres, postgres_server, query  # noqa: F401 - fixtures
from tests.spark.sink.test_spark_writes import finish
from tests.spark.values.values_session import body, framed, given, log_of, record, spark  # noqa: F401

V1 = record("Row", ("n", "int"))
V2 = record("Row", ("n", "long"), {"name": "s", "type": "string", "default": "-"})
OTHER = record("Other", ("n", "int"))
REGISTRY = given({3: OTHER, 1: V1, 7: V2})
EVENT = {"op": "c", "after": {"n": 1}}
CAST = "try_cast(string(value) as int)"
FORMS: dict[str, dict[str, Any]] = {
    "framed": {"avro": REGISTRY, "key_type": "string"},
    "bare": {"avro": json.dumps(V1), "key_type": "string"},
    "select": {
        "select": [
            *("string(key) as key", f"{CAST} as n", "value is null as deleted"),
            f"value is not null and {CAST} is null as bad",
        ]
    },
    "keys": {"json": "n bigint", "key_json": "id string"},
    "change": {"json": "n bigint", "key_json": "id string", "envelope": "debezium"},
}


def good(form: str, n: int) -> bytes:
    """Return a value from which a row has this `n`."""
    if form == "framed":
        return framed(7, V2, {"n": n, "s": "s"}) if n % 2 else framed(1, V1, {"n": n})
    if form == "bare":
        return body(V1, {"n": n})
    if form == "select":
        return str(n).encode()
    if form == "change":
        return json.dumps({"op": "u", "after": {"n": n}}).encode()
    text = json.dumps({"n": n}).encode()
    return b"\0\0\0\0\x05" + text if n % 3 == 0 else text


def bad(form: str, n: int) -> list[bytes]:
    """Return values that make no row."""
    whole = good(form, n)
    if form == "framed":
        return [
            *(b"", b"\0\0\0\0", whole[:-1], whole + b"\0", whole[5:], b"\0\0\0\0\x09" + whole[5:]),
            *(framed(3, OTHER, {"n": n}), b"\xff" + whole[1:], b"\0\xff\xff\xff\xff" + whole[5:]),
        ]
    if form == "bare":
        return [b"", whole + b"\0", b"\0\0\0\0\x07" + whole, b"\x80", b'{"n": 1}']
    if form == "select":
        return [b"", b"x", b"1.5x", str(2**40).encode()]
    if form == "change":
        events = [{**EVENT, "op": "t"}, {**EVENT, "op": "x"}, {"op": "c", "after": None}, {"m": 1}]
        return [b"", b"null", *[json.dumps(each).encode() for each in events]]
    return [b"", b"null", b'{"n": "x"}', b'{"n": 1', b"\xff\xfe", b"[]x", b"\0\0\0\0\x05" + b"x"]


def key_of(form: str, name: str) -> bytes:
    return json.dumps({"id": name}).encode() if "key_json" in FORMS[form] else name.encode()


class Mix:
    """Drawn records of one form, and what they make."""

    def __init__(self, form: str, seed: int) -> None:
        self.form = form
        self.rows: dict[str, int] = {}
        self.bad: list[int] = []
        self._dice = random.Random(f"{form} {seed}")
        self._offset = 0

    def drawn(self, count: int) -> list[tuple[bytes, bytes | None]]:
        """Return more records."""
        found: list[tuple[bytes, bytes | None]] = []
        for _ in range(count):
            name, n = self._dice.choice("abcdef"), self._dice.randrange(1000)
            key, value = key_of(self.form, name), good(self.form, n)
            kind = self._dice.random()
            if kind < 0.35:
                value = self._dice.choice(bad(self.form, n))
            elif kind < 0.45 and "key_json" in FORMS[self.form]:
                key = self._dice.choice([b"no key", b"{}", b'{"id": null}'])
            elif kind < 0.6:
                self.rows.pop(name, None)
                found.append((key, None))
                self._offset += 1
                continue
            else:
                self.rows[name] = n
                found.append((key, value))
                self._offset += 1
                continue
            self.bad.append(self._offset)
            found.append((key, value))
            self._offset += 1
        return found


def upserts(form: str, directory: Path, conninfo: str, path: Any) -> dict[str, Upsert]:
    def arguments(target: str) -> dict[str, Any]:
        letters = f"deadletter:{form}-{target}"
        return {**FORMS[form], "on_bad_record": letters, "path": path, "name": f"q-{form}"}

    return {
        "sqlite": SQLiteUpsert(directory / "rows.db", form, **arguments("sqlite")),
        "postgres": PostgresUpsert(conninfo, f"t_{form}", **arguments("postgres")),
        "delta": DeltaUpsert(directory / f"delta-{form}", **arguments("delta")),
    }


def rows_in(target: str, form: str, session: Any, directory: Path, conninfo: str) -> dict[str, int]:
    key = "id" if "key_json" in FORMS[form] else "key"
    if target == "delta":
        return dict(session.table(f"delta.`{directory}/delta-{form}`").select(key, "n").collect())
    if target == "postgres":
        return dict(query(conninfo, f"SELECT {key}, n FROM t_{form}"))
    with closing(sqlite3.connect(directory / "rows.db")) as connection:
        return dict(connection.execute(f'SELECT {key}, n FROM "{form}"').fetchall())


def letters_in(path: Any, topic: str) -> list[tuple[str, int, str]]:
    """Return topic, offset and reason of the dead letters, in their order."""
    with kafkalog.open(path, read_only=True) as log:
        batches = list(log.read(topic, 0, 0, include_headers=True))
    found = [row for batch in batches for row in batch.to_pylist()]
    told = [{h["key"]: h["value"].decode() for h in row["headers"]} for row in found]
    prefix = "__connect.errors."
    return [
        (each[f"{prefix}topic"], int(each[f"{prefix}offset"]), each[f"{prefix}exception.message"])
        for each in told
    ]


def test_each_bad_record_is_found_in_all_forms_and_targets_across_a_restart(
    spark: Any,  # noqa: F811
    postgres: str,  # noqa: F811
    tmp_path: Path,
) -> None:
    path = log_in(tmp_path)
    mixes = {form: Mix(form, 1) for form in FORMS}

    def each(frame: Any, batch_id: int) -> None:
        for form in FORMS:
            of_form = frame.where(frame["topic"] == form)
            for upsert in upserts(form, tmp_path, postgres, path).values():
                upsert(of_form, batch_id)

    for count in (40, 25):  # each with upserts and a query of its own, as after a restart
        for form, mix in mixes.items():
            log_of(path, form, mix.drawn(count))
        stream = spark.readStream.format("kafkalog").option("subscribe", ",".join(FORMS))
        stream = stream.option("startingOffsets", "earliest").load(str(path))
        finish(stream.writeStream.foreachBatch(each).option("checkpointLocation", tmp_path / "c"))
    for form, mix in mixes.items():
        for target, upsert in upserts(form, tmp_path, postgres, path).items():
            letters = letters_in(path, f"{form}-{target}")
            assert sorted(offset for _, offset, _ in letters) == mix.bad, (form, target)
            assert {topic for topic, _, _ in letters} == {form}
            assert all(reason for _, _, reason in letters)
            assert rows_in(target, form, spark, tmp_path, postgres) == mix.rows, (form, target)
            [position] = upsert.positions().values()
            assert position.bad_records == len(mix.bad)
