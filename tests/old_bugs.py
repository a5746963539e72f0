"""Ten old bugs, each of which comes back when a switch asks for it; its tests must fail then.

    KAFKALOG_OLD_BUG=NAME python -m pytest ...

The variable names a bug of `OLD_BUGS`. The package `tests` reads it before anything imports
kafkalog. The module that had the bug is then compiled from a source with one text replaced. Each
process that a test starts inherits the variable.

These ten would lose, double or reveal records without an error. test_old_bugs.py brings each of
them back, and its tests must fail with the message that belongs to this bug.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.util import spec_from_file_location
from pathlib import Path
from types import CodeType, ModuleType
from typing import Final
from xml.etree import ElementTree

from tests import ROOT

__all__ = ["HARMLESS", "OLD_BUGS", "SWITCH", "OldBug", "bring_back", "old_bug", "unnoticed"]

SWITCH: Final = "KAFKALOG_OLD_BUG"


@dataclass(frozen=True, slots=True, kw_only=True)
class OldBug:
    """A fault of kafkalog or of another cleaner, and the tests that notice it."""

    name: str
    fault: str
    """One sentence."""
    module: str
    before: str
    """A text of the module's source, found there once."""
    after: str
    """The text in its place that brings the bug back."""
    tests: tuple[str, ...]
    """Tests below tests/. Each fails, with all its parameters unless it names one."""
    sign: str
    """A pattern of the lines that say at what, and why, a test fails."""

    @property
    def path(self) -> Path:
        """The file of the module."""
        return ROOT.joinpath(*self.module.split(".")).with_suffix(".py")

    def source(self) -> str:
        """Return the module's source with the bug.

        Raises ValueError unless the source has the text `before` once.
        """
        text = self.path.read_text()
        count = text.count(self.before)
        if count != 1:
            raise ValueError(
                f"{self.path}: the text that the old bug {self.name!r} replaces is not there once "
                f"(expected 1, found {count} of {self.before!r}). Change the bug's text."
            )
        return text.replace(self.before, self.after)


OLD_BUGS: Final = (
    OldBug(
        name="lost-commit",
        fault="A commit that follows a failed one does not sync the name of its segment's file.",
        module="kafkalog.storage_engine.directory.active_segment",
        before="self.has_new_name = size == 0",
        after="self.has_new_name = False",
        tests=("torture/test_failed_calls.py::test_the_name_of_an_emptied_segment_is_synced",),
        sign="is lost",
    ),
    OldBug(
        name="batch-twice",
        fault="A clock that jumps ahead lets a micro-batch that comes again land twice.",
        module="kafkalog.storage_engine.metadata.writer",
        before="known.time_ms < min(now_ms, state.time_ms) - WRITER_RETENTION_MS",
        after="known.time_ms < now_ms - WRITER_RETENTION_MS",
        tests=(
            "acceptance/test_limits.py::"
            "test_a_clock_that_skips_the_time_writers_are_remembered_forgets_them_until_it_is_back",
        ),
        sign="nobody at once",
    ),
    OldBug(
        name="unsynced-plan",
        fault="A commit does not sync Spark's plan of the micro-batch, so a power cut changes it.",
        module="kafkalog.sink.writer",
        before="        sync_plan(self._checkpoint(messages), batchId)\n",
        after="",
        tests=(
            "unit/sink/test_sink_attempts.py::"
            "test_the_plan_of_a_micro_batch_is_durable_before_its_rows",
        ),
        sign=r"in synced\[:rows_are_in\]",
    ),
    OldBug(
        name="damaged-batch",
        fault="A batch with a wrong checksum counts as the end of its segment (crabka).",
        module="kafkalog.storage_engine.segment.open_segment",
        before="records.check_crcs(buffer, checked, path=path, file_position=position)\n",
        after="""\
try:
                records.check_crcs(buffer, checked, path=path, file_position=position)
            except CorruptBatchError:
                return
""",
        tests=(
            "unit/rules/test_regressions.py::test_what_lies_behind_a_bad_batch_is_never_dropped",
        ),
        sign="assert None is not None",
    ),
    OldBug(
        name="half-a-swap",
        fault="A damaged offset in half a swap removes sound segments above the swap.",
        module="kafkalog.storage_engine.segment.segments",
        before="    if last in ends or not base <= last < end:\n",
        after="    if True:\n",
        tests=(
            "unit/storage_engine/test_segments.py::"
            "test_damaged_offsets_of_a_swap_take_no_sound_segment_along[1-4]",
        ),
        sign=r"assert bases == \[0, 30\]",
    ),
    OldBug(
        name="early-tombstone",
        fault="A tombstone goes once its file is old, whenever it was first cleaned (KAFKA-4529).",
        module="kafkalog.cleaner.rewrite.retention_rules",
        before="            _is_expired(table, self.now_ms),\n",
        after="""\
            _is_expired(
                table,
                layout.INT64_MAX
                if run.path.stat().st_mtime * 1000 < self.now_ms
                else self.now_ms,
            ),
""",
        tests=(
            "unit/cleaner/test_regressions.py::"
            "test_a_tombstone_in_an_old_file_waits_for_its_full_time",
        ),
        sign=r"assert b'a' in \{",
    ),
    OldBug(
        name="early-marker",
        fault="A marker goes before its data if other segments have the data (KAFKA-8351).",
        module="kafkalog.cleaner.rewrite.round",
        before="        records_before, bytes_before = rules.stats.left_out\n",
        after="""\
        entries_of = self.work.aborted_entries
        transactions = rules.transactions = CleanedTransactions(rules.snapshot, entries_of)
        records_before, bytes_before = rules.stats.left_out
""",
        tests=(
            "unit/rules/test_regressions.py::"
            "test_a_transaction_over_many_segments_is_whole_or_gone",
        ),
        sign=r"assert \(5 in log.offsets\(\)\) ==",
    ),
    OldBug(
        name="latest-record",
        fault="A marker removes the latest record whose key is the marker's (KAFKA-14055).",
        module="kafkalog.cleaner.dedup.transactions",
        before="return ~chunk.table.is_control & ~outcomes.is_aborted(chunk)",
        after="return ~outcomes.is_aborted(chunk)",
        tests=(
            "unit/rules/test_regressions.py::"
            "test_records_with_the_key_of_a_marker_and_markers_pass_each_other_by",
        ),
        sign=r"assert \(\{.*\}, True\) == \(\{.*: 0.*\}, True\)",
    ),
    OldBug(
        name="erased-copy",
        fault="The proof of an erasure looks at each file once, and misses a copy that moves.",
        module="kafkalog.erasure.topic_scan",
        before="        if is_stable:\n",
        after="        is_stable = True\n        if is_stable:\n",
        tests=(
            "unit/cleaner/test_topic_scan.py::test_what_is_replaced_during_the_search_is_looked_at_too",
        ),
        sign=r"assert paths >= set\(directory\(log\)",
    ),
    OldBug(
        name="open-transaction",
        fault="A committed read passes the last stable offset, into open transactions.",
        module="kafkalog.datasource.range_reader",
        before="if start < end and end > self.options.latest_offset(state):",
        after="if start < end and end > last:",
        tests=(
            "unit/datasource/test_batch_reader.py::"
            "test_a_committed_read_never_reaches_into_an_open_transaction",
        ),
        sign="DID NOT RAISE",
    ),
)
HARMLESS: Final = replace(
    OLD_BUGS[0], name="harmless", fault="There is no fault.", after=f"{OLD_BUGS[0].before}  # again"
)
"""No bug at all, so nothing may notice it."""


# --- the switch ----------------------------------------------------------------------------------


def old_bug(name: str) -> OldBug:
    """Return a bug by its name; raises ValueError for an unknown one."""
    for bug in (*OLD_BUGS, HARMLESS):
        if bug.name == name:
            return bug
    names = ", ".join(bug.name for bug in OLD_BUGS)
    raise ValueError(
        f"{SWITCH}: no old bug has this name (expected one of {names}, found {name!r}). Name one."
    )


def bring_back(name: str) -> None:
    """Bring a bug back in this process, before its module is imported.

    Raises ValueError for an unknown name, and for a module that lacks the text.
    """
    bug = old_bug(name)
    if bug.module in sys.modules:
        raise ValueError(f"{SWITCH}: {bug.module} is imported already. Import `tests` first.")
    sys.meta_path.insert(0, _Finder(bug))


class _Finder(MetaPathFinder):
    """Finds the module of a bug, and no other."""

    def __init__(self, bug: OldBug) -> None:
        self._name, self._loader = bug.module, _Loader(bug)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self._name:
            return None
        return spec_from_file_location(fullname, self._loader.path, loader=self._loader)


class _Loader(SourceFileLoader):
    """Compiles a module with its bug; it neither reads nor writes a cached `.pyc`."""

    def __init__(self, bug: OldBug) -> None:
        super().__init__(bug.module, str(bug.path))
        self._source = bug.source()

    def get_code(self, fullname: str) -> CodeType:
        code: CodeType = self.source_to_code(self._source, self.path)
        return code


# --- the tests of a bug --------------------------------------------------------------------------


def unnoticed(bug: OldBug) -> list[str]:
    """Run the tests of a bug with it; return those that do not notice it, each with the reason.

    Raises RuntimeError if pytest cannot run them.
    """
    with tempfile.TemporaryDirectory() as scratch:
        report = Path(scratch, "report.xml")
        options = ("-vv", "-p", "no:cacheprovider", "--junitxml", str(report))
        run = subprocess.run(
            [sys.executable, "-m", "pytest", *options, *(f"tests/{test}" for test in bug.tests)],
            cwd=ROOT,
            env={**os.environ, SWITCH: bug.name},
            check=False,
            capture_output=True,
            text=True,
        )
        if run.returncode not in (0, 1):
            raise RuntimeError(f"{bug.name}: the tests did not run: {run.stdout}{run.stderr}")
        return list(_unnoticed(bug, ElementTree.parse(report)))


def _unnoticed(bug: OldBug, report: ElementTree.ElementTree) -> Iterator[str]:
    for case in report.iter("testcase"):
        failure = case.find("failure")
        if failure is None:
            reason = " ".join(["passed", *(f"({other.tag})" for other in case)])
            yield f"{case.get('name')}: {reason}"
            continue
        lines = (failure.text or "").splitlines()
        said = "\n".join(line for line in lines if line[:1] in (">", "E"))
        if not re.search(bug.sign, said):
            yield f"{case.get('name')}: failed for another reason: {said}"
