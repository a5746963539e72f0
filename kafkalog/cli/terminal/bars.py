"""Bars on a terminal's standard error: what is done, how fast it goes, how long the rest takes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from rich import progress as bars
from rich.console import Console
from rich.text import Text

__all__ = ["bar"]


class _Rate(bars.ProgressColumn):
    """How many of what is counted are done in a second."""

    def render(self, task: bars.Task) -> Text:
        speed = task.finished_speed or task.speed
        if speed is None:
            return Text("")
        return Text(f"{speed:,.0f}/s" if speed >= 10 else f"{speed:.1f}/s")


@contextlib.contextmanager
def bar(
    title: str, total: int | None, *, is_bytes: bool
) -> Iterator[Callable[[int, int | None], None]]:
    """Show a bar; yields what sets how much is done, and of how much (None: nobody knows)."""
    columns: list[bars.ProgressColumn] = [bars.TextColumn(title), bars.BarColumn()]
    if is_bytes:
        columns += [bars.DownloadColumn(), bars.TransferSpeedColumn()]
    else:
        columns += [bars.MofNCompleteColumn(), _Rate()]
    columns.append(bars.TimeRemainingColumn())
    # What is printed meanwhile goes to another stream: nothing of it is to be caught.
    with bars.Progress(
        *columns,
        console=Console(stderr=True),
        transient=True,
        redirect_stdout=False,
        redirect_stderr=False,
    ) as shown:
        task = shown.add_task(title, total=total)
        yield lambda done, of: shown.update(task, completed=done, total=of)
