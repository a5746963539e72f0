"""The design's rules about who may import and do what, read from the sources with `ast`.

The tables at the top are the whole policy.
"""

from __future__ import annotations

import ast
import graphlib
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from functools import cache
from pathlib import Path

import pytest

from tests import ROOT, kernel_builds

PACKAGE = ROOT / "kafkalog"
SOURCES = sorted(PACKAGE.rglob("*.py"))
SHEETS = kernel_builds.SHEETS

ROOMS = [
    "datasource",
    "sink/views",
    "sink/upsert/delta",
    "sink/upsert/postgres",
    "sink/upsert/sqlite",
    "sink/upsert",
    "sink",
    "values",
    "erasure",
    "inspection",
    "tables",
    "cleaner",
    "cleaner/report",
    "cleaner/schedule",
    "cleaner/shelves",
    "cleaner/directory",
    "cleaner/objects",
    "cleaner/rewrite",
    "cleaner/key_index",
    "cleaner/dedup",
    "cleaner/state",
    "cleaner/shelf",
    "storage_engine",
    "storage_engine/copying",
    "storage_engine/ownership",
    "storage_engine/directory",
    "storage_engine/object_store",
    "storage_engine/broker",
    "storage_engine/log",
    "storage_engine/reading",
    "storage_engine/writing",
    "storage_engine/transactions",
    "storage_engine/segment",
    "storage_engine/metadata",
    "storage_engine/records",
    "storage_engine/fs",
    "storage_engine/format",
]
"""From the top down: a room imports those below it. The package's top is where rooms meet."""
NOT_BELOW = {
    ("sink", "cleaner"),
    ("sink", "erasure"),
    ("sink", "inspection"),
    ("inspection", "cleaner"),
}
"""Rooms that do without one that is below them."""
KINDS = {"DirectoryLog", "ReadableDirectory", "ObjectLog", "PolledLog", "directory_log_of"}
"""The classes of logs that lie in one kind of place, and what asks for one."""
MAY_ASK_THE_KIND = {
    "cleaner/directory/pause.py",
    "cleaner/key_index/key_lookup.py",
    "cleaner/shelves.py",
    "cli/verify.py",
    "datasource/range_reader.py",
    "datasource/read_planner.py",
    "erasure/kinds.py",
    "sink/shared_log.py",
}
"""Modules above the storage engine that may ask for the kind of a log, or choose one to open."""
LEAVES = {
    "errors",
    "extras",
    "plain_errors",
    "schema",
    "spark_offset_log",
    "spark_options",
    "spark_release",
    "spark_results",
    "cleaner/config",
    "cleaner/plan",
}
"""Modules that every room may import."""
ONLY_INSIDE_FUNCTIONS = {("datasource", "sink"), ("datasource", "cleaner")}
"""Spark wants one class per format, and `view=latest` needs the first pass; planning needs none."""
FACES = {"sink/__init__.py", "cleaner/__init__.py"}
"""They only hand names on."""
PYSPARK_ROOMS = {"datasource", "sink", "values"}
LIGHT = [
    "kafkalog",
    "kafkalog.log",
    "kafkalog.storage_engine.directory.directory_log",
    "kafkalog.storage_engine.directory.commit",
    "kafkalog.storage_engine.metadata.journal",
    "kafkalog.storage_engine.directory.appender",
    "kafkalog.storage_engine.format.batch",
    "kafkalog.storage_engine.object_store.client",
    "kafkalog.storage_engine.reading.directory_snapshot",
    "kafkalog.cleaner.schedule.thread",
    "kafkalog.cleaner.schedule.manager",
    "kafkalog.cleaner.report.status",
    "kafkalog.cleaner.report.explain",
    "kafkalog.cleaner.metrics",
    "kafkalog.cleaner.spark",
    "kafkalog.datasource.ktable",
    "kafkalog.datasource.register",
]
"""Modules whose import is free of the heavy packages: 0.7 s and 110 MiB in every fresh worker."""
PICKLED = {
    "pyspark_kafkalog": ["kafkalog.datasource.range_reader", "kafkalog.sink.writer", "numpy"],
    "kafkalog.datasource.stream_reader": ["numpy"],
}
"""Modules that each Python process of a query imports, and what it needs only to read or write."""
FILE_CALLS = {
    *("open", "fdopen", "read", "write", "pread", "preadv", "pwrite", "pwritev", "readv", "writev"),
    *("fsync", "fdatasync", "sync", "rename", "replace", "renames", "link", "symlink"),
    *("unlink", "remove", "removedirs", "rmdir", "mkdir", "makedirs", "mkfifo", "mknod"),
    *("truncate", "ftruncate", "posix_fallocate", "posix_fadvise", "utime", "chmod", "chown"),
    *("listdir", "scandir", "walk", "fwalk", "statvfs", "fstatvfs", "lockf", "sendfile"),
    *("copy_file_range", "splice", "memfd_create", "openpty", "setxattr", "removexattr"),
}
"""The functions of `os` that open, list, change, sync, rename or remove files."""
FILE_MODULES = {"fcntl", "glob", "mmap", "shutil", "tempfile"}
"""Modules that do the same."""
FILE_METHODS = {
    *("iterdir", "glob", "rglob", "walk", "unlink", "rename", "rmdir", "mkdir", "touch", "chmod"),
    *("read_bytes", "read_text", "write_bytes", "write_text", "symlink_to", "hardlink_to"),
}
"""The methods of `Path` that do; also `open`, and `replace` with one argument."""
IO_OPEN = {("io", "open"), ("io", "FileIO"), ("codecs", "open"), ("builtins", "open")}
NO_PATHS = {"files", "file_system.current", "kafkalog", "KeyIndex", "os", *dict(IO_OPEN)}
"""What has such a method, and is no `Path`."""
FILES_OUTSIDE = {
    ("__init__.py", "rglob"): "looks for its own compiled modules",
    ("cli/__init__.py", "os.open"): "the standard streams of the process",
    ("cli/__init__.py", "os.fdopen"): "the standard streams of the process",
    ("cli/status.py", "write_bytes"): "the picture's target may be a pipe or a device",
}
"""Files that are not a log's, and why their callers need no other file system."""
CLOCK_READERS = {"storage_engine/fs/clock.py"}
"""The surfaces, where `now_ms=None` means now."""
CLOCK_ROOMS = {"datasource", "sink"}
CLOCKS = {("time", "time"), ("time", "time_ns"), ("datetime", "now"), ("datetime", "utcnow")}
SEGMENT_SUFFIXES = {
    *(".log", ".index", ".timeindex", ".txnindex", ".snapshot"),
    *(".cleaned", ".swap", ".deleted", ".staged"),
}


def name_of(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


def room_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE).parts
    return parts[0] if len(parts) > 1 else ""


def place_of(module: str) -> str:
    """Return the innermost room of a module `kafkalog.a.b`, a leaf, or "" for the package's top."""
    parts = module.split(".")[1:]
    for length in range(len(parts), 0, -1):
        place = "/".join(parts[:length])
        if place in ROOMS or place in LEAVES:
            return place
    return ""


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


@cache
def imports(path: Path) -> Iterable[tuple[str, bool]]:
    return tuple(_imports(path))


@cache
def calls(path: Path) -> Iterable[tuple[str, str, int]]:
    return tuple(_calls(path))


@pytest.fixture(autouse=True, scope="module")
def sources_are_read() -> None:
    """Read every source once, before the first test."""
    for path in SOURCES:
        imports(path)
        calls(path)


def _imports(path: Path) -> Iterator[tuple[str, bool]]:
    tree = tree_of(path)
    inside = {
        id(node)
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for node in ast.walk(function)
    }
    typing_only = {
        id(node)
        for test in ast.walk(tree)
        if isinstance(test, ast.If) and "TYPE_CHECKING" in ast.unparse(test.test)
        for statement in test.body
        for node in ast.walk(statement)
    }
    for node in ast.walk(tree):
        if id(node) in typing_only:
            continue
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, id(node) not in inside
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name_of(path)}: line {node.lineno}: relative import"
            yield str(node.module), id(node) not in inside
            for alias in node.names:
                yield f"{node.module}.{alias.name}", id(node) not in inside


def _calls(path: Path) -> Iterator[tuple[str, str, int]]:
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Attribute):
            yield ast.unparse(node.value), node.attr, node.lineno


def test_rooms_import_only_downwards() -> None:
    faults = []
    for path in SOURCES:
        name = name_of(path)
        room = place_of(".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts))
        if room not in ROOMS or name in FACES:
            continue
        for module, is_top in imports(path):
            target = place_of(module)
            if not module.startswith("kafkalog.") or target in {room, *LEAVES}:
                continue
            outer = room.split("/")[0], target.split("/")[0]
            if target not in ROOMS or ROOMS.index(target) < ROOMS.index(room):
                faults.append(f"{name} imports {module}, which is above it")
            elif outer in NOT_BELOW:
                faults.append(f"{name} imports {module}")
            elif is_top and outer in ONLY_INSIDE_FUNCTIONS:
                faults.append(f"{name} imports {module} outside a function")
    assert faults == []


def test_the_plan_knows_no_kind_of_log_and_no_files() -> None:
    used = uses(
        PACKAGE / "cleaner" / "plan.py",
        [f"kafkalog.{name_of(p)[:-3].replace('/', '.')}" for p in SOURCES],
    )
    assert {place_of(module) for module in used} == {
        "storage_engine/format",
        "storage_engine/metadata",
    }


def uses(path: Path, modules: Collection[str]) -> set[str]:
    """Return the modules of `modules` that a file names in imports, those for types included."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                module = f"{node.module}.{alias.name}"
                found.add(module if module in modules else str(node.module))
    return found & set(modules)


def test_neither_kind_of_log_knows_the_other() -> None:
    """Imports under `if TYPE_CHECKING:` and inside functions count too."""
    rooms = {
        room: [*(PACKAGE / "storage_engine" / room).glob("*.py")]
        for room in ("directory", "object_store")
    }
    modules = {
        room: {f"kafkalog.storage_engine.{room}.{path.stem}" for path in paths}
        for room, paths in rooms.items()
    }
    assert [
        f"{name_of(path)} imports {module}"
        for room, other in (("directory", "object_store"), ("object_store", "directory"))
        for path in rooms[room]
        for module in uses(path, modules[other])
    ] == []


def test_few_modules_ask_for_the_kind_of_a_log() -> None:
    """A module that is given a log of one kind, and imports its class for types, does not ask."""
    assert {
        name_of(path)
        for path in SOURCES
        if not name_of(path).startswith("storage_engine/")
        and any(module.rsplit(".", 1)[-1] in KINDS for module, _ in imports(path))
    } == MAY_ASK_THE_KIND


def test_no_modules_import_each_other_in_a_circle() -> None:
    """Imports under `if TYPE_CHECKING:` and inside functions count too."""
    names = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
        for path in SOURCES
    }
    order = graphlib.TopologicalSorter(
        {name: uses(path, names) - {name} for name, path in names.items()}
    )
    try:
        order.prepare()
    except graphlib.CycleError as fault:
        pytest.fail(" imports ".join(reversed(fault.args[1])))


def test_pyspark_stays_in_its_rooms() -> None:
    assert [
        name_of(path)
        for path in SOURCES
        if room_of(path) not in PYSPARK_ROOMS
        and name_of(path) not in {"spark_release.py", "spark_results.py"}
        and any(module.split(".")[0] == "pyspark" for module, _ in imports(path))
    ] == []


def test_a_kernel_file_imports_only_what_is_compiled_with_it() -> None:
    compiled = {"codes", "layout", "ops", *(sheet.stem for sheet in SHEETS)}
    assert [
        f"{name_of(sheet)} imports {module}"
        for sheet in SHEETS
        for module, _ in imports(sheet.with_suffix(".py"))
        if module.split(".")[0] not in {"__future__", "typing", "array"}
        and not (PACKAGE.parent / module.replace(".", "/")).is_dir()
        and module.rsplit(".", 1)[-1] not in compiled
    ] == []


def test_every_kernel_is_compared_with_a_naive_twin() -> None:
    faults = []
    for sheet in SHEETS:
        directory = ROOT / "tests" / "unit" / room_of(sheet)
        tests = "".join(test.read_text() for test in directory.glob("test_*kernels.py"))
        for name in re.findall(r"^cpdef (?!inline )\w+ (\w+)\(", sheet.read_text(), re.MULTILINE):
            if f"{name}(" not in tests:
                faults.append(f"{name_of(sheet)}: {name} has no test")
    assert faults == []


def test_every_function_of_a_kernel_file_has_its_types_in_the_sheet() -> None:
    made_at_import = {"crc32_tables"}
    for sheet in SHEETS:
        defined = re.findall(r"^def (\w+)", sheet.with_suffix(".py").read_text(), re.MULTILINE)
        typed = re.findall(
            r"^cp?def (?:inline )?\w+ (\w+)\(.*?\) noexcept nogil$",
            sheet.read_text(),
            re.MULTILINE | re.DOTALL,
        )
        assert set(defined) - made_at_import == set(typed), name_of(sheet)


def file_calls(path: Path) -> Iterator[tuple[str, int]]:
    """Yield (call, line) of everything in a file that opens, lists or changes files."""
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.Import):
            for module in FILE_MODULES.intersection(alias.name for alias in node.names):
                yield module, node.lineno
        elif isinstance(node, ast.ImportFrom):
            for name in (alias.name for alias in node.names):
                if node.module in FILE_MODULES:
                    yield str(node.module), node.lineno
                elif (node.module == "os" and name in FILE_CALLS) or (node.module, name) in IO_OPEN:
                    yield f"{node.module}.{name}", node.lineno
        elif isinstance(node, ast.Attribute):
            owner = ast.unparse(node.value)
            if (owner == "os" and node.attr in FILE_CALLS) or (owner, node.attr) in IO_OPEN:
                yield f"{owner}.{node.attr}", node.lineno
            elif node.attr in FILE_METHODS and owner not in NO_PATHS:
                yield node.attr, node.lineno
        elif isinstance(node, ast.Call):
            function = node.func
            if isinstance(function, ast.Name) and function.id == "open":
                yield "open", node.lineno
            elif (
                isinstance(function, ast.Attribute) and ast.unparse(function.value) not in NO_PATHS
            ):
                is_replace = len(node.args) == 1 and not node.keywords
                if function.attr == "open" or (function.attr == "replace" and is_replace):
                    yield function.attr, node.lineno


def test_files_are_opened_listed_changed_and_locked_in_fs_alone() -> None:
    found = [
        (name_of(path), call, line)
        for path in SOURCES
        if not name_of(path).startswith("storage_engine/fs/")
        for call, line in file_calls(path)
    ]
    assert [one for one in found if one[:2] not in FILES_OUTSIDE] == []
    assert {one[:2] for one in found} == FILES_OUTSIDE.keys()


def test_the_calls_on_files_are_in_file_system_alone() -> None:
    """Another file system, given to `file_system.replaced`, then sees all of them."""
    calls = {
        (path.name, call)
        for path in SOURCES
        if name_of(path).startswith("storage_engine/fs/") and path.name != "file_system.py"
        for call, _ in file_calls(path)
    }
    assert calls == {
        ("change_signal.py", "os.read"),  # a queue of events, not a file
        ("files.py", "open"),  # it opens through `file_system`
        ("host.py", "read_text"),  # of the system, not of a log
        ("lock_wait.py", "read_text"),
        ("locks.py", "fcntl"),  # its constants
    }


@pytest.mark.parametrize(
    "source",
    [
        *("os.open(path, 0)", "from os import listdir", "open(path)", "io.open(path)"),
        *("path.open('rb')", "Path(x).replace(target)", "[*path.iterdir()]", "path.mkdir()"),
        *("import shutil", "from tempfile import mkdtemp", "import fcntl", "os.walk(path)"),
        *("each = map(os.unlink, paths)", "path.read_bytes()", "path.write_text('x')"),
    ],
)
def test_a_call_on_files_is_found(source: str, tmp_path: Path) -> None:
    path = tmp_path / "source.py"
    path.write_text(source)
    assert len(list(file_calls(path))) == 1


def test_a_call_that_only_looks_like_one_on_files_does_not_count(tmp_path: Path) -> None:
    path = tmp_path / "source.py"
    path.write_text(
        "text.replace('a', 'b'); replace(row, key=1); files.rename(a, b); kafkalog.open(path); "
        "os.fstat(fd); os.close(fd); self.open = {}; when.replace(tzinfo=None)"
    )
    assert list(file_calls(path)) == []


def test_layouts_are_in_layout_alone() -> None:
    faults = []
    for path in SOURCES:
        if name_of(path) == "storage_engine/format/layout.py":
            continue
        # `struct flock` of the system is no layout of the log.
        is_lock = name_of(path) == "storage_engine/fs/locks.py"
        if not is_lock and any(module == "struct" for module, _ in imports(path)):
            faults.append(f"{name_of(path)} imports struct")
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.Constant) and node.value in SEGMENT_SUFFIXES:
                faults.append(f"{name_of(path)}:{node.lineno} spells {node.value!r}")
    assert faults == []


def test_batches_are_stamped_in_one_place() -> None:
    assert {
        name_of(path)
        for path in SOURCES
        for owner, attribute, _ in calls(path)
        if owner == "layout" and attribute.startswith("STAMP")
    } == {"storage_engine/format/stamping.py"}


def test_time_is_an_argument() -> None:
    faults = []
    for path in SOURCES:
        name = name_of(path)
        if room_of(path) in CLOCK_ROOMS or name.startswith(tuple(CLOCK_READERS)):
            continue
        for owner, attribute, line in calls(path):
            if (owner.rsplit(".", 1)[-1], attribute) in CLOCKS:
                faults.append(f"{name}:{line} reads the clock")
    assert faults == []


def test_no_module_named_after_nothing() -> None:
    nothing = {"utils.py", "util.py", "helpers.py", "common.py", "misc.py", "base.py"}
    assert [name_of(path) for path in SOURCES if path.name in nothing] == []


def test_errors_are_ours_and_never_swallowed_whole() -> None:
    faults = []
    for path in SOURCES:
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.ExceptHandler) and node.type is None:
                faults.append(f"{name_of(path)}:{node.lineno} bare except")
            if isinstance(node, ast.Raise) and node.exc is not None:
                raised = ast.unparse(node.exc)
                if raised.startswith(("Exception(", "BaseException(", "RuntimeError(")):
                    faults.append(f"{name_of(path)}:{node.lineno} raises {raised[:40]}")
    assert faults == []


def loaded_by(modules: list[str], heavy: list[str]) -> list[str]:
    program = (
        "import importlib, sys\n"
        f"for name in {modules!r}: importlib.import_module(name)\n"
        f"print([name for name in {heavy!r} if name in sys.modules])\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True, cwd=ROOT
    )
    loaded: list[str] = ast.literal_eval(result.stdout)
    return loaded


def test_planning_and_commit_import_nothing_heavy() -> None:
    heavy = ["pyarrow", "pandas", "pyspark", "prometheus_client", "obstore"]
    assert loaded_by(LIGHT, heavy) == []


def test_the_modules_that_spark_only_makes_and_pickles_import_no_log() -> None:
    store = "kafkalog.storage_engine.directory.readable_directory"
    for module, unneeded in PICKLED.items():
        assert loaded_by([module], [store, *unneeded]) == []


def test_a_status_loads_no_numpy() -> None:
    assert loaded_by(["kafkalog.cleaner.report.status"], ["numpy"]) == []


def test_the_view_of_a_directory_loads_nothing_of_a_store() -> None:
    modules = ["kafkalog.cleaner.shelves", "kafkalog.cleaner.directory.directory_moment"]
    store = ["kafkalog.storage_engine.object_store.object_log", "kafkalog.cleaner.objects"]
    assert loaded_by([*modules, "kafkalog.cli.status_rows"], store) == []


def test_the_checksum_comes_without_the_packages_metadata() -> None:
    """Email, zipfile and csv are a third of what a fresh worker would import."""
    assert loaded_by(["kafkalog.storage_engine.format.checksum"], ["email", "zipfile", "csv"]) == []


def test_dir_shows_what_a_user_may_use_and_nothing_else() -> None:
    import kafkalog

    shown = dir(kafkalog)
    assert set(shown) == {*kafkalog.__all__, "cleaner", "errors", "sink"}
    assert all(hasattr(kafkalog, name) for name in shown)


def test_a_log_offers_what_a_user_may_do_and_nothing_else() -> None:
    from kafkalog.log import KafkaLog

    topics = {"create_topic", "topics", "describe", "alter_topic", "delete_topic", "offsets"}
    writing = {"append", "append_raw", "producer", "delete_records"}
    reading = {"read", "follow", "latest", "table", "lookup", "offset_for_time"}
    cleaning = {"clean", "cleaner", "status", "explain", "erase", "occurrences"}
    public = topics | writing | reading | cleaning | {"root", "close"}
    assert {name for name in dir(KafkaLog) if not name.startswith("_")} == public
    assert KafkaLog.__mro__ == (KafkaLog, object)


def test_version_is_the_same_everywhere() -> None:
    import tomllib

    import kafkalog

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["version"] == kafkalog.__version__
    assert f"## {kafkalog.__version__}" in (ROOT / "CHANGELOG.md").read_text().replace(
        "[", ""
    ).replace("]", "")


def test_an_error_names_the_packages_of_an_extra_as_the_project_does() -> None:
    import tomllib

    from kafkalog.extras import PACKAGES

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    assert {name: tuple(extras[name]) for name in PACKAGES} == PACKAGES


def test_rooms_are_found_without_an_import_of_their_own() -> None:
    used = (
        "kafkalog.sink.Append, kafkalog.sink.upsert.SQLiteUpsert, kafkalog.cleaner.CleanerConfig, "
        "kafkalog.errors.KafkaLogError"
    )
    program = (
        "import sys, kafkalog\n"
        "assert not [name for name in sys.modules if name.startswith('kafkalog.')]\n"
        f"{used}\n"
        "assert not hasattr(kafkalog, 'nothing') and not hasattr(kafkalog.sink, 'nothing')\n"
        "heavy = {'pyarrow', 'pandas', 'pyspark'}\n"
        "assert not heavy & sys.modules.keys(), heavy & sys.modules.keys()\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, cwd=ROOT)


def test_class_names_are_unique() -> None:
    """A name that begins with an underscore is its file's own."""
    names = Counter(
        node.name
        for path in SOURCES
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    )
    assert [name for name, count in names.items() if count > 1] == []
