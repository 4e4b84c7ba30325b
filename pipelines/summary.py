"""What `pipeline run` says at the end."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import click

from headwater.llm.registry import ENGINES
from headwater.pipelines.pace import duration

if TYPE_CHECKING:
    from pathlib import Path

    from headwater.flows.execute import Execution

_LABEL_WIDTH = 9
_SHOWN_REASONS = 3


def print_summary(execution: Execution, state: Mapping[str, Any]) -> None:
    """Rows, where everything is, what was reused, what it used and cost."""
    run = execution.run
    seconds = state["ended"] - state["started"]
    click.echo(f"{run.name}: {state['rows']:,} rows in {duration(seconds)}.")
    for label, text in (
        ("dataset", str(run.path / "dataset")),
        ("card", str(run.path / "README.md")),
        ("report", str(run.path / "report.html")),
        ("stages", _stages(execution)),
        *(("rejects", line) for line in _rejects(execution)),
        ("tokens", _tokens(state["meter"])),
        ("cost", _cost(execution, state)),
        ("load", _load(run.path, state["rows"])),
    ):
        click.echo(f"  {label:<{_LABEL_WIDTH}}{text}")


def _load(path: Path, rows: int) -> str:
    """`datasets` refuses a split without rows ("corresponds to no data") unless it is streamed."""
    return f"datasets.load_dataset({str(path)!r}{'' if rows else ', streaming=True'})"


def _stages(execution: Execution) -> str:
    made = [name for name, result in execution.results.items() if not result.reused]
    total = len(execution.results)
    if not made:
        return f"reused all {total} stages"
    if len(made) == total:
        return f"made all {total}"
    return f"reused {total - len(made)} of {total}; made {', '.join(made)}"


def _rejects(execution: Execution) -> list[str]:
    lines = []
    for name, result in execution.results.items():
        manifest = result.output.manifest
        reasons = sorted(manifest["reasons"].items(), key=lambda reason: -reason[1])
        if reasons:
            listed = ", ".join(f"{reason} {count:,}" for reason, count in reasons[:_SHOWN_REASONS])
            more = ", …" if len(reasons) > _SHOWN_REASONS else ""
            counts = manifest["counts"]
            lines.append(f"{name}: {counts['rejected']:,} of {counts['attempted']:,} ({listed}{more})")
    return lines


def _tokens(meter: Mapping[str, Any]) -> str:
    if not meter["calls"]:
        return "none used by this run"
    cached = f" ({meter['tokens_cached']:,} cached)" if meter["tokens_cached"] else ""
    return f"{meter['tokens_in']:,} in{cached}, {meter['tokens_out']:,} out, {meter['calls']:,} calls"


def _cost(execution: Execution, state: Mapping[str, Any]) -> str:
    """This run's dollars; with what earlier, interrupted attempts at the same rows cost when that is more."""
    spent = state["meter"]["dollars"]
    whole = sum(result.output.manifest["meter"]["dollars"] for result in execution.results.values())
    text = f"${spent:,.4f}"
    if whole > spent:
        text += f" by this run, ${whole:,.4f} for all its rows since they were first made"
    unpriced = sorted(set(state["unpriced"]) & _served_models(execution))
    if unpriced:
        text += f"; not counted: {', '.join(unpriced)} (no price in the recipe's `prices`)"
    return text


def _served_models(execution: Execution) -> set[str]:
    """Models that answered from a server. One that runs in this process costs nothing per token."""
    served = {name for name, kind in ENGINES.items() if not kind.local}
    return {
        identity["model"]
        for result in execution.results.values()
        for identity in result.output.manifest["models"].values()
        if identity["engine"] in served
    }
