"""Run the suites of source, sink and exactly-once writes of tests/spark on an object store.

    python -m tests.store_suite [ARGUMENT...]

The arguments are pytest's. `KAFKALOG_TEST_PATH` is the address below which each test has its log.
Without it a server that `make peers` has built is started, and ends with the tests.
"""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Final

from tests import ROOT
from tests.object_store_server import BUCKET, StoreServer, fault

_SUITES: Final = (
    "datasource/test_batch_in_spark.py",
    "datasource/test_ktable.py",
    "datasource/test_queries_at_once.py",
    "datasource/test_spark.py",
    "datasource/test_spark_view.py",
    "datasource/test_stream_in_spark.py",
    "sink/test_spark_foreach_batch.py",
    "sink/test_spark_restores.py",
    "sink/test_spark_sqlite_upsert.py",
    "sink/test_spark_table_view.py",
    "sink/test_spark_upsert.py",
    "sink/test_spark_writes.py",
)


def main() -> None:
    """Run the tests; exit as pytest does."""
    if os.environ.get("KAFKALOG_TEST_PATH"):
        raise SystemExit(_run(sys.argv[1:], {}))
    if reason := fault():
        raise SystemExit(f"{reason}, or set KAFKALOG_TEST_PATH")
    os.environ["AWS_ACCESS_KEY_ID"] = secrets.token_hex(8)
    os.environ["AWS_SECRET_ACCESS_KEY"] = secrets.token_hex(16)
    with StoreServer() as server:
        address = {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{server.port}",
            "AWS_ALLOW_HTTP": "true",
            "AWS_REGION": "us-east-1",
            "KAFKALOG_TEST_PATH": f"s3://{BUCKET}",
        }
        code = _run(sys.argv[1:], address)
    raise SystemExit(code)


def _run(arguments: Sequence[str], environment: Mapping[str, str]) -> int:
    suites = [str(ROOT / "tests" / "spark" / name) for name in _SUITES]
    command = [sys.executable, "-m", "pytest", *suites, *arguments]
    return subprocess.run(
        command, cwd=ROOT, env={**os.environ, **environment}, check=False
    ).returncode


if __name__ == "__main__":
    main()
