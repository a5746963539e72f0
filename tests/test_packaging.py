"""From the sources to a user's machine: sdist, wheel, a clean environment, and Spark finds us."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FINDS_THE_FORMAT = """
import sys
import kafkalog
assert kafkalog.__file__.startswith(sys.argv[1]), kafkalog.__file__
with kafkalog.open(sys.argv[2]) as log:
    log.create_topic("t")
    log.append("t", [(b"k", b"v")])
from pyspark.sql import SparkSession
spark = (
    SparkSession.builder.master("local[1]")
    .config("spark.ui.enabled", "false")
    .config("spark.driver.host", "127.0.0.1")
    .getOrCreate()
)
frame = spark.read.format("kafkalog").option("path", sys.argv[2]).option("subscribe", "t").load()
print("rows:", [(bytes(row.key), bytes(row.value)) for row in frame.collect()])
spark.stop()
"""

pytestmark = pytest.mark.slow


def run(*command: str, cwd: Path, **environment: str) -> str:
    """Run a command outside this checkout: no PYTHONPATH, no current directory with our sources."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    result = subprocess.run(
        command, cwd=cwd, env=kept | environment, check=False, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("dist")
    run(
        *(sys.executable, "-m", "build", "--sdist", "--no-isolation", "--outdir", str(target)),
        str(ROOT),
        cwd=target,
    )
    (built,) = target.glob("*.tar.gz")
    return built


@pytest.fixture(scope="module")
def wheel(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the wheel from the unpacked sdist, as a packager would."""
    target = tmp_path_factory.mktemp("wheel")
    # Not tarfile: early releases of Python 3.11 lack its `filter`, later ones demand it.
    run("tar", "-xf", str(sdist), "-C", str(target), cwd=target)
    (sources,) = target.iterdir()
    run(
        *(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(target)),
        str(sources),
        cwd=target,
    )
    (built,) = target.glob("*.whl")
    return built


def clean_environment(path: Path) -> Path:
    """Make an environment that has our dependencies but not us; return its python.

    The dependencies are borrowed by a `.pth` file, which does not follow the editable install that
    may lie among them.
    """
    venv.create(path, with_pip=True)
    python = path / "bin" / "python"
    own = Path(
        run(
            str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=path
        ).strip()
    )
    (own / "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return python


def test_the_wheel_holds_every_room_and_nothing_else(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    sources = {
        path.relative_to(ROOT).as_posix()
        for package in ("kafkalog", "pyspark_kafkalog")
        for path in (ROOT / package).rglob("*.py")
    }
    assert {name for name in names if name.endswith(".py")} == sources
    assert {name.split("/")[0].split("-")[0] for name in names} == {"kafkalog", "pyspark_kafkalog"}


def test_the_sdist_can_be_tested(sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {
        "LICENSE",
        "README.md",
        "Makefile",
        "tests/conftest.py",
        "examples/git_table.py",
    } <= names


@pytest.mark.spark
@pytest.mark.parametrize("kind", ["wheel", "editable"])
def test_spark_finds_the_format_in_a_clean_environment(
    kind: str, wheel: Path, tmp_path: Path
) -> None:
    python = clean_environment(tmp_path / "venv")
    install = [
        str(python),
        "-m",
        "pip",
        "install",
        "-q",
        "--no-deps",
        "--disable-pip-version-check",
    ]
    if kind == "wheel":
        run(*install, str(wheel), cwd=tmp_path)
        home = tmp_path / "venv"
    else:
        run(*install, "--no-build-isolation", "--editable", str(ROOT), cwd=tmp_path)
        home = ROOT
    printed = run(
        *(str(python), "-c", FINDS_THE_FORMAT, str(home), str(tmp_path / "log")),
        cwd=tmp_path,
        PYSPARK_PYTHON=str(python),
        PYSPARK_DRIVER_PYTHON=str(python),
    )
    assert "rows: [(b'k', b'v')]" in printed
