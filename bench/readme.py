"""The numbers in README.md: chosen claims of the page, in a table."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

from bench.page import PAGE, Results

README: Final = PAGE.parent.parent / "README.md"
_HEAD: Final = "| | kafkalog | peer | | `python -m bench` |\n|---|---|---|---|---|\n"
NUMBERS: Final = (
    (
        "clean",
        "1,000,000 keys, none Kafka's LogCleaner",
        "a cleaning, 10 million records of 100 bytes, 1 million keys, one thread",
        "Kafka's LogCleaner on the same segments",
    ),
    (
        "view_latest",
        "before cleaning the connector and a window",
        "`view=latest` of 10 million records, 1 million keys",
        "Spark's Kafka connector and a window",
    ),
    (
        "spark_read",
        "4 partitions, lz4 Spark's Kafka connector",
        "Spark batch read, 4 million records, lz4, 4 partitions",
        "Spark's Kafka connector",
    ),
    (
        "spark_write",
        "4 partitions, uncompressed Spark's Kafka connector to a broker that does not sync",
        "Spark stream write, 500,000 rows a micro-batch, synced",
        "the connector, unsynced",
    ),
    (
        "latency",
        "an empty Python source and sink",
        "a streaming micro-batch of 1,000 records, source to sink, p50",
        "an empty Python source and sink",
    ),
)
"""For each: the program, words of its claim and peer, and how README names the two."""


def write(results: Results) -> None:
    """Put the table into README.md, in place of the one that is there."""
    rows = re.compile(re.escape(_HEAD) + r"(?:\|.*\n)*")
    README.write_text(rows.sub(lambda _: table(results), README.read_text()))


def table(results: Results) -> str:
    """Return the table; raises LookupError if the page has no such claim."""
    return _HEAD + "".join(_row(results, *number) for number in NUMBERS)


def _row(results: Results, program: str, words: str, what: str, peer: str) -> str:
    claim = results.claim(program, words)
    ratio = f"{claim['ratio']:.2f} {claim['ratio_is']}"
    if claim["is_met"] is False:
        ratio = f"**{ratio}**"
    ours, theirs = (_figure(claim, side) for side in ("ours", "peer"))
    link = f"[{program}](docs/benchmarks.md#{program})"
    return f"| {what} | {ours} | {theirs}, {peer} | {ratio} | {link} |\n"


def _figure(claim: Mapping[str, Any], side: str) -> str:
    return f"{claim[side]:.3g} {claim['unit']}"
