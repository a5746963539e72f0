"""A micro-batch of the sink that dies at each of its moments, in processes of its own.

`python -m tests.acceptance.killed_steps DIR MODE [--adopted] [--every | --once]`. A moment is
before or after a durable act (`fs.files`). At each one in turn a process kills itself with
SIGKILL, and others do at once what Spark does after such a loss. Tasks, commit and abort are called
as Spark calls them (`tests.unit.sink.spark_write`). MODE says what is lost:

- `driver`: all of the query; a new driver runs the micro-batch again;
- `task`: one attempt of a task; its next attempt follows, then the commit of the same driver;
- `commit`: the process that runs the sink's commit; the driver aborts, and the query starts again.

A line of JSON is printed for each death: the moment, and the step of the commit it stands for. Any
record lost or doubled, and any file left, is an error. Without `--every` only moments that stand
for a step are met; with `--once` one of those that are alike, where each death takes seconds.
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
import shutil
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from kafkalog.storage_engine.directory import staged_directory
from kafkalog.storage_engine.directory.directory_log import DirectoryLog
from kafkalog.storage_engine.format import layout
from kafkalog.storage_engine.fs import files
from kafkalog.storage_engine.writing import staging
from tests.builders.log_contents import values
from tests.unit.sink.spark_write import Row, SparkWrite, staged_names
from tests.unit.storage_engine.faults import ACTS

STEPS = (
    "staged",
    "verified",
    "cut",
    "appended",
    "record written",
    "record synced",
    "published",
    "before Spark's own commit",
)
TASKS = 2
PARTITIONS = 2


class Moments:
    """Names the moments of this process, and kills it at the `fatal` one."""

    def __init__(self, report: Path, fatal: int | None = None) -> None:
        self.names: list[tuple[str, str]] = []
        self._report, self._fatal = report, fatal
        self._is_verified = False
        """Whether the commit has begun to touch partitions."""
        for act in ACTS:
            setattr(files, act, self._wrapped(act, getattr(files, act)))

    def _wrapped(self, name: str, act: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(target: Any, *args: Any, **kwargs: Any) -> Any:
            kind = kind_of(target)
            is_first = not self._is_verified and kind in {"log", "index"}
            self._is_verified |= is_first
            self.pass_by(f"before {name} {kind}", "verified" if is_first else "")
            result = act(target, *args, **kwargs)
            step = step_of(name, kind, args)
            is_late = self._is_verified and step == "staged"  # of a stamped file
            self.pass_by(f"after {name} {kind}", "" if is_late else step)
            return result

        return wrapper

    def pass_by(self, moment: str, step: str) -> None:
        self.names.append((moment, step))
        if len(self.names) - 1 == self._fatal:
            self._report.write_text(json.dumps([moment, step]))
            os.kill(os.getpid(), signal.SIGKILL)

    def finish(self) -> None:
        """Tell all the moments that there were."""
        self._report.write_text(json.dumps(self.names))


def kind_of(target: Any) -> str:
    """Say what kind of file an act is about: its descriptor, or its path."""
    path = Path(os.readlink(f"/proc/self/fd/{target}")) if isinstance(target, int) else target
    name = path.name
    if layout.STAGED in name:
        return "staged"
    if name == layout.COMMIT:
        return "journal"
    if name.endswith(layout.LOG):
        return "log"
    if name.endswith((layout.INDEX, layout.TIME_INDEX)):
        return "index"
    return "directory" if path.is_dir() else name


def step_of(act: str, kind: str, args: Sequence[Any]) -> str:
    """Name the step of the commit that an act completes, "" for none."""
    if (act, kind) == ("write_at", "journal"):
        is_header = args[1] == layout.JOURNAL_PUBLISHED_POSITION
        return "published" if is_header else "record written"
    return {
        ("write_at", "staged"): "staged",
        ("truncate", "log"): "cut",
        ("remove", "log"): "cut",
        ("write_at", "log"): "appended",
        ("rename", "staged"): "appended",
        ("sync_data", "journal"): "record synced",
    }.get((act, kind), "")


def rows_of(batch_id: int, task: int) -> list[Row]:
    return [
        {"key": b"%d" % (n % 7), "value": b"%d/%d/%03d" % (batch_id, task, n)} for n in range(30)
    ]


def stage(write: SparkWrite, batch_id: int, tasks: Sequence[int] = range(TASKS)) -> list[Any]:
    return [
        write.attempt(rows_of(batch_id, task), partition=task, batch_id=batch_id) for task in tasks
    ]


def in_child(work: Callable[[], object]) -> bool:
    """Run work in a process of its own; False when that has killed itself."""
    child = os.fork()
    if child == 0:
        try:
            work()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    status = os.waitpid(child, 0)[1]
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL:
        return False
    assert status == 0, f"a child ended with {status}"
    return True


class Loss:
    """One way to lose a process in micro-batch 1, and what Spark does then."""

    def __init__(self, mode: str, root: Path) -> None:
        self.mode = mode
        self.report = root / "report"
        self.kept = root / "messages"
        self.log = root / "log"

    def write(self, run: str) -> SparkWrite:
        return SparkWrite(self.log, run=run, batch_rows=10)

    def prepare(self) -> None:
        """Do, in another process, what is before all moments."""
        if self.mode == "commit":
            in_child(lambda: self.kept.write_bytes(pickle.dumps(stage(self.write("run-1"), 1))))

    def work(self, fatal: int | None) -> None:
        """Do what is lost at the moment `fatal`."""
        write = self.write("run-1")
        messages = pickle.loads(self.kept.read_bytes()) if self.mode == "commit" else []
        moments = Moments(self.report, fatal)
        if self.mode != "commit":
            messages = stage(write, 1, [0] if self.mode == "task" else range(TASKS))
        if self.mode != "task":
            write.commit(messages, 1)
        moments.pass_by("before Spark's answer", STEPS[-1] if self.mode != "task" else "")
        moments.finish()

    def recover(self) -> None:
        """Do, in another process, what Spark does then, and the micro-batch that follows."""
        run = "run-1" if self.mode == "task" else "run-2"
        if self.mode == "commit":
            messages = pickle.loads(self.kept.read_bytes())
            in_child(lambda: self.write("run-1").abort(messages, 1))

        def again() -> None:
            write = self.write(run)
            for batch_id in (1, 2):
                write.commit(stage(write, batch_id), batch_id)

        assert in_child(again)

    def check(self, where: str) -> None:
        """Each record is there once, in the order of its key; nothing else is."""
        expected = [
            row["value"]
            for batch in range(3)
            for task in range(TASKS)
            for row in rows_of(batch, task)
        ]
        found = values(self.log)
        assert sorted(value for value in found if value is not None) == sorted(expected), where
        of_key: dict[int, list[bytes]] = {}
        for value in found:
            assert value is not None
            of_key.setdefault(int(value[-3:]) % 7, []).append(value)
        assert all(series == sorted(series) for series in of_key.values()), where
        assert staged_names(self.log) == [], where
        (writer,) = DirectoryLog(self.log, read_only=True).state().writers.values()
        assert writer.batch_id == 2, where


def prepare_log(root: Path) -> Path:
    """Make a log with one micro-batch, and of the next one what a dead commit has appended."""
    start = root / "start"
    engine = DirectoryLog(start)
    config = {"segment.bytes": "900", "index.interval.bytes": "100", "cleanup.policy": "delete"}
    engine.create_topic("t", PARTITIONS, config)
    write = SparkWrite(start, run="run-0", batch_rows=10)
    write.commit(stage(write, 0), 0)
    shutil.copytree(start, root / "log")
    lost = Loss("driver", root)
    assert in_child(lambda: lost.work(None))
    steps = [step for _, step in json.loads(lost.report.read_text())]
    last = max(number for number, step in enumerate(steps) if step == "appended")
    shutil.rmtree(root / "log")
    shutil.copytree(start, root / "log")
    assert not in_child(lambda: lost.work(last))
    shutil.rmtree(start)
    return (root / "log").rename(start)


def survey(start: Path, loss: Loss) -> list[tuple[str, str]]:
    """Return all moments, and the steps that they stand for, by passing by them alive."""
    shutil.copytree(start, loss.log)
    loss.prepare()
    assert in_child(lambda: loss.work(None))
    shutil.rmtree(loss.log)
    return [(moment, step) for moment, step in json.loads(loss.report.read_text())]


def die(start: Path, loss: Loss, fatal: int, where: str) -> None:
    """Die at one moment, recover, and look."""
    shutil.copytree(start, loss.log)
    loss.prepare()
    assert not in_child(lambda: loss.work(fatal)), where
    loss.recover()
    loss.check(where)
    shutil.rmtree(loss.log)


def main() -> int:
    """Die at each moment that completes a step, with `--every` at all, with `--once` at unlike."""
    parser = argparse.ArgumentParser()
    parser.add_argument("directory", type=Path)
    parser.add_argument("mode", choices=["driver", "task", "commit"])
    parser.add_argument("--adopted", action="store_true", help="runs large enough to be renamed")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--every", action="store_true")
    which.add_argument("--once", action="store_true")
    options = parser.parse_args()
    root: Path = options.directory
    if options.adopted:
        staged_directory.SEGMENT_RUN_SIZE = 300
        staging._GATHER_SIZE = 1
    start = prepare_log(root)
    loss = Loss(options.mode, root)
    met: set[tuple[str, str]] = set()
    for fatal, (moment, step) in enumerate(survey(start, loss)):
        if options.every or (step and not (options.once and (moment, step) in met)):
            die(start, loss, fatal, f"moment {fatal}: {moment}")
            print(json.dumps([moment, step]), flush=True)
            met.add((moment, step))
    return 0


if __name__ == "__main__":
    sys.exit(main())
