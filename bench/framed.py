"""The processor time of framed values as columns, next to Spark's `from_avro` on bare ones.

    python -m bench.framed [--quick] [--json] [--path DIR] [--rounds N]

A million values of some 60 bytes (30,000 with --quick) are read from Parquet in one Spark session
(local[2]). They are records with a decimal, a time and a union. Ours are framed, by one schema or
by 30 versions of it in turn. `kafkalog.value_columns` decodes them into the columns of the latest.
A dict gives the schemas, so no value is read twice. The peer decodes the same values without their
frames, all of the latest version, with Spark's own function. All columns of both go nowhere. The
figure is the processor time of Spark's JVM for a million values. The two take turns in beginning a
round. The sums of what both have decoded are compared.
"""

from __future__ import annotations

import datetime
import decimal
import io
import json
import struct
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import fastavro
import psutil

import kafkalog
from bench import compare_figures, in_turn, program, report
from bench.spark import driver_pid, session
from tests.conformance.jars import PEERS

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

VERSIONS: Final = 30
DISTINCT: Final = 3_000
"""Values that are made; the others repeat them."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the benchmark and print its figures."""
    parser = program("framed", __doc__, quick="fewer values")
    parser.add_argument("--rounds", type=int, help="rounds")
    options = parser.parse_args(arguments)
    rounds = options.rounds or (1 if options.quick else 5)
    count = 30_000 if options.quick else 999_000
    jars = sorted((PEERS / "packages-4.2").glob("spark-avro*.jar"))
    if not jars:
        raise SystemExit("no Avro package of Spark here; `make peers` fetches it")
    with tempfile.TemporaryDirectory(prefix="kafkalog-bench-", dir=options.path) as directory:
        place = Path(directory)
        with session(place, conf={"spark.jars": str(jars[0])}) as spark:
            for versions, target in ((1, "<= 1.3"), (VERSIONS, "<= 1.6")):
                make(spark, place / str(versions), versions, count)
                ours, peer = measured(spark, place / str(versions), versions, count, rounds)
                claim = compare_figures(
                    f"{count:,} framed values by {versions} schema{'s' if versions > 1 else ''}",
                    ours,
                    peer,
                    unit="CPU s/million",
                    peer_name="from_avro on bare values",
                    ratio_is="of its processor time",
                    target=target,
                    is_time=True,
                )
                report(claim, as_json=options.json)


def measured(
    spark: SparkSession, place: Path, versions: int, count: int, rounds: int
) -> tuple[list[float], list[float]]:
    """Return the processor time of a million values, ours and the peer's, by round."""
    from pyspark.sql.avro.functions import from_avro

    schemas = {number: json.dumps(schema(number)) for number in range(1, versions + 1)}
    registry = kafkalog.SchemaRegistry(schemas=schemas)
    latest = schemas[versions]

    def decoded(name: str) -> DataFrame:
        frame = spark.read.parquet(str(place / name))
        if name == "framed":
            return kafkalog.value_columns(frame, avro=registry, reader=latest)
        return frame.select(from_avro("value", latest).alias("row")).select("row.*")

    sums = [
        tuple(decoded(name).selectExpr("sum(id)", "sum(price)", "count(note)").first() or ())
        for name in ("framed", "bare")
    ]
    if sums[0] != sums[1]:
        raise SystemExit(f"expected the sums {sums[1]}, found {sums[0]}")
    driver = psutil.Process(driver_pid(spark))
    found: dict[str, list[float]] = {"framed": [], "bare": []}
    for turn in range(-1, rounds):  # the first one compiles
        for name in in_turn(turn, list(found)):
            frame = decoded(name)
            before = sum(driver.cpu_times()[:2])
            frame.write.format("noop").mode("overwrite").save()
            if turn >= 0:
                took = sum(driver.cpu_times()[:2]) - before
                found[name].append(took / count * 1_000_000)
    return found["framed"], found["bare"]


def schema(version: int) -> dict[str, Any]:
    """Return a version of the schema; each has one field more than the one before."""
    money = {"type": "bytes", "logicalType": "decimal", "precision": 10, "scale": 2}
    fields: list[dict[str, Any]] = [
        {"name": "id", "type": "long"},
        {"name": "item", "type": "string"},
        {"name": "n", "type": "int"},
        {"name": "price", "type": money},
        {"name": "at", "type": {"type": "long", "logicalType": "timestamp-micros"}},
        {"name": "note", "type": ["null", "string"], "default": None},
    ]
    fields += [
        {"name": f"f{number}", "type": ["null", "int"], "default": None}
        for number in range(1, version)
    ]
    return {"type": "record", "name": "Order", "namespace": "shop", "fields": fields}


def make(spark: SparkSession, place: Path, versions: int, count: int) -> None:
    """Write the values, framed by all versions in turn, and bare ones of the latest version."""
    schemas = {n: fastavro.parse_schema(schema(n)) for n in range(1, versions + 1)}
    framed, bare = [], []
    for number in range(DISTINCT):
        row = {
            "id": number * 7919,
            "item": f"item number {number}",
            "n": number % 100,
            "price": decimal.Decimal(number % 100_000) / 100,
            "at": datetime.datetime.fromtimestamp(1_700_000_000 + number, datetime.UTC),
            "note": "a note that is a little longer" if number % 3 == 0 else None,
        }
        version = number % versions + 1
        framed.append(b"\0" + struct.pack(">I", version) + encoded(schemas[version], row))
        bare.append(encoded(schemas[versions], row))
    for name, values in (("framed", framed), ("bare", bare)):
        rows = spark.createDataFrame([(bytearray(value),) for value in values], "value binary")
        times = spark.range(count // DISTINCT)
        rows.crossJoin(times).select("value").repartition(2).write.parquet(str(place / name))


def encoded(writer: Any, row: dict[str, Any]) -> bytes:
    """Return a row as Avro."""
    stream = io.BytesIO()
    fastavro.schemaless_writer(stream, writer, row)
    return stream.getvalue()


if __name__ == "__main__":
    main()
