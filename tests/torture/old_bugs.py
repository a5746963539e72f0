"""Bring old bugs back, one by one; each must make its own tests fail.

    python -m tests.torture.old_bugs [--only NAME]

The program prints a table of the bugs, the change to the library that brings each back, and the
tests that notice it. A bug counts as caught if every one of its tests fails with the message that
is expected of this bug and of no other fault. The suite shows that the tests pass without the bug.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import Final

import pytest
from _pytest.runner import runtestprotocol

from kafkalog.cleaner import CleanerConfig
from tests import ROOT
from tests.torture import Tally, parser
from tests.torture.old_bug import OldBug
from tests.torture.old_bugs_cleaning import CLEANING
from tests.torture.old_bugs_records import RECORDS
from tests.torture.old_bugs_running import RUNNING

__all__ = ["BUGS", "bring_back"]

BUGS: Final = (*CLEANING, *RECORDS, *RUNNING)
_QUICK: Final = "cleaner/test_regressions.py::test_missing_offsets_are_passed_once[0]"
PROOFS: Final = tuple(
    OldBug(name=name, what="no bug", patch=patch, tests=(test,), sign="what no failure says")
    for name, patch, test in (
        ("harmless", lambda _: None, _QUICK),
        ("broken", lambda patch: patch.setattr(CleanerConfig, "__post_init__", None), _QUICK),
        ("forgotten", lambda _: None, "cleaner/test_regressions.py::test_that_is_no_more"),
    )
)
"""What must be told as not caught."""
PATIENCE_S: Final = 20
"""After that a test counts as one that never ends."""
EVENTUALLY_S: Final = 1.5
"""How long tests wait for what does not come any more."""


def bring_back(names: Sequence[str]) -> dict[str, list[str]]:
    """Run the tests of these bugs, each with its bug; returns by bug what is wrong with them.

    That is nothing where all of them have failed for the right reason. The work is done by another
    process, of which nothing is left.
    """
    command = [sys.executable, "-m", "tests.torture.old_bugs", "--child", *names]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not lines:
        raise RuntimeError(f"the tests were not run: {done.stdout[-2000:]}{done.stderr[-2000:]}")
    found: dict[str, list[str]] = json.loads(lines[-1])
    return found


# --- in the other process ------------------------------------------------------------------------


class _NeverEnds(BaseException):
    """A test took so long that it may be said never to end."""


class _Runs:
    """A plugin of pytest that runs tests with bugs, in place of all tests once."""

    def __init__(self, bugs: Sequence[OldBug]) -> None:
        self.wrong: dict[str, list[str]] = {}
        self._bugs = bugs

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Run every bug's tests."""
        for bug in self._bugs:
            self.wrong[bug.name] = [
                told for node_id in bug.node_ids for told in _wrong(session, bug, node_id)
            ]
        return True


def _wrong(session: pytest.Session, bug: OldBug, node_id: str) -> Iterator[str]:
    """Yield what a test, with all its parameters, says that it should not say."""
    items = [item for item in session.items if node_id in (item.nodeid, item.nodeid.split("[")[0])]
    if not items:
        yield f"{node_id}: there is no such test"
    for item in items:
        with pytest.MonkeyPatch.context() as patch:
            bug.patch(patch)
            with _impatience():
                reports = runtestprotocol(item, log=False, nextitem=None)
        failures = [report for report in reports if report.failed]
        for report in failures:
            told = _told(report)
            if report.when != "call" or not bug.is_sign(told):
                yield f"{item.nodeid}: failed for another reason: {told}"
        if not failures:
            yield f"{item.nodeid}: passed"


def _told(report: pytest.TestReport) -> str:
    """Return the lines at which a test failed, and what it says."""
    return "\n".join(line for line in report.longreprtext.splitlines() if line[:1] in (">", "E"))


@contextlib.contextmanager
def _impatience() -> Iterator[None]:
    """Let a test that does not end fail."""

    def end(_: int, __: FrameType | None) -> None:
        raise _NeverEnds("never ends")

    before = signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, PATIENCE_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _run(names: Sequence[str]) -> None:
    """Run the tests of bugs, and print what is wrong with them."""
    bugs = [bug for bug in (*BUGS, *PROOFS) if bug.name in names]
    runs = _Runs(bugs)
    files = sorted({node_id.split("::")[0] for bug in bugs for node_id in bug.node_ids})
    with contextlib.redirect_stdout(sys.stderr):
        # A thread that a test has left behind may fail when no test runs any more, to which the
        # failure could belong: that would end the run itself, after it has found out everything.
        plugins = ("no:cacheprovider", "no:threadexception", "no:unraisableexception")
        # The package has a plugin of pytest's in it, and is imported already: no matter here.
        ignored = "-Wignore::pytest.PytestAssertRewriteWarning"
        status = pytest.main(
            ["-q", ignored, *(f"-p{name}" for name in plugins), *files],
            plugins=[runs, _Eventually()],
        )
    if status not in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
        raise SystemExit(f"pytest ended with {status}")
    print(json.dumps(runs.wrong), flush=True)
    os._exit(0)  # tests that failed may have left threads that wait for what will not come


class _Eventually:
    """Lets the tests that wait for a thread wait less."""

    def pytest_collection_finish(self) -> None:
        """Change what `eventually` waits unless it is told."""
        from tests.unit.cleaner import test_manager

        test_manager.eventually.__defaults__ = (EVENTUALLY_S,)


# --- the program ---------------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table, and what came of every bug."""
    made = parser("old_bugs", __doc__)
    made.add_argument("--child", nargs="+", metavar="NAME", help="print what one process finds out")
    options = made.parse_args(arguments)
    if options.child:
        _run(options.child)
        return
    bugs = [bug for bug in BUGS if options.only in (None, bug.name)]
    if not bugs:
        made.error(f"no bug {options.only}; there are {', '.join(bug.name for bug in BUGS)}")
    tally = Tally("old_bugs", "old bugs brought back, each caught", options)
    wrong = bring_back([bug.name for bug in bugs])
    tests = 0
    for bug in bugs:
        tally.tried()
        tests += len(bug.tests)
        if not options.json:
            print(f"{bug.name}: {bug.what}", *(f"    {test}" for test in bug.tests), sep="\n")
        if wrong[bug.name]:
            tally.violated(bug.name, f"{bug.name}: " + "; ".join(wrong[bug.name]))
    tally.more["tests_that_fail"] = tests
    tally.report()


if __name__ == "__main__":
    main()
