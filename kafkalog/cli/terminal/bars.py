"""Bars on a terminal's standard error: the amount done, the speed, and the time left."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from rich import progress as bars
from rich.console import Console
from rich.text import Text


class _Rate(bars.ProgressColumn):
    """The speed per second."""

    def render(self, task: bars.Task) -> Text:
        speed = task.finished_speed or task.speed
        if speed is None:
            return Text("")
        return Text(f"{speed:,.0f}/s" if speed >= 10 else f"{speed:.1f}/s")


@contextlib.contextmanager
def bar(title: str, *, is_bytes: bool) -> Iterator[Callable[[int, int | None], None]]:
    """Show a bar; yield a function of the amount done and the total (None: unknown)."""
    columns: list[bars.ProgressColumn] = [bars.TextColumn(title), bars.BarColumn()]
    if is_bytes:
        columns += [bars.DownloadColumn(), bars.TransferSpeedColumn()]
    else:
        columns += [bars.MofNCompleteColumn(), _Rate()]
    columns.append(bars.TimeRemainingColumn())
    # Other output goes to the standard output and must not be captured.
    with bars.Progress(
        *columns,
        console=Console(stderr=True),
        transient=True,
        redirect_stdout=False,
        redirect_stderr=False,
    ) as shown:
        task = shown.add_task(title, total=None)
        yield lambda done, of: shown.update(task, completed=done, total=of)
