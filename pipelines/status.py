"""`pipeline status`: where a run stands, read from its folder and the store; no process is asked."""

from __future__ import annotations

import contextlib
import json
import sqlite3
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headwater.core.events import read_events
from headwater.core.store import Workspace
from headwater.flows.runs import Run
from headwater.pipelines.pace import Pace, duration
from headwater.pipelines.tables import console, plain_table


@dataclass
class StageStatus:
    """One stage of a run as its events tell it."""

    name: str
    state: str = "waiting"
    """`waiting`, `running`, `done`, `reused`, or how the run ended while it was running."""
    rows: int | None = None
    rejected: int | None = None
    seconds: float | None = None
    pace: Pace | None = None
    fingerprint: str = ""
    """Digest of the output that is being made."""
    kept: int | None = None
    """Rows that its journal holds, for a row stage that has not finished."""


@dataclass
class Standing:
    """Where a run stands."""

    status: str
    stages: dict[str, StageStatus] = field(default_factory=dict)
    last_event: float = 0.0
    """Unix time of the last sign of life."""


def standing(run: Run, workspace: Workspace) -> Standing:
    """Read where `run` stands."""
    found = Standing(run.status)
    for event in read_events(run.events_path):
        found.last_event = float(event["time"])
        _take(found, event)
    for stage in found.stages.values():
        if stage.state == "running" and found.status != "running":
            stage.state = found.status
        if stage.pace is not None:
            stage.kept = _journalled(workspace, stage.fingerprint)
    _count_rows(found, run, workspace)
    return found


def show_status(run: Run, workspace: Workspace) -> None:
    """Print where `run` stands and what to do next."""
    found = standing(run, workspace)
    state = run.state
    out = console()
    out.print(f"{run.name}: {_headline(found, state)}", markup=False, soft_wrap=True)
    table = plain_table("stage", "state", "rows", "rejected", "seconds", "progress")
    for column in table.columns[2:5]:
        column.justify = "right"
    for stage in found.stages.values():
        table.add_row(
            stage.name,
            stage.state,
            *("" if n is None else f"{n:,}" for n in (stage.rows, stage.rejected)),
            "" if stage.seconds is None else f"{stage.seconds:,.1f}",
            _progress(stage),
        )
    out.print(table)
    if error := state.get("error"):
        out.print(f"{error} {state.get('todo', '')}".strip(), markup=False, soft_wrap=True)
    if found.status == "killed":
        out.print("Its process is gone. Run the pipeline again: it goes on at the first missing row.", soft_wrap=True)
    if found.status == "done":
        for name in ("dataset", "README.md", "report.html"):
            out.print(f"  {run.path / name}", markup=False, soft_wrap=True)


def _headline(found: Standing, state: dict[str, Any]) -> str:
    finished = sum(stage.state in ("done", "reused") for stage in found.stages.values())
    text = f"{found.status}, {finished} of {len(found.stages)} stages finished"
    if found.status == "done":
        text += f", {state['rows']:,} rows in {duration(state['ended'] - state['started'])}"
    if found.status == "running" and found.last_event:
        text += f", last event {duration(max(0.0, time.time() - found.last_event))} ago"
    return text


def _progress(stage: StageStatus) -> str:
    if stage.pace is None:
        return ""
    if stage.state == "running":
        return stage.pace.describe()
    if stage.kept is None:
        return ""
    return (
        f"{stage.kept:,} rows kept" if stage.pace.total is None else f"{stage.kept:,} of {stage.pace.total:,} rows kept"
    )


def _take(found: Standing, event: dict[str, Any]) -> None:
    kind = event["kind"]
    if kind == "run_started":
        found.stages = {name: StageStatus(name) for name in event["stages"]}
        return
    stage = found.stages.get(event.get("stage", ""))
    if stage is None:
        return
    if kind == "stage_started":
        stage.state, stage.pace = "running", Pace(stage.name, float(event["time"]))
        stage.fingerprint = str(event["fingerprint"])
    elif kind == "progress":
        stage.pace = stage.pace or Pace(stage.name, float(event["time"]))
        stage.pace.update(event)
    elif kind == "stage_finished":
        stage.state, stage.pace = ("reused" if event["reused"] else "done"), None
        stage.seconds = None if event["reused"] else float(event["seconds"])


def _count_rows(found: Standing, run: Run, workspace: Workspace) -> None:
    for name, entry in run.lineage.items():
        stage = found.stages.setdefault(name, StageStatus(name, "done"))
        manifest = _manifest(workspace.stages / entry["output"])
        stage.rows = int(entry["rows"])
        if manifest is None:
            stage.state = "output gone"
        else:
            stage.rejected = int(manifest["counts"]["rejected"])


def _journalled(workspace: Workspace, fingerprint: str) -> int | None:
    """Rows in the journal of the output with this fingerprint; None when there is no journal."""
    for path in (workspace.stages / ".journals").glob(f"*-{fingerprint}.sqlite"):
        try:
            with contextlib.closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as journal:
                return int(journal.execute("SELECT COUNT(*) FROM rows").fetchone()[0])
        except sqlite3.Error:
            return None
    return None


def _manifest(path: Path) -> dict[str, Any] | None:
    try:
        manifest: dict[str, Any] = json.loads((path / "manifest.json").read_text("utf-8"))
    except (OSError, ValueError):
        return None
    return manifest
