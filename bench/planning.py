"""Planning a read of many small topics, next to Spark's time for as many empty tasks.

    python -m bench.planning [--json] [--quick] [--path DIR] [--rounds N]

200 topics of two partitions, a record in each, are read by `subscribePattern`: loaded, planned, and
run into Spark's `noop` sink, as one task for each of the 400 partitions. The peer is a source in
Python with as many tasks, which plans and reads nothing. Both run in one session (local[2]), in
turn. Memory is that of all processes, which both share. 20 topics with --quick.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
from pyspark.sql.types import StructType

import kafkalog
from bench import compare_figures, in_turn, program, report
from bench.memory import peak_of_tree
from bench.spark import session
from kafkalog.datasource.columns import spark_schema

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

PARTITIONS: Final = 2
NOW_MS: Final = 1_700_000_000_000


class _Empty(DataSourceReader):
    def __init__(self, count: int) -> None:
        self.count = count

    def partitions(self) -> list[InputPartition]:
        return [InputPartition(number) for number in range(self.count)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return iter(())


class EmptyTasks(DataSource):
    """A source of `tasks` tasks without rows."""

    @classmethod
    def name(cls) -> str:
        """Return its name for Spark."""
        return "empty_tasks"

    def schema(self) -> StructType:
        """Return the columns of a log."""
        return spark_schema(include_headers=False)

    def reader(self, schema: StructType) -> DataSourceReader:
        """Return the reader."""
        return _Empty(int(self.options["tasks"]))


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the benchmark and print its figures."""
    parser = program("planning", __doc__, quick="fewer topics")
    parser.add_argument("--rounds", type=int, help="rounds")
    options = parser.parse_args(arguments)
    topics = 20 if options.quick else 200
    rounds = options.rounds or (2 if options.quick else 7)
    tasks = topics * PARTITIONS
    with tempfile.TemporaryDirectory(prefix="kafkalog-bench-", dir=options.path) as directory:
        root = Path(directory, "log")
        build(root, topics)
        with session(Path(directory)) as spark:
            spark.dataSource.register(EmptyTasks)
            sides: dict[str, Callable[[], DataFrame]] = {
                "ours": lambda: (
                    spark.read.format("kafkalog")
                    .options(path=str(root), subscribePattern="topic-.*")
                    .load()
                ),
                "peer": lambda: spark.read.format("empty_tasks").options(tasks=tasks).load(),
            }
            if sides["ours"]().count() != tasks:
                raise SystemExit("the read has other rows than were written")
            seconds: dict[str, list[float]] = {name: [] for name in sides}
            mib = dict.fromkeys(sides, 0.0)
            for turn in range(1 + rounds):  # the first one warms up
                for name, load in in_turn(turn, list(sides.items())):
                    with peak_of_tree() as seen:
                        start = time.perf_counter()
                        load().write.format("noop").mode("overwrite").save()
                        seconds[name].append(time.perf_counter() - start)
                    mib[name] = max(mib[name], seen.mib)
    claim = compare_figures(
        f"a read of {topics} topics by pattern, {PARTITIONS} partitions each",
        seconds["ours"][1:],
        seconds["peer"][1:],
        unit="s",
        peer_name=f"{tasks} empty tasks of a Python source",
        target="<= 1.2",
        ours_mib=mib["ours"],
        peer_mib=mib["peer"],
    )
    report(claim, as_json=options.json)


def build(root: Path, topics: int) -> None:
    """Write the topics, a record in each partition."""
    with kafkalog.open(root) as log:
        for number in range(topics):
            log.create_topic(f"topic-{number}", PARTITIONS)
            rows = {"key": ["k"] * PARTITIONS, "value": ["v"] * PARTITIONS}
            placed = pa.table({**rows, "partition": pa.array(range(PARTITIONS), pa.int32())})
            log.append(f"topic-{number}", placed, now_ms=NOW_MS)


if __name__ == "__main__":
    main()
