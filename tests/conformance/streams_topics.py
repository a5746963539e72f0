"""Remake what Kafka Streams writes to its topics: `tests/unit/values/streams_topics.txt`.

`python -m tests.conformance.streams_topics 4.3.1` fetches the jars of a release with Maven, and
runs `StreamsTopics.java`: Kafka Streams itself, with its own driver in place of a broker.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

from tests import ROOT
from tests.conformance.old_brokers import fetched

TARGET: Final = ROOT / "tests/unit/values/streams_topics.txt"
_SOURCE: Final = Path(__file__).with_name("StreamsTopics.java")


def main() -> None:
    """Write the lines of the release that the command line names."""
    with tempfile.TemporaryDirectory() as work:
        wanted = [("org.apache.kafka", "kafka-streams-test-utils", sys.argv[1])]
        jars = fetched(wanted, Path(work) / "jars")
        command = ["java", "-cp", f"{jars}/*", str(_SOURCE), f"{work}/state"]
        result = subprocess.run(command, capture_output=True, text=True, check=True)
    TARGET.write_text(result.stdout)


if __name__ == "__main__":
    main()
