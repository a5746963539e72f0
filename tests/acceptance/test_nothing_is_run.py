"""Nothing that is read from a log directory is ever run: by the sources, and by what they do."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import kafkalog
import pyspark_kafkalog

PACKAGES = [Path(str(package.__file__)).parent for package in (kafkalog, pyspark_kafkalog)]
SOURCES = {
    str(path.relative_to(package.parent)): path.read_text()
    for package in PACKAGES
    for path in package.rglob("*.py")
}
FORBIDDEN_MODULES = {
    *("pickle", "cPickle", "_pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"),
    *("yaml", "ruamel", "code", "codeop", "runpy", "imp"),
}
FORBIDDEN_CALLS = {"eval", "exec", "compile", "__import__", "execfile"}
FORBIDDEN_NAMES = {
    *("numpy.load", "numpy.fromregex", "numpy.genfromtxt", "os.system", "os.popen"),
    *("pyarrow.deserialize", "pandas.read_pickle", "builtins.eval", "builtins.exec"),
    *("builtins.compile", "importlib.import_module", "importlib.util.spec_from_loader"),
    *("importlib.util.spec_from_file_location", "importlib.util.module_from_spec"),
}
"""Neither imported by name nor called. (Who calls `import_module` is looked at more closely.)"""
ALIASES = {"np": "numpy", "pa": "pyarrow", "pd": "pandas"}
EXCEPTIONS: dict[tuple[str, str], str] = {
    ("kafkalog/storage_engine/format/checksum.py", "importlib.util.module_from_spec"): (
        "it loads the extension of the installed package crc32c, whose name is in the source"
    )
}
"""By file and name: why it is harmless there."""
MACHINE = {"ctypes", "_ctypes", "cffi", "_cffi_backend"}
"""Modules that call machine code by its address."""


def imported(source: str) -> Iterator[str]:
    """Yield the modules that a source imports, and what it imports from them, by dotted names."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (each.name for each in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield from (f"{node.module}.{each.name}" for each in node.names)


def calls_machine_code(source: str) -> bool:
    return any(name.partition(".")[0] in MACHINE for name in imported(source))


def forbidden(source: str) -> Iterator[str]:
    """Yield what a source imports or calls that could run what it reads."""
    yield from filter(is_forbidden, imported(source))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            is_allowed_pickle = any(word.arg == "allow_pickle" for word in node.keywords)
            if name.endswith("import_module"):
                is_harmless = is_own_module(node)
            else:
                is_harmless = full_name(name) not in FORBIDDEN_CALLS | FORBIDDEN_NAMES
            if is_allowed_pickle or not is_harmless:
                yield name


def full_name(name: str) -> str:
    first, dot, rest = name.partition(".")
    return f"{ALIASES.get(first, first)}{dot}{rest}"


def is_forbidden(module: str) -> bool:
    """Whether a module, or a function that is imported by its name, runs what it is given."""
    return module.partition(".")[0] in FORBIDDEN_MODULES or module in FORBIDDEN_NAMES


def is_own_module(call: ast.Call) -> bool:
    """Whether a module that is imported by name is one of the package, or a name in the source."""
    (argument,) = call.args
    text = ast.unparse(argument)
    return text.startswith(("'kafkalog.", "f'kafkalog.")) or text == "module"


def test_the_sources_have_nothing_that_runs_what_it_reads() -> None:
    found = {(path, name) for path, source in SOURCES.items() for name in forbidden(source)}
    assert found == set(EXCEPTIONS)
    calling = {path for path, source in SOURCES.items() if calls_machine_code(source)}
    assert calling == {"kafkalog/storage_engine/fs/c_library.py"}  # three functions, by name
    assert "pyspark_kafkalog/__init__.py" in SOURCES


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from marshal import loads",
        "import yaml.loader",
        "from os import system",
        "from numpy import load as read",
        "eval(data)",
        "np.load(path)",
        "other(path, allow_pickle=True)",
        "importlib.import_module(data['module'])",
    ],
)
def test_such_a_source_would_be_found(source: str) -> None:
    assert list(forbidden(source))


@pytest.mark.parametrize(
    "source",
    [
        "import ctypes",
        "import ctypes.util",
        "from ctypes import CDLL",
        "from ctypes.util import find_library",
        "def f():\n    import ctypes as c",
        "from _ctypes import dlopen",
    ],
)
def test_a_source_that_calls_machine_code_would_be_found(source: str) -> None:
    assert calls_machine_code(source)
    assert not calls_machine_code("text = 'import ctypes'\nfrom kafkalog import ctypes_free")


WATCHED = """
import shutil, sys
from pathlib import Path
import kafkalog
from tests.builders.log_contents import damage, latest_records, records
from kafkalog.storage_engine.place import directory_log_of
from kafkalog.storage_engine.fs import clock
from tests.acceptance.test_safety import FIVE, fill
from tests.builders.log_builder import LogBuilder

RUNS = {"exec", "compile", "marshal.loads", "pickle.find_class", "import", "os.system",
        "subprocess.Popen", "ctypes.dlopen", "code.__new__"}
seen, is_watched = [], False


def hook(event, arguments):
    if is_watched and event in RUNS:
        seen.append((event, str(arguments)[:200]))


sys.addaudithook(hook)


def work(root):
    log = fill(root)
    staged = LogBuilder(log, now_ms=clock.now_ms()).stage(*FIVE, batch_id=1)
    directory_log_of(log).commit([staged])
    records(log, "t"), latest_records(log, "t"), log.lookup("t", "k1")
    log.clean("t", force=True)
    log.status(), log.explain("t"), log.offset_for_time("t", 0), damage(root)
    log.close()
    kafkalog.open(root, read_only=True)


work(Path(sys.argv[1]) / "first")  # imports what is needed, and links the kernels
is_watched = True
work(Path(sys.argv[1]) / "second")
if sys.argv[2] == "planted":
    eval("1")
is_watched = False
print(len(seen), seen[:3])
"""


@pytest.mark.slow
@pytest.mark.parametrize(("planted", "found"), [("none", False), ("planted", True)])
def test_no_code_is_loaded_while_a_log_is_written_read_and_cleaned(
    tmp_path: Path, planted: str, found: bool
) -> None:
    command = [sys.executable, "-c", WATCHED, str(tmp_path), planted]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("0 ") != found, done.stdout
