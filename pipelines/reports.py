"""`pipeline report`: where a run's report is; it is written anew when it is missing."""

from __future__ import annotations

from pathlib import Path

from headwater.core.errors import ConfigError
from headwater.core.store import Workspace
from headwater.flows.execute import write_report
from headwater.flows.runs import Run
from headwater.pipelines.recipes import build


def report_path(run: Run, workspace: Workspace) -> Path:
    """The run's `report.html`. Raises ConfigError when the run has not finished and so has nothing to report."""
    path = run.path / "report.html"
    if path.exists():
        return path
    status = run.status
    if status != "done":
        raise ConfigError(
            f"Run {run.name} has no report: it is {status}.",
            todo="`pipeline status` shows where it stands; run the pipeline again to finish it.",
        )
    recipe = build(run.recipe, f"{run.path / 'recipe.yaml'}")
    write_report(recipe, run, {name: run.output(workspace, name) for name in run.lineage})
    return path
