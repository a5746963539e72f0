"""From the sources to a user's machine: sdist, wheel, clean environments, extras, and Spark."""

from __future__ import annotations

import functools
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import venv
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

import kafkalog
from kafkalog.extras import install_command
from tests import ROOT, kernel_builds

SPARK = "4.2."
"""The release that the extra `spark` installs; the other tests have the latest one."""

FINDS_THE_FORMAT = """
import sys
import kafkalog
assert kafkalog.__file__.startswith(sys.argv[1]), kafkalog.__file__
assert kafkalog.__compiled__
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

WITHOUT_EXTRAS = """
import sys
import kafkalog
assert kafkalog.__file__.startswith(sys.prefix), kafkalog.__file__
with kafkalog.open(sys.argv[1]) as log:
    log.create_topic("t", config={"compression.type": "lz4"})
    log.append("t", [("a", "1"), ("a", "2"), ("b", "3")])
    log.clean("t", force=True)
    print([(row["key"], row["value"]) for batch in log.read("t", 0) for row in batch.to_pylist()])
print(kafkalog.KTable(None, sys.argv[1], "t").lookup("a").value)
"""
TYPED = """
import kafkalog
compiled: bool = kafkalog.__compiled__
with kafkalog.open("/data/log") as log:
    log.create_topic("t", partitions="2")  # type: ignore[arg-type]
    print(log.append("t", [("a", "1")]).name)  # type: ignore[attr-defined]
    print([batch for batch in log.read("t", 0)], log.offsets("t")[0][1] + 1)
"""
PLUGIN = """
def test_a_topic(kafkalog_topic):
    assert kafkalog_topic(records=[("a", "1")]).table() == {b"a": b"1"}
"""
NEEDS_AN_EXTRA = {
    "spark": """
import kafkalog
print(kafkalog.LagListener().latest)
""",
    "state": """
import types
from kafkalog.datasource.previous_value import _PROVIDER, _PROVIDER_CONF, _check_session
print(_check_session(types.SimpleNamespace(conf={_PROVIDER_CONF: _PROVIDER})))
""",
    "metrics": """
import sys, urllib.request
import kafkalog
from kafkalog.cleaner.metrics import served
from kafkalog.cleaner.schedule.thread import CleanerThread
with kafkalog.open(sys.argv[1]) as log, served(log, CleanerThread(log), 0) as port:
    assert b"kafkalog_" in urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics").read()
""",
    "postgres": """
import sys
from kafkalog.sink.upsert import PostgresUpsert
print(PostgresUpsert(sys.argv[1], "t").positions())
""",
    "sqlite": """
import sys
from kafkalog.sink.upsert import SQLiteUpsert
from kafkalog.sink.upsert.upsert import Batch
upsert = SQLiteUpsert(sys.argv[1], "t")
assert upsert.apply(Batch("q", 0, "run", {}, 0), ["key"], ["TEXT"], [])
assert upsert.positions()["q"].batch_id == 0
""",
}
"""A program for each extra: with it, it works; without, its error names it."""

VERSIONS = re.findall(
    r"Programming Language :: Python :: (3\.\d+)", (ROOT / "pyproject.toml").read_text()
)
OWN_VERSION = f"{sys.version_info.major}.{sys.version_info.minor}"

pytestmark = pytest.mark.slow


def attempt(*command: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a command outside this checkout: no current directory with our sources, none on a path.

    Nor has it the Spark of this run.
    """
    ours = {"PYTHONPATH", "SPARK_HOME", "KAFKALOG_REQUIRE_COMPILER"}
    kept = {name: value for name, value in os.environ.items() if name not in ours}
    return subprocess.run(
        command, cwd=cwd, env=kept | environment, check=False, capture_output=True, text=True
    )


def run(*command: str, cwd: Path, **environment: str) -> str:
    """Run a command likewise, which has to succeed; return what it printed."""
    result = attempt(*command, cwd=cwd, **environment)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def install(environment: Path, *wanted: str, **more: str) -> None:
    """Install into an environment, which has no pip of its own, with this one's."""
    options = ("-q", "--disable-pip-version-check", "--no-compile")
    pip = (sys.executable, "-m", "pip", "--python", python(environment), "install", *options)
    run(*pip, *wanted, cwd=environment, **more)


def python(environment: Path) -> str:
    """Return the interpreter of an environment."""
    return str(environment / "bin" / "python")


def packages(environment: Path) -> Path:
    """Return where an environment has its packages."""
    return Path(sysconfig.get_path("purelib", "venv", {"base": str(environment)}))


def clean_environment(path: Path, *borrowed: Path) -> Path:
    """Make an environment that sees the packages of others beside its own.

    They are borrowed by a `.pth` file, which does not follow the editable install that may lie
    among them.
    """
    venv.create(path)
    places = "".join(f"{packages(environment)}\n" for environment in borrowed)
    (packages(path) / "borrowed.pth").write_text(places)
    return path


def other_python(version: str) -> str | None:
    """Return an interpreter of this machine, of PATH or of pyenv or uv; None if there is none."""
    places = [shutil.which(f"python{version}")]
    places += sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python{version}"))
    places += sorted(Path.home().glob(f".local/share/uv/python/*-{version}*/bin/python{version}"))
    for place in map(str, filter(None, places)):
        asked = attempt(place, "-c", "import sys; print(*sys.version_info[:2], sep='.')", cwd=ROOT)
        if asked.stdout.strip() == version:  # a shim of pyenv may be there without its Python
            return place
    return None


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
def sources(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the unpacked sdist."""
    target = tmp_path_factory.mktemp("sources")
    # Not tarfile: early releases of Python 3.11 lack its `filter`, later ones demand it.
    run("tar", "-xf", str(sdist), "-C", str(target), cwd=target)
    (unpacked,) = target.iterdir()
    return unpacked


@pytest.fixture(scope="module")
def quick_gcc(tmp_path_factory: pytest.TempPathFactory) -> str:
    return kernel_builds.quick_gcc(tmp_path_factory.mktemp("bin"))


@pytest.fixture(scope="module")
def wheel(sources: Path, quick_gcc: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the wheel from the unpacked sdist, as a packager would."""
    target = tmp_path_factory.mktemp("wheel")
    run(
        *(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(target)),
        str(sources),
        cwd=target,
        KAFKALOG_REQUIRE_COMPILER="1",
        CC=quick_gcc,
    )
    (built,) = target.glob("*.whl")
    return built


def copy_uncompiled(sources: Path, place: Path) -> None:
    """Copy sources without what gcc made of them; what Cython made stays, if it has run."""
    compiled = ("lib.*", "temp.*", "bdist.*", "*.so", "*.egg-info")
    shutil.copytree(sources, place, ignore=shutil.ignore_patterns(*compiled))


@pytest.fixture(scope="module")
def bare(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make an environment of the wheel and what it asks for, from the index; return its place."""
    answers = (sys.executable, "-m", "pip", "index", "versions", "rich", "--retries", "0")
    if "CI" not in os.environ and attempt(*answers, cwd=wheel.parent).returncode:
        pytest.skip("pip reaches no index of packages")
    environment = clean_environment(tmp_path_factory.mktemp("bare") / "venv")
    install(environment, str(wheel))
    return environment


@pytest.fixture(scope="module")
def with_extra(
    bare: Path, wheel: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Path]:
    """Return what installs an extra beside the bare environment, in one that sees it."""

    @functools.cache
    def make(extra: str) -> Path:
        environment = clean_environment(tmp_path_factory.mktemp("extra") / extra, *below(extra))
        install(environment, f"{wheel}[{extra}]")
        return environment

    def below(extra: str) -> list[Path]:
        return [make("spark"), bare] if extra == "state" else [bare]

    return make


def test_the_wheel_holds_every_room_and_nothing_else(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    sources = {
        path.relative_to(ROOT).as_posix()
        for package in ("kafkalog", "pyspark_kafkalog")
        for path in (ROOT / package).rglob("*.py")
    }
    assert {name for name in names if name.endswith(".py")} == sources
    kernels = [name for name in names if name.endswith(".so")]
    assert {Path(name.removesuffix(".abi3.so")) for name in kernels} == {
        sheet.with_suffix("").relative_to(ROOT) for sheet in kernel_builds.SHEETS
    }
    assert all(name.endswith(".abi3.so") for name in kernels)
    assert "-cp311-abi3-" in wheel.name
    assert {name.split("/")[0].split("-")[0] for name in names} == {"kafkalog", "pyspark_kafkalog"}


def test_the_sdist_can_be_tested(sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {
        "LICENSE",
        "README.md",
        "Makefile",
        "kafkalog/storage_engine/records/kernels/decode.pxd",
        "tests/conftest.py",
        "examples/git_table.py",
    } <= names


def test_the_wheel_has_the_licence_and_says_that_it_is_typed(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (licence,) = (name for name in names if name.endswith(".dist-info/licenses/LICENSE"))
        assert archive.read(licence) == (ROOT / "LICENSE").read_bytes()
        (about,) = (name for name in names if name.endswith(".dist-info/METADATA"))
        assert "License-Expression: Apache-2.0\n" in archive.read(about).decode()
    assert "kafkalog/py.typed" in names


def test_a_log_needs_no_extra(bare: Path, tmp_path: Path) -> None:
    log = str(tmp_path / "log")
    printed = run(python(bare), "-c", WITHOUT_EXTRAS, log, cwd=tmp_path)
    assert printed == "[(b'a', b'2'), (b'b', b'3')]\nb'2'\n"
    command = str(bare / "bin" / "kafkalog")
    assert "explain" in run(command, "--help", cwd=tmp_path)
    release = f"kafkalog {kafkalog.__version__} (kernels: compiled)\n"
    assert run(command, "--version", cwd=tmp_path) == release
    (tmp_path / "more.jsonl").write_text('{"key": "c", "value": "4"}\n')
    run(command, "append", log, "t", "more.jsonl", cwd=tmp_path)
    assert '"value":"4"' in run(command, "read", log, "t", "--json", cwd=tmp_path)


@pytest.mark.parametrize("version", VERSIONS)
def test_the_wheel_works_in_each_python_that_is_supported(
    version: str, wheel: Path, bare: Path, tmp_path: Path
) -> None:
    """`bare` is the environment of this run's own version, and says that there is an index."""
    own = python(bare) if version == OWN_VERSION else other_python(version)
    if own is None:
        pytest.skip(f"this machine has no Python {version}")
    if version != OWN_VERSION:
        environment = tmp_path / "venv"
        run(own, "-m", "venv", "--without-pip", str(environment), cwd=tmp_path)
        install(environment, str(wheel))
        own = python(environment)
    printed = run(own, "-W", "error", "-c", WITHOUT_EXTRAS, str(tmp_path / "log"), cwd=tmp_path)
    assert printed == "[(b'a', b'2'), (b'b', b'3')]\nb'2'\n"


def test_the_job_that_builds_wheels_builds_one_for_every_python() -> None:
    """The job itself has never run, and says so."""
    job = " ".join((ROOT / ".github" / "workflows" / "wheels.yml").read_text().split())
    assert "never # been run" in job
    described = tomllib.loads((ROOT / "pyproject.toml").read_text())
    wheels, oldest = described["tool"]["cibuildwheel"], described["project"]["requires-python"]
    assert {build.partition("-")[0] for build in wheels["build"]} == {
        "cp" + oldest.removeprefix(">=").replace(".", "")
    }
    assert wheels["environment"] == {"KAFKALOG_REQUIRE_COMPILER": "1"}


@pytest.mark.parametrize("extra", NEEDS_AN_EXTRA)
def test_an_extra_that_is_missing_is_named(
    extra: str, bare: Path, with_extra: Callable[[str], Path], tmp_path: Path
) -> None:
    environment = with_extra("spark") if extra == "state" else bare
    program = NEEDS_AN_EXTRA[extra]
    result = attempt(python(environment), "-c", program, str(tmp_path / "log"), cwd=tmp_path)
    assert result.returncode == 1
    assert install_command(extra) in result.stderr.splitlines()[-1]


def test_an_extra_that_a_command_lacks_is_named_in_one_line(bare: Path, tmp_path: Path) -> None:
    log, command = str(tmp_path / "log"), str(bare / "bin" / "kafkalog")
    run(command, "topics", "create", log, "t", cwd=tmp_path)
    result = attempt(command, "cleaner", log, "--metrics-port", "0", cwd=tmp_path)
    assert result.returncode == 2
    (line,) = result.stderr.splitlines()
    assert line.endswith(install_command("metrics"))


@pytest.mark.parametrize("extra", NEEDS_AN_EXTRA)
def test_each_extra_installs_what_its_part_needs(
    extra: str,
    with_extra: Callable[[str], Path],
    tmp_path: Path,
    request: pytest.FixtureRequest,
) -> None:
    where = request.getfixturevalue("postgres") if extra == "postgres" else str(tmp_path / "log")
    run(python(with_extra(extra)), "-c", NEEDS_AN_EXTRA[extra], where, cwd=tmp_path)


def test_the_plugin_of_pytest_needs_no_spark(bare: Path, tmp_path: Path) -> None:
    environment = clean_environment(tmp_path / "venv", bare)
    install(environment, "pytest")
    (tmp_path / "test_a_job.py").write_text(PLUGIN)
    own = (python(environment), "-m", "pytest", "-q", "-W", "error", "test_a_job.py")
    assert "1 passed" in run(*own, cwd=tmp_path)


def test_the_types_of_an_installed_kafkalog_are_known(bare: Path, tmp_path: Path) -> None:
    """mypy finds what is wrong in a program, and by it that nothing is `Any`."""
    pytest.importorskip("mypy", reason="the extra `dev` is not installed")
    (tmp_path / "program.py").write_text(TYPED)
    options = ("--strict", "--cache-dir", str(tmp_path), "--python-executable", python(bare))
    run(sys.executable, "-m", "mypy", *options, "program.py", cwd=tmp_path)


NO_COMPILER = "/nowhere/gcc"


def test_without_a_compiler_the_installation_succeeds_and_the_kernels_are_python(
    sources: Path, bare: Path, tmp_path: Path
) -> None:
    place = tmp_path / "sources"
    copy_uncompiled(sources, place)
    environment = clean_environment(tmp_path / "venv", bare, Path(sys.prefix))
    wanted = ("--no-deps", "--no-build-isolation", str(place))
    install(environment, *wanted, CC=NO_COMPILER)
    log = str(tmp_path / "log")
    done = attempt(python(environment), "-c", WITHOUT_EXTRAS, log, cwd=tmp_path)
    assert done.stdout == "[(b'a', b'2'), (b'b', b'3')]\nb'2'\n"
    assert done.stderr.count("RuntimeWarning: kafkalog: the kernels are not compiled") == 1
    command = str(environment / "bin" / "kafkalog")
    assert "not compiled" in run(command, "--version", cwd=tmp_path)


def test_a_compiler_that_is_required_and_missing_is_an_error(sources: Path, tmp_path: Path) -> None:
    place = tmp_path / "sources"
    copy_uncompiled(sources, place)
    environment = clean_environment(tmp_path / "venv", Path(sys.prefix))
    with pytest.raises(AssertionError, match="nowhere/gcc"):
        install(
            *(environment, "--no-deps", "--no-build-isolation", str(place)),
            CC=NO_COMPILER,
            KAFKALOG_REQUIRE_COMPILER="1",
        )


@pytest.mark.spark
def test_spark_finds_the_format_of_an_editable_install(
    sources: Path, quick_gcc: str, tmp_path: Path
) -> None:
    environment = clean_environment(tmp_path / "venv", Path(sys.prefix))
    wanted = ("--no-deps", "--no-build-isolation", "--editable", str(sources))
    install(environment, *wanted, CC=quick_gcc)
    own = python(environment)
    printed = run(
        *(own, "-c", FINDS_THE_FORMAT, str(sources), str(tmp_path / "log")),
        cwd=tmp_path,
        PYSPARK_PYTHON=own,
        PYSPARK_DRIVER_PYTHON=own,
    )
    assert "rows: [(b'k', b'v')]" in printed


@pytest.mark.spark
def test_the_spark_of_the_extra_does_everything_in_a_clean_environment(
    bare: Path, with_extra: Callable[[str], Path], tmp_path: Path
) -> None:
    extras = map(with_extra, ("spark", "state", "sqlite"))
    own = python(clean_environment(tmp_path / "venv", *extras, bare))
    smoke = str(ROOT / "tests" / "spark_smoke.py")
    printed = run(
        *(own, "-P", smoke, str(tmp_path / "scratch")),
        cwd=tmp_path,
        PYSPARK_PYTHON=own,
        PYSPARK_DRIVER_PYTHON=own,
    )
    found = json.loads(printed.splitlines()[-1])
    assert found.pop("pyspark").startswith(SPARK)
    assert found.pop("kafkalog").startswith(str(bare))
    table = [["a", "3"], ["c", "4"]]
    assert found == {
        "batch": 4,
        "copied": [4, 5, 5],
        "table": table,
        "lookup": "3",
        "previous": [None, "1"],
        "sqlite": table,
    }
