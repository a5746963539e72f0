"""Reading chosen keys of a compacted topic in Spark, by an option and by a filter.

    python -m bench.chosen_keys [--json] [--quick] [--path DIR] [--rounds N]

The topic is that of `bench.lookup`: N keys (10,000,000; 50,000 with --quick), cleaned, so that each
segment has a key index. 100 of the keys are read with `view=latest` and the option `keys`, which
looks them up in the task; and by the same read without the option, with a filter above it. Both run
in one session (local[2]), in turn, from the load to the collected rows, which must be the values
that were written last. Memory is that of all processes, which both share.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

import kafkalog
from bench import MORE, compare_figures, in_turn, program, report
from bench.lookup import TOPIC, build
from bench.memory import peak_of_tree
from bench.spark import session

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

CHOSEN: Final = 100


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the benchmark and print its figures."""
    parser = program("chosen_keys", __doc__, quick="fewer keys and rounds")
    parser.add_argument("--rounds", type=int, help="rounds")
    options = parser.parse_args(arguments)
    key_count = 50_000 if options.quick else 10_000_000
    rounds = options.rounds or (1 if options.quick else 3)
    wanted = [f"user-{number * (key_count // CHOSEN)}" for number in range(CHOSEN)]
    seconds: dict[str, list[float]] = {"keys": [], "filter": []}
    mib = dict.fromkeys(seconds, 0.0)
    with tempfile.TemporaryDirectory(prefix="kafkalog-bench-", dir=options.path) as directory:
        root = Path(directory, "log")
        written = build(root, key_count, wanted)
        with session(Path(directory)) as spark:
            for turn in range(1 + rounds):  # the first one warms up
                for way in in_turn(turn, list(seconds)):
                    with peak_of_tree() as seen:
                        start = time.perf_counter()
                        found = read(spark, root, wanted, by_option=way == "keys")
                        seconds[way].append(time.perf_counter() - start)
                    mib[way] = max(mib[way], seen.mib)
                    if found != written:
                        raise SystemExit(f"{way}: other values than those written last")
    claim = compare_figures(
        f"{CHOSEN} chosen keys of {key_count:,}",
        seconds["keys"][1:],
        seconds["filter"][1:],
        unit="s",
        peer_name="a filter above the same read",
        ratio_is=MORE,
        is_time=True,
        target=">= 20",
        ours_mib=mib["keys"],
        peer_mib=mib["filter"],
    )
    report(claim, as_json=options.json)


def read(
    spark: SparkSession, root: Path, wanted: Sequence[str], *, by_option: bool
) -> dict[str, str]:
    """Return the latest values of the wanted keys."""
    table = kafkalog.KTable(spark, root, TOPIC)
    rows = table.df(options={"keys": json.dumps(wanted)} if by_option else {})
    if not by_option:
        rows = rows.where(rows["key"].isin([key.encode() for key in wanted]))
    found = rows.selectExpr("string(key)", "string(value)").collect()
    return {row[0]: row[1] for row in found}


if __name__ == "__main__":
    main()
