"""Does what README says where there is nothing: `python -m tests.acceptance.fresh_environment`.

It installs kafkalog with its extras from the package index, runs `kafkalog doctor`, and then
README's example and a table of each kind (`first_steps.py`). Spark gets Delta Lake and the Avro
package from Maven Central, by the names that the doctor prints.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
import venv
from pathlib import Path

from tests import ROOT
from tests.postgres_server import PostgresServer

EXTRAS = "spark,sqlite,postgres"
EXPECTED = {"sqlite": [["b", 2]], "postgres": [["b", 2]], "delta": [["b", 2]], "avro": [1.5]}


def main() -> None:
    """Install, and run; raises if a step fails or finds something else."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    with tempfile.TemporaryDirectory(prefix="kafkalog-fresh-") as made, PostgresServer() as server:
        scratch = Path(made)
        venv.create(scratch / "venv", with_pip=True)
        programs = scratch / "venv" / "bin"
        kept["PATH"] = f"{programs}{os.pathsep}{kept['PATH']}"  # as where the venv is activated

        def run(program: str, *arguments: str) -> str:
            command = (str(programs / program), *arguments)
            ended = subprocess.run(
                command, cwd=scratch, env=kept, check=False, capture_output=True, text=True
            )
            assert ended.returncode == 0, ended.stdout[-4000:] + ended.stderr[-4000:]
            return ended.stdout

        run("pip", "install", "-q", f"{ROOT}[{EXTRAS}]")
        print(run("kafkalog", "doctor"))
        steps = str(ROOT / "tests" / "acceptance" / "first_steps.py")
        words = (str(ROOT / "README.md"), str(scratch), server.conninfo)
        *shown, last = run("python", "-P", steps, *words).splitlines()
        print(*shown, last, sep="\n")
        found = json.loads(last)
        assert found.pop("kafkalog").startswith(str(scratch)), last
        found.pop("pyspark")
        assert found == EXPECTED


if __name__ == "__main__":
    main()
