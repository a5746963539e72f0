"""How long a small micro-batch takes on a log in an object store.

    python -m bench.store_latency [--json] [--quick] [--path DIR] [--rounds N]

A micro-batch is 1,000 records of 100 bytes, copied by Spark from one topic of one partition to
another one in the same log, as in bench/latency.py. The log is in an object store (versitygw on the
loopback, on the same disk); the peer is the same query on a log directory. The time is Spark's own
`triggerExecution` of each micro-batch. The directory is synced, the server's objects are not.

A third query goes through a proxy that lets each request wait for 30 ms first, as a far store
would. Its requests are counted, from commit to commit. A round trip in sequence is a request that
begins after all those before it have ended.

The three take turns, the first of one round being the last of the next: a round is a run of each
query, which goes on from its checkpoint. The first round, and the first micro-batches of each run,
do not count. Each micro-batch must have had its 1,000 records, and the target topics must have the
very records of the source topics in the end. The memory is that of this process, Spark's JVM and
its Python workers together, without the server's, in a round of its own after the others.
"""

from __future__ import annotations

import statistics
import tempfile
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Final

from bench import LESS, Claim, compare_figures, leave_out, program, report
from bench.latency import RECORDS, OurQuery
from bench.spark import session, watched
from bench.stored import StoreServer, fault, options_at, url_of
from tests.object_store_proxy import StoreProxy, kind_of

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

DELAY_MS: Final = 30
DIRECTORY: Final = "the same on a log directory"
Span = tuple[float, float, str]
"""The beginning and the end of a request, in seconds, and the request."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the benchmark and print its figures."""
    parser = program("store_latency", __doc__, quick="few micro-batches")
    parser.add_argument("--rounds", type=int, help="runs of each query that count")
    options = parser.parse_args(arguments)
    if reason := fault():
        leave_out("an object store", reason)
        return
    rounds = options.rounds or (0 if options.quick else 4)  # 0: one, for time and memory
    batches, warm_up = (2, 1) if options.quick else (12, 3)
    with ExitStack() as opened:
        name = tempfile.TemporaryDirectory(prefix="kafkalog-bench-", dir=options.path)
        scratch = Path(opened.enter_context(name))
        spark = opened.enter_context(session(scratch))
        server = opened.enter_context(StoreServer(scratch))
        proxy = opened.enter_context(StoreProxy(server.port, delay_s=DELAY_MS / 1000))
        queries = {
            "store": query(spark, scratch, "near", server.port),
            "late": query(spark, scratch, "late", server.port, proxy.port),
            "directory": OurQuery(spark, scratch / "checkpoint", str(scratch / "log")),
        }
        times: dict[str, list[list[float]]] = {each: [] for each in queries}
        mib, chains = {}, []
        for turn in range(rounds + 2) if rounds else (1,):
            for each in list(queries)[:: -1 if turn % 2 else 1]:
                queries[each].feed(batches + warm_up)
                proxy.reset()
                if rounds and turn > rounds:
                    with watched(spark, without=server.pid) as peak:
                        queries[each].run(batches + warm_up)
                    mib[each] = peak.mib
                    continue
                took = queries[each].run(batches + warm_up)[warm_up:]
                if turn:
                    times[each].append([one["triggerExecution"] for one in took])
                if turn and each == "late":
                    chains += in_sequence(proxy.spans)[warm_up:]
        for one in queries.values():
            one.check()
    for claim in claims(times, mib, chains):
        report(claim, as_json=options.json)


def query(
    spark: SparkSession, scratch: Path, name: str, port: int, proxy_port: int | None = None
) -> OurQuery:
    """Return a query on a log in the store; it may reach the log by a proxy, its feeder not."""
    made = OurQuery(spark, scratch / f"{name}-checkpoint", url_of(name), options_at(port))
    made.place |= options_at(proxy_port or port)
    return made


def in_sequence(spans: Sequence[Span]) -> list[list[str]]:
    """Return, for each time from commit to commit, its requests that waited for one another."""
    found: list[list[str]] = [[]]
    end = 0.0
    for began, ended, request in sorted(spans):
        kind = kind_of(request)
        if began >= end:
            found[-1].append(kind)
        end = max(end, ended)
        if kind == "PUT commit":
            found.append([])
    return found[1:-1]


def claims(
    times: dict[str, list[list[float]]], mib: dict[str, float], chains: list[list[str]]
) -> list[Claim]:
    """Return what the micro-batches took."""
    medians = {name: [statistics.median(run) for run in runs] for name, runs in times.items()}
    count = sum(map(len, times["store"]))
    made = []
    for name, what, target in (
        ("store", "", "<= 1.5"),
        ("late", f", {DELAY_MS} ms added to each request", ""),
    ):
        claim = compare_figures(
            f"micro-batch of {RECORDS:,} records{what}, p50 of {count}",
            medians[name],
            medians["directory"],
            unit="ms",
            peer_name=DIRECTORY,
            ratio_is=LESS,
            target=target,
            ours_mib=mib.get(name),
            peer_mib=mib.get("directory"),
        )
        if name == "late" and chains:
            chain = sorted(chains, key=len)[len(chains) // 2]
            which = ", ".join(f"{n} {kind}" for kind, n in Counter(chain).items())
            claim = claim.told(round_trips_in_sequence=len(chain), which=which)
        made.append(claim)
    return made


if __name__ == "__main__":
    main()
