"""`pipeline show`: what a recipe means and what running it would take."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import yaml
from rich.console import Console
from rich.table import Table

from headwater.core.redact import redact_values
from headwater.core.store import Workspace
from headwater.flows.plan import Plan, PlannedNode, make_plan
from headwater.flows.rates import Rates
from headwater.pipelines.pace import duration
from headwater.pipelines.tables import console, plain_table

if TYPE_CHECKING:
    from headwater.flows.recipe import Recipe

_SHOWN_DIFFERENCES = 6


def show_recipe(recipe: Recipe, workspace: Workspace) -> None:
    """Print the resolved recipe, the stages, what would be reused and a forecast. Runs nothing, loads no weights."""
    out = console()
    plan = make_plan(recipe, workspace)
    text = yaml.safe_dump(redact_values(recipe.resolved()), sort_keys=False, allow_unicode=True, width=100)
    _heading(out, "Recipe")
    out.print(text.rstrip(), markup=False, highlight=False, soft_wrap=True)
    _heading(out, "Stages")
    out.print(_stages(plan))
    _heading(out, "Reuse")
    for line in _reuse(plan):
        out.print(line, markup=False, highlight=False, soft_wrap=True)
    if plan.to_make:
        _heading(out, "Forecast")
        out.print(_forecast(plan.to_make))
        for line in _totals(plan.to_make, Rates(workspace)):
            out.print(line, markup=False, highlight=False, soft_wrap=True)


def _heading(out: Console, text: str) -> None:
    out.print(f"\n{text}", style="bold", highlight=False)


def _stages(plan: Plan) -> Table:
    table = plain_table("node", "stage", "reads", "columns out")
    for planned in plan.nodes:
        node = planned.node
        reads = [
            f"{source} ({', '.join(node.stage.inputs.get(name, ())) or 'all'})" for name, source in node.inputs.items()
        ]
        table.add_row(
            node.name, f"{node.stage.name} v{node.stage.version}", "\n".join(reads), ", ".join(node.stage.output.names)
        )
    return table


def _reuse(plan: Plan) -> list[str]:
    total, missing = len(plan.nodes), plan.to_make
    if plan.unsure:
        return [f"It can't be told what would be reused: {plan.unsure}"]
    if not missing:
        return [f"All {total} stages are there: a run would reuse them."]
    first = missing[0].node.name
    lines = [f"{total - len(missing)} of {total} stages would be reused; the first to be made is {first}."]
    if plan.why:
        lines.append(f"Its newest earlier output differs in: {'; '.join(plan.why[:_SHOWN_DIFFERENCES])}")
    else:
        lines.append("It was not made here before.")
    return lines


def _forecast(nodes: Sequence[PlannedNode]) -> Table:
    table = plain_table("node", "rows", "calls", "tokens in", "tokens out", "seconds", "dollars", numbers=True)
    for planned in nodes:
        forecast = planned.forecast
        calls = [f"{n:,}" if forecast.calls else "" for n in (forecast.calls, forecast.tokens_in, forecast.tokens_out)]
        seconds = "unknown" if planned.seconds is None else f"{'~' * planned.rough}{planned.seconds:,.0f}"
        dollars = "no price" if planned.dollars is None else f"{planned.dollars:,.4f}" if forecast.calls else ""
        table.add_row(planned.node.name, f"{forecast.rows:,}", *calls, seconds, dollars)
    return table


def _totals(nodes: Sequence[PlannedNode], rates: Rates) -> list[str]:
    tokens_in = sum(planned.forecast.tokens_in for planned in nodes)
    tokens_out = sum(planned.forecast.tokens_out for planned in nodes)
    calls = sum(planned.forecast.calls for planned in nodes)
    lines = [f"In all: {calls:,} calls, {tokens_in:,} tokens in, {tokens_out:,} tokens out."]
    lines.append(_time(nodes))
    lines.append(_money(nodes))
    for model in sorted({planned.forecast.model for planned in nodes if planned.forecast.calls}):
        rate = rates.tokens_per_second(model)
        measured = f"{rate:,.0f} tokens/s, measured in earlier runs here" if rate else "not measured here yet"
        lines.append(f"Speed of {model}: {measured}.")
    return lines


def _time(nodes: Sequence[PlannedNode]) -> str:
    known = sum(planned.seconds for planned in nodes if planned.seconds is not None)
    unknown = [planned.node.name for planned in nodes if planned.seconds is None]
    rough = [planned.node.name for planned in nodes if planned.rough]
    if len(unknown) == len(nodes):
        return "Time: unknown; nothing comparable was measured in this workspace yet."
    text = f"Time: about {_roughly(known) if rough else duration(known)}"
    if len(rough) + len(unknown) == len(nodes):
        text += " (rough: nothing was measured here yet)"
    elif rough:
        text += f" (rough: not measured here yet: {', '.join(rough)})"
    return f"{text}, without {', '.join(unknown)} (not measured here yet)." if unknown else f"{text}."


def _roughly(seconds: float) -> str:
    """`1 s`, `40 s`, `4 min`, `3 h`: no more digits than a guess has."""
    if seconds < 60:
        return f"{max(1, round(seconds))} s"
    return f"{round(seconds / 60)} min" if seconds < 90 * 60 else f"{round(seconds / 3600)} h"


def _money(nodes: Sequence[PlannedNode]) -> str:
    known = sum(planned.dollars for planned in nodes if planned.dollars is not None)
    unpriced = sorted({planned.forecast.model for planned in nodes if planned.dollars is None})
    text = f"Cost: ${known:,.4f}"
    return f"{text}, without {', '.join(unpriced)} (no price in the recipe's `prices`)." if unpriced else f"{text}."
