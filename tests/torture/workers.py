"""The processes that share a program's work: none outlives it, and the death of one is told."""

from __future__ import annotations

import ctypes
import itertools
import multiprocessing
import signal
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from typing import Any, Final, Self, TypeVar

__all__ = ["WorkerDied", "Workers", "die_with_parent"]

_DIE_WITH_PARENT: Final = 1  # PR_SET_PDEATHSIG
Task = TypeVar("Task")
Result = TypeVar("Result")


class WorkerDied(Exception):
    """A process ended in the middle of its work; `tasks` are those that were being done."""

    def __init__(self, tasks: list[Any]) -> None:
        super().__init__(f"a process died that worked on one of {tasks}")
        self.tasks = tasks


class Workers:
    """Processes, forked or spawned, each of which does one task at a time; a context manager."""

    def __init__(
        self, jobs: int, begin: Callable[[], None] | None = None, *, kind: str = "fork"
    ) -> None:
        """`begin` is done once by each process, before its first task."""
        self._jobs = jobs
        self._others = {*multiprocessing.active_children()}
        context = multiprocessing.get_context(kind)
        self._pool = ProcessPoolExecutor(jobs, context, _begin, (begin,))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """End all processes, whatever they are doing."""
        for process in {*multiprocessing.active_children()} - self._others:
            process.kill()
            process.join()
        self._pool.shutdown(cancel_futures=True)

    def results(self, work: Callable[[Task], Result], tasks: Iterable[Task]) -> Iterator[Result]:
        """Yield what comes of tasks, as it comes; none begins long before it is wanted.

        Raises WorkerDied.
        """
        rest = iter(tasks)
        running: dict[Future[Result], Task] = {}
        try:
            while True:
                for task in itertools.islice(rest, self._jobs - len(running)):
                    running[self._pool.submit(work, task)] = task
                if not running:
                    return
                for future in wait(running, return_when=FIRST_COMPLETED).done:
                    yield future.result()
                    del running[future]
        except BrokenProcessPool:
            raise WorkerDied([*running.values()]) from None


def die_with_parent() -> None:
    """Let this process be killed when the one that forked it ends, however that does."""
    ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL)


def _begin(more: Callable[[], None] | None) -> None:
    """Of a process: it ends when it is told to, at once, and with its parent."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    die_with_parent()
    if more is not None:
        more()
