"""`pipeline rows`: look at rows in the terminal."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import orjson
from rich.table import Table
from rich.text import Text

from headwater.core.errors import ConfigError
from headwater.core.store import Workspace
from headwater.flows.runs import Run
from headwater.pipelines.tables import console

if TYPE_CHECKING:
    import polars as pl

_SHOWN_CHARACTERS = 600


def show_rows(run: Run, workspace: Workspace, *, stage: str | None, rejects: bool, count: int, as_json: bool) -> None:
    """Print the first `count` rows of the dataset, of a stage, or of what was rejected.

    Raises ConfigError when the run has no such stage or no dataset yet.
    """
    found, total = _rejects(run, workspace, stage, count) if rejects else _rows(run, workspace, stage, count)
    if as_json:
        for row in found:
            click.echo(orjson.dumps(row, default=str))
        return
    out = console()
    for number, row in enumerate(found, 1):
        out.print(f"row {number} of {total:,}", style="bold")
        out.print(_record(row))
    if not found:
        out.print("No rejected rows." if rejects else "No rows.")


def _rows(run: Run, workspace: Workspace, stage: str | None, count: int) -> tuple[list[dict[str, Any]], int]:
    files = run.output(workspace, stage).data_files if stage else _dataset(run)
    return _first(files, count)


def _dataset(run: Run) -> list[Path]:
    files = sorted((run.path / "dataset").glob("*.parquet"))
    if not files:
        raise ConfigError(
            f"Run {run.name} has no dataset yet (it is {run.status}).",
            todo=f"Look at a stage with --stage; it has: {', '.join(run.lineage) or 'none yet'}.",
        )
    return files


def _rejects(run: Run, workspace: Workspace, stage: str | None, count: int) -> tuple[list[dict[str, Any]], int]:
    found: list[dict[str, Any]] = []
    total = 0
    for name in [stage] if stage else list(run.lineage):
        files = sorted((run.output(workspace, name).path / "rejects").glob("*.parquet"))
        rows, there = _first(files, count - len(found))
        found += [{"stage": name, **row} for row in rows]
        total += there
    return found, total


def _first(files: list[Path], count: int) -> tuple[list[dict[str, Any]], int]:
    """The first `count` rows of some Parquet files, and how many they hold together."""
    import polars as pl

    lazy: pl.LazyFrame = pl.scan_parquet(files)
    total = int(lazy.select(pl.len()).collect().item())
    return lazy.head(count).collect().to_dicts() if count > 0 else [], total


def _record(row: dict[str, Any]) -> Table:
    """One row as two columns, name and value: rows of text are too wide to stand side by side."""
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True, style="cyan")
    table.add_column(overflow="fold")
    for name, value in row.items():
        table.add_row(name, Text(_readable(value)))
    table.add_row("", "")
    return table


def _readable(value: Any) -> str:
    if isinstance(value, list) and value and all(isinstance(item, dict) and "role" in item for item in value):
        text = "\n".join(f"[{message['role']}] {message.get('content')}" for message in value)
    elif isinstance(value, str):
        text = value
    else:
        text = orjson.dumps(value, default=str).decode()
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}… ({len(text):,} characters)"
