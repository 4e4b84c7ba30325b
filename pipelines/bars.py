"""Progress on a terminal: a bar for every running stage, and the story of the run scrolling by above."""

from __future__ import annotations

from collections.abc import Mapping
from typing import IO, Any, Self

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, SpinnerColumn, Task, TaskID, TextColumn
from rich.table import Column
from rich.text import Text

from headwater.pipelines.pace import duration
from headwater.pipelines.progress import Story

_REFRESH_PER_SECOND = 4


class Bars:
    """Draws on a terminal. Lines that are said scroll above the bars and stay."""

    def __init__(self, stream: IO[str]) -> None:
        self._console = Console(file=stream, highlight=False)
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}", table_column=Column(no_wrap=True)),
            BarColumn(bar_width=24),
            _Rows(),
            _Rates(),
            _Left(),
            console=self._console,
            refresh_per_second=_REFRESH_PER_SECOND,
            transient=True,
        )
        self._story = Story(self._say)
        self._tasks: dict[str, TaskID] = {}

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def __call__(self, event: Mapping[str, Any]) -> None:
        self._story.hear(event)
        for stage in self._tasks.keys() - self._story.running.keys():
            self._progress.remove_task(self._tasks.pop(stage))
        for stage, pace in self._story.running.items():
            if stage not in self._tasks:
                self._tasks[stage] = self._progress.add_task(stage, total=None, pace=pace)
            self._progress.update(self._tasks[stage], completed=pace.done, total=pace.total)

    def _say(self, text: str) -> None:
        stage, colon, rest = text.partition(": ")
        line = Text.assemble((stage, "bold"), colon, rest) if colon else Text(text)
        self._console.print(line, soft_wrap=True)


class _Rows(ProgressColumn):
    """`512/2,000`, or how long a stage that counts nothing has been at it."""

    def render(self, task: Task) -> Text:
        if task.total is None:
            return Text(duration(task.elapsed or 0.0), style="progress.elapsed")
        return Text(f"{int(task.completed):,}/{int(task.total):,}", style="progress.download")


class _Rates(ProgressColumn):
    """Rows and tokens per second, and what the run has cost so far."""

    def render(self, task: Task) -> Text:
        pace = task.fields["pace"]
        parts = []
        if rate := pace.rows_per_second:
            parts.append(f"{rate:,.{1 if rate < 100 else 0}f} rows/s")
        if tokens := pace.tokens_per_second:
            parts.append(f"{tokens:,.0f} tok/s")
        if pace.dollars:
            parts.append(f"${pace.dollars:,.4f}")
        return Text("  ".join(parts), style="progress.data.speed")


class _Left(ProgressColumn):
    """The time that is left."""

    def render(self, task: Task) -> Text:
        left = task.fields["pace"].seconds_left
        return Text("" if left is None else f"{duration(left)} left", style="progress.remaining")
