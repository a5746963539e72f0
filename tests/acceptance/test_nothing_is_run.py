"""Nothing that is read from a log directory is ever run: by the sources, and by what they do."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import kafkalog

SOURCES = Path(kafkalog.__file__).parent
FORBIDDEN_MODULES = {
    *("pickle", "cPickle", "_pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"),
    *("yaml", "ruamel", "code", "codeop", "runpy", "imp"),
}
FORBIDDEN_CALLS = {"eval", "exec", "compile", "__import__", "execfile"}
FORBIDDEN_METHODS = {
    *("np.load", "numpy.load", "np.fromregex", "np.genfromtxt", "os.system", "os.popen"),
    *("pa.deserialize", "pd.read_pickle", "pandas.read_pickle", "importlib.util.spec_from_loader"),
}
EXCEPTIONS: dict[tuple[str, str], str] = {}
"""By file and name: why it is harmless there. Machine code, which `ctypes` runs, is kept in the
user's own cache directory, whose owner and mode are checked, and never in a log."""
CTYPES = {"storage_engine/machine_code.py"}


def forbidden(source: str) -> Iterator[str]:
    """Yield what a source imports or calls that could run what it reads."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (each.name for each in node.names if is_forbidden(each.name))
        elif isinstance(node, ast.ImportFrom) and node.module and is_forbidden(node.module):
            yield node.module
        elif isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            is_allowed_pickle = any(word.arg == "allow_pickle" for word in node.keywords)
            is_dynamic = name.endswith("import_module") and not is_own_module(node)
            if name in FORBIDDEN_CALLS | FORBIDDEN_METHODS or is_allowed_pickle or is_dynamic:
                yield name


def is_forbidden(module: str) -> bool:
    return module.partition(".")[0] in FORBIDDEN_MODULES


def is_own_module(call: ast.Call) -> bool:
    """Whether a module that is imported by name is one of the package, or a name in the source."""
    (argument,) = call.args
    text = ast.unparse(argument)
    return text.startswith(("'kafkalog.", "f'kafkalog.")) or text in {"module", "self._module"}


def test_the_sources_have_nothing_that_runs_what_it_reads() -> None:
    found = {
        (str(path.relative_to(SOURCES)), name)
        for path in SOURCES.rglob("*.py")
        for name in forbidden(path.read_text())
    }
    assert found == set(EXCEPTIONS)
    calling = {
        str(path.relative_to(SOURCES))
        for path in SOURCES.rglob("*.py")
        if "ctypes" in path.read_text() and "import ctypes" in path.read_text()
    }
    assert calling == CTYPES


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from marshal import loads",
        "import yaml.loader",
        "eval(data)",
        "np.load(path)",
        "other(path, allow_pickle=True)",
        "importlib.import_module(data['module'])",
    ],
)
def test_such_a_source_would_be_found(source: str) -> None:
    assert list(forbidden(source))


WATCHED = """
import shutil, sys
from pathlib import Path
import kafkalog
from tests.acceptance.log_contents import damage, newest, records
from tests.acceptance.test_safety import fill, stage

RUNS = {"exec", "compile", "marshal.loads", "pickle.find_class", "import", "os.system",
        "subprocess.Popen", "ctypes.dlopen", "code.__new__"}
seen, is_watched = [], False


def hook(event, arguments):
    if is_watched and event in RUNS:
        seen.append((event, str(arguments)[:200]))


sys.addaudithook(hook)


def work(root):
    log = fill(root)
    log.commit([stage(log, 1)])
    records(log, "t"), newest(log, "t"), log.lookup("t", "k1")
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
